"""`update_if_finite`: optimizers x laws, models of all kinds, sharding, and the micro-batches of `optax.MultiSteps`."""

import functools
from collections.abc import Callable
from typing import NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_same_bits, dtypes
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
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam, hyperparam_dtype=jnp.float32)(SCHEDULE),
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


def parameters(dtype):
    rng = np.random.default_rng(0)
    return {"w": jnp.asarray(rng.normal(size=(8, 4)), dtype), "b": jnp.asarray(rng.normal(size=4), dtype)}


def gradients(step, like):
    rng = np.random.default_rng(step + 1)
    return {name: rng.normal(size=p.shape).astype(np.float32) for name, p in sorted(like.items())}


def spoilt(array, value):
    """An array with one bad entry."""
    array = array.copy()
    array[5, 0] = value
    return array


class Compiled(NamedTuple):
    optimizer: optax.GradientTransformation
    step: Callable
    traces: list


@functools.cache
def compiled(name, params_dtype, moments_dtype):
    """A step with all that changes as an argument, which gives what `update_if_finite` and what Optax makes of it."""
    optimizer, traces = OPTIMIZERS[name](), []

    @jax.jit
    def step(params, opt_state, grads, finite):
        traces.append(name)
        extra = {"value": jnp.float32(1.0)} if "plateau" in name else {}
        updates, new_state = optimizer.update(grads, opt_state, params, **extra)
        expected = optax.apply_updates(params, updates), new_state
        return jaxamp.update_if_finite(params, optimizer, opt_state, grads, finite, **extra), expected

    return Compiled(optimizer, step, traces)


table = pytest.mark.parametrize("name", OPTIMIZERS)
# Gradients are float32, as from `dynamic_scale_grad`, and so are moments, whatever the parameters are.
LOW = "adamw_warmup_cosine clip_adam multi_steps apply_if_finite adafactor reduce_on_plateau typed_key".split()
table_and_dtypes = pytest.mark.parametrize(
    ("name", "dtype"), [*((name, "float32") for name in OPTIMIZERS), *((name, "bfloat16") for name in LOW)]
)


@table_and_dtypes
@pytest.mark.promotes
def test_a_finite_step_is_the_step_that_optax_takes(name, dtype):
    optimizer, step, traces = compiled(name, dtype, "float32")
    params = parameters(dtype)
    opt_state = optimizer.init(jaxamp.cast_floating(params, jnp.float32))
    for i in range(3):
        after, (new_params, new_state) = step(params, opt_state, gradients(i, params), jnp.array(True))
        new_state = jaxamp.cast_floating_like(new_state, opt_state)  # Adafactor's would go with the parameters' dtype
        assert_same_bits(after, (new_params, new_state))
        params, opt_state = after
    assert float(jnp.abs(params["w"] - parameters(dtype)["w"]).max()) > 0
    assert len(traces) == 1


@table_and_dtypes
@pytest.mark.promotes
def test_a_skipped_step_leaves_no_trace_and_compiles_nothing(name, dtype):
    optimizer, step, traces = compiled(name, dtype, "float32")
    params = parameters(dtype)
    opt_state = optimizer.init(jaxamp.cast_floating(params, jnp.float32))
    types = dtypes((params, opt_state))
    for i in range(3):
        grads = gradients(i, params)
        for w in (grads["w"], spoilt(grads["w"], np.nan), spoilt(grads["w"], np.inf)):
            after, _ = step(params, opt_state, {**grads, "w": w}, jnp.array(False))
            assert_same_bits(after, (params, opt_state))
        (params, opt_state), _ = step(params, opt_state, grads, jnp.array(True))
        assert dtypes((params, opt_state)) == types
    assert len(traces) == 1


