"""Softmax between two low matmuls: the scores come low, the probabilities are wanted low.

    y = exp(x) / sum(exp(x))          y' = y (x' - sum(y x'))

The second line is the derivative of the first, written with the result alone. What JAX derives from the operations
needs the exponentials, in float32, besides the probabilities, which the matmul after it keeps in any case.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import Literal, Var, open_jaxpr
from ._layout import round_and_hold
from ._plan import Plan

_SPREADS = ("broadcast_in_dim", "reshape", "expand_dims")


class Softmax(NamedTuple):
    """Four equations of a plan, one after the other: exp, sum, its repetition, division."""

    steps: range
    operand: Any
    result: Var
    axes: tuple[int, ...]


def find_softmaxes(plan: Plan, low: np.dtype) -> list[Softmax]:
    """The softmaxes of a plan that run in float32 and whose results are read low."""
    eqns = open_jaxpr(plan.jaxpr).eqns
    starts = [i for i, eqn in enumerate(eqns[:-3]) if eqn.primitive is lax.exp_p] if plan.touched else []
    if not starts:
        return []
    readers = plan.readers()
    return [found for i in starts if (found := _softmax(plan, i, readers, low)) is not None]


def _softmax(plan: Plan, i: int, readers: dict[Var, list[np.dtype | None]], low: np.dtype) -> Softmax | None:
    exp, total, spread, div = open_jaxpr(plan.jaxpr).eqns[i : i + 4]
    if (
        total.primitive is not lax.reduce_sum_p
        or spread.primitive.name not in _SPREADS
        or div.primitive is not lax.div_p
    ):
        return None
    powers, axes = exp.outvars[0], tuple(map(int, total.params["axes"]))
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(powers.aval.shape))
    chained = (
        total.invars[0] is powers
        and spread.invars[0] is total.outvars[0]
        and div.invars[0] is powers
        and div.invars[1] is spread.outvars[0]
        and spread.outvars[0].aval.shape in (kept, powers.aval.shape)
    )
    alone = [len(readers.get(eqn.outvars[0], ())) for eqn in (exp, total, spread)] == [2, 1, 1]
    wide = all(plan.steps[i + k].outs[0].dtype == np.float32 for k in range(4))
    narrow = set(readers.get(div.outvars[0], ())) == {low}
    if not (chained and alone and wide and narrow) or isinstance(exp.invars[0], Literal):
        return None
    return Softmax(range(i, i + 4), exp.invars[0], div.outvars[0], axes)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def low_softmax(x: Any, axes: tuple[int, ...], low: np.dtype) -> Any:
    """exp(x) / sum(exp(x)) in the dtype `low`; `x` has been shifted."""
    powers = jnp.exp(x)
    return round_and_hold(powers / powers.sum(axes, keepdims=True), low)


@low_softmax.defjvp
def _low_softmax_jvp(axes: tuple[int, ...], low: np.dtype, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = low_softmax(x, axes, low)
    return y, jax.checkpoint(functools.partial(_tangent, axes), prevent_cse=False)(y, t)


def _tangent(axes: tuple[int, ...], y: Any, t: Any) -> Any:
    wide = y.astype(t.dtype)
    return (wide * (t - (wide * t).sum(axes, keepdims=True))).astype(y.dtype)
