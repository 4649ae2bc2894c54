"""How a higher-order equation is bound with its bodies rewritten.

Most primitives need no function of their own: `rebind` replaces the jaxprs among the parameters and keeps every other
parameter, including those that a new JAX adds. A rule is given the rewriter, so that this module need not import the
interpreter.
"""

import dataclasses
from collections.abc import Callable, Hashable, Sequence
from typing import Any, Protocol

import jax
import jax.extend.core as jec
import jax.numpy as jnp
from jax import tree_util as jtu
from jax.custom_derivatives import SymbolicZero
from jax.interpreters import ad

from .._compat import (
    Jaxpr,
    binding_axes,
    bound_axes,
    inside_hi,
    open_jaxpr,
    own_lines,
    pull_back,
    push_forward,
    with_hi_checkpoint,
    with_hi_name,
    without_consts,
)
from .._formats import cast, float_dtype
from .._jaxpr import along, bind
from .._structure import library_key
from .bodies import with_bodies
from .checkpoints import keeping_little
from .jvp_rules import Pushed, is_remembered, remembered_jvp, with_jvp
from .residuals import Keep, has_work, may_keep_little
from .sensitivity import LOW, PROTECTED, Value, is_parameter


class Rewriter(Protocol):
    """What a higher-order rule may ask of the interpreter."""

    @property
    def keep(self) -> Keep:
        """What is kept for the backward pass."""

    def evaluate(self, plan: Any, operands: Sequence[Any]) -> list[Any]:
        """Run a planned jaxpr on operands in the planned dtypes."""

    def trace(self, plan: Any, outs: Sequence[Value]) -> Jaxpr:
        """The closed jaxpr of a planned one, with results in the dtypes of `outs`."""

    def plan(
        self,
        jaxpr: Jaxpr,
        ins: Sequence[Value],
        path: tuple[str, ...],
        magnified: tuple[bool, ...] = (),
        returned: Sequence[bool] = (),
    ) -> Any:
        """Plan a jaxpr that came up while running.

        `magnified`: which results a decomposition or a solve reads; `returned`: which are gradients of parameters.
        """

    def evaluate_rule(
        self, plan: Any, operands: Sequence[Any], rounded: Callable[[], Sequence[bool]] = lambda: ()
    ) -> list[Any]:
        """Run a planned rule of a user's function, which may send values from device to device.

        `rounded()`: which results are only read rounded to the compute dtype; none if it is empty.
        """

    def operands_rounded(self, plan: Any) -> Sequence[bool]:
        """Which operands a planned rule only reads rounded to the compute dtype."""

    def fresh(self, may_replace: bool = True) -> "Rewriter":
        """A rewriter without this one's memory, for functions that outlive the trace.

        `may_replace`: whether rules may give matmuls other bodies.
        """

    @property
    def is_transformed(self) -> bool:
        """Whether `grad`, `vmap` or the like is at work around."""

    @property
    def identity(self) -> Hashable:
        """Equal for rewriters that do the same."""


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
    if not plan.touched or rewriter.keep == "all" or not (has_work(plan.jaxpr) and may_keep_little(plan.jaxpr)):
        return bind(eqn, operands, **{body.param: rewriter.trace(plan, outs)})
    jaxpr = rewriter.trace(plan, outs)
    run = keeping_little(jec.jaxpr_as_fun(jaxpr), in_loop=True)
    return bind(eqn, operands, **{body.param: jax.make_jaxpr(run)(*(v.aval for v in open_jaxpr(jaxpr).invars))})


