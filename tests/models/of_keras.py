"""Keras 3 on JAX: its applications, without weights, wrapped where its own trainer would differentiate."""

import os
from importlib import import_module
from typing import Any

import jax
import jax.numpy as jnp

from .data import labels, normal
from .registry import Model, model

NEEDS = ("keras",)


def make(network_of: Any, batch: Any) -> Model:
    """`network_of(keras)` makes the network. The state: batch statistics, seeds and metrics."""
    os.environ["KERAS_BACKEND"] = "jax"
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
        loss = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
        network.compile(loss=loss, optimizer=None, jit_compile=False)
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


def images(size: int) -> tuple[jax.Array, jax.Array]:
    return 50 * normal(0, 16, size, size, 3) + 128, labels(1, 16)


def options(size: int) -> dict[str, Any]:
    """No weights to download, and logits."""
    return {"weights": None, "classes": 10, "classifier_activation": None, "input_shape": (size, size, 3)}


@model("keras", "ResNetV2", *NEEDS, quick=True)
def resnet() -> Model:
    def network(keras: Any) -> Any:
        file = import_module("keras.src.applications.resnet")  # with fewer blocks than the smallest that has a name

        def blocks(x: Any) -> Any:
            x = file.stack_residual_blocks_v2(x, 16, 2, name="conv2")
            return file.stack_residual_blocks_v2(x, 32, 2, stride1=1, name="conv3")

        return file.ResNet(blocks, True, True, name="resnetv2", weights_name="", **options(32))

    return make(network, images(32))


@model("keras", "MobileNetV3", *NEEDS)
def mobilenet_v3() -> Model:
    return make(lambda keras: keras.applications.MobileNetV3Small(alpha=0.5, **options(32)), images(32))


@model("keras", "EfficientNet", *NEEDS)
def efficientnet() -> Model:
    def network(keras: Any) -> Any:
        file = import_module("keras.src.applications.efficientnet")  # smaller than the smallest that has a name
        sizes = {"width_coefficient": 0.25, "depth_coefficient": 0.1, "default_size": 32, "weights_name": ""}
        return file.EfficientNet(**sizes, name="efficientnet", **options(32))

    return make(network, images(32))


@model("keras", "ConvNeXt", *NEEDS)
def convnext() -> Model:
    def network(keras: Any) -> Any:
        file = import_module("keras.src.applications.convnext")
        sizes = {"depths": [1, 1, 2, 1], "projection_dims": [16, 32, 64, 128], "default_size": 32}
        return file.ConvNeXt(**sizes, weights_name="", name="convnext", **options(32))

    return make(network, images(32))
