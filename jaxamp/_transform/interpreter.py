"""The loop: run a plan, each equation with its operands in the formats that the plan says.

The law it keeps: equations run in the order in which they were written, each once, under the user's source line, name
stack and equation context; one cast is made per value and dtype. It knows steps and regions: a region (`_passes`) runs
several steps as it likes.
"""

import contextlib
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax

from .._compat import (
    Jaxpr,
    Literal,
    Stage,
    consts_of,
    current_name_stack,
    current_place,
    marked,
    open_jaxpr,
    trace_context,
    user_context,
)
from .._formats import cast
from .._jaxpr import Memo, bind, evaluate
from .._passes.send_low import communicates, operands_rounded, send_low
from .._plan.classify import Mode, Path
from .._plan.higher_order import higher_order
from .._plan.jvp_rules import is_remembered
from .._plan.plan import Environment, Part, Plan
from .._plan.planner import Planner, Want
from .._plan.residuals import Keep
from .._plan.sensitivity import Value
from .._structure import mark_lasting, structure_of
from .._traits import traits_of
from .environment import Env
from .ledger import Ledger

# (jaxpr as written, how it is planned) -> as it is run. An entry lives as long as the jaxpr as written.
_TRACED: weakref.WeakKeyDictionary[Any, dict[Hashable, Jaxpr]] = weakref.WeakKeyDictionary()


class _Written(NamedTuple):
    """The equations of a step."""

    jaxpr: Jaxpr | None
    known_by: Any  # what the key has identities of, which no other object may get


