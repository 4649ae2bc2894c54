"""Run a traced function in pieces whose derivatives JAX remembers.

Under `grad` or `vmap`, JAX applies its rules to each equation. It remembers what it made of a jitted function. So
equations are run in pieces, from a matmul to the next one. A piece that occurs more than once is such a function: equal
layers of a network are differentiated and lowered once. So is a piece with a checkpoint, whose rules take long: it is
worth remembering for the next trace. Source lines and scopes are those of the equations. The other pieces run equation
by equation.

What is run depends on the function and its operands alone, not on what was traced before: all processes of a cluster
must arrive at the same program.
"""

import collections
import functools
import itertools
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
    with_equations,
)
from .._jaxpr import bind, bind_once, evaluate
from .._structure import Structure, is_plain, structure_of
from .._traits import traits_of

_REMEMBERED = 1024  # pieces
_OFTEN = 3  # times


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
        remembered = structure is not None and (counts[structure] > 1 or piece.has_checkpoint)
        ins = [values[v] for v in piece.ins]
        if remembered:
            with user_context(None, name_stack=outer + piece.scope):
                outs = _jitted(structure)(*ins)
        else:
            outs = run(piece.jaxpr, ins)
        values.update(zip(piece.outs, outs, strict=True))
    return [v.val if isinstance(v, Literal) else values[v] for v in body.outvars]


class _Piece(NamedTuple):
    """Neighbouring equations as a closed jaxpr, with the variables that go in and come out."""

    jaxpr: Jaxpr
    ins: list[Var]
    outs: list[Var]
    scope: Any  # what all equations have in common
    structure: Structure | None  # of the equations inside of this scope

    @property
    def has_checkpoint(self) -> bool:
        return any(traits_of(eqn.primitive).checkpoints for eqn in open_jaxpr(self.jaxpr).eqns)


def _pieces(body: Jaxpr) -> Iterator[_Piece]:
    groups = list(_groups(body.eqns))
    last = {v: i for i, group in enumerate(groups) for eqn in group for v in eqn.invars if not isinstance(v, Literal)}
    last |= {v: len(groups) for v in body.outvars if not isinstance(v, Literal)}
    for i, group in enumerate(groups):
        made = {v for eqn in group for v in eqn.outvars}
        read = (v for eqn in group for v in eqn.invars if not isinstance(v, Literal) and v not in made)
        ins, outs = list(dict.fromkeys(read)), [v for eqn in group for v in eqn.outvars if last.get(v, -1) > i]
        scope, eqns = _without_scope(group)
        made_of = [closed_jaxpr(body, ins, outs, some) for some in (group, eqns)]
        yield _Piece(made_of[0], ins, outs, scope, structure_of(made_of[1]))


def _without_scope(eqns: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The named scopes that equations have in common, and the equations as they are inside of these.

    A checkpoint of ours has no scope itself: the equations in it have theirs. Nor have casts between two equations.
    """
    stacks = list(_stacks(eqns)) or [eqn.source_info.name_stack for eqn in eqns]
    alike = (len(set(entries)) == 1 for entries in zip(*(stack.stack for stack in stacks), strict=False))
    common = sum(itertools.takewhile(bool, alike))
    return stacks[0][:common], [_inside(eqn, common) for eqn in eqns]


def _stacks(eqns: Sequence[Any]) -> Iterator[Any]:
    for eqn in eqns:
        if _is_checkpoint_without_scope(eqn):
            yield from _stacks(eqn.params["jaxpr"].eqns)
        elif eqn.source_info.name_stack.stack or not traits_of(eqn.primitive).passes_on:
            yield eqn.source_info.name_stack


def _inside(eqn: Any, common: int) -> Any:
    """An equation without the outermost of its scopes."""
    if not common:
        return eqn
    if _is_checkpoint_without_scope(eqn):
        jaxpr = eqn.params["jaxpr"]
        inside = with_equations(jaxpr, [_inside(each, common) for each in jaxpr.eqns])
        return eqn.replace(params={**eqn.params, "jaxpr": inside})
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack[common:]))


def _is_checkpoint_without_scope(eqn: Any) -> bool:
    if not traits_of(eqn.primitive).checkpoints or eqn.source_info.name_stack.stack:
        return False
    return bool(eqn.params["jaxpr"].eqns)


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
