"""fp8 over a Keras model on JAX: `stateless_call`, with current and with delayed scales, and `fit`."""

import os
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, error
from jax import lax

import jaxamp

pytestmark = [pytest.mark.models, pytest.mark.promotes]
X = np.random.default_rng(0).standard_normal((64, 8, 8, 3)).astype(np.float32)
Y = (X.mean((1, 2, 3)) > 0).astype(np.int32)


@pytest.fixture(scope="module")
def keras():
    os.environ.setdefault("KERAS_BACKEND", "jax")
    keras = pytest.importorskip("keras")
    if keras.backend.backend() != "jax":
        pytest.skip("Keras runs on another backend")
    return keras


def policy(scaling="current"):
    rule = jaxamp.use_formats(scaling=scaling, history=1)
    return jaxamp.default_amp_policy | dict.fromkeys((lax.dot_general_p, lax.conv_general_dilated_p), rule)


def network(keras):
    keras.utils.set_random_seed(3)  # one generator for the whole process: other tests draw from it too
    layers = keras.layers
    convolution = [layers.Conv2D(8, 3, use_bias=False), layers.BatchNormalization(), layers.Activation("relu")]
    model = keras.Sequential(
        [layers.Input((8, 8, 3)), *convolution, layers.Flatten(), layers.Dense(32, "gelu"), layers.Dense(2)]
    )
    values = lambda variables: [v.value for v in variables]
    return model, values(model.trainable_variables), values(model.non_trainable_variables)


def loss_of(keras, model):
    def loss(trained, others, x, y):
        out, others = model.stateless_call(trained, others, x, training=True)
        return jnp.mean(keras.losses.sparse_categorical_crossentropy(y, out, from_logits=True)), others

    return loss


def test_a_stateless_call_with_current_and_delayed_scales(keras):
    model, *variables = network(keras)
    loss, args = loss_of(keras, model), (*variables, X, Y)
    (exact, exact_others), exact_grads = jax.value_and_grad(loss, has_aux=True)(*args)
    amped = jaxamp.amp(loss, amp_policy=policy())
    (value, others), grads = current = jax.jit(jax.value_and_grad(amped, has_aux=True))(*args)
    assert abs(value - exact) < 0.1 * exact
    for found, expected in zip([*grads, *others], [*exact_grads, *exact_others], strict=True):
        assert found.dtype == expected.dtype
        assert error(found, expected) < 0.3 or not jnp.issubdtype(found.dtype, jnp.floating)
    delayed = jaxamp.amp(loss, amp_policy=policy("delayed"))
    scales = jaxamp.init_scales(delayed)(*args)
    layers = {name.split("/")[0] for name in scales.histories}  # Keras counts them in the whole process
    assert sorted(re.sub(r"_\d+$", "", layer) for layer in layers) == ["conv2d", "dense", "dense"]
    step = jax.jit(jaxamp.delayed_scale_value_and_grad(delayed, has_aux=True))
    for _ in range(6):
        scales, found = step(*args, delayed_scales=scales)
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(current))


def test_fit(keras):
    model, *_ = network(keras)
    model.compile(keras.optimizers.Adam(1e-2), keras.losses.SparseCategoricalCrossentropy(from_logits=True))
    model.stateless_call = jaxamp.amp(model.stateless_call, amp_policy=policy())
    losses = model.fit(X, Y, epochs=6, verbose=0).history["loss"]
    assert losses[-1] < 0.7 * losses[0]
