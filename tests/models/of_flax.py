"""Flax: networks of its Linen and its NNX modules."""

from typing import Any

import jax
import jax.numpy as jnp

from .data import cross_entropy, labels, normal, tokens
from .registry import Model, model

F32 = jnp.dtype(jnp.float32)


# -- Linen


def linen(module_of: Any, batch: Any, loss: Any, *extra: Any) -> Model:
    """`module_of(dtype)` is the network; `loss(out, targets)` reads its result. The batch is (x, targets, key)."""
    x, _, key = batch
    variables = jax.jit(lambda: module_of(F32).init({"params": key, "dropout": key}, x, *extra))()
    params = variables.pop("params")

    def loss_of(dtype: Any) -> Any:
        def apply(params: Any, state: Any, batch: Any) -> Any:
            x, targets, key = batch
            out, new = module_of(dtype).apply(
                {"params": params, **state}, x, *extra, rngs={"dropout": key}, mutable=list(state)
            )
            return loss(out, targets), new

        return apply

    return Model(loss_of(F32), params, batch, state=variables, own=loss_of)


@model("flax", "Linen ResNet", "flax")
def linen_resnet() -> Model:
    import flax.linen as nn

    class Block(nn.Module):
        width: int
        strides: int
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            conv = lambda *args, **kwargs: nn.Conv(*args, use_bias=False, dtype=self.dtype, **kwargs)
            norm = lambda **kwargs: nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype, **kwargs)
            y = nn.relu(norm()(conv(self.width, (3, 3), (self.strides, self.strides))(x)))
            y = norm(scale_init=nn.initializers.zeros)(conv(self.width, (3, 3))(y))
            if x.shape != y.shape:
                x = norm()(conv(self.width, (1, 1), (self.strides, self.strides))(x))
            return nn.relu(x + y)

    class ResNet(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            x = nn.Conv(16, (3, 3), use_bias=False, dtype=self.dtype)(x)
            x = nn.relu(nn.BatchNorm(use_running_average=False, momentum=0.9, dtype=self.dtype)(x))
            for width, strides in ((16, 1), (32, 2), (64, 2)):
                x = Block(width, strides, self.dtype)(x)
            return nn.Dense(10, dtype=self.dtype)(x.mean((1, 2))).astype(jnp.float32)

    batch = normal(0, 16, 16, 16, 3), labels(1, 16), jax.random.key(2)
    return linen(lambda dtype: ResNet(dtype=dtype), batch, cross_entropy)


@model("flax", "Linen transformer", "flax")
def linen_transformer() -> Model:
    import flax.linen as nn

    class Transformer(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, ids: Any) -> Any:
            x = nn.Embed(256, 64, dtype=self.dtype)(ids)
            for _ in range(2):
                attend = nn.MultiHeadDotProductAttention(4, dtype=self.dtype, dropout_rate=0.1, deterministic=False)
                x = x + attend(nn.LayerNorm(dtype=self.dtype)(x), mask=nn.make_causal_mask(ids))
                y = nn.gelu(nn.Dense(256, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)))
                x = x + nn.Dropout(0.1, deterministic=False)(nn.Dense(64, dtype=self.dtype)(y))
            return nn.Dense(256, dtype=self.dtype)(nn.LayerNorm(dtype=self.dtype)(x)).astype(jnp.float32)

    batch = tokens(0, 4, 64), tokens(1, 4, 64), jax.random.key(2)
    return linen(lambda dtype: Transformer(dtype=dtype), batch, cross_entropy)


@model("flax", "Linen LSTM", "flax")
def linen_lstm() -> Model:
    import flax.linen as nn

    class Recurrent(nn.Module):
        dtype: Any

        @nn.compact
        def __call__(self, x: Any) -> Any:
            for _ in range(2):
                x = nn.RNN(nn.OptimizedLSTMCell(64, dtype=self.dtype))(x)
            return nn.Dense(10, dtype=self.dtype)(x[:, -1]).astype(jnp.float32)

    batch = normal(0, 16, 32, 32), labels(1, 16), jax.random.key(2)
    return linen(lambda dtype: Recurrent(dtype=dtype), batch, cross_entropy)


