"""How the scale of a group is stored: two bytes, float32 in and out.

The law: decoding what was encoded is within one unit of the stored mantissa, or within `tiny` of a value below it.

`WIDE` has 7 exponent bits and 9 of mantissa, and no sign: 2**-63 to 2**65, which is the square root of every normal
float32. float16 covers 12 decades of these 38, and Adam with gradients of 3e-6 takes steps that are 2.3 times too long.

Rounding to nearest is not enough. A second moment with b2 = 0.999 grows by less than a unit per step long before it has
arrived, and rounding to nearest then returns it to where it was: after 2000 steps of a constant gradient, steps are 25
% too long with 10 bits of mantissa and 57 % with 9. So `WIDE` rounds up in as many steps as the dropped bits ask for.
The steps are told apart by their number: multiples of the golden ratio, modulo one, fill the unit interval evenly, and
the errors of neighbouring steps cancel. Steps then are within 0.6 %, from 1e-8 to 1e4, at any number of steps.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_DROPPED = 14  # bits of a float32's mantissa
_BELOW = 64 << 9  # exponents below 2**-63, in units of the code
_GOLDEN = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio


@dataclasses.dataclass(frozen=True)
class WideScale:
    """7 bits of exponent, 9 of mantissa, no sign; rounded by the number of the step.

    >>> scales = [float(WIDE.decode(WIDE.encode(jnp.float32(3e-10), count))) for count in range(100)]
    >>> [f"{x:.4g}" for x in scales[:6]], f"{sum(scales) / 100:.5g}"
    (['2.997e-10', '3.001e-10', '2.997e-10', '3.001e-10', '3.001e-10', '2.997e-10'], '3e-10')
    """

    dtype = jnp.dtype(jnp.uint16)
    tiny = 2.0**-63  # what zero decodes to: the codes of such a group are zero, or it makes no difference

    def encode(self, x: jax.Array, count: Any = None) -> jax.Array:
        """`x`, not negative, as two bytes: in step `count`, or without one rounded to nearest."""
        bits = lax.bitcast_convert_type(x, jnp.uint32)
        if count is None:
            up = jnp.full_like(bits, 1 << (_DROPPED - 1))
        else:
            up = lax.convert_element_type(count, jnp.uint32) * _GOLDEN >> np.uint32(32 - _DROPPED)
        code = jnp.maximum((bits + up) >> np.uint32(_DROPPED), np.uint32(_BELOW)) - np.uint32(_BELOW)
        return jnp.minimum(code, np.uint32(0xFFFF)).astype(jnp.uint16)

    def decode(self, code: jax.Array) -> jax.Array:
        """Two integer operations: it is done for each element, not for each group, where XLA fuses it."""
        return lax.bitcast_convert_type(
            (code.astype(jnp.uint32) + np.uint32(_BELOW)) << np.uint32(_DROPPED), jnp.float32
        )


@dataclasses.dataclass(frozen=True)
class HalfScale:
    """float16, rounded to nearest: the published format. Zero below 3e-8, infinite above 65504."""

    dtype = jnp.dtype(jnp.float16)
    tiny = 2.0**-25

    def encode(self, x: jax.Array, count: Any = None) -> jax.Array:
        # The barrier: XLA drops a cast to float16 and back, where two steps are compiled as one.
        return lax.optimization_barrier(x.astype(jnp.float16))

    def decode(self, code: jax.Array) -> jax.Array:
        return code.astype(jnp.float32)


WIDE, HALF = WideScale(), HalfScale()
FORMATS: dict[str, WideScale | HalfScale] = {"wide": WIDE, "float16": HALF}


def format_of(scales: Any) -> WideScale | HalfScale:
    """The format that stored scales have, by their dtype."""
    return HALF if scales.dtype == jnp.float16 else WIDE
