"""Moments in one byte: how a group of numbers is written and read, given its scale.

The law, with `s` the largest of its group and both formats of the scale, where these hold it:

    |decode(encode(m)) - m| <= s / 100             momentum, s = max |m|
    |sqrt(decode(encode(v))) - sqrt(v)| <= s / 250   variance, s = max sqrt(v)

Momentum is companded by a softsign, `127 * 2n / (1 + |n|)` with `n = m / s`, so that small entries keep more digits
than large ones. Of the variance the square root is written, `255 * sqrt(v) / s`. An entry of it below `s / 510` would
be written as zero while its momentum is not, and the next step would divide by epsilon: with gradients that span three
decades in a group, steps of 250 times the learning rate were measured. So a variance that is not zero is written as one
at least: its steps are too short then, never too long. `floor=False` is the published format.

A step is bound by instructions on GPUs, not by memory, and the forms here take few: one reciprocal for a group of
variances, and integers read from the bits of a sum in place of a conversion, which checks for what does not fit.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

ROOT_TINY, TINY = 2.0**-63, 2.0**-126  # where maxima begin, so that a group of zeros divides by no zero


def round_to(x: jax.Array, dtype: jnp.dtype) -> jax.Array:
    """The nearest integer, ties to even, in a dtype that holds it.

    Next to 1.5 * 2**23 a float32 has no room for fractions, and its last bits count; of what is no number, they may be
    anything. The maximum changes nothing that fits: it is an integer operation between the sum and its last byte.
    Without one, ptxas (12.9 and 13.0, not 13.4) takes that byte for the sum converted to an integer, which is 255,
    always.
    """
    bits = lax.bitcast_convert_type(x + np.float32(1.5 * 2**23), jnp.int32)
    return jnp.maximum(bits, np.int32(0x4B400000 + jnp.iinfo(dtype).min)).astype(dtype)


@dataclasses.dataclass(frozen=True)
class Momentum:
    """Signed numbers as int8.

    >>> x = jnp.array([-0.5, 0.0, 0.01, 1.0])
    >>> top = MOMENTUM.top(x, 0)
    >>> MOMENTUM.encode(x, top)
    Array([-85,   0,   3, 127], dtype=int8)
    >>> MOMENTUM.decode(MOMENTUM.encode(x, top), top).round(3)
    Array([-0.503,  0.   ,  0.012,  1.   ], dtype=float32)
    """

    dtype = jnp.dtype(jnp.int8)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """What `encode` takes of each group: the largest magnitude."""
        return lax.reduce(jnp.abs(x), np.float32(ROOT_TINY), lax.max, (axis % x.ndim,))

    def encode(self, x: jax.Array, top: jax.Array) -> jax.Array:
        return round_to(254.0 * x / (top + jnp.abs(x)), self.dtype)

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored: none where it is not finite, so that the group starts anew."""
        return jnp.where(jnp.isfinite(top), top, 0.0)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        y = code.astype(jnp.float32)
        return y * scale / (254.0 - jnp.abs(y))


@dataclasses.dataclass(frozen=True)
class Variance:
    """Numbers that are not negative as the uint8 of their square root; with `floor`, zero is for zeros alone.

    >>> x = jnp.array([0.0, 1e-9, 0.25, 1.0])
    >>> Variance().encode(x, Variance().top(x, 0)), Variance(floor=False).encode(x, Variance().top(x, 0))
    (Array([  0,   1, 128, 255], dtype=uint8), Array([  0,   0, 128, 255], dtype=uint8))
    """

    floor: bool = True
    dtype = jnp.dtype(jnp.uint8)

    def top(self, x: jax.Array, axis: int) -> jax.Array:
        """What `encode` takes of each group: the reciprocal of the largest root."""
        return lax.rsqrt(lax.reduce(x, np.float32(TINY), lax.max, (axis % x.ndim,)))

    def scale(self, top: jax.Array) -> jax.Array:
        """The scale of each group, before it is stored: the largest root, and none of what is no number."""
        return jnp.where(jnp.isnan(top), 0.0, 1.0 / top)

    def encode(self, x: jax.Array, top: jax.Array) -> jax.Array:
        y = 255.0 * jnp.sqrt(x) * top
        if self.floor:
            y = jnp.where(x > 0.0, jnp.maximum(y, 1.0), y)
        return round_to(y, self.dtype)

    def decode(self, code: jax.Array, scale: jax.Array) -> jax.Array:
        root = code.astype(jnp.float32) * scale
        return root * (root * np.float32(1 / 255**2))  # 1 / 255 by the scale would be a kernel of its own


Codec = Momentum | Variance
MOMENTUM, VARIANCE = Momentum(), Variance()