@table
@pytest.mark.promotes
def test_a_run_with_skipped_steps_is_the_run_without_them(name):
    """Schedules, noise and micro-batches go on where they were."""
    optimizer, step, _ = compiled(name, "float32", "float32")
    results = []
    for finites in ([True] * 4, [False, True, True, False, False, True, True]):
        params = parameters("float32")
        opt_state, taken = optimizer.init(params), 0
        for finite in finites:
            grads = gradients(taken, params)
            grads = grads if finite else {**grads, "w": spoilt(grads["w"], np.nan)}
            (params, opt_state), _ = step(params, opt_state, grads, jnp.array(finite))
            taken += finite
        results.append((params, opt_state))
    assert_same_bits(*results)


@pytest.mark.parametrize("name", "sgd_momentum adam partition multi_steps lion adafactor inject_hyperparams".split())
@pytest.mark.promotes
def test_moments_keep_their_dtype_whatever_that_of_the_gradients(name):
    """Optax alone would widen some of them in the first step, and compile the second one again."""
    optimizer, step, traces = compiled(name, "bfloat16", "bfloat16")
    params = parameters("bfloat16")
    opt_state = optimizer.init(params)
    types = dtypes((params, opt_state))
    assert "bfloat16" in dtypes(opt_state)
    for i in range(3):
        grads = gradients(i, params)
        after, _ = step(params, opt_state, grads, jnp.array(False))
        assert_same_bits(after, (params, opt_state))
        (new_params, new_state), expected = step(params, opt_state, grads, jnp.array(True))
        assert_same_bits((new_params, new_state), (expected[0], jaxamp.cast_floating_like(expected[1], opt_state)))
        params, opt_state = new_params, new_state
        assert dtypes((params, opt_state)) == types
    assert len(traces) == 1


# -- what an optimizer sees


@pytest.mark.promotes
def test_a_schedule_counts_the_steps_that_were_taken():
    optimizer = optax.sgd(optax.piecewise_constant_schedule(1.0, {2: 0.5}))
    params, rates = {"w": jnp.zeros(())}, []
    opt_state = optimizer.init(params)
    for finite in (True, False, True, False, False, True):
        new, opt_state = jaxamp.update_if_finite(params, optimizer, opt_state, {"w": jnp.ones(())}, finite)
        rates.append(float(params["w"] - new["w"]))
        params = new
    assert rates == [1.0, 0.0, 1.0, 0.0, 0.0, 0.5]
    assert int(opt_state[1].count) == 3


