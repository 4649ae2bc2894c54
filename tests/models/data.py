"""Random batches and losses that several libraries share."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax


def normal(seed: int, *shape: int) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def labels(seed: int, *shape: int, classes: int = 10) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).integers(0, classes, shape), jnp.int32)


def tokens(seed: int, *shape: int) -> jax.Array:
    return labels(seed, *shape, classes=256)


def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def without_state(loss: Any) -> Any:
    """`loss(params, batch)` for a model that has no state."""
    return lambda params, state, batch: (loss(params, batch), state)
