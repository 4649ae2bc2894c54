"""Loss scaling of Flax NNX models: parameters are differentiated, state moves once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from helpers import assert_same_bits, near, normal, raises

import jaxamp

pytestmark = pytest.mark.promotes
X, Y = normal(1, 16, 4), normal(2, 16, 3)


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(4, 32, use_bias=False, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, momentum=0.8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))


def loss(model, x, y):
    return jnp.mean((model(x) - y) ** 2)


def loss_and_aux(model, x, *, y):
    prediction = model(x)
    return jnp.mean((prediction - y) ** 2), {"model": model, "prediction": prediction}


def state_of(*nodes):
    """The values of all variables, keys left out."""
    return [nnx.to_pure_dict(nnx.state(node, nnx.Not(nnx.RngKey))) for node in nodes]


def copies(*nodes):
    return jax.tree.map(np.array, state_of(*nodes))


def overflowing_scaler():
    """One whose gradients overflow at the start and are finite a few halvings later."""
    return jaxamp.DynamicScalerState(scaler=jnp.float32(2.0**24))


EAGER_TOO = [pytest.param(False, marks=pytest.mark.slow, id="eager"), pytest.param(True, id="nnx.jit")]


@pytest.mark.parametrize("jitted", EAGER_TOO)
@pytest.mark.parametrize("redo", [0, 12])
def test_state_moves_once_as_in_float32(redo, jitted):
    def step(model, scaler, x, y):
        grad_fn = jaxamp.dynamic_scale_value_and_grad(jaxamp.amp(loss), redo_on_nan=redo)
        return grad_fn(model, x, y, dynamic_scaler_state=scaler)

    model, expected = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    scaler = overflowing_scaler() if redo else jaxamp.DynamicScalerState()
    scaler, (value, grads) = (nnx.jit(step) if jitted else step)(model, scaler, X, Y)
    expected_value, expected_grads = nnx.value_and_grad(loss)(expected, X, Y)
    assert bool(scaler.finite)
    assert (int(scaler.total_redos) > 0) == bool(redo)
    assert isinstance(grads, nnx.State)
    assert jax.tree.structure(grads) == jax.tree.structure(expected_grads)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected_grads), strict=True):
        assert x.dtype == jnp.float32
        assert near(x, y, 3e-2)
    assert near(value, expected_value)
    assert int(model.drop.rngs.count[...]) == 1
    for x, y in zip(jax.tree.leaves(state_of(model)), jax.tree.leaves(state_of(expected)), strict=True):
        assert near(x, y, 1e-2)


def test_aux_keywords_and_a_model_in_a_dict():
    model = Model(nnx.Rngs(0))
    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(loss_and_aux), has_aux=True, redo_on_nan=2)
    scaler, (_, aux) = grad_fn(model, X, y=Y, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert aux["model"] is model
    assert aux["prediction"].dtype == jnp.float32
    assert int(model.drop.rngs.count[...]) == 1

    def fn(tree, x):
        return loss(tree["model"], x, Y) * tree["scale"]

    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(fn))
    scaler, tree = grad_fn({"model": model, "scale": jnp.ones(())}, X, dynamic_scaler_state=scaler)
    assert isinstance(tree["model"], nnx.State)
    assert tree["scale"].dtype == jnp.float32
    assert int(model.drop.rngs.count[...]) == 2


@pytest.mark.parametrize("jitted", EAGER_TOO)
@pytest.mark.parametrize("state_if_finite", [False, True])
def test_a_skipped_step(state_if_finite, jitted):
    def step(model, optimizer, scaler, x, y):
        grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(loss), state_if_finite=state_if_finite)
        scaler, grads = grad_fn(model, x, y, dynamic_scaler_state=scaler)
        jaxamp.update_if_finite(model, optimizer, grads=grads, finite=scaler.finite)
        return scaler

    model = Model(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    run = nnx.jit(step) if jitted else step
    before, statistics = copies(optimizer, nnx.state(model, nnx.Param)), copies(nnx.state(model, nnx.BatchStat))
    scaler = run(model, optimizer, overflowing_scaler(), X, Y)
    assert not bool(scaler.finite)
    assert_same_bits(copies(optimizer, nnx.state(model, nnx.Param)), before)
    assert int(model.drop.rngs.count[...]) == (0 if state_if_finite else 1)
    moved = not np.array_equal(model.norm.mean[...], statistics[0]["norm"]["mean"])
    assert moved == (not state_if_finite)
    scaler = run(model, optimizer, jaxamp.DynamicScalerState(), X, Y)
    assert bool(scaler.finite)
    assert int(optimizer.step[...]) == 1
    assert float(jnp.abs(model.first.kernel[...] - before[1]["first"]["kernel"]).max()) > 1e-3


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
def test_a_skipped_step_that_creates_a_variable():
    class Sowing(nnx.BatchNorm):
        def __call__(self, x):
            self.sow(nnx.Intermediate, "seen", x)
            return super().__call__(x)

    model = Sowing(4, momentum=0.5, rngs=nnx.Rngs(0))
    grad_fn = jaxamp.dynamic_scale_grad(lambda m, x: jnp.sqrt(m(x) * 0).sum(), state_if_finite=True, redo_on_nan=1)
    scaler, _ = grad_fn(model, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert not bool(scaler.finite)
    assert np.array_equal(model.mean[...], np.zeros(4))
    assert np.array_equal(model.seen.get_value()[0], X)


def test_the_step_of_an_nnx_optimizer_is_its_own():
    model, expected = Model(nnx.Rngs(0)), Model(nnx.Rngs(0))
    grads = nnx.grad(loss)(nnx.clone(model), X, Y)
    made = [nnx.Optimizer(m, optax.adam(1e-2), wrt=nnx.Param) for m in (model, expected)]
    returned = jaxamp.update_if_finite(model, made[0], grads=grads, finite=jnp.array(True))
    made[1].update(expected, grads)
    assert returned[0] is model
    assert returned[1] is made[0]
    assert_same_bits(copies(model, made[0]), copies(expected, made[1]))
    with raises(TypeError, "nnx.Optimizer and an opt_state", "holds its state", "grads=grads"):
        jaxamp.update_if_finite(model, made[0], grads, grads, jnp.array(True))


@pytest.mark.parametrize("redo", [0, 12])
def test_any_transform_of_nnx(redo):
    scale_tx = functools.partial(jaxamp.dynamic_scale_tx, redo_on_nan=redo)
    model = Model(nnx.Rngs(0))
    scaler = overflowing_scaler() if redo else jaxamp.DynamicScalerState()
    _, (value, grads) = scale_tx(nnx.value_and_grad)(jaxamp.amp(loss))(model, X, y=Y, dynamic_scaler_state=scaler)
    expected = nnx.grad(loss)(Model(nnx.Rngs(0)), X, Y)
    assert value.dtype == jnp.float32
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True):
        assert near(x, y, 3e-2)
    assert int(model.drop.rngs.count[...]) == 1


def test_state_that_would_be_lost_is_refused():
    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(lambda m, x: m(x).sum()), filter=False)
    norm = nnx.BatchNorm(4, rngs=nnx.Rngs(0))
    with raises(ValueError, "changes 'mean' of a Flax NNX object", "a copy", "Put the nnx.Module first"):
        grad_fn(norm, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    _, grads = grad_fn(linear, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert near(grads.bias[...], np.full(4, 16.0))


@pytest.mark.parametrize("redo", [0, 8])
def test_parameters_as_a_state_beside_objects(redo):
    """The functional style: an `nnx.State` is a pytree of floats, and other objects are updated."""
    graphdef, state = nnx.split(nnx.Linear(4, 3, rngs=nnx.Rngs(0)))

    def fn(state, x, *, rngs):
        mask = jax.random.bernoulli(rngs.params(), 0.5, x.shape)
        return jnp.sum(nnx.merge(graphdef, state["linear"])(x * mask) ** 2) * state["scale"]

    given, rngs = {"linear": state, "scale": jnp.ones(()), "steps": jnp.int32(3)}, nnx.Rngs(params=3)
    scaled = jaxamp.dynamic_scale_grad(jaxamp.amp(fn), redo_on_nan=redo)
    scaler = jaxamp.DynamicScalerState() if redo else jaxamp.DynamicScalerState(scaler=jnp.float32(64.0))
    scaler, grads = scaled(given, X, rngs=rngs, dynamic_scaler_state=scaler)
    assert bool(scaler.finite)
    expected = jax.grad(lambda given: fn(given, X, rngs=nnx.Rngs(params=3)), allow_int=True)(given)
    assert grads["steps"] is None
    assert isinstance(grads["linear"]["kernel"], nnx.Param)
    for x, y in zip(jax.tree.leaves(grads), jax.tree.leaves({**expected, "steps": None}), strict=True):
        assert near(x, y, 2e-2)
    assert int(rngs.params.count[...]) == 1

    def changes(state, x):
        state["kernel"][...] = state["kernel"][...] + 1
        return x.sum() * state["kernel"][0, 0]

    with raises(ValueError, "of a Flax NNX object", "a copy", "Put the nnx.Module first"):
        jaxamp.dynamic_scale_grad(changes)(state, X, dynamic_scaler_state=jaxamp.DynamicScalerState())


def test_a_model_without_parameters_is_refused():
    grad_fn = jaxamp.dynamic_scale_grad(lambda m, x: x.sum())
    with raises(TypeError, "no floating-point array in the first argument", "Rngs"):
        grad_fn(nnx.Rngs(0), X, dynamic_scaler_state=jaxamp.DynamicScalerState())
