"""flashoptim-jax's interface over `jaxamp.optim`: change the import to `from jaxamp import flashoptim`.

The law: a program written for flashoptim-jax 0.1.0, with names of the package, of its `compression` or of its
`quantization`, runs unchanged, on any device that JAX runs on, reads and writes the same arrays, and takes the same
steps but for rounding wherever its are right.

>>> import jax, jax.numpy as jnp
>>> from jaxamp import flashoptim
>>> params = {"w": jnp.ones((4, 64), jnp.bfloat16)}
>>> optimizer = flashoptim.flash_adamw(1e-3, param_groups=[{"params": "bias", "weight_decay": 0.0}])
>>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((4, 64))})
>>> state.mu["w"].values.dtype, state.mu["w"].scales.shape, state.ecc["w"].dtype
(dtype('int8'), (8,), dtype('int8'))

What differs from flashoptim-jax 0.1.0, each for a fault of it:

1. Corrections are right under `jit` on a GPU without its kernels. There, XLA drops the cast to bfloat16 and back, and
   all of its corrections are zero.
2. The parameter of a step is the weight rounded, and its correction is for that parameter. Its plain path adds a
   rounded difference, and the correction is for another value.
3. Gradients in bfloat16 and float16 are read as they are, not cast in a pass of their own.
4. Powers of two are made of exponent bits, not by `ldexp`.
5. Arrays are not flattened: an array that is sharded in whole groups is stepped where it is. Its step gathers all of
   them on each device. Scales are flat in this format, and are gathered where the last axis is sharded: 4 bytes of each
   32 parameters. Those of `jaxamp.optim` never are.
6. `step` takes `scale` and `ok`, to unscale gradients and to skip a step, without a copy of parameters and state.
7. A second moment that is not zero is not stored as zero. Its steps can be 250 times too long where gradients in a
   group span decades. `variance_floor=False` is its behaviour.
8. Scales are float16, as published, and too small or too large ones are lost: the format is kept here, and mended in
   `jaxamp.optim`.
9. `fused` makes no difference: one implementation serves all devices, and each positive group size.
10. Codes that lie between two are rounded to even, not up.
11. `cast_tree_bf16` casts floats alone, and leaves that are no floats, empty or None are left alone by optimizers.
12. Errors say what was given, what was expected and what to write, and name the leaf.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..optim._flash import adam_hyper, sgd_hyper
from ..optim._layout import groups
from ..optim._leaf import LeafState
from ..optim._optimizer import FlashOptimizer as _Core
from ..optim._optimizer import FlashState, as_trees, make
from ..optim._paths import check_groups, flatten, flatten_like
from ..optim._rules import ADAM, ADAMW, LION, SGD, SGDW, Rule
from ..optim._storage import FIELDS, Storage
from .compression import cast_tree_bf16 as cast_tree_bf16
from .compression import check_bits, no_ecc_leaf
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
    """`init(params)` and `step(params, state, grads, *, scale=None, ok=None)`."""

    init: Callable[[Any], Any]
    step: Callable[..., tuple[Any, Any]]


class FlashAdamState(NamedTuple):
    """Adam's state: trees of `QuantizedArray`s or float32 arrays, and one of corrections."""

    count: Any
    mu: Any
    nu: Any
    ecc: Any


class FlashLionState(NamedTuple):
    """Lion's state."""

    count: Any
    mu: Any
    ecc: Any


