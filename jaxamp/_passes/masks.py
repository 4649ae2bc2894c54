"""Masks of positions, such as a causal one, made in the shape in which they are read.

A user makes a mask of shape (queries, keys) and repeats it over heads and batch. To make it less often, XLA's kernels
for a softmax on a GPU then take one row of many heads at a time instead of neighbouring rows, which costs more than it
saves: 0.68 against 0.23 ms for 16 times 12 heads and 1024 tokens (H200, jax 0.11). Made of positions in the shape of
the scores, a mask costs the same in whichever order these are read.

Such a mask is one operation: on a GPU it is made so, elsewhere as it was written. Our checkpoints don't keep it.
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax.interpreters import mlir

from .._compat import Jaxpr, Literal, Primitive, Var, apply_primitive, open_jaxpr, with_equations
from .._plan.higher_order import describe, with_bodies
from .._plan.sensitivity import float_dtype
from .._traits.table import MOVES, OF_POSITIONS

MASK = Primitive("mask_of_positions")
_RESHAPES = (lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p)
_LARGEST = 64  # of an expression, in operations
_MOST = 4  # of the ways to rewrite one body

Axes = tuple[int | None, ...]  # for each axis of a value, one of a larger shape; None: its first entry is repeated


class Made(NamedTuple):
    """A value that depends on positions and constants alone: an expression."""

    primitive: Primitive | None  # None: a number
    params: tuple[tuple[str, Any], ...]
    operands: tuple["Made", ...]
    shape: tuple[int, ...]
    size: int  # in operations

    def __repr__(self) -> str:
        if self.primitive is None:
            return str(self._number())
        if self.primitive is lax.iota_p:
            return f"iota {dict(self.params)['dimension']}"
        return f"{self.primitive.name}({', '.join(map(repr, self.operands))})"

    def whole(self) -> Any:
        """The value, all operations of it in its shape."""
        return self._spread(self.shape, tuple(range(len(self.shape))))

    def written(self) -> Any:
        """The value, each operation in the shape that it was written in."""
        if self.primitive is None:
            return self._number()
        return self.primitive.bind(*(operand.written() for operand in self.operands), **dict(self.params))

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
mlir.register_lowering(MASK, mlir.lower_fun(lambda *, made: made.written(), multiple_results=False))
mlir.register_lowering(MASK, mlir.lower_fun(lambda *, made: made.whole(), multiple_results=False), platform="cuda")


def spread_masks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with masks of positions made in the shapes in which they are read; itself if it has none."""
    return _Spreader().run(jaxpr, (None,) * len(open_jaxpr(jaxpr).invars))[0]


class _Spreader:
    """Rewrites jaxprs, each once for what its operands are made of."""

    def __init__(self) -> None:
        self._done: dict[int, tuple[Jaxpr, dict[Any, tuple[Jaxpr, list[Made | None]]]]] = {}

    def run(self, jaxpr: Jaxpr, ins: tuple[Made | None, ...]) -> tuple[Jaxpr, list[Made | None]]:
        """The jaxpr rewritten, and what its results are made of."""
        _, ways = self._done.setdefault(id(jaxpr), (jaxpr, {}))  # held, so that its id stays taken
        if ins not in ways and len(ways) >= _MOST:
            ins = (None,) * len(ins)
        if ins not in ways:
            ways[ins] = self._run(jaxpr, ins)
        return ways[ins]

    def _run(self, jaxpr: Jaxpr, ins: tuple[Made | None, ...]) -> tuple[Jaxpr, list[Made | None]]:
        body, eqns = open_jaxpr(jaxpr), []
        made: dict[Var, Made | None] = dict(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Made | None:
            return _number(atom) if isinstance(atom, Literal) else made.get(atom)

        for eqn in body.eqns:
            new, outs = self._equation(eqn, [read(v) for v in eqn.invars])
            made.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(new)
        others = [eqn.invars for eqn in eqns if any(made[v] is None for v in eqn.outvars)]
        needed = {v for atoms in (*others, body.outvars) for v in atoms if not isinstance(v, Literal)}
        eqns = [_as_mask(eqn, made[eqn.outvars[0]]) if needed & {*eqn.outvars} else eqn for eqn in eqns]
        same = all(new is old for new, old in zip(eqns, body.eqns, strict=True))
        return jaxpr if same else with_equations(jaxpr, eqns), [read(v) for v in body.outvars]

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
            known = tuple(  # but for numbers: a layer that is called with its index would become one for each
                operands[i] if i not in carried and var.aval.shape and eqn.invars[i].aval == var.aval else None
                for i, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True)
            )
            jaxpr, results = self.run(body.jaxpr, known)
            new.append(jaxpr)
            outs = results if eqn.primitive.name == "jit" else outs
        if any(jaxpr is not body.jaxpr for jaxpr, body in zip(new, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_bodies(eqn, entry, new))
        return eqn, outs


def _as_mask(eqn: Any, made: Made | None) -> Any:
    """An equation that makes a mask as one operation; any other, and one that is sharded by its type, as it is."""
    aval = eqn.outvars[0].aval
    if made is None or describe(eqn) is not None or aval.dtype != bool or not made.is_repeated():
        return eqn
    if any(axes is not None for axes in aval.sharding.spec):
        return eqn
    return eqn.replace(primitive=MASK, invars=[], params={"made": made})


def _made(eqn: Any, operands: Sequence[Made | None]) -> Made | None:
    """The result of an equation of one result, if it depends on positions and constants alone."""
    out, name = eqn.outvars[0].aval, eqn.primitive.name
    known = [operand for operand in operands if operand is not None]
    size = 1 + sum(operand.size for operand in known)
    if len(known) < len(operands) or size > _LARGEST or name not in OF_POSITIONS:
        return None
    if not _is_plain(out.dtype) or not all(isinstance(length, int) for length in out.shape):  # but a symbol
        return None
    if float_dtype(out) is not None and name not in MOVES and name not in ("iota", "convert_element_type"):
        return None  # it rounds, in another shape perhaps otherwise
    if eqn.primitive in (lax.reshape_p, lax.squeeze_p):
        plain = eqn.params["dimensions"] is None or eqn.primitive is lax.squeeze_p
        if not plain or _beside_ones(out.shape) != _beside_ones(known[0].shape):
            return None
    return Made(eqn.primitive, tuple(sorted(eqn.params.items())), tuple(known), out.shape, size)


def _number(literal: Any) -> Made | None:
    """A number, by its bits: as numbers, not all are equal to themselves."""
    shape, dtype = literal.aval.shape, literal.aval.dtype
    if shape or not _is_plain(dtype):
        return None
    return Made(None, (("bytes", np.asarray(literal.val, dtype).tobytes()), ("dtype", dtype)), (), (), 1)


def _is_plain(dtype: Any) -> bool:
    """Whether a dtype means the same everywhere: those of 64 bits don't, without `jax_enable_x64`."""
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf" and dtype.itemsize <= 4


def _beside_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
