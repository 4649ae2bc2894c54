"""Primitives that carry jaxprs: where their bodies are, and how each is bound again with the bodies rewritten.

`describe(eqn)` tells the planner which operand goes into which variable of which body and which result comes out of it.
`run(rewriter, eqn, step, operands)` binds the equation anew. Most primitives need no function of their own: `_rebind`
replaces the jaxprs among the parameters and keeps every other parameter, whatever JAX adds to them.

A rule is given the rewriter, so that this module need not know the interpreter.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._compat import (
    Jaxpr,
    Literal,
    Primitive,
    consts_of,
    current_name_stack,
    open_jaxpr,
    own_lines,
    primitives,
    scan_counts,
    user_context,
    without_consts,
)
from .._jaxpr import bind_primitive
from .._policy.rules import cast
from .residuals import Keep, keeping_little, may_keep_little
from .sensitivity import EXACT, LOW, Value


class Body(NamedTuple):
    """A jaxpr in an equation's parameters: `params[param]`, or its item `item`."""

    jaxpr: Jaxpr
    operands: Sequence[int]  # the operand of the equation behind each of its invars
    results: Sequence[int]  # the result of the equation behind each of its outvars; empty: none
    param: str = "jaxpr"
    item: int | None = None


class Entry(NamedTuple):
    """The inside of a higher-order equation."""

    bodies: tuple[Body, ...]
    carries: tuple[tuple[int, int], ...] = ()  # (operand, result) pairs that a loop passes on
    lazy: bool = False  # a user's rules hang on it, which run only when it is differentiated


class Rewriter(Protocol):
    """What a higher-order rule may ask of the interpreter."""

    keep: Keep  # what is kept for the backward pass

    def evaluate(self, plan: Any, operands: Sequence[Any]) -> list[Any]:
        """Run a planned jaxpr on operands in the planned dtypes."""

    def trace(self, plan: Any, outs: Sequence[Value]) -> Jaxpr:
        """The closed jaxpr of a planned one, with results in the dtypes of `outs`."""

    def plan(self, jaxpr: Jaxpr, ins: Sequence[Value], path: tuple[str, ...]) -> Any:
        """Plan a jaxpr that came up while running."""

    def in_checkpoint(self) -> "Rewriter":
        """A rewriter for the inside of a checkpoint."""

    def fresh(self) -> "Rewriter":
        """A rewriter without this one's memory, for functions that outlive the trace."""


Describe = Callable[[Any], Entry]
Run = Callable[[Rewriter, Any, Any, list[Any]], Sequence[Any]]


def bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation's primitive to other operands and parameters."""
    out = bind_primitive(eqn.primitive, *operands, **eqn.primitive.get_bind_params({**eqn.params, **changed}))
    return list(out) if eqn.primitive.multiple_results else [out]


