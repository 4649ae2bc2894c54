"""Gradients with delayed scaling: the state goes in, the next state comes out."""

from collections.abc import Callable
from typing import Any

import equinox as eqx
import jax

from .._transform.amp import amp_of
from .._transform.delayed import with_scales
from .._transform.delayed_scales import DelayedScales
from .._transform.nnx_state import loaded_nnx, nodes_of
from .signatures import check_names, wraps_with_state

_NAME, _STATE = "delayed_scale_value_and_grad", "delayed_scales"


def delayed_scale_value_and_grad(
    fun: Callable[..., Any], *, has_aux: bool = False, filter: bool = True, **kwargs: Any
) -> Callable[..., Any]:
    """Differentiate a loss whose matmuls are quantised with delayed scaling.

    Args:
        fun: A function from `jaxamp.amp`, under a policy such as `fp8_delayed`. Returns a scalar, or `(scalar, aux)`.
        has_aux: Whether `fun` returns a pair, as in `jax.value_and_grad`.
        filter: If `True`, differentiate the first argument's floating-point arrays, with
            `equinox.filter_value_and_grad`; of a Flax NNX model the `nnx.Param`s, with `nnx.value_and_grad`. If
            `False`, use `jax.value_and_grad`, which takes `argnums`.
        **kwargs: Passed to `jax.value_and_grad` if `filter` is `False`.

    Returns:
        A function like `fun` with the keyword `delayed_scales`, a `DelayedScales`. It returns
        `(next_scales, (value, grads))`, or `(next_scales, ((value, aux), grads))`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> loss = jaxamp.amp(lambda w, x: jnp.mean((x @ w) ** 2), amp_policy="fp8_delayed")
    >>> w, x = jnp.ones((4, 2)), jnp.ones((8, 4))
    >>> scales = jaxamp.init_scales(loss)(w, x)
    >>> grad_fn = jaxamp.delayed_scale_value_and_grad(loss)
    >>> scales, (value, grads) = jax.jit(grad_fn)(w, x, delayed_scales=scales)
    >>> float(value)
    16.0

    **Sharp edges**

    - Micro-batches: call it once for each, and pass the scales on. If you add up gradients in a transform of your own,
      differentiate `jaxamp.with_scales`, and merge what the micro-batches saw with `DelayedScales.merge`.
    - With loss scaling, write `jaxamp.dynamic_scale_value_and_grad` of a function of `(params, scales)` that calls
      `jaxamp.with_scales`. The gradient by the scales is not divided by the loss scale.
    """
    amp_of(_NAME, fun)
    check_names(_NAME, kwargs, "has_aux", "filter")
    if filter and kwargs:
        raise TypeError(
            f"{_NAME} got {', '.join(kwargs)} with filter=True; expected them only with filter=False. Put what is to "
            f"be differentiated first, or write {_NAME}(fun, filter=False, ...)."
        )

    @wraps_with_state(fun, _STATE)
    def scaled_grad(*args: Any, **f_kwargs: Any) -> tuple[DelayedScales, Any]:
        scales = _pop_scales(f_kwargs)

        def loss(scales: DelayedScales, *args: Any, **f_kwargs: Any) -> Any:
            return with_scales(fun, scales)(*args, **f_kwargs)

        if not filter:
            out, (seen, grads) = _with_argnums(loss, scales, args, f_kwargs, has_aux, kwargs)
        elif nodes_of((args, f_kwargs)):
            out, (seen, grads) = _of_nnx(loss, scales, args, f_kwargs, has_aux)
        else:

            def of_first(both: tuple[DelayedScales, Any], *others: Any, **f_kwargs: Any) -> Any:
                return loss(*both, *others, **f_kwargs)

            transform = eqx.filter_value_and_grad(of_first, has_aux=has_aux)
            out, (seen, grads) = transform((scales, args[0]), *args[1:], **f_kwargs)
        return scales.update(seen), (out, grads)

    return scaled_grad


def _with_argnums(
    loss: Callable[..., Any],
    scales: DelayedScales,
    args: tuple[Any, ...],
    f_kwargs: dict[str, Any],
    has_aux: bool,
    kwargs: dict[str, Any],
) -> tuple[Any, tuple[DelayedScales, Any]]:
    argnums = kwargs.get("argnums", 0)
    several = argnums if isinstance(argnums, tuple | list) else (argnums,)
    places = (0, *(1 + (i + len(args) if i < 0 else i) for i in several))
    out, (seen, *grads) = jax.value_and_grad(loss, **{**kwargs, "argnums": places}, has_aux=has_aux)(
        scales, *args, **f_kwargs
    )
    return out, (seen, grads[0] if isinstance(argnums, int) else tuple(grads))


def _of_nnx(
    loss: Callable[..., Any],
    scales: DelayedScales,
    args: tuple[Any, ...],
    f_kwargs: dict[str, Any],
    has_aux: bool,
) -> tuple[Any, tuple[DelayedScales, Any]]:
    nnx = loaded_nnx()
    transform = getattr(nnx, "compat", nnx).value_and_grad  # the same in all modes of NNX

    def of_first(scales: DelayedScales, first: Any, others: tuple[Any, ...], f_kwargs: dict[str, Any]) -> Any:
        return loss(scales, first, *others, **f_kwargs)

    return transform(of_first, argnums=(0, 1), has_aux=has_aux)(scales, args[0], args[1:], f_kwargs)


def _pop_scales(kwargs: dict[str, Any]) -> DelayedScales:
    scales = kwargs.pop(_STATE, None)
    if not isinstance(scales, DelayedScales):
        given = "without" if scales is None else f"with {scales!r} for"
        raise TypeError(
            f"a function returned by {_NAME} was called {given} {_STATE}; expected a DelayedScales. Write "
            f"grad_fn(..., {_STATE}=scales), starting from scales = jaxamp.init_scales(fn)(...)."
        )
    return scales
