"""The five optimizers."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ._optimizer import FlashOptimizer, make
from ._rules import ADAM, ADAMW, LION, SGD, SGDW
from ._storage import Storage

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
    """AdamW in 5.125 bytes per parameter: bfloat16 weights with a correction of a byte, moments of a byte each.

    It is `optax.adamw` up to what the codecs round, as an Optax transformation, with a `step` beside `update` that
    writes parameters directly. Use `step` inside of `jax.jit` with parameters and state donated: no float32 copy of
    either is ever made.

    Args:
        learning_rate: A number, or a schedule: a function of the steps taken.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Times the learning rate, the share of a weight that a step takes away.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves: dicts with `"params"`, which selects them, and any arguments of
            this function or of `Storage`. `"params"` is a part of a leaf's path, a whole path (`"layers/0/bias"`, or a
            tuple), a function of path and leaf, or a list of these. The first dict that selects a leaf is its.

    Returns:
        A `FlashOptimizer`. `step(params, state, grads, *, scale=None, ok=None)` multiplies gradients by `scale`, to
        unscale or to clip them, and takes no step if `ok` is False: parameters and state come back bit for bit. Neither
        costs a pass over memory. `step_if_finite(params, state, grads, *, scale=None)` finds `ok` by itself, from what
        it reads anyway, and returns it too: for `DynamicScalerState.adjust`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer = optim.flash_adamw(1e-3)
    >>> params = {"w": jnp.ones((4, 64), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> params, state = jax.jit(optimizer.step, donate_argnums=(0, 1))(params, state, {"w": jnp.ones((4, 64))})
    >>> params["w"][0, 0], f"{optim.float32_weights(params, state)['w'][0, 0]:.4f}"
    (Array(1, dtype=bfloat16), '0.9990')

    **Sharp edges**

    - What changes an update after this transformation in an `optax.chain` makes the parameter another one than the
      correction is for. The weight is off by half a unit of the parameter at most. Put it last, as `optax.chain(clip,
      flash_adamw(...))` does.
    - Updates are float32 and must be added in float32, as `optax.apply_updates` and `jaxamp.update_if_finite` do. What
      chooses between updates and gradients, as `optax.apply_if_finite` does, wants these in float32 too:
      `jaxamp.cast_floating(grads, jnp.float32)`. Or pass `ok`.
    - `optax.inject_hyperparams` makes numbers of the dtype of the parameters. In bfloat16 `b2=0.999` is 1: pass it
      `hyperparam_dtype=jnp.float32`.
    - A step with a gradient that is not finite makes parameters that are not finite, and moments that are. Pass `ok`.
    """
    return make(ADAMW, adam_hyper(learning_rate, b1, b2, eps, weight_decay), storage, param_groups)


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
    """Adam, whose weight decay is a part of the gradient. The rest is as for `flash_adamw`."""
    return make(ADAM, adam_hyper(learning_rate, b1, b2, eps, weight_decay), storage, param_groups)


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
    """Gradient descent with momentum, `momentum * mu + (1 - dampening) * gradient`, or without.

    Weight decay is a part of the gradient. Without momentum there is no state but the correction. The rest is as for
    `flash_adamw`.
    """
    return make(SGD, sgd_hyper(learning_rate, momentum, nesterov, dampening, weight_decay), storage, param_groups)


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
    """`flash_sgd` with the weight decay of AdamW, apart from the gradient."""
    return make(SGDW, sgd_hyper(learning_rate, momentum, nesterov, dampening, weight_decay), storage, param_groups)


def flash_lion(
    learning_rate: ScalarOrSchedule,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 1e-3,
    *,
    storage: Storage = _STORAGE,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """Lion in 4.063 bytes per parameter: one moment of a byte. The rest is as for `flash_adamw`."""
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return make(LION, hyper, storage, param_groups)


def adam_hyper(learning_rate: Any, b1: Any, b2: Any, eps: Any, weight_decay: Any) -> dict[str, Any]:
    return {"learning_rate": learning_rate, "b1": b1, "b2": b2, "eps": eps, "weight_decay": weight_decay}


def sgd_hyper(learning_rate: Any, momentum: Any, nesterov: bool, dampening: Any, weight_decay: Any) -> dict[str, Any]:
    return {
        "learning_rate": learning_rate,
        "momentum": momentum,
        "nesterov": nesterov,
        "dampening": dampening,
        "weight_decay": weight_decay,
    }