def evaluate(jaxpr: Jaxpr, operands: Sequence[Any]) -> list[Any]:
    """What `jax.extend.core.jaxpr_as_fun` does, sooner under a transform."""
    body, outer = open_jaxpr(jaxpr), current_name_stack()
    env = dict(zip((*body.constvars, *body.invars), (*consts_of(jaxpr), *operands), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in body.eqns:
        info = eqn.source_info
        with user_context(info.traceback, name_stack=outer + info.name_stack), eqn.ctx.manager:
            env.update(zip(eqn.outvars, bind(eqn, [read(v) for v in eqn.invars]), strict=True))
    return [read(v) for v in body.outvars]


# -- describing


def _one_to_one(eqn: Any, param: str) -> Body:
    if param not in eqn.params:
        raise ValueError(
            f"{eqn.primitive} is registered with its jaxpr in the parameter {param!r}; expected one of its parameters: "
            f"{', '.join(eqn.params)}. Write register_higher_order(primitive, 'the right one')."
        )
    return Body(eqn.params[param], range(len(eqn.invars)), range(len(eqn.outvars)), param)


def _call(param: str, lazy: bool = False) -> Describe:
    return lambda eqn: Entry((_one_to_one(eqn, param),), lazy=lazy)


def _describe_cond(eqn: Any) -> Entry:
    operands, results = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return Entry(
        tuple(Body(branch, operands, results, "branches", i) for i, branch in enumerate(eqn.params["branches"]))
    )


def _describe_scan(eqn: Any) -> Entry:
    consts, carry = scan_counts(eqn.params)
    return Entry((_one_to_one(eqn, "jaxpr"),), tuple((consts + i, i) for i in range(carry)))


def _describe_while(eqn: Any) -> Entry:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = cond_consts + body_consts
    carry = range(first, len(eqn.invars))
    return Entry(
        (
            Body(eqn.params["cond_jaxpr"], (*range(cond_consts), *carry), (), "cond_jaxpr"),
            Body(eqn.params["body_jaxpr"], (*range(cond_consts, first), *carry), range(len(carry)), "body_jaxpr"),
        ),
        tuple((operand, operand - first) for operand in carry),
    )


# -- running


def _rebind(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    jaxprs = [
        rewriter.trace(plan, [step.outs[r] for r in body.results] or plan.outs)
        for body, plan in zip(step.entry.bodies, step.bodies, strict=True)
    ]
    return bind(eqn, operands, **with_bodies(eqn, step.entry, jaxprs))


def with_bodies(eqn: Any, entry: Entry, jaxprs: Sequence[Jaxpr]) -> dict[str, Any]:
    """The parameters of an equation with other jaxprs for its bodies."""
    params = dict(eqn.params)
    for body, jaxpr in zip(entry.bodies, jaxprs, strict=True):
        if body.item is None:
            params[body.param] = jaxpr
        else:
            items = enumerate(params[body.param])
            params[body.param] = tuple(jaxpr if i == body.item else old for i, old in items)
    return params


def _run_scan(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    (plan,), (body,) = step.bodies, step.entry.bodies
    outs = [step.outs[r] for r in body.results]
    if not plan.touched or rewriter.keep == "all" or not may_keep_little(plan.jaxpr):
        return bind(eqn, operands, **{body.param: rewriter.trace(plan, outs)})
    jaxpr = rewriter.in_checkpoint().trace(plan, outs)
    run = keeping_little(jec.jaxpr_as_fun(jaxpr), in_loop=True)
    return bind(eqn, operands, **{body.param: jax.make_jaxpr(run)(*(v.aval for v in open_jaxpr(jaxpr).invars))})


def _run_checkpoint(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """Not `jax.checkpoint`, which would forget that an equation has been differentiated, and with it the barrier."""
    jaxpr, consts = without_consts(rewriter.in_checkpoint().trace(step.bodies[0], step.outs))
    changed: dict[str, Any] = {"jaxpr": jaxpr}
    if consts and isinstance(eqn.params["prevent_cse"], tuple):
        changed["prevent_cse"] = (False,) * len(consts) + eqn.params["prevent_cse"]
    return bind(eqn, [*consts, *operands], **changed)


def _run_inline(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    return rewriter.evaluate(step.bodies[0], operands)


def _run_shard_map(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    params = eqn.params
    run = jax.shard_map(
        lambda *xs: tuple(rewriter.evaluate(step.bodies[0], xs)),
        mesh=params["mesh"],
        in_specs=params["in_specs"],
        out_specs=params["out_specs"],
        check_vma=params["check_vma"],
        axis_names=params["newly_manual_axes"],
    )
    return list(run(*operands))


def _run_custom_jvp(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rule is kept: it is the jvp of the equation as written, traced and rewritten like the body."""
    plan, results, rewriter = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    fun = jax.custom_jvp(_named(eqn, lambda *xs: rewriter.evaluate(plan, xs)))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        moving = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def pushforward(xs: Sequence[Any], ts: Sequence[Any]) -> Any:
            return jax.jvp(along(_as_written(eqn), xs, moving), [xs[i] for i in moving], ts)

        avals = [v.aval for v in eqn.invars]
        with own_lines():
            traced = jax.make_jaxpr(pushforward)(avals, [avals[i].to_tangent_aval() for i in moving])
        inside = rewriter.plan(traced, [*plan.ins, *(plan.ins[i] for i in moving)], plan.path)
        out = rewriter.evaluate(inside, [*primals, *(tangents[i] for i in moving)])
        return _cast_all(out[:results], plan.outs), _cast_all(out[results:], plan.outs)

    fun.defjvp(jvp, symbolic_zeros=True)
    return fun(*operands)


def _run_custom_vjp(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rules are kept: they are the vjp of the equation as written, traced and rewritten both ways."""
    plan, results, rewriter = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    fun = jax.custom_vjp(_named(eqn, lambda *xs: rewriter.evaluate(plan, xs)))

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        floats = [jnp.issubdtype(jax.typeof(p.value).dtype, jnp.inexact) for p in primals]
        moving = tuple(i for i, p in enumerate(primals) if p.perturbed and floats[i])
        if any(i < eqn.params["num_consts"] for i in moving):
            raise jax.errors.UnexpectedTracerError(
                "a value that a jax.custom_vjp function closes over is differentiated; expected an argument. "
                "Pass it as an argument of that function."
            )

        def pullback(*xs: Any) -> Any:
            return jax.vjp(along(_as_written(eqn), xs, moving), *(xs[i] for i in moving))

        with own_lines():
            traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(*(v.aval for v in eqn.invars))
        inside = rewriter.plan(traced, plan.ins, plan.path)
        out = rewriter.evaluate(inside, [p.value for p in primals])
        # The backward rule is traced here, where the axes that its collectives name are bound.
        tree, cotangents = jtu.tree_structure(shapes[1]), [v.aval.to_tangent_aval() for v in eqn.outvars]
        with own_lines():
            back = jax.make_jaxpr(lambda leaves, cts: jtu.tree_unflatten(tree, leaves)(cts))(
                traced.out_avals[results:], cotangents
            )
        incoming = [Value(LOW if o.standing is LOW else EXACT, o.dtype) for o in plan.outs]
        back_plan = rewriter.plan(back, [*inside.outs[results:], *incoming], plan.path)
        return _cast_all(out[:results], plan.outs), jtu.Partial(_Saved(moving, back_plan), *out[results:])

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        saved: _Saved = residuals.func
        cotangents = [_instantiate(c, o.dtype) for c, o in zip(cotangents, plan.outs, strict=True)]
        out = dict(zip(saved.moving, rewriter.evaluate(saved.plan, [*residuals.args, *cotangents]), strict=True))
        return tuple(cast(out[i], plan.ins[i].dtype) if i in out else None for i in range(len(plan.ins)))

    fun.defvjp(forward, backward, symbolic_zeros=True)
    return fun(*operands)


def _as_written(eqn: Any) -> Callable[..., list[Any]]:
    return lambda *operands: bind(eqn, operands)


def along(fun: Callable[..., Any], operands: Sequence[Any], moving: Sequence[int]) -> Callable[..., Any]:
    """A function as one of some of its operands."""

    def moved(*some: Any) -> Any:
        xs = list(operands)
        for i, x in zip(moving, some, strict=True):
            xs[i] = x
        return fun(*xs)

    return moved


def _cast_all(xs: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    return [cast(x, value.dtype) for x, value in zip(xs, values, strict=True)]


def _named(eqn: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` under the name that the user's function has in the jaxpr."""
    fun.__name__ = eqn.params.get("name") or open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name
    return fun


@dataclasses.dataclass(frozen=True, eq=False)
class _Saved:
    """What is known while tracing of the way back: the operands that it leads to, and its plan."""

    moving: tuple[int, ...]
    plan: Any

    def __call__(self, *args: Any) -> None:
        """A `Partial` wants a callable; this one is a label."""


def _instantiate(cotangent: Any, dtype: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent if dtype is None else cast(cotangent, dtype)


# -- the table


class HigherOrder(NamedTuple):
    describe: Describe
    run: Run


_REGISTERED: dict[Primitive, HigherOrder] = {}


@functools.cache
def _builtin() -> dict[Primitive, HigherOrder]:
    table = {
        "jit": HigherOrder(_call("jaxpr"), _rebind),
        "closed_call": HigherOrder(_call("call_jaxpr"), _run_inline),
        "call": HigherOrder(_call("call_jaxpr"), _run_inline),
        "eval_jaxpr": HigherOrder(_call("call_jaxpr"), _run_inline),  # replaces both since 0.11.2
        "remat2": HigherOrder(_call("jaxpr"), _run_checkpoint),
        "scan": HigherOrder(_describe_scan, _run_scan),
        "while": HigherOrder(_describe_while, _rebind),
        "cond": HigherOrder(_describe_cond, _rebind),
        "custom_jvp_call": HigherOrder(_call("call_jaxpr"), _run_custom_jvp),
        "custom_vjp_call": HigherOrder(_call("call_jaxpr", lazy=True), _run_custom_vjp),
        "shard_map": HigherOrder(_call("jaxpr"), _run_shard_map),
    }
    known = primitives()
    return {known[name]: rule for name, rule in table.items() if name in known}


def _rule_of(primitive: Primitive) -> HigherOrder | None:
    return _REGISTERED.get(primitive) or _builtin().get(primitive)


def is_higher_order(primitive: Primitive) -> bool:
    """Whether a primitive carries a jaxpr that is entered."""
    return _rule_of(primitive) is not None


def describe(eqn: Any) -> Entry | None:
    """The inside of `eqn`; None for a primitive that is not entered."""
    rule = _rule_of(eqn.primitive)
    return None if rule is None else rule.describe(eqn)


def run(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> Sequence[Any]:
    """Bind a higher-order equation with its bodies rewritten."""
    rule = _rule_of(eqn.primitive)
    assert rule is not None
    return rule.run(rewriter, eqn, step, operands)


def register_higher_order(primitive: Primitive, jaxpr: str | Describe = "jaxpr") -> None:
    """Teach `amp` to enter a primitive that carries a jaxpr; without it the primitive runs as written.

    Args:
        primitive: The primitive, which must accept its jaxpr with other dtypes.
        jaxpr: The name of the parameter that holds the jaxpr, if its operands and results are those of the equation,
            one for one. Else a function from an equation to an `Entry` of `Body`s.

    >>> from jax.extend.core import Primitive
    >>> register_higher_order(Primitive("my_call"), "call_jaxpr")
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            f"register_higher_order got {primitive!r}, of type {type(primitive).__name__}; expected a primitive. "
            "Write for example register_higher_order(my_call_p)."
        )
    _REGISTERED[primitive] = HigherOrder(_call(jaxpr) if isinstance(jaxpr, str) else jaxpr, _rebind)
