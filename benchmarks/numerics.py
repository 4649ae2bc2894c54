"""How far from float64 are values and gradients, in float32, under `amp`, and with everything low?

    python -m benchmarks.numerics [--small] [--markdown PATH]

Programs that mixed precision is made for, and programs that it is not made for. The reference is the program in
float64, on the same numbers. Errors are the norm of the difference divided by the norm. "All low" casts the arguments,
so that the whole program runs in the low dtype.
"""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.linalg import cho_solve

import jaxamp

from ._tables import Column, device, markdown, parser, publish, versions


def shortest(x: float) -> str:
    return f"{x:.0e}" if np.isfinite(x) else "not finite"


COLUMNS = (
    Column("program", "program"),
    Column("side", "title"),
    Column("error of the value", "value", shortest),
    Column("error of the gradient", "gradient", shortest),
    Column("ratio to float32", "ratio", lambda x: f"{x:.0e}" if np.isfinite(x) else "-"),
)
NOTES = ("Ratio: the error of the gradient, divided by that of float32.",)


class Program(NamedTuple):
    """A function of parameters and data, both normally distributed. `made_for` says whether `amp` is meant for it."""

    name: str
    fn: Callable[[Any, Any], Any]
    params: tuple[int, ...]
    data: tuple[int, ...]
    made_for: bool = True
    scale: float = 1.0  # of the parameters


