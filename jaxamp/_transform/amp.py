"""`amp`: run a function in mixed precision.

The law: `amp(fn)` has `fn`'s signature, pytree structure, shapes and output dtypes; only dtypes inside change, and
the form in which XLA gets the same work (`_layout`, `_softmax`, `_masks`). It is pure, and composes with every JAX
transform on both sides.
"""

import contextlib
import enum
import functools
import types
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple, TypeVar, get_args, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu

from .._compat import EARLY_INLINE, current_name_stack, open_jaxpr, scopes, under_jit
from .._passes.masks import spread_masks
from .._plan.classify import Judge
from .._plan.plan import Plan, Planner
from .._plan.residuals import Keep, keeping_little, may_keep_little
from .._plan.sensitivity import Value, float_dtype, standing_of_argument
from .._policy.toml import Key, Lookup, Policy, load_policy, presets
from .interpreter import Interpreter, Ledger, Where

F = TypeVar("F", bound=Callable[..., Any])
PolicyLike = Policy | str | Any  # Any: os.PathLike

_CACHED_CALLS = 256


class Options(NamedTuple):
    """What `amp` was asked for, checked."""

    compute_dtype: np.dtype
    policy: Policy
    lookup: Lookup
    keep: Keep


def check_options(compute_dtype: Any, amp_policy: PolicyLike, keep: Keep = "auto") -> Options:
    """Check the keywords of `amp`, at the call that gives them."""
    try:
        dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)  # numpy takes None for float64
    except TypeError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise TypeError(
            f"compute_dtype is {compute_dtype!r}; expected a float of at least 16 bits. "
            "Write compute_dtype=jnp.bfloat16 or compute_dtype=jnp.float16."
        )
    if not isinstance(keep, str) or keep not in get_args(Keep):
        raise ValueError(
            f"keep is {keep!r}; expected one of {', '.join(map(repr, get_args(Keep)))}. Write keep='matmuls' to keep "
            "little for the backward pass, or leave it out."
        )
    policy = load_policy(amp_policy)
    return Options(dtype, policy, Lookup(policy, dtype), keep)


# -- calls as flat functions of arrays


class _Array:
    """Stands where an array was among the leaves of a call."""


_ARRAY = _Array()


class _Call(NamedTuple):
    """A call with its arrays taken out: the part that a trace depends on beside their types."""

    tree: Any
    static: tuple[Any, ...]
    kinds: tuple[Any, ...]  # tells 1, 1.0 and True apart, and 0.0 and -0.0
    path: tuple[str, ...]  # the named scopes around the call

    def __call__(self, *arrays: Any) -> Any:
        it = iter(arrays)
        fn, args, kwargs = jtu.tree_unflatten(self.tree, [next(it) if x is _ARRAY else x for x in self.static])
        return fn(*args, **kwargs)


@jtu.register_static
class _Rest(NamedTuple):
    """What a call returned, its arrays taken out. A pytree without leaves, so that `jit` keeps it with the trace."""

    tree: Any
    static: tuple[Any, ...]


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.Ref)


def _is_argument(x: Any) -> bool:
    return _is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # to plan a call, a shape does


def _split(tree: Any, is_array: Callable[[Any], bool]) -> tuple[list[Any], tuple[Any, ...], Any]:
    leaves, structure = jtu.tree_flatten(tree)
    arrays = [x for x in leaves if is_array(x)]
    return arrays, tuple(_ARRAY if is_array(x) else x for x in leaves), structure


def split_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[_Call, list[Any]]:
    """`fn` is split too: an Equinox module or a `jax.tree_util.Partial` is a function with arrays in it."""
    arrays, static, tree = _split((fn, args, kwargs), _is_argument)
    return _Call(tree, static, tuple(map(_kind, static)), scopes(current_name_stack())), arrays


