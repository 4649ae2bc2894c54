"""Weights as a low-precision parameter and a correction: 24 bits in bfloat16 or float16 + int8, 32 bits with int16.

The law: `join(*split(x))` is within half a unit of the correction of `x`: for normal numbers `1.6e-5 * |x|` with
bfloat16 and int8, `2e-6 * |x|` with float16 and int8, and `1.3e-7 * |x|` with int16. The parameter is `x` rounded to
nearest. A value that the parameter can hold has a correction of zero.

The corrections of bfloat16 and float16 parameters have different units. So that a state tells which it belongs to, the
bits of a float16's are kept as uint8 or uint16. (In the published format they are signed too.)

The correction is the rounding error, divided by half the distance to the parameter's neighbour, times 127 or 32767.
That distance is a power of two, given by the parameter's exponent. On GPUs, XLA drops a cast to bfloat16 and back, and
with it the rounding error, so a value that was just rounded is widened by its bits. A bfloat16 parameter read from
memory is cast instead, which takes fewer instructions; because `split` and every step end in a barrier, such a
parameter was never rounded in the same fused program.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._published_codecs import round_to_int

LOW_DTYPES = (jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float16))
_LARGEST_CORRECTION = {jnp.dtype(jnp.int8): 127.0, jnp.dtype(jnp.int16): 32767.0}
_UNSIGNED = {jnp.dtype(f"int{bits}"): jnp.dtype(f"uint{bits}") for bits in (8, 16)}
_SIGNED = {unsigned: signed for signed, unsigned in _UNSIGNED.items()}
_EXPONENT_BITS, _SMALLEST_NORMAL = np.uint32(0x7F800000), np.uint32(0x00800000)


@dataclasses.dataclass(frozen=True)
class Weight:
    """A float32 as a parameter of `dtype` and a correction that makes it one of `bits` bits.

    Attributes:
        dtype: The dtype of the parameter.
        bits: 24 or 32, of the weight.

    >>> low, correction = Weight(jnp.bfloat16, 24).encode(jnp.array([1.0, 1.003]))
    >>> low, correction
    (Array([1, 1], dtype=bfloat16), Array([ 0, 98], dtype=int8))
    >>> [f"{x:.5f}" for x in Weight(jnp.bfloat16, 24).decode(low, correction)]
    ['1.00000', '1.00301']
    """

    dtype: Any = jnp.bfloat16
    bits: int = 24

    def encode(self, x: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Split weights into parameters and corrections.

        Args:
            x: Weights in float32.

        Returns:
            Parameters and corrections.
        """
        return split(jnp.asarray(x, jnp.float32), self.dtype, correction_dtype(self.bits, self.dtype))

    def decode(self, low: jax.Array, correction: jax.Array) -> jax.Array:
        """Join parameters and corrections.

        Args:
            low: Parameters.
            correction: Their corrections.

        Returns:
            Weights in float32.
        """
        return join(low, correction)


def check_correction(
    name: str, leaf_name: str, param: Any, correction: Any, instead: str, *, is_published: bool
) -> None:
    """Raise an error if a correction can't belong to a parameter."""
    check_low_dtype(name, leaf_name, param, correction, is_published=is_published)
    if correction is None or correction.shape == param.shape:
        return
    raise ValueError(
        f"{name} got a correction of shape {correction.shape} for {leaf_name!r}, which is of shape {param.shape} and "
        f"in {param.dtype}; expected the correction of a bfloat16 or float16 array of this shape. {instead}"
    )


def check_low_dtype(name: str, leaf_name: str, param: Any, correction: Any, *, is_published: bool) -> None:
    """Raise an error if a parameter with a correction is no longer of the dtype that the correction was made for.

    In the published format, a signed correction may belong to either.
    """
    made_for = None
    if correction is not None and not (is_published and correction.dtype in _UNSIGNED):
        made_for = jnp.dtype(jnp.float16 if correction.dtype in _SIGNED else jnp.bfloat16)
    if made_for and param.dtype in LOW_DTYPES and param.dtype != made_for:
        raise ValueError(
            f"{name} got {leaf_name!r} in {param.dtype} and a correction that was made for {made_for}; expected "
            f"{made_for}, as when the state was made. Pass the parameters that belong to the state, or convert both "
            "with jaxamp.optim.to_float32 and from_float32."
        )
    if correction is not None and param.dtype not in LOW_DTYPES:
        raise ValueError(
            f"{name} got {leaf_name!r} in {param.dtype} and a correction for it; expected bfloat16 or float16, as when "
            "the state was made. Write params = optax.apply_updates(params, updates), which keeps the dtype of "
            "parameters; eqx.apply_updates and a plain sum don't."
        )


def correction_dtype(bits: int, dtype: Any) -> jnp.dtype:
    """The dtype of the correction that makes a parameter of `dtype` a weight of `bits` bits."""
    signed = jnp.dtype(jnp.int8 if bits == 24 else jnp.int16)
    return _UNSIGNED[signed] if jnp.dtype(dtype) == jnp.float16 else signed


