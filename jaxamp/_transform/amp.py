"""`amp`: run a function in mixed precision.

The law: `amp(fn)` has `fn`'s signature, pytree structure, shapes and output dtypes. Only dtypes inside change, and the
form in which XLA gets the same work (`_passes`). It is pure, and composes with every JAX transform on both sides.
"""

import contextlib
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, overload

import jax
from jax import lax

from .. import _passes
from .._compat import EARLY_INLINE, Jaxpr, is_transformed, open_jaxpr, under_jit
from .._formats import Formats, float_dtype
from .._jaxpr import evaluate, make_room
from .._plan.classify import Classifier
from .._plan.plan import Plan, Setting
from .._plan.planner import Planner, Want
from .._plan.residuals import Keep
from .._plan.sensitivity import Value, sensitivity_of_argument
from .._traits import teach_jet
from .call import Call, Result, split_call
from .interpreter import Interpreter
from .ledger import Ledger
from .options import Options, PolicyLike, check_function, check_options

F = TypeVar("F", bound=Callable[..., Any])

_CACHED_CALLS = 256


class Planned(NamedTuple):
    """A call, traced and planned."""

    plan: Plan
    planner: Planner
    passes: Sequence[Callable[[Jaxpr, Setting], Jaxpr]]  # of the program that running the plan gives
    result: Result


def plan_call(options: Options, call: Call, arrays: Any) -> Planned:
    """Trace a call and plan it."""
    results: list[Result] = []

    def flat(*xs: Any) -> list[Any]:
        out, result = call(*xs)
        results.append(result)
        return out

    jaxpr = jax.make_jaxpr(flat)(*arrays)
    make_room(jaxpr)
    formats = Formats(options.compute_dtype)
    if formats.narrows and not options.lookup.inert:
        for rewrite in options.enabled(_passes.JAXPR_PASSES):
            jaxpr = rewrite(jaxpr)
    setting = Setting(formats, options.keep, options.lookup.communication)
    planner = Planner(Classifier(options.lookup, formats), setting, options.enabled(_passes.PLAN_PASSES))
    avals = [v.aval for v in open_jaxpr(jaxpr).invars]
    ins = [Value(sensitivity_of_argument(aval), formats.of_aval(aval), given=True) for aval in avals]
    outs = len(open_jaxpr(jaxpr).outvars)
    plan = planner.plan(jaxpr, ins, [Want.LAST] * outs, call.path, returned=[True] * outs)
    return Planned(plan, planner, options.enabled(_passes.PROGRAM_PASSES), results[-1])


def run_plan(planned: Planned, arrays: Any, ledger: Ledger | None = None) -> list[Any]:
    """Run a planned call. Its results have the dtypes, and the weak types, that the user's function gives them."""
    plan = planned.plan
    if not plan.touched and ledger is None:
        return evaluate(plan.jaxpr, arrays)
    transformed = ledger is None and any(map(is_transformed, arrays))
    interpreter = Interpreter(planned.planner, ledger=ledger, is_transformed=transformed)

    def run(*arrays: Any) -> list[Any]:
        return interpreter.evaluate(plan, arrays)

    program = jax.make_jaxpr(run)(*arrays)
    for rewrite in planned.passes if plan.touched else ():
        program = rewrite(program, plan.setting)
    outs = evaluate(program, arrays)
    return [_restore(x, v.aval) for x, v in zip(outs, open_jaxpr(plan.jaxpr).outvars, strict=True)]


def _restore(x: Any, aval: Any) -> Any:
    """A result in the dtype, and with the weak type, of `aval`."""
    dtype = float_dtype(aval)
    if dtype is None or x.dtype == dtype:
        return x
    return lax.convert_element_type_p.bind(x, new_dtype=dtype, weak_type=aval.weak_type, sharding=None)


def _flat(options: Options, call: Call) -> Callable[..., tuple[list[Any], Result]]:
    def flat(*arrays: Any) -> tuple[list[Any], Result]:
        planned = plan_call(options, call, arrays)
        return run_plan(planned, arrays), planned.result

    return flat


