"""Compute a softmax between two low matmuls, and its derivative, from its low result alone.

    y = exp(x) / sum(exp(x))          y' = y (x' - sum(y x'))

The second formula needs only the result. The derivative that JAX makes of the single operations needs the exponentials
too, in float32, while the matmul after the softmax keeps the probabilities in any case.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Literal, Var
from .._formats import Format
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Readers, Runner, Step
from .._primitives.barriers import materialize

_FLOAT32 = Format(np.dtype(np.float32))


def low_softmaxes(plan: Plan) -> Plan:
    """Run softmaxes whose results are read low as one function."""
    if not plan.touched or plan.setting.keep == "all":
        return plan
    starts = [i for i, eqn in enumerate(plan.eqns[:-3]) if eqn.primitive is lax.exp_p]
    readers = plan.readers() if starts else {}
    found = (_softmax(plan, i, readers) for i in starts)
    return plan.with_regions([softmax for softmax in found if softmax is not None])


class Softmax(NamedTuple):
    """Four neighbouring equations of a plan: exp, sum, its broadcast, division."""

    parts: tuple[Part, ...]
    last: int  # the step of the division
    operand: Any
    result: Var
    axes: tuple[int, ...]

    def with_parts(self, parts: tuple[Part, ...]) -> "Softmax":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        with runner.at(plan, self.last):
            x = env.read(self.operand, _FLOAT32)
            y = low_softmax(x, self.axes, plan.setting.formats.compute_dtype)
        env.write(self.result, y, plan.steps[self.last].outs[0]._replace(format=plan.setting.formats.low))


def _softmax(plan: Plan, i: int, readers: Readers) -> Softmax | None:
    """The softmax that begins with an exponential, if there is one."""
    exp, total, spread, div = plan.eqns[i : i + 4]
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
    read_in = [reader.format for reader in readers.get(div.outvars[0], ())]
    narrow = bool(read_in) and all(format_ is not None and format_.low for format_ in read_in)
    wide = all(_is_free_to_change(plan.steps[i + k]) for k in range(4))
    if not (chained and alone and plain and narrow and wide):
        return None
    return Softmax(tuple(range(i, i + 4)), i + 3, exp.invars[0], div.outvars[0], axes)


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
    """Whether an operation is float32 for its own sake: no user's rule and no scope of the policy pins it."""
    return step.mode is Mode.AS_WRITTEN and step.outs[0].dtype == np.float32 and not step.is_pinned


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def low_softmax(x: Any, axes: tuple[int, ...], low: np.dtype) -> Any:
    """exp(x) / sum(exp(x)) in the dtype `low`; `x` is shifted already. The result is kept for the backward pass."""
    powers = jnp.exp(x)
    return materialize(powers / powers.sum(axes, keepdims=True), low)


@low_softmax.defjvp
def _low_softmax_jvp(axes: tuple[int, ...], low: np.dtype, primals: Any, tangents: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    y = low_softmax(x, axes, low)
    return y, _tangent(axes, y, t)


def _tangent(axes: tuple[int, ...], y: Any, t: Any) -> Any:
    wide = _sum_to_one(y.astype(t.dtype), axes)
    return (wide * (t - (wide * t).sum(axes, keepdims=True))).astype(y.dtype)


@functools.partial(jax.custom_jvp, nondiff_argnums=(1,))
def _sum_to_one(y: Any, axes: tuple[int, ...]) -> Any:
    """Probabilities that sum to one again, as they did before they were rounded.

    With these, XLA makes one kernel of the derivative on a GPU (jax 0.10 and 0.11); with the rounded ones it makes two,
    and reads both operands twice. The derivative is a rule of its own, so that a checkpoint computes it again. A row
    that was rounded to zeros stays zero.
    """
    return _divided(y, axes)


@_sum_to_one.defjvp
def _sum_to_one_jvp(axes: tuple[int, ...], primals: Any, tangents: Any) -> tuple[Any, Any]:
    return jax.jvp(lambda y: _divided(y, axes), primals, tangents)


def _divided(y: Any, axes: tuple[int, ...]) -> Any:
    return y / jnp.maximum(y.sum(axes, keepdims=True), 0.5)