@pytest.mark.parametrize("norm", [0.5, 10.0])
@pytest.mark.promotes
def test_clipping_sees_unscaled_gradients(norm):
    """A gradient of (3, 4) / 5 times `norm`, clipped to a norm of 1, at a scale of 1024."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))
    slope, params = jnp.array([0.6, 0.8]) * norm, jnp.zeros(2)
    grad_fn = jaxamp.dynamic_scale_grad(lambda w: jnp.dot(slope, w))

    @jax.jit
    def step(params):
        state, grads = grad_fn(params, dynamic_scaler_state=jaxamp.DynamicScalerState(scaler=1024.0))
        return jaxamp.update_if_finite(params, optimizer, optimizer.init(params), grads, state.finite)

    params, _ = step(params)
    np.testing.assert_allclose(params, -np.array([0.6, 0.8]) * min(norm, 1.0), rtol=1e-6)


@pytest.mark.promotes
@pytest.mark.parametrize("form", [lambda multi: multi, lambda multi: multi.gradient_transformation()])
def test_extra_arguments_reach_an_optimizer_within_multi_steps(form):
    """Optax drops them on the way to what is no `GradientTransformationExtraArgs`."""
    optimizer = form(optax.MultiSteps(plateau(), 1))

    @jax.jit
    def step(params, opt_state, value):
        return jaxamp.update_if_finite(params, optimizer, opt_state, params, True, value=value)

    params = parameters("float32")
    opt_state = optimizer.init(params)
    for value in (3.0, 2.5):
        params, opt_state = step(params, opt_state, jnp.float32(value))
        assert float(opt_state.inner_opt_state[1].best_value) == value


def test_an_optimizer_that_takes_no_extra_arguments_is_not_given_any():
    model = {"w": jnp.ones(2)}
    optimizer = optax.sgd(0.5)
    new, _ = jaxamp.update_if_finite(model, optimizer, optimizer.init(model), model, True, value=jnp.float32(1.0))
    assert_same_bits(new, {"w": jnp.full(2, 0.5)})


# -- models


class Model(eqx.Module):
    weight: jax.Array
    half: jax.Array
    table: jax.Array
    host: np.ndarray
    activation: object
    name: str
    bias: None
    scale: float

    def __call__(self, x):
        return self.activation(x @ self.weight + self.half.astype(x.dtype) + self.table.sum() + self.host)


def model():
    return Model(
        weight=jnp.full((2, 2), 0.5),
        half=jnp.ones(2, jnp.bfloat16),
        table=jnp.arange(3, dtype=jnp.float32).astype(jnp.int32),
        host=np.ones(2, np.float32),
        activation=jax.nn.relu,
        name="model",
        bias=None,
        scale=2.0,
    )


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.promotes
def test_only_the_floating_point_arrays_of_a_module_move(finite):
    optimizer, before = optax.adam(0.5), model()
    opt_state = optimizer.init(eqx.filter(before, eqx.is_inexact_array))
    grad_fn = jaxamp.dynamic_scale_grad(lambda m, x: m(x).sum())

    @eqx.filter_jit
    def step(m, opt_state, x, finite):
        state, grads = grad_fn(m, x, dynamic_scaler_state=jaxamp.DynamicScalerState())
        return jaxamp.update_if_finite(m, optimizer, opt_state, grads, state.finite & finite)

    after, new_state = step(before, opt_state, jnp.ones((4, 2)), jnp.array(finite))
    moved = ("weight", "half", "host")
    for name in moved:
        expected = getattr(before, name) - 0.5 * finite  # Adam's first step is its learning rate
        assert getattr(after, name).dtype == getattr(before, name).dtype
        np.testing.assert_allclose(getattr(after, name).astype(np.float32), expected.astype(np.float32), atol=1e-5)
    rest = [name for name in Model.__dataclass_fields__ if name not in moved]
    assert_same_bits([getattr(after, name) for name in rest], [getattr(before, name) for name in rest])
    assert dtypes(new_state) == dtypes(opt_state)


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16, np.float16])
def test_parameters_in_numpy_arrays_are_parameters(dtype):
    params, optimizer = {"w": np.ones(2, dtype)}, optax.sgd(0.5)
    after, _ = jaxamp.update_if_finite(params, optimizer, optimizer.init(params), {"w": np.ones(2, dtype)}, True)
    assert_same_bits(after, {"w": jnp.full(2, 0.5, dtype)})


def test_gradients_by_integers_are_ignored():
    """`jax.grad` with `allow_int` gives them as float0."""
    params, optimizer = {"w": jnp.ones(2), "n": jnp.arange(2)}, optax.sgd(0.5, momentum=0.5)
    grad_fn = jaxamp.dynamic_scale_grad(lambda p: p["w"].sum(), filter=False, allow_int=True)

    @jax.jit
    def step(params, opt_state):
        state, grads = grad_fn(params, dynamic_scaler_state=jaxamp.DynamicScalerState())
        return jaxamp.update_if_finite(params, optimizer, opt_state, grads, state.finite)

    after, _ = step(params, optimizer.init(eqx.filter(params, eqx.is_inexact_array)))
    assert_same_bits(after, {"w": jnp.full(2, 0.5), "n": jnp.arange(2)})


def test_frozen_parts_without_gradients_stay():
    params, optimizer = {"w": jnp.ones(2), "frozen": jnp.ones(2)}, optax.sgd(0.5)
    grads = {"w": jnp.ones(2), "frozen": None}
    after, _ = jaxamp.update_if_finite(params, optimizer, optimizer.init(params), grads, True)
    assert_same_bits(after, {"w": jnp.full(2, 0.5), "frozen": jnp.ones(2)})


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.promotes
def test_parameters_and_state_can_be_donated(finite):
    optimizer = optax.adam(0.1)
    step = functools.partial(jaxamp.update_if_finite, optimizer=optimizer)
    call = lambda params, opt_state, grads, finite: step(params, opt_state=opt_state, grads=grads, finite=finite)
    params, grads = parameters("bfloat16"), gradients(0, parameters("bfloat16"))
    opt_state = optimizer.init(params)
    expected = jax.jit(call)(params, opt_state, grads, finite)
    actual = jax.jit(call, donate_argnums=(0, 1))(params, opt_state, grads, finite)  # a useless donation would warn
    assert all(x.is_deleted() for x in jax.tree.leaves((params, opt_state)))
    assert_same_bits(actual, expected)


# -- sharding

# Small integers and powers of two: sums are exact in any order, so that bits can be compared.
X = np.random.default_rng(0).integers(-1, 2, (16, 8)).astype(np.float32)
Y = np.random.default_rng(1).integers(-2, 3, (16, 4)).astype(np.float32)
WEIGHTS = {"w": np.zeros((8, 4), np.float32), "b": np.zeros(4, np.float32)}


def square_loss(params, x, y):
    return jnp.sum((x @ params["w"] + params["b"] - y) ** 2) / 16


@functools.partial(jax.jit, static_argnums=0)
def training_step(optimizer, params, opt_state, state, x, y):
    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(square_loss))
    state, grads = grad_fn(params, x, y, dynamic_scaler_state=state)
    return *jaxamp.update_if_finite(params, optimizer, opt_state, grads, state.finite), state


@pytest.mark.parametrize("kind", [jax.sharding.AxisType.Auto, jax.sharding.AxisType.Explicit])
def test_sharded_training_is_unsharded_training(kind):
    optimizer = optax.sgd(0.125, momentum=0.5)
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(kind, kind))
    spec = {"w": P(None, "model"), "b": P("model")}
    sharding = {name: NamedSharding(mesh, spec[name]) for name in spec}

    def run(put, put_batch):
        params = put(WEIGHTS)
        opt_state, state = optimizer.init(params), jaxamp.DynamicScalerState(scaler=256.0)
        for x in (X, spoilt(X, np.inf), X[::-1]):  # one bad example, on one device
            params, opt_state, state = training_step(optimizer, params, opt_state, state, put_batch(x), put_batch(Y))
        return params, opt_state, state

    expected = run(lambda tree: jax.tree.map(jnp.asarray, tree), jnp.asarray)
    with jax.set_mesh(mesh):
        batch = NamedSharding(mesh, P("data", None))
        actual = run(lambda tree: jax.device_put(tree, sharding), lambda x: jax.device_put(x, batch))
    assert_same_bits(actual, expected)
    for name in sharding:
        for array in (actual[0][name], actual[1][0].trace[name]):
            assert array.sharding.is_equivalent_to(sharding[name], array.ndim)
    assert (int(actual[2].total_resets), float(actual[2].scaler)) == (1, 128.0)
    assert float(jnp.abs(actual[0]["w"]).max()) > 0


# -- micro-batches


def micro_batches(k, rows=4):
    rng = np.random.default_rng(3)
    return [
        (rng.normal(size=(rows, 8)).astype(np.float32), rng.normal(size=(rows, 4)).astype(np.float32)) for _ in range(k)
    ]


def mean_loss(params, x, y):
    return jnp.mean((x @ params["w"] + params["b"] - y) ** 2)


def mean_gradient(params, x, y):
    """By hand, in float64."""
    w, b, x, y = (np.asarray(a, np.float64) for a in (params["w"], params["b"], x, y))
    residual = 2 * (x @ w + b - y) / y.size
    return {"w": x.T @ residual, "b": residual.sum(0)}


def accumulating(k, loss, optimizer=None, **options):
    multi = optax.MultiSteps(optax.sgd(0.5) if optimizer is None else optimizer, k)
    grad_fn = jaxamp.dynamic_scale_grad(loss, **options)

    @jax.jit
    def step(carry, batch):
        params, opt_state, state = carry
        state, grads = grad_fn(params, *batch, dynamic_scaler_state=state)
        carry = *jaxamp.update_if_finite(params, multi, opt_state, grads, state.finite), state
        return carry, state.scaler

    def start(**fields):
        params = jax.tree.map(jnp.asarray, WEIGHTS)
        return params, multi.init(params), jaxamp.DynamicScalerState(accumulate=k, **fields).as_arrays()

    return start, step


@pytest.mark.promotes
def test_finite_micro_batches_are_one_step_on_the_whole_batch():
    batches = micro_batches(4)
    start, step = accumulating(4, mean_loss)
    carry = start()
    for i, batch in enumerate(batches):
        assert_same_bits(carry[0], start()[0])
        carry, _ = step(carry, batch)
        assert int(carry[1].mini_step) == int(carry[2].micro) == (i + 1) % 4
    whole = mean_gradient(WEIGHTS, *(np.concatenate(part) for part in zip(*batches)))
    for name in WEIGHTS:  # float32 means of four, each of values of about one
        np.testing.assert_allclose(carry[0][name], -0.5 * whole[name], rtol=0, atol=1e-6)
    assert int(carry[1].gradient_step) == int(carry[2].count) == 1


@pytest.mark.promotes
def test_the_scale_is_raised_between_optimizer_steps_only():
    """Patience is in optimizer steps: the second one raises, in whichever micro-batch it may have run out."""
    start, step = accumulating(3, mean_loss)
    carry, used = start(patience=1, scaler=8.0), []
    for batch in micro_batches(3) * 5:
        used.append(float(carry[2].scaler))
        carry, _ = step(carry, batch)
    assert used == [8.0] * 6 + [16.0] * 6 + [32.0] * 3


@pytest.mark.promotes
@pytest.mark.parametrize("bad", [0, 1, 2])
def test_a_window_goes_on_after_a_bad_micro_batch(bad):
    good = micro_batches(3)
    batches = [*good[:bad], (good[0][0] * np.inf, good[0][1]), *good[bad:]]
    start, step = accumulating(3, mean_loss)
    carry = start(scaler=8.0)
    for i, batch in enumerate(batches):
        before, (carry, scale) = carry, step(carry, batch)
        assert float(scale) == (8.0 if i < bad else 4.0)
        if i == bad:
            assert_same_bits(carry[:2], before[:2])
            assert int(carry[2].micro) == int(before[2].micro) == bad
    assert (int(carry[1].mini_step), int(carry[1].gradient_step), int(carry[2].micro)) == (0, 1, 0)
    means = [mean_gradient(WEIGHTS, *batch) for batch in good]
    for name in WEIGHTS:  # float32 means of three
        expected = -0.5 * np.mean([grads[name] for grads in means], axis=0)
        np.testing.assert_allclose(carry[0][name], expected, rtol=0, atol=1e-6)


@pytest.mark.promotes
def test_a_micro_batch_made_anew_at_a_smaller_scale_counts_in_its_window():
    """float16 overflows at the first scale; the gradients that come in the end are exact."""
    start, step = accumulating(2, jaxamp.amp(square_loss), redo_on_nan=6)
    carry = start(scaler=2.0**20)
    for half in (slice(0, 8), slice(8, 16)):
        carry, _ = step(carry, (X[half], Y[half]))
    expected = jax.tree.map(lambda g: -0.5 * g / 2, jax.grad(square_loss)(jax.tree.map(jnp.asarray, WEIGHTS), X, Y))
    assert_same_bits(jax.tree.map(lambda x: x + 0.0, carry[0]), jax.tree.map(lambda x: x + 0.0, expected))
    assert int(carry[2].total_redos) == int(carry[2].total_resets) > 0
    assert (int(carry[1].gradient_step), int(carry[2].skipped), int(carry[2].count)) == (1, 0, 1)


@pytest.mark.promotes
def test_micro_batches_in_a_scan():
    """Means of two small integers are exact: a loop and a scan agree on bits, whatever is fused."""
    start, step = accumulating(2, jaxamp.amp(square_loss), optax.sgd(0.125, momentum=0.5))
    bad = spoilt(X, np.inf)[4:8]
    xs = np.stack([X[:4], X[4:8], X[8:12], bad, X[12:]])
    ys = np.stack([Y[:4], Y[4:8], Y[8:12], Y[4:8], Y[12:]])
    fields = {"patience": 1, "scaler": 64.0}
    carry, scales = start(**fields), []
    for batch in zip(xs, ys):
        carry, scale = step(carry, batch)
        scales.append(scale)
    scanned, scanned_scales = jax.jit(functools.partial(lax.scan, step))(start(**fields), (xs, ys))
    assert_same_bits(scanned, carry)
    assert_same_bits(scanned_scales, jnp.stack(scales))
    assert scanned_scales.tolist() == [64.0, 64.0, 64.0, 32.0, 32.0]
    assert int(scanned[1].gradient_step) == 2


# -- bad input

PARAMS, SGD = {"w": jnp.ones(2)}, optax.sgd(0.1, momentum=0.9)


@pytest.mark.parametrize("finite", [1.0, jnp.array([True]), None])
def test_a_condition_that_is_not_one_bool_is_refused(finite):
    with pytest.raises(
        TypeError, match=r"update_if_finite got a condition of .*; expected one bool. Write update_if_fin"
    ):
        jaxamp.update_if_finite(PARAMS, SGD, SGD.init(PARAMS), PARAMS, finite)


def test_the_scalers_state_is_not_the_condition():
    with pytest.raises(
        TypeError, match=r"got a DynamicScalerState as its condition; expected one bool. Write state.fin"
    ):
        jaxamp.update_if_finite(PARAMS, SGD, SGD.init(PARAMS), PARAMS, jaxamp.DynamicScalerState())


def test_gradients_of_another_structure_are_refused():
    with pytest.raises(TypeError, match=r"got gradients of the structure .*; expected .* Pass what dynamic_scale_grad"):
        jaxamp.update_if_finite(PARAMS, SGD, SGD.init(PARAMS), (PARAMS, "aux"), True)


def test_what_is_no_optimizer_and_no_gradients_are_refused():
    with pytest.raises(TypeError, match=r"got 3, of type int, as the optimizer; expected one of Optax.* Write update_"):
        jaxamp.update_if_finite(PARAMS, 3, SGD.init(PARAMS), PARAMS, True)
    with pytest.raises(TypeError, match=r"got no gradients; expected those of the model. Write update_if_finite"):
        jaxamp.update_if_finite(PARAMS, SGD, SGD.init(PARAMS), None, True)


@pytest.mark.parametrize("other", [lambda: None, lambda: optax.adam(0.1).init(PARAMS), lambda: PARAMS])
def test_the_state_of_another_optimizer_is_refused(other):
    optimizer = optax.adamw(0.1, weight_decay=0.1)
    with pytest.raises(TypeError, match=r"got an optimizer state of the structure .*; expected .*Adam.* Initialise"):
        jaxamp.update_if_finite(PARAMS, optimizer, other(), PARAMS, True)


def test_a_state_made_with_other_leaves_is_refused():
    model = {"w": jnp.ones(2), "n": jnp.arange(2)}
    with pytest.raises(
        TypeError, match=r"got an optimizer state of the structure .*; expected .* Initialise with optimi"
    ):
        jaxamp.update_if_finite(model, SGD, SGD.init(model), {"w": jnp.ones(2), "n": None}, True)
