"""`update_if_finite`: optimizers x laws, models of all kinds, sharding, and the micro-batches of `optax.MultiSteps`."""

import functools
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bits import assert_same_bits, dtypes
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp

# -- the table


class LegacyNoise(NamedTuple):
    key: jax.Array


def legacy_noise():
    """`optax.add_noise` with a key of the old kind, an array of uint32."""

    def update(updates, state, params=None):
        key, sample = jax.random.split(state.key)
        return jax.tree.map(lambda u: u + jax.random.normal(sample, u.shape, u.dtype), updates), LegacyNoise(key)

    return optax.GradientTransformation(lambda params: LegacyNoise(jax.random.PRNGKey(1)), update)


def plateau():
    return optax.chain(optax.adam(0.1), optax.contrib.reduce_on_plateau(patience=1, factor=0.5))


SCHEDULE = optax.warmup_cosine_decay_schedule(0.0, 0.1, warmup_steps=2, decay_steps=6)
OPTIMIZERS = {
    "sgd_momentum": lambda: optax.sgd(0.1, momentum=0.9),
    "adam": lambda: optax.adam(0.1),
    "adamw_warmup_cosine": lambda: optax.adamw(SCHEDULE, weight_decay=0.1),
    "clip_adam": lambda: optax.chain(optax.clip_by_global_norm(0.5), optax.adam(0.1)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(learning_rate=SCHEDULE),
    "masked": lambda: optax.masked(optax.adam(0.1), {"w": True, "b": False}),
    "partition": lambda: optax.partition({"a": optax.adam(0.1), "s": optax.sgd(0.1, 0.9)}, {"w": "a", "b": "s"}),
    "multi_steps": lambda: optax.MultiSteps(optax.adam(0.1), 2),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adam(0.1), max_consecutive_errors=3),
    "lion": lambda: optax.lion(0.1),
    "adafactor": lambda: optax.adafactor(0.1, min_dim_size_to_factor=2),
    "reduce_on_plateau": plateau,
    "multi_steps_on_plateau": lambda: optax.MultiSteps(plateau(), 2),
    "typed_key": lambda: optax.chain(optax.add_noise(0.1, 0.5, key=jax.random.key(1)), optax.sgd(0.1)),
    "legacy_key": lambda: optax.chain(legacy_noise(), optax.sgd(0.1)),
}


def arguments(name):
    return {"value": jnp.float32(1.0)} if "plateau" in name else {}


def parameters(dtype):
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(8, 4)), dtype), "b": jnp.asarray(rng.normal(size=4), dtype)}


def gradients(step, like, dtype):
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda p: jnp.asarray(rng.normal(size=p.shape), dtype), like)


def steps(optimizer, extra, counter=None):
    """The step of a training loop, compiled, with all that changes as an argument."""

    @jax.jit
    def step(params, opt_state, grads, finite):
        if counter is not None:
            counter.append(1)
        return jaxamp.update_if_finite(params, optimizer, opt_state, grads, finite, **extra)

    return step


table = pytest.mark.parametrize("name", OPTIMIZERS)
params_dtype = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


@table
@params_dtype
@pytest.mark.promotes
def test_a_finite_step_is_the_step_that_optax_takes(name, dtype):
    optimizer, extra = OPTIMIZERS[name](), arguments(name)

    @jax.jit
    def both(params, opt_state, grads):
        updates, new_state = optimizer.update(grads, opt_state, params, **extra)
        expected = optax.apply_updates(params, updates), jaxamp.cast_floating_like(new_state, opt_state)
        return jaxamp.update_if_finite(params, optimizer, opt_state, grads, jnp.array(True), **extra), expected

    params = parameters(dtype)
    opt_state = optimizer.init(params)
    for i in range(3):
        (params, opt_state), expected = both(params, opt_state, gradients(i, params, dtype))
        assert_same_bits((params, opt_state), expected)
    assert float(jnp.abs(params["w"] - parameters(dtype)["w"]).max()) > 0


@table
@params_dtype
@pytest.mark.promotes
def test_a_skipped_step_leaves_no_trace_and_compiles_nothing(name, dtype):
    """Moments and gradients are float32, whatever the parameters are."""
    optimizer, traces = OPTIMIZERS[name](), []
    step = steps(optimizer, arguments(name), traces)
    params = parameters(dtype)
    opt_state = optimizer.init(jaxamp.cast_floating(params, jnp.float32))
    types = dtypes((params, opt_state))
    for i in range(3):
        grads = gradients(i, params, "float32")
        for bad in (jnp.nan, jnp.inf):
            spoilt = {**grads, "w": grads["w"].at[0, 0].set(bad)}
            assert_same_bits(step(params, opt_state, spoilt, jnp.array(False)), (params, opt_state))
        assert_same_bits(step(params, opt_state, grads, jnp.array(False)), (params, opt_state))
        params, opt_state = step(params, opt_state, grads, jnp.array(True))
        assert dtypes((params, opt_state)) == types
    assert len(traces) == 1
