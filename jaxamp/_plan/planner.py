"""Making plans: the format in which each equation of a jaxpr reads its operands, and in which each result is held.

A classified jaxpr (`classify.py`) is read twice more:

1. `_wants`, backwards: which values only float32 operations read. Rounding them first would gain nothing.
   And which of these no matmul depends on any more.
2. `_plan`, forwards: the formats.

Then the passes are run over the plan. Nested jaxprs are planned for the formats that their operands are held in, so
that a `jit` or a `custom_jvp` between two matmuls costs no cast.
"""

import enum
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, scopes
from .._formats import Format, float_dtype
from .._jaxpr import Memo
from .._policy.rules import Replacement, ReplacingRule, Site, lowered_params, use_original_precision
from .._primitives.matmul import Mixing, has_mixed, mixed
from .._primitives.wide_sums import can_sum_wide, sum_wide
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .bodies import Entry
from .classify import Classifier, Decision, Mode, Path, results_of
from .plan import Operation, Plan, Setting, Step, only_returned
from .reasons import Reason, Why
from .sensitivity import FREE, LOW, Sensitivity, Value, is_parameter, sensitivity_of_constant
from .user_rules import apply_replacement, apply_rule, results_of_rule


class Want(enum.IntEnum):
    """How a value is wanted."""

    LOW = 0  # something reads it low
    WIDE = 1  # only float32 operations read it
    LAST = 2  # and nothing low depends on it any more, as on a network's last result


PlanPass = Callable[[Plan], Plan]


