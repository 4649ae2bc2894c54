"""Moments in one byte: small floating-point numbers, relative to the largest of their group.

The law, with `s` the largest entry of its group, for numbers `x` and scales within the range of their format:

                                              x > s / 8          below
    momentum  |decode(encode(x)) - x| <=      |x| / 16           |x| / 8 + s / 2**15
                                              x > s / 16         below
    variance  |decode(encode(x)) - x| <=      x / 32             x / 8 + s / 2**19

Half of that if rounded to nearest; with a dither, the mean of what is decoded is `x`. The largest of a group is exact.
A momentum of zero is stored as zero. The variance has no code for zero: a smaller one counts as the smallest that there
is. If it were stored as zero while its momentum is not, the next step would divide by epsilon; so steps are too short,
never too long.

Codes are cut from the bits of a float32. An entry `x` becomes `y = 16 * x / s`, and the code is the upper bits of `y`,
counted from those of a small number `base`: 8 codes from a power of two to the next, or two or four times as many above
the `knee`, where most entries are. Between `base` and 16 there are 127 or 255 codes. For momentum, `base` is added to
`y`, so that zero is a code like any other. The factor of 16 keeps both `16 / s` and `s / 16` normal numbers for every
`s` above 2**-122.

Fewer bits of mantissa in exchange for more range would be cheaper to compute, but second moments would be noisier: with
8 codes from a power of two to the next everywhere, steps were off by 10 %, and the loss of an MLP after 2,000 steps was
8 % below that of AdamW; so it is 3 %.

On GPUs a step is bound by instructions, not by memory: encoding and decoding take a few operations on integers, no
division and no root. The reciprocal root of `s` is the only function that XLA computes in the kernel that finds `s`; so
groups are encoded by its square.

Codes have the other sign than the published ones: momentum is uint8 and variance int8. So the dtype of a state tells
which codes it has.
"""

import dataclasses
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
_HALF = np.int32(1 << (DITHER_BITS - 1))  # half a code
_ROOT = np.float32(2.0**-64)  # the reciprocal root of the largest float32


@dataclasses.dataclass(frozen=True)
class _Minifloat:
    """What both codes have in common.

    Attributes:
        half: Whether scales are float16, which has little range: then they are those of the roots of a variance.
    """

    half: bool = False

    _codes: ClassVar[int]  # the largest code
    _knee: ClassVar[float]  # the `y` from which on there are more codes
    _finer: ClassVar[int]  # how many times as many there are

    @property
    def _bits_of_knee(self) -> int:
        """Counted from those of `base`, of which each 2**DITHER_BITS are a code."""
        return (self._codes << DITHER_BITS) - self._finer * (_bits(_LARGEST) - _bits(self._knee))

    @property
    def _bits_of_base(self) -> int:
        return _bits(self._knee) - self._bits_of_knee

    @property
    def _base(self) -> np.float32:
        return np.uint32(self._bits_of_base).view(np.float32)

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
        bits = lax.bitcast_convert_type(y, jnp.int32) - np.int32(self._bits_of_base)
        fixed = jnp.maximum(bits, bits * np.int32(self._finer) - np.int32((self._finer - 1) * self._bits_of_knee))
        return (fixed + (_HALF if dither is None else dither)) >> np.int32(DITHER_BITS)

    def _value(self, code: jax.Array) -> jax.Array:
        """The `y` of a code."""
        below = code * np.int32(1 << DITHER_BITS) + np.int32(self._bits_of_base)
        above = np.int32(_bits(self._knee) - self._bits_of_knee // self._finer)
        bits = jnp.minimum(below, code * np.int32((1 << DITHER_BITS) // self._finer) + above)
        return lax.bitcast_convert_type(bits, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Momentum(_Minifloat):
    """Signed numbers as uint8, the first bit of which is the sign.

    >>> x = jnp.array([-0.5, 0.0, 0.01, 1.0])
    >>> codec = Momentum()
    >>> top = codec.top(x, 0)
    >>> codec.encode(x, top)
    Array([239,   0,  49, 127], dtype=uint8)
    >>> [f"{y:.3g}" for y in codec.decode(codec.encode(x, top), codec.scale(top))]
    ['-0.5', '0', '0.0096', '1']
    """

    dtype = jnp.dtype(jnp.uint8)
    _codes, _knee, _finer = 127, 2.0, 2

    @property
    def _span(self) -> float:
        return (1 - 2.0**-21) * float(1 - self._base / _LARGEST)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the reciprocal root of the largest magnitude."""
        return _top(jnp.abs(x), axis)

    def is_finite(self, top: jax.Array) -> jax.Array:
        """Whether all entries of each group are finite."""
        return top > 0.0

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored. Zero if it is not finite, so that the group starts over."""
        return self._scale(top) * (_LARGEST if self.half else np.float32(1.0))

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        sign = (lax.bitcast_convert_type(x, jnp.int32) >> np.int32(24)) & np.int32(0x80)
        return (self._rounded(self._scaled(jnp.abs(x), top) + self._base, dither) | sign).astype(self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        code = code.astype(jnp.int32)
        scale = scale * (np.float32(1.0) / _LARGEST) if self.half else scale
        sign = (code & np.int32(0x80)) << np.int32(24)
        magnitude = (self._value(code & np.int32(0x7F)) - self._base) * scale
        return lax.bitcast_convert_type(lax.bitcast_convert_type(magnitude, jnp.int32) | sign, jnp.float32)


@dataclasses.dataclass(frozen=True)
class Variance(_Minifloat):
    """Non-negative numbers as the bits of an int8.

    >>> x = jnp.array([0.0, 1e-4, 0.25, 1.0])
    >>> codec = Variance()
    >>> top = codec.top(x, 0)
    >>> codec.encode(x, top)
    Array([  0,  52, -65,  -1], dtype=int8)
    >>> [f"{y:.3g}" for y in codec.decode(codec.encode(x, top), codec.scale(top))]
    ['1.07e-06', '9.92e-05', '0.25', '1']
    """

    dtype = jnp.dtype(jnp.int8)
    _codes, _knee, _finer = 255, 1.0, 4

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """The argument of `encode` for each group: the reciprocal root of the largest."""
        return _top(x, axis)

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored. Zero if it is NaN, so that the group starts over.

        If it is infinite, finite entries have the smallest code of the largest scale.
        """
        scale = self._scale(jnp.maximum(top, _ROOT))
        return np.float32(4.0) * jnp.sqrt(scale) if self.half else scale

    def encode(self, x: jax.Array, top: jax.Array, dither: jax.Array | None = None) -> jax.Array:
        code = self._rounded(jnp.maximum(self._scaled(x, top), self._base), dither)
        return lax.bitcast_convert_type(code.astype(jnp.uint8), self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        code = lax.bitcast_convert_type(code, jnp.uint8).astype(jnp.int32)
        return self._value(code) * (scale * (scale * (np.float32(1.0) / _LARGEST)) if self.half else scale)


def _bits(x: float | np.float32) -> int:
    return int(np.float32(x).view(np.uint32))


def _top(x: jax.Array, axis: int) -> jax.Array:
    return lax.rsqrt(lax.reduce(x, np.float32(_SMALLEST_TOP), lax.max, (axis % x.ndim,)))


Codec = Momentum | Variance | PublishedMomentum | PublishedVariance
