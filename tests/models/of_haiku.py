"""Haiku: the networks in `hk.nets`, and its recurrent cells and attention."""

from typing import Any

import jax
import jax.numpy as jnp

from .data import cross_entropy, labels, normal, tokens
from .registry import Model, model

NEEDS = "haiku", "jmp"


def make(network: Any, batch: Any, loss: Any) -> Model:
    """`network(x)` is run by `hk.transform_with_state`; `loss(out, targets)` reads its result."""
    import haiku as hk
    import jmp

    transformed = hk.transform_with_state(network)
    params, state = jax.jit(transformed.init)(jax.random.key(0), batch[0])

    def apply(params: Any, state: Any, batch: Any) -> Any:
        x, targets, key = batch
        out, state = transformed.apply(params, state, key, x)
        return loss(out, targets), state

    def own(dtype: Any) -> Any:
        """As Haiku documents it: a policy of JMP for the layers, float32 inside of norms."""
        half, full = (jmp.Policy(jnp.float32, compute, dtype) for compute in (dtype, jnp.float32))
        layers = (hk.Linear, hk.Conv2D, hk.Conv2DTranspose, hk.DepthwiseConv2D, hk.LSTM, hk.GRU, hk.MultiHeadAttention)
        policies = {**dict.fromkeys(layers, half), hk.BatchNorm: full, hk.LayerNorm: full}

        def low(params: Any, state: Any, batch: Any) -> Any:
            for module, policy in policies.items():
                hk.mixed_precision.set_policy(module, policy)
            try:
                return apply(params, state, batch)
            finally:
                for module in policies:
                    hk.mixed_precision.clear_policy(module)

        return low

    return Model(apply, params, batch, state=state, own=own)


def classify(out: jax.Array, targets: jax.Array) -> jax.Array:
    return cross_entropy(out.astype(jnp.float32), targets)


def images() -> Any:
    return normal(0, 16, 32, 32, 3), labels(1, 16), jax.random.key(2)


@model("dm-haiku", "ResNet", *NEEDS)
def resnet() -> Model:
    import haiku as hk

    def network(x: Any) -> Any:
        sizes = {"blocks_per_group": (1, 1, 1, 1), "channels_per_group": (16, 32, 64, 64), "bottleneck": False}
        first = {"initial_conv_config": {"output_channels": 16, "kernel_shape": 3, "stride": 1}}
        return hk.nets.ResNet(num_classes=10, resnet_v2=True, **sizes, **first)(x, is_training=True)

    return make(network, images(), classify)


@model("dm-haiku", "MobileNetV1", *NEEDS)
def mobilenet() -> Model:
    import haiku as hk

    def network(x: Any) -> Any:
        channels = {"strides": (1, 2, 1, 2), "channels": (16, 32, 32, 64)}
        return hk.nets.MobileNetV1(**channels, num_classes=10)(x, is_training=True)

    made = make(network, images(), classify)
    # `init` has averaged once already, and at this decay a second step hardly moves the averages.
    return made._replace(state=jax.tree.map(jnp.zeros_like, made.state))


@model("dm-haiku", "VQ-VAE", *NEEDS)
def vqvae() -> Model:
    import haiku as hk

    def network(x: Any) -> Any:
        code = hk.nets.MLP([64, 32])(x.reshape(len(x), 16, -1))
        found = hk.nets.VectorQuantizerEMA(32, 64, commitment_cost=0.25, decay=0.99)(code, is_training=True)
        return hk.nets.MLP([64, x[0].size // 16])(found["quantize"]).reshape(x.shape), found["loss"]

    def loss(out: Any, _: Any) -> jax.Array:
        made, commitment = out
        return jnp.mean(jnp.square(made - x)) + commitment

    x = normal(0, 16, 16, 16, 3)
    return make(network, (x, labels(1, 16), jax.random.key(2)), loss)


@model("dm-haiku", "LSTM and GRU", *NEEDS)
def recurrent() -> Model:
    import haiku as hk

    def network(x: Any) -> Any:
        core = hk.DeepRNN([hk.LSTM(64), hk.GRU(64)])
        out, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return hk.Linear(10)(out)

    return make(network, (normal(0, 32, 16, 32), labels(1, 32, 16), jax.random.key(2)), classify)


@model("dm-haiku", "transformer", *NEEDS)
def transformer() -> Model:
    import haiku as hk

    def network(ids: Any) -> Any:
        x = hk.Embed(256, 64)(ids)
        initial = hk.initializers.VarianceScaling(1.0)
        for _ in range(2):
            y = hk.LayerNorm(-1, True, True)(x)
            x = x + hk.MultiHeadAttention(4, 16, w_init=initial)(y, y, y)
            y = hk.nets.MLP([256, 64], activation=jax.nn.gelu)(hk.LayerNorm(-1, True, True)(x))
            x = x + hk.dropout(hk.next_rng_key(), 0.1, y)
        return hk.Linear(256)(hk.LayerNorm(-1, True, True)(x))

    batch = tokens(0, 4, 64), tokens(1, 4, 64), jax.random.key(2)
    return make(network, batch, classify)
