"""Two Equinox networks, written in float32 as a user would: a ViT and a GPT-2.

Layers are `jax.vmap`ped over tokens, and networks over the batch. The blocks run in a Python loop, or, with
`stacked=True`, in a `lax.scan`. `attend` computes the attention of one example, from queries, keys and values of shape
(tokens, heads, width) and a flag for causal attention.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

Attend = Callable[[Any, Any, Any, bool], Any]


def plain_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    """Softmax attention, as most people write it."""
    scores = jnp.einsum("thd,shd->hts", q, k) / q.shape[-1] ** 0.5
    if causal:
        scores = jnp.where(jnp.tril(jnp.ones(scores.shape[-2:], bool)), scores, jnp.finfo(scores.dtype).min)
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(scores, axis=-1), v)


class Sizes(NamedTuple):
    layers: int = 12
    width: int = 768
    heads: int = 12
    tokens: int = 196
    batch: int = 256
    classes: int = 1000  # for a GPT, the size of the vocabulary


class Block(eqx.Module):
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]
    qkv: eqx.nn.Linear
    out: eqx.nn.Linear
    up: eqx.nn.Linear
    down: eqx.nn.Linear
    heads: int = eqx.field(static=True)
    causal: bool = eqx.field(static=True)
    attend: Attend = eqx.field(static=True)

    def __init__(self, sizes: Sizes, causal: bool, attend: Attend, key: Any):
        width, keys = sizes.width, jax.random.split(key, 4)
        self.norms = eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)
        self.qkv = eqx.nn.Linear(width, 3 * width, key=keys[0])
        self.out = eqx.nn.Linear(width, width, key=keys[1])
        self.up = eqx.nn.Linear(width, 4 * width, key=keys[2])
        self.down = eqx.nn.Linear(4 * width, width, key=keys[3])
        self.heads, self.causal, self.attend = sizes.heads, causal, attend

    def __call__(self, x: Any) -> Any:
        qkv = jax.vmap(self.qkv)(jax.vmap(self.norms[0])(x))
        q, k, v = (a.reshape(len(x), self.heads, -1) for a in jnp.split(qkv, 3, axis=-1))
        x = x + jax.vmap(self.out)(self.attend(q, k, v, self.causal).reshape(x.shape))
        return x + jax.vmap(self.down)(jax.nn.gelu(jax.vmap(self.up)(jax.vmap(self.norms[1])(x))))


def make_blocks(sizes: Sizes, causal: bool, attend: Attend, stacked: bool, key: Any) -> Any:
    keys = jax.random.split(key, sizes.layers)
    if stacked:
        return eqx.filter_vmap(lambda k: Block(sizes, causal, attend, k))(keys)
    return [Block(sizes, causal, attend, k) for k in keys]


def run_blocks(blocks: Any, x: Any) -> Any:
    if isinstance(blocks, list):
        for block in blocks:
            x = block(x)
        return x
    arrays, static = eqx.partition(blocks, eqx.is_array)
    return jax.lax.scan(lambda x, one: (eqx.combine(one, static)(x), None), x, arrays)[0]


class ViT(eqx.Module):
    """A vision transformer over patches, by default ViT-Base. It averages the tokens."""

    embed: eqx.nn.Linear
    positions: Any
    blocks: Any
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, sizes: Sizes, attend: Attend, stacked: bool, key: Any):
        keys = jax.random.split(key, 4)
        self.embed = eqx.nn.Linear(768, sizes.width, key=keys[0])  # patches of 16 x 16 pixels and three colours
        self.positions = 0.02 * jax.random.normal(keys[1], (sizes.tokens, sizes.width))
        self.blocks = make_blocks(sizes, False, attend, stacked, keys[2])
        self.norm = eqx.nn.LayerNorm(sizes.width)
        self.head = eqx.nn.Linear(sizes.width, sizes.classes, key=keys[3])

    def __call__(self, patches: Any) -> Any:
        x = run_blocks(self.blocks, jax.vmap(self.embed)(patches) + self.positions)
        return self.head(jnp.mean(jax.vmap(self.norm)(x), axis=0))


class GPT(eqx.Module):
    """A causal decoder like GPT-2 small. Embedding and head share their weights."""

    embed: Any
    positions: Any
    blocks: Any
    norm: eqx.nn.LayerNorm

    def __init__(self, sizes: Sizes, attend: Attend, stacked: bool, key: Any):
        keys = jax.random.split(key, 3)
        self.embed = 0.02 * jax.random.normal(keys[0], (sizes.classes, sizes.width))
        self.positions = 0.02 * jax.random.normal(keys[1], (sizes.tokens, sizes.width))
        self.blocks = make_blocks(sizes, True, attend, stacked, keys[2])
        self.norm = eqx.nn.LayerNorm(sizes.width)

    def __call__(self, tokens: Any) -> Any:
        x = run_blocks(self.blocks, self.embed[tokens] + self.positions)
        return jax.vmap(self.norm)(x) @ self.embed.T


NETWORKS = {"vit": ViT, "gpt": GPT}
SIZES = {"vit": Sizes(), "gpt": Sizes(tokens=1024, batch=16, classes=50257)}


def loss_fn(model: Any, x: Any, y: Any) -> Any:
    """The cross entropy of a batch. Logits may have low precision; the loss is float32."""
    logits = jax.vmap(model)(x).astype(jnp.float32)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


def make(kind: str, sizes: Sizes, attend: Attend = plain_attention, stacked: bool = False) -> tuple[Any, Any, Any]:
    """A network and a batch of inputs and labels."""
    model = NETWORKS[kind](sizes, attend, stacked, jax.random.key(0))
    keys = jax.random.split(jax.random.key(1))
    if kind == "vit":
        x = jax.random.normal(keys[0], (sizes.batch, sizes.tokens, 768))
        return model, x, jax.random.randint(keys[1], (sizes.batch,), 0, sizes.classes)
    tokens = jax.random.randint(keys[0], (sizes.batch, sizes.tokens + 1), 0, sizes.classes)
    return model, tokens[:, :-1], tokens[:, 1:]
