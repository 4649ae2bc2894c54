"""The plan: what each equation of a jaxpr does, decided before anything runs.

A table per primitive can't say both "an add between two matmuls is low" and "an add after exp is float32". So a jaxpr is
read three times:

1. `_judge`, forwards: the standing of each value (see `_standing`), and from it a verdict for each equation.
2. `_wants`, backwards: which values are consumed by float32 operations alone. Rounding them first would gain nothing.
3. `make_plan`, forwards: the dtype in which each operand is read and each result is held.

Nested jaxprs are planned with the standings of their operands, so that a `jit` or a `custom_jvp` between two matmuls
costs no cast. A loop's carry enters its body as exact, in its original dtype.
"""

import enum
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import Jaxpr, Literal, Primitive, Var, consts_of, open_jaxpr, scopes
from ._facts import CARRIES, FIXED, INTO_BUFFER, MOVES, ONE_TO_ONE, POSITIONS
from ._higher_order import Entry, describe
from ._policy import Found, Key, Lookup
from ._rules import (
    Rule,
    lowered_params,
    use_compute_precision,
    use_inferred_precision,
    use_original_precision,
    use_widest_precision,
)
from ._standing import (
    EXACT,
    FREE,
    LOW,
    POSITION,
    WIDE,
    Standing,
    Value,
    combine,
    constant_standing,
    float_dtype,
    may_lower,
)

Path = tuple[str, ...]


class How(enum.Enum):
    """How an equation gets its dtypes."""

    ORIGINAL = "as written"
    LOW = "in the compute dtype"
    FOLLOW = "in the compute dtype, unless its result is only wanted wide"
    WIDEST = "in the widest dtype of its operands"
    EACH = "each operand in the dtype it is held in"
    BUFFER = "in the dtype of its first operand"
    ALIAS = "a cast that has nothing to do"
    RULE = "as a user's rule says"
    ENTER = "its inside is planned"


class Verdict(NamedTuple):
    how: How
    reason: str
    outs: tuple[Standing, ...]
    found: Found
    entry: Entry | None = None
    bodies: tuple[tuple[Standing, ...], ...] = ()  # the standings that each body of `entry` is entered with


class Step(NamedTuple):
    """What is done with one equation."""

    how: How
    reads: tuple[np.dtype | None, ...]  # the dtype each operand is read in; None: as it is
    outs: tuple[Value, ...]
    params: dict[str, Any] | None  # bind parameters, where they change
    reason: str
    rule: Rule
    key: Key
    touched: bool  # whether it differs from binding the equation as written
    entry: Entry | None = None
    bodies: tuple["Plan", ...] = ()


class Plan(NamedTuple):
    jaxpr: Jaxpr  # as the primitive holds it: open or closed
    path: Path
    ins: tuple[Value, ...]
    steps: tuple[Step, ...]
    outs: tuple[Value, ...]
    touched: bool  # whether running it differs from running the jaxpr