# -- NNX: the loss takes the module and changes it, as users write it


def nnx_model(module_of: Any, batch: Any, loss: Any) -> Model:
    """`module_of(dtype)` is the network; `loss(module, batch)` is what a user passes to `nnx.value_and_grad`."""
    from flax import nnx

    _, params, rest = nnx.split(module_of(F32), nnx.Param, ...)

    def wrapped(transform: Any, dtype: Any = F32) -> Any:
        graph, _, _ = nnx.split(module_of(dtype), nnx.Param, ...)
        transformed = transform(loss)

        def pure(params: Any, rest: Any, batch: Any) -> Any:
            module = nnx.merge(graph, params, rest, copy=True)  # a gradient passes `rest` on as it is
            value = transformed(module, batch)
            return value, nnx.split(module, nnx.Param, ...)[2]

        return pure

    def plain(dtype: Any) -> Any:
        return wrapped(lambda fn: fn, dtype)

    return Model(plain(F32), params, batch, state=rest, wrapped=wrapped, own=plain)


@model("flax", "NNX convolutions", "flax", quick=True)
def nnx_convolutions() -> Model:
    from flax import nnx

    class Net(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            self.first = nnx.Conv(3, 16, (3, 3), rngs=rngs, dtype=dtype)
            self.norm = nnx.BatchNorm(16, rngs=rngs, dtype=dtype)
            self.second = nnx.Conv(16, 32, (3, 3), strides=2, rngs=rngs, dtype=dtype)
            self.norm2 = nnx.BatchNorm(32, rngs=rngs, dtype=dtype)
            self.drop = nnx.Dropout(0.2, rngs=rngs)
            self.head = nnx.Linear(32, 10, rngs=rngs, dtype=dtype)

        def __call__(self, x: Any) -> Any:
            x = nnx.relu(self.norm(self.first(x)))
            x = nnx.relu(self.norm2(self.second(x)))
            return self.head(self.drop(x.mean((1, 2)))).astype(jnp.float32)

    loss = lambda module, batch: cross_entropy(module(batch[0]), batch[1])
    return nnx_model(lambda dtype: Net(nnx.Rngs(0), dtype), (normal(0, 16, 16, 16, 3), labels(1, 16)), loss)


@model("flax", "NNX transformer", "flax", quick=True)
def nnx_transformer() -> Model:
    from flax import nnx

    class Block(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            self.norm, self.norm2 = (nnx.LayerNorm(64, rngs=rngs, dtype=dtype) for _ in range(2))
            self.attend = nnx.MultiHeadAttention(
                4, 64, dropout_rate=0.1, deterministic=False, decode=False, rngs=rngs, dtype=dtype
            )
            self.up = nnx.Linear(64, 256, rngs=rngs, dtype=dtype)
            self.down = nnx.Linear(256, 64, rngs=rngs, dtype=dtype)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

        def __call__(self, x: Any, mask: Any) -> Any:
            x = x + self.attend(self.norm(x), mask=mask)
            return x + self.drop(self.down(nnx.gelu(self.up(self.norm2(x)))))

    class Net(nnx.Module):
        def __init__(self, rngs: Any, dtype: Any):
            self.embed = nnx.Embed(256, 64, rngs=rngs, dtype=dtype)
            self.blocks = nnx.List([Block(rngs, dtype) for _ in range(2)])
            self.norm = nnx.LayerNorm(64, rngs=rngs, dtype=dtype)
            self.head = nnx.Linear(64, 256, rngs=rngs, dtype=dtype)

        def __call__(self, ids: Any) -> Any:
            x, mask = self.embed(ids), nnx.make_causal_mask(ids)
            for block in self.blocks:
                x = block(x, mask)
            return self.head(self.norm(x)).astype(jnp.float32)

    loss = lambda module, batch: cross_entropy(module(batch[0]), batch[1])
    batch = tokens(0, 4, 64), tokens(1, 4, 64)
    return nnx_model(lambda dtype: Net(nnx.Rngs(0), dtype), batch, loss)
