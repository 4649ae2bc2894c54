"""The loop: run a planned jaxpr, each equation with its operands in the dtypes that the plan says.

The law it keeps: equations run in the order they were written, each once, under the user's source line, name stack and
equation context; one cast is made per value and dtype. Two parts of a plan are run as a whole: an island (`_islands`)
is an environment of its own, and a softmax (`_softmax`) is one function, under the name stack of its last equation.
"""

import contextlib
import enum
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import (
    Jaxpr,
    Literal,
    Var,
    consts_of,
    current_name_stack,
    marked,
    open_jaxpr,
    user_context,
    with_equations,
)
from .._passes.recompute import Island, find_islands
from .._passes.softmax import Softmax, find_softmaxes, low_softmax
from .._plan import higher_order as _higher_order
from .._plan.classify import How, apply_rule
from .._plan.higher_order import bind
from .._plan.plan import Plan, Planner, Step
from .._plan.residuals import Keep, keeps
from .._plan.sensitivity import WIDE, Value, float_dtype
from .._policy.rules import cast, saturate
from .._primitives.barriers import held, in_order
from .._primitives.matmul import has_mixed, mixed
from .._traits.table import SPREADS, SUMS


def _cast_constant(x: Any, dtype: np.dtype) -> Any:
    """A constant in `dtype`, finite if it is finite, without an equation."""
    x = np.asarray(x)
    if not jnp.issubdtype(x.dtype, jnp.floating):
        return x
    largest = float(jnp.finfo(dtype).max)
    return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)


class _Env:
    """The values of variables, each with the casts of it that were made."""

    def __init__(self) -> None:
        self._values: dict[Var, tuple[Any, Value]] = {}
        self._casts: dict[tuple[Var, np.dtype], Any] = {}
        self._constants: dict[Var, Any] = {}

    def write(self, var: Var, x: Any, value: Value) -> None:
        self._values[var] = x, value

    def with_values(self, variables: Sequence[Var], xs: Sequence[Any]) -> "_Env":
        """An environment with other values for some variables, and no others but constants."""
        env = _Env()
        env._constants = dict(self._constants)
        for var, x in zip(variables, xs, strict=True):
            env.write(var, x, self._values[var][1])
        return env

    def dtype_of(self, var: Var) -> np.dtype | None:
        """The dtype that a value is held in; None for a constant that is yet to be made."""
        return self._values[var][0].dtype if var in self._values else None

    def postpone(self, eqn: Any) -> None:
        """Spread a literal when it is read, in the dtype that it is read in."""
        self._constants[eqn.outvars[0]] = eqn

    def read(self, atom: Any, dtype: np.dtype | None = None) -> Any:
        """The value of `atom` in `dtype`; None: in the dtype it is held in."""
        if isinstance(atom, Literal):
            return atom.val if dtype is None or atom.val.dtype == dtype else _cast_constant(atom.val, dtype)
        if atom in self._constants:
            dtype = atom.aval.dtype if dtype is None else dtype
            if (atom, dtype) not in self._casts:
                eqn = self._constants[atom]
                (self._casts[atom, dtype],) = bind(eqn, [_cast_constant(v.val, dtype) for v in eqn.invars])
            return self._casts[atom, dtype]
        x, value = self._values[atom]
        if dtype is None or value.dtype is None or x.dtype == dtype:
            return x
        if (atom, dtype) not in self._casts:
            narrow = value.standing is WIDE and dtype.itemsize < x.dtype.itemsize
            self._casts[atom, dtype] = saturate(x, dtype) if narrow else cast(x, dtype)
        return self._casts[atom, dtype]


