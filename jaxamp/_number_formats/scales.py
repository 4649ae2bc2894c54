"""Scales: of a tensor, of its rows, or of blocks along an axis."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .number_format import NumberFormat
from .rounding import INFINITY, exponent_of

_SMALLEST, _LARGEST = np.float32(2.0**-126), np.float32(2.0**126)  # whose inverses are normal numbers of float32


def scale_for(amax: Any, format: NumberFormat, power_of_two: bool = False) -> jax.Array:
    """The float32 scale that brings the magnitude `amax` to the largest number of a format: `amax / format.max`.

    Divide by it, round, and multiply by it. It is finite and positive for every `amax`, and no finite number becomes
    NaN by it: the scale of zero is 1, and that of infinity or NaN is as for the largest float32. With delayed scaling,
    leave such maxima out of the history.

    Args:
        amax: The largest magnitude, or an array of them.
        format: A number format.
        power_of_two: Whether to round the scale up to a power of two, so that scaling itself rounds nothing.
    """
    return scale_to(amax, format.max, power_of_two)


def scale_to(amax: Any, top: float, power_of_two: bool = False) -> jax.Array:
    """The scale that brings `amax` to `top`."""
    amax = lax.convert_element_type(amax, jnp.float32)
    largest = np.float32(np.finfo(np.float32).max)
    amax = jnp.where(lax.is_finite(amax), amax, largest)
    # A product: a compiler may make one of a division by a constant, and results would depend on it.
    scale = amax * np.float32(1 / min(top, 2.0**126))
    scale = jnp.where(amax > 0, jnp.clip(scale, _SMALLEST, _LARGEST), np.float32(1))
    if power_of_two:
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        scale = lax.bitcast_convert_type((bits + 0x7FFFFF) & INFINITY, jnp.float32)
    return scale


def largest_of(magnitude: jax.Array, axis: int | tuple[int, ...]) -> jax.Array:
    """The largest bits of magnitudes along axes, which stay with length 1. NaNs are passed over."""
    known = jnp.where(magnitude > INFINITY, 0, magnitude)
    return jnp.max(known, axis=axis, keepdims=True, initial=0)


def shared_exponents(largest: jax.Array, format: NumberFormat) -> jax.Array:
    """The exponents of e8m0 scales: that of the largest magnitude, less that of the largest element."""
    return jnp.clip(exponent_of(largest) - format.largest_exponent, -127, 127)


def in_blocks(x: jax.Array, axis: int, size: int) -> jax.Array:
    """`x` with `axis` split in two, the second of length `size`; zeros fill the last block."""
    length = x.shape[axis]
    count = -(-length // size)
    if count * size != length:
        widths = [(0, count * size - length if i == axis else 0, 0) for i in range(x.ndim)]
        x = lax.pad(x, jnp.zeros((), x.dtype), widths)
    return x.reshape((*x.shape[:axis], count, size, *x.shape[axis + 1 :]))


def out_of_blocks(x: jax.Array, axis: int, shape: tuple[int, ...]) -> jax.Array:
    """Undo `in_blocks`; `shape` is what it was before."""
    joined = x.reshape((*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :]))
    return lax.slice_in_dim(joined, 0, shape[axis], axis=axis)
