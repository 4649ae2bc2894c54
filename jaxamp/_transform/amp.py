"""`amp`: run a function in mixed precision.

The law: `amp(fn)` has `fn`'s signature, pytree structure, shapes and output dtypes. Only dtypes inside change, and the
form in which XLA gets the same work (`_passes`). It is pure, and composes with every JAX transform on both sides.
"""

import contextlib
import functools
import operator
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar, overload

import equinox as eqx
import jax
import numpy as np
from jax import lax
from jax import tree_util as jtu

from .. import _passes
from .._compat import EARLY_INLINE, Jaxpr, is_transformed, open_jaxpr, under_jit
from .._formats import Formats, float_dtype
from .._jaxpr import evaluate, make_room
from .._passes.send_low import send_low
from .._plan.classify import Classifier
from .._plan.plan import Plan, Setting
from .._plan.planner import Planner, Want
from .._plan.residuals import Keep
from .._plan.sensitivity import Value, sensitivity_of_argument
from .._traits import teach_jet
from .call import Call, Result, split_call
from .delayed_scales import DelayedScales, taken
from .interpreter import Interpreter
from .ledger import Ledger
from .loss_scaling import warn_without_scaler
from .names import name_of
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

    call.name(flat)
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
    options.check_keys()
    return Planned(plan, planner, options.enabled(_passes.PROGRAM_PASSES), results[-1])


def program_of(planned: Planned, arrays: Any, ledger: Ledger | None = None) -> Jaxpr:
    """What running a planned call gives, before the passes over it."""
    transformed = ledger is None and any(map(is_transformed, arrays))
    sends_low = send_low in planned.passes
    interpreter = Interpreter(planned.planner, ledger=ledger, is_transformed=transformed, sends_low=sends_low)

    def run(*arrays: Any) -> list[Any]:
        return interpreter.evaluate(planned.plan, arrays)

    return jax.make_jaxpr(run)(*arrays)


def run_plan(
    planned: Planned, arrays: Any, ledger: Ledger | None = None, scales: DelayedScales | None = None
) -> list[Any]:
    """Run a planned call. Its results have the dtypes, and the weak types, that the user's function gives them."""
    plan = planned.plan
    if not plan.touched and ledger is None and scales is None:
        return evaluate(plan.jaxpr, arrays)
    program = program_of(planned, arrays, ledger)
    if scales is not None:
        program, slots = taken(scales, program)
        arrays = [*arrays, *slots]
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
    def flat(scales: DelayedScales | None, *arrays: Any) -> tuple[list[Any], Result]:
        planned = plan_call(options, call, arrays)
        return run_plan(planned, arrays, scales=scales), planned.result._replace(is_low=planned.plan.touched)

    return flat


def _compiled(options: Options, call: Call, name: str) -> Callable[..., tuple[list[Any], Result]]:
    flat = _flat(options, call)
    flat.__name__ = name
    return jax.jit(flat, inline=EARLY_INLINE)


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
            `fp8`, `fp8_delayed`, `torch`), or the path of a TOML table.
        keep: What is kept for the backward pass. `"auto"`: the results of matmuls, what goes from one layer to the
            next, rounded parameters, and costly activations between convolutions; the rest is computed again.
            `"matmuls"`: the results of matmuls alone, for less memory and more time. `"all"`: what JAX keeps. A
            `jax.checkpoint` in the function decides for itself.
        disable_passes: Names of optimisations to leave out, to find out what one does or costs: `merge_repeats`,
            `merge_joins`, `merge_sums`, `spread_masks`, `fold_transposes`, `order_results`, `align_matmuls`,
            `multiply_outer_products`, `low_softmaxes`, `hold_streams_low`, `derive_recurrences`, `round_early`,
            `keep_activations`, `pool_by_places`, `pick_labels`, `sum_lookups`, `write_negated_lookups`,
            `round_norm_cotangents`, `round_exponent_cotangents`, `square_centered`, `sum_channels_once`,
            `share_cotangents`, `share_quantized`, `send_low`, `hoist_quantized`, `sum_in_loops`, `carry_low`,
            `keep_states_low`, `recompute`, `round_in_loops`, `round_once`.

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
    return AmpDecorator(options) if fn is None else Amped(fn, Settings(options))


class Settings:
    """The options of an `amp`, and the calls that it has compiled. Not equal to those of any other `amp`."""

    def __init__(self, options: Options):
        self.options = options
        self.has_warned = False
        self.compiled = functools.partial(_compiled, options)
        self.remembered = functools.lru_cache(_CACHED_CALLS)(self.compiled)

    def __repr__(self) -> str:
        return repr(self.options)


