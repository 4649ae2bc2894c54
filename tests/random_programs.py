"""Small programs composed of steps, for tests that compose them at random."""

import re
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import jax.random as jr
from jax import lax

SIZE = 4
Op = Callable[[jax.Array, jax.Array], jax.Array]


def _scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h * row), x[0], x)[1]


def _while(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: y / 2 + jnp.tanh(y @ w), x)


def _cond(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(x.shape[0] > jnp.array(2), lambda x, w: x @ w, lambda x, w: x + w, x, w)


def _attend(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((SIZE, SIZE), bool)), x @ w.T, -1e9)
    return jax.nn.softmax(scores) @ x


# Each keeps the shape, and magnitudes of order one, so that the bound on the error of a whole program is known.
OPS: dict[str, Op] = {
    "matmul": lambda x, w: x @ w,
    "matmul_left": lambda x, w: w @ x,
    "add": lambda x, w: x + w,
    "sub": lambda x, w: x - w,
    "mul": lambda x, w: x * jnp.tanh(w),
    "tanh": lambda x, w: jnp.tanh(x),
    "relu": lambda x, w: jax.nn.relu(x),
    "exp": lambda x, w: jnp.exp(jnp.clip(x, -2, 1)),
    "softmax": lambda x, w: jax.nn.softmax(x),
    "norm": lambda x, w: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2),
    "sum": lambda x, w: x / 2 + jnp.sum(x, 0, keepdims=True) / SIZE,
    "transpose": lambda x, w: x.T,
    "reshape": lambda x, w: x.reshape(2, -1)[::-1].reshape(SIZE, SIZE),
    "concatenate": lambda x, w: jnp.concatenate([x[:2], w[2:]]),
    "attend": _attend,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
WRAPS: dict[str, Callable[[Op], Op]] = {
    "plain": lambda op: op,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda op: lambda x, w: jax.vmap(op, (0, None))(jnp.stack([x, -x]), w)[0],
    "branches": lambda op: lambda x, w: op(x, w) / 2 + x / 2,
}

Steps = list[tuple[str, str]]


def compose(chosen: Steps, ops: Mapping[str, Op] = OPS) -> Op:
    wrapped = [WRAPS[wrap](ops[op]) for op, wrap in chosen]

    def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        for op in wrapped:
            x = op(x, w)
        return x, jnp.sum(x)

    return program


def arguments(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    x, w = (jr.normal(jr.key(seed), (SIZE, SIZE), jnp.float32) for seed in (0, 1))
    return x.astype(dtype), (w / 2).astype(dtype)


def types(out: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype, x.weak_type) for x in out]


def text(fn: Callable[..., Any], *args: Any) -> str:
    """A jaxpr to compare: without the addresses of functions."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))
