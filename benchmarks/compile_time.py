"""How much time does `amp` add before anything runs?

    python -m benchmarks.compile_time [--small] [--compiles 2]

The time to trace, lower and compile a 12-layer ViT, with `amp` and without: the loss, and the loss with its gradient,
with layers unrolled and in a `scan`. And the time of the second eager call of a small MLP, with `amp` and without.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

import jaxamp

from ._networks import SIZES, Sizes, loss_fn, make
from ._tables import parser, publish
from ._timing import COMPARISON as COLUMNS
from ._timing import Failure, Row, Times, attempt, interleave, seconds

AMP = jaxamp.amp(compute_dtype=jnp.bfloat16)
SMALL = Sizes(layers=1, width=16, heads=2, tokens=8, batch=2, classes=10)
OUTER = {"loss": lambda fn: fn, "value_and_grad": jax.value_and_grad}
Stage = dict[str, list[float]]


def fresh() -> Callable[..., Any]:
    """The loss as a new function object that is in no cache."""
    return lambda *args: loss_fn(*args)


def stages(fn: Callable[..., Any], shapes: Any, kept: Stage, compiles: bool) -> None:
    """Trace, lower and, if asked, compile `fn`; append the seconds of each to `kept`."""
    made: list[Any] = [jax.jit(fn)]
    work = {"trace": lambda: made.append(made[0].trace(*shapes)), "lower": lambda: made.append(made[1].lower())}
    if compiles:
        work["compile"] = lambda: made.append(made[2].compile())
    for name, do in work.items():
        kept.setdefault(name, []).append(seconds(do))


def network(sizes: Sizes, stacked: bool, what: str, repeats: int, compiles: int) -> list[Row]:
    """Rows of one network. The sides take turns; the first round is dropped, except for its compilation."""
    shapes = jax.eval_shape(lambda: make("vit", sizes, stacked=stacked))
    plain: Stage = {}
    ours: Stage = {}
    for number in range(repeats + 1):
        stages(OUTER[what](fresh()), shapes, plain, number < compiles)
        stages(OUTER[what](AMP(fresh())), shapes, ours, number < compiles)
    how = "scan" if stacked else "unrolled"
    first = {"trace": 1, "lower": 1, "compile": 0}
    sums = [Times([t + w for t, w in zip(s["trace"][1:], s["lower"][1:], strict=True)]) for s in (plain, ours)]
    parts = [
        Row(f"{stage}, {how}, {what}", Times(plain[stage][at:]), Times(ours[stage][at:]), 1.0 if at == 0 else None)
        for stage, at in first.items()
    ]
    return [*parts, Row(f"trace and lower, {how}, {what}", *sums, target=2.0)]


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
    asked = parser(__doc__, "the loss of one thin layer, few repeats")
    asked.add_argument("--compiles", type=int, default=1, help="how many of the repeats compile; all of them trace")
    options = asked.parse_args()
    sizes, repeats, calls = (SMALL, 2, 10) if options.small else (SIZES["vit"], 4, 200)
    rows = [eager(calls, repeats).as_dict()]
    for stacked in (False, True):
        for what in ["loss"] if options.small else OUTER:
            got = attempt(network, sizes, stacked, what, repeats, options.compiles)
            failed = isinstance(got, Failure)
            rows += [{"what": what, "verdict": got.why}] if failed else [row.as_dict() for row in got]
    notes = [
        f"{sizes.layers} layers; {repeats} repeats, {options.compiles} of them with compilation.",
        "Ratio: time divided by that of plain float32, median over the repeats. Compile times include autotuning.",
    ]
    publish("compile_time", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
