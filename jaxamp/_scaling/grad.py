"""Gradients through a dynamic loss scaler: `dynamic_scale_grad`, `dynamic_scale_value_and_grad`, `dynamic_scale_tx`.

The law: what comes back is what the plain transform gives, beside the next state of the scaler. The loss and aux are
untouched. Gradients are made with a cotangent of `scaler` in place of one (`_scale.py`), and judged and made anew where
they overflow (`_redo.py`).
"""

import functools
import inspect
import operator
from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from .._tree import is_inexact
from .cotangent import as_cotangent, seeded
from .retry import Evaluated, evaluated, step
from .state import DynamicScalerState, check_state

_STATE = "dynamic_scaler_state"


def _takes_state(fun: Callable[..., Any]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The name of `fun`, and its signature with `dynamic_scaler_state`: `equinox.filter_jit` binds arguments to it."""

    def wrap(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(wrapper, fun, updated=())
        del wrapper.__wrapped__  # type: ignore[attr-defined]  # the arrays of an Equinox module would hang on to it
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            return wrapper
        if _STATE in signature.parameters:
            raise TypeError(
                f"{wrapper.__name__} takes an argument {_STATE!r} already; expected a function without one, for it is "
                "added here. Rename that argument."
            )
        parameters = list(signature.parameters.values())
        extra = inspect.Parameter(_STATE, inspect.Parameter.KEYWORD_ONLY, default=None)
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
            in the state counts the step. If the loss is not finite itself, no scale would help, and none is tried.
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
    (4.0, 4.0, 16384.0, 1)

    **Sharp edges**

    - Gradients that are not finite come back as they are. Give `state.finite` to `jaxamp.update_if_finite`.
    - In `pmap`, and in `shard_map` where the gradients differ between devices, leave out `axis_name` only if each
      device trains a model of its own. With `redo_on_nan` devices that don't agree would wait for each other for ever.
    - A loss of dtype float16 has a float16 cotangent, which holds scales up to 2**15: the state's scale stays there.
    - Outside of `jit`, `redo_on_nan` compiles its loop at each call, which takes about a second. With it, the result
      has no reverse-mode derivative of its own.
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

    transform = eqx.filter_value_and_grad if filter else jax.value_and_grad

    @_takes_state(fun)
    def scaled_grad(*args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
        state = _pop_state(name, f_kwargs)
        if filter:
            _check_filtered(name, args)
        else:
            _check_unfiltered(name, args, kwargs)

        def evaluate(scale: jax.Array) -> Evaluated:
            def loss(*args: Any, **f_kwargs: Any) -> Any:
                value, aux = _as_loss(name, fun(*args, **f_kwargs), has_aux)
                used = as_cotangent(scale, value.dtype)
                return seeded(name, value, used), (used, aux)

            (value, (used, aux)), grads = transform(loss, has_aux=True, **kwargs)(*args, **f_kwargs)
            return evaluated(grads, used, axis_name, functools.partial(form, value, aux), value)

        return step(evaluate, state, redo_on_nan)

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
            gradient, one of your own.
        redo_on_nan: As for `dynamic_scale_value_and_grad`.
        where: From the results of the transformed function to the gradients among them, as in `equinox.tree_at`. Left
            out, they are what JAX and Equinox return: all results, the first with `has_aux=True`, the second for
            `value_and_grad`.
        axis_name: As for `dynamic_scale_value_and_grad`.

    Returns:
        A transform. The functions that it makes take the keyword `dynamic_scaler_state` and return
        `(next_state, results)`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> per_example = dynamic_scale_tx(lambda loss: jax.vmap(jax.grad(loss), (None, 0)))
    >>> state = jaxamp.DynamicScalerState()
    >>> state, grads = per_example(lambda w, x: w * x)(3.0, jnp.arange(3.0), dynamic_scaler_state=state)
    >>> grads
    Array([0., 1., 2.], dtype=float32)

    **Sharp edges**

    - A transform of your own that returns more than gradients needs `where`. What is not in it comes back as it is.
    - The transform is applied at each call. If it compiles, it compiles each time: put `jit` around the whole.
    - A result of dtype float16 has a float16 cotangent. A scale beyond 2**15 overflows there, and is lowered.
    """
    name = "dynamic_scale_tx"
    _check_options(name, transform, redo_on_nan)

    def scaled_transform(fun: Callable[..., Any], *args: Any, **kwargs: Any) -> Callable[..., Any]:
        has_aux = bool(kwargs.get("has_aux", False))
        grads_of = where or _gradients(transform, has_aux)

        @_takes_state(fun)
        def scaled_fun(*f_args: Any, **f_kwargs: Any) -> tuple[DynamicScalerState, Any]:
            state = _pop_state(name, f_kwargs)

            def evaluate(scale: jax.Array) -> Evaluated:
                def seed(x: Any) -> Any:
                    return seeded(name, jnp.asarray(x), scale) if is_inexact(x) else x

                def seeded_fun(*f_args: Any, **f_kwargs: Any) -> Any:
                    out = fun(*f_args, **f_kwargs)
                    return (jax.tree.map(seed, out[0]), out[1]) if has_aux else jax.tree.map(seed, out)

                results = transform(seeded_fun, *args, **kwargs)(*f_args, **f_kwargs)
                if grads_of is None:
                    return evaluated(results, scale, axis_name, lambda grads: grads)
                put = functools.partial(eqx.tree_at, grads_of, results, is_leaf=lambda x: x is None)
                return evaluated(grads_of(results), scale, axis_name, put)

            return step(evaluate, state, redo_on_nan)

        return scaled_fun

    return scaled_transform


def _gradients(transform: Any, has_aux: bool) -> Callable[[Any], Any] | None:
    """Where JAX's and Equinox's transforms have the gradients in their results; None if there is nothing else."""
    if transform in (jax.value_and_grad, eqx.filter_value_and_grad):
        return lambda results: results[1]
    return (lambda results: results[0]) if has_aux else None


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
    state = kwargs.pop(_STATE, None)
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


def _check_filtered(name: str, args: tuple[Any, ...]) -> None:
    """Equinox returns no gradients at all where there is nothing to differentiate, and that would count as finite."""
    if args and not any(eqx.is_inexact_array(x) for x in jax.tree.leaves(args[0])):
        raise TypeError(
            f"{name} found no floating-point array in the first argument, of type {type(args[0]).__name__}; expected "
            "the parameters there. Put them first, or write filter=False with argnums=."
        )


def _check_unfiltered(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """JAX refuses integers too, later, and can't say what to write with us."""
    if kwargs.get("allow_int"):
        return
    argnums = kwargs.get("argnums", 0)
    for i in map(operator.index, argnums if isinstance(argnums, tuple | list) else (argnums,)):
        if not -len(args) <= i < len(args):
            return  # JAX says so
        for path, leaf in jax.tree_util.tree_leaves_with_path(args[i]):
            dtype = jnp.result_type(leaf) if isinstance(leaf, int | float | complex) or hasattr(leaf, "dtype") else None
            if dtype is not None and not jnp.issubdtype(dtype, jnp.inexact):
                raise TypeError(
                    f"{name} was asked for the gradient by argument {i}{jax.tree_util.keystr(path)}, of dtype {dtype}; "
                    "expected floating-point numbers. Write filter=True to pass over such leaves, or allow_int=True."
                )
