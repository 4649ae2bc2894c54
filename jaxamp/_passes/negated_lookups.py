"""Write the cotangents of lookups to memory where they are negated.

    x - table[codes]        position[receivers] - position[senders]

The gradient of a table is a sum at the places that were looked up. On a GPU, XLA adds float32 numbers in memory, unless
what is added ends in a negation (seen with jax 0.11 and 0.12): that becomes a subtraction, for which there is no such
instruction, and it compares and swaps until no other thread was faster. Where many read one row, that takes a thousand
times as long: 65,536 rows into 8 take 120 ms, and .12 if the cotangent is written first (H200).
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np
from jax import lax

from .._compat import Literal, Var, open_jaxpr
from .._jaxpr import Memo, bind
from .._plan.plan import Operation, Plan
from .._primitives.barriers import materialize_cotangent
from .._traits import traits_of

_NEGATED = {lax.neg_p: 0, lax.sub_p: 1, lax.cos_p: 0}  # the operand that gets minus the cotangent, or minus a product


def write_negated_lookups(plan: Plan) -> Plan:
    """Let the cotangents of what is looked up be written where an operation negates them."""
    if not plan.touched:
        return plan
    looked_up, known, changed = dict[Var, Any](), Memo(), {}
    for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True)):
        if _is_lookup(eqn, looked_up, known):
            looked_up.update((v, value.dtype) for v, value in plan.values_of(i) if value.dtype is not None)
        place = _NEGATED.get(eqn.primitive)
        if place is not None and _is_any_of(eqn.invars[place], looked_up) and step.is_plain:
            changed[i] = step._replace(operation=_writes(looked_up[eqn.invars[place]]), touched=True)
    return plan.with_steps(changed)


def _is_any_of(atom: Any, variables: Collection[Var]) -> bool:
    return not isinstance(atom, Literal) and atom in variables


def _is_lookup(eqn: Any, looked_up: Collection[Var], known: Memo) -> bool:
    """Whether its results are what was looked up, moved or not, in a function of its own or not."""
    traits = traits_of(eqn.primitive)
    if eqn.primitive is lax.gather_p:
        return True
    if traits.plain_call:
        body = eqn.params["jaxpr"]
        return known.get(body, None, lambda: _returns_lookup(body, known))
    moves = traits.keeps_all_entries or traits.passes_on or eqn.primitive is lax.select_n_p  # 0 for what is outside
    return moves and any(_is_any_of(atom, looked_up) for atom in eqn.invars)


def _returns_lookup(body: Any, known: Memo) -> bool:
    inside, looked_up = open_jaxpr(body), set[Var]()
    for eqn in inside.eqns:
        if _is_lookup(eqn, looked_up, known):
            looked_up.update(eqn.outvars)
    return any(_is_any_of(atom, looked_up) for atom in inside.outvars)


@functools.cache
def _writes(dtype: np.dtype) -> Operation:
    """An operation whose negated cotangent is written in `dtype`."""

    def run(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        own = list(operands)
        place = _NEGATED[eqn.primitive]
        own[place] = materialize_cotangent(own[place], dtype, row_major=False)
        return bind(eqn, own, **params)

    return run
