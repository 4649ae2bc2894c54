"""How long are the steps of compressed Adam after a change of the gradient?

    python -m benchmarks.step_length [--small]

64 numbers, every second one with a gradient of 1. The gradient of the others is small, and changes after 2,000 steps.
If second moments follow, steps become as long as the learning rate again. Sides: `optim.flash_adam`, the same with the
published codes, which are rounded to nearest, and `optax.adam` in float32.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jaxamp import optim

from ._tables import Column, number, parser, publish

CHANGES = ((0.05, 0.2, 0.0), (0.05, 0.3, 0.0), (0.2, 0.05, 0.0), (0.01, 0.05, 0.5))
RATE = 1e-3
MOMENTS = ("a sixth", "half", "the end")
PUBLISHED = optim.Storage(codes="published", dither=False)
SIDES: dict[str, tuple[str, Callable[[], Any]]] = {
    "float32": ("optax.adam, float32", lambda: optax.adam(RATE)),
    "ours": ("ours", lambda: optim.flash_adam(RATE)),
    "published": ("published codes", lambda: optim.flash_adam(RATE, storage=PUBLISHED)),
}
COLUMNS = (
    Column("gradient", "change"),
    Column("side", "title"),
    *(Column(f"after {moment}", moment, number(2)) for moment in MOMENTS),
    Column("ratio to float32", "ratio", number(2, "x")),
)


def lengths(tx: optax.GradientTransformation, change: tuple[float, float, float], first: int, then: int) -> Any:
    """The mean length of the small entries' steps, over the learning rate, for each step."""
    before, after, noise = change
    params = jnp.zeros(64)

    def step(state: Any, i: jax.Array) -> tuple[Any, jax.Array]:
        small = jnp.where(i < first, before, after)
        mean = jnp.where(jnp.arange(64) % 2 == 0, 1.0, small)
        grads = mean * (1 + noise * jax.random.normal(jax.random.fold_in(jax.random.key(0), i), (64,)))
        updates, state = tx.update(grads, state, params)
        return state, jnp.abs(updates[1::2]).mean() / RATE

    run = functools.partial(jax.lax.scan, step, xs=jnp.arange(first + then))
    return np.asarray(jax.jit(lambda state: run(state)[1])(tx.init(params)))


def measure(change: tuple[float, float, float], first: int, then: int, window: int) -> list[dict[str, Any]]:
    before, after, noise = change
    name = f"{before:g} → {after:g}" + (f", {noise:.0%} noise" if noise else "")
    rows = []
    for side, (title, make) in SIDES.items():
        means = lengths(make(), change, first, then)[: first + then].reshape(-1, window).mean(1)
        at = [(first + round(then * share)) // window - 1 for share in (1 / 6, 1 / 2, 1)]
        figures = {moment: float(means[i]) for moment, i in zip(MOMENTS, at, strict=True)}
        curve = [float(x) for x in means[first // window :]]
        rows.append({"change": name, "side": side, "title": title, "window": window, "curve": curve, **figures})
    return [{**row, "ratio": row[MOMENTS[-1]] / rows[0][MOMENTS[-1]]} for row in rows]


def main() -> None:
    options = parser(__doc__, "few steps").parse_args()
    first, then, window = (60, 60, 10) if options.small else (2000, 6000, 50)
    rows = [row for change in CHANGES for row in measure(change, first, then, window)]
    notes = [
        f"Mean length of a step over the learning rate, in {window} steps, after a part of {then} more steps.",
        "Ratio: at the end.",
    ]
    publish("step_length", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
