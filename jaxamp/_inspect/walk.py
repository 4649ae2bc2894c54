"""Run a jaxpr one equation after the other, with somebody watching.

Loops are unrolled in Python, so that the watcher sees each round. Primitives whose bodies can't be run here (kernels,
callbacks, and `shard_map` unless it is asked for) are one operation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import Jaxpr, consts_of, marks_of, open_jaxpr, without_consts
from .._jaxpr import bind, evaluate
from .._plan.higher_order import higher_order
from .._transform.ledger import Ledger
from .location import Place
from .mapped import Mapped

# (equation, where it is, operands, results)
Watch = Callable[[Any, Place, Sequence[Any], Sequence[Any]], None]


class Walker:
    """Runs jaxprs on concrete arrays. If it enters maps, `place.mapped` says how values inside of them are held."""

    def __init__(self, ledger: Ledger, watch: Watch, enters_maps: bool = False):
        self._ledger = ledger
        self._watch = watch
        self._enters_maps = enters_maps
        self._entered: Counter[Any] = Counter()  # loops and branches, by the turns around them
        self._runs = 0  # of jaxprs

    def run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        """The results of a jaxpr that is at `place`."""
        self._runs += 1
        return self._run(jaxpr, operands, place._replace(run=self._runs))

    def _run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        mapped = place.mapped

        def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            here, found = place.of(eqn, self._ledger), higher_order(eqn.primitive)
            ins = ins if mapped is None else mapped.held(eqn.invars, ins)
            if found is not None and found.evaluate is not None:
                is_section = not marks_of(eqn.source_info.name_stack)  # the user's equations have marks
                inside = ins if mapped is None else mapped.operands(eqn, ins)
                outs = None if inside is None else found.evaluate(self._body_runner(here, is_section), eqn, inside)
                if outs is not None:
                    return outs
            outs = self._in_map(eqn, here, ins) if self._enters_maps and mapped is None else None
            if outs is None:
                outs = bind(eqn, ins) if mapped is None else mapped.bind(eqn, ins)
                self._watch(eqn, here, ins, outs)
            return outs

        if mapped is None:
            return evaluate(jaxpr, operands, apply)
        body, consts = without_consts(jaxpr) if consts_of(jaxpr) else (jaxpr, [])
        held = [mapped.hold(x, v.aval) for x, v in zip(consts, open_jaxpr(body).invars, strict=False)]

        def apply_outside(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            with mapped.outside():
                return apply(eqn, ins)

        return mapped.held(open_jaxpr(body).outvars, evaluate(body, [*held, *operands], apply_outside))

    def _in_map(self, eqn: Any, place: Place, ins: list[Any]) -> list[Any] | None:
        """The results of a `shard_map` whose body is run here; None for another equation."""
        mapped = Mapped.of(eqn)
        if mapped is None:
            return None
        inside = place._replace(mapped=mapped)
        return mapped.leave(self.run(eqn.params["jaxpr"], mapped.enter(ins), inside))

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
