"""Networks over images: ResNet-50 by Haiku, ConvNeXt in bare JAX, and a U-Net by Equinox."""

import itertools
from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import lax

from .._sides import peer
from .net import Draw, Net, Tree, cross_entropy, dense, haiku_params, init_key, layer_norm, squared_error


def resnet(
    batch: int = 128,
    pixels: int = 224,
    blocks: Sequence[int] = (3, 4, 6, 3),
    channels: Sequence[int] = (256, 512, 1024, 2048),
    classes: int = 1000,
) -> Net:
    """ResNet-50 of Haiku, channels last, in training mode."""
    hk, draw = peer("haiku"), Draw()

    def forward(x: Any, y: Any) -> Any:
        head = {"w_init": hk.initializers.VarianceScaling()}  # zeros would stop every gradient at the head
        net = hk.nets.ResNet(blocks, classes, channels_per_group=channels, logits_config=head)
        return cross_entropy(net(x, is_training=True), y)

    net = hk.transform_with_state(forward)
    x, y = draw.normal(batch, pixels, pixels, 3), draw.integers(classes, batch)
    params, state = haiku_params(net, x[:2], y[:2])
    # Haiku begins with scales of zero at the ends of blocks, which stop the gradients inside. With ones, even TF32 is
    # far from float32. Scales that have been trained for a while are small.
    params = {
        at: {k: jnp.where(v == 0, 0.2, v) if k == "scale" else v for k, v in p.items()} for at, p in params.items()
    }
    return Net(lambda params, state, x, y: net.apply(params, state, None, x, y)[0], params, (state, x, y))


# -- ConvNeXt


def conv(w: Any, x: Any, stride: int = 1, groups: int = 1) -> Any:
    return lax.conv_general_dilated(
        x, w, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
    )


def convnext(
    batch: int = 64,
    pixels: int = 224,
    depths: Sequence[int] = (3, 3, 9, 3),
    widths: Sequence[int] = (96, 192, 384, 768),
    classes: int = 1000,
) -> Net:
    """ConvNeXt-T, channels last: depthwise 7 x 7 filters, LayerNorm, GELU and a scale on each branch."""
    draw = Draw()

    def block(width: int) -> Tree:
        return {
            "filter": draw.weight(7, 7, 1, width),
            "norm": draw.norm(width),
            "up": draw.dense(width, 4 * width),
            "down": draw.dense(4 * width, width),
            "scale": jnp.full(width, 0.1),
        }

    def stage(before: int, width: int, depth: int, patch: int) -> Tree:
        return {
            "patch": draw.weight(patch, patch, before, width),
            "norm": draw.norm(width),
            "blocks": [block(width) for _ in range(depth)],
        }

    befores, patches = (3, *widths), (4, 2, 2, 2)
    stages = [stage(b, w, d, p) for b, w, d, p in zip(befores, widths, depths, patches, strict=False)]
    params = {"stages": stages, "norm": draw.norm(widths[-1]), "head": draw.dense(widths[-1], classes)}

    def loss(params: Any, x: Any, y: Any) -> Any:
        for stage in params["stages"]:
            x = layer_norm(stage["norm"], conv(stage["patch"], x, stage["patch"].shape[0]))
            for p in stage["blocks"]:
                h = layer_norm(p["norm"], conv(p["filter"], x, groups=x.shape[-1]))
                x = x + p["scale"] * dense(p["down"], jax.nn.gelu(dense(p["up"], h)))
        return cross_entropy(dense(params["head"], layer_norm(params["norm"], x.mean((1, 2)))), y)

    return Net(loss, params, (draw.normal(batch, pixels, pixels, 3), draw.integers(classes, batch)))


# -- U-Net


class Residual(eqx.Module):
    norms: tuple[eqx.nn.GroupNorm, eqx.nn.GroupNorm]
    convs: tuple[eqx.nn.Conv2d, eqx.nn.Conv2d]
    skip: eqx.nn.Conv2d

    def __init__(self, before: int, after: int, key: Any):
        keys = jax.random.split(key, 3)
        self.norms = eqx.nn.GroupNorm(8, before), eqx.nn.GroupNorm(8, after)
        self.convs = (
            eqx.nn.Conv2d(before, after, 3, padding=1, key=keys[0]),
            eqx.nn.Conv2d(after, after, 3, padding=1, key=keys[1]),
        )
        self.skip = eqx.nn.Conv2d(before, after, 1, key=keys[2])

    def __call__(self, x: Any) -> Any:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(jax.nn.silu(norm(h)))
        return self.skip(x) + h


class Attention(eqx.Module):
    """Self-attention between the pixels, added to them."""

    norm: eqx.nn.GroupNorm
    attention: eqx.nn.MultiheadAttention

    def __init__(self, width: int, key: Any):
        self.norm = eqx.nn.GroupNorm(8, width)
        self.attention = eqx.nn.MultiheadAttention(4, width, key=key)

    def __call__(self, x: Any) -> Any:
        tokens = self.norm(x).reshape(len(x), -1).T
        return x + self.attention(tokens, tokens, tokens).T.reshape(x.shape)


class UNet(eqx.Module):
    first: eqx.nn.Conv2d
    downs: list[Any]
    shrink: list[Any]
    middle: list[Any]
    ups: list[Any]
    grow: list[Any]
    last: eqx.nn.Conv2d

    def __init__(self, widths: Sequence[int], key: Any):
        keys = iter(jax.random.split(key, 5 * len(widths) + 5))
        back = widths[::-1]
        pairs = list(itertools.pairwise(widths))
        self.first = eqx.nn.Conv2d(3, widths[0], 3, padding=1, key=next(keys))
        self.downs = [Residual(width, width, next(keys)) for width in widths]
        self.shrink = [eqx.nn.Conv2d(a, b, 3, stride=2, padding=1, key=next(keys)) for a, b in pairs]
        self.middle = [Residual(back[0], back[0], next(keys)), Attention(back[0], next(keys))]
        self.ups = [Residual(2 * width, width, next(keys)) for width in back]
        self.grow = [eqx.nn.ConvTranspose2d(b, a, 4, stride=2, padding=1, key=next(keys)) for a, b in reversed(pairs)]
        self.last = eqx.nn.Conv2d(widths[0], 3, 3, padding=1, key=next(keys))

    def __call__(self, x: Any) -> Any:
        x, skips = self.first(x), []
        for down, shrink in zip(self.downs, [*self.shrink, None], strict=True):
            x = down(x)
            skips.append(x)
            x = shrink(x) if shrink else x
        for layer in self.middle:
            x = layer(x)
        for up, grow in zip(self.ups, [*self.grow, None], strict=True):
            x = up(jnp.concatenate([x, skips.pop()]))
            x = grow(x) if grow else x
        return self.last(x)


def unet(batch: int = 64, pixels: int = 64, widths: Sequence[int] = (64, 128, 256)) -> Net:
    """A U-Net of Equinox, channels first, `vmap`ped over the batch: GroupNorm, and attention where it is smallest."""
    params, static = eqx.partition(eqx.filter_jit(UNet)(widths, init_key()), eqx.is_inexact_array)
    draw = Draw()

    def loss(params: Any, x: Any, y: Any) -> Any:
        return squared_error(jax.vmap(eqx.combine(params, static))(x), y)

    return Net(loss, params, (draw.normal(batch, 3, pixels, pixels), draw.normal(batch, 3, pixels, pixels)))
