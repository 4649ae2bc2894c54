"""Timing two sides against each other: interleaved, with median and spread, and a table of ratios."""

import gc
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax


class Times(NamedTuple):
    """Seconds of each repeat."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """Half the distance between the quartiles, as a share of the median."""
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def __str__(self) -> str:
        return f"{1e3 * self.median:.4g} ms ± {self.spread:.0%}"


def seconds(fn: Callable[[], Any], calls: int = 1) -> float:
    """Seconds that a call takes, over `calls` of them, until its results are there."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            out = fn()
        jax.block_until_ready(out)
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def interleave(sides: Sequence[Callable[[], float]], repeats: int) -> list[Times]:
    """Ask the sides for their times in turn, so that a busy moment hits all of them. The first round is dropped."""
    rounds = [[side() for side in sides] for _ in range(repeats + 1)]
    return [Times(list(column)) for column in zip(*rounds[1:], strict=True)]


class Row(NamedTuple):
    """One comparison: `plain` is what `ours` is measured against; `target` the ratio that it may cost."""

    name: str
    plain: Times
    ours: Times
    target: float

    @property
    def ratio(self) -> float:
        """The median of the ratios of the repeats: each is of two neighbours in time."""
        return statistics.median(a / p for a, p in zip(self.ours.seconds, self.plain.seconds, strict=True))


def print_table(rows: Sequence[Row]) -> None:
    device = jax.devices()[0]
    print(
        f"device {device.device_kind} ({device.platform}), jax {jax.__version__}, {len(rows[0].ours.seconds)} repeats"
    )
    print(f"{'':44}{'plain':>20}{'ours':>20}{'ratio':>8}{'target':>9}")
    for row in rows:
        verdict = "met" if row.ratio <= row.target else "missed"
        print(f"{row.name:44}{row.plain!s:>20}{row.ours!s:>20}{row.ratio:>8.2f}{f'<= {row.target:g}':>9}  {verdict}")
