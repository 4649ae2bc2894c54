"""flashoptim-jax's interface over `jaxamp.optim`: change the import to `from jaxamp import flashoptim`.

The law: a program written for flashoptim-jax 0.1.0 runs unchanged on any device that JAX runs on, with names from the
package, its `compression` or its `quantization`. It reads and writes the same arrays and, wherever flashoptim-jax is
right, takes the same steps up to rounding. That includes its codes, which are rounded to nearest: a second moment with
b2 = 0.999 stands still where a gradient changes. `jaxamp.optim` has other codes, which follow Adam.

>>> import jax, jax.numpy as jnp
>>> from jaxamp import flashoptim
>>> params = {"w": jnp.ones((4, 64), jnp.bfloat16)}
>>> optimizer = flashoptim.flash_adamw(1e-3, param_groups=[{"params": "bias", "weight_decay": 0.0}])
>>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
>>> state.mu["w"].values.dtype, state.mu["w"].scales.shape, state.ecc["w"].dtype
(dtype('int8'), (8,), dtype('int8'))

Differences from flashoptim-jax 0.1.0, each because of a fault in it:

1. Corrections are right under `jit` on a GPU without its kernels. There, XLA drops the cast to bfloat16 and back, and
   all of flashoptim-jax's corrections are zero.
2. The parameter after a step is the weight rounded, and its correction belongs to that parameter. flashoptim-jax's
   plain path adds a rounded difference, and the correction belongs to another value.
3. bfloat16 and float16 gradients are read as they are, not cast in a separate pass.
4. Powers of two are made from exponent bits, not by `ldexp`.
5. Arrays are not flattened: an array that is sharded in whole groups is stepped where it is. flashoptim-jax's step
   gathers all arrays on each device. Scales are flat in this format, and are gathered if the last axis is sharded: 4
   bytes for every 32 parameters. Those of `jaxamp.optim` never are.
6. `step` takes `scale` and `ok`, to unscale gradients and to skip a step, without a copy of parameters and state.
7. A nonzero second moment is never stored as zero. In flashoptim-jax, steps can be 250 times too long if the gradients
   in a group span decades. `variance_floor=False` restores its behaviour.
8. Scales are float16, as published, so very small ones are lost. This package keeps that format; `jaxamp.optim` has a
   wider one. Gradients beyond 65504, which lose a group in flashoptim-jax, count as 65504.
9. One implementation serves all devices, whether `fused` or not. `fused=True` only refuses, as flashoptim-jax does,
   group sizes that its kernels can't read.
10. Codes halfway between two integers are rounded to even, not up.
11. `cast_tree_bf16` casts only floats, and optimizers leave alone leaves that are None, empty or not floats, as long as
    there is a float to step. flashoptim-jax refuses integers, or steps them with `fused=False`.
12. Where the square of a finite gradient overflows, the weight stays, as with Optax. In flashoptim-jax the second
    moment becomes zero, and the next step divides by epsilon.
13. Errors say what was given, what was expected and what to write, and name the leaf.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from ..optim._constructors import adam_hyperparameters, sgd_hyperparameters
from ..optim._optimizer import make_optimizer
from ..optim._param_groups import check_param_groups
from ..optim._storage import STORAGE_FIELDS, Storage
from ..optim._update_rules import ADAM, ADAMW, LION, SGD, SGDW, UpdateRule
from ._input_checks import check_group_size, check_some_float
from ._state_conversion import from_flash_state, to_flash_state
from ._state_dict import state_from_dict, state_to_dict
from .compression import cast_tree_bf16 as cast_tree_bf16
from .compression import check_bits
from .compression import reconstruct_leaf as reconstruct_leaf
from .compression import reconstruct_weights as reconstruct_weights
from .compression import set_fp32_params as set_fp32_params
from .compression import split_leaf as split_leaf
from .quantization import QuantizedArray as QuantizedArray
from .quantization import dequantize_momentum as dequantize_momentum
from .quantization import dequantize_variance as dequantize_variance
from .quantization import quantize_momentum as quantize_momentum
from .quantization import quantize_variance as quantize_variance

__all__ = [
    "FlashAdamState",
    "FlashLionState",
    "FlashOptimizer",
    "FlashSGDState",
    "QuantizedArray",
    "cast_tree_bf16",
    "dequantize_momentum",
    "dequantize_variance",
    "flash_adam",
    "flash_adamw",
    "flash_adamw_state_dict",
    "flash_lion",
    "flash_lion_state_dict",
    "flash_sgd",
    "flash_sgd_state_dict",
    "flash_sgdw",
    "load_flash_adamw_state_dict",
    "load_flash_lion_state_dict",
    "load_flash_sgd_state_dict",
    "quantize_momentum",
    "quantize_variance",
    "reconstruct_leaf",
    "reconstruct_weights",
    "set_fp32_params",
    "split_leaf",
]

ScalarOrSchedule = float | Callable[[Any], Any]
ParamGroups = list[dict[str, Any]] | None


class FlashOptimizer(NamedTuple):
    """`init(params)` and `step(params, state, grads, *, scale=None, ok=None)`.

    Attributes:
        init: Makes the state.
        step: Takes a step, and returns parameters and state.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_lion(), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]


