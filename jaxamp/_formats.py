"""Number formats: how a float value is represented, which formats are low, and how to get from one to another.

"Low" is a property of a value. Only `Formats.of` derives it from a dtype; everything else asks the format.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._jaxpr import bind_primitive


class Format(NamedTuple):
    """How a float value is represented."""

    dtype: np.dtype  # of the array that holds it
    low: bool = False  # whether it has been rounded to the precision that `amp` computes in
    label: str = ""  # of a format that the dtype does not name, such as an emulated one

    @property
    def name(self) -> str:
        return self.label or self.dtype.name


class Formats:
    """The formats of one call of `amp`: that of a compute dtype, and those that programs are written in."""

    def __init__(self, compute_dtype: np.dtype):
        self.low = Format(compute_dtype, low=True)
        self.narrows = compute_dtype.itemsize < 4  # else nothing is low
        self.is_narrow = bool(jnp.finfo(compute_dtype).maxexp < 64)  # whether its range is far smaller than float32's
        self._known: dict[np.dtype, Format] = {compute_dtype: self.low}

    @property
    def compute_dtype(self) -> np.dtype:
        return self.low.dtype

    def of(self, dtype: np.dtype | None) -> Format | None:
        """The format of an array of floats of this dtype; None for None."""
        if dtype is None:
            return None
        found = self._known.get(dtype)
        if found is None:
            found = self._known[dtype] = Format(dtype)
        return found

    def of_aval(self, aval: Any) -> Format | None:
        """The format that a value has as it was written; None if it is not an array of floats."""
        return self.of(float_dtype(aval))

    def may_lower(self, atom: Any) -> bool:
        """Whether the values of a variable or literal are ours to round."""
        return may_lower(float_dtype(atom.aval), self.low.dtype)


@functools.cache
def is_float_dtype(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def is_float(x: Any) -> bool:
    """Whether something is an array of floats, or a NumPy float."""
    return hasattr(x, "dtype") and is_float_dtype(x.dtype)


def float_dtype(aval: Any) -> np.dtype | None:
    """The dtype of an array of floats; None for integers, complex numbers, keys, references, tokens."""
    return aval.dtype if isinstance(aval, jax.core.ShapedArray) and is_float_dtype(aval.dtype) else None


def is_complex(aval: Any) -> bool:
    return _is_complex_dtype(getattr(aval, "dtype", None))


@functools.cache
def _is_complex_dtype(dtype: Any) -> bool:
    return dtype is not None and bool(jnp.issubdtype(dtype, jnp.complexfloating))


def is_integer(aval: Any) -> bool:
    """Integers and bools, which a matmul with floats takes as floats."""
    return isinstance(aval, jax.core.ShapedArray) and (
        aval.dtype == np.bool_ or bool(jnp.issubdtype(aval.dtype, jnp.integer))
    )


def is_wide_integer(aval: Any) -> bool:
    """Integers that can count further than a low float can: not bools, not 8 bits."""
    return is_integer(aval) and aval.dtype.itemsize > 1


def may_lower(dtype: np.dtype | None, compute_dtype: np.dtype) -> bool:
    """Whether values of this dtype are ours to round: wider than the compute dtype, and not float64."""
    return dtype is not None and compute_dtype.itemsize < dtype.itemsize <= 4


def cast(x: Any, dtype: np.dtype | None) -> Any:
    """`x` in `dtype` if it is an array of floats, else `x` as it is. Constants are cast without an equation."""
    if dtype is None or not is_float(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.Array):
        return bind_primitive(lax.convert_element_type_p, x, new_dtype=dtype, weak_type=False, sharding=None)
    return np.asarray(x).astype(dtype)


def saturate(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`, finite where it was finite. `find_overflow` recognises it by the `clamp`."""
    largest = np.asarray(jnp.finfo(dtype).max, x.dtype)
    return lax.convert_element_type(lax.select(lax.is_finite(x), lax.clamp(-largest, x, largest), x), dtype)


def cast_constant(x: Any, dtype: np.dtype) -> Any:
    """A constant in `dtype`, finite if it is finite, without an equation."""
    x = np.asarray(x)
    if not is_float_dtype(x.dtype):
        return x
    largest = float(jnp.finfo(dtype).max)
    return np.where(np.isfinite(x), np.clip(x, -largest, largest), x).astype(dtype)