class Amped:
    """What `amp` returns: a function in mixed precision.

    A pytree of what it wraps, so that the arrays of an Equinox module in it are seen by `equinox.filter_jit`. It can be
    pickled and copied if the function can. It wraps and binds as a function does.
    """

    __slots__ = ("__dict__", "__weakref__", "_fn", "_settings")  # `functools.wraps` copies the `__dict__`

    def __init__(self, fn: Callable[..., Any], settings: Settings):
        check_function("amp", fn)
        self._wrap(fn, settings)

    def _wrap(self, fn: Any, settings: Settings) -> None:
        self._fn, self._settings = fn, settings
        functools.update_wrapper(self, fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(None, args, kwargs)

    @property
    def options(self) -> Options:
        return self._settings.options

    @property
    def function(self) -> Callable[..., Any]:
        return self._fn

    def run(self, scales: DelayedScales | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call it, with the state of delayed scaling."""
        teach_jet()
        settings = self._settings
        call, arrays, nodes = split_call(self._fn, args, kwargs)
        if under_jit():  # the trace around us owns the cache
            outs, result = _flat(settings.options, call)(scales, *arrays)
        else:
            compiled = settings.remembered if call.is_cacheable else settings.compiled
            outs, result = compiled(call, name_of(self._fn))(scales, *arrays)
        if result.is_low and settings.options.compute_dtype == np.float16 and not settings.has_warned:
            settings.has_warned = warn_without_scaler(repr(self), arrays)
        return result.with_arrays(outs, nodes)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        if instance is None:
            return self
        # The method of an Equinox module is a pytree too.
        return jtu.Partial(self, instance) if isinstance(instance, eqx.Module) else types.MethodType(self, instance)

    def __repr__(self) -> str:
        return f"amp({name_of(self._fn)}, {self._settings})"

    def __reduce__(self) -> Any:
        if _at(self.__module__, getattr(self, "__qualname__", "")) is self:  # decorated: the function has lost its name
            return self.__qualname__
        return _rebuild, (self._fn, *self._settings.options.given)


def without_amp(
    caller: str, fn: Any, compute_dtype: Any, amp_policy: PolicyLike, keep: Keep = "auto", disable_passes: Any = ()
) -> tuple[Callable[..., Any], Options]:
    """The function that a tool is to look at, and the options. Of an `amp`, what it wraps, and its options where the
    tool is given none."""
    check_function(caller, fn)
    if not isinstance(fn, Amped):
        return fn, check_options(compute_dtype, amp_policy, keep, disable_passes)
    own_dtype, own_policy, own_keep, own_passes = fn.options.given
    is_unsaid = lambda option, default: isinstance(option, str) and option == default
    options = check_options(
        own_dtype if is_unsaid(compute_dtype, "auto") else compute_dtype,
        own_policy if is_unsaid(amp_policy, "default") else amp_policy,
        own_keep if is_unsaid(keep, "auto") else keep,
        disable_passes or own_passes,
    )
    return fn.function, options


def amp_of(caller: str, fn: Any) -> Amped:
    """A function from `amp`, or an error in the words of `caller`."""
    if not isinstance(fn, Amped):
        raise TypeError(
            f"{caller} got {fn!r}; expected a function from jaxamp.amp. Write jaxamp.amp(fn, amp_policy='fp8_delayed') "
            f"first, and {caller} of the outcome."
        )
    return fn


def _at(module: str, qualname: str) -> Any:
    """What stands in a module under a name."""
    try:
        return operator.attrgetter(qualname)(sys.modules[module])
    except (KeyError, AttributeError):
        return None


def _rebuild(fn: Callable[..., Any], *given: Any) -> Amped:
    return Amped(fn, Settings(check_options(*given)))


def _unflatten(settings: Settings, children: Any) -> Amped:
    amped = object.__new__(Amped)
    amped._wrap(children[0], settings)
    return amped


jtu.register_pytree_with_keys(
    Amped,
    lambda amped: (((jtu.GetAttrKey("__wrapped__"), amped._fn),), amped._settings),
    _unflatten,
    lambda amped: ((amped._fn,), amped._settings),
)


class AmpDecorator:
    """What `amp` returns without a function."""

    def __init__(self, options: Options):
        self._options = options

    def __call__(self, fn: Callable[..., Any]) -> Amped:
        return Amped(fn, Settings(self._options))

    def __repr__(self) -> str:
        return f"amp({self._options})"

    def __reduce__(self) -> Any:
        return _decorator, self._options.given

    def __enter__(self) -> NoReturn:
        raise TypeError(
            "`with jaxamp.amp():` got a block of code; expected a function, because jaxamp changes what JAX traces. "
            "Write `loss = jaxamp.amp(loss_fn)` and call it, or put `@jaxamp.amp` above the function."
        )

    def __exit__(self, *error: Any) -> None: ...


def _decorator(*given: Any) -> AmpDecorator:
    return AmpDecorator(check_options(*given))


@overload
def amp_stop(fn: F) -> F: ...
@overload
def amp_stop(fn: None = None) -> contextlib.AbstractContextManager[None]: ...
def amp_stop(fn: Any = None) -> Any:
    """Pin full precision: a context manager, and a decorator with or without parentheses.

    It opens the named scope `"amp_stop"`, a key of every policy.

    Args:
        fn: The function to decorate; nothing for a context manager.

    Returns:
        A function like `fn`, or a context manager.

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