class Planner:
    """What a plan depends on besides the jaxpr, with a memory that lasts for one trace."""

    def __init__(self, lookup: Lookup, compute_dtype: np.dtype):
        self.lookup = lookup
        self.compute_dtype = compute_dtype
        self._judged: dict[Any, Any] = {}
        self._plans: dict[Any, Plan] = {}

    # -- values

    def may_lower(self, atom: Any) -> bool:
        return may_lower(float_dtype(atom.aval), self.compute_dtype)

    def value(self, standing: Standing, aval: Any) -> Value:
        """A value of this standing, in the dtype that goes with it."""
        dtype = float_dtype(aval)
        if dtype is not None and standing is LOW and may_lower(dtype, self.compute_dtype):
            dtype = self.compute_dtype
        return Value(standing, dtype)

    def standing_of_constant(self, const: Any) -> Standing:
        """Numbers on the host are looked at; an array on a device is free, as an argument would be."""
        if isinstance(const, jax.Array) or float_dtype(jax.typeof(const)) is None:
            return FREE
        return constant_standing(const, self.compute_dtype)

    def _of_constants(self, jaxpr: Jaxpr) -> dict[Var, Standing]:
        pairs = zip(open_jaxpr(jaxpr).constvars, consts_of(jaxpr), strict=True)
        return {var: self.standing_of_constant(const) for var, const in pairs}

    # -- 1. forwards: standings and verdicts

    def judge(self, jaxpr: Jaxpr, ins: tuple[Standing, ...], path: Path) -> tuple[list[Verdict], tuple[Standing, ...]]:
        key = (id(jaxpr), ins, path)
        if key not in self._judged:
            self._judged[key] = (jaxpr, self._judge(jaxpr, ins, path))  # the jaxpr, so that its id stays taken
        return self._judged[key][1]

    def _judge(self, jaxpr: Jaxpr, ins: tuple[Standing, ...], path: Path) -> tuple[list[Verdict], tuple[Standing, ...]]:
        env: dict[Var, Standing] = self._of_constants(jaxpr)
        env.update(zip(open_jaxpr(jaxpr).invars, ins, strict=True))

        def read(atom: Any) -> Standing:
            if not isinstance(atom, Literal):
                return env[atom]
            return constant_standing(atom.val, self.compute_dtype) if float_dtype(atom.aval) is not None else FREE

        verdicts = []
        for eqn in open_jaxpr(jaxpr).eqns:
            verdict = self._verdict(eqn, [read(v) for v in eqn.invars], path + scopes(eqn.source_info.name_stack))
            env.update(zip(eqn.outvars, verdict.outs, strict=True))
            verdicts.append(verdict)
        return verdicts, tuple(read(v) for v in open_jaxpr(jaxpr).outvars)

    def _verdict(self, eqn: Any, ins: list[Standing], path: Path) -> Verdict:
        found = self.lookup(path, eqn.primitive)
        explicit = found.key is not None and not isinstance(found.key, str)
        entry = describe(eqn)
        if entry is not None and not (explicit and found.rule is not use_inferred_precision):
            return self._enter(eqn, entry, ins, path, found)
        how, reason, standing = self._decide(eqn, ins, found)
        floats = [float_dtype(v.aval) is not None for v in eqn.outvars]
        outs: tuple[Standing, ...]
        if how is How.EACH:
            outs = tuple(s if f else FREE for s, f in zip(ins, floats, strict=True))
        elif how is How.RULE:
            outs = tuple(v.standing for v in self._outs_of_rule(eqn, [self.value(s, v.aval) for s, v in zip(ins, eqn.invars, strict=True)], found.rule))
        else:
            outs = tuple(standing if f else FREE for f in floats)
        return Verdict(how, reason, outs, found)

    def _decide(self, eqn: Any, ins: list[Standing], found: Found) -> tuple[How, str, Standing]:
        """How a plain equation runs, why, and the standing of its float results."""
        name = eqn.primitive.name
        floats = [
            s
            for s, v in zip(ins, eqn.invars, strict=True)
            if float_dtype(v.aval) is not None and not (s is FREE and isinstance(v, Literal))  # a literal takes any dtype
        ]
        together = combine(floats)
        if name not in CARRIES and together > EXACT:
            together = EXACT
        kept = together if together > EXACT else EXACT
        if eqn.primitive is lax.convert_element_type_p:
            return self._decide_cast(eqn, together)
        if name in POSITIONS:
            return How.ORIGINAL, "made from positions", POSITION
        if found.rule is use_original_precision:
            return How.ORIGINAL, _source(found), kept
        if found.rule not in _KNOWN:
            return How.RULE, _source(found), kept
        if name in FIXED:
            return How.ORIGINAL, f"{name} has a fixed dtype", kept
        mine = [self.may_lower(v) for v in eqn.invars if float_dtype(v.aval) is not None]
        if not any(mine):
            return How.ORIGINAL, "nothing to lower", together if floats else FREE
        if found.rule is use_compute_precision:
            refusal = self._refuses(eqn, ins)
            if refusal is None:
                return How.LOW, _source(found), LOW
            if refusal != _OUTER:
                return How.ORIGINAL, refusal, kept
        if not all(mine) or _names_a_dtype(eqn.params):
            return How.ORIGINAL, "mixed dtypes as written", kept
        if name in ONE_TO_ONE and len(eqn.invars) == len(eqn.outvars):
            return How.EACH, "follows each operand", together
        if found.rule is use_widest_precision:
            return How.WIDEST, _source(found), together if together in (FREE, LOW) and len(set(floats)) == 1 else kept
        if name in INTO_BUFFER:
            return How.BUFFER, "follows the buffer", LOW if ins[0] is LOW else FREE if together is LOW else together
        if together is LOW:
            return How.FOLLOW, "follows a low operand", LOW
        return How.ORIGINAL, _WHY_NOT_LOW[together], together

    def _decide_cast(self, eqn: Any, operand: Standing) -> tuple[How, str, Standing]:
        """Casts that the user wrote, and the way from integers to floats."""
        old, new = eqn.invars[0].aval.dtype, np.dtype(eqn.params["new_dtype"]) if _is_numpy(eqn) else None
        if new is None or not jnp.issubdtype(new, jnp.floating):
            return How.ORIGINAL, "not a float", FREE
        if not jnp.issubdtype(old, jnp.floating):
            harmless = old == jnp.bool_ or old.itemsize == 1 or not jnp.issubdtype(old, jnp.integer)
            return How.ORIGINAL, "made from positions" if not harmless else "an input", FREE if harmless else POSITION
        if old == new:
            return (How.ALIAS, "follows its operand", operand)
        if new == self.compute_dtype:
            return (How.ALIAS, "the user's cast", LOW)
        if new.itemsize > old.itemsize:
            return How.ORIGINAL, "the user's cast to a wider dtype", max(operand, EXACT)
        return How.ORIGINAL, "the user's cast", operand

    def _refuses(self, eqn: Any, ins: list[Standing]) -> str | None:
        """Why an equation under the compute rule is not lowered after all; None if it is."""
        params = eqn.params
        dtypes = [float_dtype(v.aval) for v in eqn.invars]
        ours = [d is None or d == self.compute_dtype or may_lower(d, self.compute_dtype) for d in dtypes]
        if not all(ours) or ("preferred_element_type" in params and any(d is None for d in dtypes[:2])):
            return "mixed dtypes as written"
        preferred = params.get("preferred_element_type")
        if preferred is not None and not may_lower(np.dtype(preferred), self.compute_dtype):
            return "another result dtype as written"
        if POSITION in ins:
            return "made from positions"
        if _asks_for_precision(params.get("precision")):
            return "asks for precision"
        if eqn.primitive is lax.dot_general_p and not params["dimension_numbers"][0][0]:
            return _OUTER
        return None

    # -- higher-order equations

    def _enter(self, eqn: Any, entry: Entry, ins: list[Standing], path: Path, found: Found) -> Verdict:
        """Judge the bodies. A carry stays exact, or, where the policy lets it follow, low if every round leaves it low."""
        low_carries = found.rule is use_inferred_precision
        into = list(ins)
        for operand, _ in entry.carries:
            if float_dtype(eqn.invars[operand].aval) is not None:
                into[operand] = LOW if low_carries and into[operand] <= LOW else max(EXACT, into[operand])
        while True:
            results: list[list[Standing]] = [[] for _ in eqn.outvars]
            for body in entry.bodies:
                _, outs = self.judge(body.jaxpr, tuple(into[i] for i in body.operands), path)
                for result, standing in zip(body.results, outs, strict=True):
                    results[result].append(standing)
            settled = True
            for operand, result in entry.carries:
                if float_dtype(eqn.invars[operand].aval) is None:
                    continue
                after = combine([into[operand], *results[result]])
                if after is not into[operand]:
                    into[operand], settled = max(after, EXACT), False
                results[result] = [into[operand]]
            if settled:
                break
        outs = tuple(
            combine(s) if float_dtype(v.aval) is not None else FREE for s, v in zip(results, eqn.outvars, strict=True)
        )
        bodies = tuple(tuple(into[i] for i in body.operands) for body in entry.bodies)
        return Verdict(How.ENTER, "entered", outs, found, entry, bodies)

    # -- 2. backwards: what is wanted wide

    def _wants(self, jaxpr: Jaxpr, verdicts: list[Verdict], outs: Sequence[bool], path: Path) -> dict[Var, bool]:
        """For each variable: do only float32 operations consume it?"""
        wants: dict[Var, bool] = {}

        def demand(atom: Any, wide: bool) -> None:
            if not isinstance(atom, Literal):
                wants[atom] = wants.get(atom, True) and wide

        jaxpr = open_jaxpr(jaxpr)
        for atom, wide in zip(jaxpr.outvars, outs, strict=True):
            demand(atom, wide)
        for eqn, verdict in zip(reversed(jaxpr.eqns), reversed(verdicts), strict=True):
            results = [wants.get(v, True) for v in eqn.outvars]
            for atom, wide in zip(eqn.invars, self._demands(eqn, verdict, results, path), strict=True):
                if float_dtype(atom.aval) is not None:
                    demand(atom, wide)
        return wants

    def _demands(self, eqn: Any, verdict: Verdict, results: list[bool], path: Path) -> list[bool]:
        match verdict.how:
            case How.ORIGINAL | How.WIDEST:
                return [True] * len(eqn.invars)
            case How.LOW | How.RULE:
                return [False] * len(eqn.invars)
            case How.FOLLOW | How.ALIAS:
                floats = [r for r, v in zip(results, eqn.outvars, strict=True) if float_dtype(v.aval) is not None]
                wide = all(floats) and self.may_lower(eqn.outvars[0]) if verdict.how is How.ALIAS else all(floats)
                return [wide] * len(eqn.invars)
            case How.EACH:
                return results
            case How.BUFFER:
                return [verdict.outs[0] is not LOW] * len(eqn.invars)
            case How.ENTER:
                return self._demands_of_bodies(eqn, verdict, results, path)

    def _demands_of_bodies(self, eqn: Any, verdict: Verdict, results: list[bool], path: Path) -> list[bool]:
        assert verdict.entry is not None
        inner = path + scopes(eqn.source_info.name_stack)
        wide = [True] * len(eqn.invars)
        results = _wanted_results(verdict.entry, verdict.outs, results)
        for body, ins in zip(verdict.entry.bodies, verdict.bodies, strict=True):
            verdicts, _ = self.judge(body.jaxpr, ins, inner)
            outs = [results[r] for r in body.results] if body.results else [True] * len(open_jaxpr(body.jaxpr).outvars)
            wants = self._wants(body.jaxpr, verdicts, outs, inner)
            for operand, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True):
                wide[operand] &= wants.get(var, True)
        for operand, result in verdict.entry.carries:
            wide[operand] = verdict.outs[result] is not LOW
        return wide

    # -- 3. forwards: the plan

    def plan(self, jaxpr: Jaxpr, ins: Sequence[Value], outs_wanted: Sequence[bool], path: Path) -> Plan:
        """Plan `jaxpr` for operands `ins`; `outs_wanted`: which results a float32 operation consumes."""
        key = (id(jaxpr), tuple(ins), tuple(outs_wanted), path)
        if key not in self._plans:
            self._plans[key] = self._plan(jaxpr, tuple(ins), outs_wanted, path)
        return self._plans[key]

    def _plan(self, jaxpr: Jaxpr, ins: tuple[Value, ...], outs_wanted: Sequence[bool], path: Path) -> Plan:
        verdicts, _ = self.judge(jaxpr, tuple(v.standing for v in ins), path)
        wants = self._wants(jaxpr, verdicts, outs_wanted, path)
        body = open_jaxpr(jaxpr)
        env = {var: Value(s, float_dtype(var.aval)) for var, s in self._of_constants(jaxpr).items()}
        env.update(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            return Value(FREE, float_dtype(atom.aval)) if isinstance(atom, Literal) else env[atom]

        steps = []
        for eqn, verdict in zip(body.eqns, verdicts, strict=True):
            wanted = [wants.get(v, True) for v in eqn.outvars]
            step = self._step(eqn, verdict, [read(v) for v in eqn.invars], wanted, path)
            env.update(zip(eqn.outvars, step.outs, strict=True))
            steps.append(step)
        return Plan(jaxpr, path, ins, tuple(steps), tuple(read(v) for v in body.outvars), any(s.touched for s in steps))

    def _step(self, eqn: Any, verdict: Verdict, ins: list[Value], wanted: list[bool], path: Path) -> Step:
        how, outs, reason = verdict.how, verdict.outs, verdict.reason
        original = tuple(float_dtype(v.aval) for v in eqn.invars)

        def step(reads: Sequence[np.dtype | None], outs: Sequence[Value], params: dict[str, Any] | None = None) -> Step:
            touched = how is How.RULE or tuple(reads) != original
            return Step(how, tuple(reads), tuple(outs), params, reason, verdict.found.rule, verdict.found.key, touched)

        def written() -> Step:
            return step(original, [Value(s, float_dtype(v.aval)) for s, v in zip(outs, eqn.outvars, strict=True)])

        def low() -> Step:
            reads = [self.compute_dtype if self.may_lower(v) else d for v, d in zip(eqn.invars, original, strict=True)]
            values = [
                Value(s, self.compute_dtype if self.may_lower(v) else float_dtype(v.aval))
                for s, v in zip(outs, eqn.outvars, strict=True)
            ]
            return step(reads, values, lowered_params(eqn.params, self.compute_dtype))

        held_low = [v.dtype == self.compute_dtype for v, a in zip(ins, eqn.invars, strict=True) if not isinstance(a, Literal) and v.dtype is not None]
        match how:
            case How.ORIGINAL:
                return written()
            case How.LOW:
                return low()
            case How.FOLLOW:
                wide = all(w for w, v in zip(wanted, eqn.outvars, strict=True) if float_dtype(v.aval) is not None)
                held_wide = any(v.standing is LOW and v.dtype != self.compute_dtype for v in ins)
                if wide and (held_wide or eqn.primitive.name not in MOVES):
                    reason = "consumed only by float32 operations"
                    return written()
                return low()
            case How.WIDEST:
                representable = all(
                    constant_standing(a.val, self.compute_dtype) is FREE for a in eqn.invars if isinstance(a, Literal)
                )
                return low() if held_low and all(held_low) and representable else written()
            case How.EACH:
                return step([v.dtype for v in ins], [Value(s, i.dtype) for s, i in zip(outs, ins, strict=True)])
            case How.BUFFER:
                return low() if held_low[:1] == [True] else written()
            case How.ALIAS:
                reads = ins[0].dtype if ins[0].dtype == self.compute_dtype else original[0]
                held = reads if eqn.params["new_dtype"] == original[0] else np.dtype(eqn.params["new_dtype"])
                return step([reads], [Value(outs[0], held)])
            case How.RULE:
                return step([None] * len(ins), self._outs_of_rule(eqn, ins, verdict.found.rule))
            case How.ENTER:
                return self._step_into(eqn, verdict, ins, wanted, path)

    def _step_into(self, eqn: Any, verdict: Verdict, ins: list[Value], wanted: list[bool], path: Path) -> Step:
        assert verdict.entry is not None
        entry, inner = verdict.entry, path + scopes(eqn.source_info.name_stack)
        reads = [v.dtype for v in ins]
        carried = {}
        for operand, result in entry.carries:
            carried[result] = self.value(verdict.outs[result], eqn.invars[operand].aval)
            reads[operand] = carried[result].dtype
        wanted = _wanted_results(entry, verdict.outs, wanted)
        plans = []
        for body, standings in zip(entry.bodies, verdict.bodies, strict=True):
            values = [Value(s, reads[i]) for s, i in zip(standings, body.operands, strict=True)]
            outs_wanted = [wanted[r] for r in body.results] or [True] * len(open_jaxpr(body.jaxpr).outvars)
            plans.append(self.plan(body.jaxpr, values, outs_wanted, inner))
        outs = []
        for result, (var, standing) in enumerate(zip(eqn.outvars, verdict.outs, strict=True)):
            dtypes = {
                plan.outs[i].dtype
                for body, plan in zip(entry.bodies, plans, strict=True)
                for i, r in enumerate(body.results)
                if r == result
            }
            if result in carried:
                outs.append(carried[result])
            elif len(dtypes) == 1:
                outs.append(Value(standing, dtypes.pop()))
            elif wanted[result]:
                outs.append(Value(standing, float_dtype(var.aval)))
            else:
                outs.append(self.value(standing, var.aval))
        found = verdict.found
        inert = self.lookup.inert or (isinstance(found.key, str) and found.rule is use_original_precision)
        touched = (
            any(plan.touched for plan in plans)
            or any(dtype != float_dtype(v.aval) for dtype, v in zip(reads, eqn.invars, strict=True))
            or (entry.lazy and not inert)
        )
        return Step(
            How.ENTER, tuple(reads), tuple(outs), None, verdict.reason, found.rule, found.key, touched, entry, tuple(plans)
        )

    def _outs_of_rule(self, eqn: Any, ins: Sequence[Value], rule: Rule) -> tuple[Value, ...]:
        """Run a user's rule on abstract operands to learn the dtypes of the results."""
        avals = [v.aval.update(dtype=i.dtype) if i.dtype is not None else v.aval for v, i in zip(eqn.invars, ins, strict=True)]
        try:
            found = jax.make_jaxpr(lambda *xs: apply_rule(rule, self.compute_dtype, eqn, xs))(*avals).out_avals
        except NameError:  # a collective outside of its mesh: the run casts the results to what is planned here
            found = [v.aval for v in eqn.outvars]
        return tuple(
            Value(
                FREE if (dtype := float_dtype(aval)) is None else LOW if dtype == self.compute_dtype else EXACT,
                dtype,
            )
            for aval in found
        )


def apply_rule(rule: Rule, compute_dtype: np.dtype, eqn: Any, operands: Sequence[Any]) -> list[Any]:
    """Bind `eqn` with the operands and parameters that a user's rule makes of it."""
    params = eqn.primitive.get_bind_params(eqn.params)
    dtypes = [getattr(v.aval, "dtype", None) for v in eqn.invars]
    made = rule(compute_dtype, dtypes, *operands, **params)
    if not (isinstance(made, tuple) and len(made) == 2 and isinstance(made[1], dict)):
        raise TypeError(
            f"the rule {_name(rule)!r} returned {type(made).__name__} for {eqn.primitive}; expected a pair "
            "(invars, bind_params). Write `return invars, bind_params`."
        )
    invars, params = list(made[0]), made[1]
    if len(invars) != len(operands):
        raise TypeError(
            f"the rule {_name(rule)!r} returned {len(invars)} operands for {eqn.primitive}; expected {len(operands)}, "
            "one for each that it was given. Return the operands that it leaves alone as well."
        )
    out = eqn.primitive.bind(*invars, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


_KNOWN = (use_compute_precision, use_inferred_precision, use_original_precision, use_widest_precision)
_OUTER = "an outer product"
_WHY_NOT_LOW = {
    FREE: "no low operand",
    EXACT: "an operand must not be rounded",
    WIDE: "a constant is out of range",
    POSITION: "made from positions",
}


def _name(rule: Rule) -> str:
    return getattr(rule, "__name__", type(rule).__name__)


def _source(found: Found) -> str:
    if found.key is None:
        return "default"
    if isinstance(found.key, Primitive):
        return "policy table"
    return f"scope {found.key!r}" if isinstance(found.key, str) else f"scope {found.key[0]!r} and primitive"


def _is_numpy(eqn: Any) -> bool:
    return isinstance(eqn.params["new_dtype"], np.dtype | type) and isinstance(eqn.invars[0].aval.dtype, np.dtype)


def _names_a_dtype(params: dict[str, Any]) -> bool:
    return any(params.get(name) is not None for name in ("out_dtype", "dtype"))


def _asks_for_precision(precision: Any) -> bool:
    """`HIGHEST`, or a named algorithm. `HIGH` is how a global TF32 setting looks: no request."""
    if precision is None:
        return False
    if isinstance(precision, tuple):
        return any(map(_asks_for_precision, precision))
    return precision not in (lax.Precision.DEFAULT, lax.Precision.HIGH)


def _wanted_results(entry: Entry, outs: Sequence[Standing], wanted: Sequence[bool]) -> list[bool]:
    """What a body's results are wanted as: a carry in its dtype, a stacked result as small as it can be."""
    if not entry.carries:
        return list(wanted)
    carried = {result: outs[result] is not LOW for _, result in entry.carries}
    return [carried.get(result, False) for result in range(len(wanted))]
