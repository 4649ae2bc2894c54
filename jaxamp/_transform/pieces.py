"""Run a traced function in pieces whose derivatives JAX remembers.

Under `grad` or `vmap`, JAX applies its rules to each equation, each time that a function is traced. It remembers what
it made of a jitted function. So equations are run in pieces, from a matmul to the next one, and a piece that occurs
twice, in one trace or in two, is such a function: the layers of a network are differentiated once. It is inlined where
it is called: jaxprs, source lines and scopes are those of its equations. A piece that occurs for the first time is not
worth it, and runs equation by equation.
"""

import collections
import functools
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec

from .._compat import (
    Jaxpr,
    Literal,
    Var,
    closed_jaxpr,
    consts_of,
    current_name_stack,
    open_jaxpr,
    user_context,
)
from .._jaxpr import bind, bind_once, evaluate, without_scope
from .._structure import Structure, is_plain, structure_of
from .._traits import traits_of

_REMEMBERED = 1024  # pieces
_OFTEN = 3


def run_in_pieces(fun: Callable[..., Sequence[Any]], operands: Sequence[Any]) -> list[Any]:
    """What a function of arrays returns."""
    traced = jax.make_jaxpr(fun)(*operands)
    body, outer = open_jaxpr(traced), current_name_stack()
    if body.effects:
        return evaluate(traced, operands)
    values = dict(zip((*body.constvars, *body.invars), (*consts_of(traced), *operands), strict=True))
    pieces = list(_pieces(body))
    counts = collections.Counter(piece.structure for piece in pieces)
    run = _EquationByEquation(body.eqns)
    for piece in pieces:
        structure = piece.structure
        remembered = structure is not None and (counts[structure] > 1 or _was_seen(structure))
        ins = [values[v] for v in piece.ins]
        with user_context(None, name_stack=outer + piece.scope):
            outs = _jitted(structure)(*ins) if remembered else run(piece.jaxpr, ins)
        values.update(zip(piece.outs, outs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in body.outvars]


class _Piece(NamedTuple):
    """Neighbouring equations as a closed jaxpr, with the variables that go in and come out, and the scope around."""

    jaxpr: Jaxpr
    ins: list[Var]
    outs: list[Var]
    scope: Any
    structure: Structure | None


def _pieces(body: Jaxpr) -> Iterator[_Piece]:
    groups = list(_groups(body.eqns))
    last = {v: i for i, group in enumerate(groups) for eqn in group for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(groups) for v in body.outvars if not isinstance(v, Literal)}
    for i, group in enumerate(groups):
        made = {v for eqn in group for v in eqn.outvars}
        read = (v for eqn in group for v in eqn.invars if not isinstance(v, Literal) and v not in made)
        ins, outs = list(dict.fromkeys(read)), [v for eqn in group for v in eqn.outvars if last.get(v, -1) > i]
        scope, eqns = without_scope(group)
        jaxpr = closed_jaxpr(body, ins, outs, eqns)
        yield _Piece(jaxpr, ins, outs, scope, structure_of(jaxpr))


def _groups(eqns: Sequence[Any]) -> Iterator[list[Any]]:
    """A matmul begins a group. An equation that can't be remembered is a group of its own."""
    group: list[Any] = []
    for eqn in eqns:
        plain = is_plain(eqn)
        if group and (traits_of(eqn.primitive).matrix_unit or not plain):
            yield group
            group = []
        group.append(eqn)
        if not plain:
            yield group
            group = []
    if group:
        yield group


class _EquationByEquation:
    """Runs equations. Those that occur often are functions that JAX remembers (`_jaxpr.py`)."""

    def __init__(self, eqns: Sequence[Any]):
        self._counts = collections.Counter(map(_kind, eqns))

    def __call__(self, jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
        return evaluate(jaxpr, operands, self._bind)

    def _bind(self, eqn: Any, operands: Sequence[Any]) -> list[Any]:
        return bind(eqn, operands) if self._counts[_kind(eqn)] >= _OFTEN else bind_once(eqn, operands)


def _kind(eqn: Any) -> Hashable:
    plain = traits_of(eqn.primitive).plain_params
    return plain and (eqn.primitive, tuple(eqn.params.items()), tuple(v.aval for v in eqn.invars))


@functools.lru_cache(_REMEMBERED)
def _jitted(structure: Structure) -> Callable[..., Sequence[Any]]:
    def piece(*operands: Any) -> list[Any]:
        return jec.jaxpr_as_fun(structure.jaxpr)(*operands)

    return jax.jit(piece)


def _was_seen(structure: Structure) -> bool:
    """Whether this was asked before."""
    before = _asked.cache_info().hits
    _asked(structure)
    return _asked.cache_info().hits > before


@functools.lru_cache(_REMEMBERED)
def _asked(structure: Structure) -> None:
    return None
