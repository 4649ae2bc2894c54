"""Small arrays put together, so that a step launches a few kernels for all of them.

A group never spans two arrays: each is filled up with zeros to whole groups, which stay zeros. So the result is that of
each array by itself, bit for bit.
"""

import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from ._layout import Groups
from ._leaf import LeafState

Leaf = tuple[jax.Array, jax.Array, LeafState, Groups]  # parameter, gradient, state


def pack(leaves: Sequence[Leaf]) -> Leaf:
    """One array of many; those with groups along rows don't fit."""
    size = leaves[0][3].size
    params, grads, states, _ = zip(*leaves, strict=True)
    joined = lambda arrays: jnp.concatenate([_filled(x, size) for x in arrays])
    fields = {
        name: None if getattr(states[0], name) is None else joined([getattr(state, name) for state in states])
        for name in ("mu", "nu", "correction")
    }
    scales = None
    if states[0].scales is not None:
        scales = jnp.concatenate([state.scales.reshape(state.scales.shape[0], -1) for state in states], axis=1)
    param = joined(params)
    return param, joined(grads), LeafState(scales=scales, **fields), Groups(param.shape, size, -1)


def unpack(leaves: Sequence[Leaf], param: jax.Array, state: LeafState) -> list[tuple[jax.Array, LeafState]]:
    """What `pack` was made of, after the step.

    Each array is cut out in a wider type and cast: XLA makes one kernel of many such fusions, and one of each bare
    slice.
    """
    wide = jax.tree.map(lambda x: x.astype(_WIDE.get(x.dtype, x.dtype)), (param, state))
    wide_param, wide_state = lax.optimization_barrier(wide)
    out, at, at_group = [], 0, 0
    for _, _, old, found in leaves:
        number = math.prod(found.shape)
        groups = -(-number // found.size)
        part = lambda x, dtype, start=at, number=number, shape=found.shape: (
            x[start : start + number].astype(dtype).reshape(shape)
        )
        fields = {
            name: None if getattr(state, name) is None else part(getattr(wide_state, name), getattr(state, name).dtype)
            for name in ("mu", "nu", "correction")
        }
        scales = None
        if old.scales is not None:
            scales = wide_state.scales[:, at_group : at_group + groups].astype(state.scales.dtype)
            scales = scales.reshape(old.scales.shape)
        out.append((part(wide_param, param.dtype), LeafState(scales=scales, **fields)))
        at, at_group = at + groups * found.size, at_group + groups
    return out


_WIDE = {
    jnp.dtype(narrow): jnp.dtype(wide)
    for wide, narrows in (
        (jnp.int32, (jnp.int8, jnp.int16, jnp.uint8, jnp.uint16)),
        (jnp.float32, (jnp.bfloat16, jnp.float16)),
    )
    for narrow in narrows
}


def _filled(x: jax.Array, size: int) -> jax.Array:
    missing = -x.size % size
    return jnp.pad(jnp.ravel(x), (0, missing)) if missing else jnp.ravel(x)
