"""Round the bits of float32 magnitudes to a number format, by integer arithmetic.

The law: the result is the number of the format that the rounding names, for every float32, on every backend.

Integers, since nothing else keeps the law inside a compiled program. XLA drops a cast and the cast back where it may
keep excess precision, devices flush the subnormals of float32 to zero, and `lax.reduce_precision` has neither
subnormals nor the numbers of the last exponent. XLA takes none of these liberties with integers.

A magnitude is an integer `significand` of 24 bits times a power of two. Rounding drops bits at its end: as many as
leave `mantissa + 1` bits, or more below the smallest normal number, where the spacing stays the same. What was dropped,
as a fraction of 2**32, decides whether the rest goes up by one; the carry moves into the exponent by itself.

A scale that is a power of two moves the exponents of the format, so that blocks are rounded without a product.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .number_format import NumberFormat

INFINITY = 0x7F800000
NAN = 0x7FC00000
_SIGN = np.int32(-(2**31))
_LEADING = 1 << 23  # the bit of a float32 significand that is not stored


def magnitude_of(x: Any) -> tuple[jax.Array, jax.Array]:
    """The bits of |x| as a float32, and the sign bits, as int32. `x` is an array of floats of 32 bits or fewer."""
    if x.dtype == jnp.bfloat16:  # by bits: a cast might be joined with one before it
        bits = lax.convert_element_type(lax.bitcast_convert_type(x, jnp.uint16), jnp.int32) << 16
    else:
        bits = lax.bitcast_convert_type(lax.convert_element_type(x, jnp.float32), jnp.int32)
    return bits & ~_SIGN, bits & _SIGN


def from_bits(bits: jax.Array, dtype: Any) -> jax.Array:
    """Numbers from the bits of float32 values, which `dtype` holds exactly."""
    if dtype == jnp.bfloat16:
        return lax.bitcast_convert_type(lax.convert_element_type(bits >> 16, jnp.int16), jnp.bfloat16)
    return lax.convert_element_type(lax.bitcast_convert_type(bits, jnp.float32), dtype)


def exponent_of(magnitude: jax.Array) -> jax.Array:
    """The logarithm to base 2, rounded down, from the bits of a magnitude; 128 for infinity, -150 for zero."""
    return jnp.where(magnitude < _LEADING, -118 - lax.clz(magnitude), (magnitude >> 23) - 127)


def round_bits(
    magnitude: jax.Array,
    sign: jax.Array,
    format: NumberFormat,
    random: jax.Array | None,
    shift: jax.Array | None = None,
) -> jax.Array:
    """The bits of the rounded float32 values.

    Args:
        magnitude: Bits of magnitudes, as `magnitude_of` has them.
        sign: Sign bits.
        format: Of the elements; its scale is not read.
        random: 32 random bits for each number, if the rounding is stochastic.
        shift: The exponent of the power of two that elements are scaled by.
    """
    value = _rounded(magnitude, format, random, shift)
    moved = 0 if shift is None else shift
    largest = _bits(format.largest_significand << (23 - format.mantissa), format.largest_exponent + moved)
    if format.saturate:
        value = jnp.minimum(value, largest)
    else:
        value = jnp.where(value > largest, INFINITY if format.has_infinity else NAN, value)
    if not format.subnormals:
        value = jnp.where(value < _bits(_LEADING, format.smallest_exponent + moved), 0, value)
    if shift is not None and format.saturate:  # the largest scale times the largest element
        value = jnp.where(magnitude == INFINITY, INFINITY, value)
    value = jnp.where(magnitude > INFINITY, NAN, value)
    return value | (sign if format.has_negative_zero else jnp.where(value == 0, 0, sign))


def _rounded(
    magnitude: jax.Array, format: NumberFormat, random: jax.Array | None, shift: jax.Array | None
) -> jax.Array:
    """Rounded, as if there were no largest number."""
    mantissa, smallest = format.mantissa, format.smallest_exponent + (0 if shift is None else shift)
    field = magnitude >> 23
    significand = jnp.where(field == 0, magnitude, (magnitude & (_LEADING - 1)) | _LEADING)
    last = jnp.maximum(field, 1) - 150  # the exponent of the last bit of the significand
    below_float32 = shift is not None or format.smallest_exponent < -126  # normal there, and subnormal in float32
    lead = 31 - lax.clz(significand) if below_float32 else jnp.full_like(field, 23)  # the position of the first bit

    dropped = jnp.maximum(lead - mantissa, 0)
    if format.subnormals:
        dropped = jnp.maximum(dropped, smallest - mantissa - last)
    fraction = _fraction(significand, dropped)
    if format.rounding == "stochastic":
        assert random is not None
        up = random < fraction
    else:
        odd = (significand >> jnp.minimum(dropped, 31)) & 1
        if mantissa == 0:  # an even code has an even exponent
            odd = odd & (lead + last - smallest + 1)
        half = np.uint32(2**31)
        up = (fraction > half) | ((fraction == half) & (odd == 1))

    inside = jnp.minimum(dropped, 23)
    value = ((magnitude >> inside) + lax.convert_element_type(up, jnp.int32)) << inside
    if not format.subnormals:
        return value
    smallest_of_all = _bits(_LEADING, smallest - mantissa)
    return jnp.where(dropped > 23, jnp.where(up, smallest_of_all, 0), value)


def _fraction(significand: jax.Array, dropped: jax.Array) -> jax.Array:
    """The dropped bits of a significand as a fraction of 2**32, rounded down where there are more than 32."""
    left, right = jnp.maximum(24 - dropped, 0), jnp.clip(dropped - 24, 0, 31)
    aligned = lax.convert_element_type(significand, jnp.uint32) << 8
    moved = (aligned << lax.convert_element_type(left, jnp.uint32)) >> lax.convert_element_type(right, jnp.uint32)
    return jnp.where(dropped > 55, np.uint32(0), moved)


def _bits(significand: int, exponent: Any) -> Any:
    """The bits of a float32, from a significand of 24 bits and the exponent of its first bit."""
    if isinstance(exponent, int):
        return int(np.float32(math.ldexp(significand, exponent - 23)).view(np.int32))
    normal = ((exponent + 126) << 23) + significand
    subnormal = significand >> jnp.clip(-126 - exponent, 0, 31)
    return jnp.where(exponent > 127, INFINITY, jnp.where(exponent < -126, subnormal, normal))
