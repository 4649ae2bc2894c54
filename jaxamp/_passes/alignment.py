"""Pad large matmuls whose rows don't start at multiples of 16 bytes.

    x @ embedding.T        # 50,257 words

The matrix units of GPUs load 16 bytes at a time. Where rows start in between, XLA falls back to kernels that take two
to three times as long, also for both gradients. A few zeros at the end of each row cost next to nothing: those of the
operands are written with their rounding, those of a cotangent with the work before it, and the result is read without
them. A step of a GPT-2 takes 36.7 ms and not 43.2 (H200, jax 0.11).
"""

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax
from jax.sharding import AxisType

from .._jaxpr import Memo, is_on_mesh
from .._plan.classify import Mode
from .._plan.plan import Operation, Plan, Step

_BYTES = 16
_WASTE = 1 / 64  # of an axis
_FLOPS = 2**32  # below, padding takes as long as it saves


def align_matmuls(plan: Plan) -> Plan:
    """Pad the operands of large low matmuls, and cut their results."""
    padded = Memo()  # equations of a kind share a step
    size = plan.setting.formats.compute_dtype.itemsize
    return plan.with_steps(
        {
            i: padded.get(step, None, functools.partial(_padded, step, _BYTES // size))
            for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True))
            if step.mode is Mode.LOW and eqn.primitive is lax.dot_general_p and _may_pad(eqn, step, _BYTES // size)
        }
    )


def _may_pad(eqn: Any, step: Step, multiple: int) -> bool:
    """Whether it is one matmul, which nothing splits over devices, and an axis would be padded."""
    if step.replaced or step.operation is None or eqn.params.get("out_sharding") is not None:
        return False
    shapes = [v.aval.shape for v in eqn.invars]
    if not all(isinstance(size, int) for shape in shapes for size in shape):
        return False
    if any(is_on_mesh(v.aval, AxisType.Auto, AxisType.Explicit) for v in eqn.invars):
        return False
    roles = _Roles.of(eqn.params["dimension_numbers"], *shapes)
    return roles.flops(*shapes) >= _FLOPS and any(_extra(n, multiple) for shape in shapes for n in shape)


def _extra(size: int, multiple: int) -> int:
    """How many entries an axis lacks; 0 if these would be many, next to those it has."""
    extra = -size % multiple
    return extra if extra <= _WASTE * size else 0


class _Roles(NamedTuple):
    """The axes of the operands of a `dot_general`: contracted ones, free ones, and those of a batch."""

    contracted: tuple[tuple[int, ...], tuple[int, ...]]
    free: tuple[tuple[int, ...], tuple[int, ...]]
    batch: int

    @classmethod
    def of(cls, numbers: Any, left: Sequence[int], right: Sequence[int]) -> "_Roles":
        contracted, batch = numbers
        free = [
            tuple(i for i in range(len(shape)) if i not in (*c, *b))
            for shape, c, b in zip((left, right), contracted, batch, strict=True)
        ]
        return cls((tuple(contracted[0]), tuple(contracted[1])), (free[0], free[1]), len(batch[0]))

    def flops(self, left: Sequence[int], right: Sequence[int]) -> int:
        return 2 * math.prod(left) * math.prod(right[i] for i in self.free[1])


def _padded(step: Step, multiple: int) -> Step:
    assert step.operation is not None
    return step._replace(operation=_on_padded(step.operation, multiple, step.swapped))


def _on_padded(operation: Operation, multiple: int, is_swapped: bool) -> Operation:
    """`is_swapped`: the parameters are those of the operands in the other order (`transposes.py`)."""

    def padded(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        pair = operands[::-1] if is_swapped else operands
        axes = _padded_axes(params["dimension_numbers"], [x.shape for x in pair], multiple)
        wider = [_pad(x, extra) for x, extra in zip(pair, axes.operands, strict=True)]
        (out,) = operation(eqn, wider[::-1] if is_swapped else wider, params)
        return [_cut(out, axes.result)]

    return padded


class _Axes(NamedTuple):
    """The entries to add to each axis of the operands, and those that the result has too many."""

    operands: tuple[list[int], list[int]]
    result: list[int]


def _padded_axes(numbers: Any, shapes: Sequence[Sequence[int]], multiple: int) -> _Axes:
    """Pad the last axes of the operands and of the result, where each is all that is contracted, or all that is free.

    The same axes are the last ones of what the backward pass multiplies.
    """
    roles = _Roles.of(numbers, *shapes)
    extra = [0] * len(shapes[0]), [0] * len(shapes[1])
    last_of_result = 1 if roles.free[1] else 0
    for side in (0, 1):
        last = len(shapes[side]) - 1
        if roles.contracted[side] == (last,):
            for other in (0, 1):
                extra[other][roles.contracted[other][0]] = _extra(shapes[side][last], multiple)
        if len(roles.free[side]) == 1 and (side == last_of_result or roles.free[side] == (last,)):
            (axis,) = roles.free[side]
            extra[side][axis] = _extra(shapes[side][axis], multiple)
    free = [extra[side][axis] for side in (0, 1) for axis in roles.free[side]]
    return _Axes(extra, [*([0] * roles.batch), *free])


def _pad(x: Any, extra: Sequence[int]) -> Any:
    if not any(extra):
        return x
    return lax.pad(x, x.dtype.type(0), [(0, more, 0) for more in extra])


def _cut(x: Any, extra: Sequence[int]) -> Any:
    if not any(extra):
        return x
    return lax.slice(x, [0] * x.ndim, [size - more for size, more in zip(x.shape, extra, strict=True)])