class FlashAdamState(NamedTuple):
    """Adam's state: trees of `QuantizedArray`s or float32 arrays, and one of corrections.

    Attributes:
        count: The number of steps taken.
        mu: First moments.
        nu: Second moments.
        ecc: Corrections.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_adamw().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> type(state).__name__, state.nu["w"].values.dtype.name
    ('FlashAdamState', 'uint8')
    """

    count: Any
    mu: Any
    nu: Any
    ecc: Any


class FlashLionState(NamedTuple):
    """Lion's state.

    Attributes:
        count: The number of steps taken.
        mu: First moments.
        ecc: Corrections.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_lion().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> type(state).__name__, int(state.count)
    ('FlashLionState', 0)
    """

    count: Any
    mu: Any
    ecc: Any


class FlashSGDState(NamedTuple):
    """SGD's state.

    Attributes:
        count: The number of steps taken.
        mu: First moments.
        ecc: Corrections.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_sgd().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> type(state).__name__, int(state.count)
    ('FlashSGDState', 0)
    """

    count: Any
    mu: Any
    ecc: Any


# -- the optimizers


def flash_adam(
    learning_rate: ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: ParamGroups = None,
    *,
    variance_floor: bool = True,
) -> FlashOptimizer:
    """Adam. `variance_floor=False` is flashoptim-jax's own rounding.

    Args:
        learning_rate: A number, or a schedule.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Times the weight, added to the gradient.
        quantize: Whether moments are stored in bytes.
        master_weight_bits: 24 or 32 for weights with more bits than their parameters; None for none.
        group_size: How many entries share a scale.
        fused: True refuses what flashoptim-jax's kernels can't read. One implementation serves both.
        param_groups: Other settings for some leaves, as for `jaxamp.optim.flash_adamw`.
        variance_floor: Whether to keep a nonzero second moment from being stored as zero.

    Returns:
        A `FlashOptimizer`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_adam(), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = adam_hyperparameters(learning_rate, b1, b2, eps, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size, variance_floor)
    return _make_optimizer(FlashAdamState, ADAM, hyper, storage, fused, param_groups)


def flash_adamw(
    learning_rate: ScalarOrSchedule = 1e-3,
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: ParamGroups = None,
    *,
    variance_floor: bool = True,
) -> FlashOptimizer:
    """AdamW. `variance_floor=False` is flashoptim-jax's own rounding.

    Args:
        learning_rate: A number, or a schedule.
        b1: The decay of the first moment.
        b2: The decay of the second moment.
        eps: Added to the root of the second moment.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        quantize: Whether moments are stored in bytes.
        master_weight_bits: 24 or 32 for weights with more bits than their parameters; None for none.
        group_size: How many entries share a scale.
        fused: True refuses what flashoptim-jax's kernels can't read. One implementation serves both.
        param_groups: Other settings for some leaves, as for `jaxamp.optim.flash_adamw`.
        variance_floor: Whether to keep a nonzero second moment from being stored as zero.

    Returns:
        A `FlashOptimizer`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_adamw(), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = adam_hyperparameters(learning_rate, b1, b2, eps, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size, variance_floor)
    return _make_optimizer(FlashAdamState, ADAMW, hyper, storage, fused, param_groups)


