"""Lay out the results of low matmuls in the order of their axes, unless a reader wants another order.

Without that, XLA's layouts on a GPU follow single readers, and matmuls end up between transposes: `barriers.py` has the
measurements.
"""

from collections.abc import Sequence
from typing import Any

from jax import lax

from .._plan.classify import Mode
from .._plan.plan import Operation, Plan, Step
from .._plan.planner import pass_operands
from .._primitives.barriers import row_major


def order_results(plan: Plan) -> Plan:
    """Ask for row-major results of low matmuls."""
    matmuls = [
        i
        for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True))
        if step.mode is Mode.LOW and eqn.primitive is lax.dot_general_p and eqn.outvars[0].aval.ndim >= 2
    ]
    readers = plan.readers() if matmuls else {}
    changed: dict[int, Step] = {}
    for i in matmuls:
        places = [r.place for r in readers.get(plan.eqns[i].outvars[0], []) if r.place < len(plan.steps)]
        turned = any(
            plan.eqns[place].primitive is lax.transpose_p and plan.steps[place].operation is not pass_operands
            for place in places
        )
        operation = plan.steps[i].operation
        if not turned and operation is not None:
            changed[i] = plan.steps[i]._replace(operation=_then_row_major(operation))
    return plan.with_steps(changed)


def _then_row_major(operation: Operation) -> Operation:
    def ordered(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        return [row_major(out) for out in operation(eqn, operands, params)]

    return ordered
