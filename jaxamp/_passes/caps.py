"""Hold scores low that are capped by a tanh in front of a softmax.

    softmax(cap * tanh(q @ k.T / cap)) @ v

Only float32 operations read the result of the tanh, so that it would run in float32. But XLA computes no tanh twice: it
would write the scores in float32, forward for their maximum and for their exponentials, and in the backward pass for
the derivatives of both. What is capped has been rounded by the matmul, and one more rounding costs little.
"""

from typing import Any, NamedTuple

from jax import lax

from .._compat import Literal, Var
from .._formats import Format
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Readers, Runner, Step, map_steps
from .._primitives import activations
from .._primitives.barriers import materialize
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .norms import has, is_elementwise
from .streams import held_low


def hold_caps_low(plan: Plan) -> Plan:
    """Let a tanh of rounded scores be computed of them, and written once, rounded."""
    if not plan.touched or plan.setting.keep == "all" or plan.setting.formats.is_narrow:
        return plan
    caps = [i for i in plan.parts if isinstance(i, int) and _is_wide_tanh(plan, i)]
    if not caps:
        return plan
    readers, made = plan.readers(), {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars}
    changed, capped = dict[int, Step](), set[int]()
    low = plan.setting.formats.low
    for i in caps:
        scaled = _from_low(plan, plan.eqns[i].invars[0], readers, made)
        if scaled is not None and _ends_in_softmax(plan, plan.eqns[i].outvars[0], readers):
            changed |= {j: _low_throughout(plan.steps[j], low) for j in (*scaled, i)}
            capped.add(i)
    if not capped:
        return plan
    plan = plan.with_steps(changed)
    return plan._replace(parts=map_steps(plan.parts, lambda i: Cap((i,), i) if i in capped else i))


class Cap(NamedTuple):
    """A tanh whose result is written once, rounded, and kept in place of what it reads."""

    parts: tuple[Part, ...]
    last: int

    def with_parts(self, parts: tuple[Part, ...]) -> "Cap":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        ((var, value),) = plan.values_of(self.last)
        with runner.at(plan, self.last):
            y = activations.tanh(env.read(plan.eqns[self.last].invars[0], plan.setting.formats.low))
            env.write(var, materialize(y, plan.setting.formats.compute_dtype), value)


def _low_throughout(step: Step, low: Format) -> Step:
    return held_low(step, low)._replace(reads=tuple(low if format_ is not None else None for format_ in step.reads))


def _is_wide_tanh(plan: Plan, i: int) -> bool:
    """Whether it would be low, if only float32 operations did not read its result."""
    eqn = plan.eqns[i]
    if eqn.primitive is not lax.tanh_p or isinstance(eqn.invars[0], Literal):
        return False
    return eqn.params.get("accuracy") is None and _is_wide(plan, i)


def _is_wide(plan: Plan, i: int) -> bool:
    step = plan.steps[i]
    follows = step.mode is Mode.FOLLOW and step.operation is None and not step.is_pinned
    return follows and not step.outs[0].is_low and plan.setting.formats.may_lower(plan.eqns[i].outvars[0])


def _from_low(plan: Plan, var: Var, readers: Readers, made: dict[Var, int]) -> list[int] | None:
    """The steps that scale or move a low value, of which nothing else reads the results; None if it is not low."""
    scaled: list[int] = []
    while var in made and len(readers[var]) == 1:
        i = made[var]
        eqn, step = plan.eqns[i], plan.steps[i]
        if step.outs[eqn.outvars.index(var)].is_low:
            return scaled
        large = [v for v in eqn.invars if not isinstance(v, Literal)]
        traits = traits_of(eqn.primitive)
        if len(large) != 1 or not (traits.product or traits.keeps_all_entries) or not _is_wide(plan, i):
            return None
        scaled.append(i)
        (var,) = large
    return None


def _ends_in_softmax(plan: Plan, var: Var, readers: Readers) -> bool:
    """Whether all that is made of a value, by element-wise work, has its maximum taken and subtracted.

    Some of the entries, such as those of labels, may be looked up.
    """
    waiting, seen, size = [var], {var}, size_of(var.aval)
    while waiting:
        reading = [r.place for r in readers.get(waiting.pop(), [])]
        if not reading or len(plan.eqns) in reading:
            return False
        eqns = [plan.eqns[place] for place in reading]
        if any(map(_takes_maximum, eqns)):
            if not all(_takes_maximum(eqn) or _shifts(eqn) for eqn in eqns):
                return False
            continue
        for eqn in eqns:
            if not is_elementwise(eqn) or any(size_of(v.aval) != size for v in eqn.outvars):
                return False
            waiting += [v for v in eqn.outvars if v not in seen]
            seen.update(eqn.outvars)
    return True


def _takes_maximum(eqn: Any) -> bool:
    return has(eqn, lambda inner: inner.primitive is lax.reduce_max_p)


def _shifts(eqn: Any) -> bool:
    """Whether it adds to a value, or subtracts from it, or looks up entries."""
    return traits_of(eqn.primitive).sum or has(eqn, lambda inner: inner.primitive is lax.gather_p)