class Planner:
    """Makes plans, with a memory that lasts for one trace."""

    def __init__(self, classifier: Classifier, setting: Setting, passes: Sequence[PlanPass] = ()):
        self.classifier = classifier
        self.setting = setting
        self.formats = setting.formats
        self._passes = passes if self.formats.narrows and not classifier.lookup.inert else ()
        self._plans = Memo()
        self._wanted = Memo()
        self._steps: dict[Hashable, Step] = {}  # of equations of a kind
        self._demanded: dict[Hashable, list[Want]] = {}

    @property
    def identity(self) -> Hashable:
        """Equal for planners that make the same plans."""
        setting = self.formats.compute_dtype, self.setting.keep, self.setting.may_replace
        return self.classifier.lookup.identity, setting, tuple(self._passes)

    def fresh(self, may_replace: bool = True) -> "Planner":
        """A planner without this one's memory."""
        setting = self.setting._replace(may_replace=self.setting.may_replace and may_replace)
        return Planner(Classifier(self.classifier.lookup, self.formats), setting, self._passes)

    # -- 1. backwards: which values are wanted in float32

    def _wants(self, jaxpr: Jaxpr, decisions: list[Decision], outs: Sequence[Want], path: Path) -> dict[Var, Want]:
        """How each variable is wanted."""
        wants: dict[Var, Want] = {}

        def demand(atom: Any, want: Want) -> None:
            if want is not Want.LAST and not isinstance(atom, Literal) and want < wants.get(atom, Want.LAST):
                wants[atom] = want

        for atom, want in zip(open_jaxpr(jaxpr).outvars, outs, strict=True):
            demand(atom, want)
        eqns, kinds = open_jaxpr(jaxpr).eqns, self.classifier.kinds.of(jaxpr)
        for eqn, kind, decision in zip(reversed(eqns), reversed(kinds), reversed(decisions), strict=True):
            results = [wants.get(v, Want.LAST) for v in eqn.outvars]
            key = kind, id(decision), tuple(results)  # the decision knows the scopes
            found = self._demanded.get(key)
            if found is None:
                found = self._demanded[key] = self._demands(eqn, decision, results, path)
            for atom, want in zip(eqn.invars, found, strict=True):
                demand(atom, want)
        return wants

    def _demands(self, eqn: Any, decision: Decision, results: list[Want], path: Path) -> list[Want]:
        """How this equation wants each operand, if its results are wanted so. Integers are wanted in no way."""
        found = zip(eqn.invars, self._demands_of_all(eqn, decision, results, path), strict=True)
        return [Want.LAST if float_dtype(atom.aval) is None else want for atom, want in found]

    def _demands_of_all(self, eqn: Any, decision: Decision, results: list[Want], path: Path) -> list[Want]:
        match decision.mode:
            case Mode.AS_WRITTEN | Mode.CONSTANT:
                return [max(Want.WIDE, min(results, default=Want.LAST))] * len(eqn.invars)
            case Mode.LOW | Mode.RULE:
                return [Want.LOW] * len(eqn.invars)
            case Mode.FOLLOW if self._scales_down(eqn):
                return [max(Want.WIDE, *results)] * len(eqn.invars)
            case Mode.FOLLOW | Mode.WIDEST | Mode.ALIAS:  # they want what their results are wanted as
                floats = [r for r, v in zip(results, eqn.outvars, strict=True) if float_dtype(v.aval) is not None]
                narrows = decision.mode is Mode.ALIAS and not self.formats.may_lower(eqn.outvars[0])
                return [Want.LOW if narrows else min(floats, default=Want.LAST)] * len(eqn.invars)
            case Mode.EACH:
                return results
            case Mode.BUFFER:
                return [Want(decision.outs[0] is not LOW)] * len(eqn.invars)
            case Mode.ENTER:
                return self._demands_of_bodies(eqn, decision, results, path)

    def _demands_of_bodies(self, eqn: Any, decision: Decision, results: list[Want], path: Path) -> list[Want]:
        assert decision.entry is not None
        inner = path + scopes(eqn.source_info.name_stack)
        wants = [Want.LAST] * len(eqn.invars)
        results = _wanted_results(decision.entry, decision.outs, results)
        for body, ins in zip(decision.entry.bodies, decision.bodies, strict=True):
            magnified = results_of(body, decision.magnified)
            inside = self._wants_of_body(body.jaxpr, ins, [results[r] for r in body.results], inner, magnified)
            for operand, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True):
                wants[operand] = min(wants[operand], inside.get(var, Want.LAST))
        for operand, result in decision.entry.carries:
            wants[operand] = Want(decision.outs[result] is not LOW)
        return wants

    def _wants_of_body(
        self,
        jaxpr: Jaxpr,
        ins: tuple[Sensitivity, ...],
        outs: Sequence[Want],
        path: Path,
        magnified: tuple[bool, ...],
    ) -> dict[Var, Want]:
        decisions, _ = self.classifier.read(jaxpr, ins, path, magnified)
        wanted = tuple(outs) or (Want.WIDE,) * len(open_jaxpr(jaxpr).outvars)
        key = (ins, wanted, path, magnified)
        return self._wanted.get(jaxpr, key, lambda: self._wants(jaxpr, decisions, wanted, path))

    # -- 2. forwards: the plan

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Sequence[Value],
        outs_wanted: Sequence[Want],
        path: Path,
        returned: Sequence[bool] = (),
        magnified: tuple[bool, ...] = (),
    ) -> Plan:
        """Plan `jaxpr` for operands `ins`.

        `outs_wanted`: how its results are wanted; `returned`: which are results of the user's function; `magnified`:
        which a decomposition or a solve reads.
        """
        key = (tuple(ins), tuple(outs_wanted), path, tuple(returned), magnified)
        return self._plans.get(jaxpr, key, lambda: self._plan(jaxpr, *key))

    def _plan(
        self,
        jaxpr: Jaxpr,
        ins: tuple[Value, ...],
        outs_wanted: tuple[Want, ...],
        path: Path,
        returned: tuple[bool, ...],
        magnified: tuple[bool, ...],
    ) -> Plan:
        decisions, _ = self.classifier.read(jaxpr, tuple(v.sensitivity for v in ins), path, magnified)
        wants = self._wants(jaxpr, decisions, outs_wanted, path)
        body = open_jaxpr(jaxpr)
        env = {var: Value(s, self.formats.of_aval(var.aval)) for var, s in self.classifier.of_constants(jaxpr).items()}
        env.update(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            return Value(FREE, self.formats.of_aval(atom.aval)) if isinstance(atom, Literal) else env[atom]

        steps: list[Step] = []
        kinds = self.classifier.kinds.of(jaxpr)
        sums_low = lambda eqn: self._summed_in(path, eqn) != "float32"
        through = only_returned(body, returned, sums_low) if any(returned) else set()
        is_narrow = self.formats.is_narrow
        scaled = {eqn.invars[0] for eqn in body.eqns if self._scales_down(eqn)} if is_narrow else set()
        for eqn, kind, decision in zip(body.eqns, kinds, decisions, strict=True):
            wanted = [wants.get(v, Want.LAST) for v in eqn.outvars]
            results = [v in through for v in eqn.outvars]
            is_last = wanted[:1] == [Want.LAST]
            if decision.mode is Mode.LOW:
                is_scaled = eqn.outvars[0] in scaled
                cheap = wanted[0] is not Want.LOW and _is_cheap_when_wide(eqn, wanted[0], is_scaled)
                wanted = [Want(cheap or results[0])] * len(wanted)
            known = tuple([env[v] for v in eqn.invars if not isinstance(v, Literal)])
            key = kind, id(decision), known, tuple(wanted), tuple(results), is_last  # the decision knows the scopes
            step = self._steps.get(key)
            if step is None:
                of_results = _Asked(wanted, results, is_last, path)
                step = self._step(eqn, decision, [read(v) for v in eqn.invars], of_results)
                self._steps[key] = step
            env.update(zip(eqn.outvars, step.outs, strict=True))
            steps.append(step)
        _name_readers(body, steps)
        touched = any(s.touched for s in steps) or any(
            value.dtype != float_dtype(var.aval) for value, var in zip(ins, body.invars, strict=True)
        )
        outs, parts = tuple(read(v) for v in body.outvars), tuple(range(len(steps)))
        asked = returned, magnified, outs_wanted
        plan = Plan(jaxpr, path, ins, tuple(steps), outs, touched, self.setting, parts, *asked, kinds)
        return functools.reduce(lambda plan, run: run(plan), self._passes, plan)

    def _step(self, eqn: Any, decision: Decision, ins: list[Value], asked: "_Asked") -> Step:
        """The step of an equation, from the decision on it and the formats that its operands are held in."""
        mode, outs, reason = decision.mode, decision.outs, decision.reason
        wanted = asked.wanted
        original = tuple(self.formats.of_aval(v.aval) for v in eqn.invars)

        def step(
            reads: Sequence[Format | None],
            values: Sequence[Value],
            params: dict[str, Any] | None = None,
            operation: Operation | None = None,
        ) -> Step:
            touched = mode in (Mode.RULE, Mode.LOW) or tuple(reads) != original
            return Step(mode, tuple(reads), tuple(values), params, reason, decision.found, touched, operation=operation)

        def written() -> Step:
            return step(
                original, [Value(s, self.formats.of_aval(v.aval)) for s, v in zip(outs, eqn.outvars, strict=True)]
            )

        def low() -> Step:
            reads = [self._lowered(v) for v in eqn.invars]
            values = [Value(s, self._lowered(v)) for s, v in zip(outs, eqn.outvars, strict=True)]
            return step(reads, values, lowered_params(eqn.params, self.formats.compute_dtype))

        held_low = [
            v.is_low
            for v, a in zip(ins, eqn.invars, strict=True)
            if not isinstance(a, Literal) and v.format is not None
        ]
        match mode:
            case Mode.AS_WRITTEN | Mode.CONSTANT:
                return written()
            case Mode.LOW:
                return self._low_step(eqn, decision, ins, low(), asked)
            case Mode.FOLLOW:
                wide = all(w for w, v in zip(wanted, eqn.outvars, strict=True) if float_dtype(v.aval) is not None)
                held_wide = any(v.sensitivity is LOW and not v.is_low for v in ins)
                if wide and (held_wide or not traits_of(eqn.primitive).moves):
                    reason = Reason(Why.READ_ONLY_BY)
                    return written()
                if held_wide and self._scales_down(eqn):
                    return step(original, low().outs)
                return low()
            case Mode.WIDEST:
                representable = all(
                    sensitivity_of_constant(a.val, self.formats.compute_dtype) is FREE
                    for a in eqn.invars
                    if isinstance(a, Literal)
                )
                return low() if held_low and all(held_low) and representable else written()
            case Mode.EACH:
                if self._summed_in(asked.path, eqn) != "float32":
                    return self._summed_low(eqn, ins, step, asked)
                rounds = not traits_of(eqn.primitive).moves
                formats = [f if rounds and w else v.format for v, f, w in zip(ins, original, wanted, strict=True)]
                return step(formats, [Value(s, f) for s, f in zip(outs, formats, strict=True)])
            case Mode.BUFFER:
                return low() if held_low[:1] == [True] else written()
            case Mode.ALIAS:
                reads = ins[0].format if ins[0].is_low else original[0]
                assert original[0] is not None
                same = eqn.params["new_dtype"] == original[0].dtype
                held = reads if same else self.formats.of(np.dtype(eqn.params["new_dtype"]))
                return step([reads], [Value(outs[0], held)], operation=pass_operands)
            case Mode.RULE:
                values = results_of_rule(decision.found.rule, self.formats, eqn, ins)
                return step([None] * len(ins), values, operation=self._by_users_rule(decision))
            case Mode.ENTER:
                return self._step_into(eqn, decision, ins, asked)

    def _summed_in(self, path: Path, eqn: Any) -> str:
        """How the policy asks for sums over devices, if an equation is one."""
        if not traits_of(eqn.primitive).sums_devices:
            return "float32"
        return self.setting.communication(path + scopes(eqn.source_info.name_stack)).reduce

    def _summed_low(self, eqn: Any, ins: list[Value], step: Callable[..., Step], asked: "_Asked") -> Step:
        """A sum over devices that is sent low: of what low operations made, such as gradients, held low or not."""
        (value,) = ins
        is_low = value.is_low or (value.sensitivity is LOW and self.formats.may_lower(eqn.invars[0]))
        held = self.formats.low if is_low else value.format
        is_wide = self._summed_in(asked.path, eqn) == "wire"
        if not (is_low and is_wide and can_sum_wide(eqn.primitive, eqn.invars[0].aval, eqn.params)):
            return step([held], [Value(value.sensitivity, held)])
        out = self.formats.of_aval(eqn.outvars[0].aval) if asked.wanted[0] else held
        assert out is not None
        operation = lambda eqn, operands, params: [sum_wide(eqn.primitive, operands[0], out.dtype, params)]
        return step([held], [Value(value.sensitivity, out)], operation=operation)

    def _lowered(self, atom: Any) -> Format | None:
        return self.formats.low if self.formats.may_lower(atom) else self.formats.of_aval(atom.aval)

    def _scales_down(self, eqn: Any) -> bool:
        """Whether an equation makes numbers smaller by a constant, which may bring them into a narrow range."""
        if not self.formats.is_narrow or not traits_of(eqn.primitive).product:
            return False
        if [isinstance(v, Literal) for v in eqn.invars] != [False, True]:
            return False
        factor = float(abs(eqn.invars[1].val))
        return factor > 1 if eqn.primitive is lax.div_p else factor < 1

    def _low_step(self, eqn: Any, decision: Decision, ins: list[Value], step: Step, asked: "_Asked") -> Step:
        """A step that runs low. `step` reads all floats low, and has all float results low.

        A matmul's result comes out in float32 all the same if it is wanted so.
        """
        takes_part = traits_of(eqn.primitive).takes_part
        if takes_part is not None:
            part, _ = takes_part(eqn.params)
            reads = [r if own else v.format for own, r, v in zip(part, step.reads, ins, strict=True)]
            avals = [
                v.aval if f is None else v.aval.update(dtype=f.dtype) for f, v in zip(reads, eqn.invars, strict=True)
            ]
            results, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
            outs = [Value(s, self.formats.of_aval(aval)) for s, aval in zip(decision.outs, results, strict=True)]
            step = step._replace(reads=tuple(reads), outs=tuple(outs), params=None)
        elif has_mixed(eqn.primitive):  # a float32 parameter is rounded inside, so that its gradient is not
            original = (self.formats.of_aval(v.aval) for v in eqn.invars)
            inside = [is_parameter(v, a) for v, a in zip(ins, eqn.invars, strict=True)]
            reads = [f if own else r for own, f, r in zip(inside, original, step.reads, strict=True)]
            given = (inside[0] and ins[0].given, inside[1] and ins[1].given)
            inner = asked.path + scopes(eqn.source_info.name_stack)
            reduces_low = self.setting.communication(inner).reduce == "compute"
            mixing = Mixing(given, exact_tangents=bool(decision.magnified), low_gradients=reduces_low)
            step = step._replace(reads=tuple(reads), operation=self._mixed(mixing))
        if isinstance(decision.found.rule, ReplacingRule) and not decision.magnified:
            site = self._site(eqn, decision, ins, step, asked)
            chosen = decision.found.rule.at(site) if self.setting.may_replace else IN_A_RULE
            if isinstance(chosen, Replacement):  # JAX would differentiate one with a float32 result in float32
                return self._replaced(chosen, step)
            step = step._replace(reason=Reason(Why.NOT_REPLACED, chosen))
        if has_mixed(eqn.primitive) and (asked.wanted[0] is not Want.LOW or decision.magnified):
            step = self._widened(eqn, step)
        return step

    def _site(self, eqn: Any, decision: Decision, ins: list[Value], step: Step, asked: "_Asked") -> Site:
        """What a rule may ask of the place where it gives a matmul another body."""
        parameters = [is_parameter(v, a) and r == v.format for v, a, r in zip(ins, eqn.invars, step.reads, strict=True)]
        given = [own and v.given for own, v in zip(parameters, ins, strict=True)]
        is_first = all(v.sensitivity is FREE for v in ins[:2])
        is_scoped = isinstance(decision.found.key, str | tuple)
        return Site(eqn, _two(parameters), _two(given), is_first, asked.is_last, is_scoped)

    def _widened(self, eqn: Any, step: Step) -> Step:
        format_ = self.formats.of_aval(eqn.outvars[0].aval)
        assert format_ is not None
        params = {**(step.params or {}), "preferred_element_type": format_.dtype}
        return step._replace(outs=(step.outs[0]._replace(format=format_),), params=params)

    def _mixed(self, mixing: Mixing) -> Operation:
        dtype = self.formats.compute_dtype
        return lambda eqn, operands, params: [mixed(eqn.primitive, operands, params, dtype, mixing)]

    def _replaced(self, rule: Replacement, step: Step) -> Step:
        """A step with the body that a rule of the policy gives it. The results are held in the planned dtypes."""

        def operation(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
            return apply_replacement(rule, self.formats.compute_dtype, eqn, operands, params)

        reason = Reason(Why.REPLACED, (step.reason, rule.remark)) if rule.remark else step.reason
        return step._replace(operation=operation, replaced=True, format=rule.format, reason=reason)

    def _by_users_rule(self, decision: Decision) -> Operation:
        rule, dtype = decision.found.rule, self.formats.compute_dtype
        return lambda eqn, operands, params: apply_rule(rule, dtype, eqn, operands)

    def _step_into(self, eqn: Any, decision: Decision, ins: list[Value], asked: "_Asked") -> Step:
        """The step of a higher-order equation, with the plans of its bodies."""
        assert decision.entry is not None
        entry, inner = decision.entry, asked.path + scopes(eqn.source_info.name_stack)
        reads = [v.format for v in ins]
        carried = {}
        for operand, result in entry.carries:
            carried[result] = self.classifier.value(decision.outs[result], eqn.invars[operand].aval)
            reads[operand] = carried[result].format
        wanted = _wanted_results(entry, decision.outs, asked.wanted)
        traits = traits_of(eqn.primitive)
        plans = []
        for body, sensitivities in zip(entry.bodies, decision.bodies, strict=True):
            given = [traits.plain_call and v.given for v in ins]
            values = [Value(s, reads[i], given[i]) for s, i in zip(sensitivities, body.operands, strict=True)]
            outs_wanted = [wanted[r] for r in body.results] or [Want.WIDE] * len(open_jaxpr(body.jaxpr).outvars)
            through = [asked.returned[r] for r in body.results] if traits.hands_out else ()
            magnified = results_of(body, decision.magnified)
            plans.append(self.plan(body.jaxpr, values, outs_wanted, inner, through, magnified))
        outs = []
        for result, (var, sensitivity) in enumerate(zip(eqn.outvars, decision.outs, strict=True)):
            formats = {
                plan.outs[i].format
                for body, plan in zip(entry.bodies, plans, strict=True)
                for i, r in enumerate(body.results)
                if r == result
            }
            if result in carried:
                outs.append(carried[result])
            elif len(formats) == 1:
                outs.append(Value(sensitivity, formats.pop()))
            elif wanted[result]:
                outs.append(Value(sensitivity, self.formats.of_aval(var.aval)))
            else:
                outs.append(self.classifier.value(sensitivity, var.aval))
        found = decision.found
        inert = self.classifier.lookup.inert or (isinstance(found.key, str) and found.rule is use_original_precision)
        touched = (
            any(plan.touched for plan in plans)
            or any(f != self.formats.of_aval(v.aval) for f, v in zip(reads, eqn.invars, strict=True))
            or (entry.lazy and not inert)
        )
        return Step(Mode.ENTER, tuple(reads), tuple(outs), None, decision.reason, found, touched, entry, tuple(plans))


IN_A_RULE = "a user's custom_jvp rule has it, which must stay linear in its tangents"


class _Asked(NamedTuple):
    """What is asked of the results of an equation."""

    wanted: list[Want]
    returned: list[bool]  # which are results of the user's function
    is_last: bool  # nothing low depends on them
    path: Path  # the scopes around the jaxpr


def _two(flags: Sequence[bool]) -> tuple[bool, bool]:
    """The flags of the first two operands, for a primitive of one operand too."""
    return (*flags, False, False)[0], (*flags, False, False)[1]


def pass_operands(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
    """The operation of a step that has nothing to do."""
    return operands


def _name_readers(jaxpr: Jaxpr, steps: list[Step]) -> None:
    """Say in the reasons of what only float32 operations read, which these are."""
    waiting = {
        v: i for i, step in enumerate(steps) if step.reason == Reason(Why.READ_ONLY_BY) for v in jaxpr.eqns[i].outvars
    }
    names: dict[int, dict[str, None]] = {i: {} for i in waiting.values()}
    for eqn in jaxpr.eqns if waiting else ():
        for v in eqn.invars:
            if not isinstance(v, Literal) and v in waiting:
                names[waiting[v]][eqn.primitive.name] = None
    named = Memo()  # equations of a kind share a step
    for i, found in names.items():
        reason = Reason(Why.READ_ONLY_BY, tuple(found))
        steps[i] = named.get(steps[i], reason, functools.partial(steps[i]._replace, reason=reason))


def _wanted_results(entry: Entry, outs: Sequence[Sensitivity], wanted: Sequence[Want]) -> list[Want]:
    """How a body's results are wanted: a carry in its dtype, a stacked result as small as it can be."""
    if not entry.carries:
        return list(wanted)
    carried = {result: Want(outs[result] is not LOW) for _, result in entry.carries}
    return [carried.get(result, Want.LOW) for result in range(len(wanted))]


def _is_cheap_when_wide(eqn: Any, want: Want, is_scaled: bool) -> bool:
    """Whether a float32 result costs little: it is small next to what the matmul reads.

    A result is written, read, and often kept for the backward pass. There are few last results in a network, so those
    may be larger than others; and products that are scaled down right away, because they may be out of range.
    """
    times = 1 if is_scaled else 4 if want is Want.LAST else 16
    return times * size_of(eqn.outvars[0].aval) <= max(size_of(v.aval) for v in eqn.invars[:2])
