"""The dither: numbers by which codes are rounded, so that on average nothing is lost.

A second moment with b2 = 0.999 moves by a thousandth of its distance per step, far less than half a code. Rounded to
nearest it would never move. Rounded up with the probability of the part that is dropped, it moves now and then by a
whole code, and the mean of the stored moment is right.

The law: the dither depends on the number of the step and on the position in the group, and on nothing else. So it is
the same on every device and under every sharding, and a run can be repeated.

    dither(step, j) = hash(step) + j * golden ratio    modulo one

Positions differ by multiples of the golden ratio, which fill the unit interval evenly, so the mean error of a group is
small in every step. Steps are hashed: multiples of a fixed number would bring rounding up and rounding down in a fixed
order, and stored moments were up to 4 % off. Both moments of an entry have the same dither, so that their errors have
the same sign and partly cancel in a step, which divides one by the root of the other.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._groups import Groups

DITHER_BITS = 21  # the bits of a float32 that the coarsest codes drop: they have two bits of mantissa
GOLDEN = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio


def dither(count: Any, groups: Groups) -> jax.Array:
    """Integers of `DITHER_BITS` bits for step `count`, one for each position, that broadcast against the view."""
    positions = lax.iota(jnp.uint32, groups.size)
    numbers = (hashed(count) + positions * GOLDEN) >> np.uint32(32 - DITHER_BITS)
    shape = [1] * len(groups.view_shape)
    shape[groups.view_axis] = groups.size
    return lax.bitcast_convert_type(numbers, jnp.int32).reshape(shape)


def hashed(count: Any) -> jax.Array:
    """A well mixed 32-bit integer for the number of a step."""
    x = lax.convert_element_type(count, jnp.uint32)
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))
