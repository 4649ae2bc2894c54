"""Run a jaxpr one equation after the other, with somebody watching.

Loops are unrolled in Python, so that the watcher sees each round. Primitives whose bodies can't be run here
(`shard_map`, kernels, callbacks) are one operation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import Jaxpr, marks_of
from .._jaxpr import bind, evaluate
from .._plan.higher_order import higher_order
from .._transform.ledger import Ledger
from .location import Place

# (equation, where it is, operands, results)
Watch = Callable[[Any, Place, Sequence[Any], Sequence[Any]], None]


class Walker:
    """Runs jaxprs on concrete arrays."""

    def __init__(self, ledger: Ledger, watch: Watch):
        self._ledger = ledger
        self._watch = watch
        self._entered: Counter[Any] = Counter()  # loops and branches, by the turns around them
        self._runs = 0  # of jaxprs

    def run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        """The results of a jaxpr that is at `place`."""
        self._runs += 1
        return self._run(jaxpr, operands, place._replace(run=self._runs))

    def _run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:

        def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            here, found = place.of(eqn, self._ledger), higher_order(eqn.primitive)
            if found is not None and found.evaluate is not None:
                is_section = not marks_of(eqn.source_info.name_stack)  # the user's equations have marks
                outs = found.evaluate(self._body_runner(here, is_section), eqn, ins)
                if outs is not None:
                    return outs
            outs = bind(eqn, ins)
            self._watch(eqn, here, ins, outs)
            return outs

        return evaluate(jaxpr, operands, apply)

    def _body_runner(self, place: Place, is_section: bool) -> Any:
        """Runs the bodies of one equation. Loops and branches are numbered, so that two runs can be compared.

        `is_section`: it is not an equation of the user, and its body is part of the run around it.
        """
        number: int | None = None

        def run(jaxpr: Jaxpr, operands: Sequence[Any], *, turn: int | None = None, in_loop: bool = False) -> list[Any]:
            nonlocal number
            if turn is None:
                return (self._run if is_section else self.run)(jaxpr, operands, place)
            if number is None:
                number = self._entered[place.turns]
                self._entered[place.turns] += 1
            rounds = (*place.rounds, turn) if in_loop else place.rounds
            return self.run(jaxpr, operands, place._replace(rounds=rounds, turns=(*place.turns, (number, turn))))

        return run
