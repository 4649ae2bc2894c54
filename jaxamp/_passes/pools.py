"""Round what a maximum over windows reads, where its result is read low.

    conv(max_pool(relu(norm(x))))

Rounding keeps the order of numbers, so the maximum of rounded numbers is the rounded maximum. XLA does not make a
pooling one kernel with the work before it: its operand is written, and read again in the backward pass, in half the
bytes if it is low.
"""

import functools

from jax import lax

from .._formats import Format
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Plan, Reader, Step

_POOLS = lax.reduce_window_max_p, lax.reduce_window_min_p


def pool_low(plan: Plan) -> Plan:
    """Let maxima and minima over windows read their operands low, if nothing reads their results in float32."""
    pools = [i for i, eqn in enumerate(plan.eqns) if eqn.primitive in _POOLS] if plan.touched else []
    readers = plan.readers() if pools else {}
    low, lowered = plan.setting.formats.low, Memo()  # equations of a kind share a step
    return plan.with_steps(
        {
            i: lowered.get(plan.steps[i], None, functools.partial(_low_step, plan.steps[i], low))
            for i in pools
            if _may_round(plan, i) and _is_read_low(plan.steps[i], readers.get(plan.eqns[i].outvars[0], []))
        }
    )


def _may_round(plan: Plan, i: int) -> bool:
    step, formats = plan.steps[i], plan.setting.formats
    return step.mode is not Mode.RULE and not step.is_pinned and formats.may_lower(plan.eqns[i].invars[0])


def _is_read_low(step: Step, readers: list[Reader]) -> bool:
    return step.outs[0].is_low or (bool(readers) and all(r.format is not None and r.format.low for r in readers))


def _low_step(step: Step, low: Format) -> Step:
    return step._replace(reads=(low,), outs=(step.outs[0]._replace(format=low),), touched=True)
