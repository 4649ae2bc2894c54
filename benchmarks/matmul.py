"""How long does a matmul with float32 weights take, forward and backward, and how accurate is its gradient?

    python -m benchmarks.matmul [--small]

`x @ w` and its two gradients, where x and w come in as float32. Sides: as written; cast by hand, which rounds the
weight's gradient to bfloat16; the same with `preferred_element_type=float32`, whose backward matmuls are float32 x
bfloat16; and ours. The error is that of the weight's gradient, the norm of the difference divided by the norm: against
the product accumulated in float32, and for small sizes against the float64 product. Operands and cotangent are values
that bfloat16 can represent, so all sides multiply the same numbers.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import jaxamp

from ._tables import Column, number, parser, percent, publish, significant
from ._timing import Failure, attempt, figures, race, seconds

LOW = jnp.bfloat16
FLOAT64_UP_TO = 2**27  # multiplications, which numpy does in a moment
COLUMNS = (
    Column("x", "x"),
    Column("w", "w"),
    Column("side", "title"),
    Column("ms", "ms", significant),
    Column("spread", "spread", percent),
    Column("ratio to float32", "vs_float32", number(2, "x")),
    Column("error of dw", "error", lambda x: f"{x:.1e}"),
    Column("against float64", "error64", lambda x: f"{x:.1e}"),
    Column("note", "note"),
)
NOTES = (
    "Ratio: how many times as fast as float32 (on a GPU, TF32), forward and backward, including casts of inputs.",
    "Error of dw: against the product accumulated in float32, of the same operands, which are exact in bfloat16.",
)


class Shape(NamedTuple):
    rows: int
    width: int
    out: int


SHAPES = Shape(256 * 196, 768, 4 * 768), Shape(4096, 4096, 4096), Shape(512, 256, 1024)
SMALL_SHAPES = (Shape(64, 32, 128),)


def float32(x: Any, w: Any) -> Any:
    return x @ w


def by_hand(x: Any, w: Any) -> Any:
    return (x.astype(LOW) @ w.astype(LOW)).astype(jnp.float32)


def preferred(x: Any, w: Any) -> Any:
    return jnp.matmul(x.astype(LOW), w.astype(LOW), preferred_element_type=jnp.float32)


SIDES: dict[str, Callable[[Any, Any], Any]] = {
    "float32": float32,
    "cast by hand": by_hand,
    "preferred_element_type": preferred,
    "ours": jaxamp.amp(float32, compute_dtype=LOW),
}


def both_ways(matmul: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    """The result and the two gradients, compiled."""

    def run(x: Any, w: Any, ct: Any) -> Any:
        y, pull = jax.vjp(matmul, x, w)
        return y, *pull(ct)

    return jax.jit(run)


def operands(shape: Shape) -> tuple[Any, Any, Any]:
    keys = jax.random.split(jax.random.key(0), 3)
    sizes = (shape.rows, shape.width), (shape.width, shape.out), (shape.rows, shape.out)
    drawn = (jax.random.normal(key, size) for key, size in zip(keys, sizes, strict=True))
    return tuple(a.astype(LOW).astype(jnp.float32) for a in drawn)


def distance(a: Any, ref: Any) -> float:
    return float(jnp.linalg.norm(a - ref) / jnp.linalg.norm(ref))


@jax.jit
def accumulated(x: Any, ct: Any) -> Any:
    """The weight's gradient from low-precision operands, accumulated in float32 and not rounded."""
    return jnp.matmul(x.astype(LOW).T, ct.astype(LOW), preferred_element_type=jnp.float32)


def errors(dw: Any, x: Any, ct: Any) -> dict[str, float | None]:
    found: dict[str, float | None] = {"error": distance(dw, accumulated(x, ct)), "error64": None}
    if x.size * ct.shape[-1] <= FLOAT64_UP_TO:
        ref = np.asarray(x, np.float64).T @ np.asarray(ct, np.float64)
        found["error64"] = float(np.linalg.norm(np.asarray(dw, np.float64) - ref) / np.linalg.norm(ref))
    return found


def measure(shape: Shape, repeats: int, calls: int) -> list[dict[str, Any]]:
    args = operands(shape)
    runs = {name: both_ways(matmul) for name, matmul in SIDES.items()}
    rows = {}
    for name, run in runs.items():
        found = attempt(lambda run=run: errors(run(*args)[2], args[0], args[2]))  # this also compiles
        rows[name] = {"note": found.why} if isinstance(found, Failure) else found
    sides = {name: lambda run=run: seconds(lambda: run(*args), calls) for name, run in runs.items()}
    for name, row in figures(race(sides, repeats), {"vs_float32": "float32"}).items():
        rows[name] |= row
    about = {"x": f"{shape.rows} x {shape.width}", "w": f"{shape.width} x {shape.out}"}
    return [{**about, "side": name, "title": name, **row} for name, row in rows.items()]


def main() -> None:
    options = parser(__doc__, "one small shape").parse_args()
    shapes, repeats, calls = (SMALL_SHAPES, 3, 3) if options.small else (SHAPES, 10, 10)
    rows = [row for shape in shapes for row in measure(shape, repeats, calls)]
    publish("matmul", COLUMNS, rows, [*NOTES, f"{repeats} repeats of {calls} calls."], options.json)


if __name__ == "__main__":
    main()
