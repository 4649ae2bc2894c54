"""One step of a dynamic loss scaler: evaluate, retry at smaller scales while that may help, adjust the state.

scale = state.scaler
repeat:
    (loss, aux), grads = value_and_grad(loss_fn, cotangent=scale)
    grads /= scale
    finite = all_finite(grads)                      # devices along axis_name agree
    stop if finite, or after redo_on_nan retries, or if the scale can't fall any further
    stop if the loss is not finite                  # it does not depend on the scale
    scale = lowered(scale)
if finite:
    state.scaler = scale
next_state = state.adjust(finite)                   # a skipped step lowers the scale once, not once per retry
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from .evaluation import Evaluation
from .retry import retry_until_finite
from .state import DynamicScalerState


def scaler_step(
    evaluate: Callable[[jax.Array], Evaluation], state: DynamicScalerState, redo_on_nan: int
) -> tuple[DynamicScalerState, Any]:
    """Evaluate at the state's scale, with up to `redo_on_nan` retries, and return the next state and the results."""
    state = state.as_arrays()
    if redo_on_nan:
        out, retries, scale = retry_until_finite(evaluate, state, redo_on_nan)
        state = state._replace(
            scaler=jnp.where(out.finite, scale, state.scaler),
            count=jnp.where(retries > 0, 0, state.count),
            total_resets=state.total_resets + retries,
            total_redos=state.total_redos + retries,
        )
    else:
        out = evaluate(state.scaler)
    state = state._replace(
        scaler=jnp.minimum(state.scaler, out.max_scale),
        underflow=jnp.where(out.finite, out.underflow, state.underflow),
    )
    state = state.adjust(out.finite)
    return state._replace(scaler=jnp.minimum(state.scaler, out.max_scale)), out.results
