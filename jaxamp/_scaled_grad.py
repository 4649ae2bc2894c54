"""Gradients through a dynamic loss scaler: `dynamic_scale_grad`, `dynamic_scale_value_and_grad`, `dynamic_scale_tx`.

The law: what comes back is what the plain transform gives, beside the next state of the scaler. The loss and aux are
untouched. Gradients, at least float32, are made with a cotangent of `scaler` in place of one, and divided by it.

    scale = state.scaler
    repeat:
        (loss, aux), grads = value_and_grad(loss_fn, cotangent=scale)
        grads /= scale
        finite = all_finite(grads)                      # agreed along axis_name
        stop if finite, or after redo_on_nan repeats, or if the scale can't fall
        scale = lowered(scale)
    if finite:
        state.scaler = scale
    next_state = state.adjust(finite)                   # a step given up lowers the scale once, not once per repeat
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import as_varying_as, consts_of, open_jaxpr, varies, zeros_like_aval
from ._scaler import DynamicScalerState, check_state
from ._tree import agreed, is_inexact, wider

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float16).smallest_normal)


# -- scaling


@jax.custom_jvp
def _seed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x`, whose derivative is multiplied by `scale`: a cotangent of one goes on as `scale`."""
    return x


@_seed.defjvp
def _seed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, scale = primals
    wide = wider(x.dtype, jnp.float32)
    return _seed(x, scale), (tangents[0].astype(wide) * scale.astype(wide)).astype(x.dtype)


