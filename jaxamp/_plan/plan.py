"""The plan: the dtype in which each equation of a jaxpr reads its operands and each result is held.

A judged jaxpr (`_judge`) is read twice more:

1. `_wants`, backwards: which values are consumed by float32 operations alone. Rounding them first would gain nothing.
2. `_plan`, forwards: the dtypes.

Nested jaxprs are planned for the dtypes that their operands are held in, so that a `jit` or a `custom_jvp` between two
matmuls costs no cast.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, scopes
from .._policy.rules import Rule, lowered_params, use_original_precision
from .._policy.toml import Key
from .._primitives.attention import ATTENTION, takes_part
from .._primitives.matmul import has_mixed, order_when_swapped, with_operands_swapped
from .._traits.table import MOVES, REARRANGES
from .classify import How, Judge, Path, Verdict
from .higher_order import Entry
from .sensitivity import FREE, LOW, Standing, Value, constant_standing, float_dtype


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
    swapped: bool = False  # a matmul whose operands are bound the other way round
    ordered: bool = False  # a matmul whose result is laid out in the order of its axes


class Plan(NamedTuple):
    jaxpr: Jaxpr  # as the primitive holds it: open or closed
    path: Path
    ins: tuple[Value, ...]
    steps: tuple[Step, ...]
    outs: tuple[Value, ...]
    touched: bool  # whether running it differs from running the jaxpr

    def readers(self) -> dict[Var, list["Reader"]]:
        return readers_of(open_jaxpr(self.jaxpr), self.steps, self.outs)

    def values_of(self, i: int) -> list[tuple[Var, Value]]:
        """The results of an equation, each with what is planned for it."""
        return list(zip(open_jaxpr(self.jaxpr).eqns[i].outvars, self.steps[i].outs, strict=True))


class Reader(NamedTuple):
    """A place where a variable is read: an equation, or, behind the last one, the results; and in which dtype."""

    place: int
    dtype: np.dtype | None


def readers_of(jaxpr: Jaxpr, steps: Sequence[Step], outs: Sequence[Value]) -> dict[Var, list[Reader]]:
    """All places where each variable of an open jaxpr is read."""
    reads = [(eqn.invars, step.reads) for eqn, step in zip(jaxpr.eqns, steps, strict=True)]
    readers: dict[Var, list[Reader]] = {}
    for place, (atoms, dtypes) in enumerate([*reads, (jaxpr.outvars, tuple(o.dtype for o in outs))]):
        for atom, dtype in zip(atoms, dtypes, strict=True):
            if not isinstance(atom, Literal):
                readers.setdefault(atom, []).append(Reader(place, dtype))
    return readers


class Planner:
    """Makes plans, with a memory that lasts for one trace."""

    def __init__(self, judge: Judge):
        self.judge = judge
        self.compute_dtype = judge.compute_dtype
        self._plans: dict[Any, Plan] = {}
        self._wanted: dict[Any, dict[Var, bool]] = {}

    def fresh(self) -> "Planner":
        return Planner(Judge(self.judge.lookup, self.compute_dtype))

    # -- 1. backwards: what is wanted wide

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
            case How.ORIGINAL | How.CONSTANT | How.FOLDED:  # the last is no verdict: it is planned below
                return [True] * len(eqn.invars)
            case How.LOW | How.RULE:
                return [False] * len(eqn.invars)
            case How.FOLLOW | How.WIDEST | How.ALIAS:  # they want what their results are wanted as
                floats = [r for r, v in zip(results, eqn.outvars, strict=True) if float_dtype(v.aval) is not None]
                narrows = verdict.how is How.ALIAS and not self.judge.may_lower(eqn.outvars[0])
                return [all(floats) and not narrows] * len(eqn.invars)
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
            verdicts, _ = self.judge.read(body.jaxpr, ins, inner)
            outs = [results[r] for r in body.results] if body.results else [True] * len(open_jaxpr(body.jaxpr).outvars)
            key = (id(body.jaxpr), ins, tuple(outs), inner)
            if key not in self._wanted:  # the judge holds the jaxpr, so that its id stays taken
                self._wanted[key] = self._wants(body.jaxpr, verdicts, outs, inner)
            wants = self._wanted[key]
            for operand, var in zip(body.operands, open_jaxpr(body.jaxpr).invars, strict=True):
                wide[operand] &= wants.get(var, True)
        for operand, result in verdict.entry.carries:
            wide[operand] = verdict.outs[result] is not LOW
        return wide

    # -- 2. forwards: the plan

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Sequence[Value],
        outs_wanted: Sequence[bool],
        path: Path,
        returned: Sequence[bool] = (),
    ) -> Plan:
        """Plan `jaxpr` for operands `ins`.

        `outs_wanted`: which results a float32 operation consumes; `returned`: which are results of the function.
        """
        key = (id(jaxpr), tuple(ins), tuple(outs_wanted), path, tuple(returned))
        if key not in self._plans:
            self._plans[key] = self._plan(jaxpr, tuple(ins), outs_wanted, path, returned)
        return self._plans[key]

    def _plan(
        self,
        jaxpr: Jaxpr,
        ins: tuple[Value, ...],
        outs_wanted: Sequence[bool],
        path: Path,
        returned: Sequence[bool],
    ) -> Plan:
        verdicts, _ = self.judge.read(jaxpr, tuple(v.standing for v in ins), path)
        wants = self._wants(jaxpr, verdicts, outs_wanted, path)
        body = open_jaxpr(jaxpr)
        env = {var: Value(s, float_dtype(var.aval)) for var, s in self.judge.of_constants(jaxpr).items()}
        env.update(zip(body.invars, ins, strict=True))

        def read(atom: Any) -> Value:
            return Value(FREE, float_dtype(atom.aval)) if isinstance(atom, Literal) else env[atom]

        steps, only_returned = [], _only_returned(body, returned) if any(returned) else set()
        for eqn, verdict in zip(body.eqns, verdicts, strict=True):
            wanted = [wants.get(v, True) for v in eqn.outvars]
            results = [v in only_returned for v in eqn.outvars]
            step = self._step(eqn, verdict, [read(v) for v in eqn.invars], wanted, results, path)
            env.update(zip(eqn.outvars, step.outs, strict=True))
            steps.append(step)
        outs = tuple(read(v) for v in body.outvars)
        _name_consumers(body, steps)
        _fold_transposes(body, steps, outs)
        _order_results(body, steps, outs)
        touched = any(s.touched for s in steps) or any(
            value.dtype != float_dtype(var.aval) for value, var in zip(ins, body.invars, strict=True)
        )
        return Plan(jaxpr, path, ins, tuple(steps), outs, touched)

    def _step(
        self, eqn: Any, verdict: Verdict, ins: list[Value], wanted: list[bool], returned: list[bool], path: Path
    ) -> Step:
        how, outs, reason = verdict.how, verdict.outs, verdict.reason
        original = tuple(float_dtype(v.aval) for v in eqn.invars)

        def step(reads: Sequence[np.dtype | None], outs: Sequence[Value], params: dict[str, Any] | None = None) -> Step:
            touched = how in (How.RULE, How.LOW) or tuple(reads) != original
            return Step(how, tuple(reads), tuple(outs), params, reason, verdict.found.rule, verdict.found.key, touched)

        def written() -> Step:
            return step(original, [Value(s, float_dtype(v.aval)) for s, v in zip(outs, eqn.outvars, strict=True)])

        def low() -> Step:
            reads = [
                self.compute_dtype if self.judge.may_lower(v) else d for v, d in zip(eqn.invars, original, strict=True)
            ]
            values = [
                Value(s, self.compute_dtype if self.judge.may_lower(v) else float_dtype(v.aval))
                for s, v in zip(outs, eqn.outvars, strict=True)
            ]
            return step(reads, values, lowered_params(eqn.params, self.compute_dtype))

        held_low = [
            v.dtype == self.compute_dtype
            for v, a in zip(ins, eqn.invars, strict=True)
            if not isinstance(a, Literal) and v.dtype is not None
        ]
        match how:
            case How.ORIGINAL | How.CONSTANT | How.FOLDED:
                return written()
            case How.LOW if eqn.primitive in ATTENTION:
                part, _ = takes_part(eqn.primitive, eqn.params)
                dtypes = [r if own else v.dtype for own, r, v in zip(part, low().reads, ins, strict=True)]
                avals = [
                    v.aval if dtype is None else v.aval.update(dtype=dtype)
                    for dtype, v in zip(dtypes, eqn.invars, strict=True)
                ]
                results, _ = eqn.primitive.abstract_eval(*avals, **eqn.params)
                return step(dtypes, [Value(s, float_dtype(aval)) for s, aval in zip(outs, results, strict=True)])
            case How.LOW if has_mixed(eqn.primitive):
                made = low()  # a float32 parameter is rounded inside, so that its gradient is not
                inside = [_is_parameter(v, a) for v, a in zip(ins, eqn.invars, strict=True)]
                made = made._replace(
                    reads=tuple(d if own else r for own, d, r in zip(inside, original, made.reads, strict=True))
                )
                return _widened(made, float_dtype(eqn.outvars[0].aval)) if returned[0] else made
            case How.LOW:
                return low()
            case How.FOLLOW:
                wide = all(w for w, v in zip(wanted, eqn.outvars, strict=True) if float_dtype(v.aval) is not None)
                held_wide = any(v.standing is LOW and v.dtype != self.compute_dtype for v in ins)
                if wide and (held_wide or eqn.primitive.name not in MOVES):
                    reason = _CONSUMED
                    return written()
                return low()
            case How.WIDEST:
                representable = all(
                    constant_standing(a.val, self.compute_dtype) is FREE for a in eqn.invars if isinstance(a, Literal)
                )
                return low() if held_low and all(held_low) and representable else written()
            case How.EACH:
                rounds = eqn.primitive.name not in MOVES
                dtypes = [d if rounds and w else v.dtype for v, d, w in zip(ins, original, wanted, strict=True)]
                return step(dtypes, [Value(s, d) for s, d in zip(outs, dtypes, strict=True)])
            case How.BUFFER:
                return low() if held_low[:1] == [True] else written()
            case How.ALIAS:
                reads = ins[0].dtype if ins[0].dtype == self.compute_dtype else original[0]
                held = reads if eqn.params["new_dtype"] == original[0] else np.dtype(eqn.params["new_dtype"])
                return step([reads], [Value(outs[0], held)])
            case How.RULE:
                return step([None] * len(ins), self.judge.outs_of_rule(eqn, ins, verdict.found.rule))
            case How.ENTER:
                return self._step_into(eqn, verdict, ins, wanted, returned, path)

    def _step_into(
        self, eqn: Any, verdict: Verdict, ins: list[Value], wanted: list[bool], returned: list[bool], path: Path
    ) -> Step:
        assert verdict.entry is not None
        entry, inner = verdict.entry, path + scopes(eqn.source_info.name_stack)
        reads = [v.dtype for v in ins]
        carried = {}
        for operand, result in entry.carries:
            carried[result] = self.judge.value(verdict.outs[result], eqn.invars[operand].aval)
            reads[operand] = carried[result].dtype
        wanted = _wanted_results(entry, verdict.outs, wanted)
        plans = []
        for body, standings in zip(entry.bodies, verdict.bodies, strict=True):
            values = [Value(s, reads[i]) for s, i in zip(standings, body.operands, strict=True)]
            outs_wanted = [wanted[r] for r in body.results] or [True] * len(open_jaxpr(body.jaxpr).outvars)
            through = [returned[r] for r in body.results] if eqn.primitive.name == "jit" else ()
            plans.append(self.plan(body.jaxpr, values, outs_wanted, inner, through))
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
                outs.append(self.judge.value(standing, var.aval))
        found = verdict.found
        inert = self.judge.lookup.inert or (isinstance(found.key, str) and found.rule is use_original_precision)
        touched = (
            any(plan.touched for plan in plans)
            or any(dtype != float_dtype(v.aval) for dtype, v in zip(reads, eqn.invars, strict=True))
            or (entry.lazy and not inert)
        )
        return Step(
            How.ENTER,
            tuple(reads),
            tuple(outs),
            None,
            verdict.reason,
            found.rule,
            found.key,
            touched,
            entry,
            tuple(plans),
        )


_CONSUMED = "consumed only by "


def _name_consumers(jaxpr: Jaxpr, steps: list[Step]) -> None:
    """Say in the reason of what is only wanted wide by what."""
    waiting = {v: i for i, step in enumerate(steps) if step.reason is _CONSUMED for v in jaxpr.eqns[i].outvars}
    names: dict[int, dict[str, None]] = {i: {} for i in waiting.values()}
    for eqn in jaxpr.eqns if waiting else ():
        for v in eqn.invars:
            if not isinstance(v, Literal) and v in waiting:
                names[waiting[v]][eqn.primitive.name] = None
    for i, found in names.items():
        steps[i] = steps[i]._replace(reason=_CONSUMED + (", ".join(found) or "float32 results"))


def _only_returned(jaxpr: Jaxpr, returned: Sequence[bool]) -> set[Var]:
    """The variables that are results of the function and nothing else, as they are or rearranged."""
    found = {v for v, own in zip(jaxpr.outvars, returned, strict=True) if own and not isinstance(v, Literal)}
    read = {v for v, own in zip(jaxpr.outvars, returned, strict=True) if not own and not isinstance(v, Literal)}
    found -= read
    for eqn in reversed(jaxpr.eqns):
        passes_on = eqn.primitive.name in REARRANGES and all(v in found for v in eqn.outvars)
        for atom in eqn.invars:
            if isinstance(atom, Literal):
                continue
            if passes_on and atom not in read:
                found.add(atom)
            elif not passes_on:
                found.discard(atom)
                read.add(atom)
    return found


def _widened(step: Step, dtype: np.dtype | None) -> Step:
    """A low matmul whose result comes out in `dtype`: nothing is saved by rounding what is returned."""
    params = {**(step.params or {}), "preferred_element_type": dtype}
    return step._replace(outs=tuple(Value(o.standing, dtype) for o in step.outs), params=params)


def _fold_transposes(jaxpr: Jaxpr, steps: list[Step], outs: Sequence[Value]) -> None:
    """Let low matmuls make their results in the order of axes that a transpose, their only reader, puts them in.

    A matrix times a vector has no axes to order. Its operands are swapped too, so that `vmap` from outside puts the
    mapped axis first, where activations have it.
    """
    readers = readers_of(jaxpr, steps, outs)
    for i, (eqn, step) in enumerate(zip(jaxpr.eqns, steps, strict=True)):
        if step.how is not How.LOW or (order := order_when_swapped(eqn)) is None:
            continue
        swapped = step._replace(swapped=True, params=with_operands_swapped(step.params or eqn.params))
        if order == tuple(range(len(order))):
            if eqn.invars[0].aval.ndim > eqn.invars[1].aval.ndim:
                steps[i] = swapped
            continue
        found = readers.get(eqn.outvars[0], [])
        if len(found) != 1 or found[0].place == len(steps):
            continue
        place = found[0].place
        reader, after = jaxpr.eqns[place], steps[place]
        if (
            reader.primitive is lax.transpose_p
            and tuple(reader.params["permutation"]) == order
            and after.reads[0] == step.outs[0].dtype
        ):
            steps[i] = swapped
            steps[place] = after._replace(how=How.FOLDED, reason="folded into the matmul before it", touched=True)


def _order_results(jaxpr: Jaxpr, steps: list[Step], outs: Sequence[Value]) -> None:
    """Lay out results of low matmuls in the order of their axes, but for those that are read in another order."""
    readers = readers_of(jaxpr, steps, outs)
    for i, (eqn, step) in enumerate(zip(jaxpr.eqns, steps, strict=True)):
        if step.how is not How.LOW or eqn.primitive is not lax.dot_general_p or eqn.outvars[0].aval.ndim < 2:
            continue
        places = [reader.place for reader in readers.get(eqn.outvars[0], []) if reader.place < len(steps)]
        turned = any(
            jaxpr.eqns[place].primitive is lax.transpose_p and steps[place].how is not How.FOLDED for place in places
        )
        steps[i] = step._replace(ordered=not turned)


def _wanted_results(entry: Entry, outs: Sequence[Standing], wanted: Sequence[bool]) -> list[bool]:
    """What a body's results are wanted as: a carry in its dtype, a stacked result as small as it can be."""
    if not entry.carries:
        return list(wanted)
    carried = {result: outs[result] is not LOW for _, result in entry.carries}
    return [carried.get(result, False) for result in range(len(wanted))]


def _is_parameter(value: Value, atom: Any) -> bool:
    """What may be differentiated in float32: an input or a parameter, held as it came."""
    return value.standing is FREE and value.dtype == np.float32 and not isinstance(atom, Literal)
