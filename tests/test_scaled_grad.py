"""The laws of scaled gradients: eagerly, under `jit`, and sharded over eight devices."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from program import equations, matmul_dtypes

import jaxamp
from jaxamp import DynamicScalerState

# -- three ways to run, and one problem whose gradient is known


def eagerly(fn):
    return fn


def jitted(fn):
    return eqx.filter_jit(fn)


def sharded(axis_type):
    """Parameters on each of eight devices, the batch divided between them."""

    def run(fn):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

        def placed(w, batch, **kwargs):
            w = jax.device_put(w, NamedSharding(mesh, P()))
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            return eqx.filter_jit(fn)(w, batch, **kwargs)

        return placed

    return run


WAYS = pytest.mark.parametrize(
    "way",
    [eagerly, jitted, sharded(AxisType.Auto), sharded(AxisType.Explicit)],
    ids=["eager", "jit", "sharded", "explicitly sharded"],
)


def batch_of(size=16, features=4, magnitude=0.25):
    """Small enough that gradients times 2**15 are float16 numbers."""
    random = np.random.default_rng(0)
    x = magnitude * random.standard_normal((size, features)).astype(np.float32)
    return jnp.asarray(x), jnp.asarray(magnitude * random.standard_normal(size).astype(np.float32))


W = jnp.asarray(np.random.default_rng(1).standard_normal(4).astype(np.float32))


def error(w, batch):
    x, y = batch
    return jnp.mean((x @ w[:, None] - y[:, None]) ** 2)


def oracle(w, batch):
    x, y, w = (np.asarray(a, np.float64) for a in (*batch, w))
    return 2 / len(x) * x.T @ (x @ w - y)


LOSS = jaxamp.amp(error)


def relative(found, expected):
    return np.linalg.norm(np.asarray(found, np.float64) - expected) / np.linalg.norm(expected)


def bits(x):
    return np.asarray(x).tobytes()


# -- the laws


@WAYS
@pytest.mark.parametrize("redo_on_nan", [0, 2])
def test_the_gradient_is_the_float32_one_within_float16(way, redo_on_nan):
    grad_fn = way(jaxamp.dynamic_scale_value_and_grad(LOSS, redo_on_nan=redo_on_nan))
    state, (value, grads) = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState())
    assert relative(grads, oracle(W, batch_of())) < 2**-9
    assert abs(float(value) - float(error(W, batch_of()))) < 2e-3 * abs(float(value))
    assert (grads.dtype, value.dtype) == (jnp.float32, jnp.float32)
    assert (int(state.count), bool(state.finite), int(state.total_redos)) == (1, True, 0)


@WAYS
@pytest.mark.parametrize("redo_on_nan", [0, 2])
def test_on_a_step_that_raises_the_scale_the_gradients_are_bit_identical(way, redo_on_nan):
    grad_fn = way(jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan))
    quiet, grads = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState(patience=5, count=0))
    raised, same = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState(patience=5, count=5))
    assert (float(quiet.scaler), float(raised.scaler)) == (2**15, 2**16)
    assert bits(grads) == bits(same)


@pytest.mark.parametrize("scale", [2.0**-10, 1.0, 2.0**10])
def test_a_power_of_two_does_not_change_float32_gradients_at_all(scale):
    state, grads = jaxamp.dynamic_scale_grad(error)(
        W, batch_of(), dynamic_scaler_state=DynamicScalerState(scaler=scale)
    )
    assert bits(grads) == bits(jax.grad(error)(W, batch_of()))
    assert state.finite


def half_loss(w, batch):
    """A loss that is float16 to the end, 5000 and more: times 2**15 it is infinite."""
    x, _ = batch
    return jnp.sum(x.astype(jnp.float16) * w.astype(jnp.float16)) + jnp.float16(5000)


@WAYS
@pytest.mark.parametrize("scale", [2.0**15, 2.0**24, 40000.0])
def test_the_loss_cannot_overflow_and_keeps_its_dtype(way, scale):
    grad_fn = way(jaxamp.dynamic_scale_value_and_grad(half_loss))
    batch = batch_of(magnitude=0.1)
    state, (value, grads) = grad_fn(W, batch, dynamic_scaler_state=DynamicScalerState(scaler=scale))
    assert value.dtype == jnp.float16
    assert value == half_loss(W, batch)
    assert relative(grads, np.asarray(batch[0], np.float64).sum(0)) < 2**-8
    assert state.finite


@WAYS
@pytest.mark.parametrize("redo_on_nan", [0, 3])
def test_aux_comes_back_as_it_is_and_its_nan_changes_nothing(way, redo_on_nan):
    def loss(w, batch):
        aux = {"nan": jnp.nan * w, "low": jnp.float16(-jnp.inf), "count": jnp.int32(3), "none": None, "name": "mse"}
        return LOSS(w, batch), aux

    grad_fn = way(jaxamp.dynamic_scale_value_and_grad(loss, has_aux=True, redo_on_nan=redo_on_nan))
    state, ((value, aux), grads) = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState())
    assert (float(state.scaler), int(state.count), int(state.total_resets)) == (2**15, 1, 0)
    assert np.isnan(aux["nan"]).all()
    assert (aux["low"].dtype, int(aux["count"]), aux["none"], aux["name"]) == (jnp.float16, 3, None, "mse")
    assert np.isfinite(value)
    assert np.isfinite(grads).all()


@WAYS
def test_a_loss_that_is_infinite_with_finite_gradients_comes_back_infinite(way):
    def loss(w, batch):
        return LOSS(w, batch) + jnp.inf

    state, (value, grads) = way(jaxamp.dynamic_scale_value_and_grad(loss))(
        W, batch_of(), dynamic_scaler_state=DynamicScalerState()
    )
    assert value == jnp.inf
    assert relative(grads, oracle(W, batch_of())) < 2**-9
    assert state.finite


@WAYS
@pytest.mark.parametrize("redo_on_nan", [0, 2, 20])
def test_an_overflow_is_redone_until_it_is_finite(way, redo_on_nan):
    batch, start = batch_of(magnitude=30.0), 2.0**20
    grad_fn = way(jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan))
    state, grads = grad_fn(W, batch, dynamic_scaler_state=DynamicScalerState(scaler=start, count=7))
    if redo_on_nan == 20:
        redos = int(state.total_redos)
        assert 0 < redos < 20
        assert float(state.scaler) == start / 2**redos
        assert (int(state.count), int(state.skipped), int(state.total_resets)) == (1, 0, redos)
        assert relative(grads, oracle(W, batch)) < 2**-9
    else:  # given up: the result as it is, one step down, and the counters say so
        assert not np.isfinite(grads).all()
        assert float(state.scaler) == start / 2
        assert (int(state.count), int(state.skipped)) == (0, 1)
        assert (int(state.total_resets), int(state.total_redos)) == (redo_on_nan + 1, redo_on_nan)


def test_a_batch_that_is_nan_at_every_scale_lowers_the_scale_once():
    batch = batch_of()[0].at[3, 2].set(jnp.nan), batch_of()[1]
    state, grads = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=10)(W, batch, dynamic_scaler_state=DynamicScalerState())
    assert float(state.scaler) == 2**14
    assert np.isnan(grads).any()
    assert jaxamp.scaler_metrics(state) | {"underflow": 0} == {
        "scale": 2**14, "skipped": 1, "total_skipped": 1, "total_redone": 10, "underflow": 0
    }  # fmt: skip


def test_a_redo_ignores_hysteresis_and_stops_at_the_smallest_scale():
    bad = batch_of()[0].at[0, 0].set(jnp.inf), batch_of()[1]
    state = DynamicScalerState(scaler=8.0, min_scaler=2.0, hysteresis=3)
    state, _ = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=50)(W, bad, dynamic_scaler_state=state)
    assert (int(state.total_redos), float(state.scaler), int(state.overflows)) == (2, 8.0, 1)


def test_a_static_scale_is_not_redone():
    bad = batch_of()[0].at[0, 0].set(jnp.inf), batch_of()[1]
    state, _ = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=50)(W, bad, dynamic_scaler_state=DynamicScalerState.no_op())
    assert (int(state.total_redos), float(state.scaler), int(state.skipped)) == (0, 1.0, 1)


@WAYS
def test_one_shards_overflow_is_everyones(way):
    x, y = batch_of()
    grad_fn = way(jaxamp.dynamic_scale_grad(LOSS))
    for row in (0, 9, 15):
        state, _ = grad_fn(W, (x.at[row].set(1e4), y), dynamic_scaler_state=DynamicScalerState())
        assert float(state.scaler) == 2**14
        assert state.scaler.sharding.is_fully_replicated


def test_small_gradients_survive_that_float16_would_lose():
    def tiny(w, batch):
        return 1e-6 * LOSS(w, batch)

    expected = 1e-6 * oracle(W, batch_of())
    plain = jax.grad(tiny)(W, batch_of())
    _, grads = jaxamp.dynamic_scale_grad(tiny)(W, batch_of(), dynamic_scaler_state=DynamicScalerState())
    assert relative(plain, expected) > 2**-5
    assert relative(grads, expected) < 2**-9


def test_the_share_of_gradients_lost_is_told():
    tree = {"big": jnp.ones(3), "gone": jnp.zeros(1), "subnormal": jnp.full(4, 2.0**-20)}

    def loss(w, c):
        return sum(jnp.sum(w[name] * c[name]) for name in c)

    grad_fn = jax.jit(jaxamp.dynamic_scale_grad(loss, redo_on_nan=1))
    for scale, share in ((1.0, 5 / 8), (2.0**7, 1 / 8)):
        state, _ = grad_fn(tree, tree, dynamic_scaler_state=DynamicScalerState(scaler=scale))
        assert float(state.underflow) == share
    bad, _ = grad_fn(tree, tree | {"big": jnp.full(3, jnp.inf)}, dynamic_scaler_state=state)
    assert float(bad.underflow) == 1 / 8  # of the last finite step


# -- across devices


@pytest.mark.parametrize("redo_on_nan", [0, 12])
def test_in_shard_map_and_pmap_the_devices_agree(redo_on_nan):
    mesh = jax.make_mesh((8,), ("data",))
    batch = batch_of()[0].at[9].set(1e2), batch_of()[1]  # the fifth device overflows
    grad_fn = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan, axis_name="data")

    def step(w, batch, state):
        state, grads = grad_fn(w, batch, dynamic_scaler_state=state)
        return state, lax.pmean(grads, "data")

    def own_step(w, batch, state):  # parameters that vary: no gradient is summed behind our back
        return jax.tree.map(lambda x: x[None], step(w[0], batch, state))

    placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
    each = jax.device_put(jnp.stack([W] * 8), NamedSharding(mesh, P("data")))
    whole, expected = jax.jit(jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan))(
        W, batch, dynamic_scaler_state=DynamicScalerState()
    )
    by_map = jax.jit(
        jax.shard_map(own_step, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"), check_vma=False)
    )(each, placed, DynamicScalerState())
    by_pmap = jax.pmap(step, axis_name="data", in_axes=(None, 0, None))(
        W, jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch), DynamicScalerState()
    )
    for state, grads in (by_map, by_pmap):
        assert len(set(np.asarray(state.scaler).tolist())) == 1
        assert len(set(np.asarray(state.total_redos).tolist())) == 1
        assert (int(np.asarray(state.skipped)[0]) == 0) == (redo_on_nan > 0) == np.isfinite(grads).all()
        if redo_on_nan:
            assert relative(np.asarray(grads)[0], oracle(W, batch)) < 2**-8
            assert len({row.tobytes() for row in np.asarray(grads)}) == 1
    assert bool(whole.finite) == (redo_on_nan > 0) == np.isfinite(expected).all()


@pytest.mark.parametrize("redo_on_nan", [0, 12])
def test_without_an_axis_each_device_of_a_shard_map_has_a_scaler_of_its_own(redo_on_nan):
    mesh = jax.make_mesh((8,), ("model",))
    batch = batch_of()[0].at[9].set(1e2), batch_of()[1]
    placed = jax.device_put((jnp.stack([W] * 8), batch), NamedSharding(mesh, P("model")))
    states = jax.device_put(
        jax.tree.map(lambda x: jnp.stack([x] * 8), DynamicScalerState()), NamedSharding(mesh, P("model"))
    )

    def step(w, batch, state):
        w, state = jax.tree.map(lambda x: x[0], (w, state))
        state, _ = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan)(w, batch, dynamic_scaler_state=state)
        return jax.tree.map(lambda x: x[None], state)

    state = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("model"), out_specs=P("model")))(*placed, states)
    fell = np.asarray(state.scaler) < 2**15
    assert fell.tolist() == [i == 4 for i in range(8)]
    assert (np.asarray(state.total_redos) > 0).tolist() == [redo_on_nan > 0 and i == 4 for i in range(8)]


def test_under_vmap_each_example_has_a_scaler_of_its_own():
    x, y = batch_of()
    batches = jnp.stack([x, 300 * x]), jnp.stack([y, y])
    grad_fn = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=20)
    states, grads = jax.vmap(lambda b: grad_fn(W, b, dynamic_scaler_state=DynamicScalerState()))(batches)
    assert int(states.total_redos[0]) < int(states.total_redos[1])
    assert relative(grads[1], oracle(W, (300 * x, y))) < 2**-9


# -- what the program is


def test_the_redo_loop_holds_the_step_once():
    args = W, batch_of()
    plain = jax.make_jaxpr(jaxamp.dynamic_scale_grad(LOSS))(*args, dynamic_scaler_state=DynamicScalerState())
    redone = jax.make_jaxpr(jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=5))(
        *args, dynamic_scaler_state=DynamicScalerState()
    )
    assert len(matmul_dtypes(redone)) == len(matmul_dtypes(plain)) > 0
    assert [eqn.primitive.name for eqn in equations(redone)].count("while") == 1


def test_the_redo_loop_needs_the_memory_of_one_evaluation():
    def loss(ws, x):  # each layer's output is saved for the backward pass, and can be freed on the way
        for w in ws:
            x = jnp.tanh(x @ w)
        return jnp.mean(x)

    ws, x = [jnp.ones((32, 32))] * 12, jnp.ones((256, 32))

    def temporary(redo_on_nan):
        step = jax.jit(jaxamp.dynamic_scale_grad(jaxamp.amp(loss), redo_on_nan=redo_on_nan))
        compiled = step.lower(ws, x, dynamic_scaler_state=DynamicScalerState()).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    assert temporary(redo_on_nan=3) < 1.1 * temporary(redo_on_nan=0)


def test_the_function_is_traced_once_for_a_redo():
    traces = []

    def loss(w, batch):
        traces.append(w)
        return error(w, batch)

    jax.jit(jaxamp.dynamic_scale_grad(loss, redo_on_nan=5)).lower(
        W, batch_of(), dynamic_scaler_state=DynamicScalerState()
    )
    assert len(traces) == 1


def test_a_training_step_is_compiled_once():
    traces = []

    @jax.jit
    def step(w, batch, state):
        traces.append(w)
        return jaxamp.dynamic_scale_value_and_grad(LOSS, redo_on_nan=2)(w, batch, dynamic_scaler_state=state)

    state = DynamicScalerState()
    for _ in range(3):
        state, _ = step(W, batch_of(), state)
    assert len(traces) == 1


def test_amp_may_also_stand_outside():
    grad_fn = jaxamp.amp(jaxamp.dynamic_scale_grad(error, redo_on_nan=20))
    batch = batch_of(magnitude=30.0)
    state, grads = jax.jit(grad_fn)(W, batch, dynamic_scaler_state=DynamicScalerState(scaler=2.0**20))
    assert int(state.total_redos) > 0
    assert relative(grads, oracle(W, batch)) < 2**-8


# -- the forms of the results, and what is differentiated


class Model(eqx.Module):
    w: jax.Array
    steps: jax.Array
    activation: object = jax.nn.relu

    def __call__(self, x):
        return self.activation(x @ self.w)


MODEL = Model(jnp.ones((4, 2)), jnp.arange(3))


def model_loss(model, x):
    out = model(x)
    return jnp.mean(out**2), {"out": out}


@pytest.mark.parametrize("redo_on_nan", [0, 1])
def test_filtered_gradients_are_equinoxs(redo_on_nan):
    x, state = batch_of()[0], DynamicScalerState()
    expected = eqx.filter_jit(eqx.filter_grad(model_loss, has_aux=True))(MODEL, x)[0]
    grad_fn = eqx.filter_jit(jaxamp.dynamic_scale_grad(model_loss, has_aux=True, redo_on_nan=redo_on_nan))
    _, (grads, aux) = grad_fn(MODEL, x, dynamic_scaler_state=state)
    assert jax.tree.structure(grads) == jax.tree.structure(expected)
    assert bits(grads.w) == bits(expected.w)
    assert (grads.steps, grads.activation) == (None, None)
    assert aux["out"].shape == (16, 2)


@pytest.mark.parametrize("redo_on_nan", [0, 1])
def test_unfiltered_gradients_are_jaxs(redo_on_nan):
    def loss(w, n, batch, *, power):
        return jnp.sum(w**power), n

    args, state = (W, jnp.arange(3), batch_of()), DynamicScalerState()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(
        loss, has_aux=True, filter=False, argnums=(0, 1), allow_int=True, redo_on_nan=redo_on_nan
    )
    _, ((value, aux), (by_w, by_n)) = jax.jit(functools.partial(grad_fn, power=2))(*args, dynamic_scaler_state=state)
    assert bits(by_w) == bits(jax.grad(lambda w: jnp.sum(w**2))(W))
    assert by_n.dtype == jax.dtypes.float0
    assert (value.shape, aux.shape) == ((), (3,))


def test_holomorphic_gradients_are_jaxs():
    z = jnp.array(1 + 2j)
    _, grad = jaxamp.dynamic_scale_grad(lambda z: z**3, filter=False, holomorphic=True)(
        z, dynamic_scaler_state=DynamicScalerState()
    )
    np.testing.assert_allclose(grad, 3 * (1 + 2j) ** 2, rtol=1e-6)


def test_all_four_forms_of_results():
    def with_aux(w):
        return jnp.sum(w**2), "aux"

    def run(transform, fn, **kwargs):
        state, results = transform(fn, **kwargs)(W, dynamic_scaler_state=DynamicScalerState())
        assert isinstance(state, DynamicScalerState)
        return jax.tree.map(lambda x: getattr(x, "shape", x), results)

    plain = lambda w: jnp.sum(w**2)
    assert run(jaxamp.dynamic_scale_grad, plain) == (4,)
    assert run(jaxamp.dynamic_scale_grad, with_aux, has_aux=True) == ((4,), "aux")
    assert run(jaxamp.dynamic_scale_value_and_grad, plain) == ((), (4,))
    assert run(jaxamp.dynamic_scale_value_and_grad, with_aux, has_aux=True) == (((), "aux"), (4,))


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
def test_gradients_of_low_parameters_are_float32(dtype):
    w = jnp.full(4, 2.0**-9, dtype)
    loss = lambda w: jnp.sum(w.astype(jnp.float32) ** 2) * 2.0**-15
    _, grads = jaxamp.dynamic_scale_grad(loss)(w, dynamic_scaler_state=DynamicScalerState())
    assert grads.dtype == jnp.float32
    assert np.asarray(grads).tolist() == [2.0**-23] * 4  # float16 would hold one bit of it


def test_float64_gradients_stay_float64():
    with jax.enable_x64(True):
        w = jnp.asarray(np.random.default_rng(0).standard_normal(4))
        _, grads = jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w**3))(w, dynamic_scaler_state=DynamicScalerState())
        assert grads.dtype == jnp.float64
        np.testing.assert_array_equal(grads, 3 * np.asarray(w) ** 2)


def test_aux_may_hold_keys_in_a_redo():
    def loss(w, key):
        return jnp.sum(w**2), jax.random.split(key)

    key = jax.random.key(3)
    _, (_, keys) = jax.jit(jaxamp.dynamic_scale_grad(loss, has_aux=True, redo_on_nan=1))(
        W, key, dynamic_scaler_state=DynamicScalerState()
    )
    assert jnp.array_equal(jax.random.key_data(keys), jax.random.key_data(jax.random.split(key)))


# -- other transforms


def test_any_transform_that_makes_gradients_can_be_scaled():
    state, x = DynamicScalerState(), jnp.arange(1.0, 4.0)
    assert jaxamp.dynamic_scale_tx(jax.grad)(jnp.sum)(x, dynamic_scaler_state=state)[1].tolist() == [1, 1, 1]
    jacobian = jaxamp.dynamic_scale_tx(jax.jacrev, 2)(jnp.square)
    assert bits(jax.jit(jacobian)(x, dynamic_scaler_state=state)[1]) == bits(jax.jacrev(jnp.square)(x))
    forwards = jaxamp.dynamic_scale_tx(jax.jacfwd)(jnp.square)
    assert bits(forwards(x, dynamic_scaler_state=state)[1]) == bits(jax.jacfwd(jnp.square)(x))


def test_where_says_which_results_are_gradients():
    def loss(w, x):
        return jnp.sum((w * x) ** 2), x

    transform = jaxamp.dynamic_scale_tx(jax.value_and_grad, where=lambda results: results[1], redo_on_nan=3)
    state, ((value, aux), grads) = transform(loss, has_aux=True)(
        jnp.float32(2), jnp.arange(3.0), dynamic_scaler_state=DynamicScalerState()
    )
    assert (float(value), aux.tolist(), float(grads)) == (20.0, [0, 1, 2], 20.0)
    assert state.finite


def test_a_transform_that_compiles_is_compiled_once():
    traces = []

    def loss(w):
        traces.append(w)
        return jnp.sum(w**2)

    grad_fn = jaxamp.dynamic_scale_tx(lambda fn: jax.jit(jax.grad(fn)))(loss)
    state = DynamicScalerState(patience=1)
    for _ in range(4):
        state, grads = grad_fn(W, dynamic_scaler_state=state)
        assert bits(grads) == bits(2 * W)
    assert len(traces) == 1
    assert float(state.scaler) == 2**17


# -- bad input


@pytest.mark.parametrize("make", [jaxamp.dynamic_scale_grad, jaxamp.dynamic_scale_value_and_grad])
class TestBadInput:
    def test_a_missing_state(self, make):
        with pytest.raises(
            TypeError, match=r"without dynamic_scaler_state; expected .* Write grad_fn\(..., dynamic_sc"
        ):
            make(error)(W, batch_of())
        with pytest.raises(TypeError, match="called without dynamic_scaler_state"):
            eqx.filter_jit(make(error))(W, batch_of())

    @pytest.mark.parametrize("state", [2.0**15, {}, (2000, 2.0), DynamicScalerState])
    def test_a_state_that_is_none(self, make, state):
        with pytest.raises(
            TypeError, match=r"as a scaler's state; expected a DynamicScalerState. Write dynamic_scaler_s"
        ):
            make(error)(W, batch_of(), dynamic_scaler_state=state)

    @pytest.mark.parametrize("field", ["scaler", "patience", "adjust_factor", "hysteresis", "accumulate"])
    @pytest.mark.parametrize("value", [0, -1, float("nan")])
    def test_a_state_that_cannot_work(self, make, field, value):
        state = DynamicScalerState(**{field: value})
        with pytest.raises(ValueError, match=rf"a state with {field}=.*; expected a positive, finite number. Write"):
            make(error)(W, batch_of(), dynamic_scaler_state=state)

    def test_a_state_of_arrays_with_dimensions(self, make):
        state = DynamicScalerState(scaler=jnp.ones(8))
        with pytest.raises(TypeError, match=r"a state with scaler=.*; expected a number. In pmap and vmap"):
            make(error)(W, batch_of(), dynamic_scaler_state=state)

    @pytest.mark.parametrize("redo_on_nan", [-1, 1.5, True, None])
    def test_a_wrong_number_of_redos(self, make, redo_on_nan):
        with pytest.raises(
            ValueError, match=r"redo_on_nan=.*; expected a number of recomputations, 0 or more. Write re"
        ):
            make(error, redo_on_nan=redo_on_nan)

    def test_what_is_no_function(self, make):
        with pytest.raises(TypeError, match=r"got 3, of type int; expected a function. Write jaxamp.dynamic_scale"):
            make(3)

    @pytest.mark.parametrize("loss", [lambda w: w, lambda w: jnp.argmax(w), lambda w: None])
    def test_a_loss_that_is_no_scalar(self, make, loss):
        with pytest.raises(TypeError, match=r"whose loss is .*; expected one floating-point number. Reduce it"):
            make(loss)(W, dynamic_scaler_state=DynamicScalerState())

    def test_a_pair_without_has_aux(self, make):
        with pytest.raises(TypeError, match=r"whose loss is a tuple of 2; expected .* Write has_aux=True"):
            make(lambda w: (w.sum(), w))(W, dynamic_scaler_state=DynamicScalerState())

    def test_has_aux_without_a_pair(self, make):
        with pytest.raises(
            TypeError, match=r"returned an array of shape \(\) .*; with has_aux=True, expected a pair. Wri"
        ):
            make(lambda w: w.sum(), has_aux=True)(W, dynamic_scaler_state=DynamicScalerState())

    def test_integer_parameters_without_allow_int(self, make):
        with pytest.raises(
            TypeError, match=r"by argument 0\['n'\], of dtype int32; expected floating.* Write filter=True"
        ):
            make(lambda p: p["w"].sum(), filter=False)(
                {"w": W, "n": jnp.arange(2)}, dynamic_scaler_state=DynamicScalerState()
            )

    def test_options_of_jax_with_a_filter(self, make):
        with pytest.raises(
            TypeError, match=r"got argnums with filter=True; expected them with filter=False only. Equinox"
        ):
            make(error, argnums=1)


def test_a_transform_that_is_none():
    with pytest.raises(
        TypeError, match=r"got None, of type NoneType; expected a function. Write jaxamp.dynamic_scale_tx"
    ):
        jaxamp.dynamic_scale_tx(None)
