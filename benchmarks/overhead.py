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

from ._models import transformer
from ._timing import Row, interleave, print_table, seconds

AMP = jaxamp.amp(compute_dtype=jnp.bfloat16)


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
