"""Make masks of positions, such as a causal one, in the shape in which they are read.

A user makes a mask of shape (queries, keys) and repeats it over heads and batch. To make it less often, XLA's softmax
kernels on a GPU then take one row of many heads at a time instead of neighbouring rows, which costs more than it saves:
0.68 against 0.23 ms for 16 times 12 heads and 1024 tokens (H200, jax 0.11). Made from positions in the shape of the
scores, a mask costs the same in any order of reading.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_equations
from .._formats import float_dtype
from .._jaxpr import Memo
from .._plan.bodies import with_bodies
from .._plan.higher_order import describe
from .._primitives.mask import MASK, Expression
from .._traits import traits_of

_LARGEST_EXPRESSION = 64  # operations in one expression
_MOST_VERSIONS = 4  # ways to rewrite one body


def spread_masks(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with masks of positions made in the shapes in which they are read; itself if it has none."""
    return _Spreader().run(jaxpr, (None,) * len(open_jaxpr(jaxpr).invars))[0]


Expressions = tuple[Expression | None, ...]  # None: the value depends on more than positions


class _Spreader:
    """Rewrites jaxprs, each once for the expressions of its operands."""

    def __init__(self) -> None:
        self._memo = Memo()

    def run(self, jaxpr: Jaxpr, ins: Expressions) -> tuple[Jaxpr, list[Expression | None]]:
        """The jaxpr rewritten, and the expressions of its results."""
        ways: dict[Expressions, tuple[Jaxpr, list[Expression | None]]] = self._memo.get(jaxpr, None, dict)
        if ins not in ways and len(ways) >= _MOST_VERSIONS:
            ins = (None,) * len(ins)
        if ins not in ways:
            ways[ins] = self._run(jaxpr, ins)
        return ways[ins]

    def _run(self, jaxpr: Jaxpr, ins: Expressions) -> tuple[Jaxpr, list[Expression | None]]:
        body, eqns = open_jaxpr(jaxpr), []
        found: dict[Var, Expression | None] = dict(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Expression | None:
            return _number(atom) if isinstance(atom, Literal) else found.get(atom)

        for eqn in body.eqns:
            new, outs = self._equation(eqn, [read(v) for v in eqn.invars])
            found.update(zip(eqn.outvars, outs, strict=True))
            eqns.append(new)
        if any(expression is not None for expression in found.values()):
            others = [eqn.invars for eqn in eqns if any(found[v] is None for v in eqn.outvars)]
            needed = {v for atoms in (*others, body.outvars) for v in atoms if not isinstance(v, Literal)}
            eqns = [_as_mask(eqn, found[eqn.outvars[0]]) if needed & {*eqn.outvars} else eqn for eqn in eqns]
        same = all(new is old for new, old in zip(eqns, body.eqns, strict=True))
        return jaxpr if same else with_equations(jaxpr, eqns), [read(v) for v in body.outvars]

    def _equation(self, eqn: Any, operands: list[Expression | None]) -> tuple[Any, list[Expression | None]]:
        """An equation with its bodies rewritten, and the expressions of its results."""
        entry = describe(eqn)
        outs: list[Expression | None] = [None] * len(eqn.outvars)
        if entry is None:
            return eqn, outs if eqn.primitive.multiple_results else [_expression(eqn, operands)]
        if entry.lazy:
            return eqn, outs
        carried, new = {operand for operand, _ in entry.carries}, []
        for body in entry.bodies:
            known = tuple(  # scalars are left out, or a layer that is called with its index would be one for each index
                operands[i] if i not in carried and var.aval.shape and eqn.invars[i].aval == var.aval else None
                for i, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True)
            )
            jaxpr, results = self.run(body.jaxpr, known)
            new.append(jaxpr)
            outs = results if traits_of(eqn.primitive).plain_call else outs
        if any(jaxpr is not body.jaxpr for jaxpr, body in zip(new, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_bodies(eqn, entry, new))
        return eqn, outs


def _as_mask(eqn: Any, expression: Expression | None) -> Any:
    """An equation that makes a mask, as one operation; other equations, and masks of a sharded type, as they are."""
    aval = eqn.outvars[0].aval
    if expression is None or describe(eqn) is not None or aval.dtype != bool or not expression.is_repeated():
        return eqn
    if any(axes is not None for axes in aval.sharding.spec):
        return eqn
    return eqn.replace(primitive=MASK, invars=[], params={"expression": expression})


def _expression(eqn: Any, operands: Sequence[Expression | None]) -> Expression | None:
    """The result of an equation of one result, if it depends on positions and constants alone."""
    out, traits = eqn.outvars[0].aval, traits_of(eqn.primitive)
    known = [operand for operand in operands if operand is not None]
    size = 1 + sum(operand.size for operand in known)
    if len(known) < len(operands) or size > _LARGEST_EXPRESSION or not traits.mask_arithmetic:
        return None
    if not _is_plain(out.dtype) or not all(isinstance(length, int) for length in out.shape):
        return None
    if float_dtype(out) is not None and not (traits.moves or traits.makes_positions or traits.passes_on):
        return None  # it rounds, and perhaps differently in another shape
    if eqn.primitive in (lax.reshape_p, lax.squeeze_p):
        plain = eqn.params["dimensions"] is None or eqn.primitive is lax.squeeze_p
        if not plain or _without_ones(out.shape) != _without_ones(known[0].shape):
            return None
    return Expression(eqn.primitive, tuple(sorted(eqn.params.items())), tuple(known), out.shape, size)


def _number(literal: Any) -> Expression | None:
    """A number by its bits, since NaN is not equal to itself."""
    shape, dtype = literal.aval.shape, literal.aval.dtype
    if shape or not _is_plain(dtype):
        return None
    return Expression(None, (("bytes", np.asarray(literal.val, dtype).tobytes()), ("dtype", dtype)), (), (), 1)


def _is_plain(dtype: Any) -> bool:
    """Whether a dtype means the same everywhere: those of 64 bits don't, without `jax_enable_x64`."""
    return isinstance(dtype, np.dtype) and dtype.kind in "biuf" and dtype.itemsize <= 4


def _without_ones(shape: Sequence[int]) -> list[int]:
    return [size for size in shape if size != 1]
