"""Let low matmuls make their results in the order of axes that a transpose, their only reader, puts them in.

A layer that is mapped over tokens, `vmap(lambda x: weight @ x)`, is a matmul with the weight first and the tokens last,
and a transpose of its result. With the operands swapped, the transpose has nothing to do. A matrix times a vector has
no axes to order; its operands are swapped too, so that `vmap` from outside puts the mapped axis first, where
activations have it.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax

from .._compat import Var
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Operation, Plan, Step
from .._plan.planner import pass_operands
from .._plan.reasons import Reason, Why
from .._policy.rules import Replacement
from .._primitives.matmul import order_when_swapped


def fold_transposes(plan: Plan) -> Plan:
    """Swap the operands of low matmuls where that makes a transpose superfluous."""
    matmuls = [i for i, step in enumerate(plan.steps) if step.mode is Mode.LOW and _is_swappable(plan.eqns[i], step)]
    readers = plan.readers() if matmuls and any(eqn.primitive is lax.transpose_p for eqn in plan.eqns) else {}
    changed: dict[int, Step] = {}
    swapped = Memo()  # equations of a kind share a step
    for i in matmuls:
        eqn, step, order = plan.eqns[i], plan.steps[i], order_when_swapped(plan.eqns[i])
        if order == tuple(range(len(order))):
            if eqn.invars[0].aval.ndim > eqn.invars[1].aval.ndim:
                changed[i] = swapped.get(step, None, functools.partial(_swapped, eqn, step, order))
            continue
        found = readers.get(eqn.outvars[0], [])
        if len(found) != 1 or found[0].place == len(plan.steps):
            continue
        place = found[0].place
        reader, after = plan.eqns[place], plan.steps[place]
        if (
            reader.primitive is lax.transpose_p
            and tuple(reader.params["permutation"]) == order
            and after.reads[0] == step.outs[0].format
        ):
            changed[i] = swapped.get(step, None, functools.partial(_swapped, eqn, step, order))
            changed[place] = swapped.get(after, None, functools.partial(_folded, after))
    return plan.with_steps(changed)


def _folded(step: Step) -> Step:
    return step._replace(operation=pass_operands, reason=Reason(Why.FOLDED), touched=True)


def _is_swappable(eqn: Any, step: Step) -> bool:
    """A rule that gives the matmul another body may tell activations from weights by their places."""
    is_plain = eqn.primitive is lax.dot_general_p and eqn.params.get("out_sharding") is None
    return is_plain and not isinstance(step.found.rule, Replacement)


def _swapped(eqn: Any, step: Step, order: tuple[int, ...]) -> Step:
    params = step.params or eqn.params
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    params = {**params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    assert step.operation is not None
    return step._replace(params=params, operation=_on_swapped(step.operation, order), order=order)


def _on_swapped(operation: Operation, order: tuple[int, ...]) -> Operation:
    def swapped(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        (out,) = (v.aval for v in eqn.outvars)
        made = Var(out.update(shape=tuple(out.shape[i] for i in order)))
        return operation(eqn.replace(invars=eqn.invars[::-1], outvars=[made]), operands[::-1], params)

    return swapped
