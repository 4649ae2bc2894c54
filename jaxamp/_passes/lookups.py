"""Sum the gradients of what is looked up many times in float32.

    h[senders] * weights

The gradient of a row of `h` is a sum over all who read it: thousands of edges of one node, or all places of a word. JAX
sums in the dtype of `h`. If that is the low result of a matmul, the sum stands still: to 256, bfloat16 can't add one.
Here the rows are read in float32 and rounded again: the same numbers, and a gradient that is summed in float32. On a
GPU that is faster too, since it adds float32 numbers in memory, and has to compare and swap for bfloat16.
"""

import functools
from typing import Any

from jax import lax

from .._formats import Format
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Plan, Step


def sum_lookups(plan: Plan) -> Plan:
    """Let gathers from low arrays have gradients that are summed in float32."""
    if not plan.touched:
        return plan
    found = [i for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True)) if _repeats_low(eqn, step)]
    widened = Memo()  # equations of a kind share a step
    changed = {
        i: widened.get(plan.steps[i], None, functools.partial(_widened, plan.steps[i], wide))
        for i in found
        if (wide := plan.setting.formats.of_aval(plan.eqns[i].invars[0].aval)) is not None and not wide.low
    }
    return plan.with_steps(changed)


def _repeats_low(eqn: Any, step: Step) -> bool:
    """Whether it reads entries of a low array at given places, perhaps some of them many times."""
    if eqn.primitive is not lax.gather_p or step.mode is Mode.RULE or step.operation is not None:
        return False
    return step.reads[0] is not None and step.reads[0].low and not eqn.params["unique_indices"]


def _widened(step: Step, wide: Format) -> Step:
    return step._replace(reads=(wide, *step.reads[1:]), touched=True)
