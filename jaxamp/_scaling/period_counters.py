"""The loss scales of MPX and JMP, which count steps within a period, as a `DynamicScalerState`.

    period, counter = patience, max(0, count - 1)

MPX and JMP count from zero to the last step of a period, and raise the scale there. `DynamicScalerState` counts that
step too, so a period of one is a patience of one.
"""

from typing import Any

import jax
import jax.numpy as jnp

from .state import DynamicScalerState


def state_from_counter(
    scale: Any, counter: Any, factor: Any, period: Any, minimum: Any, maximum: float
) -> DynamicScalerState:
    """The state that moves like a loss scale with these fields."""
    return DynamicScalerState(
        patience=period,
        adjust_factor=factor,
        scaler=scale,
        count=counter + 1,
        min_scaler=minimum,
        max_scaler=maximum,
    )


def counter_from_state(state: DynamicScalerState) -> jax.Array:
    """The counter after a step of a state that `state_from_counter` made."""
    return jnp.maximum(state.count - 1, 0)
