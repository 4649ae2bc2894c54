"""Attention in all its forms: operands, options, and the same written out in float64."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
from helpers import equations, error, normal

import jaxamp
from jaxamp._primitives import attention as module

attend = jaxamp.dot_product_attention
BATCH, TOKENS, KEYS, HEADS, WIDTH = 2, 6, 10, 4, 8


def booleans(seed: int, *shape: int) -> jax.Array:
    """Each row along the last axis has a True in it."""
    made = np.random.default_rng(seed).random(shape) < 0.6
    made[..., 0] = True
    return jax.device_put(made)


Q, K, V = (
    normal(0, BATCH, TOKENS, HEADS, WIDTH),
    normal(1, BATCH, KEYS, HEADS, WIDTH),
    normal(2, BATCH, KEYS, HEADS, WIDTH),
)
QKV = Q, K, V
BIAS = normal(3, 1, HEADS, TOKENS, KEYS)
LENGTHS = {
    "query_seq_lengths": jax.device_put(np.int32([TOKENS, 3])),
    "key_value_seq_lengths": jax.device_put(np.int32([4, KEYS])),
}


def largest_error(found: Any, expected: Any) -> float:
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    return max(map(error, jax.tree.leaves(found), jax.tree.leaves(expected)))


def attention_equations(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive in module.ATTENTION]


def dtypes_of(eqn: Any) -> tuple[list[str], list[str]]:
    """Of the operands and of the results of an equation."""
    return [v.aval.dtype.name for v in eqn.invars], [v.aval.dtype.name for v in eqn.outvars]


def runs_in(fn: Any, *args: Any) -> set[str]:
    """The dtypes that the attention of a function multiplies in, both passes alike."""
    found = attention_equations(jax.make_jaxpr(fn)(*args))
    assert found
    return {v.aval.dtype.name for eqn in found for v in eqn.invars[:3]}


def written_out(ct, q, k, v, bias=None, mask=None, **options):
    """The result, and the gradients of its product with `ct`, in numpy's float64."""
    groups = q.shape[2] // k.shape[2]
    q, k, v, ct = (np.asarray(x, np.float64) for x in (q, k, v, ct))
    k, v = (np.repeat(x, groups, axis=2) for x in (k, v))
    scale = options.get("scale") or q.shape[-1] ** -0.5
    tokens, keys = np.arange(q.shape[1])[:, None], np.arange(k.shape[1])[None]
    seen = np.ones((len(q), q.shape[2], tokens.size, keys.size), bool)
    if mask is not None:
        seen &= np.asarray(mask)
    if options.get("is_causal"):
        seen &= keys <= tokens
    if (window := options.get("local_window_size")) is not None:
        left, right = (window, window) if isinstance(window, int) else window
        seen &= (tokens - keys <= left) & (keys - tokens <= right)
    if (lengths := options.get("key_value_seq_lengths")) is not None:
        seen &= keys < np.asarray(lengths)[:, None, None, None]
    if (lengths := options.get("query_seq_lengths")) is not None:
        seen &= tokens < np.asarray(lengths)[:, None, None, None]

    scores = np.einsum("btnh,bsnh->bnts", q, k) * scale + (0.0 if bias is None else np.asarray(bias, np.float64))
    weights = np.where(seen, np.exp(scores - scores.max(-1, keepdims=True)), 0.0)
    sums = weights.sum(-1, keepdims=True)
    weights /= np.where(sums, sums, 1.0)  # a token beyond the length of its query sees nothing, and is zero
    out = np.einsum("bnts,bsnh->btnh", weights, v)

    of_weights = np.einsum("btnh,bsnh->bnts", ct, v)
    of_scores = weights * (of_weights - (of_weights * weights).sum(-1, keepdims=True))
    grouped = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
    gradients = [
        np.einsum("bnts,bsnh->btnh", of_scores, k) * scale,
        grouped(np.einsum("bnts,btnh->bsnh", of_scores, q) * scale),
        grouped(np.einsum("bnts,btnh->bsnh", weights, ct)),
    ]
    if bias is not None:
        repeated = tuple(i for i, (a, b) in enumerate(zip(bias.shape, of_scores.shape, strict=True)) if a < b)
        gradients.append(of_scores.sum(repeated, keepdims=True))
    return out, tuple(gradients)


FULL = (BATCH, HEADS, TOKENS, KEYS)
CASES = {
    "plain": {},
    "scale, causal": {"scale": 0.7, "is_causal": True},
    "mask of each head": {"mask": booleans(4, 1, HEADS, TOKENS, KEYS)},
    "padding mask": {"mask": booleans(5, BATCH, 1, 1, KEYS)},
    "lengths": LENGTHS,
    "lengths of keys, one head of keys": {"heads": 1, "key_value_seq_lengths": LENGTHS["key_value_seq_lengths"]},
    "lengths of queries, window": {"query_seq_lengths": LENGTHS["query_seq_lengths"], "local_window_size": (2, 5)},
    "window on both sides": {"local_window_size": 5},
    "window, causal": {"local_window_size": (3, 0), "is_causal": True},
    "grouped, bias": {"heads": 2, "bias": normal(7, BATCH, HEADS, 1, KEYS)},
    "bias, mask, lengths": {"bias": normal(7, *FULL), "mask": booleans(8, *FULL), **LENGTHS},
}
IN_LOW = [
    ("padding mask", jnp.bfloat16),
    ("grouped, bias", jnp.float16),
    ("bias, mask, lengths", jnp.bfloat16),
    ("bias, mask, lengths", jnp.float16),
]


def case(options: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """Operands that derivatives are taken by, and options."""
    options = dict(options)
    heads = options.pop("heads", HEADS)
    bias = [options.pop("bias")] if "bias" in options else []
    return [Q, K[:, :, :heads], V[:, :, :heads], *bias], options


def value_and_gradients(fn: Any, moving: Any) -> tuple[Any, Any]:
    """The result, and the gradients of its product with a fixed array."""

    @jax.jit
    def both_passes(moving):
        out, pull = jax.vjp(fn, *moving)
        return out, pull(normal(9, *out.shape).astype(out.dtype))

    return both_passes(moving)


def bounds(dtype: Any) -> float:
    """On the relative error, by norms: of float32 a few roundings, of a low dtype one of each operand and result."""
    return {jnp.float32: 2e-6, jnp.bfloat16: 1.2e-2, jnp.float16: 1.5e-3}[dtype]


def assert_near_float64(options, dtype):
    moving, options = case(options)
    fn = functools.partial(attend, **options)
    if dtype != jnp.float32:
        fn = jaxamp.amp(fn, compute_dtype=dtype)
        assert runs_in(fn, *moving) == {jnp.dtype(dtype).name}
    found = value_and_gradients(fn, moving)
    expected = written_out(normal(9, *Q.shape), *moving, **options)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    assert jax.tree.map(jnp.shape, found) == (Q.shape, tuple(x.shape for x in moving))
    assert largest_error(found, expected) < bounds(dtype)


def loss_of(fn, *args, **options):
    return jnp.sum(jnp.sin(fn(*args, **options)))


def written_out_gradients(*moving, **options):
    """Those of `loss_of`, in float64."""
    out, _ = written_out(Q, *moving, **options)
    return written_out(np.cos(out), *moving, **options)[1]


def lowered(fn: Any, *args: Any) -> str:
    return jax.jit(fn).trace(*args).lower(lowering_platforms=("cuda",)).as_text()
