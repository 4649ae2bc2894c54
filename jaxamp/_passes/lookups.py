"""Sum the gradients of what is looked up many times in float32.

    h[senders] * weights

The gradient of a row of `h` is a sum over all who read it: thousands of edges of one node, or all places of a word. JAX
sums in the dtype of `h`. If that is the low result of a matmul, the sum stands still: to 256, bfloat16 can't add one.
Here the gradient is that of the same lookup in float32, and the values are those of the low one (`with_copy` of
`_primitives/low_copy.py`). On a GPU that is faster too, since it adds float32 numbers in memory, and has to compare and
swap for bfloat16: message passing along 200,000 edges takes 2.9 ms and not 3.9 (H200, jax 0.11).
"""

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._plan.classify import Mode
from .._plan.plan import Plan, Step
from .._primitives.low_copy import WITH_COPY


def sum_lookups(plan: Plan) -> Plan:
    """Let gathers from low arrays have gradients that are summed in float32."""
    may_lower = plan.setting.formats.may_lower
    pairs = enumerate(zip(plan.eqns, plan.steps, strict=True))
    found = [i for i, (eqn, step) in pairs if _repeats_low(eqn, step) and may_lower(eqn.invars[0])]
    operation = functools.partial(look_up, plan.setting.formats.compute_dtype)
    return plan.with_steps({i: plan.steps[i]._replace(operation=operation, touched=True) for i in found})


def _repeats_low(eqn: Any, step: Step) -> bool:
    """Whether it reads entries of a low array at given places, perhaps some of them many times."""
    if eqn.primitive is not lax.gather_p or step.mode is Mode.RULE or step.operation is not None:
        return False
    return step.reads[0] is not None and step.reads[0].low and not eqn.params["unique_indices"]


def look_up(low: np.dtype, eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    """The operation of a gather of rounded entries, from an array in this dtype or in float32."""
    x, places = operands
    copy = lax.gather_p.bind(lax.convert_element_type(x, low), places, **params)
    wide = lax.gather_p.bind(lax.convert_element_type(x, np.float32), places, **params)  # for its gradient alone
    return [lax.convert_element_type(WITH_COPY.bind(wide, copy), low)]
