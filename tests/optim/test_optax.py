"""Compressed optimizers as Optax transformations, and the wrappers of any Optax optimizer."""

from functools import cache

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits, raises
from optimizers import ADAMW, distance, gradients, slowly, tree, wide

import jaxamp
from jaxamp import optim

pytestmark = pytest.mark.promotes  # `optax.apply_updates` adds float32 to bfloat16


@cache
def compiled(tx):
    """`init`, and an update that is applied."""

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return jax.jit(tx.init), step


def train(tx, params, steps, grads=gradients):
    """The parameters and the state after some updates that were applied."""
    init, step = compiled(tx)
    state = init(params)
    for i in range(steps):
        params, state = step(params, state, grads(params, i))
    return params, state


def flash_state(state):
    """The one FlashState somewhere in a state."""
    is_flash = lambda x: isinstance(x, optim.FlashState)
    (found,) = [x for x in jax.tree.leaves(state, is_leaf=is_flash) if is_flash(x)]
    return found


# -- the two forms


def test_applied_updates_are_steps():
    """Bit for bit where there is a correction; in float32 the last bit may differ."""
    params = {str(jnp.dtype(dtype)): tree(dtype)["odd"] for dtype in (BF16, F16, F32)}
    got, got_state = train(ADAMW, params, 5)
    expected, state, step = params, ADAMW.init(params), jax.jit(ADAMW.step)
    for i in range(5):
        expected, state = step(expected, state, gradients(params, i))
    assert distance(got.pop("float32"), expected.pop("float32")) < 1e-5
    assert_same_bits(got, expected)
    assert_same_bits(got_state.correction, state.correction)


def test_it_is_a_pair_of_functions_and_a_pytree():
    assert isinstance(ADAMW, optax.GradientTransformationExtraArgs)
    again = jax.tree.map(lambda part: part, ADAMW)
    init, update = again
    assert (init, update, again.step) == (ADAMW.init, ADAMW.update, ADAMW.step)


def test_updates_are_float32_and_their_parameters_are_the_weights_rounded():
    params = tree(BF16)
    updates, state = jax.jit(ADAMW.update)(gradients(params, 0), ADAMW.init(params), params)
    assert {x.dtype for x in jax.tree.leaves(updates)} == {jnp.dtype(F32)}
    applied = optax.apply_updates(params, updates)
    weights = jax.jit(optim.float32_weights)(applied, state)
    trees = jax.tree.map(np.asarray, (weights, applied, state.correction))
    same = jax.tree.map(lambda w, p, c: ((w.astype(p.dtype) == p) | (np.abs(c) == 127)).all(), *trees)
    assert all(jax.tree.leaves(same))


def test_the_correction_is_for_the_parameter_that_is_applied_even_where_float32_has_no_such_difference():
    params, goal = jnp.array([1.0, -1000.0, 1.0], BF16), np.float32([1e-9, 3e-4, -1e-8])
    optimizer = optim.flash_sgd(1.0)
    start = np.asarray(params, np.float32)
    grads = start - goal
    updates, state = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    applied = optax.apply_updates(params, updates)
    weights = jax.jit(optim.float32_weights)(applied, state)
    reached = start - grads  # what float32 can do
    unit = np.abs(reached) * 2.0**-8 + 1e-30
    assert (np.abs(weights - reached) <= unit / 100).all()


# -- composition


def test_it_composes_with_chain_and_clipping():
    params = tree(BF16)
    got, _ = train(optax.chain(optax.clip_by_global_norm(0.1), ADAMW), params, 5)

    def clipped(params, i):
        grads = jax.tree.map(np.asarray, gradients(params, i))
        norm = np.sqrt(sum((g**2).sum() for g in grads.values()))
        return jax.tree.map(lambda g: g * np.float32(0.1 / norm), grads)

    expected, _ = train(ADAMW, params, 5, clipped)
    assert distance(got, expected) < 2e-2


