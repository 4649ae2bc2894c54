"""Every optimizer of Optax with random skips: bit for bit that which never saw the steps that were skipped."""

import inspect

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits

import jaxamp

pytestmark = [pytest.mark.soak, pytest.mark.promotes, pytest.mark.filterwarnings("ignore:.*deprecated")]
STEPS, SEED = 200, 30_000
BAD = np.float32([np.nan, np.inf, -np.inf])

# What an optimizer must be given besides a learning rate. Those of Optax that are not here take one, or nothing.
REQUIRED = {
    "dpsgd": {"l2_norm_clip": 1.0, "noise_multiplier": 0.1, "seed": 7},
    "noisy_sgd": {"key": jax.random.key(7)},
    "schedule_free": {"base_optimizer": optax.adam(1e-2)},
    "mechanize": {"base_optimizer": optax.adam(1e-2)},
    "sam": {"optimizer": optax.sgd(1e-2), "adv_optimizer": optax.sgd(0.05)},
}
# What the update of an optimizer must be given: a loss, and what a line search evaluates.
EXTRA = {
    "lbfgs": ("value", "grad", "value_fn"),
    "polyak_sgd": ("value",),
    "momo": ("value",),
    "momo_adam": ("value",),
    "sophia": ("obj_fn",),
}
# Transforms that are no optimizers, although they take a learning rate.
PARTS = {"scale_by_learning_rate", "scale_by_rprop", "scale_by_madgrad"}


def makers():
    """All that takes a learning rate or an optimizer and gives an optimizer, by name."""
    found = {}
    for module in (optax, optax.contrib):
        for name, make in inspect.getmembers(module, inspect.isfunction):
            takes_rate = "learning_rate" in inspect.signature(make).parameters
            if (takes_rate or name in {*REQUIRED, *EXTRA}) and not name.startswith("_") and name not in PARTS:
                found[name] = make
    return found


MAKERS = makers()


def optimizer(name):
    make = MAKERS[name]
    options = dict(REQUIRED.get(name, {}))
    rate = inspect.signature(make).parameters.get("learning_rate")
    if rate is not None and rate.default is rate.empty:
        options["learning_rate"] = 1e-2
    return make(**options)


def parameters():
    rng = np.random.default_rng(SEED)
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in {"w": (8, 4), "b": (4,)}.items()}


def loss(params):
    return sum(jnp.sum(jnp.cosh(x) * 0.1) for x in jax.tree.leaves(params))


def test_optimizers_are_found():
    assert len(MAKERS) >= 40
    assert {"adam", "adamw", "lion", "adafactor", "sgd", "lamb", "lars", "novograd", "rmsprop", "yogi"} <= {*MAKERS}
    assert {"lbfgs", "polyak_sgd", "muon", "prodigy", "schedule_free"} <= {*MAKERS}


@pytest.mark.parametrize("name", MAKERS)
def test_a_skipped_step_was_never_seen(name, figures):
    tx, start = optimizer(name), parameters()
    per_example = name == "dpsgd"  # its gradients have a batch axis

    def extra(params, value):
        whole = {"value": value, "grad": jax.grad(loss)(params), "value_fn": loss, "obj_fn": loss}
        return {key: whole[key] for key in EXTRA.get(name, ())}

    @jax.jit
    def ours(params, state, grads, value, finite):
        return jaxamp.update_if_finite(params, tx, state, grads, finite, **extra(params, value))

    @jax.jit
    def only_finite(params, state, grads, value):
        updates, state = optax.with_extra_args_support(tx).update(grads, state, params, **extra(params, value))
        return optax.apply_updates(params, updates), state

    rng = np.random.default_rng(SEED)
    run = expected = start, tx.init(start)
    skips, rate = 0, 0.3
    for step in range(STEPS):
        if step % 20 == 0:
            rate = rng.choice([0.1, 0.5, 0.9])
        shapes = {k: (2, *x.shape) if per_example else x.shape for k, x in start.items()}
        size = 10.0 ** rng.integers(-3, 2)
        grads = {k: np.float32(size * rng.normal(size=shape)) for k, shape in shapes.items()}
        value = np.float32(abs(rng.normal()))
        if rng.random() < rate:
            spoilt = grads[rng.choice(["w", "b"])]
            spoilt.flat[rng.integers(0, spoilt.size, rng.integers(1, 4))] = rng.choice(BAD)
            value = rng.choice([value, np.float32(np.nan)])
            skips += 1
        finite = jaxamp.all_finite(grads)
        run = ours(*run, grads, value, finite)
        if all(np.isfinite(x).all() for x in grads.values()):
            expected = only_finite(*expected, grads, value)
        assert_same_bits(run, expected)
    assert 20 < skips < STEPS - 20
    moved = max(float(jnp.abs(a - b).max()) for a, b in zip(jax.tree.leaves(run[0]), jax.tree.leaves(start)))
    assert 0 < moved < np.inf
    figures(optimizers=1, steps=STEPS, skipped=skips)
