"""Every private or moved JAX name, and nothing else.

Supported: jax 0.10 (Python 3.11) to 0.12 (Python 3.12). Each shim names the versions that need it.
"""

import contextlib
import functools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
from jax.api_util import debug_info
from jax.extend import source_info_util
from jax.interpreters import partial_eval
from jax.interpreters.ad import Zero

Jaxpr = Any  # ClosedJaxpr and Jaxpr are two classes before 0.11 and one since: never told apart by type.
Literal = jec.Literal
Primitive = jec.Primitive
Var = jec.Var

current_place = source_info_util.current  # the source line and the scopes that an equation gets
current_name_stack = source_info_util.current_name_stack
user_context = source_info_util.user_context

# `inline=True` stopped inlining while tracing in 0.11.2, where the enum appeared.
EARLY_INLINE: Any = jax.Inline.JAX_EARLY if hasattr(jax, "Inline") else True

# The parameter of `lax.composite` that holds its decomposition.
COMPOSITE_BODY = "call_jaxpr" if jax.__version_info__ >= (0, 11, 2) else "jaxpr"

# Where `jax.image` and `jax.nn` are written.
_IMAGE = sys.modules[jax.image.resize.__module__].__file__
_NN = sys.modules[jax.nn.relu.__module__].__file__

# The class of a user's `jax.named_scope` in a name stack; `jvp(...)` and the like are of another class. Not exported.
_Scope = type(source_info_util.new_name_stack("scope").stack[0])
# `jax.checkpoint` adds these as if a user had opened them.
_OWN_SCOPES = frozenset({"checkpoint", "rematted_computation"})
# Scopes of ours: `marked` adds one to the name stack of an equation, and its derivatives inherit it.
_MARK = "jaxamp:"

# Primitives that only some of the supported versions have. A policy table may name them on all.
NOT_EVERYWHERE = frozenset(
    "log2 one_minus_square pbroadcast_dynamic polynomial reduced_vary_cast reduced_vary_cast_p relayout "
    "unreduced_pmax unreduced_pmin vary_unreduced_cast vary_unreduced_cast_p".split()
)


@contextlib.contextmanager
def own_lines() -> Iterator[None]:
    """Give equations the source lines that they are traced at, not the line of the equation around.

    Private in 0.10 to 0.12: there is no public way to leave a `user_context`.
    """
    from jax._src import source_info_util as private

    around = private._source_info_context.context
    private._source_info_context.context = source_info_util.SourceInfo(None, around.name_stack)
    try:
        yield
    finally:
        private._source_info_context.context = around


@functools.cache
def _private_modules() -> tuple[Any, Any]:
    from jax._src import core
    from jax._src.interpreters import partial_eval

    return core, partial_eval


class Stage:
    """Writes equations into the jaxpr that is being traced, as `jax.jit(..., inline=True)` does.

    To bind their primitives would give the same, slower: it finds out again what an equation says already. Private in
    0.10 to 0.12.
    """

    def __init__(self, trace: Any):
        self._trace = trace

    @classmethod
    def current(cls) -> "Stage | None":
        """The jaxpr that is being traced; None if `grad`, `vmap` or the like is at work, or nothing is traced."""
        core, private = _private_modules()
        trace = core.trace_ctx.trace
        is_plain = type(trace) is private.DynamicJaxprTrace and not trace.requires_low
        return cls(trace) if is_plain else None

    def owns(self, x: Any) -> bool:
        """Whether it is a value in this jaxpr."""
        return type(x) is partial_eval.DynamicJaxprTracer and x._trace is self._trace

    def takes(self, eqn: Any, operands: Sequence[Any]) -> bool:
        """Whether binding the primitive of an equation, which has no body, to operands gives this very equation."""
        folds = eqn.primitive in _private_modules()[1].const_fold_rules
        if folds or eqn.effects or eqn.source_info.traceback is None:
            return False
        for atom, x in zip(eqn.invars, operands, strict=True):
            if not isinstance(atom, Literal) and not (self.owns(x) and (x.aval is atom.aval or x.aval == atom.aval)):
                return False
        return True

    def write(self, eqn: Any, operands: Sequence[Any], place: Any) -> list[Any]:
        """The results of an equation that it `takes`, under the source line and the scopes `place`."""
        ins = [
            partial_eval.DynamicJaxprTracer(self._trace, atom.aval, atom, place) if isinstance(atom, Literal) else x
            for atom, x in zip(eqn.invars, operands, strict=True)
        ]
        outs = [v.aval for v in eqn.outvars]
        return self._trace.emit_eqn(ins, outs, eqn.primitive, eqn.params, eqn.effects, place, eqn.ctx)

    def inline(self, closed: Jaxpr, operands: Sequence[Any], place: Any) -> list[Any]:
        """The results of a closed jaxpr without constants, under the source line and the scopes `place`."""
        inline = _private_modules()[1].inline_jaxpr_into_trace
        return inline(self._trace, place, open_jaxpr(closed), (), *operands)


