"""Networks of scientific computing, in bare JAX: message passing on a graph, and the Laplacian of an MLP."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from .net import Draw, Net, Tree, dense, squared_error


def messages(layers: int = 3, width: int = 128, nodes: int = 20_000, edges: int = 200_000) -> Net:
    """Message passing: an MLP on each edge, a sum over the edges of a node, and an MLP on each node."""
    draw = Draw()

    def layer() -> Tree:
        shapes = {"edge": (3 * width, width), "message": (width, width), "node": (2 * width, width)}
        return {name: draw.dense(*shape) for name, shape in (shapes | {"update": (width, width)}).items()}

    def loss(params: Any, x: Any, features: Any, ends: Any, y: Any) -> Any:
        senders, receivers = ends
        for p in params:
            h = jnp.concatenate([x[senders], x[receivers], features], axis=-1)
            h = dense(p["message"], jax.nn.silu(dense(p["edge"], h)))
            total = jax.ops.segment_sum(h, receivers, len(x)) * (nodes / edges)
            h = jax.nn.silu(dense(p["node"], jnp.concatenate([x, total], axis=-1)))
            x = x + dense(p["update"], h)
        return squared_error(x, y)

    inputs = draw.normal(nodes, width), draw.normal(edges, width), draw.integers(nodes, 2, edges)
    return Net(loss, [layer() for _ in range(layers)], (*inputs, draw.normal(nodes, width)))


def laplacian(batch: int = 4096, widths: Sequence[int] = (8, 512, 512, 512)) -> Net:
    """The Laplacian of an MLP at each point, as in physics-informed networks, and its gradient: third derivatives."""
    draw = Draw()
    params = [draw.dense(a, b) for a, b in zip(widths, (*widths[1:], 1), strict=True)]

    def value(params: Any, x: Any) -> Any:
        for p in params[:-1]:
            x = jnp.tanh(dense(p, x))
        return dense(params[-1], x)[0]

    def loss(params: Any, x: Any, y: Any) -> Any:
        def at(x: Any) -> Any:
            slope = jax.grad(lambda x: value(params, x))
            return sum(jax.jvp(slope, (x,), (one,))[1] @ one for one in jnp.eye(len(x), dtype=x.dtype))

        return squared_error(jax.vmap(at)(x), y)

    return Net(loss, params, (draw.normal(batch, widths[0]), draw.normal(batch)))
