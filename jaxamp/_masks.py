"""Masks of positions, such as a causal one, made in the shape in which they are read.

A user makes a mask of shape (queries, keys) and repeats it over heads and batch. To make it less often, XLA's kernels
for a softmax on a GPU then take one row of many heads at a time instead of neighbouring rows, which costs more than it
saves: 0.71 against 0.22 ms for 16 times 12 heads and 1024 tokens (H200, jax 0.11). Made of positions in the shape of
the scores, a mask costs the same in whichever order these are read.

Such a mask is an operation of its own, so that a checkpoint makes it again and keeps none of it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from ._compat import Jaxpr, Literal, Primitive, Var, apply_primitive, open_jaxpr, varying_axes, with_equations
from ._facts import COMPARES, ELEMENTWISE
from ._higher_order import describe, with_bodies

MASK = Primitive("mask_of_positions")
_RESHAPES = (lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p)
_OPERATIONS = ELEMENTWISE | COMPARES | {lax.iota_p.name}
_LARGEST = 64  # of an expression, in operations

Axes = tuple[int | None, ...]  # for each axis of a value, one of a larger shape; None: its first entry is repeated


class Made(NamedTuple):
    """A value that depends on positions and constants alone: an expression."""

    primitive: Primitive | None  # None: a number
    params: tuple[tuple[str, Any], ...]
    operands: tuple["Made", ...]
    shape: tuple[int, ...]
    size: int  # in operations

    def __repr__(self) -> str:
        params = dict(self.params)
        if self.primitive is None:
            return str(params["value"])
        if self.primitive is lax.iota_p:
            return f"iota {params['dimension']}"
        return f"{self.primitive.name}({', '.join(map(repr, self.operands))})"

    def whole(self) -> Any:
        """The value, all operations of it in its shape."""
        return self._spread(self.shape, tuple(range(len(self.shape))))

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
            return lax.full(shape, params["value"], params["dtype"])
        if self.primitive is lax.iota_p:
            dtype, axis = params["dtype"], axes[params["dimension"]]
            return lax.full(shape, 0, dtype) if axis is None else lax.broadcasted_iota(dtype, shape, axis)
        operands = [operand._spread(shape, self._axes_of(operand, axes)) for operand in self.operands]
        return operands[0] if self.primitive in _RESHAPES else self.primitive.bind(*operands, **params)

    def _axes_of(self, operand: "Made", axes: Axes) -> Axes:
        """The axes of an operand, where `axes` are those of the result."""
        if self.primitive in (lax.reshape_p, lax.squeeze_p):  # they add or drop axes of size one
            others = iter([axis for axis, size in zip(axes, self.shape, strict=True) if size != 1])
            return tuple(None if size == 1 else next(others) for size in operand.shape)
        places: Sequence[int] = range(len(operand.shape))
        if self.primitive is lax.broadcast_in_dim_p:
            places = dict(self.params)["broadcast_dimensions"]
        pairs = zip(places, operand.shape, strict=True)
        return tuple(axes[place] if size == self.shape[place] else None for place, size in pairs)


def _type_of_mask(*, made: Made) -> Any:
    """That of any mask of its shape, on the mesh that is set."""
    return jax.make_jaxpr(lambda: lax.full(made.shape, False))().out_avals[0]


MASK.def_impl(functools.partial(apply_primitive, MASK))
MASK.def_abstract_eval(_type_of_mask)
mlir.register_lowering(MASK, mlir.lower_fun(lambda *, made: made.whole(), multiple_results=False))


def spread_masks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with masks of positions made in the shapes in which they are read; itself if it has none."""
    return _Spreader().run(jaxpr, (None,) * len(open_jaxpr(jaxpr).invars))[0]


