"""Check what the loss scales of MPX and JMP are given: numbers, and conditions."""

import math
from typing import Any

import jax
import numpy as np
from jax import lax

from .._tree import check_bool


class ConditionError(TypeError, AssertionError):
    """A condition that is not one bool. MPX and JMP raise an AssertionError, which programs may catch."""


def check_condition(name: str, pred: Any, instead: str) -> None:
    """`check_bool` with an error that is an AssertionError too."""
    check_bool(name, pred, instead, "boolean scalar", ConditionError)


def checked_scalar(
    name: str, field: str, value: Any, dtype: Any, example: str, *, positive: bool = True, finite: bool = True
) -> Any:
    """Check a number and return it as a scalar array of `dtype`.

    A JAX array stays one; any other number becomes NumPy's, which starts no backend.

    Args:
        name: The class or function to name in errors.
        field: The argument's name.
        value: The number, possibly traced.
        dtype: The dtype of the result.
        example: A value to suggest in errors.
        positive: Whether zero is an error.
        finite: Whether infinity is an error.
    """
    if isinstance(value, bool) or not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        raise TypeError(
            f"{name} got {field}={value!r}, of type {type(value).__name__}; expected a number. Write {field}={example}."
        )
    if np.shape(value):
        raise TypeError(
            f"{name} got {field} of shape {np.shape(value)}; expected a scalar. Write {field}={example}; for one per "
            f"example, make the {name} inside vmap."
        )
    if not isinstance(value, jax.core.Tracer):
        number = float(value)
        if not number >= 0 or (positive and not number) or (finite and math.isinf(number)):
            expected = ("positive" if positive else "non-negative") + (", finite" if finite else "")
            raise ValueError(f"{name} got {field}={number:g}; expected a {expected} number. Write {field}={example}.")
    return lax.convert_element_type(value, dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)
