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

pytestmark = pytest.mark.promotes
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


ROWS = [
    (0.05, 0.2, 0.0),
    pytest.param(0.05, 0.3, 0.0, marks=pytest.mark.slow),
    (0.2, 0.05, 0.0),
    (0.01, 0.05, 0.5),
]


@pytest.mark.parametrize(("before", "after", "noise"), ROWS)
def test_steps_follow_adam_after_a_change_of_the_gradient(before, after, noise):
    expected = step_lengths(optax.adam(1e-3), before, after, noise=noise)
    for tx in (optim.flash_adam(1e-3), optim.compress_state(optax.adam(1e-3))):
        got = step_lengths(tx, before, after, noise=noise)
        assert np.abs(got / expected - 1)[-1] < 0.05
        assert np.abs(got / expected - 1).max() < 0.08  # on the way
    stuck = step_lengths(optim.flash_adam(1e-3, storage=NEAREST), before, after, noise=noise)
    assert abs(stuck[-1] / expected[-1] - 1) > 0.5  # so that this test is known to see it


CASES = st.fixed_dictionaries(
    {
        "b1": st.sampled_from([0.9, 0.99]),
        "b2": st.sampled_from([0.9, 0.99, 0.999]),
        "before": st.floats(-3, 0),
        "after": st.floats(-3, 0),
        "size": st.floats(-6, 4),
        "noise": st.sampled_from([0.0, 0.3, 1.0]),
        "shape": st.sampled_from([(128,), (4, 64), (64, 6), (5, 33)]),
        "layout": st.sampled_from(["last", "rows", "flat"]),
        "dtype": st.sampled_from([F32, BF16, F16]),
    }
)


def relative_length(b1, b2, before, after, size, noise, shape, layout, dtype):
    """The length of compressed steps over those of Adam in float32, where moments have settled."""
    before, after = 10.0**before, 10.0**after
    time_to_settle = 8 / (1 - b1) + (8 + 2 * max(0.0, np.log(before / after))) / (1 - b2)
    how = {
        "noise": noise,
        "first": 1000,
        "then": int(time_to_settle),
        "window": 500,
        "shape": shape,
        "size": 10.0**size,
    }
    storage = Storage(layout=layout, master_weight_bits=None if dtype == F32 else 32)  # 24 are too few for small steps
    ours = step_lengths(optim.flash_adam(1e-3, b1, b2, storage=storage), before, after, dtype=dtype, **how)
    return ours[-1] / step_lengths(optax.adam(1e-3, b1, b2), before, after, **how)[-1]


@settings(max_examples=3, deadline=None, derandomize=True)
@given(CASES)
def test_steps_are_adams_wherever_moments_settle(case):
    assert abs(relative_length(**case) - 1) < 0.05


@pytest.mark.slow
@settings(max_examples=40, deadline=None, derandomize=True)
@given(CASES)
def test_steps_are_adams_wherever_moments_settle_at_length(case):
    assert abs(relative_length(**case) - 1) < 0.05


@pytest.mark.slow
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_steps_are_adams_with_a_slow_second_moment(noise):
    """The mean over changes of the gradient, each of which is a single run of 64 entries."""
    changes = [(-1.3, -0.5), (-0.5, -1.3), (-2.0, -1.0), (-1.0, -2.0)]
    how = {"b1": 0.9, "b2": 0.9999, "size": 0.0, "noise": noise, "shape": (128,), "layout": "last", "dtype": F32}
    ratios = [relative_length(before=before, after=after, **how) for before, after in changes]
    assert abs(np.mean(ratios) - 1) < 0.05
    assert np.abs(np.array(ratios) - 1).max() < 0.08


def test_a_slow_momentum_follows_too():
    """Lion's average with b2 = 0.99, a hundredth of the largest of its group: its sign follows that of the gradient."""
    small = np.where(np.arange(64) % 2 == 0, 1.0, 0.01)
    turns = {}
    for tx in (optax.lion(1e-3, b2=0.99), optim.flash_lion(1e-3, b2=0.99)):
        state, params, step = tx.init(jnp.zeros(64)), jnp.zeros(64), jax.jit(tx.update)
        for i in range(600):
            updates, state = step(jnp.asarray(np.where(i < 300, small, -small), F32), state, params)
            if i >= 300 and (np.asarray(updates)[1::2] > 0).mean() > 0.5:
                turns[tx] = i - 300
                break
    plain, ours = turns.values()
    assert abs(ours - plain) <= max(3, 0.05 * plain)


# -- huge gradients

STORAGES = {
    "minifloat": Storage(),
    "published": Storage(codes="published", scales="float16", dither=False),
    "float16 scales": Storage(scales="float16"),
    "uncompressed": Storage(quantize=False),
}


OPTIMIZERS = {
    **{name: optim.flash_adam(1.0, storage=storage) for name, storage in STORAGES.items()},
    **{
        f"compress_state, {name}": optim.compress_state(optax.adam(1.0), storage=storage)
        for name, storage in STORAGES.items()
        if storage.quantize
    },
    "flashoptim": flashoptim.flash_adam(1.0, master_weight_bits=None),
}


