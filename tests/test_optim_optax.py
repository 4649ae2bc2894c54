"""Compressed optimizers as Optax transformations, and the wrappers of any Optax optimizer."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from bits import assert_same_bits
from faces import raises
from optimizers import distance, gradients, slowly, tree

import jaxamp
from jaxamp import optim

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
pytestmark = pytest.mark.promotes  # `optax.apply_updates` adds float32 to bfloat16


def train(tx, params, steps, **extra):
    """The parameters and the state after some updates that were applied."""
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params, **extra)
        return optax.apply_updates(params, updates), state

    for i in range(steps):
        params, state = step(params, state, gradients(params, i))
    return params, state


def flash_state(state):
    """The one FlashState somewhere in a state."""
    is_flash = lambda x: isinstance(x, optim.FlashState)
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_flash) if is_flash(x)]
    return found


# -- the two forms


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=["bfloat16", "float16", "float32"])
def test_applied_updates_are_steps(dtype):
    """Bit for bit where there is a correction; in float32 the last bit may differ."""
    optimizer, params = optim.flash_adamw(1e-2), tree(dtype)
    assert isinstance(optimizer, optax.GradientTransformationExtraArgs)
    optimizer = jax.tree.map(lambda part: part, optimizer)  # a pair of functions is a pytree
    init, update = optimizer
    assert (init, update) == (optimizer.init, optimizer.update)
    got = train(optimizer, params, 5)
    state, step, expected = optimizer.init(params), jax.jit(optimizer.step), params
    for i in range(5):
        expected, state = step(expected, state, gradients(params, i))
    if dtype != F32:
        assert_same_bits(got[0], expected)
        assert distance(got[1].correction, state.correction) == 0
    else:
        assert distance(got[0], expected) < 1e-5


def test_updates_are_float32_and_their_parameters_are_the_weights_rounded():
    optimizer, params = optim.flash_adamw(0.5), tree(BF16)
    updates, state = jax.jit(optimizer.update)(gradients(params, 0), optimizer.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(F32)}
    applied = optax.apply_updates(params, updates)
    weights = jax.jit(optim.float32_weights)(applied, state)
    same = jax.tree.map(
        lambda w, p, c: bool(jnp.all((w.astype(p.dtype) == p) | (jnp.abs(c) == 127))),
        weights,
        applied,
        state.correction,
    )
    assert all(jax.tree.leaves(same))


def test_the_correction_is_for_the_parameter_that_is_applied_even_where_float32_has_no_such_difference():
    params, goal = jnp.array([1.0, -1000.0, 1.0], BF16), jnp.array([1e-9, 3e-4, -1e-8])
    optimizer = optim.flash_sgd(1.0)
    grads = params.astype(F32) - goal
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    applied = optax.apply_updates(params, updates)
    weights = jax.jit(optim.float32_weights)(applied, state)
    reached = params.astype(F32) - grads  # what float32 can do
    unit = jnp.abs(reached) * 2.0**-8 + 1e-30
    assert jnp.all(jnp.abs(weights - reached) <= unit / 100)


# -- composition


def test_it_composes_with_chain_and_clipping():
    params = tree(BF16)
    chained = optax.chain(optax.clip_by_global_norm(0.1), optim.flash_adamw(1e-2))
    got, _ = train(chained, params, 5)
    optimizer = optim.flash_adamw(1e-2)

    @jax.jit
    def step(params, state, grads):
        norm = jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))
        return optimizer.step(params, state, grads, scale=jnp.minimum(1.0, 0.1 / norm))

    expected, state = params, optimizer.init(params)
    for i in range(5):
        expected, state = step(expected, state, gradients(params, i))
    assert distance(*(jax.tree.map(lambda x: x.astype(F32), x) for x in (got, expected))) < 2e-2


def test_it_composes_with_masked():
    params = tree(BF16)
    mask = {"w": True, "odd": False, "s": False}
    rest = jax.tree.map(lambda masked: not masked, mask)
    tx = optax.chain(optax.masked(optim.flash_adamw(1e-2), mask), optax.masked(optax.set_to_zero(), rest))
    got, state = train(tx, params, 1)
    alone, grads = optim.flash_adamw(1e-2), gradients(params, 0)
    expected, _ = jax.jit(alone.step)({"w": params["w"]}, alone.init({"w": params["w"]}), {"w": grads["w"]})
    assert_same_bits(got, {**params, "w": expected["w"]})
    assert jax.tree.leaves(flash_state(state).mu["odd"]) == []


def test_it_composes_with_multi_transform():
    params = tree(BF16)
    parts = {"flash": optim.flash_adamw(1e-2), "frozen": optax.set_to_zero()}
    tx = optax.multi_transform(parts, {"w": "flash", "odd": "frozen", "s": "flash"})
    got, state = train(tx, params, 3)
    assert_same_bits(got["odd"], params["odd"])
    assert distance(got["w"].astype(F32), params["w"].astype(F32)) > 0.1
    assert int(flash_state(state).count) == 3


@pytest.mark.parametrize("make", [optim.flash_adamw, optim.flash_sgd])
def test_it_composes_with_inject_hyperparams(make):
    options = {"momentum": 0.9} if make is optim.flash_sgd else {}
    params = tree(BF16)
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    injected = optax.inject_hyperparams(make, hyperparam_dtype=F32)(learning_rate=schedule, **options)
    got, state = train(injected, params, 4)
    expected, _ = train(make(schedule, **options), params, 4)
    assert distance(*(jax.tree.map(lambda x: x.astype(F32), x) for x in (got, expected))) < 2e-2
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(2.5e-3)


def test_injected_hyperparameters_in_bfloat16_are_refused():
    injected = optax.inject_hyperparams(optim.flash_adamw)(learning_rate=1e-3)
    with raises(TypeError, "flash_adamw got", "in bfloat16; expected float32", "hyperparam_dtype=jnp.float32"):
        train(injected, {"w": jnp.ones(32, BF16)}, 1)


def test_it_composes_with_multi_steps():
    params = tree(BF16)
    tx = optax.MultiSteps(optim.flash_adamw(1e-2), every_k_schedule=2)
    grads = gradients(params, 0)
    state, update = tx.init(params), jax.jit(tx.update)
    updates, state = update(grads, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    updates, state = update(grads, state, params)
    got = optax.apply_updates(params, updates)
    once = optim.flash_adamw(1e-2)
    updates, _ = jax.jit(once.update)(grads, once.init(params), params)
    assert_same_bits(got, optax.apply_updates(params, updates))
    assert int(flash_state(state).count) == 1


def test_it_composes_with_schedules():
    params = tree(BF16)
    stopped = optim.flash_adamw(optax.linear_schedule(1e-2, 0.0, 2), weight_decay=0.1)
    after_2, after_4 = (jax.jit(optim.float32_weights)(*train(stopped, params, n)) for n in (2, 4))
    assert distance(after_2, after_4) < 1e-6
    assert distance(after_2, jax.tree.map(lambda x: x.astype(F32), params)) > 0.05


def test_update_if_finite_leaves_all_of_it():
    optimizer, params = optim.flash_adamw(1e-2), tree(BF16)
    params, state = train(optimizer, params, 2)
    grads = jax.tree.map(lambda g: g * jnp.nan, gradients(params, 2))
    step = jax.jit(lambda p, s, g: jaxamp.update_if_finite(p, optimizer, s, g, jaxamp.all_finite(g)))
    assert_same_bits(step(params, state, grads), (params, state))
    good = gradients(params, 2)
    updates, after = jax.jit(optimizer.update)(good, state, params)
    assert_same_bits(step(params, state, good), (optax.apply_updates(params, updates), after))


def test_updates_take_scale_and_ok():
    optimizer, params = optim.flash_adamw(1e-2), tree(BF16)
    state = optimizer.init(params)
    updates, after = jax.jit(lambda g: optimizer.update(g, state, params, ok=False, scale=2.0, value=0.0))(
        gradients(params, 0)
    )
    assert not any(bool(jnp.any(u)) for u in jax.tree.leaves(updates))
    assert_same_bits(after, state)


# -- compress_state


OPTIMIZERS = {
    "adamw": optax.adamw(3e-3),
    "momentum": optax.sgd(3e-3, momentum=0.9),
    "rmsprop": optax.rmsprop(3e-3),
    "lamb": optax.lamb(3e-3),
    "amsgrad": optax.amsgrad(3e-3),
}


@pytest.mark.parametrize("name", slowly([(name,) for name in OPTIMIZERS], [("adamw",)]))
def test_compressed_states_take_the_same_way(name):
    tx = OPTIMIZERS[name]
    params = {k: v for k, v in tree(F32).items() if k != "s"}
    compressed = optim.compress_state(tx)
    got, state = train(compressed, params, 50)
    expected, _ = train(tx, params, 50)
    assert distance(got, expected) <= 0.02 * distance(expected, params)
    moments = [x for x in jax.tree.leaves(state) if x.shape == params["w"].shape]
    assert moments
    assert all(x.dtype.itemsize == 1 for x in moments)
    assert optim.optimizer_bytes(compressed, params).state < optim.optimizer_bytes(tx, params).state / 3


def test_compressed_adam_is_flash_adam():
    """The same codecs, groups and rounding: the same bytes, but for the last bit of float32."""
    params = {"w": tree(F32)["w"]}
    _, ours = train(optim.flash_adam(3e-3), params, 5)
    _, wrapped = train(optim.compress_state(optax.adam(3e-3)), params, 5)
    mu, nu = wrapped.inner[0].mu["w"], wrapped.inner[0].nu["w"]
    assert int(jnp.max(jnp.abs(mu.values.astype(jnp.int32) - ours.mu["w"].astype(jnp.int32)))) <= 1
    assert int(jnp.max(jnp.abs(nu.values.astype(jnp.int32) - ours.nu["w"].astype(jnp.int32)))) <= 1
    assert float(jnp.mean(mu.values == ours.mu["w"])) > 0.95
    assert int(jnp.max(jnp.abs(mu.scales.astype(jnp.int32) - ours.scales["w"][0].astype(jnp.int32)))) <= 1


def test_what_is_no_moment_is_left_alone():
    params = {"w": jnp.ones((4, 64))}
    state = optim.compress_state(optax.adam(1e-3), kinds={"nu": "variance"}).init(params)
    assert state.inner[0].mu["w"].dtype == F32
    assert isinstance(state.inner[0].nu["w"], optim.Compressed)
    with raises(ValueError, "compress_state got 'signed' for 'mu'; expected 'momentum' or 'variance'", "Write kinds="):
        optim.compress_state(optax.adam(1e-3), kinds={"mu": "signed"})


def test_compressed_moments_of_another_group_size_are_refused():
    params = {"w": jnp.ones((4, 64))}
    state = optim.compress_state(optax.adam(1e-3)).init(params)
    other = optim.compress_state(optax.adam(1e-3), storage=optim.Storage(group_size=16))
    with raises(
        ValueError, r"got scales of shape \(4, 2\) for moments of shape \(4, 64\); expected groups of 16", "Pass"
    ):
        other.update(params, state, params)


# -- with_master_weights


@pytest.mark.parametrize(("dtype", "bits"), slowly([(d, b) for d in (BF16, F16) for b in (24, 32)], [(BF16, 24)]))
def test_master_weights_are_float32_training(dtype, bits):
    params = tree(dtype)
    got, state = train(optim.with_master_weights(optax.adamw(1e-3), master_weight_bits=bits), params, 50)
    start = jax.tree.map(lambda x: x.astype(F32), params)
    expected, _ = train(optax.adamw(1e-3), start, 50)
    weights = jax.jit(lambda *trees: jax.tree.map(flash_join, *trees))(got, state.correction)
    assert distance(weights, expected) <= 0.02 * distance(expected, start)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(state.inner[0].mu)} == {jnp.dtype(F32)}


def flash_join(low, correction):
    return optim.Weight(low.dtype).decode(low, correction)


def test_both_wrappers_together_are_small():
    params = {"w": jnp.ones((64, 64), BF16)}
    tx = optim.with_master_weights(optim.compress_state(optax.adamw(1e-3)))
    assert round(optim.optimizer_bytes(tx, params).per_parameter, 2) == 5.13
    got, _ = train(tx, params, 3)
    assert got["w"].dtype == BF16


def test_master_weights_leave_other_leaves_alone():
    params = {"w": jnp.ones(4, BF16), "full": jnp.ones(4)}
    tx = optim.with_master_weights(optax.sgd(0.5))
    updates, state = tx.update({"w": jnp.ones(4, BF16), "full": jnp.ones(4)}, tx.init(params), params)
    np.testing.assert_array_equal(updates["full"], -0.5)
    assert state.correction["full"] is None
    with raises(ValueError, "with_master_weights got no parameters in update; expected them", "Write optimizer.update"):
        tx.update(params, state)
    with raises(ValueError, "with_master_weights got master_weight_bits=16; expected 24 or 32", "Write with_master"):
        optim.with_master_weights(optax.sgd(0.5), master_weight_bits=16)
