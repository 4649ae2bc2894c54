"""Keras on JAX: `model.stateless_call = jaxamp.amp(model.stateless_call)`, then `fit`, `evaluate` and `predict`."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LOW, ROOT, matmuls, near

import jaxamp

pytestmark = [pytest.mark.models, pytest.mark.promotes]
X = np.random.default_rng(0).standard_normal((128, 8, 8, 1)).astype(np.float32)
Y = (X.mean((1, 2, 3)) > 0).astype(np.int32)


@pytest.fixture(scope="module")
def keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    return keras


def network(keras):
    """A small network with all that has state: batch statistics, the seed of dropout, and a loss of its own."""
    layers = keras.layers
    return [
        layers.Input((8, 8, 1)),
        layers.Conv2D(8, 3, activation="tanh"),
        layers.BatchNormalization(),
        layers.Flatten(),
        layers.Dense(32, activation="gelu", kernel_regularizer="l2"),
        layers.Dropout(0.2),
        layers.Dense(2),
    ]


def sequential(keras):
    return keras.Sequential(network(keras))


def functional(keras):
    _, *layers = network(keras)
    x = inputs = keras.Input((8, 8, 1))
    for layer in layers:
        x = layer(x)
    return keras.Model(inputs, x)


def subclassed(keras):
    class Network(keras.Model):
        def __init__(self):
            super().__init__()
            self.parts = network(keras)[1:]

        def call(self, x, training=False):
            for layer in self.parts:
                keywords = {"training": training} if isinstance(layer, stateful) else {}
                x = layer(x, **keywords)
            return x

    stateful = (keras.layers.Dropout, keras.layers.BatchNormalization)
    model = Network()
    model(X[:1])
    return model


def fitted(keras, make, low=None, scale=None):
    keras.utils.set_random_seed(0)
    model = make(keras)
    optimizer = keras.optimizers.SGD(0.05, momentum=0.9)
    if scale is not None:
        optimizer = keras.optimizers.LossScaleOptimizer(optimizer, initial_scale=scale)
    loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
    model.compile(optimizer=optimizer, loss=loss, metrics=["accuracy"])
    if low is not None:
        model.stateless_call = jaxamp.amp(model.stateless_call, compute_dtype=low)
    history = model.fit(X, Y, epochs=2, batch_size=32, verbose=0, validation_data=(X[:32], Y[:32])).history
    return model, history


@pytest.mark.parametrize("make", [sequential, functional, subclassed])
@pytest.mark.parametrize(("low", "scale"), [(jnp.bfloat16, None), (jnp.float16, 2.0**10)], ids=["bfloat16", "float16"])
def test_fit_evaluate_and_predict_as_in_float32(keras, make, low, scale):
    found, expected = fitted(keras, make, low, scale), fitted(keras, make)
    for name, values in expected[1].items():
        assert np.allclose(found[1][name], values, rtol=2e-2, atol=0.05 if "accuracy" in name else 0), name
    for x, y in zip(found[0].variables, expected[0].variables, strict=True):
        if "optimizer" in x.path or "loss_scale" in x.path:
            continue
        x, y = np.asarray(x.value), np.asarray(y.value)
        assert x.dtype == y.dtype
        assert near(x, y, 5e-2) if np.issubdtype(x.dtype, np.floating) else np.array_equal(x, y)
    for run in ("evaluate", "predict"):
        args = (X, Y) if run == "evaluate" else (X,)
        a, b = (np.asarray(getattr(model, run)(*args, verbose=0)) for model, _ in (found, expected))
        assert a.dtype == b.dtype
        assert near(a, b, 5e-2)


def test_matmuls_are_low(keras):
    model, _ = fitted(keras, sequential, jnp.bfloat16)
    state = [[v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    assert matmuls(lambda *state: model.stateless_call(*state, X[:2], training=True), *state) == [LOW] * 3


def test_steps_that_overflow_are_skipped_and_lower_the_scale(keras):
    model, history = fitted(keras, sequential, jnp.float16, 2.0**40)
    assert float(model.optimizer.dynamic_scale.value) < 2.0**40
    assert int(model.optimizer.iterations.value) < 8
    assert np.isfinite(history["loss"]).all()
    assert all(bool(jnp.isfinite(v.value).all()) for v in model.trainable_variables)


def test_train_on_batch_and_a_step_of_your_own(keras):
    """A `train_step` that calls `stateless_call` is served by the same line."""
    model, _ = fitted(keras, sequential, jnp.bfloat16)
    seed = model.non_trainable_variables[-1]
    before = np.asarray(seed.value)
    model.train_on_batch(X[:32], Y[:32])
    assert not np.array_equal(before, np.asarray(seed.value))

    def loss(trainable, fixed, x):
        out, fixed = model.stateless_call(trainable, fixed, x, training=True)
        return out.sum(), fixed

    state = [[v.value for v in group] for group in (model.trainable_variables, model.non_trainable_variables)]
    grads, fixed = jax.jit(jax.grad(loss, has_aux=True))(*state, X[:4])
    assert all(g.dtype == v.dtype for g, v in zip(grads, state[0], strict=True))
    assert not np.array_equal(fixed[-1], state[1][-1])


def test_the_recipes_model_predicts_in_float32(keras):
    page = ROOT / "docs" / "recipes" / "keras.md"
    (block,) = re.findall(r"```python\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    namespace = {}
    exec(compile(block, str(page), "exec"), namespace)
    assert namespace["model"].predict(X[:2].reshape(2, 64)[:, :16], verbose=0).dtype == np.float32
