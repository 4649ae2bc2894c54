"""Convert between the states of flashoptim-jax and the `FlashState` of `jaxamp.optim`."""

import math
from typing import Any

import jax
import jax.numpy as jnp

from ..optim._groups import choose_groups
from ..optim._optimizer import FlashOptimizer
from ..optim._state import FlashState, LeafState, state_from_leaves
from ..optim._tree_paths import flatten, flatten_like
from .compression import no_ecc_leaf
from .quantization import QuantizedArray, is_quantized


def from_flash_state(state_class: Any, params: Any, state: FlashState) -> Any:
    """Convert to flashoptim-jax's form: flat scales beside each moment, an int32 zero for absent parts."""
    _, leaves, structure = flatten(params)
    columns = zip(*(structure.flatten_up_to(getattr(state, field)) for field in LeafState._fields), strict=True)
    rows = [LeafState(*column) for column in columns]
    number_of_moments = len(state_class._fields) - len(("count", "ecc"))
    moments = [[_moment(row, i) for row in rows] for i in range(number_of_moments)]
    corrections = [no_ecc_leaf() if row.correction is None else row.correction for row in rows]
    trees = (
        structure.unflatten([None if leaf is None else x for leaf, x in zip(leaves, column, strict=True)])
        for column in (*moments, corrections)
    )
    return state_class(state.count, *trees)


def _moment(row: LeafState, i: int) -> Any:
    stored = (row.mu, row.nu)[i]
    if stored is None:
        return no_ecc_leaf()
    return stored if row.scales is None else QuantizedArray(stored, _flatten_scales(row.scales[i]))


def _flatten_scales(scales: jax.Array) -> jax.Array:
    """Scales in the order of the entries. They are gathered if an explicit axis splits any but the first axis."""
    spec = jax.typeof(scales).sharding.spec
    if any(axis is not None for axis in spec[1:]):
        scales = jax.sharding.reshard(scales, jax.sharding.PartitionSpec(spec[0]))
    return scales.reshape(-1)


def to_flash_state(optimizer: FlashOptimizer, params: Any, state: Any) -> FlashState:
    """Convert a state of flashoptim-jax's form, ours or its own, to a `FlashState`."""
    paths, leaves, structure = flatten(params)
    instead = f"Write state = optimizer.init(params) with {optimizer.name}, then pass the state that each step returns."
    if not hasattr(state, "ecc"):
        raise TypeError(
            f"{optimizer.name} got {type(state).__name__} as its state; expected a state with ecc, as its init "
            f"returns. {instead}"
        )
    trees = [tree for field, tree in state._asdict().items() if field != "count"]
    *moments, corrections = (
        flatten_like(optimizer.name, "a state that is", tree, params, structure, instead) for tree in trees
    )
    rows = []
    for i, (path, leaf) in enumerate(zip(paths, leaves, strict=True)):
        stored = [column[i] for column in moments]
        arrays = [x.values if is_quantized(x) else None if _is_absent(x) else x for x in stored]
        scales = None
        if is_quantized(stored[0]):
            groups = choose_groups(leaf.shape, optimizer.storage(path, leaf).group_size, "flat")
            scales = jnp.stack([x.scales for x in stored])
            if scales.size == len(stored) * math.prod(groups.scales_shape):
                scales = scales.reshape(len(stored), *groups.scales_shape)
        correction = None if _is_absent(corrections[i]) else corrections[i]
        rows.append(LeafState(arrays[0], arrays[1] if len(arrays) > 1 else None, scales, correction))
    return state_from_leaves(jnp.asarray(state.count, jnp.int32), rows, structure)


def _is_absent(x: Any) -> bool:
    """Whether a leaf is None, or the int32 zero that flashoptim-jax has for absent parts."""
    return x is None or (not is_quantized(x) and jnp.shape(x) == () and jnp.asarray(x).dtype == jnp.int32)
