"""Networks over time: LSTMs by Haiku, a selective state space, and an autoencoder over audio, both in bare JAX."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._sides import peer
from .net import Draw, Net, Tree, haiku_params, squared_error


def lstm(layers: int = 2, width: int = 1024, steps: int = 256, batch: int = 64) -> Net:
    """LSTMs of Haiku, one after the other, each in a `scan` over time."""
    hk, draw = peer("haiku"), Draw()

    def forward(x: Any, y: Any) -> Any:
        for _ in range(layers):
            core = hk.LSTM(width)
            x, _ = hk.dynamic_unroll(core, x, core.initial_state(x.shape[1]))
        return squared_error(x, y)

    net = hk.without_apply_rng(hk.transform(forward))
    x, y = draw.normal(steps, batch, width), draw.normal(steps, batch, width)
    return Net(net.apply, haiku_params(net, x[:1], y[:1]), (x, y))


def state_space(batch: int = 8, steps: int = 1024, width: int = 512, states: int = 16) -> Net:
    """One selective state space layer as in Mamba, by `associative_scan`. Time steps begin between .001 and .1."""
    draw = Draw()
    shapes = {"in": 2 * width, "rate": width, "write": states, "read": states, "out": width}
    params = {name: draw.weight(width, columns) for name, columns in shapes.items()}
    params["decay"] = jnp.log(jnp.arange(1, states + 1.0)) * jnp.ones((width, 1))
    params["step"] = jnp.log(jnp.expm1(jnp.logspace(-3, -1, width)))

    def combine(earlier: Any, later: Any) -> Any:
        return earlier[0] * later[0], earlier[1] * later[0] + later[1]

    def loss(p: Any, x: Any, y: Any) -> Any:
        u, gate = jnp.split(x @ p["in"], 2, axis=-1)
        rate = jax.nn.softplus(u @ p["rate"] + p["step"])[..., None]
        keep = jnp.exp(-rate * jnp.exp(p["decay"]))
        write = rate * (u @ p["write"])[..., None, :] * u[..., None]
        held = lax.associative_scan(combine, (keep, write), axis=1)[1]
        out = jnp.einsum("btws,bts->btw", held, u @ p["read"]) * jax.nn.silu(gate)
        return squared_error(out @ p["out"], y)

    return Net(loss, params, (draw.normal(batch, steps, width), draw.normal(batch, steps, width)))


# -- audio

CHANNELS_LAST = ("NWC", "WIO", "NWC")


def conv(p: Tree, x: Any, stride: int = 1, dilation: int = 1) -> Any:
    out = lax.conv_general_dilated(
        x, p["w"], (stride,), "SAME", rhs_dilation=(dilation,), dimension_numbers=CHANNELS_LAST
    )
    return out + p["b"]


def grow(p: Tree, x: Any, stride: int) -> Any:
    return lax.conv_transpose(x, p["w"], (stride,), "SAME", dimension_numbers=CHANNELS_LAST) + p["b"]


def snake(rate: Any, x: Any) -> Any:
    return x + jnp.sin(rate * x) ** 2 / rate


def audio(
    batch: int = 16,
    samples: int = 65536,
    widths: Sequence[int] = (32, 64, 128, 256, 512),
    strides: Sequence[int] = (2, 4, 4, 8),
) -> Net:
    """An autoencoder over long audio: strided and transposed 1-D convolutions, dilated ones between, and snakes."""
    draw = Draw()

    def filter_(size: int, before: int, after: int) -> Tree:
        return {"w": draw.weight(size, before, after), "b": jnp.zeros(after)}

    def stage(before: int, after: int, stride: int, width: int) -> Tree:
        residual = {"wide": filter_(7, width, width), "narrow": filter_(1, width, width), "rate": jnp.ones(width)}
        return {"residual": residual, "resize": filter_(2 * stride, before, after), "rate": jnp.ones(before)}

    levels = list(zip(widths, widths[1:], strides, strict=False))
    params = {
        "first": filter_(7, 1, widths[0]),
        "down": [stage(a, b, stride, a) for a, b, stride in levels],
        "up": [stage(b, a, stride, a) for a, b, stride in reversed(levels)],
        "rate": jnp.ones(widths[0]),
        "last": filter_(7, widths[0], 1),
    }

    def residual(p: Tree, x: Any) -> Any:
        return x + conv(p["narrow"], snake(p["rate"], conv(p["wide"], x, dilation=3)))

    def loss(params: Any, x: Any) -> Any:
        h = conv(params["first"], x)
        for p, stride in zip(params["down"], strides, strict=True):
            h = conv(p["resize"], snake(p["rate"], residual(p["residual"], h)), stride)
        for p, stride in zip(params["up"], reversed(strides), strict=True):
            h = residual(p["residual"], grow(p["resize"], snake(p["rate"], h), stride))
        return squared_error(conv(params["last"], snake(params["rate"], h)), x)

    return Net(loss, params, (draw.normal(batch, samples, 1),))
