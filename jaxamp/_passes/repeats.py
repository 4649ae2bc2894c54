"""Compute once what a program computes twice: a matmul of the same operands, and what is made of its result alike.

A Laplacian that takes one direction after the other runs the network for each of them, and so does a loss of a function
and its derivatives. XLA merges equal operations, but it can't merge their derivatives: each operation that was written
has a cotangent of its own, with matmuls of its own. Merged before the derivative is taken, they have one cotangent.

Only matmuls, and what reads the result of one that was merged. Other operations that are written twice, such as masks,
cost little, and the passes that come next read them where they are.
"""

from collections.abc import Sequence
from typing import Any

import jax.extend.core as jec

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_equations
from .._jaxpr import Memo
from .._plan.higher_order import with_rewritten_bodies
from .._structure import Numbering
from .._traits import traits_of


def merge_repeats(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, and those inside, with matmuls that are repeated computed once; itself if none is."""
    return _merged(jaxpr, Memo())


def _merged(jaxpr: Jaxpr, known: Memo) -> Jaxpr:
    return known.get(jaxpr, None, lambda: _Body(open_jaxpr(jaxpr)).merged(jaxpr, known))


class _Body:
    """An open jaxpr whose variables are numbered: equal numbers, equal values."""

    def __init__(self, body: Any) -> None:
        self.body = body
        self.eqns: list[Any] = []
        self.numbering = Numbering()
        self.first: dict[int, Var] = {}  # variable of a number
        self.merged_into: dict[Var, Var] = {}
        self.repeated: set[int] = set()  # in `eqns`: those whose results there were before

    def merged(self, jaxpr: Jaxpr, known: Memo) -> Jaxpr:
        numbers: dict[Var, int] = {}
        for eqn in self.body.eqns:
            results = self.numbering.results(eqn, numbers)
            numbers.update(zip(eqn.outvars, results, strict=True))
            self._add(with_rewritten_bodies(eqn, lambda inside: _merged(inside, known)), results)
        outs = [self._atom(v) for v in self.body.outvars]
        if not self.merged_into and all(a is b for a, b in zip(self.eqns, self.body.eqns, strict=True)):
            return jaxpr
        return with_equations(jaxpr, self._needed(outs), outs)

    def _add(self, eqn: Any, results: Sequence[int]) -> None:
        """Add an equation, unless all its results are there. What reads a result then reads the first one."""
        read = [(v, number) for v, number in zip(eqn.outvars, results, strict=True) if type(v) is Var]  # not dropped
        there = {v: self.first[number] for v, number in read if number in self.first}
        if there and (
            _multiplies(eqn) or any(not isinstance(v, Literal) and v in self.merged_into for v in eqn.invars)
        ):
            self.merged_into.update(there)
            if len(there) == len(read):
                return
        elif there and len(there) == len(read):
            self.repeated.add(len(self.eqns))
        invars = [self._atom(v) for v in eqn.invars]
        same = all(a is b for a, b in zip(invars, eqn.invars, strict=True))
        self.eqns.append(eqn if same else eqn.replace(invars=invars))
        for v, number in read:
            self.first.setdefault(number, v)

    def _atom(self, v: Any) -> Any:
        return v if isinstance(v, Literal) else self.merged_into.get(v, v)

    def _needed(self, outs: list[Any]) -> list[Any]:
        """The equations without repeated ones that nothing reads any more."""
        read = {v for v in outs if not isinstance(v, Literal)}
        kept: list[Any] = []
        for place, eqn in reversed(list(enumerate(self.eqns))):
            if place not in self.repeated or not read.isdisjoint(eqn.outvars):
                kept.append(eqn)
                read.update(v for v in eqn.invars if not isinstance(v, Literal))
        return kept[::-1]


def _multiplies(eqn: Any) -> bool:
    """Whether it is a matmul, or has one inside."""
    if traits_of(eqn.primitive).matrix_unit:
        return True
    return any(_multiplies(inner) for body in jec.jaxprs_in_params(eqn.params) for inner in open_jaxpr(body).eqns)
