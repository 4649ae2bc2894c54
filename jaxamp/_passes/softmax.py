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

from .._compat import Literal, Var, open_jaxpr
from .._plan.classify import How
from .._plan.plan import Plan, Reader, Step
from .._primitives.barriers import round_and_hold


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


def _softmax(plan: Plan, i: int, readers: dict[Var, list[Reader]], low: np.dtype) -> Softmax | None:
    exp, total, spread, div = open_jaxpr(plan.jaxpr).eqns[i : i + 4]
    if (total.primitive, div.primitive) != (lax.reduce_sum_p, lax.div_p) or isinstance(exp.invars[0], Literal):
        return None
    powers, axes = exp.outvars[0], tuple(map(int, total.params["axes"]))
    chained = (
        total.invars[0] is powers
        and spread.invars[0] is total.outvars[0]
        and div.invars[0] is powers
        and div.invars[1] is spread.outvars[0]
        and _keeps_places(spread, powers.aval.shape, axes)
    )
    alone = [len(readers.get(eqn.outvars[0], ())) for eqn in (exp, total, spread)] == [2, 1, 1]
    plain = exp.params.get("accuracy") is None and total.params.get("out_sharding") is None
    narrow = {reader.dtype for reader in readers.get(div.outvars[0], ())} == {low}
    wide = all(_is_free_to_change(plan.steps[i + k]) for k in range(4))
    if not (chained and alone and plain and narrow and wide):
        return None
    return Softmax(range(i, i + 4), exp.invars[0], div.outvars[0], axes)


def _keeps_places(spread: Any, shape: tuple[int, ...], axes: tuple[int, ...]) -> bool:
    """Whether a sum over `axes` is repeated along just these."""
    kept = tuple(1 if axis in axes else size for axis, size in enumerate(shape))
    if spread.primitive is lax.reshape_p:
        return spread.outvars[0].aval.shape == kept
    others = tuple(axis for axis in range(len(shape)) if axis not in axes)
    return (
        spread.primitive is lax.broadcast_in_dim_p
        and spread.outvars[0].aval.shape in (kept, shape)
        and tuple(map(int, spread.params["broadcast_dimensions"])) == others
    )


def _is_free_to_change(step: Step) -> bool:
    """Whether an operation is float32 for its own sake, and neither by a user's rule nor in a scope that pins it."""
    return step.how is How.ORIGINAL and step.outs[0].dtype == np.float32 and not isinstance(step.key, str | tuple)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def low_softmax(x: Any, axes: tuple[int, ...], low: np.dtype, in_checkpoint: bool) -> Any:
    """exp(x) / sum(exp(x)) in the dtype `low`; `x` has been shifted. A checkpoint around it keeps the result."""
    powers = jnp.exp(x)
    return round_and_hold(powers / powers.sum(axes, keepdims=True), low)


@low_softmax.defjvp
def _low_softmax_jvp(
    axes: tuple[int, ...], low: np.dtype, in_checkpoint: bool, primals: Any, tangents: Any
) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = low_softmax(x, axes, low, in_checkpoint)
    tangent = functools.partial(_tangent, axes)
    # Outside of a checkpoint, one that keeps `y` as it is and not in float32. Inside, it would keep `y` twice.
    return y, (tangent if in_checkpoint else jax.checkpoint(tangent, prevent_cse=False))(y, t)


def _tangent(axes: tuple[int, ...], y: Any, t: Any) -> Any:
    wide = _sum_to_one(y.astype(t.dtype), axes)
    return (wide * (t - (wide * t).sum(axes, keepdims=True))).astype(y.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_to_one(y: Any, axes: tuple[int, ...]) -> Any:
    """Probabilities that sum to one again, as they did before they were rounded.

    From these XLA makes one kernel of the derivative on a GPU (jax 0.10 and 0.11); without, it makes two, and reads
    both operands twice. With a derivative of its own, a checkpoint computes it again. A row that was rounded to zeros
    stays one.
    """
    return _divided(y, axes)


@_sum_to_one.defjvp
def _sum_to_one_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    return jax.jvp(lambda y: _divided(y, axes), primals, tangents)


def _divided(y: Any, axes: tuple[int, ...]) -> Any:
    return y / jnp.maximum(y.sum(axes, keepdims=True), 0.5)
