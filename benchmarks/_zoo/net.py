"""What the networks of the zoo have in common: a loss, its parameters, and how these are drawn."""

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

Tree = dict[str, Any]
_SEED = ContextVar("seed", default=0)
_INITS: dict[str, Callable[..., Any]] = {}  # program -> the same, compiled


class Net(NamedTuple):
    """A float32 loss, called as `loss(params, *inputs)`, with its arguments."""

    loss: Callable[..., Any]
    params: Any
    inputs: tuple[Any, ...]


@contextlib.contextmanager
def drawn_with(seed: int) -> Iterator[None]:
    """Networks that are made in here have weights and inputs of their own."""
    before = _SEED.set(seed)
    try:
        yield
    finally:
        _SEED.reset(before)


def init_key() -> Any:
    """What a library draws the weights of a network with."""
    return jax.random.key(_SEED.get())


class Draw:
    """Random arrays. NumPy makes them, because JAX would compile a program for each shape."""

    def __init__(self) -> None:
        self.source = np.random.default_rng(_SEED.get())

    def normal(self, *shape: int) -> Any:
        return jnp.asarray(self.source.standard_normal(shape, np.float32))

    def integers(self, below: int, *shape: int) -> Any:
        return jnp.asarray(self.source.integers(below, size=shape, dtype=np.int32))

    def weight(self, *shape: int) -> Any:
        """A matrix or filter whose last axis is the output. The results have the size of the operands."""
        fan_in = np.prod(shape[:-1])
        return jnp.asarray(self.source.standard_normal(shape, np.float32) / np.float32(np.sqrt(fan_in)))

    def dense(self, inputs: int, outputs: int) -> Tree:
        return {"w": self.weight(inputs, outputs), "b": jnp.zeros(outputs)}

    def norm(self, width: int) -> Tree:
        return {"scale": jnp.ones(width), "offset": jnp.zeros(width)}


def dense(p: Tree, x: Any) -> Any:
    return x @ p["w"] + p["b"]


def layer_norm(p: Tree, x: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    variance = jnp.var(x, -1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * p["scale"] + p["offset"]


def rms_norm(scale: Any, x: Any) -> Any:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def cross_entropy(logits: Any, labels: Any) -> Any:
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def squared_error(x: Any, y: Any) -> Any:
    return jnp.mean((x - y) ** 2)


def haiku_params(net: Any, *inputs: Any) -> Any:
    """What the `init` of a Haiku network returns, drawn in one program, which is compiled once for all seeds."""
    lowered = jax.jit(net.init).lower(init_key(), *inputs)
    program = lowered.as_text()
    if program not in _INITS:
        _INITS[program] = lowered.compile()
    return _INITS[program](init_key(), *inputs)
