"""The steps of compressed optimizers: beside Optax in float32, at hazards, skipped, on odd leaves, and wrong input."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, assert_same_bits, raises
from optimizers import ADAMW, PAIRS, distance, gradients, slowly, tree, wide

import jaxamp
from jaxamp import optim
from jaxamp.optim import Storage

PUBLISHED = Storage(scales="float16", codes="published", dither=False, variance_floor=False)
PLAIN = Storage(quantize=False, master_weight_bits=None)
weights_of = jax.jit(optim.float32_weights)


def run(optimizer, params, steps, grads=gradients, **kwargs):
    state, step = optimizer.init(params), jax.jit(optimizer.step)
    for i in range(steps):
        params, state = step(params, state, grads(params, i), **kwargs)
    return params, state


def run_optax(optimizer, params, steps, grads=gradients):
    state, update = optimizer.init(params), jax.jit(optimizer.update)
    for i in range(steps):
        updates, state = update(grads(params, i), state, params)
        params = optax.apply_updates(params, updates)
    return params, state


# -- beside Optax in float32


@pytest.mark.parametrize("name", slowly([(name,) for name in PAIRS], [("adamw",), ("nesterov",), ("lion",)]))
@pytest.mark.promotes
def test_uncompressed_it_is_optax(name):
    ours, theirs, options = PAIRS[name]
    params = tree(F32)
    got, _ = run(ours(1e-2, storage=PLAIN, **options), params, 20)
    expected, _ = run_optax(theirs(1e-2, **options), params, 20)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=2e-5, atol=2e-6)


DTYPES = [(name, BF16) for name in PAIRS] + [(name, dtype) for name in ("adamw", "lion") for dtype in (F16, F32)]


@pytest.mark.parametrize(("name", "dtype"), slowly(DTYPES, [("adamw", BF16), ("lion", F16)]))
@pytest.mark.promotes
def test_compressed_it_is_optax_within_the_codecs_error(name, dtype):
    """Over 200 steps, as a share of the way: 2 %, and for Lion, whose steps are signs, 5 %."""
    ours, theirs, options = PAIRS[name]
    params = tree(dtype)
    start = wide(params)
    got = weights_of(*run(ours(3e-3, **options), params, 200))
    expected, _ = run_optax(theirs(3e-3, **options), start, 200)
    assert distance(got, expected) <= (0.05 if name == "lion" else 0.02) * distance(expected, start)


@pytest.mark.promotes
def test_a_correction_is_what_keeps_small_updates():
    params = {"w": tree(BF16)["w"]}
    expected, _ = run_optax(optax.adamw(1e-4), wide(params), 100)
    errors = {}
    for bits in (None, 24, 32):
        optimizer = optim.flash_adamw(1e-4, storage=Storage(master_weight_bits=bits))
        errors[bits] = distance(weights_of(*run(optimizer, params, 100)), expected)
    assert errors[32] < errors[24] < errors[None] / 5


@pytest.mark.promotes
def test_l2_decay_is_a_part_of_the_gradient():
    params = {"w": tree(F32)["w"]}
    got, _ = run(optim.flash_adam(1e-2, weight_decay=0.1, storage=PLAIN), params, 5)
    chained = optax.chain(optax.add_decayed_weights(0.1), optax.adam(1e-2))
    expected, _ = run_optax(chained, params, 5)
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-6)


def test_sgdw_decays_apart_from_the_gradient_and_dampens():
    p, g = jnp.full(4, 2.0), jnp.full(4, 0.5)
    optimizer = optim.flash_sgdw(0.1, momentum=0.9, dampening=0.5, weight_decay=0.2, storage=PLAIN)
    got, state = jax.jit(optimizer.step)(p, optimizer.init(p), g)
    np.testing.assert_allclose(got, 2.0 * (1 - 0.1 * 0.2) - 0.1 * 0.25, rtol=1e-6)
    np.testing.assert_allclose(state.mu, 0.25)


# -- hazards of the published format


def longest_step(optimizer, decades, active):
    """Over the learning rate, where groups have gradients of many magnitudes and a share of them is active."""
    rng = np.random.default_rng(0)
    size = 10.0 ** -rng.uniform(0, decades, (64, 64))
    params = jnp.asarray(np.zeros((64, 64), np.float32))
    state, longest, step = optimizer.init(params), 0.0, jax.jit(optimizer.step)
    for _ in range(60):
        grads = np.float32(size * rng.normal(size=size.shape) * (rng.uniform(size=(64, 1)) < active))
        moved, state = step(params, state, grads)
        longest = max(longest, np.abs(moved).max())
    return longest


def test_no_step_is_long_where_gradients_span_decades():
    """Adam in float32 takes none above 1 there."""
    optimizer = optim.flash_adam(1.0)
    for decades, active in ((1, 1.0), (3, 1.0), (5, 1.0), (5, 0.3)):
        assert 1.0 < longest_step(optimizer, decades, active) <= 3.0
    published = optim.flash_adam(1.0, storage=PUBLISHED)
    assert longest_step(published, 5, 1.0) > 30  # so that this test is known to see it


def lengths(optimizer, g, steps):
    """The length of each step with a constant gradient."""

    params = jnp.zeros((len(g), 32))
    grads = jnp.broadcast_to(jnp.asarray(g, F32)[:, None], params.shape)

    def step(state, _):
        new, state = optimizer.step(params, state, grads)
        return state, -new[:, 0]

    return np.asarray(jax.jit(lambda s: jax.lax.scan(step, s, length=steps)[1])(optimizer.init(params)))


def test_step_lengths_are_adams_for_gradients_of_all_magnitudes():
    """Within 1 %, at any number of steps: moments of a constant gradient are it and its square, bias corrected."""
    g = np.array([1e-8, 1e-7, 3e-7, 1e-6, 3e-6, 1e-5, 1e-3, 1.0, 1e2, 1e4])
    got = lengths(optim.flash_adam(1.0), g, 3000)
    assert np.abs(got / (g / (g + 1e-8)) - 1).max() < 0.01


def test_float16_scales_miss_by_far():
    """The test above would see it, for small gradients at once and for others after many steps."""
    published = optim.flash_adam(1.0, storage=PUBLISHED)
    got = np.abs(lengths(published, [3e-6, 1.0], 3000) - 1)
    assert got[:60, 0].max() > 1
    assert got[:, 1].max() > 0.15


# -- scale and ok


def test_gradients_are_multiplied_by_scale():
    params = {"w": tree(BF16)["w"]}
    grads, state, step = gradients(params, 0), ADAMW.init(params), jax.jit(ADAMW.step)
    scaled = jax.tree.map(lambda g: np.float32(1024) * np.asarray(g), grads)
    assert_same_bits(step(params, state, scaled, scale=1 / 1024), step(params, state, grads, scale=1.0))


ALONE = Storage(together=0)
STORED = [
    ("adamw", Storage()),
    ("lion", PLAIN),
    ("sgd", Storage()),
    ("adam", ALONE),
    ("nesterov", ALONE),
    ("adamw", PLAIN),
]


@pytest.mark.parametrize(("name", "storage"), slowly(STORED, STORED[:3]))
def test_a_step_not_taken_leaves_every_bit(name, storage):
    ours, _, options = PAIRS[name]
    optimizer, params = ours(1e-2, storage=storage, **options), tree(BF16)
    step = jax.jit(lambda p, s, g: optimizer.step(p, s, g, scale=0.5, ok=jaxamp.all_finite(g)))
    state = optimizer.init(params)
    for i in range(3):
        params, state = step(params, state, gradients(params, i))
    assert int(state.count) == 3
    bad = gradients(params, 3)
    bad["w"] = np.array(bad["w"])
    bad["w"][2, 5] = np.nan
    assert_same_bits(step(params, state, bad), (params, state))
    taken = jax.jit(lambda *a: optimizer.step(*a, scale=0.5))(params, state, gradients(params, 3))
    for x, y in zip(*map(jax.tree.leaves, (step(params, state, gradients(params, 3))[0], taken[0])), strict=True):
        np.testing.assert_allclose(*(a.astype(F32) for a in (x, y)), rtol=2.0**-7)  # XLA may round two programs apart


@pytest.mark.parametrize(("name", "storage"), slowly(STORED, STORED[:3]))
def test_the_step_sees_by_itself_whether_gradients_are_finite(name, storage):
    ours, _, options = PAIRS[name]
    optimizer, params = ours(1e-2, storage=storage, **options), tree(BF16)
    step = jax.jit(lambda *args: optimizer.step_if_finite(*args, scale=0.5))
    state = optimizer.init(params)
    good = gradients(params, 0)
    *after, finite = step(params, state, good)
    assert bool(finite)
    assert_same_bits(tuple(after), jax.jit(lambda *a: optimizer.step(*a, scale=0.5, ok=True))(params, state, good))
    for where, value in (("w", np.nan), ("odd", np.inf), ("w", -np.inf)):
        bad = {key: np.array(g) for key, g in good.items()}
        bad[where][2, 5] = value
        *after, finite = step(params, state, bad)
        assert not bool(finite)
        assert_same_bits(tuple(after), (params, state))


def test_a_step_without_anything_to_step_is_finite():
    *_, finite = ADAMW.step_if_finite({"n": jnp.arange(3)}, ADAMW.init({"n": jnp.arange(3)}), {"n": None})
    assert bool(finite)


def test_steps_and_schedules_count_from_zero_and_skip_what_is_skipped():
    seen = []

    def schedule(count):
        seen.append(int(count))
        return 0.1

    optimizer, params = optim.flash_sgd(schedule), jnp.ones(32)
    state = optimizer.init(params)
    for ok in (True, False, True):
        params, state = optimizer.step(params, state, jnp.ones(32), ok=ok)
    assert seen == [0, 1, 1]
    assert int(state.count) == 2


# -- odd leaves


class Model(eqx.Module):
    weight: jax.Array
    norm: jax.Array
    scalar: jax.Array
    empty: jax.Array
    steps: jax.Array
    key: jax.Array
    none: None
    act: str = eqx.field(static=True)


def model():
    return Model(
        weight=jnp.ones((4, 64), BF16),
        norm=jnp.ones(7, F16),
        scalar=jnp.float32(2.0),
        empty=jnp.zeros((0, 3)),
        steps=jnp.int32(3),
        key=jax.random.key(0),
        none=None,
        act="relu",
    )


@pytest.mark.parametrize(
    ("name", "together"), slowly([("adamw", 65536), ("lion", 0), ("sgd", 65536)], [("adamw", 65536)])
)
def test_leaves_of_all_kinds(name, together):
    ours, _, options = PAIRS[name]
    optimizer, params = ours(0.1, storage=Storage(together=together), **options), model()
    grads = eqx.filter(params, eqx.is_inexact_array)
    state = optimizer.init(params)
    new, state = jax.jit(optimizer.step)(params, state, grads)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), new) == jax.tree.map(lambda x: (x.shape, x.dtype), params)
    for field in ("empty", "steps", "key"):
        assert_same_bits(getattr(new, field), getattr(params, field))
    for field in ("weight", "norm", "scalar"):
        assert np.asarray(getattr(new, field), np.float32).max() < np.asarray(getattr(params, field), np.float32).max()
    assert state.correction.scalar is None
    assert state.correction.norm.dtype == jnp.uint8  # of a float16
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    applied = jax.tree.map(lambda p, u: p if u is None else u, params, updates)
    assert jax.tree.structure(applied) == jax.tree.structure(params)


def test_updates_of_a_model_with_functions_are_applied_by_equinox():
    model = {"w": jnp.ones(32), "act": jax.nn.relu, "key": jax.random.key(0), "n": jnp.int32(3), "none": None}
    grads = eqx.filter(model, eqx.is_inexact_array)
    updates, _ = eqx.filter_jit(ADAMW.update)(grads, ADAMW.init(model), model)
    new = eqx.apply_updates(model, updates)
    assert (new["act"], new["none"], int(new["n"])) == (jax.nn.relu, None, 3)
    assert float(new["w"][0]) < 1
    assert optim.optimizer_bytes(ADAMW, model) == optim.optimizer_bytes(ADAMW, grads)


def test_a_leaf_without_a_gradient_stays():
    params = {"w": jnp.ones(32), "frozen": jnp.ones(32)}
    state = ADAMW.init(params)
    new, after = jax.jit(ADAMW.step)(params, state, {"w": jnp.ones(32), "frozen": None})
    assert_same_bits((new["frozen"], after.mu["frozen"]), (params["frozen"], state.mu["frozen"]))
    assert float(new["w"][0]) < 1


def test_an_empty_tree_has_an_empty_state():
    params, state = ADAMW.step({}, ADAMW.init({}), {})
    assert params == {}
    assert int(state.count) == 1


@pytest.mark.parametrize("layout", slowly([("last",), ("rows",), ("flat",)], [("rows",)]))
def test_layouts_take_the_same_steps_within_the_codecs_error(layout):
    shapes = (64, 96), (2, 64, 32), (33, 5)
    params = {str(shape): jnp.asarray(np.zeros(shape, np.float32)) for shape in shapes}
    got, _ = run(optim.flash_adamw(1e-2, storage=Storage(layout=layout)), params, 20)
    expected, _ = run(optim.flash_adamw(1e-2, storage=PLAIN), params, 20)
    assert distance(got, expected) <= 0.02 * distance(expected, params)


@pytest.mark.parametrize(
    ("name", "group_size"), slowly([("adamw", 48), ("nesterov", 32), ("sgd", 32)], [("adamw", 48)])
)
def test_small_leaves_put_together_are_what_they_are_alone(name, group_size):
    ours, _, options = PAIRS[name]
    params = {"a": tree(BF16), "b": tree(F32, 4)["odd"], "c": jnp.float32(2.0)}
    results = [
        run(ours(1e-2, storage=Storage(together=n, group_size=group_size), **options), params, 4) for n in (0, 65536)
    ]
    assert_same_bits(*results)


def test_large_arrays_are_not_padded_where_an_axis_is_divisible():
    shapes = {"rows": (96, 1000), "last": (1000, 96), "small": (64, 10), "neither": (1001, 99)}
    state = jax.eval_shape(optim.flash_lion(1e-3).init, {k: jax.ShapeDtypeStruct(s, BF16) for k, s in shapes.items()})
    found = {name: scales.shape for name, scales in state.scales.items()}
    assert found == {"rows": (1, 3, 1000), "last": (1, 1000, 3), "small": (1, 20), "neither": (1, 3097)}


def test_no_second_step_is_traced():
    traces = []

    @jax.jit
    def step(params, state, grads):
        traces.append(1)
        return ADAMW.step(params, state, grads)

    params = {"w": tree(BF16)["w"]}
    state = ADAMW.init(params)
    for i in range(3):
        params, state = step(params, state, gradients(params, i))
    assert len(traces) == 1


def test_two_steps_compiled_as_one_are_two_steps():
    optimizer, params = optim.flash_adamw(1e-2, storage=Storage(scales="float16")), {"w": tree(F16)["w"]}
    g = [gradients(params, i) for i in range(2)]
    two = jax.jit(lambda p, s: optimizer.step(*optimizer.step(p, s, g[0]), g[1]))
    state = optimizer.init(params)
    step = jax.jit(optimizer.step)
    once = step(*step(params, state, g[0]), g[1])
    got = two(params, state)
    np.testing.assert_allclose(
        *(np.concatenate([np.ravel(x) for x in jax.tree.leaves(weights_of(*r))]) for r in (got, once)),
        rtol=1e-5,
    )


# -- groups of parameters


def test_the_first_group_that_selects_a_leaf_is_its():
    params = {"w": jnp.ones(32), "bias": jnp.ones(32), "norm": {"g": jnp.ones(32), "bias": jnp.ones(32), "n": None}}
    groups = [
        {"params": "norm/bias", "learning_rate": 0.0},
        {"params": ["bias", ("norm", "g")], "weight_decay": 0.0, "quantize": False},
        {"params": lambda path, leaf: leaf.ndim > 5, "learning_rate": 1e6},
    ]
    optimizer = optim.flash_adamw(0.1, weight_decay=1.0, param_groups=groups)
    state = optimizer.init(params)
    new, _ = jax.jit(optimizer.step)(params, state, jax.tree.map(jnp.zeros_like, params))
    got = {"/".join(str(k.key) for k in path): float(x[0]) for path, x in jax.tree.leaves_with_path(new)}
    assert got == pytest.approx({"w": 0.9, "bias": 1.0, "norm/g": 1.0, "norm/bias": 1.0})
    assert [state.mu[name].dtype for name in ("w", "bias")] == [jnp.uint8, F32]


# -- bad input


@pytest.mark.parametrize("size", [0, -32, 1.5, True])
def test_a_group_size_that_is_none_is_refused(size):
    with raises(ValueError, "Storage got group_size=", "expected a positive integer", r"Storage\(group_size=32\)"):
        Storage(group_size=size)


def test_a_number_of_entries_that_is_none_is_refused():
    with raises(ValueError, "Storage got together=-1; expected a number of entries", r"Write Storage\(together=0\)"):
        Storage(together=-1)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"master_weight_bits": 16}, ["master_weight_bits=16", "expected one of 'auto', None, 24, 32"]),
        ({"scales": "bfloat16"}, ["scales='bfloat16'", "expected one of 'wide', 'float16'"]),
        ({"layout": "first"}, ["layout='first'", "expected one of 'last', 'rows', 'flat'"]),
    ],
)
def test_options_that_there_are_not_are_refused(options, words):
    with raises(ValueError, "Storage got", *words, "Leave it out"):
        Storage(**options)


@pytest.mark.parametrize("dtype", [jnp.float8_e4m3fn, jnp.complex64])
def test_a_dtype_that_is_not_served_is_refused_by_name(dtype):
    params = {"layer": {"w": jnp.ones(32, BF16), "v": jnp.zeros(32).astype(dtype)}}
    with raises(
        TypeError, "flash_lion got the parameter 'layer/v' in", "expected bfloat16, float16 or float32", "Cast"
    ):
        optim.flash_lion(1e-3).init(params)


@pytest.mark.parametrize("bits", [24, 32])
def test_a_correction_that_no_parameter_can_have_is_refused(bits):
    optimizer = optim.flash_adamw(1e-3, storage=Storage(master_weight_bits=bits))
    with raises(
        ValueError, f"in flash_adamw, master_weight_bits={bits} has no effect", "such as 'w'; expected", "Write"
    ):
        optimizer.init({"w": jnp.ones(32)})
    state = optimizer.init({"w": jnp.ones(32), "v": jnp.ones(32, F16)})
    assert state.correction["w"] is None
    groups = [{"params": "v", "master_weight_bits": bits}, {"params": "w", "master_weight_bits": bits}]
    optimizer = optim.flash_adamw(1e-3, param_groups=groups)
    argument = r"param_groups\[1\]\['master_weight_bits'\]"
    with raises(ValueError, f"{argument}={bits} has no effect", "such as 'w'; expected", "Write"):
        optimizer.init({"w": jnp.ones(32), "v": jnp.ones(32, F16)})


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Storage(quantize="a"), ["Storage got quantize='a', of type str; expected True or False", "Write"]),
        (lambda: Storage(dither=None), ["Storage got dither=None", "expected True or False", "Write"]),
        (lambda: Storage(codes="linear"), ["codes='linear'", "expected one of 'minifloat', 'published'", "Leave"]),
        (lambda: optim.flash_adamw(1e-3, param_groups=3), ["param_groups=3", "expected a list of dicts", "Write"]),
        (lambda: optim.flash_adamw(1e-3, b1=1.5), ["b1=1.5; expected a number that is at least 0 and less", "Write"]),
        (lambda: optim.flash_adamw(1e-3, b2=float("nan")), ["b2=nan; expected a number", "Write"]),
        (lambda: optim.flash_adamw(1e-3, eps=-1.0), ["eps=-1.0; expected a number that is 0 or more", "Write"]),
        (lambda: optim.flash_sgd(float("inf")), ["learning_rate=inf; expected a number that is finite", "Write"]),
        (lambda: optim.optimizer_bytes(3, {}), ["optimizer_bytes got 3, of type int; expected an Optax", "Write"]),
        (lambda: optim.from_float32(ADAMW, {}, like={}), ["from_float32 got dict; expected a Float32", "Pass what"]),
        (
            lambda: optim.flash_adamw(1e-3, param_groups=[{"params": "bias"}]).init({"w": jnp.ones(32)}),
            [r"param_groups\[0\] with 'params' 'bias', which selects nothing; expected", "'w'", "Correct"],
        ),
        (
            lambda: ADAMW.step({"w": jnp.ones(32)}, ADAMW.init({"w": jnp.ones(32)}), {"w": jnp.ones(32)}, scale="a"),
            ["flash_adamw got scale='a', of type str; expected one number", "Write step"],
        ),
    ],
)
def test_bad_settings_are_refused_in_three_beats(make, words):
    with raises((TypeError, ValueError), *words):
        make()


def test_state_of_another_tree_is_refused_by_name():
    optimizer = optim.flash_adamw(1e-3)
    params, grads = {"a": jnp.ones(64), "b": jnp.ones(64)}, {"a": jnp.ones(64), "b": jnp.ones(64)}
    state = optimizer.init({"a": jnp.ones(64), "c": jnp.ones(64)})
    with raises(ValueError, "flash_adamw got a state whose mu is without a leaf for 'b'; expected", "optimizer.init"):
        optimizer.step(params, state, grads)
    state = optimizer.init({"a": jnp.ones(64), "b": jnp.ones((2, 32))})
    with raises(
        ValueError, r"got a state with mu \(2, 32\).* for 'b', which is of shape \(64,\) and in", "Write state"
    ):
        optimizer.step(params, state, grads)
    state = optim.flash_lion(1e-3).init(params)
    with raises(ValueError, "got a state with mu", "for 'a'", "expected mu and nu of that shape", "flash_adamw"):
        optimizer.step(params, state, grads)
    with raises(TypeError, "flash_adamw got tuple as its state; expected a FlashState", "Write state = "):
        optimizer.step(params, (), grads)


def test_state_that_a_leaf_can_not_have_is_refused():
    params = {"w": jnp.ones(32, BF16)}
    state = ADAMW.init(params)
    words = "flash_adamw got a state with", "for 'w'", "expected mu and nu of that shape in groups of 32"
    with raises(ValueError, "flash_adamw got 'w' in float32 and a correction for it; expected", "Write params ="):
        ADAMW.step({"w": jnp.ones(32)}, state, params)
    for missing in ("scales", "correction"):
        with raises(ValueError, *words, "with a correction.*Write state"):
            ADAMW.step(params, state._replace(**{missing: {"w": None}}), params)
    with raises(
        ValueError, r"with mu \(32,\) in int8, nu \(32,\) in uint8", "expected.*mu in uint8, nu in int8, scales"
    ):
        ADAMW.step(params, state._replace(mu=state.nu, nu=state.mu), params)


def test_gradients_of_another_tree_are_refused_by_name():
    optimizer, params = optim.flash_adamw(1e-3), {"a": jnp.ones(64), "b": jnp.ones(64)}
    state = optimizer.init(params)
    with raises(ValueError, "flash_adamw got gradients without a leaf for 'b'; expected", "Pass jax.grad"):
        optimizer.step(params, state, {"a": jnp.ones(64)})
    with raises(ValueError, r"a gradient of shape \(32,\) and dtype float32 for 'b'; expected floats of shape \(64,\)"):
        optimizer.step(params, state, {"a": jnp.ones(64), "b": jnp.ones(32)})


def test_a_schedule_of_the_wrong_shape_is_refused():
    optimizer = optim.flash_adamw(lambda count: jnp.ones(3))
    with raises(
        ValueError, r"flash_adamw got learning_rate of shape \(3,\) from its schedule; expected one", "Return a"
    ):
        optimizer.step(jnp.ones(32), optimizer.init(jnp.ones(32)), jnp.ones(32))


def test_a_schedule_that_returns_nothing_is_refused():
    optimizer = optim.flash_adamw(lambda count: None)
    with raises(ValueError, "flash_adamw got learning_rate=None from its schedule; expected one number", "Return a"):
        optimizer.step(jnp.ones(32), optimizer.init(jnp.ones(32)), jnp.ones(32))


def test_hyperparameters_that_are_none_are_refused():
    with raises(TypeError, "flash_adamw got b1='0.9', of type str; expected a number", "Write"):
        optim.flash_adamw(1e-3, b1="0.9")
    with raises(TypeError, "flash_sgd got learning_rate=None, of type NoneType; expected a number", "Write"):
        optim.flash_sgd(None)
    with raises(ValueError, r"flash_lion got learning_rate of shape \(2,\) as an argument; expected one number"):
        optim.flash_lion(jnp.ones(2))
    with raises(TypeError, "flash_adamw got b2 in bfloat16; expected float32", "hyperparam_dtype=jnp.float32"):
        optim.flash_adamw(1e-3, b2=jnp.asarray(0.999, BF16))
    with raises(TypeError, "flash_adamw got storage='last', of type str; expected a Storage", "Write"):
        optim.flash_adamw(1e-3, storage="last")
    for momentum, dampening in ((None, 0.0), (0.9, 0.5)):
        with raises(ValueError, "flash_sgd got nesterov=True with momentum=", "expected a momentum, and no dampening"):
            optim.flash_sgd(0.1, momentum=momentum, nesterov=True, dampening=dampening)
    with raises(ValueError, "flash_sgdw got nesterov=True with momentum=None", "expected a momentum, and no dampening"):
        optim.flash_sgdw(0.1, param_groups=[{"params": "w", "nesterov": True}])


def test_groups_that_select_nothing_or_set_nothing_are_refused():
    with raises(ValueError, r"flash_adamw got param_groups\[0\]", "expected a dict with 'params'", "Write"):
        optim.flash_adamw(1e-3, param_groups=[{"weight_decay": 0.0}])
    with raises(TypeError, r"flash_adamw got param_groups\[0\] with 'params' 3; expected a name, a path", "Write"):
        optim.flash_adamw(1e-3, param_groups=[{"params": 3, "weight_decay": 0.0}])
    with raises(ValueError, r"param_groups\[0\] with 'momentum'; expected arguments of flash_adamw", "Write"):
        optim.flash_adamw(1e-3, param_groups=[{"params": "w", "momentum": 0.0}])


def test_a_scale_and_a_flag_of_the_wrong_kind_are_refused():
    optimizer, params = optim.flash_adamw(1e-3), jnp.ones(32)
    state = optimizer.init(params)
    with raises(ValueError, r"flash_adamw got scale of shape \(32,\); expected one number", "scale=1 / loss_scale"):
        optimizer.step(params, state, params, scale=params)
    with raises(TypeError, "flash_adamw got a condition", "expected one bool", "ok=jaxamp.all_finite"):
        optimizer.step(params, state, params, ok=params > 0)
    with raises(
        ValueError, "flash_adamw got no parameters in update; expected them", r"update\(grads, state, params\)"
    ):
        optimizer.update(params, state)
