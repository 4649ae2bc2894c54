"""Moments in one byte: small floating-point numbers, relative to the largest of their group.

The law, with `s` the largest entry of its group, for numbers `x` and scales within the range of their format:

    |decode(encode(x)) - x| <= x / 16 above s / 16, x / 8 + s / 2**14 below                                momentum
    |decode(encode(x)) - x| <= x / 32 above s / 16, x / 8 above s / 2**14, x / 4 + s / 2**25 below         variance

Half of that if rounded to nearest; with a dither, the mean of what is decoded is `x`. The largest of a group is exact.
A momentum of zero is stored as zero. The variance has no code for zero: a smaller one counts as the smallest that there
is. If it were stored as zero while its momentum is not, the next step would divide by epsilon; so steps are too short,
never too long.

Codes are cut from the bits of a float32. An entry `x` becomes `y = 16 * x / s`, and the code is the upper bits of `y`,
with more of them where most entries are: from a power of two to the next there are 32, 16, 8 or 4 codes, fewer further
down. For momentum, a small `base` is added to `y`, so that zero is a code like any other. The factor of 16 keeps both
`16 / s` and `s / 16` normal numbers for every `s` above 2**-122.

Codes are noise: a moment that moves less than a code in a step jumps by a whole one now and then. With 8 codes from a
power of two to the next everywhere, steps were off by 10 %, and the loss of an MLP after 2,000 steps was 8 % below that
of AdamW. With these it is within 3 %.

On GPUs a step is bound by instructions, not by memory: encoding and decoding take a few operations on integers, no
division and no root. The reciprocal root of `s` is the only function that XLA computes in the kernel that finds `s`; so
groups are encoded by its square.

Codes have the other sign than the published ones: momentum is uint8 and variance int8. So the dtype of a state tells
which codes it has.
"""

import dataclasses
import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._dither import DITHER_BITS
from ._published_codecs import PublishedMomentum, PublishedVariance

_LARGEST = np.float32(16.0)
_SMALLEST_TOP = 2.0**-122
_ALL_ZERO = np.float32(2.0**125.5)  # a bit less than the factor of `_SMALLEST_TOP`
_MANTISSA = 23  # bits of a float32
_FEWEST = 2 ** (_MANTISSA - DITHER_BITS)  # codes from a power of two to the next
_ROOT = np.float32(2.0**-64)  # the reciprocal root of the largest float32


