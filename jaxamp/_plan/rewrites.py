"""How a higher-order equation is bound with its bodies rewritten.

Most primitives need no function of their own: `rebind` replaces the jaxprs among the parameters and keeps every other
parameter, including those that a new JAX adds. A rule is given the rewriter, so that this module need not import the
interpreter.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero

from .._compat import Jaxpr, open_jaxpr, own_lines, without_consts
from .._formats import cast
from .._jaxpr import along, bind
from .bodies import with_bodies
from .residuals import Keep, keeping_little, may_keep_little
from .sensitivity import LOW, PROTECTED, Value


class Rewriter(Protocol):
    """What a higher-order rule may ask of the interpreter."""

    @property
    def keep(self) -> Keep:
        """What is kept for the backward pass."""

    def evaluate(self, plan: Any, operands: Sequence[Any]) -> list[Any]:
        """Run a planned jaxpr on operands in the planned dtypes."""

    def trace(self, plan: Any, outs: Sequence[Value]) -> Jaxpr:
        """The closed jaxpr of a planned one, with results in the dtypes of `outs`."""

    def plan(self, jaxpr: Jaxpr, ins: Sequence[Value], path: tuple[str, ...]) -> Any:
        """Plan a jaxpr that came up while running."""

    def within_checkpoint(self) -> "Rewriter":
        """A rewriter for the inside of a checkpoint."""

    def fresh(self) -> "Rewriter":
        """A rewriter without this one's memory, for functions that outlive the trace."""


Rewrite = Callable[[Rewriter, Any, Any, list[Any]], Sequence[Any]]


def rebind(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    jaxprs = [
        rewriter.trace(plan, [step.outs[r] for r in body.results] or plan.outs)
        for body, plan in zip(step.entry.bodies, step.bodies, strict=True)
    ]
    return bind(eqn, operands, **with_bodies(eqn, step.entry, jaxprs))


def rewrite_scan(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    (plan,), (body,) = step.bodies, step.entry.bodies
    outs = [step.outs[r] for r in body.results]
    if not plan.touched or rewriter.keep == "all" or not may_keep_little(plan.jaxpr):
        return bind(eqn, operands, **{body.param: rewriter.trace(plan, outs)})
    jaxpr = rewriter.within_checkpoint().trace(plan, outs)
    run = keeping_little(jec.jaxpr_as_fun(jaxpr), in_loop=True)
    return bind(eqn, operands, **{body.param: jax.make_jaxpr(run)(*(v.aval for v in open_jaxpr(jaxpr).invars))})


def rewrite_checkpoint(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """`jax.checkpoint` would forget that an equation has been differentiated, and with it the barrier."""
    jaxpr, consts = without_consts(rewriter.within_checkpoint().trace(step.bodies[0], step.outs))
    changed: dict[str, Any] = {"jaxpr": jaxpr}
    if consts and isinstance(eqn.params["prevent_cse"], tuple):
        changed["prevent_cse"] = (False,) * len(consts) + eqn.params["prevent_cse"]
    return bind(eqn, [*consts, *operands], **changed)


def rewrite_inline(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    return rewriter.evaluate(step.bodies[0], operands)


def rewrite_shard_map(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
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


def rewrite_custom_jvp(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rule is kept: it is the jvp of the equation as written, traced and rewritten like the body."""
    plan, results, rewriter = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    fun = jax.custom_jvp(_named(eqn, lambda *xs: rewriter.evaluate(plan, xs)))

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        differentiated = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]

        def pushforward(xs: Sequence[Any], ts: Sequence[Any]) -> Any:
            return jax.jvp(along(_as_written(eqn), xs, differentiated), [xs[i] for i in differentiated], ts)

        avals = [v.aval for v in eqn.invars]
        with own_lines():
            traced = jax.make_jaxpr(pushforward)(avals, [avals[i].to_tangent_aval() for i in differentiated])
        inside = rewriter.plan(traced, [*plan.ins, *(plan.ins[i] for i in differentiated)], plan.path)
        out = rewriter.evaluate(inside, [*primals, *(tangents[i] for i in differentiated)])
        return _cast_all(out[:results], plan.outs), _cast_all(out[results:], plan.outs)

    fun.defjvp(jvp, symbolic_zeros=True)
    return fun(*operands)


def rewrite_custom_vjp(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rules are kept: they are the vjp of the equation as written, traced and rewritten both ways."""
    plan, results, rewriter = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    fun = jax.custom_vjp(_named(eqn, lambda *xs: rewriter.evaluate(plan, xs)))

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        floats = [jnp.issubdtype(jax.typeof(p.value).dtype, jnp.inexact) for p in primals]
        differentiated = tuple(i for i, p in enumerate(primals) if p.perturbed and floats[i])
        if any(i < eqn.params["num_consts"] for i in differentiated):
            raise jax.errors.UnexpectedTracerError(
                "a value that a jax.custom_vjp function closes over is differentiated; expected an argument. "
                "Pass it as an argument of that function."
            )

        def pullback(*xs: Any) -> Any:
            return jax.vjp(along(_as_written(eqn), xs, differentiated), *(xs[i] for i in differentiated))

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
        incoming = [Value(LOW if o.sensitivity is LOW else PROTECTED, o.format) for o in plan.outs]
        back_plan = rewriter.plan(back, [*inside.outs[results:], *incoming], plan.path)
        return _cast_all(out[:results], plan.outs), jtu.Partial(_Saved(differentiated, back_plan), *out[results:])

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        saved: _Saved = residuals.func
        cotangents = [_instantiate(c, o.dtype) for c, o in zip(cotangents, plan.outs, strict=True)]
        out = dict(
            zip(saved.differentiated, rewriter.evaluate(saved.plan, [*residuals.args, *cotangents]), strict=True)
        )
        return tuple(cast(out[i], plan.ins[i].dtype) if i in out else None for i in range(len(plan.ins)))

    fun.defvjp(forward, backward, symbolic_zeros=True)
    return fun(*operands)


def _as_written(eqn: Any) -> Callable[..., list[Any]]:
    return lambda *operands: bind(eqn, operands)


def _cast_all(xs: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    return [cast(x, value.dtype) for x, value in zip(xs, values, strict=True)]


def _named(eqn: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` under the name that the user's function has in the jaxpr."""
    fun.__name__ = eqn.params.get("name") or open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name
    return fun


@dataclasses.dataclass(frozen=True, eq=False)
class _Saved:
    """What is known of the backward rule while tracing: the operands that it differentiates by, and its plan."""

    differentiated: tuple[int, ...]
    plan: Any

    def __call__(self, *args: Any) -> None:
        """A `Partial` wants a callable; this one is a label."""


def _instantiate(cotangent: Any, dtype: Any) -> Any:
    if isinstance(cotangent, SymbolicZero):
        return jnp.zeros(cotangent.shape, cotangent.dtype)
    return cotangent if dtype is None else cast(cotangent, dtype)
