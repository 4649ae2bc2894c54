"""The laws of scaled gradients: eagerly, under `jit`, and sharded over eight devices."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import bits, raises
from helpers import error as relative
from least_squares import LOSS, WAYS, W, batch_of, error, oracle

import jaxamp
from jaxamp import DynamicScalerState

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


def test_the_scale_of_a_float16_loss_stays_where_float16_ends():
    def loss(w, x):
        return jnp.sum(w.astype(jnp.float16) * x.astype(jnp.float16))

    x, start = jnp.full(4, 4.0), DynamicScalerState(scaler=2.0**17, patience=1)
    _, _ = jaxamp.dynamic_scale_grad(loss)(W, x / 8, dynamic_scaler_state=start)
    state, grads = jaxamp.dynamic_scale_grad(loss, redo_on_nan=2)(W, x, dynamic_scaler_state=start)
    assert (float(state.scaler), int(state.total_redos), grads.tolist()) == (2**13, 2, [4.0] * 4)
    state, _ = jaxamp.dynamic_scale_grad(loss)(W, x, dynamic_scaler_state=start)
    assert float(state.scaler) == 2**14
    for _ in range(4):
        state, _ = jaxamp.dynamic_scale_grad(loss)(W, x / 8, dynamic_scaler_state=state)
    assert float(state.scaler) == 2**15


@pytest.mark.parametrize("scale", [0.0, -4.0, np.inf, -np.inf, np.nan])
def test_a_scale_that_cannot_work_is_mended_where_it_cannot_be_refused(scale):
    step = jax.jit(jaxamp.dynamic_scale_grad(error))
    state, grads = step(W, batch_of(), dynamic_scaler_state=DynamicScalerState(scaler=np.float32(scale)))
    state, grads = step(W, batch_of(), dynamic_scaler_state=state)
    assert np.isfinite(state.scaler)
    assert float(state.scaler) > 0
    assert np.isfinite(grads).all() or scale == np.inf  # which has a long way down


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


def test_values_and_aux_of_other_transforms_come_back_as_they_are():
    def loss(w):
        return jnp.sum(w**2), {"metric": jnp.float32(jnp.nan)}

    def run(transform, fun, **kwargs):
        state, results = jaxamp.dynamic_scale_tx(transform)(fun, **kwargs)(W, dynamic_scaler_state=DynamicScalerState())
        assert (bool(state.finite), float(state.scaler)) == (True, 2**15)
        return results

    for transform in (jax.value_and_grad, eqx.filter_value_and_grad):
        (value, aux), grads = run(transform, loss, has_aux=True)
        assert float(value) == float(jnp.sum(W**2))
        assert np.isnan(aux["metric"])
        assert bits(grads) == bits(2 * W)
        value, grads = run(transform, lambda w: jnp.sum(w**2))
        assert float(value) == float(jnp.sum(W**2))
    for transform in (jax.grad, eqx.filter_grad):
        grads, aux = run(transform, loss, has_aux=True)
        assert bits(grads) == bits(2 * W)
        assert np.isnan(aux["metric"])


def test_gradients_of_each_example_can_be_scaled():
    per_example = jaxamp.dynamic_scale_tx(lambda fn: jax.vmap(jax.grad(fn), (None, 0)), redo_on_nan=2)
    x = batch_of()[0]
    state, grads = jax.jit(per_example(lambda w, x: jnp.sum((w * x) ** 2)))(
        W, x, dynamic_scaler_state=DynamicScalerState()
    )
    np.testing.assert_allclose(grads, 2 * W * x**2, rtol=1e-6)
    assert state.finite


def test_where_says_which_results_are_gradients():
    def mine(fn):
        return lambda *args: {"grads": jax.grad(fn)(*args), "norm": jnp.float32(jnp.inf)}

    transform = jaxamp.dynamic_scale_tx(mine, where=lambda results: results["grads"], redo_on_nan=3)
    state, results = transform(lambda w: jnp.sum(w**2))(W, dynamic_scaler_state=DynamicScalerState())
    assert bits(results["grads"]) == bits(2 * W)
    assert results["norm"] == jnp.inf
    assert state.finite


def test_an_equinox_module_and_its_methods_are_functions():
    class Loss(eqx.Module):
        target: jax.Array

        def __call__(self, w):
            return jnp.sum((w - self.target) ** 2)

        def twice(self, w):
            return 2 * self(w)

    loss, state = Loss(jnp.zeros(4)), DynamicScalerState()
    for fun, factor in ((loss, 2), (loss.twice, 4)):
        _, grads = eqx.filter_jit(jaxamp.dynamic_scale_grad(fun))(W, dynamic_scaler_state=state)
        assert bits(grads) == bits(factor * W)


def test_an_overflow_is_no_nan_to_debug_nans():
    with jax.debug_nans(True):
        state, grads = jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w * jnp.inf))(
            jnp.ones(4), dynamic_scaler_state=DynamicScalerState()
        )
    assert not state.finite
    assert np.isinf(grads).all()


def test_float8_parameters_have_float32_gradients():
    w = jnp.ones(3, jnp.float8_e4m3fn)
    _, grads = jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w.astype(jnp.float32) ** 2))(
        w, dynamic_scaler_state=DynamicScalerState.no_op()
    )
    assert (grads.dtype, grads.tolist()) == (jnp.float32, [2.0] * 3)


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
        if field == "patience" and value == 0:
            return  # raises the scale in every step
        state = DynamicScalerState(**{field: value})
        with pytest.raises(ValueError, match=rf"a state with {field}=.*; expected a .*finite number.*Leave it"):
            make(error)(W, batch_of(), dynamic_scaler_state=state)

    def test_a_state_of_arrays_with_dimensions(self, make):
        state = DynamicScalerState(scaler=jnp.ones(8))
        with pytest.raises(
            TypeError, match=r"a state with scaler of shape \(8,\); expected a number. In pmap and vmap"
        ):
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
            TypeError,
            match=r"asked to differentiate argument 0\['n'\], of dtype int32; expected floating.* Write filter=True",
        ):
            make(lambda p: p["w"].sum(), filter=False)(
                {"w": W, "n": jnp.arange(2)}, dynamic_scaler_state=DynamicScalerState()
            )

    def test_a_state_with_a_factor_the_wrong_way_round(self, make):
        for state, message in (
            (
                DynamicScalerState(adjust_factor=0.5),
                r"adjust_factor=0.5; expected 1 or more, to raise the scale. Leave",
            ),
            (
                DynamicScalerState(backoff_factor=2.0),
                r"backoff_factor=2; expected 1 or less, to lower the scale. Leave",
            ),
            (
                DynamicScalerState(min_scaler=float("nan")),
                r"min_scaler=nan; expected a finite number, 0 or more. Leave",
            ),
        ):
            with pytest.raises(ValueError, match=message):
                make(error)(W, batch_of(), dynamic_scaler_state=state)

    @pytest.mark.parametrize("value", [None, "large"])
    def test_a_field_that_is_no_number(self, make, value):
        with pytest.raises(TypeError, match=r"a state with scaler=.*; expected a number. Leave it out"):
            make(error)(W, batch_of(), dynamic_scaler_state=DynamicScalerState(scaler=value))

    def test_a_first_argument_without_parameters(self, make):
        with pytest.raises(
            TypeError, match=r"found no floating-point array in the first .*; expected the .* Put them fi"
        ):
            make(lambda n, w: jnp.sum(w))(jnp.arange(3), W, dynamic_scaler_state=DynamicScalerState())

    def test_a_loss_that_has_the_keyword_already(self, make):
        def loss(w, dynamic_scaler_state):
            return jnp.sum(w)

        with pytest.raises(TypeError, match=r"already takes an argument 'dynamic_scaler_state'; expected .* Rename"):
            make(loss)

    def test_numpys_integers_are_argnums(self, make):
        make(error, filter=False, argnums=np.int32(0))(W, batch_of(), dynamic_scaler_state=DynamicScalerState())

    def test_options_of_jax_with_a_filter(self, make):
        with pytest.raises(
            TypeError, match=r"got argnums with filter=True; expected them only with filter=False. Equinox"
        ):
            make(error, argnums=1)

    @pytest.mark.parametrize("filter", [True, False])
    @pytest.mark.parametrize("option", ["redo_on_nans", "compute_dtype"])
    def test_options_that_there_are_not(self, make, option, filter):
        with pytest.raises(TypeError, match=rf"got the option '{option}'; expected some of has_aux.* go to amp: write"):
            make(error, filter=filter, **{option: 1})


def test_a_transform_that_is_none():
    with pytest.raises(
        TypeError, match=r"got None, of type NoneType; expected a function. Write jaxamp.dynamic_scale_tx"
    ):
        jaxamp.dynamic_scale_tx(None)


@pytest.mark.parametrize(
    "guess",
    [
        lambda loss, w, state: jaxamp.dynamic_scale_tx(jax.grad)(loss, w, dynamic_scaler_state=state),
        lambda loss, w, state: jaxamp.dynamic_scale_tx(jax.grad(loss))(w, dynamic_scaler_state=state),
        lambda loss, w, state: jaxamp.dynamic_scale_tx(loss)(w, dynamic_scaler_state=state),
        lambda loss, w, state: jaxamp.dynamic_scale_tx(jax.grad(loss))(w),
    ],
    ids=["the transform and the call in one", "the gradient", "the loss", "without the state"],
)
def test_a_wrong_guess_about_the_transform_is_told(guess):
    example = r"Write jaxamp.dynamic_scale_tx\(jax.grad\)\(loss_fn\)\(params, dynamic_scaler_state=state\)"
    with raises(TypeError, "the transform that dynamic_scale_tx returned got", "expected a function alone", example):
        guess(lambda w: jnp.sum(w**2), jnp.ones(3), jaxamp.DynamicScalerState())