def norm(x: Any) -> Any:
    return (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def matmul(w: Any, x: Any) -> Any:
    return x @ w


def mlp(ws: Any, x: Any) -> Any:
    for w in ws:
        x = jax.nn.gelu(x @ w)
    return x


def residual_network(ws: Any, x: Any) -> Any:
    for w in ws:
        x = x + jax.nn.relu(norm(x) @ w)
    return norm(x)


def attention(ws: Any, x: Any) -> Any:
    q, k, v = (x @ w for w in ws)
    return jax.nn.softmax(q @ k.T / np.sqrt(x.shape[-1]).astype(x.dtype)) @ v


def cross_entropy(w: Any, x: Any) -> Any:
    return -jnp.mean(jax.nn.log_softmax(x @ w)[:, 0])


def recurrence(w: Any, x: Any) -> Any:
    return jax.lax.scan(lambda h, row: (jnp.tanh(h @ w + row), None), jnp.zeros_like(x[0]), x)[0]


def gram_cholesky(w: Any, x: Any) -> Any:
    features = jnp.tanh(w)
    kernel = features @ features.T + jnp.asarray(1e-2, x.dtype) * jnp.eye(len(w), dtype=x.dtype)
    return x @ cho_solve((jnp.linalg.cholesky(kernel), True), x)


def cholesky_after_a_matmul(w: Any, x: Any) -> Any:
    return gram_cholesky(x @ w, x[:, 0])


def squared_distances(w: Any, x: Any) -> Any:
    x = x * w
    sizes = jnp.sum(x**2, -1)
    return sizes[:, None] + sizes[None] - 2 * x @ x.T


def distances_off_centre(w: Any, x: Any) -> Any:
    return squared_distances(w, x + 30)


def small_temperature(w: Any, x: Any) -> Any:
    return jax.nn.softmax(100 * (x @ w), axis=-1)


def normal_equations(w: Any, x: Any) -> Any:
    powers = jnp.stack([x[:, 0] ** i for i in range(6)], -1)  # badly conditioned columns
    return jnp.linalg.solve(powers.T @ powers, powers.T @ (x @ w))


def finite_difference(w: Any, x: Any) -> Any:
    f = lambda x: jnp.sum(jnp.tanh(x @ w), -1)
    step = jnp.asarray(1e-2, x.dtype)
    return (f(x + step) - f(x)) / step


PROGRAMS = (
    Program("one matmul", matmul, (256, 256), (64, 256), scale=1 / 16),
    Program("4 layers of gelu", mlp, (4, 128, 128), (64, 128), scale=1 / 8),
    Program("16 residual layers with norms", residual_network, (16, 128, 128), (64, 128), scale=1 / 11),
    Program("attention", attention, (3, 64, 64), (128, 64), scale=1 / 8),
    Program("softmax cross-entropy, 1000 classes", cross_entropy, (64, 1000), (128, 64), scale=1 / 8),
    Program("recurrence over 200 steps", recurrence, (64, 64), (200, 64), scale=1 / 16),
    Program("Cholesky of a Gram matrix", gram_cholesky, (24, 6), (24,)),
    Program("squared distances of centred data", squared_distances, (16,), (64, 16)),
    Program("squared distances, 30 off centre", distances_off_centre, (16,), (64, 16), False),
    Program("Cholesky of features from a matmul", cholesky_after_a_matmul, (32, 16), (24, 32), False, scale=1 / 6),
    Program("softmax at temperature 0.01", small_temperature, (64, 32), (64, 64), False, scale=1 / 8),
    Program("normal equations, ill-conditioned", normal_equations, (8, 1), (64, 8), False),
    Program("finite difference, step 0.01", finite_difference, (64, 64), (16, 64), False, scale=1 / 8),
)


def all_low(fn: Callable[..., Any], dtype: Any) -> Callable[..., Any]:
    return lambda *args: fn(*jaxamp.cast_floating(args, dtype)).astype(jnp.float32)


def sides(fn: Callable[..., Any], low: tuple[str, ...] = ("bfloat16", "float16")) -> Iterator[tuple[str, Any]]:
    yield "float32", fn
    for dtype in low:
        yield f"ours, {dtype}", jaxamp.amp(fn, compute_dtype=dtype)
        yield f"all {dtype}", all_low(fn, dtype)


def evaluate(fn: Callable[..., Any], args: Any, seed: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The value, and the gradient of a random projection of it."""

    def run(params: Any, data: Any) -> Any:
        value, pull = jax.vjp(lambda params: fn(params, data), params)
        return value, pull(jnp.asarray(seed.reshape(value.shape), value.dtype))[0]

    return tuple(np.asarray(x, np.float64) for x in jax.jit(run)(*args))


def distance(found: np.ndarray, expected: np.ndarray) -> float:
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def measure(program: Program) -> list[dict[str, Any]]:
    draw = np.random.default_rng(0)
    params = program.scale * draw.standard_normal(program.params).astype(np.float32)
    data = draw.standard_normal(program.data).astype(np.float32)
    size = jax.eval_shape(program.fn, params, data).size
    seed = draw.standard_normal(size).astype(np.float32)
    with jax.enable_x64(True):
        wide = jnp.asarray(params, jnp.float64), jnp.asarray(data, jnp.float64)
        expected = evaluate(program.fn, wide, seed)
    rows = []
    for title, fn in sides(program.fn):
        try:
            value, gradient = map(distance, evaluate(fn, (jnp.asarray(params), jnp.asarray(data)), seed), expected)
        except NotImplementedError:  # LAPACK and its kin have no low dtypes
            value = gradient = None
        rows.append({"program": program.name, "side": title, "title": title, "value": value, "gradient": gradient})
    for row in rows:
        row["ratio"] = row["gradient"] / rows[0]["gradient"] if row["gradient"] is not None else None
    return rows


def page(rows: list[dict[str, Any]]) -> str:
    """Two tables: a row for each program, a column for each side, the errors of the gradients."""
    titles = list(dict.fromkeys(row["title"] for row in rows))
    columns = [Column("program", "program"), *(Column(title, title, shortest) for title in titles)]
    wide: dict[str, dict[str, Any]] = {}
    for row in rows:
        wide.setdefault(row["program"], {"program": row["program"]})[row["title"]] = row["gradient"]
    parts = [f"Errors of gradients against float64, on {device()}, jax {versions()['jax']}."]
    for made_for, title in ((True, "What it is made for"), (False, "What it is not made for")):
        names = [program.name for program in PROGRAMS if program.made_for == made_for]
        parts += [f"**{title}**", markdown(columns, [wide[name] for name in names if name in wide])]
    return "\n\n".join([*parts, "A dash: JAX has no such operation in that dtype."]) + "\n"


def main() -> None:
    made = parser(__doc__, "two programs")
    made.add_argument("--markdown", type=Path, metavar="PATH", help="write the errors of gradients as tables")
    options = made.parse_args()
    chosen = PROGRAMS[:1] + PROGRAMS[-1:] if options.small else PROGRAMS
    rows = [row for program in chosen for row in measure(program)]
    publish("numerics", COLUMNS, rows, NOTES, options.json)
    if options.markdown:
        options.markdown.write_text(page(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