def floats_of_first(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """Where the floats of the first argument are among the arrays of a call; those of `fn` come first."""
    before = sum(map(_is_argument, jtu.tree_leaves(fn)))
    first = [x for x in jtu.tree_leaves(args[:1]) if _is_argument(x)]
    return [before + i for i, x in enumerate(first) if jnp.issubdtype(x.dtype, jnp.floating)]


def _kind(x: Any) -> Any:
    return repr(x) if isinstance(x, float | complex) else type(x)


# Leaves that can't change under our feet, so that a trace made with them may be used again. An object of a user's class
# may hold arrays that are replaced between two calls.
_FROZEN = (str, bytes, bool, int, float, complex, type, np.dtype, enum.Enum, types.BuiltinFunctionType, _Array)


def _is_frozen(x: Any) -> bool:
    if isinstance(x, types.MethodType):
        return _is_frozen(x.__self__)
    if isinstance(x, functools.partial):
        return all(map(_is_frozen, (x.func, *x.args, *x.keywords.values())))
    return isinstance(x, (*_FROZEN, types.FunctionType)) or type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


def _is_cacheable(call: _Call) -> bool:
    return all(map(_is_frozen, call.static)) and isinstance(call.tree, Hashable) and _hashable(call)


def _hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True


# -- running


def plan_call(options: Options, call: _Call, arrays: Any) -> tuple[Plan, Planner, Any]:
    """Trace a call and plan it; the last result is the call's output with shapes for arrays."""
    rest: list[_Rest] = []

    def flat(*xs: Any) -> list[Any]:
        out, static, tree = _split(call(*xs), _is_array)
        rest.append(_Rest(tree, static))
        return out

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    if options.compute_dtype.itemsize < 4 and not options.lookup.inert:
        jaxpr = spread_masks(jaxpr)
    planner = Planner(Judge(options.lookup, options.compute_dtype))
    ins = [Value(standing_of_argument(v.aval), float_dtype(v.aval)) for v in open_jaxpr(jaxpr).invars]
    results = [True] * len(open_jaxpr(jaxpr).outvars)
    plan = planner.plan(jaxpr, ins, results, call.path, returned=results)
    return plan, planner, rest[-1]


def _restore(x: Any, aval: Any) -> Any:
    """A result in the dtype, and with the weak type, of `aval`."""
    dtype = float_dtype(aval)
    if dtype is None or x.dtype == dtype:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=aval.weak_type, sharding=None)


def run_plan(keep: Keep, planner: Planner, plan: Plan, arrays: Any, ledger: Ledger | None = None) -> list[Any]:
    """Run a planned call. Its results have the dtypes, and the weak types, that the user's function gives them."""
    whole = keep == "matmuls" and may_keep_little(plan.jaxpr)
    outside = Where.IN_CHECKPOINT if whole or keep == "all" else Where.OUTSIDE
    interpreter = Interpreter(planner, keep, outside, ledger=ledger)

    def run(*arrays: Any) -> list[Any]:
        return interpreter.evaluate(plan, arrays)

    outs = (keeping_little(run, in_loop=False) if whole else run)(*arrays)
    return [_restore(x, v.aval) for x, v in zip(outs, open_jaxpr(plan.jaxpr).outvars, strict=True)]


def _flat(options: Options, call: _Call) -> Callable[..., tuple[list[Any], _Rest]]:
    def flat(*arrays: Any) -> tuple[list[Any], _Rest]:
        plan, planner, rest = plan_call(options, call, arrays)
        return run_plan(options.keep, planner, plan, arrays), rest

    return flat


@overload
def amp(fn: F, *, compute_dtype: Any = ..., amp_policy: PolicyLike = ..., keep: Keep = ...) -> F: ...
@overload
def amp(
    fn: None = None, *, compute_dtype: Any = ..., amp_policy: PolicyLike = ..., keep: Keep = ...
) -> Callable[[F], F]: ...
def amp(
    fn: Any = None, *, compute_dtype: Any = jnp.float16, amp_policy: PolicyLike = "default", keep: Keep = "auto"
) -> Any:
    """Run a function in mixed precision.

    The function is traced to a jaxpr, the precision of each operation is decided from a policy and from what surrounds
    it, and the result is run. Matrix multiplications and convolutions run in `compute_dtype`; what lies between them
    follows; exponentials, sums, loop carries and positions stay in float32. Inputs, outputs and gradients keep their
    dtypes.

    Args:
        fn: The function: any JAX code, with arguments and results of any pytrees. Python numbers, strings, functions
            and other leaves that are no arrays are constants of the trace.
        compute_dtype: The low precision dtype, `float16` or `bfloat16`; `float32` leaves the function as it is.
        amp_policy: Which rule each operation runs under: a mapping, a preset's name (`default`, `conservative`, `fast`,
            `torch`), or the path of a TOML table.
        keep: What is kept for the backward pass. `"auto"`: in scans over layers the results of matmuls, elsewhere what
            JAX keeps, less what element-wise functions between low values would keep in float32. `"matmuls"`: the
            results of matmuls everywhere, for less memory and more time. `"all"`: what JAX keeps.
            A scan, or for `"matmuls"` a function, that has a `jax.checkpoint` or side effects in it is treated as what
            is outside of scans.

    Returns:
        A function like `fn`. Without `fn`, a decorator.

    >>> import jax, jax.numpy as jnp
    >>> @amp(compute_dtype=jnp.bfloat16)
    ... def loss(w, x):
    ...     return jnp.sum(jax.nn.softmax(x @ w) ** 2)
    >>> loss(jnp.ones((4, 4)), jnp.ones((2, 4))).dtype
    dtype('float32')

    **Sharp edges**

    - A cast to the dtype that a value has already leaves no trace in a jaxpr. Say `amp_stop` to keep an operation in
      float32.
    - JAX forgets the named scopes around a `jit` while it traces the inside: a scope reaches an `amp` called inside
      of a jitted function only if it is opened there.
    - A `jax.custom_vjp` or `jax.custom_jvp` function that is defined inside of `fn` and closes over an argument of `fn`
      can't be differentiated from outside, as with `grad(jit(fn))`. Pass the value as an argument, or write
      `amp(grad(fn))`.
    - Called outside of `jit`, the function is compiled once for each structure of its arguments, as with `jax.jit`: its
      Python side effects happen when it is traced.
    """
    options = check_options(compute_dtype, amp_policy, keep)
    if fn is None:
        return functools.partial(_amp, options=options)
    return _amp(fn, options=options)


