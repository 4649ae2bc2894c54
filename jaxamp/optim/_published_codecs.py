"""The published codes of moments, as flashoptim-jax has them: bytes that are linear or companded in the moment.

The law, with `s` the largest entry of its group, for both scale formats within their range:

    |decode(encode(m)) - m| <= s / 100             momentum, s = max |m|
    |sqrt(decode(encode(v))) - sqrt(v)| <= s / 170   variance, s = max sqrt(v)

Of the latter, a 510th is half a code, and a 256th a unit of the scale, which is not always rounded to nearest.

Momentum is companded by a softsign, `127 * 2n / (1 + |n|)` with `n = m / s`, so that small entries keep more digits
than large ones. For the variance, the square root is stored: `255 * sqrt(v) / s`. Entries of it below `s / 510` would
be stored as zero while their momentum is not, and the next step would divide by epsilon: with gradients that span three
decades in a group, steps of 250 times the learning rate were measured. So a nonzero variance is stored as at least one;
then steps are too short, never too long. `floor=False` is the published format.

Rounded to nearest, as published, a slow average stands still: with b2 = 0.999, an entry below its group's largest can
never move by half a code.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dither import DITHER_BITS

ROOT_TINY, TINY = 2.0**-63, 2.0**-126  # lower bounds of maxima, so that a group of zeros never divides by zero
_ROOM = np.float32(2.0**-9)  # for factors of 254: the largest momentum overflows no product, and no bit is lost


def round_to_int(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """Round to the nearest integer, ties to even, in a dtype that holds it.

    Near 1.5 * 2**23 a float32 has no room for fractions, and its last bits are the integer; for NaN they may be
    anything. The maximum changes no integer that fits. It puts an integer operation between the sum and taking its last
    byte: without one, ptxas (12.9 and 13.0, not 13.4) turns both into a conversion of the sum to an integer, which is
    always 255.
    """
    bits = lax.bitcast_convert_type(x + np.float32(1.5 * 2**23), jnp.int32)
    return jnp.maximum(bits, np.int32(0x4B400000 + jnp.iinfo(dtype).min)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class PublishedMomentum:
    """Signed numbers as int8.

    >>> x = jnp.array([-0.5, 0.0, 0.01, 1.0])
    >>> codec = PublishedMomentum()
    >>> codec.encode(x, codec.top(x, 0))
    Array([-85,   0,   3, 127], dtype=int8)
    >>> codec.decode(codec.encode(x, codec.top(x, 0)), jnp.float32(1.0)).round(3)
    Array([-0.503,  0.   ,  0.012,  1.   ], dtype=float32)
    """

    dtype = jnp.dtype(jnp.int8)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the largest magnitude.

        Args:
            x: Numbers in groups.
            axis: The axis along which a group lies.

        Returns:
            One number for each group.
        """
        return lax.reduce(jnp.abs(x), np.float32(ROOT_TINY), lax.max, (axis % x.ndim,))

    def is_finite(self, top: jax.Array) -> jax.Array:
        """Whether all entries of each group are finite.

        Args:
            top: What `top` returned.

        Returns:
            Bools, one for each group.
        """
        return jnp.isfinite(top)

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored. Zero if it is not finite, so that the group starts over.

        Args:
            top: What `top` returned.

        Returns:
            The scale of each group, for `decode`.
        """
        return jnp.where(jnp.isfinite(top), top, 0.0)

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        """Round numbers to codes.

        Args:
            x: Numbers in groups.
            top: What `top` returned, in a shape that fits.
            dither: What to add before rounding down; None rounds to nearest.

        Returns:
            Codes.
        """
        x, top = x * _ROOM, top * _ROOM
        return round_to_int(254.0 * x / (top + jnp.abs(x)) + _offset(dither), self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """Turn codes into numbers.

        Args:
            code: What `encode` returned.
            scale: What `scale` returned, in a shape that fits.

        Returns:
            Numbers in float32.
        """
        y = code.astype(jnp.float32)
        return y * (scale * _ROOM) / (254.0 - jnp.abs(y)) * (1 / _ROOM)


@dataclasses.dataclass(frozen=True)
class PublishedVariance:
    """Non-negative numbers as the uint8 of their square root; with `floor`, only zero is stored as zero.

    Attributes:
        floor: Whether to keep a nonzero number from being stored as zero.

    >>> x = jnp.array([0.0, 1e-9, 0.25, 1.0])
    >>> [codec.encode(x, codec.top(x, 0)).tolist() for codec in (PublishedVariance(), PublishedVariance(floor=False))]
    [[0, 1, 128, 255], [0, 0, 128, 255]]
    """

    floor: bool = True
    dtype = jnp.dtype(jnp.uint8)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the reciprocal of the largest root.

        Args:
            x: Numbers in groups.
            axis: The axis along which a group lies.

        Returns:
            One number for each group.
        """
        return lax.rsqrt(lax.reduce(x, np.float32(TINY), lax.max, (axis % x.ndim,)))

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored: the largest root, or zero if that is NaN.

        Args:
            top: What `top` returned.

        Returns:
            The scale of each group, for `decode`.
        """
        return jnp.where(jnp.isnan(top), 0.0, 1.0 / jnp.maximum(top, np.float32(2.0**-64)))

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        """Round numbers to codes.

        Args:
            x: Numbers in groups.
            top: What `top` returned, in a shape that fits.
            dither: What to add before rounding down; None rounds to nearest.

        Returns:
            Codes.
        """
        y = 255.0 * jnp.sqrt(jnp.minimum(x, np.finfo(np.float32).max)) * top
        if self.floor:
            y = jnp.where(x > 0.0, jnp.maximum(y, 1.0), y)
        return round_to_int(y + _offset(dither), self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """Turn codes into numbers.

        Args:
            code: What `encode` returned.
            scale: What `scale` returned, in a shape that fits.

        Returns:
            Numbers in float32.
        """
        root = code.astype(jnp.float32) * scale
        return root * (root * np.float32(1 / 255**2))  # scaling by 1 / 255 beforehand would be its own kernel


def _offset(dither: jax.Array | None) -> jax.Array | float:
    """What to add before rounding to nearest: more than -1/2 and less than 1/2."""
    if dither is None:
        return 0.0
    return (dither.astype(jnp.float32) + 0.5) * np.float32(2.0**-DITHER_BITS) - 0.5
