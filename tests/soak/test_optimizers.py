"""Compressed optimizers in a storm: NaN, infinities, subnormals, and the largest numbers, in one group and in turns."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits

import jaxamp
from jaxamp import optim
from jaxamp.optim import Storage

pytestmark = [pytest.mark.soak, pytest.mark.promotes]  # `optax.apply_updates` adds float32 to bfloat16
STEPS, SEED = 120, 40_000
RATE, B1, B2, DECAY = 1e-2, 0.9, 0.9, 0.1  # a second moment that forgets the storm in hundreds of steps
LARGEST = float(np.finfo(np.float32).max)

RULES = {
    "adam": lambda **kw: optim.flash_adam(RATE, B1, B2, weight_decay=DECAY, **kw),
    "adamw": lambda **kw: optim.flash_adamw(RATE, B1, B2, weight_decay=DECAY, **kw),
    "sgd": lambda **kw: optim.flash_sgd(RATE, weight_decay=DECAY, **kw),
    "momentum": lambda **kw: optim.flash_sgd(RATE, B1, **kw),
    "nesterov": lambda **kw: optim.flash_sgd(RATE, B1, nesterov=True, **kw),
    "sgdw": lambda **kw: optim.flash_sgdw(RATE, B1, weight_decay=DECAY, **kw),
    "lion": lambda **kw: optim.flash_lion(RATE, B1, B2, weight_decay=DECAY, **kw),
}
STORAGES = {
    "default": Storage(),
    "float16 scales": Storage(scales="float16"),
    "published": Storage(codes="published", scales="float16", dither=False),
    "published, wide": Storage(codes="published"),
    "to nearest": Storage(dither=False),
    "rows": Storage(layout="rows", together=0),
    "flat, groups of 16": Storage(layout="flat", group_size=16),
    "32 bits": Storage(master_weight_bits=32),
    "no corrections": Storage(master_weight_bits=None),
    "uncompressed": Storage(quantize=False),
}
CASES = [
    (rule, storage) for rule in RULES for storage in STORAGES if rule != "sgd" or storage in ("default", "32 bits")
]


# -- the storm


def parameters(rng):
    """All dtypes, whole groups and tails."""
    shapes = {"bf16": ((4, 64), BF16), "f16": ((5, 33), F16), "f32": ((96,), F32), "small": ((7,), BF16)}
    return {k: jnp.asarray(rng.normal(size=shape), dtype) for k, (shape, dtype) in shapes.items()}


TINY = np.float32([0.0, -0.0, 1e-45, -1e-40, 1e-38, -1.2e-38, 1e-30])
HUGE = np.float32([1e6, -3e18, 1.8e19, -3e19, 1e30, 1e38, -1e38, LARGEST, -LARGEST])
BAD = np.float32([np.nan, np.inf, -np.inf])
FINE, SPOILT = ("ordinary", "ordinary", "tiny", "huge", "mixed", "one huge"), ("one bad", "all bad")


def storm(rng, shape, kind):
    """A gradient of one kind."""
    ordinary = np.float32(rng.normal(size=shape))
    match kind:
        case "tiny":
            return rng.choice(TINY, shape)
        case "huge":
            return rng.choice(HUGE, shape)
        case "mixed":
            return np.where(rng.random(shape) < 0.5, ordinary, rng.choice(np.concatenate([TINY, HUGE]), shape))
        case "one huge":
            ordinary.flat[rng.integers(ordinary.size)] = rng.choice(HUGE)
        case "one bad":
            ordinary.flat[rng.integers(ordinary.size)] = rng.choice(BAD)
        case "all bad":
            return rng.choice(BAD, shape)
    return ordinary


def is_finite(tree):
    leaves = map(np.asarray, jax.tree.leaves(tree))
    return all(np.isfinite(np.asarray(x, np.float64)).all() for x in leaves if jnp.issubdtype(x.dtype, jnp.floating))


# -- the step that a rule takes, in float64


def lengths(rule, g, w, mu, nu, count):
    """How far each weight moves, from these moments."""
    if rule in ("adam", "sgd"):
        g = g + DECAY * w
    decay = RATE * DECAY * w if rule in ("adamw", "sgdw", "lion") else 0.0
    match rule:
        case "adam" | "adamw":
            t = count + 1
            mu, nu = B1 * mu + (1 - B1) * g, B2 * nu + (1 - B2) * g**2
            step = RATE * (mu / (1 - B1**t)) / (np.sqrt(nu / (1 - B2**t)) + 1e-8)
        case "sgd":
            step = RATE * g
        case "momentum" | "sgdw":
            step = RATE * (B1 * mu + g)
        case "nesterov":
            step = RATE * (g + B1 * (B1 * mu + g))
        case "lion":
            step = RATE * np.sign(0.9 * mu + 0.1 * g)
    return np.abs(step) + np.abs(decay)


def resolution(dtype, storage):
    """The distance between a weight of about one and the next, in how they are stored."""
    if dtype == F32:
        return 2.0**-22
    bits = storage.bits_for(dtype)
    return float(jnp.finfo(dtype).eps) if bits is None else float(jnp.finfo(dtype).eps) * 2.0 ** -(bits - 17)


def assert_no_longer(rule, storage, before, after, grads):
    """No weight moves further than the rule moves it from the moments that are stored, in exact numbers."""
    for name, g in grads.items():
        w, mu, nu = (None if t is None else np.asarray(t[name], np.float64) for t in before[1:])
        g = np.asarray(g, np.float64)
        if storage.scales == "float16" and storage.quantize and rule != "sgd":
            g = np.clip(g, -65504, 65504)
        new = np.asarray(after.weights[name], np.float64)
        longest = 1.05 * lengths(rule, g, w, mu, nu, int(before.count))
        unit = resolution(jnp.dtype(DTYPES[name]), storage) * np.maximum(np.abs(w), np.abs(new))
        over = np.abs(new - w) - longest - unit - 1e-7
        assert (over <= 0).all(), f"{name}: {np.abs(new - w)[over > 0]} beyond {longest[over > 0]}"


DTYPES = {name: x.dtype for name, x in jax.eval_shape(lambda: parameters(np.random.default_rng(0))).items()}


@pytest.mark.parametrize(("rule", "storage"), CASES)
def test_a_storm_leaves_weights_that_train(rule, storage, figures):
    rng = np.random.default_rng((SEED, list(RULES).index(rule), list(STORAGES).index(storage)))
    optimizer = RULES[rule](storage=(storage := STORAGES[storage]))
    moves_by_size = "sgd" in optimizer.name

    @jax.jit
    def every_way(params, state, grads):
        updates, updated = optimizer.update(grads, state, params)
        return (
            optimizer.step_if_finite(params, state, grads),
            optimizer.step(params, state, grads),
            (optax.apply_updates(params, updates), updated),
        )

    read = jax.jit(lambda params, state: optim.to_float32(optimizer, params, state))
    params = parameters(rng)
    state, skipped = optimizer.init(params), 0
    for _ in range(STEPS):
        kinds = {k: rng.choice(FINE) for k in params}
        if rng.random() < 0.3:
            kinds[rng.choice(list(kinds))] = rng.choice(SPOILT)
        grads = {k: storm(rng, x.shape, kinds[k]) for k, x in params.items()}
        if moves_by_size:  # float16 ends at 65504, and so would the weights
            grads["f16"] = np.where(np.isfinite(grads["f16"]), np.clip(grads["f16"], -1e4, 1e4), grads["f16"])
        with np.errstate(over="ignore"):
            grads["bf16"] = grads["bf16"].astype(BF16)
        finite = is_finite(grads)
        before = read(params, state)
        (new, after, ok), stepped, updated = every_way(params, state, grads)
        assert bool(ok) == finite
        if not finite:
            skipped += 1
            assert_same_bits((new, after), (params, state))
            if storage.quantize:  # a step that should not have been taken spoils the weights alone
                assert is_finite(stepped[1])
            continue
        assert is_finite((new, after))
        assert_same_bits(stepped, (new, after))
        assert_same_bits(updated[1], after)
        corrected = [k for k in params if after.correction[k] is not None]  # else the sum of the change is rounded
        assert_same_bits({k: updated[0][k] for k in corrected}, {k: new[k] for k in corrected})
        assert_no_longer(rule, storage, before, read(new, after), grads)
        params, state = new, after
    assert int(state.count) == STEPS - skipped
    assert STEPS / 10 < skipped < STEPS * 9 / 10

    goal = jax.tree.map(lambda x: jnp.full(x.shape, 0.5, F32), params)

    def distances(params, state):
        weights = jax.tree.map(lambda x: np.asarray(x, np.float64), optim.float32_weights(params, state))
        return {k: np.linalg.norm(weights[k] - 0.5) / weights[k].size ** 0.5 for k in weights}

    def ordinary(carry, _):
        params, state = carry
        grads = jax.tree.map(jnp.subtract, optim.float32_weights(params, state), goal)
        return optimizer.step_if_finite(params, state, grads)[:2], None

    start = distances(params, state)
    params, state = jax.jit(lambda *c: jax.lax.scan(ordinary, c, length=2000)[0])(params, state)
    end = distances(params, state)
    assert is_finite((params, state))
    for k in end:
        # Decay pulls away from the goal, and a rule whose steps have a length of their own ends a few of them from it.
        assert end[k] < 0.15 * start[k] or end[k] < 0.1, f"{k}: {start[k]:.3g} to {end[k]:.3g}"
    figures(rule, storages=1, steps=STEPS, skipped=skipped)


# -- around optimizers of Optax

WRAPPED = {
    "compressed adam": optim.compress_state(optax.adam(RATE, B1, B2)),
    "compressed lion": optim.compress_state(optax.lion(RATE, B1, B2)),
    "compressed rmsprop": optim.compress_state(optax.rmsprop(RATE)),
    "compressed adam, published": optim.compress_state(optax.adam(RATE, B1, B2), storage=STORAGES["published"]),
    "compressed lion, published": optim.compress_state(optax.lion(RATE, B1, B2), storage=STORAGES["published, wide"]),
    "adam on master weights": optim.with_master_weights(optax.adam(RATE, B1, B2)),
    "compressed adam on master weights": optim.with_master_weights(optim.compress_state(optax.adam(RATE, B1, B2))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_a_storm_leaves_finite_weights_of_optax(name, figures):
    rng = np.random.default_rng((SEED, 1, list(WRAPPED).index(name)))
    tx, params = WRAPPED[name], parameters(rng)
    step = jax.jit(lambda p, s, g: jaxamp.update_if_finite(p, tx, s, g, jaxamp.all_finite(g)))
    state, skipped = tx.init(jaxamp.cast_floating(params, F32) if "master" not in name else params), 0
    for _ in range(STEPS):
        kinds = {k: rng.choice(FINE) for k in params}
        if rng.random() < 0.3:
            kinds[rng.choice(list(kinds))] = rng.choice(SPOILT)
        grads = {k: storm(rng, x.shape, kinds[k]) for k, x in params.items()}
        new, after = step(params, state, grads)
        if is_finite(grads):
            assert is_finite(new)
            if "compressed" in name:  # Optax's own second moments overflow, and its Adam then stands still
                assert is_finite(after)
        else:
            skipped += 1
            assert_same_bits((new, after), (params, state))
        moved = [np.abs(np.asarray(new[k], np.float64) - np.asarray(params[k], np.float64)).max() for k in params]
        assert max(moved) < 10 * RATE  # the root of 10 for Adam and RMSprop, and rounding
        params, state = new, after
    figures(name, steps=STEPS, skipped=skipped)
