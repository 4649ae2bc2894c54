"""Models that more than one question is asked about."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp


def transformer(
    layers: int, width: int = 64, tokens: int = 32, batch: int = 2
) -> tuple[Callable[[], Callable[..., Any]], tuple[Any, ...]]:
    """A maker of losses, and their arguments as shapes. Layers are unrolled: each equation is seen."""

    def norm(x: Any) -> Any:
        return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)

    def layer(p: Any, x: Any) -> Any:
        q, k, v = jnp.split((norm(x) @ p["qkv"]).reshape(*x.shape[:-1], 4, -1), 3, -1)
        scores = jnp.einsum("bthd,bshd->bhts", q, k) / q.shape[-1] ** 0.5
        scores = jnp.where(jnp.tril(jnp.ones((tokens, tokens), bool)), scores, -1e9)
        x = x + jnp.einsum("bhts,bshd->bthd", jax.nn.softmax(scores), v).reshape(x.shape) @ p["out"]
        return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"]

    def fresh() -> Callable[..., Any]:
        """A new function object, so that no cache knows it."""

        def loss(params: Any, x: Any, y: Any) -> Any:
            for p in params["layers"]:
                x = layer(p, x)
            logits = jax.nn.log_softmax(norm(x) @ params["head"])
            return -jnp.mean(jnp.take_along_axis(logits, y[..., None], -1))

        return loss

    def shape(*dims: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(dims, jnp.float32)

    one = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    params = {"layers": [{k: shape(*s) for k, s in one.items()}] * layers, "head": shape(width, 100)}
    return fresh, (params, shape(batch, tokens, width), jax.ShapeDtypeStruct((batch, tokens), jnp.int32))