class FlashSGDState(NamedTuple):
    """SGD's state."""

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
    """Adam. `fused` makes no difference; `variance_floor=False` is flashoptim-jax's own rounding."""
    hyper = adam_hyper(learning_rate, b1, b2, eps, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size, variance_floor)
    return _face(FlashAdamState, ADAM, hyper, storage, param_groups)


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
    """AdamW. `fused` makes no difference; `variance_floor=False` is flashoptim-jax's own rounding."""
    hyper = adam_hyper(learning_rate, b1, b2, eps, weight_decay)
    storage = _storage(quantize, master_weight_bits, group_size, variance_floor)
    return _face(FlashAdamState, ADAMW, hyper, storage, param_groups)


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
    """SGD, with weight decay in the gradient. `fused` makes no difference."""
    hyper = sgd_hyper(learning_rate, momentum, nesterov, dampening, weight_decay)
    return _face(FlashSGDState, SGD, hyper, _storage(quantize, master_weight_bits, group_size), param_groups)


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
    """SGD, with weight decay apart from the gradient. `fused` makes no difference."""
    hyper = sgd_hyper(learning_rate, momentum, nesterov, dampening, weight_decay)
    return _face(FlashSGDState, SGDW, hyper, _storage(quantize, master_weight_bits, group_size), param_groups)


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
    """Lion. `fused` makes no difference."""
    hyper = {"learning_rate": learning_rate, "b1": b1, "b2": b2, "weight_decay": weight_decay}
    return _face(FlashLionState, LION, hyper, _storage(quantize, master_weight_bits, group_size), param_groups)


def _storage(quantize: bool, bits: Any, group_size: int, floor: bool = True) -> Storage:
    check_bits(bits)
    return Storage(quantize, bits, group_size, variance_floor=floor, scales="float16", layout="flat")


def _face(kind: Any, rule: Rule, hyper: Any, storage: Storage, param_groups: ParamGroups) -> FlashOptimizer:
    check_groups(rule.name, param_groups, lambda key: key in hyper or key in FIELDS or key == "fused")
    listed = [{k: v for k, v in group.items() if k != "fused"} for group in param_groups or ()]
    core = make(rule, hyper, storage, listed)

    def init(params: Any) -> Any:
        return _outside(kind, core, params, core.init(params))

    def step(params: Any, state: Any, grads: Any, *, scale: Any = None, ok: Any = None) -> tuple[Any, Any]:
        new, after = core.step(params, _inside(core, params, state), grads, scale=scale, ok=ok)
        return new, _outside(kind, core, params, after)

    return FlashOptimizer(init, step)


# -- states: theirs and ours


def _outside(kind: Any, core: _Core, params: Any, state: FlashState) -> Any:
    """Scales apart for each moment, in the order of the entries; an int32 zero where a leaf has nothing."""
    _, leaves, structure = flatten(params)
    columns = zip(*(structure.flatten_up_to(getattr(state, field)) for field in LeafState._fields), strict=True)
    rows = [LeafState(*column) for column in columns]
    moments = [[_moment(row, i) for row in rows] for i in range(2 if kind is FlashAdamState else 1)]
    corrections = [no_ecc_leaf() if row.correction is None else row.correction for row in rows]
    trees = (
        structure.unflatten([None if leaf is None else x for leaf, x in zip(leaves, column, strict=True)])
        for column in (*moments, corrections)
    )
    return kind(state.count, *trees)


def _moment(row: LeafState, i: int) -> Any:
    stored = (row.mu, row.nu)[i]
    if stored is None:
        return no_ecc_leaf()
    return stored if row.scales is None else QuantizedArray(stored, _flat(row.scales[i]))


def _flat(scales: jax.Array) -> jax.Array:
    """Scales in the order of the entries: gathered where an explicit axis cuts another axis than the first."""
    spec = jax.typeof(scales).sharding.spec
    if any(axis is not None for axis in spec[1:]):
        scales = jax.sharding.reshard(scales, jax.sharding.PartitionSpec(spec[0]))
    return scales.reshape(-1)


