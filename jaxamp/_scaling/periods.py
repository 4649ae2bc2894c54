"""Loss scales that count in periods, as MPX and JMP do, in terms of `DynamicScalerState`.

    period, counter = patience, max(0, count - 1)

They count from zero to the last step of a period, and raise the scale there. We count that step too, so that a period
of one is a patience of one.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .state import DynamicScalerState


def as_state(scale: Any, counter: Any, factor: Any, period: Any, minimum: Any, maximum: float) -> DynamicScalerState:
    """The state that moves as a loss scale with these fields does."""
    return DynamicScalerState(
        patience=period,
        adjust_factor=factor,
        scaler=scale,
        count=counter + 1,
        min_scaler=minimum,
        max_scaler=maximum,
    )


def counter_of(state: DynamicScalerState) -> jax.Array:
    """The counter of the loss scale that a state was made from, after a step."""
    return jnp.maximum(state.count - 1, 0)


def as_scalar(name: str, field: str, value: Any, dtype: Any, example: str, *, positive: bool = True) -> Any:
    """A checked number as a scalar array of `dtype`. A number that is no JAX array starts no backend."""
    if isinstance(value, bool) or not isinstance(value, int | float | np.generic | np.ndarray | jax.Array):
        raise TypeError(
            f"{name} got {field}={value!r}, of type {type(value).__name__}; expected a number. Write {field}={example}."
        )
    if np.shape(value):
        raise TypeError(
            f"{name} got {field} of shape {np.shape(value)}; expected a scalar. Write {field}={example}, and make it "
            "inside of vmap if there is one for each example."
        )
    if not isinstance(value, jax.core.Tracer):
        number = float(value)
        if not 0 <= number < float("inf") or (positive and not number):
            raise ValueError(
                f"{name} got {field}={number:g}; expected a {'positive' if positive else 'non-negative'}, finite "
                f"number. Write {field}={example}."
            )
    return lax.convert_element_type(value, dtype) if isinstance(value, jax.Array) else np.asarray(value, dtype)
