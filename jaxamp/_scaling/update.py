"""`update_if_finite`: an optimizer step that a non-finite gradient leaves no trace of."""

import inspect
from typing import Any, TypeVar

import equinox as eqx
import jax
import optax

from .._tree import cast_floating_like, check_bool, is_inexact, tree_where, wider
from .state import DynamicScalerState

Model = TypeVar("Model")


def update_if_finite(
    model: Model, optimizer: optax.GradientTransformation, opt_state: Any, grads: Any, finite: Any, **extra_args: Any
) -> tuple[Model, Any]:
    """Take an optimizer step if the gradients are finite.

    If they are not, the model and all of the optimizer's state come back bit for bit: moments, schedule counts, the
    micro-batches of an `optax.MultiSteps`. So a schedule counts the steps that were taken.

    Args:
        model: The parameters: an Equinox module, or any pytree. Leaves that are no floating-point arrays stay as they
            are.
        optimizer: Any Optax optimizer, initialised with `eqx.filter(model, eqx.is_inexact_array)`; for a pytree of
            floating-point arrays, that is the model itself.
        opt_state: Its state.
        grads: The gradients, unscaled: what `dynamic_scale_grad` returns. Clipping belongs into the optimizer, with
            `optax.chain`.
        finite: Whether to take the step, a scalar bool: `state.finite` of the scaler's next state, or
            `jaxamp.all_finite(grads)`.
        **extra_args: For optimizers that take more, such as `value=loss` for `optax.contrib.reduce_on_plateau`.

    Returns:
        The model and the state of the optimizer, in the dtypes that they had.

    >>> import jax.numpy as jnp, jaxamp, optax
    >>> model, optimizer = {"w": jnp.ones(2)}, optax.sgd(0.5)
    >>> model, _ = update_if_finite(model, optimizer, optimizer.init(model), {"w": jnp.ones(2)}, jnp.array(True))
    >>> model
    {'w': Array([0.5, 0.5], dtype=float32)}

    **Sharp edges**

    - Optax makes moments in the dtype of the parameters, and here they stay in it. For parameters in float16 or
      bfloat16, initialise the optimizer with `jaxamp.cast_floating(params, jnp.float32)`.
    """
    if isinstance(finite, DynamicScalerState):
        raise TypeError(
            "update_if_finite got a DynamicScalerState as its condition; expected one bool. Write state.finite, of the "
            "state that came with these gradients."
        )
    check_bool("update_if_finite", finite, "update_if_finite(model, optimizer, opt_state, grads, state.finite)")
    params, static = eqx.partition(model, is_inexact)
    instead = "Pass what dynamic_scale_grad returned, without aux."
    _check_structure("gradients", _structure(grads), _structure(model), instead)
    grads = jax.tree.map(lambda p, g: None if p is None else g, params, grads, is_leaf=_is_none)
    updates, new_state = _with_extra_args(optimizer).update(grads, opt_state, params, **extra_args)
    instead = "Initialise with optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
    _check_structure("an optimizer state", jax.tree.structure(opt_state), jax.tree.structure(new_state), instead)
    new_params = jax.tree.map(_added, params, updates, is_leaf=_is_none)
    new_state = cast_floating_like(new_state, opt_state)  # moments of float16 parameters and float32 gradients
    return eqx.combine(tree_where(finite, new_params, params), static), tree_where(finite, new_state, opt_state)


def _check_structure(what: str, given: Any, expected: Any, instead: str) -> None:
    if given != expected:
        raise TypeError(f"update_if_finite got {what} of the structure {given}; expected {expected}. {instead}")


def _structure(tree: Any) -> Any:
    """With None in a leaf's place or without: an array that is not trained has no gradient."""
    return jax.tree.structure(jax.tree.map(lambda _: 0, tree, is_leaf=_is_none))


def _is_none(x: Any) -> bool:
    return x is None


def _with_extra_args(optimizer: Any) -> Any:
    """The optimizer, made to ignore extra arguments unless it takes them.

    Optax goes by the type, and would keep extra arguments from an `optax.MultiSteps`, which takes them without being of
    that type.
    """
    kinds = [p.kind for p in inspect.signature(optimizer.update).parameters.values()]
    return optimizer if inspect.Parameter.VAR_KEYWORD in kinds else optax.with_extra_args_support(optimizer)


def _added(param: Any, update: Any) -> Any:
    """`param + update` in the wider of their dtypes, and then in the parameter's."""
    if param is None or update is None:
        return param
    wide = wider(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
