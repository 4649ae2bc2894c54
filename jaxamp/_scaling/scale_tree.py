"""Multiply or divide the floats of a pytree by a loss scale, in float32 or wider."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .._transform.loss_scaling import note_scaled
from .._tree import is_inexact_array_like, wider_dtype


def scale_tree(tree: Any, scale: jax.Array) -> Any:
    """Multiply a pytree's floats by `scale`, in float32 or wider."""
    scaled = _map_floats(tree, scale, jnp.multiply)
    note_scaled(scaled, scale)
    return scaled


def unscale_tree(tree: Any, scale: jax.Array) -> Any:
    """Divide a pytree's floats by `scale`, in float32 or wider."""
    # XLA divides by a scalar by multiplying with its reciprocal, which it flushes to zero for the largest scales.
    shrink = jnp.where(jnp.asarray(scale) > 2.0**100, jnp.float32(2.0**-100), jnp.float32(1))
    return _map_floats(tree, scale * shrink, lambda x, s: x * shrink.astype(x.dtype) / s)


def _map_floats(tree: Any, scale: jax.Array, op: Callable[..., Any]) -> Any:
    def leaf(x: Any) -> Any:
        if not is_inexact_array_like(x):
            return x
        x = jnp.asarray(x)  # NumPy's float64 becomes float32, unless the user asked for 64 bits
        wide = wider_dtype(x.dtype, jnp.float32)
        return op(x.astype(wide), jnp.asarray(scale).astype(wide))

    return jax.tree.map(leaf, tree)