def _inside(core: _Core, params: Any, state: Any) -> FlashState:
    paths, leaves, structure = flatten(params)
    instead = f"Write state = optimizer.init(params) with {core.name}, and pass on what each step returns."
    if not hasattr(state, "ecc"):
        raise TypeError(f"{core.name} got {type(state).__name__} as its state; expected one of its own. {instead}")
    trees = [tree for field, tree in state._asdict().items() if field != "count"]
    *moments, corrections = (
        flatten_like(core.name, "a state that is", tree, params, structure, instead) for tree in trees
    )
    rows = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        stored = [column[i] for column in moments]
        arrays = [x.values if _is_quantized(x) else None if _is_nothing(x) else x for x in stored]
        scales = None
        if _is_quantized(stored[0]):
            found = groups(leaf.shape, core.storage(path, leaf).group_size, "flat")
            scales = jnp.stack([x.scales for x in stored])
            if scales.size == len(stored) * math.prod(found.scales_shape):
                scales = scales.reshape(len(stored), *found.scales_shape)
        correction = None if _is_nothing(corrections[i]) else corrections[i]
        rows.append(LeafState(arrays[0], arrays[1] if len(arrays) > 1 else None, scales, correction))
    return as_trees(jnp.asarray(state.count, jnp.int32), rows, structure)


def _is_quantized(x: Any) -> bool:
    """Whether it is a `QuantizedArray`: ours, or flashoptim-jax's."""
    return type(x).__name__ == "QuantizedArray" and isinstance(x, tuple)


def _is_nothing(x: Any) -> bool:
    return x is None or (not _is_quantized(x) and jnp.shape(x) == () and jnp.asarray(x).dtype == jnp.int32)


# -- state dicts


def _to_dict(tree: Any) -> dict[str, Any]:
    leaves, structure = jax.tree.flatten(tree, is_leaf=_is_quantized)
    entries = [
        {"kind": "quantized", **leaf._asdict()}
        if _is_quantized(leaf)
        else {"kind": "array", "value": jnp.asarray(leaf)}
        for leaf in leaves
    ]
    return {"treedef": structure, "leaves": entries}


def _from_dict(entries: dict[str, Any]) -> Any:
    leaves = [
        QuantizedArray(jnp.asarray(entry["values"]), jnp.asarray(entry["scales"]))
        if entry["kind"] == "quantized"
        else jnp.asarray(entry["value"])
        for entry in entries["leaves"]
    ]
    return entries["treedef"].unflatten(leaves)


def _state_dict(state: Any) -> dict[str, Any]:
    trees = {field: _to_dict(tree) for field, tree in state._asdict().items() if field != "count"}
    return {"count": jnp.asarray(state.count), **trees}


def _loaded(kind: Any, state_dict: dict[str, Any]) -> Any:
    missing = [field for field in kind._fields if field not in state_dict]
    if missing:
        raise ValueError(
            f"got a state dict without {missing[0]!r}; expected {', '.join(kind._fields)}. Pass what the state-dict "
            "function of the same optimizer returned."
        )
    trees = {field: _from_dict(state_dict[field]) for field in kind._fields if field != "count"}
    return kind(count=jnp.asarray(state_dict["count"], jnp.int32), **trees)


def flash_adamw_state_dict(state: FlashAdamState) -> dict[str, Any]:
    """The state of Adam or AdamW as a dict of arrays and structures."""
    return _state_dict(state)


def load_flash_adamw_state_dict(state_dict: dict[str, Any]) -> FlashAdamState:
    """What `flash_adamw_state_dict` was given: ours, or flashoptim-jax's."""
    return _loaded(FlashAdamState, state_dict)


def flash_lion_state_dict(state: FlashLionState) -> dict[str, Any]:
    """The state of Lion as a dict of arrays and structures."""
    return _state_dict(state)


def load_flash_lion_state_dict(state_dict: dict[str, Any]) -> FlashLionState:
    """What `flash_lion_state_dict` was given: ours, or flashoptim-jax's."""
    return _loaded(FlashLionState, state_dict)


def flash_sgd_state_dict(state: FlashSGDState) -> dict[str, Any]:
    """The state of SGD as a dict of arrays and structures."""
    return _state_dict(state)


def load_flash_sgd_state_dict(state_dict: dict[str, Any]) -> FlashSGDState:
    """What `flash_sgd_state_dict` was given: ours, or flashoptim-jax's."""
    return _loaded(FlashSGDState, state_dict)
