"""Start the backward pass from the loss scale.

The law: the loss is never multiplied. The backward pass starts from the scale instead of one, in the loss's own dtype,
and the resulting gradients are divided by the same scale (`scale_tree.py`).
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import varying_axes
from .._tree import wider_dtype
from .state import FLOAT32_MAX


@jax.custom_jvp
def _seed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `x`, with its derivative multiplied by `scale`: a cotangent of one is passed on as `scale`."""
    return x


@_seed.defjvp
def _seed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, scale = primals
    wide = wider_dtype(x.dtype, jnp.float32)
    return _seed(x, scale), (tangents[0].astype(wide) * scale.astype(wide)).astype(x.dtype)


def scale_cotangent(name: str, x: jax.Array, scale: jax.Array) -> jax.Array:
    """Return `x`, with its cotangent multiplied by `scale`. `name` is the caller in error messages."""
    if axes := varying_axes(scale) - varying_axes(x):
        raise ValueError(
            f"{name} got a scale that differs along {sorted(axes)} of the shard_map, and a loss that does not; "
            "expected devices that share a loss to share its scale. Add these axes to axis_name."
        )
    return _seed(x, scale)


def largest_cotangent(dtype: Any) -> float:
    """The largest scale that fits a cotangent of this dtype; below float32 precision, a power of two."""
    if not _is_below_float32(dtype):
        return FLOAT32_MAX
    return 2.0 ** float(np.floor(np.log2(float(jnp.finfo(dtype).max))))


def _is_below_float32(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).nmant < 23


def as_cotangent(scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale as the loss's cotangent will hold it: rounded to the loss's dtype and clipped to its range."""
    if not _is_below_float32(dtype):
        return scale
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(scale, info.nexp, info.nmant)  # XLA would drop a cast and its reverse
    return jnp.minimum(rounded, largest_cotangent(dtype))
