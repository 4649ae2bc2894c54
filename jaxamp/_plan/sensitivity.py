"""What a float value in the program may suffer: the lattice that the planner computes on.

    FREE < LOW < EXACT < WIDE < POSITION

- `FREE`: an input, a parameter, a constant. It may be rounded where a low operation asks for it.
- `LOW`: it has been rounded to the compute dtype.
- `EXACT`: the result of a float32 rule. No element-wise operation may round it; a matmul may.
- `WIDE`: exact, and it may hold finite numbers beyond the compute dtype's range. A matmul clamps it.
- `POSITION`: made from integer positions alone. Not even a matmul may round it.

Wide integers have a standing too, `FREE` or `POSITION`, for they may become floats: an argument counts as a position, a
small literal or a cast bool does not.
"""

import enum
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np


class Standing(enum.IntEnum):
    FREE = 0
    LOW = 1
    EXACT = 2
    WIDE = 3
    POSITION = 4


FREE, LOW, EXACT, WIDE, POSITION = Standing


class Value(NamedTuple):
    """What the planner knows of a variable: its standing, and the dtype it is held in (None when not a float)."""

    standing: Standing
    dtype: np.dtype | None


def combine(standings: Iterable[Standing]) -> Standing:
    """The standing of what is made from operands of these: the highest, and a position met by data is one no more."""
    seen = set(standings)
    if POSITION in seen and not seen <= {FREE, POSITION}:
        seen = (seen - {POSITION}) | {EXACT}
    return max(seen, default=FREE)


@functools.cache
def _is_float(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def float_dtype(aval: Any) -> np.dtype | None:
    """The dtype of an array of floats; None for integers, complex numbers, keys, references, tokens."""
    return aval.dtype if isinstance(aval, jax.core.ShapedArray) and _is_float(aval.dtype) else None


def is_wide_integer(aval: Any) -> bool:
    """Integers that can count further than a low float can: not bools, not 8 bits."""
    return (
        isinstance(aval, jax.core.ShapedArray)
        and bool(jnp.issubdtype(aval.dtype, jnp.integer))
        and aval.dtype.itemsize > 1
    )


def standing_of_argument(aval: Any) -> Standing:
    """The standing of what a function is given."""
    return POSITION if is_wide_integer(aval) else FREE


def may_lower(dtype: np.dtype | None, compute_dtype: np.dtype) -> bool:
    """Whether values of this dtype are ours to round: wider than the compute dtype, and not float64."""
    return dtype is not None and compute_dtype.itemsize < dtype.itemsize <= 4


@functools.cache
def _limits(dtype: np.dtype) -> tuple[float, float]:
    info = jnp.finfo(dtype)
    return float(info.smallest_normal), float(info.max)


def constant_standing(value: Any, compute_dtype: np.dtype) -> Standing:
    """The standing of a number, or an array of them, that is known while tracing: can the compute dtype hold it?"""
    value = np.asarray(value)
    magnitude = np.abs(value)
    if not _is_float(value.dtype):
        counts_to = 2 ** (jnp.finfo(compute_dtype).nmant + 1)
        return FREE if value.dtype.itemsize == 1 or magnitude.max(initial=0) <= counts_to else POSITION
    magnitude = magnitude[np.isfinite(magnitude) & (magnitude > 0)]
    if not magnitude.size:
        return FREE
    smallest, largest = _limits(compute_dtype)
    if float(magnitude.max()) > largest:
        return WIDE
    # One small number is an epsilon; among the entries of an array they are everywhere.
    return EXACT if value.ndim == 0 and float(magnitude.min()) < smallest else FREE
