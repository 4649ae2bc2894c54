"""Quantise arrays to a number format, and dequantise them again."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import EARLY_INLINE
from .number_format import KNOWN, NumberFormat
from .random_bits import random_bits
from .rounding import INFINITY, NAN, from_bits, magnitude_of, round_bits
from .scales import in_blocks, largest_of, out_of_blocks, scale_for, scale_to, shared_exponents

_E4M3 = KNOWN["e4m3"]


def quantize(x: Any, format: NumberFormat, *, key: Any = None, axis: int = -1, scale: Any = None) -> jax.Array:
    """The numbers of `x` rounded to a format, in the dtype of `x`. Its derivative is zero; see `emulate`.

    >>> import jax.numpy as jnp
    >>> from jaxamp._number_formats.names import format
    >>> quantize(jnp.array([0.3, 2.4, -100.0]), format("e2m1")).tolist()
    [0.5, 2.0, -6.0]

    NaN stays NaN, also in a format without a code for it: the whole block becomes NaN there if its scale is e8m0, which
    has one.

    Args:
        x: An array of floats of 32 bits or fewer.
        format: From `jaxamp.format`.
        key: For stochastic rounding: a JAX key, or an integer that differs from call to call.
        axis: The axis along which neighbours share a scale, if the format has blocks or rows.
        scale: A scale to use in place of the one that `x` would get; it broadcasts against `x`. Of a format without
            scales too: then it is divided by before rounding and multiplied by after it.
    """
    x = jnp.asarray(x)
    _check(x, format, scale)
    if format.is_scaled and x.ndim:
        _check_axis(x, axis)
    random = random_bits(key, x.shape) if format.rounding == "stochastic" else None
    return _quantize(x, random, scale, format=format, axis=axis)


# Compiled as a whole outside of `jit`, and without a trace inside of it.
@functools.partial(jax.jit, static_argnames=("format", "axis"), inline=EARLY_INLINE)
def _quantize(x: jax.Array, random: jax.Array | None, scale: Any, *, format: NumberFormat, axis: int) -> jax.Array:
    if x.size == 0:
        return x
    if scale is not None:
        return _with_scale(x, format, random, lax.convert_element_type(scale, jnp.float32))
    if not format.is_scaled:
        return from_bits(round_bits(*magnitude_of(x), format, random), x.dtype)
    if x.ndim == 0:
        return _in_views(x[None], format, random if random is None else random[None], 0)[0]
    return _in_views(x, format, random, axis % x.ndim)


def emulate(x: Any, format: NumberFormat, *, key: Any = None, axis: int = -1, scale: Any = None) -> jax.Array:
    """`quantize` with a straight-through derivative: cotangents pass as they are."""
    x = jnp.asarray(x)
    return straight_through(x, quantize(lax.stop_gradient(x), format, key=key, axis=axis, scale=scale))


@jax.custom_jvp
def straight_through(x: jax.Array, value: jax.Array) -> jax.Array:
    """`value`, with the derivative of `x`. Both have one dtype and one shape."""
    return value


@straight_through.defjvp
def _straight_through_jvp(primals: Any, tangents: Any) -> Any:
    return straight_through(*primals), tangents[0]


def _in_views(x: jax.Array, format: NumberFormat, random: jax.Array | None, axis: int) -> jax.Array:
    """With scales that `x` decides on, of all of it, of rows or of blocks."""
    axes: int | tuple[int, ...]
    if format.block == "tensor":
        axes = tuple(range(x.ndim))
    elif format.block == "axis":
        axes = axis
    else:
        parts = [part if part is None else in_blocks(part, axis, format.block) for part in (x, random)]
        assert parts[0] is not None
        return out_of_blocks(_scaled(parts[0], format, parts[1], axis + 1), axis, x.shape)
    return _scaled(x, format, random, axes)


def _scaled(x: jax.Array, format: NumberFormat, random: jax.Array | None, axes: int | tuple[int, ...]) -> jax.Array:
    """With one scale for all entries along `axes`."""
    magnitude, sign = magnitude_of(x)
    largest = largest_of(magnitude, axes)
    if format.scale == "e8m0":
        bits = round_bits(magnitude, sign, format, random, shared_exponents(largest, format))
        if not format.has_nan:
            bits = jnp.where(jnp.any(magnitude > INFINITY, axis=axes, keepdims=True), NAN, bits)
        return from_bits(bits, x.dtype)
    amax = lax.bitcast_convert_type(largest, jnp.float32)
    if format.scale == "float32":
        return _with_scale(x, format, random, scale_for(amax, format))
    of_tensor = scale_to(jnp.max(amax), format.max * _E4M3.max)
    of_blocks = quantize(amax * np.float32(1 / format.max) * (1 / of_tensor), _E4M3)
    return _with_scale(x, format, random, of_blocks * of_tensor)


def _with_scale(x: jax.Array, format: NumberFormat, random: jax.Array | None, scale: jax.Array) -> jax.Array:
    # By the inverse: a compiler may do so by itself where the scale is a constant, and results would depend on it. A
    # block may be so small beside others that its scale was rounded to zero: then its entries are.
    inverse = jnp.where(scale >= np.float32(2.0**-126), 1 / scale, np.float32(0))
    scaled = lax.convert_element_type(x, jnp.float32) * inverse
    element = dataclasses.replace(format, scale="none", block="tensor")
    bits = round_bits(*magnitude_of(scaled), element, random)
    return lax.convert_element_type(lax.bitcast_convert_type(bits, jnp.float32) * scale, x.dtype)


def _check_axis(x: jax.Array, axis: int) -> None:
    if not -x.ndim <= axis < x.ndim:
        raise ValueError(
            f"A format with scales along axis {axis} was given an array of shape {x.shape}. "
            f"Write axis= as an integer from {-x.ndim} to {x.ndim - 1}."
        )


def _check(x: jax.Array, format: NumberFormat, scale: Any) -> None:
    if not jnp.issubdtype(x.dtype, jnp.floating) or x.dtype.itemsize > 4:
        raise TypeError(
            f"An array of {x.dtype} was given to be rounded to {format}, which takes floats of 32 bits or fewer. "
            "Write x.astype(jnp.float32) for it."
        )
    if scale is not None and format.scale in ("e8m0", "e4m3"):
        raise ValueError(
            f"scale= was given with {format}, whose blocks find their own scales. "
            f"Write format({str(format)!r}, scale='none') with it, or leave scale= out."
        )
    top = np.float32(format.max)
    if format.saturate and not format.is_scaled and top < jnp.finfo(x.dtype).max and top.astype(x.dtype) != top:
        raise ValueError(
            f"An array of {x.dtype} was given to be rounded to {format}, whose largest number, {format.max:g}, "
            f"{x.dtype} does not have. Write x.astype(jnp.float32) for it, or saturate=False in the format."
        )