def test_it_composes_with_masked():
    params = tree(BF16)
    mask = {"w": True, "odd": False}
    rest = jax.tree.map(lambda masked: not masked, mask)
    tx = optax.chain(optax.masked(ADAMW, mask), optax.masked(optax.set_to_zero(), rest))
    got, state = train(tx, params, 1)
    expected, _ = train(ADAMW, {"w": params["w"]}, 1, lambda _, i: {"w": gradients(params, i)["w"]})
    assert_same_bits(got, {**params, "w": expected["w"]})
    assert jax.tree.leaves(flash_state(state).mu["odd"]) == []


def test_it_composes_with_multi_transform():
    params = tree(BF16)
    parts = {"flash": ADAMW, "frozen": optax.set_to_zero()}
    got, state = train(optax.multi_transform(parts, {"w": "flash", "odd": "frozen"}), params, 3)
    assert_same_bits(got["odd"], params["odd"])
    assert distance(got["w"], params["w"]) > 0.1
    assert int(flash_state(state).count) == 3


@pytest.mark.parametrize("make", slowly([(optim.flash_adamw,), (optim.flash_sgd,)], [(optim.flash_sgd,)]))
def test_it_composes_with_inject_hyperparams(make):
    options = {"momentum": 0.9} if make is optim.flash_sgd else {}
    params = {"w": tree(BF16)["w"]}
    schedule = optax.linear_schedule(1e-2, 0.0, 4)
    injected = optax.inject_hyperparams(make, hyperparam_dtype=F32)(learning_rate=schedule, **options)
    got, state = train(injected, params, 4)
    expected, _ = train(make(schedule, **options), params, 4)
    assert distance(got, expected) < 2e-2
    assert float(state.hyperparams["learning_rate"]) == pytest.approx(2.5e-3)


def test_injected_hyperparameters_in_bfloat16_are_refused():
    injected = optax.inject_hyperparams(optim.flash_adamw)(learning_rate=1e-3)
    with raises(TypeError, "flash_adamw got", "in bfloat16; expected float32", "hyperparam_dtype=jnp.float32"):
        train(injected, {"w": jnp.ones(32, BF16)}, 1)


def test_it_composes_with_multi_steps():
    params = {"w": tree(BF16)["w"]}
    tx = optax.MultiSteps(ADAMW, every_k_schedule=2)
    grads = gradients(params, 0)
    state, update = tx.init(params), jax.jit(tx.update)
    updates, state = update(grads, state, params)
    assert_same_bits(optax.apply_updates(params, updates), params)
    updates, state = update(grads, state, params)
    assert_same_bits(optax.apply_updates(params, updates), train(ADAMW, params, 1)[0])
    assert int(flash_state(state).count) == 1


def test_it_composes_with_apply_if_finite():
    params = {"w": tree(BF16)["w"]}
    tx = optax.apply_if_finite(ADAMW, 2)
    got, state = train(tx, params, 2)
    assert_same_bits(got, train(ADAMW, params, 2)[0])
    same, after = compiled(tx)[1](got, state, {"w": np.full((4, 64), np.nan, np.float32)})
    assert_same_bits((same, after.inner_state), (got, state.inner_state))


def test_it_composes_with_schedules():
    params = {"w": tree(BF16)["w"]}
    stopped = optim.flash_adamw(optax.linear_schedule(1e-2, 0.0, 2), weight_decay=0.1)
    after_2, after_4 = (jax.jit(optim.float32_weights)(*train(stopped, params, n)) for n in (2, 4))
    assert distance(after_2, after_4) < 1e-6
    assert distance(after_2, params) > 0.05


def test_update_if_finite_leaves_all_of_it():
    params = tree(BF16)
    params, state = train(ADAMW, params, 2)
    grads = jax.tree.map(lambda g: np.asarray(g) * np.float32(np.nan), gradients(params, 2))
    step = jax.jit(lambda p, s, g: jaxamp.update_if_finite(p, ADAMW, s, g, jaxamp.all_finite(g)))
    assert_same_bits(step(params, state, grads), (params, state))
    good = gradients(params, 2)
    # Two programs: XLA may round a product otherwise in one of them, and a code is then the next one.
    after = step(params, state, good), compiled(ADAMW)[1](params, state, good)
    for x, y in zip(*map(jax.tree.leaves, after), strict=True):
        np.testing.assert_allclose(np.float64(x), np.float64(y), rtol=2.0**-7, atol=1 if x.dtype.kind in "iu" else 0)


