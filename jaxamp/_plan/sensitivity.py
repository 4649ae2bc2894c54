"""How sensitive a float value is to rounding: the lattice that operations are classified on.

    FREE < LOW < PROTECTED < OUT_OF_RANGE < POSITION

- `FREE`: an input, a parameter, a constant. It may be rounded where a low operation asks for it.
- `LOW`: it has been rounded to the compute dtype.
- `PROTECTED`: the result of a float32 rule. No element-wise operation may round it; a matmul may.
- `OUT_OF_RANGE`: protected, and it may hold finite numbers beyond the compute dtype's range. A matmul clamps it.
- `POSITION`: made from integer positions alone. Not even a matmul may round it.

Wide integers have a sensitivity too, `FREE` or `POSITION`, because they may become floats: an argument counts as a
position, a small literal or a cast bool does not.
"""

import enum
import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._compat import Literal
from .._formats import Format, is_float_dtype, is_wide_integer


class Sensitivity(enum.IntEnum):
    FREE = 0
    LOW = 1
    PROTECTED = 2
    OUT_OF_RANGE = 3
    POSITION = 4


FREE, LOW, PROTECTED, OUT_OF_RANGE, POSITION = Sensitivity


class Value(NamedTuple):
    """What the planner knows of a variable: its sensitivity, and the format it is held in (None if not a float)."""

    sensitivity: Sensitivity
    format: Format | None
    given: bool = False  # an argument of the user's function, which stays in memory in any case

    @property
    def dtype(self) -> np.dtype | None:
        return None if self.format is None else self.format.dtype

    @property
    def is_low(self) -> bool:
        """Whether it is held in a low format."""
        return self.format is not None and self.format.low


def is_parameter(value: Value, atom: Any) -> bool:
    """Whether it may be differentiated in float32: an input or a parameter, held as it came."""
    return value.sensitivity is FREE and value.dtype == np.float32 and not isinstance(atom, Literal)


def combine(found: Iterable[Sensitivity]) -> Sensitivity:
    """The sensitivity of a result of such operands: the highest, but a position that meets data is no longer one."""
    seen = set(found)
    if POSITION in seen and not seen <= {FREE, POSITION}:
        seen = (seen - {POSITION}) | {PROTECTED}
    return max(seen, default=FREE)


def sensitivity_of_argument(aval: Any) -> Sensitivity:
    """The sensitivity of a function's argument."""
    return POSITION if is_wide_integer(aval) else FREE


_IN_BLOCKS: Any = {"flags": ["external_loop", "buffered"], "buffersize": 2**16}


@functools.cache
def _limits(dtype: np.dtype) -> tuple[float, float]:
    info = jnp.finfo(dtype)
    return float(info.smallest_normal), float(info.max)


def sensitivity_of_constant(value: Any, compute_dtype: np.dtype) -> Sensitivity:
    """The sensitivity of a number, or an array of them, that is known while tracing: can the compute dtype hold it?"""
    value = np.abs(value) if np.iscomplexobj(value) else np.asarray(value)
    if not is_float_dtype(value.dtype):
        counts_to = 2 ** (jnp.finfo(compute_dtype).nmant + 1)
        return FREE if value.dtype.itemsize == 1 or _largest(value) <= counts_to else POSITION
    smallest, largest = _limits(compute_dtype)
    if _largest(value) > largest:
        return OUT_OF_RANGE
    # One small number is an epsilon; among the entries of an array they are everywhere.
    return PROTECTED if value.ndim == 0 and 0.0 < abs(float(value)) < smallest else FREE


def _largest(value: np.ndarray) -> float:
    """The largest finite magnitude, or zero. A closed-over array may be large: nothing of its size is allocated."""
    if not value.size:
        return 0.0
    ends = float(value.min()), float(value.max())
    if np.isfinite(ends).all():
        return max(-ends[0], ends[1])
    return max(float(np.abs(x).max(initial=0, where=np.isfinite(x))) for x in np.nditer(value, **_IN_BLOCKS))
