"""How long does a report take, compared with tracing the function?

    python -m benchmarks.report_time [--small]

`amp_report` of the loss of a 48-layer ViT, compared with tracing its value and gradient without `amp`; and for the
forward pass alone, compared with tracing the loss. With layers unrolled and in a `scan`. Also the size of its page.
"""

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import jaxamp

from ._networks import Sizes, loss_fn, make
from ._tables import Column, number, parser, publish
from ._timing import COMPARISON, Row, interleave, seconds

SMALL = Sizes(layers=1, width=16, heads=2, tokens=8, batch=2, classes=10)
LARGE = Sizes(layers=48, batch=8)
COLUMNS = (*COMPARISON, Column("rows", "rows"), Column("page MB", "page_mb", number(2)))


def fresh() -> Callable[..., Any]:
    """The loss as a new function object that is in no cache."""
    return lambda *args: loss_fn(*args)


def measure(sizes: Sizes, stacked: bool, repeats: int) -> list[dict[str, Any]]:
    shapes = jax.eval_shape(lambda: make("vit", sizes, stacked=stacked))
    layers, found = "scan" if stacked else "unrolled", []
    plain = {
        "forward and backward": lambda: jax.make_jaxpr(jax.value_and_grad(fresh()))(*shapes),
        "forward": lambda: jax.make_jaxpr(fresh())(*shapes),
    }
    for what, trace in plain.items():
        report = jaxamp.amp_report(fresh(), compute_dtype=jnp.bfloat16, backward="backward" in what)
        sides = [lambda trace=trace: seconds(trace), lambda report=report: seconds(lambda: report(*shapes))]
        row = Row(f"{sizes.layers} layers, {layers}, {what}", *interleave(sides, repeats), target=3.0).as_dict()
        made = report(*shapes)
        with tempfile.TemporaryDirectory() as folder:
            page = Path(folder) / "report.html"
            made.save(page)
            found.append({**row, "rows": len(made.rows), "page_mb": page.stat().st_size / 1e6})
    return found


def main() -> None:
    options = parser(__doc__, "one thin layer and few repeats").parse_args()
    sizes, repeats = (SMALL, 2) if options.small else (LARGE, 3)
    rows = [row for stacked in (False, True) for row in measure(sizes, stacked, repeats)]
    notes = [f"{repeats} repeats. Ratio: time divided by that of tracing the plain function, median over the repeats."]
    publish("report_time", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
