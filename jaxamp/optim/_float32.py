"""Weights and moments in float32, and back."""

from typing import Any

import jax.numpy as jnp

from .._tree import is_inexact
from ._paths import flatten
from ._weights import join


def float32_weights(params: Any, state: Any) -> Any:
    """The weights that the optimizer sees: parameters with their corrections, in float32.

    Leaves that are no floats come back as they are.
    """
    _, leaves, structure = flatten(params)
    corrections = structure.flatten_up_to(state.correction)
    return structure.unflatten(
        [join(jnp.asarray(p), c) if is_inexact(p) else p for p, c in zip(leaves, corrections, strict=True)]
    )
