"""Let pools have a gradient that suits the device (`_primitives/pool.py`)."""

import functools
from collections.abc import Sequence
from typing import Any

from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Plan, Step
from .._primitives.pool import POOLS, Windows, pool, windows_of


def pool_by_places(plan: Plan) -> Plan:
    """Give maxima and minima over windows a gradient of ours."""
    found, changed = Memo(), {}  # equations of a kind share a step
    for i, eqn in enumerate(plan.eqns):
        if eqn.primitive in POOLS and plan.steps[i].mode is not Mode.RULE:
            windows = windows_of(eqn)
            if windows is not None:
                step = functools.partial(_by_places, plan.steps[i], windows)
                changed[i] = found.get(plan.steps[i], windows, step)
    return plan.with_steps(changed)


def _by_places(step: Step, windows: Windows) -> Step:
    def operation(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        return [pool(operands[0], windows)]

    return step._replace(operation=operation, touched=True)