def scopes(name_stack: Any) -> tuple[str, ...]:
    """The user's named scopes in a name stack, outermost first, without what transforms add."""
    return tuple(
        entry.name
        for entry in name_stack.stack
        if isinstance(entry, _Scope) and entry.name not in _OWN_SCOPES and not entry.name.startswith(_MARK)
    )


def marked(name_stack: Any, number: int) -> Any:
    """A name stack with a number at its end, for `marks_of`."""
    return name_stack.extend(f"{_MARK}{number}")


def is_mark(entry: Any) -> bool:
    """Whether an entry of a name stack is a number that `marked` has added."""
    return isinstance(entry, _Scope) and entry.name.startswith(_MARK)


def marks_of(name_stack: Any) -> list[int]:
    """The numbers in a name stack, the last first."""
    return [int(entry.name.removeprefix(_MARK)) for entry in reversed(name_stack.stack) if is_mark(entry)]


def up_to_mark(name_stack: Any, number: int) -> Any:
    """A name stack up to the first mark with this number. JAX may repeat the whole stack behind it."""
    names = [getattr(entry, "name", None) for entry in name_stack.stack]
    return name_stack[: names.index(f"{_MARK}{number}")]


def first_frame(traceback: Any, wanted: Callable[[str], bool]) -> tuple[str, int, str] | None:
    """The innermost frame of an equation's traceback whose file is wanted: file, line, function."""
    for code, at in zip(*traceback.raw_frames(), strict=True) if traceback is not None else ():
        if wanted(code.co_filename):
            return code.co_filename, traceback.code_addr2line(code, at), code.co_name
    return None


def open_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with `eqns`, `invars`, `outvars`, from a closed, an open or (0.11+) a merged one."""
    return getattr(jaxpr, "jaxpr", jaxpr)


def is_of_jax_image(jaxpr: Jaxpr) -> bool:
    """Whether it is the body of a function of `jax.image`."""
    return bool(open_jaxpr(jaxpr).debug_info.func_filename == _IMAGE)


def is_of_jax_nn(jaxpr: Jaxpr) -> bool:
    """Whether it is the body of a function of `jax.nn`."""
    return bool(open_jaxpr(jaxpr).debug_info.func_filename == _NN)


def with_equations(jaxpr: Jaxpr, eqns: Sequence[Any], outs: Sequence[Any] | None = None) -> Jaxpr:
    """A jaxpr, open or closed, with other equations, and perhaps other results."""
    body = open_jaxpr(jaxpr)
    new = body.replace(eqns=list(eqns), outvars=body.outvars if outs is None else list(outs))
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


def with_operands(jaxpr: Jaxpr, ins: Sequence[Var]) -> Jaxpr:
    """A jaxpr, open or closed, with other operands."""
    body = open_jaxpr(jaxpr)
    new = body.replace(invars=list(ins), debug_info=body.debug_info.with_unknown_names())
    return new if body is jaxpr else jaxpr.replace(jaxpr=new)


def closed_jaxpr(jaxpr: Jaxpr, ins: Sequence[Var], outs: Sequence[Any], eqns: Sequence[Any]) -> Jaxpr:
    """A closed jaxpr of some equations of an open one, which have no effects."""
    changed = {"invars": list(ins), "outvars": list(outs), "eqns": list(eqns), "constvars": []}
    changed["debug_info"] = jaxpr.debug_info.with_unknown_names()
    if hasattr(jaxpr, "consts"):  # 0.11 and newer
        return jaxpr.replace(**changed, consts=[])
    return jec.ClosedJaxpr(jaxpr.replace(**changed), ())


def consts_of(jaxpr: Jaxpr) -> Sequence[Any]:
    """The constants that a jaxpr carries; none for an open one."""
    return getattr(jaxpr, "consts", ())


def without_consts(closed: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """An open jaxpr that takes the constants of `closed` as leading arguments, and these constants."""
    consts = list(closed.consts)
    if not consts:
        return open_jaxpr(closed), consts
    if not hasattr(partial_eval, "convert_constvars_jaxpr"):  # 0.10 does not export it
        from jax._src.interpreters import partial_eval as private

        return private.convert_constvars_jaxpr(open_jaxpr(closed)), consts
    return partial_eval.convert_constvars_jaxpr(open_jaxpr(closed)), consts


def is_saved(answer: Any) -> bool:
    """Whether a policy of `jax.checkpoint` says that a value is kept, be it on another device: a bool or an enum."""
    return answer if isinstance(answer, bool) else type(answer).__name__ != "RecomputeType"


def without_dead_code(closed: Jaxpr) -> Jaxpr:
    """A closed jaxpr without the equations that its results don't need."""
    body = open_jaxpr(closed)
    lean, _ = partial_eval.dce_jaxpr(body, [True] * len(body.outvars), instantiate=True)
    return lean if body is closed else closed.replace(jaxpr=lean)


