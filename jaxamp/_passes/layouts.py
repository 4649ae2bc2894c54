"""Lay out the results of low matmuls in the order of their axes, unless a reader wants another order.

Without that, XLA's layouts on a GPU follow single readers, and matmuls end up between transposes: `barriers.py` has the
measurements.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax

from .._jaxpr import Memo
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
    turned = {
        eqn.invars[0]
        for eqn, step in zip(plan.eqns, plan.steps, strict=True)
        if eqn.primitive is lax.transpose_p and step.operation is not pass_operands
    }
    changed: dict[int, Step] = {}
    ordered = Memo()  # equations of a kind share a step
    for i in matmuls:
        if plan.steps[i].operation is not None and plan.eqns[i].outvars[0] not in turned:
            changed[i] = ordered.get(plan.steps[i], None, functools.partial(_ordered, plan.steps[i]))
    return plan.with_steps(changed)


def _ordered(step: Step) -> Step:
    assert step.operation is not None
    return step._replace(operation=_then_row_major(step.operation))


def _then_row_major(operation: Operation) -> Operation:
    def ordered(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        return [row_major(out) for out in operation(eqn, operands, params)]

    return ordered