def test_updates_take_scale_and_ok():
    params = {"w": tree(BF16)["w"]}
    state = ADAMW.init(params)
    update = jax.jit(lambda g: ADAMW.update(g, state, params, ok=False, scale=2.0, value=0.0))
    updates, after = update(gradients(params, 0))
    assert not np.asarray(updates["w"]).any()
    assert_same_bits(after, state)


# -- compress_state


OPTIMIZERS = {
    "adamw": optax.adamw(3e-3),
    "momentum": optax.sgd(3e-3, momentum=0.9),
    "rmsprop": optax.rmsprop(3e-3),
    "lamb": optax.lamb(3e-3),
    "amsgrad": optax.amsgrad(3e-3),
    "sm3": optax.sm3(3e-3),
    "adan": optax.adan(3e-3),
}


@pytest.mark.parametrize("name", slowly([(name,) for name in OPTIMIZERS], [("adamw",)]))
def test_compressed_states_take_the_same_way(name):
    tx = OPTIMIZERS[name]
    params = tree(F32)
    compressed = optim.compress_state(tx)
    got, state = train(compressed, params, 50)
    expected, _ = train(tx, params, 50)
    # Adan also averages differences of gradients, which are noisier.
    assert distance(got, expected) <= (0.03 if name == "adan" else 0.02) * distance(expected, params)
    moments = [x for x in jax.tree.leaves(state) if x.shape == params["w"].shape]
    assert moments
    if name not in ("sm3", "adan"):  # which keep other things too: sums over axes, and the last gradient
        assert all(x.dtype.itemsize == 1 for x in moments)
        assert optim.optimizer_bytes(compressed, params).state < optim.optimizer_bytes(tx, params).state / 3


def test_compressed_adam_is_flash_adam():
    """The same codecs, groups and rounding: the same bytes, except for the last bit of float32."""
    params = {"w": tree(F32)["w"]}
    _, ours = train(optim.flash_adam(3e-3), params, 5)
    _, wrapped = train(optim.compress_state(optax.adam(3e-3)), params, 5)
    mu, nu = wrapped.inner[0].mu["w"], wrapped.inner[0].nu["w"]
    apart = lambda x, y: np.abs(np.asarray(x, np.int32) - np.asarray(y, np.int32))
    assert apart(mu.values, ours.mu["w"]).max() <= 1
    assert apart(nu.values, ours.nu["w"]).max() <= 1
    assert apart(mu.values, ours.mu["w"]).mean() < 0.05
    assert apart(mu.scales, np.asarray(ours.scales["w"])[0]).max() <= 1


def dtypes_of(tx, params):
    """By the names of the states' fields."""
    state = jax.eval_shape(optim.compress_state(tx).init, params)
    is_state = lambda x: hasattr(x, "_fields") and not isinstance(x, optim.Compressed | optim.CompressedState)
    first = next(x for x in jax.tree.leaves(state, is_leaf=is_state) if is_state(x) and jax.tree.leaves(x))
    return {name: {str(x.dtype) for x in jax.tree.leaves(tree)} for name, tree in first._asdict().items()}


def test_fields_are_what_they_mean():
    """The same name means numbers of both signs in one optimizer, and such as are never negative in another."""
    params = {"w": jnp.ones((4, 64))}
    signed, positive = {"uint8", "uint16"}, {"int8", "uint16"}
    assert dtypes_of(optax.scale_by_adam(), params) == {"count": {"int32"}, "mu": signed, "nu": positive}
    assert dtypes_of(optax.scale_by_sm3(), params) == {"mu": {"float32"}, "nu": signed}
    adan = dtypes_of(optax.scale_by_adan(), params)
    assert (adan["m"], adan["v"], adan["n"], adan["g"]) == (signed, signed, positive, {"float32"})
    assert dtypes_of(optax.scale_by_adadelta(), params) == {"e_g": positive, "e_x": positive}
    assert dtypes_of(optax.scale_by_stddev(), params)["nu"] == {"float32"}  # a difference of it could be negative