def _holdable(scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale that a loss of this dtype can have as its cotangent: rounded, and a power of two where it overflows."""
    if not jnp.issubdtype(dtype, jnp.floating) or jnp.finfo(dtype).nmant >= 23:
        return scale
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(scale, info.nexp, info.nmant)  # XLA would drop a cast and its reverse
    return jnp.minimum(rounded, jnp.float32(2.0 ** np.floor(np.log2(float(info.max)))))


def scaled(tree: Any, scale: jax.Array) -> Any:
    """A pytree's floats multiplied by `scale`, in float32 at least."""
    return _each_float(tree, scale, jnp.multiply)


def unscaled(tree: Any, scale: jax.Array) -> Any:
    """A pytree's floats divided by `scale`, in float32 at least."""
    # XLA divides by a scalar with its reciprocal, which it flushes to zero for the largest scales.
    shrink = jnp.where(jnp.asarray(scale) > 2.0**100, jnp.float32(2.0**-100), jnp.float32(1))
    return _each_float(tree, scale * shrink, lambda x, s: x * shrink.astype(x.dtype) / s)


def _each_float(tree: Any, scale: jax.Array, op: Callable[..., Any]) -> Any:
    def leaf(x: Any) -> Any:
        if not (is_inexact(x) or isinstance(x, float | complex)):
            return x
        x = jnp.asarray(x)  # NumPy's float64 is float32, unless the user asked for 64 bits
        wide = wider(x.dtype, jnp.float32)
        return op(x.astype(wide), jnp.asarray(scale).astype(wide))

    return jax.tree.map(leaf, tree)


def _judged(grads: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether gradients divided by `scale` are finite, and the share of entries lost before: float16 subnormals, zeros.

    In one pass over them: the sum that counts what is lost is NaN if an entry is not finite.
    """
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x) and x.size]
    lost = [
        jnp.sum(
            jnp.where(jnp.isfinite(unscaled(x, scale)), (jnp.abs(x) < _SMALLEST_NORMAL).astype(jnp.float32), jnp.nan)
        )
        for x in leaves
    ]
    share = sum(lost, start=jnp.float32(0)) / max(1, sum(x.size for x in leaves))
    return ~jnp.isnan(share), share


# -- running


class _Evaluated(NamedTuple):
    """One evaluation of a transformed function, its gradients divided by their scale."""

    results: Any
    finite: jax.Array
    underflow: jax.Array


def _evaluated(grads: Any, scale: jax.Array, axis_name: Any, assemble: Callable[[Any], Any]) -> _Evaluated:
    finite, underflow = _judged(grads, scale)
    if axis_name is not None:
        finite, underflow = agreed(finite, axis_name), lax.pmean(underflow, axis_name)
    return _Evaluated(assemble(unscaled(grads, scale)), finite, underflow)


def _step(
    evaluate: Callable[[jax.Array], _Evaluated], state: DynamicScalerState, redo_on_nan: int
) -> tuple[DynamicScalerState, Any]:
    state = state.as_arrays()
    if redo_on_nan:
        out, redos, scale = _until_finite(evaluate, state, redo_on_nan)
        state = state._replace(
            scaler=jnp.where(out.finite, scale, state.scaler),
            count=jnp.where(redos > 0, 0, state.count),
            total_resets=state.total_resets + redos,
            total_redos=state.total_redos + redos,
        )
    else:
        out = evaluate(state.scaler)
    underflow = jnp.where(out.finite, out.underflow, state.underflow)
    return state.adjust(out.finite)._replace(underflow=underflow), out.results


def _until_finite(
    evaluate: Callable[[jax.Array], _Evaluated], state: DynamicScalerState, redo_on_nan: int
) -> tuple[_Evaluated, jax.Array, jax.Array]:
    """Evaluate until the gradients are finite: at most `1 + redo_on_nan` times, at ever smaller scales.

    One loop, and the evaluation once in the program: the results of the round before are overwritten, so the loop needs
    the memory of one evaluation.
    """
    rest: list[_Static] = []

    def flat(scale: jax.Array) -> list[Any]:
        out = evaluate(scale)
        arrays, static = _take_arrays(out.results)
        rest.append(static)
        return [out.finite, out.underflow, *arrays]

    start: tuple[Any, ...] = (jnp.array(True), jnp.int32(0), state.scaler)
    jaxpr = jax.make_jaxpr(flat)(state.scaler)
    finite = open_jaxpr(jaxpr).outvars[0].aval
    if varies(finite):  # in shard_map, each device with a scaler of its own: the scale will vary as this does
        start = tuple(as_varying_as(finite, x) for x in start)
        jaxpr = jax.make_jaxpr(flat)(start[-1])

    def again(carry: Any) -> jax.Array:
        return carry[0]

    def round_(carry: Any) -> Any:
        _, redos, scale, _ = carry
        # Only the backward pass depends on the scale. XLA would take the forward pass out of the loop, and keep all
        # that it saves until the last round. A barrier that has seen the scale holds it inside.
        consts = [lax.optimization_barrier((x, scale))[0] if is_inexact(x) else x for x in consts_of(jaxpr)]
        finite, *others = jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts, scale)
        smaller = state.lowered(scale)
        redo = ~finite & (redos < redo_on_nan) & (smaller < scale)
        return redo, redos + redo.astype(jnp.int32), jnp.where(redo, smaller, scale), [finite, *others]

    first: Any = (*start, [zeros_like_aval(v.aval) for v in open_jaxpr(jaxpr).outvars])
    _, redos, scale, (finite, underflow, *arrays) = lax.while_loop(again, round_, first)
    return _Evaluated(rest[-1].put_back(arrays), finite, underflow), redos, scale


class _Static(NamedTuple):
    """Results with their arrays taken out, and for a PRNG key among these how to make it of its bits."""

    tree: Any
    leaves: list[Any]
    keys: list[Any]

    def put_back(self, arrays: list[Any]) -> Any:
        wrapped = (
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arrays, self.keys, strict=True)
        )
        return jax.tree.unflatten(self.tree, [next(wrapped) if x is _ARRAY else x for x in self.leaves])


_ARRAY = object()


def _take_arrays(results: Any) -> tuple[list[Any], _Static]:
    """A loop carries arrays alone: float0, strings and constants of NumPy stay outside, keys go as their bits."""
    leaves, tree = jax.tree.flatten(results)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    keys = [jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in arrays]
    bits = [x if impl is None else jax.random.key_data(x) for x, impl in zip(arrays, keys, strict=True)]
    return bits, _Static(tree, [_ARRAY if isinstance(x, jax.Array) else x for x in leaves], keys)


# -- the public transforms


def _with_keyword(keyword: str, fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """`functools.wraps(fun)`, with one more keyword in the signature: `equinox.filter_jit` binds arguments to it."""

    def wrap(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(wrapper, fun)
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            return wrapper
        parameters = list(signature.parameters.values())
        extra = inspect.Parameter(keyword, inspect.Parameter.KEYWORD_ONLY, default=None)
        at = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters[:at], extra, *parameters[at:]], return_annotation=inspect.Signature.empty
        )
        return wrapper

    return wrap


def dynamic_scale_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: Any = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Like `dynamic_scale_value_and_grad`, without the value: `(next_state, grads)`, or `(next_state, (grads, aux))`.

    >>> import jax.numpy as jnp, jaxamp
    >>> grad_fn = jaxamp.dynamic_scale_grad(lambda w, x: jnp.sum(w * x))
    >>> state, grads = grad_fn(jnp.ones(2), jnp.ones(2), dynamic_scaler_state=jaxamp.DynamicScalerState())
    >>> grads, int(state.count)
    (Array([1., 1.], dtype=float32), 1)
    """
    name = "dynamic_scale_grad"

    def form(value: Any, aux: Any, grads: Any) -> Any:
        return (grads, aux) if has_aux else grads

    return _dynamic_scale(name, fun, form, has_aux, redo_on_nan, filter, axis_name, kwargs)


def dynamic_scale_value_and_grad(
    fun: Callable[..., Any],
    *,
    has_aux: bool = False,
    redo_on_nan: int = 0,
    filter: bool = True,
    axis_name: Any = None,
    **kwargs: Any,
) -> Callable[..., Any]:
    """Differentiate a loss with dynamic loss scaling.

    The backward pass starts from the scale in place of one, so that small gradients don't vanish in float16; the
    gradients are divided by it afterwards, in float32. The loss itself is never multiplied, so it can't overflow; both
    it and aux come back as they are. Whether the step counts as finite is judged on the gradients alone.

    Args:
        fun: The loss, most often `jaxamp.amp(loss_fn)`. Returns a scalar, or `(scalar, aux)`.
        has_aux: Whether `fun` returns a pair, as in `jax.value_and_grad`.
        redo_on_nan: How many times to recompute non-finite gradients at a smaller scale, inside of the compiled step.
            If none of them is finite, the last ones are returned as they are, the scale is lowered once, and `skipped`
            in the state counts the step.
        filter: Differentiate with `equinox.filter_value_and_grad`: the first argument's floating-point arrays. If
            `False`, with `jax.value_and_grad`, and `argnums`, `holomorphic` and `allow_int` go there.
        axis_name: In `pmap` and `shard_map`, the axis or axes along which all devices take part in one step: they agree
            on whether it was finite. Under `jit` with sharded arrays there is nothing to agree on.
        **kwargs: For `jax.value_and_grad`, if `filter` is `False`.

    Returns:
        A function like `fun` with the keyword `dynamic_scaler_state`, a `DynamicScalerState`. It returns
        `(next_state, (value, grads))`, or `(next_state, ((value, aux), grads))`. Gradients are float32 at least, also
        those of float16 parameters.

    >>> import jax.numpy as jnp, jaxamp
    >>> loss = jaxamp.amp(lambda w, x: jnp.sum((x @ w) ** 2))
    >>> grad_fn = jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=3)
    >>> state = jaxamp.DynamicScalerState()
    >>> state, (value, grads) = grad_fn(jnp.ones((2, 1)), jnp.ones((4, 2)) / 2, dynamic_scaler_state=state)
    >>> float(value), grads[0, 0].item(), float(state.scaler), int(state.total_redos)
    (4.0, 4.0, 8192.0, 2)

    **Sharp edges**

    - Gradients that are not finite come back as they are. Give `state.finite` to `jaxamp.update_if_finite`.
    - In `pmap`, and in `shard_map` where the gradients differ between devices, leave out `axis_name` only if each
      device trains a model of its own. With `redo_on_nan` devices that don't agree would wait for each other for ever.
    - A loss of dtype float16 has a float16 cotangent, which holds scales up to 2**15. Larger ones act as that.
    - Outside of `jit`, `redo_on_nan` compiles its loop at each call.
    """
    name = "dynamic_scale_value_and_grad"

    def form(value: Any, aux: Any, grads: Any) -> Any:
        return ((value, aux), grads) if has_aux else (value, grads)

    return _dynamic_scale(name, fun, form, has_aux, redo_on_nan, filter, axis_name, kwargs)


def _dynamic_scale(
    name: str,
    fun: Callable[..., Any],
    form: Callable[[Any, Any, Any], Any],
    has_aux: bool,
    redo_on_nan: int,
    filter: bool,
    axis_name: Any,
    kwargs: dict[str, Any],
) -> Callable[..., Any]:
    _check_options(name, fun, redo_on_nan)
    if filter and kwargs:
        raise TypeError(
            f"{name} got {', '.join(kwargs)} with filter=True; expected them with filter=False only. Equinox "
            f"differentiates the first argument: move it there, or write {name}(fun, filter=False, ...)."
        )

    # The scale is a keyword argument, not a value closed over: a transform may keep what it traced.
    @_with_keyword("_loss_scale", fun)
    def seeded(*args: Any, _loss_scale: jax.Array, **f_kwargs: Any) -> Any:
        value, aux = _as_loss(name, fun(*args, **f_kwargs), has_aux)
        scale = _holdable(_loss_scale, value.dtype)
        return _seed(value, scale), (scale, aux)

    transform = eqx.filter_value_and_grad if filter else jax.value_and_grad
    value_and_grad = transform(seeded, has_aux=True, **kwargs)

    @_with_keyword("dynamic_scaler_state", fun)
    def scaled_grad(*args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
        state = _pop_state(name, f_kwargs)
        if not filter:
            _check_arguments(name, args, kwargs)

        def evaluate(scale: jax.Array) -> _Evaluated:
            (value, (used, aux)), grads = value_and_grad(*args, _loss_scale=scale, **f_kwargs)
            return _evaluated(grads, used, axis_name, functools.partial(form, value, aux))

        return _step(evaluate, state, redo_on_nan)

    return scaled_grad


def dynamic_scale_tx(
    transform: Callable[..., Any],
    redo_on_nan: int = 0,
    *,
    where: Callable[[Any], Any] | None = None,
    axis_name: Any = None,
) -> Callable[..., Any]:
    """Give any transform that makes gradients a dynamic loss scaler.

    Args:
        transform: Takes a function and returns one that differentiates it: `jax.grad`, `jax.jacrev`, a per-example
            gradient, one of your own. It must pass keyword arguments on to the function.
        redo_on_nan: As for `dynamic_scale_value_and_grad`.
        where: From the results of the transformed function to the gradients among them, as in `equinox.tree_at`. They
            are all gradients if left out.
        axis_name: As for `dynamic_scale_value_and_grad`.

    Returns:
        A transform. The functions that it makes take the keyword `dynamic_scaler_state` and return
        `(next_state, results)`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> transform = dynamic_scale_tx(jax.value_and_grad, where=lambda results: results[1])
    >>> state, (value, grad) = transform(jnp.square)(3.0, dynamic_scaler_state=jaxamp.DynamicScalerState())
    >>> float(value), float(grad)
    (9.0, 6.0)

    **Sharp edges**

    - A result of dtype float16 has a float16 cotangent. A scale beyond 2**15 overflows there, and is lowered.
    """
    name = "dynamic_scale_tx"
    _check_options(name, transform, redo_on_nan)

    def scaled_transform(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        has_aux = kwargs.get("has_aux", False)

        @_with_keyword("_loss_scale", fun)
        def seeded(*f_args: Any, _loss_scale: jax.Array, **f_kwargs: Any) -> Any:
            def seed(x: Any) -> Any:
                return _seed(jnp.asarray(x), _loss_scale) if is_inexact(x) else x

            out = fun(*f_args, **f_kwargs)
            return (jax.tree.map(seed, out[0]), out[1]) if has_aux else jax.tree.map(seed, out)

        transformed = transform(seeded, *args, **kwargs)

        @_with_keyword("dynamic_scaler_state", fun)
        def scaled_fun(*f_args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
            state = _pop_state(name, f_kwargs)

            def evaluate(scale: jax.Array) -> _Evaluated:
                results = transformed(*f_args, _loss_scale=scale, **f_kwargs)
                if where is None:
                    return _evaluated(results, scale, axis_name, lambda grads: grads)
                return _evaluated(where(results), scale, axis_name, functools.partial(eqx.tree_at, where, results))

            return _step(evaluate, state, redo_on_nan)

        return scaled_fun

    return scaled_transform


# -- bad input


def _check_options(name: str, fun: Any, redo_on_nan: Any) -> None:
    if not callable(fun):
        raise TypeError(
            f"{name} got {fun!r}, of type {type(fun).__name__}; expected a function. "
            f"Write jaxamp.{name}({'jax.grad' if name.endswith('tx') else 'jaxamp.amp(loss_fn)'})."
        )
    if isinstance(redo_on_nan, bool) or not isinstance(redo_on_nan, int | np.integer) or redo_on_nan < 0:
        raise ValueError(
            f"{name} got redo_on_nan={redo_on_nan!r}; expected a number of recomputations, 0 or more. "
            "Write redo_on_nan=3, or leave it out to skip such steps."
        )


def _pop_state(name: str, kwargs: dict[str, Any]) -> DynamicScalerState:
    state = kwargs.pop("dynamic_scaler_state", None)
    if state is None:
        raise TypeError(
            f"the function that {name} made was called without dynamic_scaler_state; expected a DynamicScalerState in "
            "that keyword. Write grad_fn(..., dynamic_scaler_state=state), with state = jaxamp.DynamicScalerState() at "
            "the beginning."
        )
    check_state(name, state)
    return state


def _as_loss(name: str, out: Any, has_aux: bool) -> tuple[jax.Array, Any]:
    """The loss and aux of what the user's function returned."""
    if has_aux and not (isinstance(out, tuple) and len(out) == 2):
        raise TypeError(
            f"{name} got a function that returned {_described(out)}; with has_aux=True, expected a pair. "
            "Write `return loss, aux`."
        )
    value, aux = out if has_aux else (out, None)
    if not (is_inexact(value) or isinstance(value, float | complex)) or np.shape(value):
        several = isinstance(value, tuple) and not has_aux
        raise TypeError(
            f"{name} got a function whose loss is {_described(value)}; expected one floating-point number. "
            + ("Write has_aux=True if it is (loss, aux)." if several else "Reduce it, for instance with jnp.mean.")
        )
    return jnp.asarray(value), aux


def _described(x: Any) -> str:
    if hasattr(x, "shape") and hasattr(x, "dtype"):
        return f"an array of shape {x.shape} and dtype {x.dtype}"
    return f"a tuple of {len(x)}" if isinstance(x, tuple) else repr(x)


def _check_arguments(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """JAX refuses integers too, later, and can't say what to write with us."""
    if kwargs.get("allow_int"):
        return
    argnums = kwargs.get("argnums", 0)
    for i in (argnums,) if isinstance(argnums, int) else argnums:
        if not -len(args) <= i < len(args):
            return  # JAX says so
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            dtype = jnp.result_type(leaf) if isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") else None
            if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{name} was asked for the gradient by argument {i}{jax.tree_util.keystr(path)}, of dtype {dtype}; "
                    "expected floating-point numbers. Write filter=True to pass over such leaves, or allow_int=True."
                )