def scan_counts(params: dict[str, Any]) -> tuple[int, int]:
    """How many of a scan's leading operands are constants, and how many after them are carries."""
    if "ft_in" in params:  # 0.11 and newer
        consts, carry, *_ = params["ft_in"].unpack()
        return len(consts), len(carry)
    return params["num_consts"], params["num_carry"]


def more_scanned(params: dict[str, Any], count: int) -> dict[str, Any]:
    """The parameters of a scan that runs over more arrays, which are its last operands."""
    if "ft_in" not in params:
        return params
    from jax._src import flattree  # type: ignore[attr-defined,unused-ignore]  # 0.11 and newer

    consts, carry, scanned = map(len, params["ft_in"].unpack())
    return {**params, "ft_in": flattree.pack(tuple(map(flattree.nones, (consts, carry, scanned + count))))}


def more_constants(params: dict[str, Any], count: int) -> dict[str, Any]:
    """The parameters of a `scan` or a `while` whose body takes more constants, after those that it has."""
    if "body_nconsts" in params:
        return {**params, "body_nconsts": params["body_nconsts"] + count}
    if "ft_in" not in params:
        return {**params, "num_consts": params["num_consts"] + count}
    from jax._src import flattree  # type: ignore[attr-defined,unused-ignore]  # 0.11 and newer

    consts, carry, scanned = map(len, params["ft_in"].unpack())
    return {**params, "ft_in": flattree.pack(tuple(map(flattree.nones, (consts + count, carry, scanned))))}


def more_jitted(params: dict[str, Any], count: int) -> dict[str, Any]:
    """The parameters of a jitted function that takes more operands after the others. Private in 0.10 to 0.12."""
    from jax._src.sharding_impls import UNSPECIFIED  # type: ignore[attr-defined]

    more = {"in_shardings": UNSPECIFIED, "in_layouts": None, "donated_invars": False}
    return {**params, **{name: (*params[name], *[value] * count) for name, value in more.items()}}


def places_nothing(eqn: Any) -> bool:
    """Whether a jitted function says nothing of where its operands and results lie, nor how it is compiled."""
    from jax._src.sharding_impls import UNSPECIFIED  # type: ignore[attr-defined]  # private in 0.10 to 0.12

    params = eqn.params
    shardings, layouts = (params[f"in_{what}"] + params[f"out_{what}"] for what in ("shardings", "layouts"))
    is_plain = all(x is UNSPECIFIED for x in shardings) and all(x is None for x in layouts)
    return is_plain and not params["compiler_options_kvs"]


@functools.cache
def primitives() -> dict[str, Primitive]:
    """All primitives of JAX by name. `jax.extend.core.primitives` lacks a third of them (0.10 to 0.12)."""
    return {
        value.name: value
        for name, module in list(sys.modules.items())
        if name.startswith("jax._src") and module is not None
        for value in vars(module).values()
        if isinstance(value, Primitive)
    }