@dataclasses.dataclass(frozen=True)
class _Minifloat:
    """What both codes have in common.

    Attributes:
        half: Whether scales are float16, which has little range: then they are those of the roots of a variance.
    """

    half: bool = False

    _codes: ClassVar[int]  # the largest code
    _pieces: ClassVar[tuple[tuple[int, int], ...]]  # from the top: from a power of two to the next, and codes in each

    @functools.cached_property
    def _lines(self) -> list[tuple[int, int, int]]:
        """For each piece, codes from a power of two to the next, the code at its upper end, and the bits of `y` there.

        Each piece is a line from bits to codes. Lines are steeper further up, so the code is the largest of all lines.
        """
        lines, code, bits = [], self._codes, _bits(_LARGEST)
        for powers, each in self._pieces:
            lines.append((each, code, bits))
            code, bits = code - powers * each, bits - (powers << _MANTISSA)
        return lines

    @functools.cached_property
    def _base(self) -> np.float32:
        """The `y` of code zero."""
        each, code, bits = self._lines[-1]
        return np.uint32(bits - (code << _MANTISSA) // each).view(np.float32)

    @property
    def _span(self) -> float:
        """A sixteenth of the `y` of the largest entry, before `base` may be added."""
        return 1 - 2.0**-21

    def _scaled(self, magnitudes: jax.Array, top: jax.Array) -> jax.Array:
        """What becomes `y`: `16 * magnitudes * top**2`, a bit less so that it is not above 16.

        Not with the square of `top`, which may be too small for a normal number.
        """
        root = top * np.float32(4 * np.sqrt(self._span))
        return magnitudes * root * root

    def _scale(self, top: jax.Array) -> jax.Array:
        """What `y` is multiplied with; zero if the group is zero, or not finite."""
        # Four times `top`, by its bits: XLA would take the square first, which may be too small for a normal number.
        root = lax.bitcast_convert_type(lax.bitcast_convert_type(top, jnp.int32) + np.int32(2 << 23), jnp.float32)
        factor = root * root * np.float32(self._span)
        return jnp.where((factor > 0.0) & (factor < _ALL_ZERO), np.float32(1.0) / factor, 0.0)

    def _rounded(self, y: jax.Array, dither: jax.Array | None) -> jax.Array:
        """The code of `y`, rounded by the dither, or to nearest."""
        base = _bits(self._base)
        bits = lax.bitcast_convert_type(y, jnp.int32) - np.int32(base)
        fixed = [
            bits * np.int32(each // _FEWEST) + np.int32((code << DITHER_BITS) - (end - base) * (each // _FEWEST))
            for each, code, end in self._lines
        ]
        up = np.int32(1 << (DITHER_BITS - 1)) if dither is None else dither
        return (functools.reduce(jnp.maximum, fixed) + up) >> np.int32(DITHER_BITS)

    def _value(self, code: jax.Array) -> jax.Array:
        """The `y` of a code."""
        bits = [
            code * np.int32((1 << _MANTISSA) // each) + np.int32(end - (last << _MANTISSA) // each)
            for each, last, end in self._lines
        ]
        return lax.bitcast_convert_type(functools.reduce(jnp.minimum, bits), jnp.float32)


@dataclasses.dataclass(frozen=True)
class Momentum(_Minifloat):
    """Signed numbers as uint8, the first bit of which is the sign.

    Attributes:
        half: Whether scales are float16, which has little range: then they are those of the roots of a variance.

    >>> x = jnp.array([-0.5, 0.0, 0.01, 1.0])
    >>> codec = Momentum()
    >>> top = codec.top(x, 0)
    >>> codec.encode(x, top)
    Array([239,   0,  42, 127], dtype=uint8)
    >>> [f"{y:.3g}" for y in codec.decode(codec.encode(x, top), codec.scale(top))]
    ['-0.5', '0', '0.0105', '1']
    """

    dtype = jnp.dtype(jnp.uint8)
    _codes, _pieces = 127, ((4, 16), (8, 8))

    @property
    def _span(self) -> float:
        return (1 - 2.0**-21) * float(1 - self._base / _LARGEST)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the reciprocal root of the largest magnitude.

        Args:
            x: Numbers in groups.
            axis: The axis along which a group lies.

        Returns:
            One number for each group.
        """
        return _top(jnp.abs(x), axis)

    def is_finite(self, top: jax.Array) -> jax.Array:
        """Whether all entries of each group are finite.

        Args:
            top: What `top` returned.

        Returns:
            Bools, one for each group.
        """
        return top > 0.0

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored. Zero if it is not finite, so that the group starts over.

        Args:
            top: What `top` returned.

        Returns:
            The scale of each group, for `decode`.
        """
        return self._scale(top) * (_LARGEST if self.half else np.float32(1.0))

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        """Round numbers to codes.

        Args:
            x: Numbers in groups.
            top: What `top` returned, in a shape that fits.
            dither: What to add before rounding down; None rounds to nearest.

        Returns:
            Codes.
        """
        sign = (lax.bitcast_convert_type(x, jnp.int32) >> np.int32(24)) & np.int32(0x80)
        return (self._rounded(self._scaled(jnp.abs(x), top) + self._base, dither) | sign).astype(self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """Turn codes into numbers.

        Args:
            code: What `encode` returned.
            scale: What `scale` returned, in a shape that fits.

        Returns:
            Numbers in float32.
        """
        code = code.astype(jnp.int32)
        scale = scale * (np.float32(1.0) / _LARGEST) if self.half else scale
        sign = (code & np.int32(0x80)) << np.int32(24)
        magnitude = (self._value(code & np.int32(0x7F)) - self._base) * scale
        return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.int32) | sign, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Variance(_Minifloat):
    """Non-negative numbers as the bits of an int8.

    Attributes:
        half: Whether scales are float16, which has little range: then they are those of the roots of a variance.

    >>> x = jnp.array([0.0, 1e-4, 0.25, 1.0])
    >>> codec = Variance()
    >>> top = codec.top(x, 0)
    >>> codec.encode(x, top)
    Array([  0,  52, -65,  -1], dtype=int8)
    >>> [f"{y:.3g}" for y in codec.decode(codec.encode(x, top), codec.scale(top))]
    ['1.86e-08', '9.92e-05', '0.25', '1']
    """

    dtype = jnp.dtype(jnp.int8)
    _codes, _pieces = 255, ((4, 32), (10, 8), (12, 4))

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the reciprocal root of the largest.

        Args:
            x: Numbers in groups.
            axis: The axis along which a group lies.

        Returns:
            One number for each group.
        """
        return _top(x, axis)

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored. Zero if it is NaN, so that the group starts over.

        If it is infinite, finite entries have the smallest code of the largest scale.

        Args:
            top: What `top` returned.

        Returns:
            The scale of each group, for `decode`.
        """
        scale = self._scale(jnp.maximum(top, _ROOT))
        return np.float32(4.0) * jnp.sqrt(scale) if self.half else scale

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        """Round numbers to codes.

        Args:
            x: Numbers in groups.
            top: What `top` returned, in a shape that fits.
            dither: What to add before rounding down; None rounds to nearest.

        Returns:
            Codes.
        """
        code = self._rounded(jnp.maximum(self._scaled(x, top), self._base), dither)
        return lax.bitcast_convert_type(code.astype(jnp.uint8), self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        """Turn codes into numbers.

        Args:
            code: What `encode` returned.
            scale: What `scale` returned, in a shape that fits.

        Returns:
            Numbers in float32.
        """
        code = lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.int32)
        value = self._value(code)
        return value * (np.float32(1.0) / _LARGEST) * scale * scale if self.half else value * scale


def _bits(x: float | np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def _top(x: jax.Array, axis: int) -> jax.Array:
    return lax.rsqrt(lax.reduce(x, np.float32(_SMALLEST_TOP), lax.max, (axis % x.ndim,)))


Codec = Momentum | Variance | PublishedMomentum | PublishedVariance