def check_function(name: str, fn: Any) -> None:
    if not callable(fn):
        raise TypeError(
            f"{name} got {fn!r}, of type {type(fn).__name__}; expected a function. Write jaxamp.{name}(loss_fn), "
            f"and give the options by name: jaxamp.{name}(loss_fn, compute_dtype=jnp.bfloat16)."
        )


def _amp(fn: Callable[..., Any], *, options: Options) -> Callable[..., Any]:
    check_function("amp", fn)

    def compiled(call: _Call) -> Callable[..., tuple[list[Any], _Rest]]:
        flat = _flat(options, call)
        flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
        return jax.jit(flat, inline=EARLY_INLINE)

    remembered = functools.lru_cache(_CACHED_CALLS)(compiled)

    @functools.wraps(fn)
    def amp_fn(*args: Any, **kwargs: Any) -> Any:
        call, arrays = split_call(fn, args, kwargs)
        if under_jit():  # the trace around us owns the cache
            outs, rest = _flat(options, call)(*arrays)
        else:
            outs, rest = (remembered if _is_cacheable(call) else compiled)(call)(*arrays)
        it = iter(outs)
        return jtu.tree_unflatten(rest.tree, [next(it) if x is _ARRAY else x for x in rest.static])

    return amp_fn


@overload
def amp_stop(fn: F) -> F: ...
@overload
def amp_stop(fn: None = None) -> contextlib.AbstractContextManager[None]: ...
def amp_stop(fn: Any = None) -> Any:
    """Pin full precision: a context manager, and a decorator with or without parentheses.

    It opens the named scope `"amp_stop"`, a key of every policy.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     with amp_stop():
    ...         return jnp.sum(x @ w)
    """
    scope = jax.named_scope("amp_stop")
    if fn is None:
        return scope
    if not callable(fn):
        raise TypeError(
            f"amp_stop got {fn!r}, of type {type(fn).__name__}; expected a function or nothing. "
            "Write `with jaxamp.amp_stop():` or put `@jaxamp.amp_stop` above a function."
        )

    @functools.wraps(fn)
    def stopped(*args: Any, **kwargs: Any) -> Any:
        with jax.named_scope("amp_stop"):
            return fn(*args, **kwargs)

    return stopped


def unmatched_keys(
    fn: Callable[..., Any], *, compute_dtype: Any = jnp.float16, amp_policy: PolicyLike = "default"
) -> Callable[..., list[Key]]:
    """The keys of a policy that no operation of `fn` was found under, as a function of `fn`'s arguments.

    A scope's name that is misspelt, or that a library has changed, is reported here. Keys that come with a preset are
    left out. Nothing is computed; `jax.ShapeDtypeStruct`s do for arrays.

    >>> import jax.numpy as jnp, jaxamp
    >>> policy = jaxamp.default_amp_policy | {"atention": jaxamp.use_original_precision}
    >>> unmatched_keys(lambda x: x @ x, amp_policy=policy)(jnp.ones((2, 2)))
    ['atention']
    """
    check_function("unmatched_keys", fn)
    options = check_options(compute_dtype, amp_policy)

    def keys(*args: Any, **kwargs: Any) -> list[Key]:
        call, arrays = split_call(fn, args, kwargs)
        plan, _, _ = plan_call(options, call, arrays)
        return unmatched(options, [plan])

    return keys


def unmatched(options: Options, plans: Iterable[Plan]) -> list[Key]:
    """The keys of a policy, but for those of presets, that no step of some plans was found under."""
    found: set[Key] = set()
    seen: set[int] = set()
    waiting = list(plans)
    while waiting:
        plan = waiting.pop()
        if id(plan) not in seen:  # a function that is called often has one plan
            seen.add(id(plan))
            found.update(step.key for step in plan.steps)
            waiting += (body for step in plan.steps for body in step.bodies)
    ours = [load_policy(name) for name in presets()]
    return [
        key
        for key, rule in options.policy.items()
        if key not in found and not any(preset.get(key) == rule for preset in ours)
    ]
