"""Pack small arrays into one, so that a step launches a few kernels for all of them.

A group never spans two arrays: each array is padded to whole groups with zeros, which stay zero. So each array gets
the same result as by itself, bit for bit.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ._groups import Groups
from ._leaf_step import Leaf
from ._state import LeafState


def pack(leaves: Sequence[Leaf]) -> Leaf:
    """Pack many arrays into one. Arrays with groups along rows can't be packed."""
    size = leaves[0].groups.size
    params, grads, states, _ = zip(*leaves, strict=True)
    concatenate = lambda arrays: jnp.concatenate([_pad_to_groups(x, size) for x in arrays])
    fields = {
        name: None if getattr(states[0], name) is None else concatenate([getattr(state, name) for state in states])
        for name in ("mu", "nu", "correction")
    }
    scales = None
    if states[0].scales is not None:
        scales = jnp.concatenate([state.scales.reshape(state.scales.shape[0], -1) for state in states], axis=1)
    param = concatenate(params)
    return Leaf(param, concatenate(grads), LeafState(scales=scales, **fields), Groups(param.shape, size, -1))


def unpack(leaves: Sequence[Leaf], param: jax.Array, state: LeafState) -> list[tuple[jax.Array, LeafState]]:
    """Cut the results of a packed step into those of each array.

    Each array is sliced from a wider dtype and cast: XLA merges many such fusions into one kernel, while each bare
    slice would be its own.
    """
    wide = jax.tree.map(lambda x: x.astype(_WIDER_DTYPE.get(x.dtype, x.dtype)), (param, state))
    wide_param, wide_state = lax.optimization_barrier(wide)
    out, start, start_group = [], 0, 0
    for _, _, old, groups in leaves:
        entries = math.prod(groups.shape)
        number_of_groups = -(-entries // groups.size)
        part = lambda x, dtype, start=start, entries=entries, shape=groups.shape: (
            x[start : start + entries].astype(dtype).reshape(shape)
        )
        fields = {
            name: None if getattr(state, name) is None else part(getattr(wide_state, name), getattr(state, name).dtype)
            for name in ("mu", "nu", "correction")
        }
        scales = None
        if old.scales is not None:
            scales = wide_state.scales[:, start_group : start_group + number_of_groups].astype(state.scales.dtype)
            scales = scales.reshape(old.scales.shape)
        out.append((part(wide_param, param.dtype), LeafState(scales=scales, **fields)))
        start, start_group = start + number_of_groups * groups.size, start_group + number_of_groups
    return out


_WIDER_DTYPE = {
    jnp.dtype(narrow): jnp.dtype(wide)
    for wide, narrows in (
        (jnp.int32, (jnp.int8, jnp.int16, jnp.uint8, jnp.uint16)),
        (jnp.float32, (jnp.bfloat16, jnp.float16)),
    )
    for narrow in narrows
}


def _pad_to_groups(x: jax.Array, size: int) -> jax.Array:
    missing = -x.size % size
    return jnp.pad(jnp.ravel(x), (0, missing)) if missing else jnp.ravel(x)