def push_forward(
    fun: Callable[..., Sequence[Any]], primals: Sequence[Any], tangents: Sequence[Any]
) -> tuple[list[Any], list[Any]]:
    """The results of a function and their tangents; None for a symbolic zero.

    Private in 0.10 to 0.12: `jax.jvp` returns arrays of zeros.
    """
    from jax._src import core
    from jax._src.interpreters import ad

    with core.take_current_trace() as outer:
        trace = ad.JVPTrace(outer, core.TraceTag())
        with core.set_current_trace(trace):
            outs = fun(*(ad.maybe_jvp_tracer(trace, x, t) for x, t in zip(primals, tangents, strict=True)))
        pairs = [trace.to_primal_tangent_pair(out) for out in outs]
    return [x for x, _ in pairs], [None if isinstance(t, Zero) else t for _, t in pairs]


def pull_back(vjp: Any, operands: Sequence[Any], cotangents: Any) -> list[Any]:
    """What a function from `jax.vjp` makes of cotangents, which may be `ad.Zero`; None for a symbolic zero.

    `operands`: the types of what it differentiates by. Private in 0.10 to 0.12: called, such a function returns arrays
    of zeros.
    """
    from jax._src.interpreters import ad

    sums = [ad.ValAccum(aval.to_ct_aval()) for aval in operands]
    vjp.with_refs(*sums)(cotangents)
    return [None if isinstance(ct, Zero) else ct for ct in (each.freeze() for each in sums)]


def bound_axes() -> Any:
    """The named axes that collectives may name here. Private in 0.10 to 0.12."""
    from jax._src import core

    return core.get_axis_env()


def has_bound_axes() -> bool:
    """Whether there are such axes, as inside of a `shard_map`. Private in 0.10 to 0.12."""
    return bool(bound_axes().axis_sizes)


@contextlib.contextmanager
def binding_axes(axes: Any) -> Iterator[None]:
    """Bind the named axes that `bound_axes` found elsewhere. Private in 0.10 to 0.12."""
    from jax._src import core

    around = core.get_axis_env()
    core.trace_ctx.set_axis_env(axes)
    try:
        yield
    finally:
        core.trace_ctx.set_axis_env(around)


def name_in_errors(fn: Callable[..., Any], source: str, arguments: Sequence[str]) -> None:
    """Let JAX's errors about a trace of `fn` name another function, `"name at file:line"`, and other arguments.

    JAX reads this attribute of functions that it wraps itself; there is no public way in 0.10 to 0.12.
    """
    info = debug_info("amp", fn, (), {})
    fn.__fun_debug_info__ = info._replace(func_src_info=source, arg_names=tuple(arguments))  # type: ignore[attr-defined]


def trace_context() -> Any:
    """The part of JAX's configuration that traces depend on. Private in 0.10 to 0.12."""
    from jax._src import config

    return config.trace_context()


def current_context() -> Any:
    """The context that an equation gets that is traced now: mesh, device, metadata."""
    return open_jaxpr(jax.make_jaxpr(jax.lax.neg)(0.0)).eqns[0].ctx


def same_context(one: Any, other: Any) -> bool:
    """Whether two equations may run in one function, by their contexts. Those have no equality in 0.10 to 0.12.

    Contexts may differ in a mesh of automatic axes, which `vmap` gives to some of the equations that it adds: such axes
    are not part of a type.
    """
    if one is other:
        return True
    meshes = [context.cur_abstract_mesh for context in (one, other)]
    automatic = all(kind is jax.sharding.AxisType.Auto for mesh in meshes for kind in mesh.axis_types)
    names = {*type(one).__slots__} - {"cur_abstract_mesh", "__weakref__"}
    return automatic and all(getattr(one, name, None) == getattr(other, name, None) for name in names)


def jet_knows(primitive: Primitive, rule: Callable[..., Any]) -> None:
    """Give `jax.experimental.jet`, if it is imported, `rule(jet_rules, primals, series, **params)` for a primitive.

    There is no public way to do so in 0.10 to 0.12. A rule that is there already is kept.
    """
    module = sys.modules.get("jax.experimental.jet")
    if module is not None:
        module.jet_rules.setdefault(primitive, functools.partial(rule, module.jet_rules))


