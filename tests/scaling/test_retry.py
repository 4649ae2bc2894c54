"""Steps that are evaluated again at a smaller scale: until when, what is told of it, and what the program is."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, matmul_dtypes
from helpers import error as relative
from least_squares import LOSS, WAYS, W, batch_of, error, nan_gradients, oracle

import jaxamp
from jaxamp import DynamicScalerState


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


def test_gradients_that_are_nan_at_every_scale_lower_it_once():
    grad_fn = jaxamp.dynamic_scale_grad(nan_gradients, redo_on_nan=10)
    state, grads = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState())
    assert np.isnan(grads).any()
    assert jaxamp.scaler_metrics(state) | {"underflow": 0} == {
        "scale": 2**14, "skipped": 1, "total_skipped": 1, "total_redone": 10, "underflow": 0
    }  # fmt: skip


def test_a_loss_that_is_not_finite_is_not_redone():
    batch = batch_of()[0].at[3, 2].set(jnp.nan), batch_of()[1]
    state, grads = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=10)(W, batch, dynamic_scaler_state=DynamicScalerState())
    assert np.isnan(grads).any()
    assert (float(state.scaler), int(state.total_redos), int(state.skipped)) == (2**14, 0, 1)


def test_a_redo_ignores_hysteresis_and_stops_at_the_smallest_scale():
    state = DynamicScalerState(scaler=8.0, min_scaler=2.0, hysteresis=3)
    state, _ = jaxamp.dynamic_scale_grad(nan_gradients, redo_on_nan=2**40)(W, batch_of(), dynamic_scaler_state=state)
    assert (int(state.total_redos), float(state.scaler), int(state.overflows)) == (2, 8.0, 1)


def test_a_static_scale_is_not_redone():
    grad_fn = jaxamp.dynamic_scale_grad(nan_gradients, redo_on_nan=50)
    state, _ = grad_fn(W, batch_of(), dynamic_scaler_state=DynamicScalerState.no_op())
    assert (int(state.total_redos), float(state.scaler), int(state.skipped)) == (0, 1.0, 1)


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