def _first_kept_axis(shape: Sequence[int], result: Sequence[int]) -> int | None:
    """The axis from which on an operand has the shape of the result, if it is repeated along all axes before."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return first if 0 < first < len(shape) and tuple(shape[first:]) == tuple(result[first:]) else None


class Where(enum.Enum):
    """Where equations are run: what is kept of them for the backward pass is decided once."""

    OUTSIDE = "outside of any checkpoint"
    IN_CHECKPOINT = "in a checkpoint of ours or of the user"
    IN_ISLAND = "in an island"


class Ledger:
    """Numbers for the steps that are run, by which a report finds the step behind an equation of the result.

    Name stacks carry them. What is run as it was written is bound with its numbers in the bodies too, so that the
    derivatives of these have them.
    """

    def __init__(self) -> None:
        self.steps: list[tuple[Plan, int]] = []
        self._numbers: dict[tuple[int, int], int] = {}
        self._numbered: dict[int, tuple[Plan, Jaxpr]] = {}

    def number(self, plan: Plan, i: int) -> int:
        if (id(plan), i) not in self._numbers:
            self._numbers[id(plan), i] = len(self.steps)
            self.steps.append((plan, i))
        return self._numbers[id(plan), i]

    def equation(self, number: int) -> Any:
        """The equation of the user's that a number stands for."""
        plan, i = self.steps[number]
        return open_jaxpr(plan.jaxpr).eqns[i]

    def numbered(self, eqn: Any, step: Step) -> Any:
        """An equation with numbers in its bodies. Those of one that a key keeps out have its own step."""
        entry = _higher_order.describe(eqn)
        if entry is None:
            return eqn
        inside = step if step.reason.startswith("inside of ") else _inside_of(eqn, step)
        plans = step.bodies or [
            Plan(body.jaxpr, (), (), (inside,) * len(open_jaxpr(body.jaxpr).eqns), (), False) for body in entry.bodies
        ]
        return eqn.replace(params=_higher_order.with_bodies(eqn, entry, [self.jaxpr_of(plan) for plan in plans]))

    def jaxpr_of(self, plan: Plan) -> Jaxpr:
        """The jaxpr of a plan that changes nothing, with numbers."""
        if id(plan) not in self._numbered:
            eqns = []
            for i, (eqn, step) in enumerate(zip(open_jaxpr(plan.jaxpr).eqns, plan.steps, strict=True)):
                info = eqn.source_info.replace(name_stack=marked(eqn.source_info.name_stack, self.number(plan, i)))
                eqns.append(self.numbered(eqn, step).replace(source_info=info))
            self._numbered[id(plan)] = plan, with_equations(plan.jaxpr, eqns)
        return self._numbered[id(plan)][1]


def _inside_of(eqn: Any, step: Step) -> Step:
    return step._replace(reason=f"inside of {eqn.primitive.name}: {step.reason}")


