"""What does `amp` cost before anything runs?

    python -m benchmarks.overhead [--small]

Three ratios: the time to trace and lower a 12-layer transformer loss through `amp` against the plain one, the same with
its gradient, and the second eager call of a small MLP through `amp` against the plain eager call.
"""

import argparse
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxamp

from ._timing import Row, interleave, print_table, seconds

AMP = jaxamp.amp(compute_dtype=jnp.bfloat16)


def transformer(
    layers: int, width: int = 64, tokens: int = 32
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
    return fresh, (params, shape(2, tokens, width), jax.ShapeDtypeStruct((2, tokens), jnp.int32))


def lowering(layers: int, repeats: int) -> list[Row]:
    fresh, args = transformer(layers)
    rows = []
    for name, outer in (("loss", lambda fn: fn), ("value_and_grad", jax.value_and_grad)):

        def plain(outer: Callable[..., Any] = outer) -> float:
            return seconds(lambda: jax.jit(outer(fresh())).lower(*args))

        def amp(outer: Callable[..., Any] = outer) -> float:
            return seconds(lambda: jax.jit(outer(AMP(fresh()))).lower(*args))

        rows.append(Row(f"trace and lower, {layers} layers, {name}", *interleave([plain, amp], repeats), target=2.0))
    return rows


def eager(calls: int, repeats: int) -> Row:
    def mlp(params: Any, x: Any) -> Any:
        for w, b in params:
            x = jax.nn.relu(x @ w + b)
        return x.mean()

    args = [(jnp.ones((32, 32)), jnp.zeros(32))] * 3, jnp.ones((8, 32))
    wrapped = AMP(mlp)
    jax.block_until_ready((mlp(*args), wrapped(*args)))  # the first call traces and compiles
    sides = [lambda: seconds(lambda: mlp(*args), calls), lambda: seconds(lambda: wrapped(*args), calls)]
    return Row("second eager call, small MLP", *interleave(sides, repeats), target=2.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--small", action="store_true", help="two layers and few repeats: does it run at all?")
    small = parser.parse_args().small
    layers, repeats, calls = (2, 3, 10) if small else (12, 9, 200)
    print_table([*lowering(layers, repeats), eager(calls, repeats)])


if __name__ == "__main__":
    main()
