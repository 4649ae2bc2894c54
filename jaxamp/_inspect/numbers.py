"""What is asked of the entries of an array. NumPy answers it where the array is in the memory of this process: to ask
XLA, each question would be compiled for each shape."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._formats import is_float


def near(x: Any) -> Any:
    """An array as NumPy's, without a copy, if it is on one CPU; else as it is."""
    if isinstance(x, jax.Array) and is_float(x):
        devices: list[Any] = list(x.sharding.device_set)
        return np.asarray(x) if len(devices) == 1 and devices[0].platform == "cpu" else x
    return x


def is_near(x: Any) -> bool:
    return not isinstance(x, jax.Array)


def all_finite(x: Any) -> bool:
    x = near(x)
    if not is_near(x):
        return bool(_all_finite(x))
    if np.asarray(x).dtype == np.float16:  # NumPy is slow at these
        return bool(((np.asarray(x).view(np.uint16) & _EXPONENT) != _EXPONENT).all())
    return bool(np.isfinite(x).all())


def zeros_in(x: Any) -> int:
    """How many entries are zero."""
    x = near(x)
    if not is_near(x):
        return int(_zeros_in(x))
    if np.asarray(x).dtype == np.float16:
        x = np.asarray(x).view(np.uint16) & _ALL_BUT_SIGN
    return np.size(x) - int(np.count_nonzero(x))


def has_nan(x: Any) -> bool:
    return is_float(x) and bool(np.isnan(np.asarray(x, np.float32)).any())


def largest(x: Any) -> float:
    """The largest finite magnitude; 0 if there is none."""
    x = near(x)
    if not is_near(x):
        return float(_largest(x))
    x = np.abs(np.asarray(x, np.float32))
    return float(np.max(x, initial=0, where=np.isfinite(x)))


_EXPONENT, _ALL_BUT_SIGN = np.uint16(0x7C00), np.uint16(0x7FFF)  # bits of a float16


@jax.jit
def _all_finite(x: Any) -> jax.Array:
    return jnp.isfinite(x).all()


@jax.jit
def _zeros_in(x: Any) -> jax.Array:
    return jnp.sum(x == 0)


@jax.jit
def _largest(x: Any) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)
