"""What the tests of compressed optimizers share: trees, gradients, and the five optimizers beside Optax's.

Compiling is what takes time. So arrays are made and compared by NumPy, and tests that need any optimizer take `ADAMW`:
what is compiled for one of them serves the others.
"""

import jax
import numpy as np
import optax
import pytest

from jaxamp import optim

ADAMW = optim.flash_adamw(1e-2)

# Ours, and the one that it equals without the codecs.
PAIRS = {
    "adamw": (optim.flash_adamw, optax.adamw, {"b2": 0.99, "weight_decay": 0.1}),
    "adam": (optim.flash_adam, optax.adam, {"b1": 0.8, "b2": 0.99}),
    "sgd": (optim.flash_sgd, optax.sgd, {}),
    "momentum": (optim.flash_sgd, optax.sgd, {"momentum": 0.9}),
    "nesterov": (optim.flash_sgd, optax.sgd, {"momentum": 0.9, "nesterov": True}),
    "lion": (optim.flash_lion, optax.lion, {"weight_decay": 0.1}),
}


def tree(dtype, seed=0, shape=(4, 64)):
    """Groups along the last axis, and a tail."""
    rng = np.random.default_rng(seed)
    shapes = {"w": shape, "odd": (3, 17)}
    return {name: jax.device_put(rng.normal(size=shape).astype(dtype)) for name, shape in shapes.items()}


def wide(tree):
    """The tree in float32."""
    return jax.tree.map(lambda x: jax.device_put(np.asarray(x, np.float32)), tree)


def gradients(params, step, seed=1, noise=0.5):
    """Gradients with a direction of their own and noise around it."""
    fixed, rng = np.random.default_rng(seed), np.random.default_rng((seed, step))
    return jax.tree.map(
        lambda p: jax.device_put(np.float32(fixed.normal(size=p.shape) + noise * rng.normal(size=p.shape))), params
    )


def slowly(cases, quick):
    """The cases for `parametrize`, those that are not `quick` only where slow tests are asked for."""
    return [pytest.param(*case, marks=[pytest.mark.slow] * (case not in quick)) for case in cases]


def distance(a, b):
    """The norm of the difference."""
    squares = jax.tree.map(
        lambda x, y: float(np.sum((np.asarray(x, np.float64) - np.asarray(y, np.float64)) ** 2)), a, b
    )
    return sum(jax.tree.leaves(squares)) ** 0.5