def jet_of(function: Callable[..., Any]) -> Callable[..., Any]:
    """The rule for `jet_knows` of a primitive that does what a function of its operands and parameters does."""

    def rule(rules: Any, primals: Sequence[Any], series: Sequence[Any], **params: Any) -> Any:
        from jax.experimental.jet import jet

        return jet(lambda *xs: function(*xs, **params), primals, series, factorial_scaled=False)

    return rule


class Hi(NamedTuple):
    """The inside of a `call_hi_primitive`, which is 0.12's form of several primitives."""

    kind: str  # checkpoint, custom_jvp, custom_vjp, name
    name: str
    jaxpr: Jaxpr
    num_consts: int = 0  # how many leading operands a user's function closes over


def inside_hi(hi: Any) -> Hi | None:
    """The inside of the `_prim` of a `call_hi_primitive` (0.11.2 and newer); None if it is not to be entered."""
    kind = type(hi).__name__
    if kind == "RematTraced":
        return Hi("checkpoint", "", hi.jaxpr)
    if kind in ("CheckpointName", "CheckpointNameFwd"):
        return Hi("name", hi.name, _identity_jaxpr(hi.in_avals_flat[0]))
    if kind not in ("CustomJVPTraced", "CustomVJPTraced") or consts_of(hi.traced.jaxpr):
        return None
    is_vjp, consts = kind == "CustomVJPTraced", len(jax.tree.leaves(hi.in_avals[0]))
    if is_vjp and jax.tree.leaves(hi.in_avals[1]):  # operands of its forward rule alone
        return None
    return Hi("custom_vjp" if is_vjp else "custom_jvp", hi.traced.fun_name, hi.traced.jaxpr, consts)


@functools.cache
def _identity_jaxpr(aval: Any) -> Jaxpr:
    return jax.make_jaxpr(lambda x: x)(aval)


def with_hi_checkpoint(hi: Any, jaxpr: Jaxpr, consts: int, more: int = 0, barrier: bool = False) -> Any:
    """The `_prim` of a checkpoint with another jaxpr, which takes more constants first, and more operands last."""
    own = len(hi.jaxpr.in_avals)
    return type(hi)(jaxpr, hi.policy, with_more_barriers(hi.prevent_cse, own, consts, more, barrier))


def with_more_barriers(
    flags: bool | tuple[bool, ...], own: int, first: int, last: int, barrier: bool = False
) -> bool | tuple[bool, ...]:
    """The `prevent_cse` of a checkpoint that takes more operands than its own: first, and last, with a barrier or not.

    One flag for all where that will do: a checkpoint with several can't be in another one that has a policy (JAX 0.10
    to 0.12).
    """
    if flags is False or not (first or last) or (flags is True and barrier and not first):
        return flags
    return (False,) * first + ((True,) * own if flags is True else flags) + (barrier,) * last


def with_hi_name(hi: Any, aval: Any) -> Any:
    """The `_prim` of a `checkpoint_name` for a value of another type."""
    return type(hi)(hi.name, aval)


def under_checkpoint() -> bool:
    """Whether a user's `jax.checkpoint` is being traced around this call."""
    from jax._src.core import trace_ctx

    trace = trace_ctx.trace
    while trace is not None:
        info = getattr(getattr(trace, "frame", None), "debug_info", None)
        if getattr(info, "traced_for", "") == "checkpoint / remat":
            return True
        trace = getattr(trace, "parent_trace", None)
    return False


def under_jit() -> bool:
    """Whether a jaxpr is being traced around this call, so that nothing here runs eagerly."""
    return jec.unsafe_am_i_under_a_jit_DO_NOT_USE()  # type: ignore[attr-defined]


def is_transformed(x: Any) -> bool:
    """Whether a transform such as `grad` or `vmap`, which runs equation by equation, is at work on a value."""
    return isinstance(x, jax.core.Tracer) and not isinstance(
        x, partial_eval.DynamicJaxprTracer | partial_eval.JaxprTracer
    )


def is_differentiated(x: Any) -> bool:
    """Whether reverse-mode differentiation, such as `jax.grad`, is at work on a value, perhaps under `vmap`.

    Private in 0.10 to 0.12: there is no public name for the classes.
    """
    while isinstance(x, jax.core.Tracer):
        kind = type(x).__name__
        if kind == "LinearizeTracer":
            return True
        x = x.val if kind == "BatchTracer" else getattr(x, "primal", None)
    return False