def rewrite_checkpoint(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """`jax.checkpoint` would forget that an equation has been differentiated, and with it the barrier."""
    jaxpr, consts = without_consts(rewriter.trace(step.bodies[0], step.outs))
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
    plan, results, own = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    in_rule = rewriter.fresh(may_replace=False)  # its tangents must stay linear

    def primal(*xs: Any) -> list[Any]:
        return own.evaluate(plan, xs)

    def push(differentiated: Sequence[int], xs: Sequence[Any], ts: Sequence[Any]) -> Pushed:
        moved: list[int] = []  # the results whose tangents are not zero

        def pushforward(xs: Sequence[Any], ts: Sequence[Any]) -> list[Any]:
            of_some = along(_as_written(eqn), xs, differentiated)
            out, found = push_forward(of_some, [xs[i] for i in differentiated], ts)
            moved[:] = [i for i, t in enumerate(found) if t is not None]
            return [*out, *(found[i] for i in moved)]

        avals = [v.aval for v in eqn.invars]
        with own_lines():
            traced = jax.make_jaxpr(pushforward)(avals, [avals[i].to_tangent_aval() for i in differentiated])
        magnified = plan.magnified and (*plan.magnified, *(plan.magnified[i] for i in moved))
        inside = in_rule.plan(traced, [*plan.ins, *(plan.ins[i] for i in differentiated)], plan.path, magnified)
        made = in_rule.evaluate(inside, [*xs, *ts])
        tangents = _cast_all(made[results:], [plan.outs[i] for i in moved])
        return Pushed(_cast_all(made[:results], plan.outs), dict(zip(moved, tangents, strict=True)))

    name = _name_of(eqn)
    if rewriter.is_transformed and is_remembered(eqn):
        aval, known = jax.typeof(operands[0]), library_key(eqn)
        asked = aval, plan.ins, plan.wanted, plan.outs, plan.path, plan.magnified
        key = None if known is None else (known, asked, rewriter.identity)
        fun = remembered_jvp(primal, lambda x, t: push([0], [x], [t]), aval, name, key)
        if fun is not None:
            return list(fun(*operands))
    return list(with_jvp(primal, push, name)(*operands))


def rewrite_custom_vjp(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rules are kept: they are the vjp of the equation as written, traced and rewritten both ways."""
    plan, results, rewriter = step.bodies[0], len(eqn.outvars), rewriter.fresh()
    fun = jax.custom_vjp(_named(eqn, lambda *xs: rewriter.evaluate_rule(plan, xs)))

    def planned_backward(saved: _Saved, given: Sequence[int]) -> tuple[Any, list[int]]:
        """The user's backward rule for some cotangents, planned, and the operands whose cotangents are not zero."""
        avals = [v.aval.to_tangent_aval() for v in eqn.outvars]
        known: list[int] = []

        def pullback(leaves: Sequence[Any], some: Sequence[Any]) -> list[Any]:
            cts = [ad.Zero(aval) for aval in avals]
            for i, ct in zip(given, some, strict=True):
                cts[i] = ct
            operands = [eqn.invars[i].aval for i in saved.differentiated]
            found = pull_back(jtu.tree_unflatten(saved.tree, leaves), operands, cts)
            known[:] = [i for i, ct in zip(saved.differentiated, found, strict=True) if ct is not None]
            return [ct for ct in found if ct is not None]

        with own_lines():
            traced = jax.make_jaxpr(pullback)(saved.avals, [avals[i] for i in given])
        outs = [plan.outs[i] for i in given]
        incoming = [Value(LOW if o.sensitivity is LOW else PROTECTED, o.format) for o in outs]
        parameters = [is_parameter(plan.ins[i], eqn.invars[i]) for i in known]
        return rewriter.plan(traced, [*saved.values, *incoming], plan.path, returned=parameters), known

    def forward(*primals: Any) -> tuple[list[Any], Any]:
        floats = [jnp.issubdtype(jax.typeof(p.value).dtype, jnp.inexact) for p in primals]
        differentiated = tuple(i for i, p in enumerate(primals) if p.perturbed and floats[i])
        if any(i < _num_consts(eqn) for i in differentiated):
            raise jax.errors.UnexpectedTracerError(
                "a value that a jax.custom_vjp function closes over is differentiated; expected an argument. "
                "Pass it as an argument of that function."
            )

        def pullback(*xs: Any) -> Any:
            return jax.vjp(along(_as_written(eqn), xs, differentiated), *(xs[i] for i in differentiated))

        with own_lines():
            traced, shapes = jax.make_jaxpr(pullback, return_shape=True)(*(v.aval for v in eqn.invars))
        inside = rewriter.plan(traced, plan.ins, plan.path)
        tree, avals, values = jtu.tree_structure(shapes[1]), traced.out_avals[results:], inside.outs[results:]
        saved = _Saved(differentiated, tree, avals, values, bound_axes())

        def rounded() -> list[bool]:
            """Of what is saved, what the backward rule only reads rounded, if all cotangents come."""
            floats = [i for i, v in enumerate(eqn.outvars) if float_dtype(v.aval) is not None]
            flags = rewriter.operands_rounded(planned_backward(saved, floats)[0])
            return [False] * results + list(flags[: len(avals)])

        out = rewriter.evaluate_rule(inside, [p.value for p in primals], rounded)
        return _cast_all(out[:results], plan.outs), jtu.Partial(saved, *out[results:])

    def backward(residuals: Any, cotangents: Sequence[Any]) -> tuple[Any, ...]:
        """The user's rule is traced here, where it is known which cotangents are zero, and told so as by JAX.

        If all are zero it is not called.
        """
        saved: _Saved = residuals.func
        given = [i for i, c in enumerate(cotangents) if not isinstance(c, SymbolicZero)]
        with binding_axes(saved.axes):
            inside, known = planned_backward(saved, given)
            some = [cast(cotangents[i], plan.outs[i].dtype) for i in given]
            out = dict(zip(known, rewriter.evaluate_rule(inside, [*residuals.args, *some]), strict=True))
        return tuple(cast(out[i], plan.ins[i].dtype) if i in out else None for i in range(len(plan.ins)))

    generic = getattr(eqn.params.get("_prim"), "generic_batching", False)
    fun.defvjp(forward, backward, symbolic_zeros=True, **({"generic_batching": True} if generic else {}))
    return fun(*operands)


def rewrite_custom_vmap(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """The user's rule is kept: it is traced as written, and rewritten like the body."""
    plan, tree, rewriter = step.bodies[0], eqn.params["in_tree"], rewriter.fresh()
    fun = jax.custom_batching.custom_vmap(lambda *xs: rewriter.evaluate(plan, xs))

    @fun.def_vmap
    def rule(size: int, in_batched: Sequence[bool], *xs: Any) -> tuple[list[Any], list[bool]]:
        flags: list[bool] = []

        def batched(*xs: Any) -> list[Any]:
            mapped = jtu.tree_unflatten(tree, in_batched)
            outs, out_batched = eqn.params["rule"](size, list(mapped), *jtu.tree_unflatten(tree, xs))
            flags[:] = jtu.tree_leaves(out_batched)
            return jtu.tree_leaves(outs)

        avals = [
            v.aval.update(shape=(size, *v.aval.shape), sharding=None) if is_mapped else v.aval
            for v, is_mapped in zip(eqn.invars, in_batched, strict=True)
        ]
        with own_lines():
            traced = jax.make_jaxpr(batched)(*avals)
        inside = rewriter.plan(traced, plan.ins, plan.path)
        return _cast_all(rewriter.evaluate(inside, xs), plan.outs), flags

    return list(fun(*operands))


def rewrite_hi(rewriter: Rewriter, eqn: Any, step: Any, operands: list[Any]) -> list[Any]:
    """A `call_hi_primitive`: the same rules as for what it was before 0.12."""
    hi = eqn.params["_prim"]
    inside = inside_hi(hi)
    assert inside is not None
    if inside.kind == "custom_jvp":
        return rewrite_custom_jvp(rewriter, eqn, step, operands)
    if inside.kind == "custom_vjp":
        return rewrite_custom_vjp(rewriter, eqn, step, operands)
    if inside.kind == "name":
        return bind(eqn, operands, _prim=with_hi_name(hi, jax.typeof(operands[0])))
    jaxpr, consts = without_consts(rewriter.trace(step.bodies[0], step.outs))
    return bind(eqn, [*consts, *operands], _prim=with_hi_checkpoint(hi, jaxpr, len(consts)))


def _as_written(eqn: Any) -> Callable[..., list[Any]]:
    return lambda *operands: bind(eqn, operands)


def _cast_all(xs: Sequence[Any], values: Sequence[Value]) -> list[Any]:
    return [cast(x, value.dtype) for x, value in zip(xs, values, strict=True)]


def _named(eqn: Any, fun: Callable[..., Any]) -> Callable[..., Any]:
    """`fun` under the name that the user's function has in the jaxpr."""
    fun.__name__ = _name_of(eqn)
    return fun


def _name_of(eqn: Any) -> str:
    if "_prim" in eqn.params:
        inside = inside_hi(eqn.params["_prim"])
        assert inside is not None
        return inside.name
    return eqn.params.get("name") or open_jaxpr(eqn.params["call_jaxpr"]).debug_info.func_name


def _num_consts(eqn: Any) -> int:
    inside = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
    return eqn.params["num_consts"] if inside is None else inside.num_consts


@dataclasses.dataclass(frozen=True, eq=False)
class _Saved:
    """What is known of the backward rule after the forward rule: the operands that it differentiates by, and how the
    user's function of the cotangents is built from the residuals, with their types and formats."""

    differentiated: tuple[int, ...]
    tree: Any
    avals: Sequence[Any]
    values: Sequence[Value]
    axes: Any  # that collectives may name: a vmapped backward rule runs where `vmap` has unbound its axis

    def __call__(self, *args: Any) -> None:
        """A `Partial` wants a callable; this one is a label."""
