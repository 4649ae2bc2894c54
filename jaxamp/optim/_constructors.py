"""The five compressed optimizers that users call."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._optimizer import FlashOptimizer, make_optimizer
from ._storage import Storage
from ._update_rules import ADAM, ADAMW, LION, SGD, SGDW

ScalarOrSchedule = float | Any | Callable[[Any], Any]
ParamGroups = Sequence[Mapping[str, Any]] | None
_STORAGE = Storage()


def flash_adamw(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-4,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """AdamW in 5.125 bytes per parameter: bfloat16 weights with a one-byte correction, and one byte for each moment.

    It is `optax.adamw` up to the rounding of the codecs, as an Optax transformation. Besides `update` it has a `step`
    that writes the parameters directly. Use `step` inside `jax.jit` with parameters and state donated; then no float32
    copy of either is ever made.

    Args:
        learning_rate: A number, or a schedule: a function of the number of steps taken.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves: a list of dicts. Each has `"params"`, which selects leaves, and
            any arguments of this function or of `Storage`. `"params"` is an entry of a leaf's path, a whole path
            (`"layers/0/bias"`, or a tuple), a function of path and leaf, or a list of these. The first dict that
            selects a leaf applies to it.

    Returns:
        A `FlashOptimizer`. `step(params, state, grads, *, scale=None, ok=None)` multiplies gradients by `scale`, to
        unscale or clip them, and takes no step if `ok` is False: parameters and state come back bit for bit. Neither
        costs another pass over memory. `step_if_finite(params, state, grads, *, scale=None)` finds `ok` by itself, from
        data it reads anyway, and also returns it, for `DynamicScalerState.adjust`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer = optim.flash_adamw(1e-3)
    >>> params = {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> params, state = jax.jit(optimizer.step, donate_argnums=(0, 1))(params, state, {"w": jnp.ones((4, 64))})
    >>> params["w"][0, 0], f"{optim.float32_weights(params, state)['w'][0, 0]:.4f}"
    (Array(1, dtype=bfloat16), '0.9990')

    **Sharp edges**

    - In an `optax.chain`, put it last, as in `optax.chain(clip, flash_adamw(...))`. If a later transformation changes
      the update, the correction no longer fits the parameter, and the weight is off by up to half a unit of the
      parameter.
    - Updates are float32 and must be added in float32, as `optax.apply_updates` and `jaxamp.update_if_finite` do. A
      wrapper that selects between updates and gradients, such as `optax.apply_if_finite`, needs gradients in float32
      too: `jaxamp.cast_floating(grads, jnp.float32)`. Or pass `ok`.
    - `optax.inject_hyperparams` converts numbers to the dtype of the parameters. In bfloat16, `b2=0.999` is 1: pass
      `hyperparam_dtype=jnp.float32`.
    - A step with a non-finite gradient gives non-finite parameters, but finite moments if they are compressed. Pass
      `ok`.
    """
    return make_optimizer(ADAMW, adam_hyperparameters(learning_rate, b1, b2, eps, weight_decay), storage, param_groups)


def flash_adam(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """Adam, with weight decay added to the gradient. The rest is as for `flash_adamw`.

    Args:
        learning_rate: A number, or a schedule: a function of the number of steps taken.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Times the weight, added to the gradient.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves, as for `flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adam(1e-3), {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    return make_optimizer(ADAM, adam_hyperparameters(learning_rate, b1, b2, eps, weight_decay), storage, param_groups)


def flash_sgd(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """Gradient descent, with or without momentum: `mu = momentum * mu + (1 - dampening) * gradient`.

    Weight decay is added to the gradient. Without momentum, the correction is the only state. The rest is as for
    `flash_adamw`.

    Args:
        learning_rate: A number, or a schedule: a function of the number of steps taken.
        momentum: The decay of the momentum; None for none.
        nesterov: Whether to look ahead by one step.
        dampening: The part of the gradient that the momentum leaves out.
        weight_decay: Times the weight, added to the gradient.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves, as for `flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_sgd(1e-3, momentum=0.9), {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    return make_optimizer(
        SGD, sgd_hyperparameters(learning_rate, momentum, nesterov, dampening, weight_decay), storage, param_groups
    )


def flash_sgdw(
    learning_rate: ScalarOrSchedule,
    momentum: float | None = None,
    nesterov: bool = False,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """`flash_sgd` with weight decay as in AdamW, separate from the gradient.

    Args:
        learning_rate: A number, or a schedule: a function of the number of steps taken.
        momentum: The decay of the momentum; None for none.
        nesterov: Whether to look ahead by one step.
        dampening: The part of the gradient that the momentum leaves out.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves, as for `flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_sgdw(1e-3, momentum=0.9), {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    return make_optimizer(
        SGDW, sgd_hyperparameters(learning_rate, momentum, nesterov, dampening, weight_decay), storage, param_groups
    )


def flash_lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """Lion in 4.063 bytes per parameter: it has one moment, of one byte. The rest is as for `flash_adamw`.

    Args:
        learning_rate: A number, or a schedule: a function of the number of steps taken.
        b1: The decay of the moment in the step.
        b2: The decay of the moment in the state.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves, as for `flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_lion(1e-3), {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return make_optimizer(LION, hyper, storage, param_groups)


def adam_hyperparameters(learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}


def sgd_hyperparameters(
    learning_rate: Any, momentum: Any, nesterov: bool, dampening: Any, weight_decay: Any
) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": dampening,
        "weight_decay": weight_decay,
    }