def producer_of(x: Any) -> tuple[Primitive, list[Any]] | None:
    """The primitive that made a value in the jaxpr that is being traced, and its operands; None if none did.

    Of a `jit`, what made its result inside, if that reads nothing but operands. Private in 0.10 to 0.12.
    """
    while hasattr(x, "primal"):
        x = x.primal
    if isinstance(x, _Inside):
        found: Any = x.equation()
        return None if found is None else (found.primitive, [x.at(atom) for atom in found.invars])
    made = getattr(x, "parent", None) if isinstance(x, partial_eval.DynamicJaxprTracer) else None
    if made is None:
        return None
    if made.primitive.name != "jit":
        return made.primitive, list(made.in_tracers)
    which = next(i for i, v in enumerate(made.outvars) if v is x.val)
    body = open_jaxpr(made.params["jaxpr"])
    return producer_of(_Inside(body, body.outvars[which], made.in_tracers))


class _Inside(NamedTuple):
    """A value in the body of a `jit` that is being traced."""

    body: Jaxpr
    atom: Any
    operands: Sequence[Any]

    def equation(self) -> Any:
        return next((eqn for eqn in self.body.eqns if any(v is self.atom for v in eqn.outvars)), None)

    def at(self, atom: Any) -> Any:
        at = next((i for i, v in enumerate(self.body.invars) if v is atom), None)
        return _Inside(self.body, atom, self.operands) if at is None else self.operands[at]


def varying_axes(x: Any) -> frozenset[Any]:
    """The axes of a `shard_map` along which a value, or a value of this type, differs between devices."""
    return frozenset((x if isinstance(x, jax.core.ShapedArray) else jax.typeof(x)).mat.varying)


def scalar_like(aval: Any, dtype: Any) -> Any:
    """The type of a number that differs between devices as a value of a type does."""
    sharding = aval.sharding.update(spec=jax.sharding.PartitionSpec())
    return aval.update(shape=(), dtype=dtype, weak_type=False, sharding=sharding)


def tracks_variation(axis: Any) -> bool:
    """Whether types say which values differ along an axis: in `shard_map`, unless `check_vma=False`."""
    return axis in varying_axes(jax.lax.axis_index(axis))


def as_varying(x: jax.Array, axes: frozenset[Any]) -> jax.Array:
    """`x`, in `shard_map` varying along `axes` too."""
    missing = tuple(axes - varying_axes(x))
    return jax.lax.pcast(x, missing, to="varying") if missing else x


def wants_devices(primitive: Primitive) -> None:
    """Let the lowering of a primitive know its devices, where these are known. Private in 0.10 to 0.12."""
    from jax._src import dispatch

    dispatch.prim_requires_devices_during_lowering.add(primitive)


def takes_layouts(ctx: Any) -> bool:
    """Whether a layout can be asked for in a lowering.

    `jax.export` refuses the custom call that asks, and the partitioner before 0.11.2 gathers the array on each device.
    """
    exported = ctx.module_context.lowering_parameters.for_export
    return not exported and (is_for_one_device(ctx) or jax.__version_info__ >= (0, 11, 2))


def is_for_one_device(ctx: Any) -> bool:
    """Whether a lowering is for a single device. What `jax.export` lowers for one runs on one."""
    context = ctx.module_context.axis_context
    devices = context.mesh.size if hasattr(context, "mesh") else getattr(context, "num_devices", 1)
    return devices == 1


def is_whole(ctx: Any) -> bool:
    """Whether XLA's partitioner splits nothing here: on a single device, and where a `shard_map` has split all axes."""
    context = ctx.module_context.axis_context
    by_hand = hasattr(context, "mesh") and set(context.manual_axes) == set(context.mesh.axis_names)
    return by_hand or is_for_one_device(ctx)


def has_devices(ctx: Any) -> bool:
    """Whether a lowering knows the devices that it is for. `jax.export` gives those of its arguments and means none."""
    if ctx.module_context.lowering_parameters.for_export:
        return False
    context = ctx.module_context.axis_context
    return getattr(context, "device_assignment", None) is not None or not hasattr(context, "device_assignment")
