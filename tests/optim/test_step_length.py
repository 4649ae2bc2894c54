"""Compressed moments follow those of float32 Adam: step lengths after a change of the gradient, and huge gradients."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, raises
from hypothesis import given, settings

from jaxamp import flashoptim, optim
from jaxamp.optim import Storage

NEAREST = Storage(codes="published", dither=False)
LARGEST = float(np.finfo(np.float32).max)


def step_lengths(tx, before, after, *, noise=0.0, first=2000, then=6000, window=50, shape=(64,), dtype=F32, size=1.0):
    """The mean length of the steps of every second entry, over windows that end 1/6, 1/2 and 1 of the way.

    The gradient of the others is `size`. That of these is `before` times it in the first steps, and then `after`.
    """
    large = np.broadcast_to(np.arange(shape[-1]) % 2 == 0, shape)
    params = jnp.zeros(shape, dtype)
    flash = isinstance(tx, optim.FlashOptimizer)

    def step(carry, i):
        params, state = carry
        mean = size * jnp.where(large, 1.0, jnp.where(i < first, before, after))
        grads = mean * (1 + noise * jax.random.normal(jax.random.fold_in(jax.random.key(0), i), shape))
        weights = optim.float32_weights(params, state) if flash else params
        if flash:
            new, state = tx.step(params, state, grads)
            moved = optim.float32_weights(new, state) - weights
        else:
            moved, state = tx.update(grads, state, params)
            new = params + moved
        return (new, state), jnp.where(large, 0.0, jnp.abs(moved)).sum() / (~large).sum()

    run = jax.jit(lambda carry: jax.lax.scan(step, carry, jnp.arange(first + then))[1])
    lengths = np.asarray(run((params, tx.init(params))))
    ends = [first + then // 6, first + then // 2, first + then]
    return np.array([lengths[end - window : end].mean() for end in ends])


ROWS = [(0.05, 0.2, 0.0), (0.05, 0.3, 0.0), (0.2, 0.05, 0.0), (0.01, 0.05, 0.5)]


@pytest.mark.parametrize(("before", "after", "noise"), ROWS)
def test_steps_follow_adam_after_a_change_of_the_gradient(before, after, noise):
    expected = step_lengths(optax.adam(1e-3), before, after, noise=noise)
    for tx in (optim.flash_adam(1e-3), optim.compress_state(optax.adam(1e-3))):
        got = step_lengths(tx, before, after, noise=noise)
        assert np.abs(got / expected - 1)[-1] < 0.05
        assert np.abs(got / expected - 1).max() < 0.08  # on the way
    stuck = step_lengths(optim.flash_adam(1e-3, storage=NEAREST), before, after, noise=noise)
    assert abs(stuck[-1] / expected[-1] - 1) > 0.5  # so that this test is known to see it
