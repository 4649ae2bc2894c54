"""Hold values low that are read low and in float32, where that adds little error.

The sum of a skip connection is read by a convolution, low, and by the next sum, in float32. It would be written in both
dtypes, and kept for the backward pass in float32. If all that is added in it comes from low matmuls, it has the error
of a rounding already, and one more rounding costs little. A sum with something exact is not touched, nor is what an
exponential or another function has made.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any

import jax.extend.core as jec
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr
from .._formats import Format, float_dtype
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Plan, Reader, Step
from .._traits import traits_of
from .._traits.matmul_cost import size_of


def hold_streams_low(plan: Plan) -> Plan:
    """Let results that are read in both dtypes, and sums that several operations read, be held low."""
    if not plan.touched:
        return plan
    wide = [i for i in plan.parts if isinstance(i, int) and _is_wide(plan, i)]
    readers = plan.readers() if wide else {}
    mixed = [i for i in wide if _is_read_in_both(plan, i, readers.get(plan.eqns[i].outvars[0], []))]
    if not mixed:
        return plan
    rounded, magnified = _rounded(plan), _magnified(plan)
    held = Memo()  # equations of a kind share a step
    changed = {
        i: held.get(plan.steps[i], None, functools.partial(_held_low, plan.steps[i], plan.setting.formats.low))
        for i in mixed
        if plan.eqns[i].outvars[0] in rounded and plan.eqns[i].outvars[0] not in magnified
    }
    return plan.with_steps(changed)


def _is_read_in_both(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether something reads the result of a step low, or might, and nothing asks for float32."""
    return _may_round(plan, readers) and (_is_read_low(readers) or _is_shared_sum(plan, i, readers))


def _held_low(step: Step, low: Format) -> Step:
    return step._replace(outs=(step.outs[0]._replace(format=low),), touched=True)


def _is_wide(plan: Plan, i: int) -> bool:
    """Whether a step has one result, which may be held low and is not."""
    eqn, step = plan.eqns[i], plan.steps[i]
    if len(eqn.outvars) != 1 or step.mode in (Mode.RULE, Mode.CONSTANT) or step.is_pinned:
        return False
    return (
        step.outs[0].format is not None and not step.outs[0].is_low and plan.setting.formats.may_lower(eqn.outvars[0])
    )


def _may_round(plan: Plan, readers: list[Reader]) -> bool:
    """Whether no reader asks for float32: neither the user, who gets it as a result or has pinned an operation."""
    last = len(plan.eqns)
    return all(r.place < last and (not plan.steps[r.place].is_pinned or _is_low(r)) for r in readers)


def _is_low(reader: Reader) -> bool:
    return reader.format is not None and reader.format.low


def _is_read_low(readers: list[Reader]) -> bool:
    return any(map(_is_low, readers)) and not all(map(_is_low, readers))


def _is_shared_sum(plan: Plan, i: int, readers: list[Reader]) -> bool:
    """Whether it is a sum of low values that is wide for the sake of several readers. Few sums are beyond bfloat16."""
    eqn, step = plan.eqns[i], plan.steps[i]
    added = [v for v in eqn.invars if _is_large(v, eqn.outvars[0])]
    several = len({reader.place for reader in readers}) > 1 and len(added) > 1
    return traits_of(eqn.primitive).sum and step.mode is Mode.FOLLOW and several and not plan.setting.formats.is_narrow


def _is_large(atom: Any, out: Var) -> bool:
    return not isinstance(atom, Literal) and size_of(atom.aval) == size_of(out.aval) > 1


# -- what has the error of a rounding


def _rounded(plan: Plan) -> set[Var]:
    """The variables whose error is that of a low value of their size, or more.

    They are made of results of low matmuls by sums, by products with few numbers, as norms do, and by choices, as by a
    relu or a pooling. Not by an exponential or a quotient: their results may be far more exact than what they read.
    """
    rounded = {v for v, value in zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True) if value.is_low}
    repeated: set[Var] = set()  # few numbers, repeated: biases, statistics, constants
    for eqn, step in zip(plan.eqns, plan.steps, strict=True):
        floats = [v for v in eqn.invars if float_dtype(v.aval) is not None]
        own = [v for v in floats if any(_is_large(v, out) for out in eqn.outvars) and v not in repeated]
        if any(value.is_low for value in step.outs) or (traits_of(eqn.primitive).matmul and step.mode is Mode.LOW):
            rounded.update(eqn.outvars)
        elif not own and traits_of(eqn.primitive).elementwise:
            repeated.update(eqn.outvars)
        elif _is_moved(eqn, rounded) or (own and all(v in rounded for v in own) and _is_as_exact(eqn, step, own)):
            rounded.update(eqn.outvars)
    return rounded


def _is_moved(eqn: Any, variables: Collection[Var]) -> bool:
    """Whether its result holds entries of these variables, and of no others."""
    floats = [v for v in eqn.invars if float_dtype(v.aval) is not None and not isinstance(v, Literal)]
    return traits_of(eqn.primitive).moves and bool(floats) and all(v in variables for v in floats)


def _is_as_exact(eqn: Any, step: Step, own: Sequence[Any]) -> bool:
    """Whether the result of an operation is about as exact as the operands `own`, next to their size."""
    traits = traits_of(eqn.primitive)
    if step.mode is Mode.ENTER:
        body = step.bodies[0] if len(step.bodies) == 1 else None
        if body is None or not (traits.plain_call or traits.own_jvp):
            return False
        pairs = zip(body.eqns, body.steps, strict=True)
        return all(_is_as_exact(e, s, [v for v in e.invars if not isinstance(v, Literal)]) for e, s in pairs)
    if traits.product:
        return len(own) == 1 and (eqn.primitive is lax.mul_p or own[0] is eqn.invars[0])
    return (traits.elementwise and not traits.nonlinear) or traits.compares or traits.keeps_all_entries


def _magnified(plan: Plan) -> Collection[Var]:
    """What a decomposition or a solve reads, through anything that is not a matmul."""
    body, known = open_jaxpr(plan.jaxpr), Memo()
    results = zip(body.outvars, plan.magnified, strict=True) if plan.magnified else ()
    found = {v for v, is_magnified in results if is_magnified and not isinstance(v, Literal)}
    for eqn in reversed(body.eqns):
        passes_on = not traits_of(eqn.primitive).matrix_unit and any(v in found for v in eqn.outvars)
        if passes_on or _decomposes(eqn, known):
            found.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found


def _decomposes(eqn: Any, known: Memo) -> bool:
    def decomposes(body: Jaxpr) -> bool:
        return known.get(body, None, lambda: any(_decomposes(inner, known) for inner in open_jaxpr(body).eqns))

    return traits_of(eqn.primitive).magnifies or any(map(decomposes, jec.jaxprs_in_params(eqn.params)))
