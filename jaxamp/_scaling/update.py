"""`update_if_finite`: an optimizer step that changes nothing if the gradients are not finite."""

import inspect
from typing import Any, TypeVar

import equinox as eqx
import jax
import optax

from .._transform.nnx_state import loaded_nnx
from .._tree import cast_floating_like, check_bool, is_inexact_array, is_none, tree_where, wider_dtype
from .nnx_snapshot import snapshot_of
from .state import DynamicScalerState

Model = TypeVar("Model")


def update_if_finite(
    model: Model, optimizer: Any, opt_state: Any = None, grads: Any = None, finite: Any = None, **extra_args: Any
) -> tuple[Model, Any]:
    """Take an optimizer step if the gradients are finite.

    If they are not, the model and the optimizer's whole state come back bit for bit: moments, schedule counts, the
    micro-batches of an `optax.MultiSteps`. So a schedule counts only the steps that were taken.

    Args:
        model: The parameters: an Equinox module, or any pytree. Only floating-point arrays are updated.
        optimizer: Any Optax optimizer, initialised with `eqx.filter(model, eqx.is_inexact_array)`; for a pytree of
            floating-point arrays, that is the model itself. Or an `nnx.Optimizer` of Flax, which holds its state: it
            and the model are updated in place. Write `update_if_finite(model, optimizer, grads=grads, finite=finite)`.
        opt_state: Its state; nothing for an `nnx.Optimizer`.
        grads: The unscaled gradients, as `dynamic_scale_grad` returns them. Clipping belongs in the optimizer, with
            `optax.chain`.
        finite: Whether to take the step, a scalar bool: `state.finite` of the scaler's next state, or
            `jaxamp.all_finite(grads)`.
        **extra_args: For optimizers that take more, such as `value=loss` for `optax.contrib.reduce_on_plateau`.

    Returns:
        The model and the optimizer's state, in the dtypes they had; for an `nnx.Optimizer`, the two objects.

    >>> import jax.numpy as jnp, jaxamp, optax
    >>> model, optimizer = {"w": jnp.ones(2)}, optax.sgd(0.5)
    >>> model, _ = update_if_finite(model, optimizer, optimizer.init(model), {"w": jnp.ones(2)}, jnp.array(True))
    >>> model
    {'w': Array([0.5, 0.5], dtype=float32)}

    **Sharp edges**

    - Optax creates moments in the dtype of the parameters, and they keep it. For float16 or bfloat16 parameters,
      initialise the optimizer with `jaxamp.cast_floating(params, jnp.float32)`.
    """
    if isinstance(finite, DynamicScalerState):
        raise TypeError(
            "update_if_finite got a DynamicScalerState as its condition; expected one bool. Write state.finite, with "
            "the state that came with these gradients."
        )
    check_bool("update_if_finite", finite, "update_if_finite(model, optimizer, opt_state, grads, state.finite)")
    if isinstance(optimizer, getattr(loaded_nnx(), "Optimizer", ())):
        return _update_nnx(model, optimizer, opt_state, grads, finite, extra_args)
    if not callable(getattr(optimizer, "update", None)):
        raise TypeError(
            f"update_if_finite got {optimizer!r}, of type {type(optimizer).__name__}, as the optimizer; expected one "
            "of Optax, or an nnx.Optimizer. Write update_if_finite(model, optax.adamw(1e-3), opt_state, grads, finite)."
        )
    if grads is None:
        raise TypeError(
            "update_if_finite got no gradients; expected those of the model. Write update_if_finite(model, optimizer, "
            "opt_state, grads, state.finite)."
        )
    params, static = eqx.partition(model, is_inexact_array)
    instead = "Pass what dynamic_scale_grad returned, without aux."
    _check_same_structure("gradients", _structure_of(grads), _structure_of(model), instead)
    grads = jax.tree.map(lambda p, g: None if p is None else g, params, grads, is_leaf=is_none)
    instead = "Initialise with optimizer.init(eqx.filter(model, eqx.is_inexact_array))."
    optimizer = _with_extra_args(optimizer)
    try:
        updates, new_state = optimizer.update(grads, opt_state, params, **extra_args)
    except (AttributeError, TypeError, ValueError) as error:
        if hasattr(optimizer, "init"):
            expected = jax.tree.structure(jax.eval_shape(optimizer.init, params))
            _check_same_structure("an optimizer state", jax.tree.structure(opt_state), expected, instead, error)
        raise
    _check_same_structure("an optimizer state", jax.tree.structure(opt_state), jax.tree.structure(new_state), instead)
    new_params = jax.tree.map(_add, params, updates, is_leaf=is_none)
    new_state = cast_floating_like(new_state, opt_state)  # float32 gradients widen the moments of float16 parameters
    return eqx.combine(tree_where(finite, new_params, params), static), tree_where(finite, new_state, opt_state)


def _update_nnx(model: Any, optimizer: Any, opt_state: Any, grads: Any, finite: Any, extra_args: Any) -> Any:
    """Take the step, and give the variables their values back if it should not have been taken."""
    if opt_state is not None or grads is None:
        raise TypeError(
            "update_if_finite got an nnx.Optimizer and an opt_state; expected none, because the optimizer holds its "
            "state. Write update_if_finite(model, optimizer, grads=grads, finite=state.finite)."
        )
    snapshot = snapshot_of((model, optimizer))
    args = (grads,) if isinstance(optimizer, loaded_nnx().ModelAndOptimizer) else (model, grads)
    optimizer.update(*args, **extra_args)
    snapshot.restore_unless(finite)
    return model, optimizer


def _check_same_structure(what: str, given: Any, expected: Any, instead: str, cause: Exception | None = None) -> None:
    if given != expected:
        message = f"update_if_finite got {what} of the structure {given}; expected {expected}. {instead}"
        raise TypeError(message) from cause


def _structure_of(tree: Any) -> Any:
    """The structure of a tree with None as a leaf: an array that is not trained has the gradient None."""
    return jax.tree.structure(jax.tree.map(lambda _: 0, tree, is_leaf=is_none))


def _with_extra_args(optimizer: Any) -> Any:
    """Make the optimizer ignore extra arguments unless it takes them.

    `optax.with_extra_args_support` goes by type. It would withhold extra arguments from an `optax.MultiSteps`, which
    takes them but is of another type.
    """
    kinds = [p.kind for p in inspect.signature(optimizer.update).parameters.values()]
    return optimizer if inspect.Parameter.VAR_KEYWORD in kinds else optax.with_extra_args_support(optimizer)


def _add(param: Any, update: Any) -> Any:
    """`param + update`, computed in the wider of their dtypes and returned in the parameter's."""
    if param is None or update is None:
        return param
    wide = wider_dtype(param.dtype, update.dtype)
    return (param.astype(wide) + update.astype(wide)).astype(param.dtype)