def test_parameters_may_have_the_names_of_moments():
    params = {"v": jnp.ones((4, 64)), "mu": jnp.ones(32), "nu": {"trace": jnp.ones(32)}}
    assert dtypes_of(optax.trace(0.9), params) == {"trace": {"uint8", "uint16"}}
    copied = optax.GradientTransformation(lambda params: (params, params), None)
    assert jax.eval_shape(optim.compress_state(copied).init, params).inner == jax.eval_shape(lambda: (params, params))
    labels = {"v": "nu", "mu": "mu", "nu": {"trace": "nu"}}
    parts = optax.multi_transform({"nu": optax.trace(0.9), "mu": optax.identity()}, labels)
    state = jax.eval_shape(optim.compress_state(parts).init, params)
    assert {str(x.dtype) for x in jax.tree.leaves(state.inner)} == {"uint8", "uint16"}


def test_what_is_no_moment_is_left_alone():
    params = {"w": jnp.ones((4, 64))}
    state = jax.eval_shape(optim.compress_state(optax.adam(1e-3), kinds={"nu": "variance"}).init, params)
    assert state.inner[0].mu["w"].dtype == F32
    assert isinstance(state.inner[0].nu["w"], optim.Compressed)
    with raises(
        ValueError,
        "compress_state got kinds for my, and this optimizer's state has no such field",
        "expected names",
        "Write kinds=",
    ):
        optim.compress_state(optax.adam(1e-3), kinds={"my": "momentum"}).init(params)
    with raises(ValueError, "compress_state got 'signed' for 'mu'; expected 'momentum' or 'variance'", "Write kinds="):
        optim.compress_state(optax.adam(1e-3), kinds={"mu": "signed"})


def test_compressed_moments_of_another_group_size_are_refused():
    params = {"w": jnp.ones((4, 64))}
    state = jax.jit(optim.compress_state(optax.adam(1e-3)).init)(params)
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
    start = wide(params)
    expected, _ = train(optax.adamw(1e-3), start, 50)
    weights = optim.float32_weights(got, state)
    assert distance(weights, expected) <= 0.02 * distance(expected, start)
    assert {x.dtype for x in jax.tree.leaves(got)} == {jnp.dtype(dtype)}
    assert {x.dtype for x in jax.tree.leaves(state.inner[0].mu)} == {jnp.dtype(F32)}


DTYPES = "bfloat16 or float16, as when the state was made", r"Write params = optax.apply_updates\(params, updates\)"


@pytest.mark.slow
def test_parameters_that_became_float32_are_refused():
    """`eqx.apply_updates` adds without a cast."""
    params = {"w": jnp.ones((4, 32), BF16)}
    for tx in (optim.flash_adamw(1e-3), optim.with_master_weights(optax.adamw(1e-3))):
        updates, state = tx.update(params, tx.init(params), params)
        added = eqx.apply_updates(params, updates)
        assert added["w"].dtype == F32
        with raises(ValueError, "got 'w' in float32 and a correction for it; expected", *DTYPES):
            tx.update(params, state, added)
        with raises(ValueError, "float32_weights got 'w' in float32 and a correction for it; expected", *DTYPES):
            optim.float32_weights(added, state)


def test_the_state_of_a_chain_is_refused_with_a_word():
    params = {"w": jnp.ones((4, 32), BF16)}
    flash = optim.flash_adamw(1e-3)
    state = optax.chain(optax.clip_by_global_norm(1.0), flash).init(params)
    for fn in (optim.float32_weights, lambda *args: optim.to_float32(flash, *args)):
        with raises(TypeError, "got tuple as its state; expected", r"of an optax.chain, the part", r"state\[1\]"):
            fn(params, state)
        fn(params, state[1])