class _Spreader:
    """Rewrites jaxprs, each once for what its operands are made of."""

    def __init__(self) -> None:
        self._done: dict[Any, tuple[Jaxpr, Jaxpr, list[Made | None]]] = {}

    def run(self, jaxpr: Jaxpr, ins: tuple[Made | None, ...]) -> tuple[Jaxpr, list[Made | None]]:
        """The jaxpr rewritten, and what its results are made of."""
        key = id(jaxpr), ins
        if key not in self._done:  # which holds the jaxpr, so that its id stays taken
            self._done[key] = jaxpr, *self._run(jaxpr, ins)
        _, new, outs = self._done[key]
        return new, outs

    def _run(self, jaxpr: Jaxpr, ins: tuple[Made | None, ...]) -> tuple[Jaxpr, list[Made | None]]:
        body, eqns = open_jaxpr(jaxpr), []
        made: dict[Var, Made | None] = dict(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Made | None:
            return _number(atom) if isinstance(atom, Literal) else made.get(atom)

        for eqn in body.eqns:
            new, outs = self._equation(eqn, [read(v) for v in eqn.invars])
            made.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(new)
        return _with_masks(jaxpr, eqns, made), [read(v) for v in body.outvars]

    def _equation(self, eqn: Any, operands: list[Made | None]) -> tuple[Any, list[Made | None]]:
        """An equation with its bodies rewritten, and what its results are made of."""
        entry = describe(eqn)
        outs: list[Made | None] = [None] * len(eqn.outvars)
        if entry is None:
            return eqn, outs if eqn.primitive.multiple_results else [_made(eqn, operands)]
        if entry.lazy:
            return eqn, outs
        carried, new = {operand for operand, _ in entry.carries}, []
        for body in entry.bodies:
            known = tuple(
                operands[i] if i not in carried and eqn.invars[i].aval == var.aval else None
                for i, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True)
            )
            jaxpr, results = self.run(body.jaxpr, known)
            new.append(jaxpr)
            outs = results if eqn.primitive.name == "jit" else outs
        if any(jaxpr is not body.jaxpr for jaxpr, body in zip(new, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_bodies(eqn, entry, new))
        return eqn, outs


def _with_masks(jaxpr: Jaxpr, eqns: list[Any], made: dict[Var, Made | None]) -> Jaxpr:
    """The jaxpr with these equations, and operations of their own for the masks that others read."""
    body = open_jaxpr(jaxpr)
    reading = [eqn for eqn in eqns if not eqn.outvars or any(made[v] is None for v in eqn.outvars)]
    read = {*_variables(body.outvars), *(v for eqn in reading for v in _variables(eqn.invars))}
    masks = {i: mask for i, eqn in enumerate(eqns) if (mask := _mask(eqn, made, read)) is not None}
    if not masks:
        same = all(new is old for new, old in zip(eqns, body.eqns, strict=True))
        return jaxpr if same else with_equations(jaxpr, eqns)
    kept: list[Any] = []
    for i in reversed(range(len(eqns))):  # without what nothing reads any more
        eqn = masks.get(i, eqns[i])
        if not eqn.outvars or any(made[v] is None or v in read for v in eqn.outvars):
            read.update(_variables(eqn.invars))
            kept.append(eqn)
    return with_equations(jaxpr, kept[::-1])


def _mask(eqn: Any, made: dict[Var, Made | None], read: set[Var]) -> Any | None:
    """The mask that an equation makes, as one operation. None if it is no such mask, or sharded by its type."""
    if len(eqn.outvars) != 1 or (var := eqn.outvars[0]) not in read or (expression := made[var]) is None:
        return None
    sharded = any(axes is not None for axes in var.aval.sharding.spec) or varying_axes(var.aval)
    if var.aval.dtype != bool or sharded or not expression.is_repeated():
        return None
    return eqn.replace(primitive=MASK, invars=[], params={"made": expression})


def _made(eqn: Any, operands: Sequence[Made | None]) -> Made | None:
    """The result of an equation of one result, if it depends on positions and constants alone."""
    known = [operand for operand in operands if operand is not None]
    size = 1 + sum(operand.size for operand in known)
    if len(known) < len(operands) or size > _LARGEST or eqn.primitive.name not in _OPERATIONS:
        return None
    shape = eqn.outvars[0].aval.shape
    if not all(isinstance(length, int) for length in shape):  # but a symbol
        return None
    if eqn.primitive in (lax.reshape_p, lax.squeeze_p) and _beside_ones(shape) != _beside_ones(known[0].shape):
        return None
    return Made(eqn.primitive, tuple(sorted(eqn.params.items())), tuple(known), shape, size)


def _number(literal: Any) -> Made | None:
    shape, dtype = literal.aval.shape, literal.aval.dtype
    if shape or not isinstance(dtype, np.dtype) or dtype.kind not in "biuf":
        return None
    return Made(None, (("dtype", dtype), ("value", np.asarray(literal.val).item())), (), shape, 1)


def _beside_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]
