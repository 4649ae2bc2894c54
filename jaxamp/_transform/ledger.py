"""Numbers for the steps that run, by which the tools find the step behind an equation of the resulting program."""

from collections.abc import Sequence
from typing import Any, NamedTuple

from .._compat import Jaxpr, marked, open_jaxpr, with_equations
from .._jaxpr import Memo
from .._plan.bodies import with_bodies
from .._plan.higher_order import describe
from .._plan.plan import Plan, Step
from .._plan.reasons import Reason, Why


class Record(NamedTuple):
    """A step that ran, and the user's equation that it is for."""

    eqn: Any
    step: Step


class Ledger:
    """The steps that ran, by number.

    Name stacks carry the numbers. Equations that run as written are bound with numbers in their bodies too, so that the
    derivatives of the bodies have them.
    """

    def __init__(self) -> None:
        self.records: list[Record] = []
        self.plans: list[Sequence[Step]] = []  # the steps of each plan of which some ran
        self._numbers = Memo()
        self._numbered = Memo()

    def number(self, steps: Sequence[Step], i: int, eqn: Any) -> int:
        """The number of a step of a plan, which is given out when it is first asked for."""

        def next_number() -> int:
            if not any(steps is known for known in self.plans[-1:]):
                self.plans.append(steps)
            self.records.append(Record(eqn, steps[i]))
            return len(self.records) - 1

        return self._numbers.get(steps, i, next_number)

    def numbered(self, eqn: Any, step: Step) -> Any:
        """An equation with numbers in its bodies. If a policy key keeps `amp` out of them, they share its step."""
        entry = describe(eqn)
        if entry is None:
            return eqn
        inside = step if step.reason.why is Why.INSIDE else _inside(eqn, step)
        if step.bodies:
            jaxprs = [self.jaxpr_of(plan) for plan in step.bodies]
        else:
            jaxprs = [
                self._with_numbers(body.jaxpr, (inside,) * len(open_jaxpr(body.jaxpr).eqns)) for body in entry.bodies
            ]
        return eqn.replace(params=with_bodies(eqn, entry, jaxprs))

    def jaxpr_of(self, plan: Plan) -> Jaxpr:
        """The jaxpr of a plan that changes nothing, with numbers."""
        return self._numbered.get(plan, None, lambda: self._with_numbers(plan.jaxpr, plan.steps))

    def _with_numbers(self, jaxpr: Jaxpr, steps: Sequence[Step]) -> Jaxpr:
        eqns = []
        for i, (eqn, step) in enumerate(zip(open_jaxpr(jaxpr).eqns, steps, strict=True)):
            info = eqn.source_info.replace(name_stack=marked(eqn.source_info.name_stack, self.number(steps, i, eqn)))
            eqns.append(self.numbered(eqn, step).replace(source_info=info))
        return with_equations(jaxpr, eqns)


def _inside(eqn: Any, step: Step) -> Step:
    return step._replace(reason=Reason(Why.INSIDE, (eqn.primitive.name, step.reason)))