def flash_sgd(
    learning_rate: ScalarOrSchedule = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """SGD, with weight decay added to the gradient.

    Args:
        learning_rate: A number, or a schedule.
        momentum: The decay of the momentum.
        dampening: The part of the gradient that the momentum leaves out.
        weight_decay: Times the weight, added to the gradient.
        nesterov: Whether to look ahead by one step.
        quantize: Whether moments are stored in bytes.
        master_weight_bits: 24 or 32 for weights with more bits than their parameters; None for none.
        group_size: How many entries share a scale.
        fused: True refuses what flashoptim-jax's kernels can't read. One implementation serves both.
        param_groups: Other settings for some leaves, as for `jaxamp.optim.flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_sgd(momentum=0.9), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = sgd_hyperparameters(learning_rate, momentum, nesterov, dampening, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size)
    return _make_optimizer(FlashSGDState, SGD, hyper, storage, fused, param_groups)


def flash_sgdw(
    learning_rate: ScalarOrSchedule = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """SGD, with weight decay separate from the gradient.

    Args:
        learning_rate: A number, or a schedule.
        momentum: The decay of the momentum.
        dampening: The part of the gradient that the momentum leaves out.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        nesterov: Whether to look ahead by one step.
        quantize: Whether moments are stored in bytes.
        master_weight_bits: 24 or 32 for weights with more bits than their parameters; None for none.
        group_size: How many entries share a scale.
        fused: True refuses what flashoptim-jax's kernels can't read. One implementation serves both.
        param_groups: Other settings for some leaves, as for `jaxamp.optim.flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_sgdw(momentum=0.9), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = sgd_hyperparameters(learning_rate, momentum, nesterov, dampening, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size)
    return _make_optimizer(FlashSGDState, SGDW, hyper, storage, fused, param_groups)


def flash_lion(
    learning_rate: ScalarOrSchedule = 1e-4,
    b1: float = 0.9,
    b2: float = 0.99,
    weight_decay: float = 0.0,
    quantize: bool = True,
    master_weight_bits: int | None = 24,
    group_size: int = 32,
    fused: bool = True,
    param_groups: ParamGroups = None,
) -> FlashOptimizer:
    """Lion.

    Args:
        learning_rate: A number, or a schedule.
        b1: The decay of the moment in the step.
        b2: The decay of the moment in the state.
        weight_decay: Times the learning rate, the fraction of a weight that each step subtracts.
        quantize: Whether moments are stored in bytes.
        master_weight_bits: 24 or 32 for weights with more bits than their parameters; None for none.
        group_size: How many entries share a scale.
        fused: True refuses what flashoptim-jax's kernels can't read. One implementation serves both.
        param_groups: Other settings for some leaves, as for `jaxamp.optim.flash_adamw`.

    Returns:
        A `FlashOptimizer`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> optimizer, params = flashoptim.flash_lion(), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = optimizer.step(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> int(state.count), params["w"].dtype.name
    (1, 'bfloat16')
    """
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    storage = _storage(quantize, master_weight_bits, group_size)
    return _make_optimizer(FlashLionState, LION, hyper, storage, fused, param_groups)


def _storage(quantize: bool, bits: Any, group_size: int, floor: bool = True) -> Storage:
    check_bits(bits)
    return Storage(
        quantize,
        bits,
        group_size,
        variance_floor=floor,
        scales="float16",
        layout="flat",
        codes="published",
        dither=False,
    )


def _make_optimizer(
    state_class: Any, rule: UpdateRule, hyper: Any, storage: Storage, fused: bool, param_groups: ParamGroups
) -> FlashOptimizer:
    """Wrap an optimizer of `jaxamp.optim` to take and return states of `state_class`."""
    check_param_groups(rule.name, param_groups, lambda key: key in hyper or key in STORAGE_FIELDS or key == "fused")
    without_fused = [{k: v for k, v in group.items() if k != "fused"} for group in param_groups or ()]
    optimizer = make_optimizer(rule, hyper, storage, without_fused, allow_unmatched=True)
    for group in ({}, *(param_groups or ())):
        check_group_size(rule.name, **{"fused": fused, **vars(storage), **group})

    def init(params: Any) -> Any:
        check_some_float(rule.name, params)
        return from_flash_state(state_class, params, optimizer.init(params))

    def step(params: Any, state: Any, grads: Any, *, scale: Any = None, ok: Any = None) -> tuple[Any, Any]:
        new, after = optimizer.step(params, to_flash_state(optimizer, params, state), grads, scale=scale, ok=ok)
        return new, from_flash_state(state_class, params, after)

    return FlashOptimizer(init, step)


# -- state dicts


def flash_adamw_state_dict(state: FlashAdamState) -> dict[str, Any]:
    """The state of Adam or AdamW as a dict of arrays and structures.

    Args:
        state: The state of an optimizer.

    Returns:
        A dict.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_adamw().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_adamw_state_dict(flashoptim.flash_adamw_state_dict(state))
    >>> type(restored).__name__
    'FlashAdamState'
    """
    return state_to_dict(state)


def load_flash_adamw_state_dict(state_dict: dict[str, Any]) -> FlashAdamState:
    """Restore a state from `flash_adamw_state_dict`, ours or flashoptim-jax's.

    Args:
        state_dict: The dict.

    Returns:
        A `FlashAdamState`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_adamw().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_adamw_state_dict(flashoptim.flash_adamw_state_dict(state))
    >>> type(restored).__name__
    'FlashAdamState'
    """
    return state_from_dict(FlashAdamState, state_dict)


def flash_lion_state_dict(state: FlashLionState) -> dict[str, Any]:
    """The state of Lion as a dict of arrays and structures.

    Args:
        state: The state of an optimizer.

    Returns:
        A dict.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_lion().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_lion_state_dict(flashoptim.flash_lion_state_dict(state))
    >>> type(restored).__name__
    'FlashLionState'
    """
    return state_to_dict(state)


def load_flash_lion_state_dict(state_dict: dict[str, Any]) -> FlashLionState:
    """Restore a state from `flash_lion_state_dict`, ours or flashoptim-jax's.

    Args:
        state_dict: The dict.

    Returns:
        A `FlashLionState`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_lion().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_lion_state_dict(flashoptim.flash_lion_state_dict(state))
    >>> type(restored).__name__
    'FlashLionState'
    """
    return state_from_dict(FlashLionState, state_dict)


def flash_sgd_state_dict(state: FlashSGDState) -> dict[str, Any]:
    """The state of SGD as a dict of arrays and structures.

    Args:
        state: The state of an optimizer.

    Returns:
        A dict.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_sgd().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_sgd_state_dict(flashoptim.flash_sgd_state_dict(state))
    >>> type(restored).__name__
    'FlashSGDState'
    """
    return state_to_dict(state)


def load_flash_sgd_state_dict(state_dict: dict[str, Any]) -> FlashSGDState:
    """Restore a state from `flash_sgd_state_dict`, ours or flashoptim-jax's.

    Args:
        state_dict: The dict.

    Returns:
        A `FlashSGDState`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> state = flashoptim.flash_sgd().init({"w": jnp.ones((2, 32), jnp.bfloat16)})
    >>> restored = flashoptim.load_flash_sgd_state_dict(flashoptim.flash_sgd_state_dict(state))
    >>> type(restored).__name__
    'FlashSGDState'
    """
    return state_from_dict(FlashSGDState, state_dict)