class Interpreter:
    """Runs plans. The rewriter that higher-order rules are given."""

    def __init__(
        self,
        planner: Planner,
        keep: Keep,
        where: Where,
        traced: dict[Any, Any] | None = None,
        ledger: Ledger | None = None,
    ):
        self.keep = keep
        self._planner = planner
        self._where = where
        self._ledger = ledger
        self._narrows = planner.compute_dtype.itemsize < 4  # or else nothing is low
        self._traced: dict[Any, tuple[Plan, Jaxpr]] = {} if traced is None else traced

    def evaluate(self, plan: Plan, operands: Sequence[Any]) -> list[Any]:
        """Run `plan` on operands in the dtypes of `plan.ins`; the results are in those of `plan.outs`."""
        env, jaxpr = _Env(), open_jaxpr(plan.jaxpr)
        for var, const in zip(jaxpr.constvars, consts_of(plan.jaxpr), strict=True):
            env.write(var, const, Value(self._planner.judge.standing_of_constant(const), float_dtype(var.aval)))
        for var, x, value in zip(jaxpr.invars, operands, plan.ins, strict=True):
            env.write(var, x, value)
        done = 0
        for part in self._parts(plan):
            self._run_all(plan, range(done, part.steps.start), env)
            if isinstance(part, Island):
                self._run_island(plan, part, env)
            else:
                self._run_softmax(plan, part, env)
            done = part.steps.stop
        self._run_all(plan, range(done, len(plan.steps)), env)
        return [env.read(v, o.dtype) for v, o in zip(jaxpr.outvars, plan.outs, strict=True)]

    def _parts(self, plan: Plan) -> list[Island | Softmax]:
        """The parts of a plan that are not run one equation after the other."""
        if self.keep == "all" or self._where is Where.IN_ISLAND or not self._narrows:
            return []
        softmaxes = find_softmaxes(plan, self._planner.compute_dtype)
        taken = {i for found in softmaxes for i in found.steps}
        islands = find_islands(plan, self._planner.compute_dtype, taken)
        return sorted([*softmaxes, *islands], key=lambda part: part.steps.start)

    def _run_softmax(self, plan: Plan, found: Softmax, env: _Env) -> None:
        last = found.steps[-1]
        with self._context(plan, last, current_name_stack()):
            x, in_checkpoint = env.read(found.operand, np.dtype(np.float32)), self._where is not Where.OUTSIDE
            y = low_softmax(x, found.axes, self._planner.compute_dtype, in_checkpoint)
        env.write(found.result, y, plan.steps[last].outs[0])

    def _run_all(self, plan: Plan, steps: range, env: _Env) -> None:
        outer = current_name_stack()
        for i in steps:
            eqn, step = open_jaxpr(plan.jaxpr).eqns[i], plan.steps[i]
            if step.how is How.CONSTANT and plan.touched:
                env.postpone(eqn)
                continue
            with self._context(plan, i, outer):
                spreads = plan.touched and self._narrows
                outs = self._run(eqn, step, env, spreads)
                if spreads and eqn.primitive.name in SUMS and step.how is not How.RULE:
                    outs = self._held_sum(eqn, step, env, outs)
                for var, x, value in zip(eqn.outvars, outs, step.outs, strict=True):
                    env.write(var, cast(x, value.dtype), value)

    @contextlib.contextmanager
    def _context(self, plan: Plan, i: int, outer: Any) -> Iterator[None]:
        """The user's source line, name stack and equation context of a step."""
        eqn = open_jaxpr(plan.jaxpr).eqns[i]
        name_stack = outer + eqn.source_info.name_stack
        if self._ledger is not None:
            name_stack = marked(name_stack, self._ledger.number(plan, i))
        with user_context(eqn.source_info.traceback, name_stack=name_stack), eqn.ctx.manager:
            yield

    def _run_island(self, plan: Plan, island: Island, env: _Env) -> None:
        interpreter = self._at(Where.IN_ISLAND)

        def run(operands: list[Any]) -> list[Any]:
            inside = env.with_values(island.ins, operands)
            interpreter._run_all(plan, island.steps, inside)
            return [inside.read(v, dtype) for v, dtype in zip(island.outs, island.dtypes, strict=True)]

        again = jax.checkpoint(run, policy=keeps) if self._where is Where.OUTSIDE else run
        outs = again([env.read(v) for v in island.ins])
        values = {v: value for i in island.steps for v, value in plan.values_of(i)}
        for var, x in zip(island.outs, outs, strict=True):
            env.write(var, x, values[var])
        for i in island.steps:
            if plan.steps[i].how is How.CONSTANT:
                env.postpone(open_jaxpr(plan.jaxpr).eqns[i])

    def _run(self, eqn: Any, step: Step, env: _Env, spreads: bool) -> Sequence[Any]:
        if self._ledger is not None and (step.how is How.RULE or not step.touched):
            eqn = self._ledger.numbered(eqn, step)
        if step.how is How.RULE:
            operands = [jnp.asarray(v.val) if isinstance(v, Literal) else env.read(v) for v in eqn.invars]
            return apply_rule(step.rule, self._planner.compute_dtype, eqn, operands)
        operands = [
            self._operand(env, eqn, v, dtype) if spreads else env.read(v, dtype)
            for v, dtype in zip(eqn.invars, step.reads, strict=True)
        ]
        if not step.touched:
            return bind(eqn, operands)
        if step.how in (How.ALIAS, How.FOLDED):
            return operands
        if step.how is How.ENTER:
            return _higher_order.run(self, eqn, step, operands)
        if step.swapped:
            operands = operands[::-1]
        if step.how is How.LOW and has_mixed(eqn.primitive):
            out = mixed(eqn.primitive, operands, {**eqn.params, **(step.params or {})}, self._planner.compute_dtype)
            return [in_order(out) if step.ordered else out]
        return bind(eqn, operands, **(step.params or {}))

    def _operand(self, env: _Env, eqn: Any, atom: Any, dtype: np.dtype | None) -> Any:
        """An operand in `dtype`. One that the operation repeats along an axis, such as a bias, is repeated before it is
        rounded: its gradient is a sum along that axis, which then is a sum of float32."""
        shape = eqn.outvars[0].aval.shape if eqn.primitive.name in SPREADS else None
        if shape is None or isinstance(atom, Literal) or atom.aval.shape == shape or float_dtype(atom.aval) is None:
            return env.read(atom, dtype)
        x, low = env.read(atom), self._planner.compute_dtype
        first = _first_kept_axis(x.shape, shape)
        rounded = x.dtype == np.float32 and dtype == low
        table = first is not None and first < x.ndim - 1
        if x.dtype == dtype and not table:
            return x
        x = lax.broadcast_in_dim(x, shape, range(x.ndim))
        if table or (rounded and eqn.primitive.name not in SUMS):
            x = held(x, low if rounded else x.dtype, ordered=first is not None)
        return cast(x, dtype)

    def _held_sum(self, eqn: Any, step: Step, env: _Env, outs: Sequence[Any]) -> Sequence[Any]:
        """The results of a sum. With something that is repeated, such as a bias, its cotangent goes two ways: it is
        summed for that, and it is the cotangent of what runs low. Both read one array, rounded."""
        low, shape = self._planner.compute_dtype, eqn.outvars[0].aval.shape
        free = self._where is Where.IN_ISLAND and not isinstance(step.key, str | tuple)
        for atom, other, dtype in zip(eqn.invars, eqn.invars[::-1], step.reads, strict=True):
            if any(isinstance(v, Literal) or env.dtype_of(v) is None for v in (atom, other)):
                continue
            repeated = env.dtype_of(atom) == np.float32 and atom.aval.shape != shape
            if repeated and (dtype == low or (free and env.dtype_of(other) == low)):
                ordered = _first_kept_axis(atom.aval.shape, shape) is not None
                return [held(out, low, ordered, shared_by=(env.read(atom), env.read(other))) for out in outs]
        return outs

    def trace(self, plan: Plan, outs: Sequence[Value]) -> Jaxpr:
        """The closed jaxpr of `plan`, made once, with results in the dtypes of `outs`."""
        if not plan.touched and [o.dtype for o in outs] == [
            float_dtype(v.aval) for v in open_jaxpr(plan.jaxpr).outvars
        ]:
            return plan.jaxpr if self._ledger is None else self._ledger.jaxpr_of(plan)
        key = (id(plan), tuple(outs), self._where)
        if key not in self._traced:
            avals = [
                v.aval
                if value.dtype is None or value.dtype == v.aval.dtype
                else v.aval.update(dtype=value.dtype, weak_type=False)
                for v, value in zip(open_jaxpr(plan.jaxpr).invars, plan.ins, strict=True)
            ]

            def body(*xs: Any) -> list[Any]:
                return [cast(x, o.dtype) for x, o in zip(self.evaluate(plan, xs), outs, strict=True)]

            self._traced[key] = plan, jax.make_jaxpr(body)(*avals)
        return self._traced[key][1]

    def plan(self, jaxpr: Jaxpr, ins: Sequence[Value], path: tuple[str, ...]) -> Plan:
        """Plan the jaxpr of a derivative rule. What it saves is wanted small."""
        return self._planner.plan(jaxpr, ins, [False] * len(open_jaxpr(jaxpr).outvars), path)

    def fresh(self) -> "Interpreter":
        """An interpreter without this one's memory, for functions that outlive the trace."""
        return Interpreter(self._planner.fresh(), self.keep, Where.IN_CHECKPOINT, ledger=self._ledger)

    def in_checkpoint(self) -> "Interpreter":
        """An interpreter for the inside of a checkpoint."""
        return self if self._where is not Where.OUTSIDE else self._at(Where.IN_CHECKPOINT)

    def _at(self, where: Where) -> "Interpreter":
        return Interpreter(self._planner, self.keep, where, self._traced, self._ledger)