@overload
def amp(
    fn: F,
    *,
    compute_dtype: Any = ...,
    amp_policy: PolicyLike = ...,
    keep: Keep = ...,
    disable_passes: Sequence[str] = ...,
) -> F: ...
@overload
def amp(
    fn: None = None,
    *,
    compute_dtype: Any = ...,
    amp_policy: PolicyLike = ...,
    keep: Keep = ...,
    disable_passes: Sequence[str] = ...,
) -> Callable[[F], F]: ...
def amp(
    fn: Any = None,
    *,
    compute_dtype: Any = "auto",
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
) -> Any:
    """Run a function in mixed precision.

    The function is traced to a jaxpr, the precision of each operation is decided from a policy and from its
    surroundings, and the result is run. Matrix multiplications and convolutions run in `compute_dtype`; the operations
    between them follow; exponentials, sums, loop carries and positions stay in float32. Inputs, outputs and gradients
    keep their dtypes.

    Args:
        fn: The function: any JAX code, with any pytrees as arguments and results. Leaves that are not arrays (Python
            numbers, strings, functions) are constants of the trace. Flax NNX objects are updated in place.
        compute_dtype: The low precision dtype, `float16` or `bfloat16`; `float32` leaves the function as it is.
            `"auto"`: `bfloat16` if the policy quantises, as `fp8` does, and else `float16`. A number format, as
            `"e2m1"` or `jaxamp.format(...)`: all matmuls in that format, as `jaxamp.use_formats` says, and the rest in
            `bfloat16`.
        amp_policy: Which rule each operation runs under: a mapping, a preset's name (`default`, `conservative`, `fast`,
            `fp8`, `torch`), or the path of a TOML table.
        keep: What is kept for the backward pass. `"auto"`: the results of matmuls, and what goes from one layer to the
            next; the rest is computed again. `"matmuls"`: the results of matmuls alone, for less memory and more time.
            `"all"`: what JAX keeps. A `jax.checkpoint` in the function decides for itself.
        disable_passes: Names of optimisations to leave out, to find out what one does or costs: `spread_masks`,
            `fold_transposes`, `order_results`, `low_softmaxes`, `hold_streams_low`, `share_cotangents`, `send_low`,
            `recompute`.

    Returns:
        A function like `fn`. Without `fn`, a decorator.

    >>> import jax, jax.numpy as jnp
    >>> @amp(compute_dtype=jnp.bfloat16)
    ... def loss(w, x):
    ...     return jnp.sum(jax.nn.softmax(x @ w) ** 2)
    >>> loss(jnp.ones((4, 4)), jnp.ones((2, 4))).dtype
    dtype('float32')

    **Sharp edges**

    - A cast to the dtype that a value already has leaves no trace in a jaxpr. Use `amp_stop` to keep an operation in
      float32.
    - JAX forgets the named scopes around a `jit` while it traces the inside: a scope reaches an `amp` called inside of
      a jitted function only if it is opened there.
    - A `jax.custom_vjp` or `jax.custom_jvp` function that is defined inside of `fn` and closes over an argument of `fn`
      can't be differentiated from outside, as with `grad(jit(fn))`. Pass the value as an argument, or write
      `amp(grad(fn))`.
    - The function may not change its arguments in place, except NNX objects and `jax.Ref`s.
    - Called outside of `jit`, the function is compiled once for each structure of its arguments, as with `jax.jit`: its
      Python side effects happen when it is traced.
    """
    options = check_options(compute_dtype, amp_policy, keep, disable_passes)
    if fn is None:
        return functools.partial(_amp, options=options)
    return _amp(fn, options=options)


def _amp(fn: Callable[..., Any], *, options: Options) -> Callable[..., Any]:
    check_function("amp", fn)

    def compiled(call: Call) -> Callable[..., tuple[list[Any], Result]]:
        flat = _flat(options, call)
        flat.__name__ = getattr(fn, "__name__", type(fn).__name__)
        return jax.jit(flat, inline=EARLY_INLINE)

    remembered = functools.lru_cache(_CACHED_CALLS)(compiled)

    @functools.wraps(fn)
    def amp_fn(*args: Any, **kwargs: Any) -> Any:
        teach_jet()
        call, arrays, nodes = split_call(fn, args, kwargs)
        if under_jit():  # the trace around us owns the cache
            outs, result = _flat(options, call)(*arrays)
        else:
            outs, result = (remembered if call.is_cacheable else compiled)(call)(*arrays)
        return result.with_arrays(outs, nodes)

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