class Interpreter:
    """Runs plans: the runner that regions are given, and the rewriter that higher-order rules are given."""

    def __init__(
        self,
        planner: Planner,
        traced: Memo | None = None,
        ledger: Ledger | None = None,
        is_transformed: bool = False,
        sends_low: bool = False,
    ):
        self.is_transformed = is_transformed
        self._sends_low = sends_low
        self._planner = planner
        self._ledger = ledger
        self._traced = Memo() if traced is None else traced
        self._steps: dict[Hashable, _Written] = {}

    # -- running

    def evaluate(self, plan: Plan, operands: Sequence[Any]) -> list[Any]:
        """Run `plan` on operands in the formats of `plan.ins`; the results are in those of `plan.outs`."""
        env, jaxpr, formats = Env(), open_jaxpr(plan.jaxpr), plan.setting.formats
        for var, const in zip(jaxpr.constvars, consts_of(plan.jaxpr), strict=True):
            env.write(var, const, Value(self._planner.classifier.of_constant(const), formats.of_aval(var.aval)))
        for var, x, value in zip(jaxpr.invars, operands, plan.ins, strict=True):
            env.write(var, x, value)
        self.run_parts(plan, plan.parts, env)
        return [env.read(v, o.format) for v, o in zip(jaxpr.outvars, plan.outs, strict=True)]

    def run_parts(self, plan: Plan, parts: Sequence[Part], env: Environment) -> None:
        """Run parts of a plan one after the other."""
        outer, eqns = current_name_stack(), plan.eqns
        for part in parts:
            if not isinstance(part, int):
                part.run(self, plan, env)
                continue
            eqn, step = eqns[part], plan.steps[part]
            if step.mode is Mode.CONSTANT and plan.touched:
                env.postpone(eqn)
                continue
            with self._line(plan, part, outer), eqn.ctx.manager:
                operands = [env.read(v, format_) for v, format_ in zip(eqn.invars, step.reads, strict=True)]
                outs = self.operate(plan, part, operands)
                for var, x, value in zip(eqn.outvars, outs, step.outs, strict=True):
                    env.write(var, cast(x, value.dtype), value)

    def operate(self, plan: Plan, i: int, operands: Sequence[Any]) -> Sequence[Any]:
        """The results of a step on operands in the formats that it reads, inside of its context."""
        stage, eqn, traits = Stage.current(), plan.eqns[i], traits_of(plan.eqns[i].primitive)
        is_plain = (traits.plain_params or traits.plain_call) and eqn.source_info.traceback is not None
        if stage is None or not is_plain or plan.steps[i].mode is Mode.RULE or self._ledger is not None:
            return self._operate(plan, i, operands)
        if traits.plain_params and not plan.steps[i].touched and stage.takes(eqn, operands):
            return stage.write(eqn, operands, current_place())
        own = [x for x, atom in zip(operands, eqn.invars, strict=True) if not isinstance(atom, Literal)]
        jaxpr = self._written(plan, i, operands, own) if all(map(stage.owns, own)) else None
        return self._operate(plan, i, operands) if jaxpr is None else stage.inline(jaxpr, own, current_place())

    def _written(self, plan: Plan, i: int, operands: Sequence[Any], own: Sequence[Any]) -> Jaxpr | None:
        """The equations of a step, traced once for equations of a kind; None if they hold constants or have effects.

        `own`: the operands that are not literals.
        """
        eqn, step, types = plan.eqns[i], plan.steps[i], [x.aval for x in own]
        key = plan.kinds[i], id(step), id(eqn.ctx), tuple(map(id, types))
        found = self._steps.get(key)
        if found is not None:
            return found.jaxpr

        def run(*own: Any) -> Sequence[Any]:
            it, pairs = iter(own), zip(operands, eqn.invars, strict=True)
            return self._operate(plan, i, [x if isinstance(atom, Literal) else next(it) for x, atom in pairs])

        jaxpr = jax.make_jaxpr(run)(*types)
        plain = not consts_of(jaxpr) and not open_jaxpr(jaxpr).effects
        self._steps[key] = _Written(jaxpr if plain else None, (step, eqn.ctx, types))
        return self._steps[key].jaxpr

    def _operate(self, plan: Plan, i: int, operands: Sequence[Any]) -> Sequence[Any]:
        eqn, step = plan.eqns[i], plan.steps[i]
        if self._ledger is not None and (step.mode is Mode.RULE or not step.touched):
            eqn = self._ledger.numbered(eqn, step)
        is_function = self.is_transformed and step.mode is Mode.ENTER and is_remembered(eqn)
        if not step.touched and not is_function:
            return bind(eqn, operands)
        if step.mode is Mode.ENTER:
            found = higher_order(eqn.primitive)
            assert found is not None
            return found.rewrite(self, eqn, step, list(operands))
        if step.operation is not None:
            return step.operation(eqn, operands, {**eqn.params, **(step.params or {})})
        return bind(eqn, operands, **(step.params or {}))

    @contextlib.contextmanager
    def at(self, plan: Plan, i: int) -> Iterator[None]:
        """The user's source line, name stack and equation context of a step."""
        with self._line(plan, i, current_name_stack()), plan.eqns[i].ctx.manager:
            yield

    def _line(self, plan: Plan, i: int, outer: Any) -> contextlib.AbstractContextManager[None]:
        info = plan.eqns[i].source_info
        name_stack = outer + info.name_stack if outer.stack else info.name_stack
        if self._ledger is not None:
            name_stack = marked(name_stack, self._ledger.number(plan.steps, i, plan.eqns[i]))
        return user_context(info.traceback, name_stack=name_stack)

    # -- what higher-order rules ask for

    @property
    def keep(self) -> Keep:
        return self._planner.setting.keep

    def trace(self, plan: Plan, outs: Sequence[Value]) -> Jaxpr:
        """The closed jaxpr of `plan`, made once, with results in the formats of `outs`."""
        formats = plan.setting.formats
        if not plan.touched and [o.format for o in outs] == [
            formats.of_aval(v.aval) for v in open_jaxpr(plan.jaxpr).outvars
        ]:
            return plan.jaxpr if self._ledger is None else self._ledger.jaxpr_of(plan)
        return self._traced.get(plan, tuple(outs), lambda: self._find_or_trace(plan, outs))

    def _find_or_trace(self, plan: Plan, outs: Sequence[Value]) -> Jaxpr:
        """Also from an earlier trace: JAX gives a jitted function such as `jax.nn.relu` one jaxpr for all its calls."""
        if self._ledger is not None or consts_of(plan.jaxpr) or open_jaxpr(plan.jaxpr).effects:
            return self._trace(plan, outs)
        asked = plan.ins, plan.wanted, plan.path, plan.returned, plan.magnified, tuple(outs)
        key = asked, self.identity
        found = _TRACED.setdefault(plan.jaxpr, {})
        if key not in found:
            found[key] = self._trace(plan, outs)
            if structure_of(found[key]) is None:
                mark_lasting(found[key])
        return found[key]

    def _trace(self, plan: Plan, outs: Sequence[Value]) -> Jaxpr:
        avals = [
            v.aval
            if value.dtype is None or value.dtype == v.aval.dtype
            else v.aval.update(dtype=value.dtype, weak_type=False)
            for v, value in zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True)
        ]

        def body(*xs: Any) -> list[Any]:
            return [cast(x, o.dtype) for x, o in zip(self.evaluate(plan, xs), outs, strict=True)]

        return jax.make_jaxpr(body)(*avals)

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Sequence[Value],
        path: Path,
        magnified: tuple[bool, ...] = (),
        returned: Sequence[bool] = (),
    ) -> Plan:
        """Plan the jaxpr of a derivative rule. The values that it saves are wanted small."""
        reduces_low = self._planner.setting.communication(path).reduce != "float32"
        own = [each and not reduces_low for each in returned] or [False] * len(open_jaxpr(jaxpr).outvars)
        outs = [Want.LAST if each else Want.LOW for each in own]
        return self._planner.plan(jaxpr, ins, outs, path, returned=own, magnified=magnified)

    def evaluate_rule(
        self, plan: Plan, operands: Sequence[Any], rounded: Callable[[], Sequence[bool]] = lambda: ()
    ) -> list[Any]:
        """Run a planned rule, with values sent low as in the program around it, which does not look into rules."""
        if not (self._sends_low and communicates(plan.jaxpr)):
            return self.evaluate(plan, operands)
        program = jax.make_jaxpr(lambda *xs: self.evaluate(plan, xs))(*operands)
        return evaluate(send_low(program, plan.setting, rounded(), plan.path), operands)

    def operands_rounded(self, plan: Plan) -> Sequence[bool]:
        """Which operands of a planned rule are only read rounded."""
        return operands_rounded(self._trace(plan, plan.outs), plan.setting, plan.path)

    @property
    def identity(self) -> Hashable:
        """Equal for interpreters that do the same with a plan."""
        return self._planner.identity, self.is_transformed, self._sends_low, trace_context()

    def fresh(self, may_replace: bool = True) -> "Interpreter":
        """An interpreter without this one's memory, for functions that outlive the trace."""
        return Interpreter(self._planner.fresh(may_replace), ledger=self._ledger, sends_low=self._sends_low)