def test_wrappers_refuse_what_is_no_plain_optimizer():
    for wrap in (optim.compress_state, optim.with_master_weights):
        name = wrap.__name__
        with raises(TypeError, f"{name} got 0.1, of type float; expected an Optax optimizer", f"Write {name}"):
            wrap(0.1)
        with raises(TypeError, f"{name} got <function sgd", "of type function; expected", f"Write {name}"):
            wrap(optax.sgd)
        with raises(TypeError, f"{name} got flash_lion, which is already compressed; expected", "Write flash_lion"):
            wrap(optim.flash_lion(1e-3))


def test_gradients_that_do_not_fit_are_refused_by_master_weights():
    tx, params = optim.with_master_weights(optax.sgd(0.5)), {"w": jnp.ones((4, 8), BF16)}
    for grads in ({"w": jnp.ones(8)}, {"w": jnp.ones((4, 8), jnp.int32)}):
        with raises(ValueError, "with_master_weights got a gradient of shape", "for 'w'; expected floats", "Pass"):
            tx.update(grads, tx.init(params), params)


def test_states_of_another_tree_are_refused_by_the_wrappers():
    tx, low = optim.with_master_weights(optax.sgd(0.5)), {"w": jnp.ones(4, BF16)}
    words = "expected the correction of a bfloat16 or float16 array of this shape", "Write state"
    with raises(ValueError, r"with_master_weights got a correction of shape \(1,\) for 'w', which is of", *words):
        tx.update(low, tx.init({"w": jnp.ones(1, BF16)}), low)
    with raises(ValueError, "with_master_weights got 'w' in float32 and a correction for it; expected", *DTYPES):
        tx.update(low, tx.init(low), {"w": jnp.ones(4)})
    with raises(ValueError, "got no correction for 'w', which is in bfloat16; expected one", "Write state"):
        tx.update(low, tx.init({"w": jnp.ones(4)}), low)
    with raises(ValueError, "with_master_weights got a state without a leaf for 'w'; expected", "Write state"):
        tx.update(low, tx.init({}), low)
    with raises(TypeError, "with_master_weights got tuple as its state; expected a MasterState", "Write state"):
        tx.update(low, (), low)
    with raises(TypeError, "compress_state got tuple as its state; expected a CompressedState", "Write state"):
        optim.compress_state(optax.sgd(0.5)).update(low, (), low)
    with raises(TypeError, "compress_state got storage='last', of type str; expected a Storage", "Write compress"):
        optim.compress_state(optax.sgd(0.5), storage="last")


def test_both_wrappers_together_are_small():
    params = {"w": jnp.asarray(np.ones((64, 64), BF16))}
    tx = optim.with_master_weights(optim.compress_state(optax.adamw(1e-3)))
    assert round(optim.optimizer_bytes(tx, params).per_parameter, 2) == 5.13
    got, _ = train(tx, params, 3)
    assert got["w"].dtype == BF16


def test_master_weights_leave_other_leaves_alone():
    params = {"w": jnp.ones(4, BF16), "full": jnp.ones(4)}
    tx = optim.with_master_weights(optax.sgd(0.5))
    updates, state = jax.jit(tx.update)(params, jax.jit(tx.init)(params), params)
    np.testing.assert_array_equal(updates["full"], -0.5)
    assert state.correction["full"] is None
    with raises(ValueError, "with_master_weights got no parameters in update; expected them", "Write optimizer.update"):
        tx.update(params, state)
    with raises(ValueError, "with_master_weights got master_weight_bits=16; expected 24 or 32", "Write with_master"):
        optim.with_master_weights(optax.sgd(0.5), master_weight_bits=16)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_updates_have_derivatives(dtype):
    """By the learning rate, for those who learn that too: rounding passes derivatives on."""
    params = {"w": jnp.ones((4, 32), dtype)}
    state = optim.flash_adamw(1e-3).init(params)
    change = lambda rate: jnp.sum(optim.flash_adamw(rate).update(params, state, params)[0]["w"])
    by_rate = jax.grad(change)(1e-3)
    assert abs(by_rate - -128.0) <= 0.01 * 128  # a first step of Adam is the rate, in each entry
