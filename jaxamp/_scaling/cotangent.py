"""Multiplying by a loss scale, and dividing by it.

The law: a loss is never multiplied. The backward pass starts from the scale in place of one, in the loss's own dtype;
what it makes is divided by the same scale, in float32 at least.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import varying_axes
from .._tree import is_inexact, wider
from .state import FLOAT32_MAX


@jax.custom_jvp
def _seed(x: jax.Array, scale: jax.Array) -> jax.Array:
    """`x`, whose derivative is multiplied by `scale`: a cotangent of one goes on as `scale`."""
    return x


@_seed.defjvp
def _seed_jvp(primals: Any, tangents: Any) -> tuple[Any, Any]:
    x, scale = primals
    wide = wider(x.dtype, jnp.float32)
    return _seed(x, scale), (tangents[0].astype(wide) * scale.astype(wide)).astype(x.dtype)


def seeded(name: str, x: jax.Array, scale: jax.Array) -> jax.Array:
    if axes := varying_axes(scale) - varying_axes(x):
        raise ValueError(
            f"{name} got a scale that differs along {sorted(axes)} of the shard_map, and a loss that does not; "
            "expected devices with one loss to have one scale. Give these axes in axis_name too."
        )
    return _seed(x, scale)


def largest_cotangent(dtype: Any) -> float:
    """The largest scale that is a cotangent of a float of this dtype: for a short one, a power of two."""
    return 2.0 ** float(np.floor(np.log2(float(jnp.finfo(dtype).max)))) if _is_short(dtype) else FLOAT32_MAX


def _is_short(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating)) and jnp.finfo(dtype).nmant < 23


def as_cotangent(scale: jax.Array, dtype: Any) -> jax.Array:
    """The scale that the loss will in fact have as its cotangent: rounded to its dtype, and within its range."""
    if not _is_short(dtype):
        return scale
    info = jnp.finfo(dtype)
    rounded = lax.reduce_precision(scale, info.nexp, info.nmant)  # XLA would drop a cast and its reverse
    return jnp.minimum(rounded, largest_cotangent(dtype))


def scaled(tree: Any, scale: jax.Array) -> Any:
    """A pytree's floats multiplied by `scale`, in float32 at least."""
    return _each_float(tree, scale, jnp.multiply)


def unscaled(tree: Any, scale: jax.Array) -> Any:
    """A pytree's floats divided by `scale`, in float32 at least."""
    # XLA divides by a scalar with its reciprocal, which it flushes to zero for the largest scales.
    shrink = jnp.where(jnp.asarray(scale) > 2.0**100, jnp.float32(2.0**-100), jnp.float32(1))
    return _each_float(tree, scale * shrink, lambda x, s: x * shrink.astype(x.dtype) / s)


def _each_float(tree: Any, scale: jax.Array, op: Callable[..., Any]) -> Any:
    def leaf(x: Any) -> Any:
        if not (is_inexact(x) or isinstance(x, float | complex)):
            return x
        x = jnp.asarray(x)  # NumPy's float64 is float32, unless the user asked for 64 bits
        wide = wider(x.dtype, jnp.float32)
        return op(x.astype(wide), jnp.asarray(scale).astype(wide))

    return jax.tree.map(leaf, tree)
