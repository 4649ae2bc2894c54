"""Random bits for stochastic rounding: from a JAX key, or from a count, which is cheaper.

The law: the bits depend on the key or the count, and on the position in the array, and on nothing else. So they are the
same on every device and under every sharding of `jit`, and a run can be repeated. Inside of `shard_map` positions are
those of the local part, and under `vmap` those in one row: there, fold the index of the part or row into the key.
"""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

_GOLDEN = np.uint32(0x9E3779B1)  # 2**32 over the golden ratio


def random_bits(key: Any, shape: tuple[int, ...]) -> jax.Array:
    """Integers of 32 random bits for each position."""
    dtype = getattr(key, "dtype", None)
    if dtype is not None and (jnp.issubdtype(dtype, jax.dtypes.prng_key) or (dtype == np.uint32 and np.ndim(key) == 1)):
        return jax.random.bits(key, shape, jnp.uint32)
    is_count = isinstance(key, int) or (dtype is not None and jnp.issubdtype(dtype, jnp.integer))
    if isinstance(key, bool) or not is_count or np.ndim(key) != 0:
        raise TypeError(
            f"Stochastic rounding needs random numbers, and key= is {_shown(key)}. "
            "Write key=jax.random.key(step), or key= as an integer that differs from call to call."
        )
    count = np.uint32(key % 2**32) if isinstance(key, int) else lax.convert_element_type(key, jnp.uint32)
    return _hashed(_positions(shape) * _GOLDEN + _hashed(jnp.asarray(count)))


def _positions(shape: tuple[int, ...]) -> jax.Array:
    """The number of each entry, in the order of rows."""
    found = jnp.zeros(shape, jnp.uint32)
    for axis in range(len(shape)):
        stride = np.uint32(math.prod(shape[axis + 1 :]) % 2**32)
        found = found + lax.broadcasted_iota(jnp.uint32, shape, axis) * stride
    return found


def _hashed(x: jax.Array) -> jax.Array:
    """Well mixed 32-bit integers, different ones for different ones (the last step of MurmurHash3)."""
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ (x >> np.uint32(shift))) * np.uint32(factor)
    return x ^ (x >> np.uint32(16))


def _shown(key: Any) -> str:
    return f"an array of {key.dtype}{list(key.shape)}" if hasattr(key, "dtype") else repr(key)
