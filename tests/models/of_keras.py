"""Keras 3 on JAX: its applications, without weights, wrapped where its own trainer would differentiate."""

import os
from typing import Any

import jax
import jax.numpy as jnp

from .data import labels, normal
from .registry import Model, model

NEEDS = ("keras",)


def make(network_of: Any, batch: Any) -> Model:
    """`network_of(keras)` makes the network. The state: batch statistics, seeds and metrics."""
    os.environ.setdefault("KERAS_BACKEND", "jax")
    import keras

    def compiled(policy: str) -> Any:
        keras.utils.set_random_seed(0)
        before = keras.config.dtype_policy()
        keras.config.set_dtype_policy(policy)
        try:
            network = network_of(keras)
        finally:
            keras.config.set_dtype_policy(before)
        # Logits: a softmax inside of the network would run in the policy's low dtype.
        network.compile(loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True), optimizer=None, jit_compile=False)
        return network

    network = compiled("float32")
    values = lambda variables: [v.value for v in variables]

    def wrapped(transform: Any, network: Any = network) -> Any:
        transformed = transform(network.compute_loss_and_updates)

        def loss(params: Any, state: Any, batch: Any) -> Any:
            value, (_, _, *new) = transformed(params, *state, *batch, None, training=True)
            return value, new

        return loss

    def own(dtype: Any) -> Any:
        return wrapped(lambda fn: fn, compiled(f"mixed_{jnp.dtype(dtype).name}"))

    state = [values(network.non_trainable_variables), values(network.metrics_variables)]
    params = values(network.trainable_variables)
    return Model(wrapped(lambda fn: fn), params, batch, state=state, wrapped=wrapped, own=own)


def images(size: int = 32, number: int = 8) -> tuple[jax.Array, jax.Array]:
    return 50 * normal(0, number, size, size, 3) + 128, labels(1, number)


OPTIONS = {"weights": None, "classes": 10, "classifier_activation": None, "input_shape": (32, 32, 3)}


@model("keras", "MobileNet", *NEEDS, quick=True)
def mobilenet() -> Model:
    return make(lambda keras: keras.applications.MobileNet(alpha=0.25, **OPTIONS), images())


@model("keras", "MobileNetV3", *NEEDS)
def mobilenet_v3() -> Model:
    return make(lambda keras: keras.applications.MobileNetV3Small(alpha=0.5, **OPTIONS), images())


@model("keras", "EfficientNet", *NEEDS)
def efficientnet() -> Model:
    return make(lambda keras: keras.applications.EfficientNetV2B0(**OPTIONS), images())


@model("keras", "ConvNeXt", *NEEDS)
def convnext() -> Model:
    from importlib import import_module

    def network(keras: Any) -> Any:
        file = import_module("keras.src.applications.convnext")
        return file.ConvNeXt(depths=[1, 1, 2, 1], projection_dims=[16, 32, 64, 128], default_size=32, **OPTIONS)

    return make(network, images())