def exact_lengths(grads):
    """The lengths of Adam's steps in float64, which no finite float32 overflows."""
    mu = nu = 0.0
    for t, g in enumerate(np.asarray(grads, np.float64), start=1):
        mu, nu = 0.9 * mu + 0.1 * g, 0.999 * nu + 0.001 * g**2
        yield np.abs(mu / (1 - 0.9**t)) / (np.sqrt(nu / (1 - 0.999**t)) + 1e-8)


@pytest.mark.parametrize("huge", [1e6, 3e18, 1.7e19, 3e19, 1e30, LARGEST])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_no_finite_gradient_makes_a_long_step(name, huge):
    """One entry has a huge gradient in one step: then and later no step is longer than Adam's, in exact numbers."""
    tx, params = OPTIMIZERS[name], jnp.zeros(64)
    grads = np.ones((40, 64), np.float32)
    grads[20, 5] = huge
    state = tx.init(params)
    step = jax.jit(tx.step) if hasattr(tx, "step") else jax.jit(lambda p, s, g: optax_step(tx, p, s, g))
    for g, longest in zip(grads, exact_lengths(grads), strict=True):
        before = params
        params, state = step(params, state, g)
        moved = np.abs(np.asarray(params) - np.asarray(before))
        assert np.isfinite(params).all()
        assert np.all(moved <= 1.05 * longest + 1e-3)
        assert all(np.isfinite(x).all() for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating))


def optax_step(tx, params, state, grads):
    updates, state = tx.update(grads, state, params)
    return optax.apply_updates(params, updates), state


@pytest.mark.parametrize("name", STORAGES)
@pytest.mark.parametrize("huge", [1e6, 3e19, LARGEST])
def test_steps_go_on_after_a_huge_gradient(name, huge):
    """`step_if_finite` takes it for finite, and other groups go on as if nothing had been."""
    tx, params = optim.flash_adam(1e-3, storage=STORAGES[name]), jnp.zeros(64)
    step, state = jax.jit(tx.step_if_finite), tx.init(params)
    for i in range(30):
        grads = np.ones(64, np.float32)
        grads[5] = huge if i == 10 else 1.0
        params, state, finite = step(params, state, grads)
        assert bool(finite)
    assert int(state.count) == 30
    np.testing.assert_allclose(params[32:], -0.03, rtol=0.02)


def test_gradients_of_a_million_are_trained_with_float16_scales():
    tx, params = optim.flash_adam(1e-3, storage=Storage(scales="float16")), jnp.zeros(64)
    step, state = jax.jit(tx.step_if_finite), tx.init(params)
    for _ in range(30):
        params, state, finite = step(params, state, jnp.full(64, 1e6))
        assert bool(finite)
    np.testing.assert_allclose(params, -0.03, rtol=0.05)


OTHER_RULES = {
    "flash_sgd": optim.flash_sgd(1e-3, momentum=0.9),
    "flash_sgd, nesterov": optim.flash_sgd(1e-3, momentum=0.9, nesterov=True),
    "flash_sgd, decay": optim.flash_sgd(1e-3, weight_decay=0.1),
    "flash_lion": optim.flash_lion(1e-3),
    "flash_lion, published": optim.flash_lion(1e-3, storage=Storage(codes="published")),
}


@pytest.mark.parametrize("start", [0.0, 1e37])
@pytest.mark.parametrize("name", OTHER_RULES)
def test_other_rules_stay_finite(name, start):
    tx, params = OTHER_RULES[name], jnp.full(64, start)
    state, step = tx.init(params), jax.jit(tx.step_if_finite)
    for sign in (1, 1, 1, -1, -1, -1):
        params, state, finite = step(params, state, jnp.full(64, sign * LARGEST))
        assert bool(finite)
        assert np.isfinite(params).all()


# -- the dtype that a state was made for


@pytest.mark.parametrize("storage", [Storage(), Storage(quantize=False), Storage(master_weight_bits=32)])
def test_the_state_of_another_dtype_is_recognised(storage):
    tx = optim.flash_adamw(1e-3, storage=storage)
    for made, other in ((F16, BF16), (BF16, F16)):
        state, params = tx.init({"w": jnp.ones(64, made)}), {"w": jnp.ones(64, other)}
        words = f"'w' in {jnp.dtype(other)} and a correction that was made for {jnp.dtype(made)}"
        for call in (
            lambda p=params, s=state: tx.step(p, s, p),
            lambda p=params, s=state: tx.step_if_finite(p, s, p),
            lambda p=params, s=state: tx.update(p, s, p),
        ):
            with raises(ValueError, words, "expected", "Pass the parameters"):
                call()
    with raises(ValueError, "float32_weights got 'w' in bfloat16 and a correction that was made for float16", "Pass"):
        optim.float32_weights({"w": jnp.ones(64, BF16)}, tx.init({"w": jnp.ones(64, F16)}))
    master = optim.with_master_weights(optax.sgd(0.1))
    with raises(ValueError, "with_master_weights got 'w' in float16 and a correction that was made for bfloat16"):
        master.update({"w": jnp.ones(64)}, master.init({"w": jnp.ones(64, BF16)}), {"w": jnp.ones(64, F16)})
