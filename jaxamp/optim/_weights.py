"""Weights as a low-precision parameter and a correction: 24 bits in bfloat16 or float16 + int8, 32 bits with int16.

The law: `join(*split(x))` is within half a unit of the correction of `x`, for normal numbers `1.6e-5 * |x|` with
bfloat16 and int8, `2e-6 * |x|` with float16 and int8, and `1.3e-7 * |x|` with int16; the parameter is `x` rounded to
nearest; a value that the parameter holds has a correction of zero.

The correction is the rounding error over half the distance to the parameter's neighbour, times 127 or 32767. That
distance is a power of two which the parameter's exponent gives. XLA drops a cast to bfloat16 and back on GPUs, and with
it the rounding error: what was rounded is read from its bits. A bfloat16 parameter that is stored is cast, which takes
fewer instructions; `split` and a step end in a barrier, so that it never is what was rounded in the same program.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._codecs import round_to

LOW = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_LARGEST = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.int16): 32767.0}
_EXPONENT, _SMALLEST_NORMAL = np.uint32(0x7F800000), np.uint32(0x00800000)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A float32 as a parameter of `dtype` and a correction that makes it one of `bits` bits.

    >>> low, correction = Weight(jnp.bfloat16, 24).encode(jnp.array([1.0, 1.003]))
    >>> low, correction
    (Array([1, 1], dtype=bfloat16), Array([ 0, 98], dtype=int8))
    >>> [f"{x:.5f}" for x in Weight(jnp.bfloat16, 24).decode(low, correction)]
    ['1.00000', '1.00301']
    """

    dtype: Any = jnp.bfloat16
    bits: int = 24

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        return split(jnp.asarray(x, jnp.float32), self.dtype, correction_dtype(self.bits))

    def decode(self, low: jax.Array, correction: jax.Array) -> jax.Array:
        return join(low, correction)


def check_correction(name: str, leaf_name: str, param: Any, correction: Any, instead: str) -> None:
    """Refuse a correction that is another parameter's."""
    check_low(name, leaf_name, param, correction)
    if correction is None or correction.shape == param.shape:
        return
    raise ValueError(
        f"{name} got a correction of shape {correction.shape} for {leaf_name!r}, which is of shape {param.shape} and "
        f"in {param.dtype}; expected that of a bfloat16 or float16 array of this shape. {instead}"
    )


def check_low(name: str, leaf_name: str, param: Any, correction: Any) -> None:
    """Refuse a parameter that was low, and is no longer."""
    if correction is not None and param.dtype not in LOW:
        raise ValueError(
            f"{name} got {leaf_name!r} in {param.dtype} and a correction for it; expected bfloat16 or float16, as when "
            "the state was made. Write params = optax.apply_updates(params, updates), which keeps the dtype of "
            "parameters: eqx.apply_updates and a sum don't."
        )


def correction_dtype(bits: int) -> jnp.dtype:
    return jnp.dtype(jnp.int8 if bits == 24 else jnp.int16)


def widen(low: jax.Array) -> jax.Array:
    """A parameter in float32; one in float16 by its bits, for its subnormal numbers."""
    return _from_bits(low) if low.dtype == jnp.float16 else low.astype(jnp.float32)


@jax.custom_jvp
def _from_bits(low: jax.Array) -> jax.Array:
    """A cast to float32 that XLA can't drop."""
    bits = lax.bitcast_convert_type(low, jnp.uint16).astype(jnp.uint32)
    if low.dtype == jnp.bfloat16:
        return _float(bits << np.uint32(16))
    sign, magnitude = (bits & np.uint32(0x8000)) << np.uint32(16), bits & np.uint32(0x7FFF)
    normal = _float((magnitude << np.uint32(13)) + np.uint32(112 << 23))
    special = _float((magnitude << np.uint32(13)) | _EXPONENT)  # infinite, NaN
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)
    value = jnp.where(
        magnitude < np.uint32(0x400), subnormal, jnp.where(magnitude < np.uint32(0x7C00), normal, special)
    )
    return _float(lax.bitcast_convert_type(value, jnp.uint32) | sign)


@_from_bits.defjvp
def _from_bits_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _from_bits(*primals), tangents[0].astype(jnp.float32)


def rounded(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """`x` in the parameter's dtype, and that in float32: the rounding error is not lost on the way."""
    low = x.astype(dtype)
    return low, _from_bits(low)


def join(low: jax.Array, correction: jax.Array | None) -> jax.Array:
    """The weight in float32."""
    wide = widen(low)
    if correction is None:
        return wide
    unit = np.float32(_half_unit(low.dtype) / _LARGEST[correction.dtype])
    return wide + correction.astype(jnp.float32) * (unit * _float(_power(wide, low.dtype)))


def split(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, Any]:
    """The parameter, and the correction in the dtype `correction`; None if that is None."""
    return lax.optimization_barrier(split_in_step(x, dtype, correction))


def split_in_step(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, Any]:
    """The same, where a barrier follows."""
    low, wide = rounded(x, dtype)
    return low, None if correction is None else error_of(x, wide, dtype, correction)


def change_of(param: jax.Array, new: jax.Array, correction: Any) -> tuple[jax.Array, jax.Array]:
    """The change, in float32, that makes the parameter `new` rounded, and the correction that is left then.

    The parameter will be what `optax.apply_updates` makes of the change: `new` rounded, unless it falls to a tiny part
    of what it was, where float32 has no such difference. The correction leads to `new` from there.
    """
    old = widen(param)
    change = rounded(new, param.dtype)[1] - old
    _, wide = rounded(old + change, param.dtype)
    return change, error_of(new, wide, param.dtype, correction, clamp=True)


def error_of(x: jax.Array, wide: jax.Array, dtype: Any, correction: Any, *, clamp: bool = False) -> jax.Array:
    """The correction that leads from a parameter, `wide` in float32, to `x`; `clamp` where it may be out of reach."""
    largest = _LARGEST[jnp.dtype(correction)]
    # 2**(1 - exponent): the reciprocal of a power of two by its bits. Half a unit is the power times `_half_unit`.
    reciprocal = _float(_EXPONENT - _power(wide, dtype))
    error = (x - wide) * reciprocal * np.float32(largest / 2 / _half_unit(dtype))
    return round_to(jnp.clip(error, -largest, largest) if clamp else error, jnp.dtype(correction))


def _half_unit(dtype: Any) -> float:
    return 2.0**-8 if jnp.dtype(dtype) == jnp.bfloat16 else 2.0**-11


def _power(wide: jax.Array, dtype: Any) -> jax.Array:
    """The power of two at or below a parameter's magnitude, that of the smallest normal number at least, as bits."""
    smallest = _SMALLEST_NORMAL if jnp.dtype(dtype) == jnp.bfloat16 else np.uint32(113 << 23)  # 2**-14
    return jnp.maximum(lax.bitcast_convert_type(wide, jnp.uint32) & _EXPONENT, smallest)


def _float(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
