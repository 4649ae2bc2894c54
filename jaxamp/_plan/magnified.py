"""Which values a decomposition or a solve reads.

A Cholesky decomposition or a linear solve multiplies the relative error of its matrix by the condition number. So what
makes that matrix comes out in float32, down to the matmuls; a matmul may still round its operands. Whatever lies
between a matmul and the solve passes this demand on, in other functions and in loops too.
"""

from typing import Any

import jax.extend.core as jec

from .._compat import Jaxpr, Literal, Var, open_jaxpr
from .._formats import float_dtype
from .._jaxpr import Memo
from .._traits import traits_of
from .bodies import Entry
from .higher_order import describe

_NOTHING: frozenset[Var] = frozenset()


class Magnified:
    """Finds such values, with a memory that lasts for one trace."""

    def __init__(self) -> None:
        self._found = Memo()
        self._has_solves = Memo()

    def within(self, jaxpr: Jaxpr, outs: tuple[bool, ...]) -> frozenset[Var]:
        """The variables of a jaxpr whose error is magnified. `outs`: which results are read so; empty: none."""
        if not any(outs) and not self._solves(jaxpr):
            return _NOTHING
        return self._found.get(jaxpr, outs, lambda: self._within(jaxpr, outs))

    def results(self, eqn: Any, entry: Entry, found: frozenset[Var]) -> tuple[bool, ...]:
        """Which results of a higher-order equation are read so; in a loop, by its later rounds too."""
        return self._through(eqn, entry, [v in found for v in eqn.outvars])[0]

    def _within(self, jaxpr: Jaxpr, outs: tuple[bool, ...]) -> frozenset[Var]:
        body = open_jaxpr(jaxpr)
        results = zip(body.outvars, outs, strict=bool(outs))
        found: set[Var] = {v for v, wanted in results if wanted and not isinstance(v, Literal)}
        for eqn in reversed(body.eqns):
            traits, entry = traits_of(eqn.primitive), describe(eqn)
            if traits.magnifies:
                read = [True] * len(eqn.invars)
            elif entry is not None:
                _, read = self._through(eqn, entry, [v in found for v in eqn.outvars])
            else:
                read = [not traits.matrix_unit and any(v in found for v in eqn.outvars)] * len(eqn.invars)
            pairs = zip(eqn.invars, read, strict=True)
            found.update(
                v for v, wanted in pairs if wanted and not isinstance(v, Literal) and float_dtype(v.aval) is not None
            )
        return frozenset(found)

    def _through(self, eqn: Any, entry: Entry, results: list[bool]) -> tuple[tuple[bool, ...], list[bool]]:
        """Which results and which operands of a higher-order equation are read so."""
        while True:
            operands = [False] * len(eqn.invars)
            for body in entry.bodies:
                inside = self.within(body.jaxpr, tuple(results[r] for r in body.results))
                for operand, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True):
                    operands[operand] |= var in inside
            later = [result for operand, result in entry.carries if operands[operand] and not results[result]]
            if not later:
                return tuple(results), operands
            for result in later:
                results[result] = True

    def _solves(self, jaxpr: Jaxpr) -> bool:
        """Whether there is a decomposition or a solve anywhere in a jaxpr."""
        return self._has_solves.get(
            jaxpr,
            None,
            lambda: any(
                traits_of(eqn.primitive).magnifies or any(map(self._solves, jec.jaxprs_in_params(eqn.params)))
                for eqn in open_jaxpr(jaxpr).eqns
            ),
        )
