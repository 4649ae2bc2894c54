"""A mask of positions as one operation: on a GPU it is made in the shape in which it is read, elsewhere as written."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir, xla

from .._compat import Primitive
from .._traits import Traits, declare

MASK = Primitive("mask_of_positions")
declare(MASK, Traits(makes_positions=True, cheap=True))  # bools have no derivatives

_RESHAPES = (lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p)

Axes = tuple[int | None, ...]  # for each axis of a value, one of a larger shape; None: its first entry is repeated


class Expression(NamedTuple):
    """A value that depends on positions and constants alone."""

    primitive: Primitive | None  # None: a number
    params: tuple[tuple[str, Any], ...]
    operands: tuple["Expression", ...]
    shape: tuple[int, ...]
    size: int  # in operations

    def __repr__(self) -> str:
        if self.primitive is None:
            return str(self._number())
        if self.primitive is lax.iota_p:
            return f"iota {dict(self.params)['dimension']}"
        return f"{self.primitive.name}({', '.join(map(repr, self.operands))})"

    def in_full_shape(self) -> Any:
        """The value, with each operation in the shape of the result."""
        return self._spread(self.shape, tuple(range(len(self.shape))))

    def as_written(self) -> Any:
        """The value, with each operation in the shape that it was written in."""
        if self.primitive is None:
            return self._number()
        return self.primitive.bind(*(operand.as_written() for operand in self.operands), **dict(self.params))

    def is_repeated(self) -> bool:
        """Whether entries differ along some axes and not along others."""
        varies = self._varies(tuple(range(len(self.shape))))
        return bool(varies) and any(size > 1 and axis not in varies for axis, size in enumerate(self.shape))

    def _varies(self, axes: Axes) -> set[int]:
        if self.primitive is lax.iota_p:
            along = dict(self.params)["dimension"]
            return {axis for axis in [axes[along]] if axis is not None and self.shape[along] > 1}
        return {axis for operand in self.operands for axis in operand._varies(self._axes_of(operand, axes))}

    def _spread(self, shape: tuple[int, ...], axes: Axes) -> Any:
        params = dict(self.params)
        if self.primitive is None:
            return lax.full(shape, self._number())
        if self.primitive is lax.iota_p:
            dtype, axis = params["dtype"], axes[params["dimension"]]
            return lax.full(shape, 0, dtype) if axis is None else lax.broadcasted_iota(dtype, shape, axis)
        operands = [operand._spread(shape, self._axes_of(operand, axes)) for operand in self.operands]
        return operands[0] if self.primitive in _RESHAPES else self.primitive.bind(*operands, **params)

    def _number(self) -> Any:
        params = dict(self.params)
        return np.frombuffer(params["bytes"], params["dtype"])[0]

    def _axes_of(self, operand: "Expression", axes: Axes) -> Axes:
        """The axes of an operand, where `axes` are those of the result."""
        if self.primitive in (lax.reshape_p, lax.squeeze_p):  # they add or drop axes of size one
            others = iter([axis for axis, size in zip(axes, self.shape, strict=True) if size != 1])
            return tuple(None if size == 1 else next(others) for size in operand.shape)
        places: Sequence[int] = range(len(operand.shape))
        if self.primitive is lax.broadcast_in_dim_p:
            places = dict(self.params)["broadcast_dimensions"]
        pairs = zip(places, operand.shape, strict=True)
        return tuple(axes[place] if size == self.shape[place] else None for place, size in pairs)


def _type_of_mask(*, expression: Expression) -> Any:
    """That of any mask of its shape, on the mesh that is set."""
    return jax.make_jaxpr(lambda: lax.full(expression.shape, False))().out_avals[0]


MASK.def_impl(functools.partial(xla.apply_primitive, MASK))
MASK.def_abstract_eval(_type_of_mask)
mlir.register_lowering(MASK, mlir.lower_fun(lambda *, expression: expression.as_written(), multiple_results=False))
mlir.register_lowering(
    MASK, mlir.lower_fun(lambda *, expression: expression.in_full_shape(), multiple_results=False), platform="cuda"
)
