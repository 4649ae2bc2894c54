"""Networks over tokens: a BERT by Haiku, a decoder like Llama, and a mixture of experts, both in bare JAX."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._sides import peer
from .net import Draw, Net, Tree, cross_entropy, haiku_params, rms_norm, squared_error


def bert(
    layers: int = 6, width: int = 768, heads: int = 12, tokens: int = 512, batch: int = 16, vocabulary: int = 30522
) -> Net:
    """An encoder like BERT-base, half as deep, with Haiku's attention and dropout of 0.1."""
    hk, draw = peer("haiku"), Draw()

    def forward(ids: Any, labels: Any) -> Any:
        init = hk.initializers.VarianceScaling()
        norm = lambda x: hk.LayerNorm(-1, create_scale=True, create_offset=True)(x)
        drop = lambda x: hk.dropout(hk.next_rng_key(), 0.1, x)
        positions = hk.get_parameter("positions", (tokens, width), init=hk.initializers.RandomNormal(0.02))
        x = drop(norm(hk.Embed(vocabulary, width)(ids) + positions))
        for _ in range(layers):
            x = norm(x + drop(hk.MultiHeadAttention(heads, width // heads, w_init=init)(x, x, x)))
            x = norm(x + drop(hk.Linear(width)(jax.nn.gelu(hk.Linear(4 * width)(x)))))
        return cross_entropy(hk.Linear(vocabulary)(x), labels)

    net = hk.transform(forward)
    ids, labels = draw.integers(vocabulary, batch, tokens), draw.integers(vocabulary, batch, tokens)
    params = haiku_params(net, ids[:1], labels[:1])
    return Net(net.apply, params, (jax.random.key(1), ids, labels))


# -- a decoder like Llama


def rotate(x: Any) -> Any:
    """Rotary positions for (batch, tokens, heads, width)."""
    half = x.shape[-1] // 2
    angles = jnp.arange(x.shape[1])[:, None] * 10000.0 ** (-jnp.arange(half) / half)
    sin, cos = (f(angles)[:, None].astype(x.dtype) for f in (jnp.sin, jnp.cos))
    a, b = x[..., :half], x[..., half:]
    return jnp.concatenate([a * cos - b * sin, a * sin + b * cos], axis=-1)


def grouped_attention(p: Tree, x: Any, heads: int, shared: int) -> Any:
    """Causal attention in which `heads` queries share the keys and values of `shared` heads."""
    batch, tokens, width = x.shape
    size = width // heads
    q = rotate((x @ p["q"]).reshape(batch, tokens, heads, size)).reshape(batch, tokens, shared, heads // shared, size)
    k = rotate((x @ p["k"]).reshape(batch, tokens, shared, size))
    v = (x @ p["v"]).reshape(batch, tokens, shared, size)
    scores = jnp.einsum("btghd,bsgd->bghts", q, k) / size**0.5
    mask = jnp.tril(jnp.ones((tokens, tokens), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(scores.dtype).min))
    return jnp.einsum("bghts,bsgd->btghd", weights, v).reshape(x.shape) @ p["out"]


def decoder(
    layers: int = 6,
    width: int = 2048,
    heads: int = 16,
    shared: int = 4,
    hidden: int = 5632,
    tokens: int = 2048,
    batch: int = 4,
    vocabulary: int = 32000,
    scan: bool = False,
) -> Net:
    """A decoder like Llama: rotary positions, shared keys and values, SwiGLU and RMSNorm, without biases."""
    draw = Draw()
    kept = width // heads * shared

    def block() -> Tree:
        shapes = {"q": (width, width), "k": (width, kept), "v": (width, kept), "out": (width, width)}
        shapes |= {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        norms = {"before": jnp.ones(width), "between": jnp.ones(width)}
        return {name: draw.weight(*shape) for name, shape in shapes.items()} | norms

    def run(x: Any, p: Any) -> Any:
        x = x + grouped_attention(p, rms_norm(p["before"], x), heads, shared)
        h = rms_norm(p["between"], x)
        return x + (jax.nn.silu(h @ p["gate"]) * (h @ p["up"])) @ p["down"]

    def loss(params: Any, ids: Any, labels: Any) -> Any:
        x = params["embed"][ids]
        if scan:
            x = lax.scan(lambda x, p: (run(x, p), None), x, params["blocks"])[0]
        else:
            for p in params["blocks"]:
                x = run(x, p)
        return cross_entropy(rms_norm(params["norm"], x) @ params["head"], labels)

    blocks: Any = [block() for _ in range(layers)]
    if scan:
        blocks = jax.tree.map(lambda *rows: jnp.stack(rows), *blocks)
    ends = {"embed": draw.normal(vocabulary, width), "norm": jnp.ones(width), "head": draw.weight(width, vocabulary)}
    ids = draw.integers(vocabulary, batch, tokens + 1)
    return Net(loss, {"blocks": blocks, **ends}, (ids[:, :-1], ids[:, 1:]))


# -- a mixture of experts


def experts(
    layers: int = 4, width: int = 1024, hidden: int = 4096, number: int = 8, chosen: int = 2, tokens: int = 16384
) -> Net:
    """Layers in which each token goes through two of eight experts, sorted for `ragged_dot`."""
    draw = Draw()

    def layer() -> Tree:
        shapes = {"router": (width, number), "up": (number, width, hidden), "down": (number, hidden, width)}
        made = {name: draw.normal(*shape) / shape[-2] ** 0.5 for name, shape in shapes.items()}
        return made | {"norm": jnp.ones(width)}

    def mix(p: Tree, x: Any) -> Any:
        h = rms_norm(p["norm"], x)
        weights, which = lax.top_k(jax.nn.softmax(h @ p["router"]), chosen)
        order = jnp.argsort(which.reshape(-1))
        sizes = jnp.bincount(which.reshape(-1), length=number).astype(jnp.int32)
        h = lax.ragged_dot(h[order // chosen], p["up"], sizes)
        h = lax.ragged_dot(jax.nn.gelu(h), p["down"], sizes)
        h = h * weights.reshape(-1)[order][:, None]
        return x + jnp.zeros_like(x).at[order // chosen].add(h)

    def loss(params: Any, x: Any, y: Any) -> Any:
        for p in params:
            x = mix(p, x)
        return squared_error(x, y)

    return Net(loss, [layer() for _ in range(layers)], (draw.normal(tokens, width), draw.normal(tokens, width)))