def widen(low: jax.Array) -> jax.Array:
    """A parameter in float32. float16 goes by its bits, to keep subnormal numbers."""
    return _from_bits(low) if low.dtype == jnp.float16 else low.astype(jnp.float32)


@jax.custom_jvp
def _from_bits(low: jax.Array) -> jax.Array:
    """A cast to float32 that XLA can't drop."""
    bits = lax.bitcast_convert_type(low, jnp.uint16).astype(jnp.uint32)
    if low.dtype == jnp.bfloat16:
        return _float_from_bits(bits << np.uint32(16))
    sign, magnitude = (bits & np.uint32(0x8000)) << np.uint32(16), bits & np.uint32(0x7FFF)
    normal = _float_from_bits((magnitude << np.uint32(13)) + np.uint32(112 << 23))
    special = _float_from_bits((magnitude << np.uint32(13)) | _EXPONENT_BITS)  # infinite, NaN
    subnormal = magnitude.astype(jnp.int32).astype(jnp.float32) * np.float32(2.0**-24)
    value = jnp.where(
        magnitude < np.uint32(0x400), subnormal, jnp.where(magnitude < np.uint32(0x7C00), normal, special)
    )
    return _float_from_bits(lax.bitcast_convert_type(value, jnp.uint32) | sign)


@_from_bits.defjvp
def _from_bits_jvp(primals: Any, tangents: Any) -> tuple[jax.Array, jax.Array]:
    return _from_bits(*primals), tangents[0].astype(jnp.float32)


def round_to_param(x: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array]:
    """Round `x` to the parameter's dtype; also return the result in float32, in a way that keeps the rounding error."""
    low = x.astype(dtype)
    return low, _from_bits(low)


def join(low: jax.Array, correction: jax.Array | None) -> jax.Array:
    """The float32 weight of a parameter and its correction."""
    wide = widen(low)
    if correction is None:
        return wide
    if correction.dtype in _SIGNED:
        correction = lax.bitcast_convert_type(correction, _SIGNED[correction.dtype])
    unit = np.float32(_half_unit(low.dtype) / _LARGEST_CORRECTION[correction.dtype])
    return wide + correction.astype(jnp.float32) * (unit * _float_from_bits(_power_of_two_bits(wide, low.dtype)))


def split(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, Any]:
    """Split `x` into a parameter and a correction of dtype `correction`; no correction if that is None."""
    return lax.optimization_barrier(split_without_barrier(x, dtype, correction))


def split_without_barrier(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, Any]:
    """The same as `split`, for callers that end in a barrier themselves."""
    low, wide = round_to_param(x, dtype)
    return low, None if correction is None else correction_for(x, wide, dtype, correction)


def change_and_correction(param: jax.Array, new: jax.Array, correction: Any) -> tuple[jax.Array, jax.Array]:
    """The float32 change that turns the parameter into `new` rounded, and the correction that then remains.

    `optax.apply_updates` adds the change. The result is `new` rounded, unless the parameter shrinks to a tiny fraction
    of itself, where float32 can't hold the exact difference. The correction leads from that result to `new`.
    """
    old = widen(param)
    change = round_to_param(new, param.dtype)[1] - old
    _, wide = round_to_param(old + change, param.dtype)
    return change, correction_for(new, wide, param.dtype, correction, clamp=True)


def correction_for(x: jax.Array, wide: jax.Array, dtype: Any, correction: Any, *, clamp: bool = False) -> jax.Array:
    """The correction that leads from a parameter, in float32 `wide`, to `x`; `clamp` if `x` may be out of reach."""
    signed = _SIGNED.get(jnp.dtype(correction), jnp.dtype(correction))
    largest = _LARGEST_CORRECTION[signed]
    # The bits of 2**(1 - exponent), twice the reciprocal of the power. Half a unit is the power times `_half_unit`.
    reciprocal = _float_from_bits(_EXPONENT_BITS - _power_of_two_bits(wide, dtype))
    error = (x - wide) * reciprocal * np.float32(largest / 2 / _half_unit(dtype))
    rounded = round_to_int(jnp.clip(error, -largest, largest) if clamp else error, signed)
    return rounded if signed == correction else lax.bitcast_convert_type(rounded, correction)


def _half_unit(dtype: Any) -> float:
    return 2.0**-8 if jnp.dtype(dtype) == jnp.bfloat16 else 2.0**-11


def _power_of_two_bits(wide: jax.Array, dtype: Any) -> jax.Array:
    """The bits of the power of two at or below a parameter's magnitude, at least the smallest normal number."""
    smallest = _SMALLEST_NORMAL if jnp.dtype(dtype) == jnp.bfloat16 else np.uint32(113 << 23)  # 2**-14
    return jnp.maximum(lax.bitcast_convert_type(wide, jnp.uint32) & _EXPONENT_BITS, smallest)


def _float_from_bits(bits: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(bits, jnp.float32)
