"""Time sides against each other: interleaved, with median and spread. A side that fails says why; the others go on."""

import gc
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from ._tables import Column, number, percent, significant


class Times(NamedTuple):
    """The seconds of each repeat."""

    seconds: list[float]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float | None:
        """Half the distance between the quartiles, divided by the median. None for a single repeat."""
        if len(self.seconds) < 2:
            return None
        low, _, high = statistics.quantiles(self.seconds, n=4)
        return (high - low) / 2 / self.median

    def over(self, other: "Times") -> float:
        """The median over the repeats of the ratio of two neighbours in time."""
        if len(self.seconds) != len(other.seconds):
            return self.median / other.median
        return statistics.median(a / b for a, b in zip(self.seconds, other.seconds, strict=True))


class Unavailable(Exception):
    """A side that can't run here. The message says why in a few words."""


class Failure(NamedTuple):
    """Takes the place of a result."""

    why: str


def few_words(error: Exception) -> str:
    """An error as text that is short enough for a table: its type and first line."""
    text = f"{type(error).__name__}: {error}".strip().splitlines()[0]
    if isinstance(error, Unavailable):
        return str(error)
    if "RESOURCE_EXHAUSTED" in text or "out of memory" in text.lower():
        return "out of memory"
    return text if len(text) <= 100 else text[:99] + "…"


def attempt(fn: Callable[..., Any], *args: Any) -> Any:
    """Call `fn`, and return a `Failure` if it raises: peers fail in many ways, and the run should go on."""
    try:
        return fn(*args)
    except Exception as error:
        return Failure(few_words(error))


def seconds(fn: Callable[[], Any], calls: int = 1, ready: Callable[[Any], Any] = jax.block_until_ready) -> float:
    """Seconds per call, averaged over `calls`, until the results are ready."""
    gc.collect()
    gc.disable()
    try:
        start = time.perf_counter()
        for _ in range(calls):
            out = fn()
        ready(out)
        return (time.perf_counter() - start) / calls
    finally:
        gc.enable()


def interleave(sides: Sequence[Callable[[], float]], repeats: int) -> list[Times]:
    """Time the sides in turn, so that a busy moment hits all of them. Drops the first round."""
    rounds = [[side() for side in sides] for _ in range(repeats + 1)]
    return [Times(list(column)) for column in zip(*rounds[1:], strict=True)]


def race(sides: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, Times | Failure]:
    """Like `interleave`, for sides that may fail: a side that raises drops out."""
    taken: dict[str, list[float]] = {name: [] for name in sides}
    failed: dict[str, Failure] = {}
    for _ in range(repeats + 1):
        for name, side in sides.items():
            if name not in failed:
                got = attempt(side)
                failed |= {name: got} if isinstance(got, Failure) else {}
                taken[name].append(got)
    return {name: failed[name] if name in failed else Times(taken[name][1:]) for name in sides}


def figures(raced: Mapping[str, Times | Failure], against: Mapping[str, str]) -> dict[str, dict[str, Any]]:
    """The rows of a race: ms, spread, and for each key of `against` how many times as fast as that side it is."""
    rows: dict[str, dict[str, Any]] = {}
    for name, times in raced.items():
        if isinstance(times, Failure):
            rows[name] = {"note": times.why}
            continue
        rows[name] = {"ms": 1e3 * times.median, "spread": times.spread}
        for key, side in against.items():
            other = raced.get(side)
            rows[name][key] = other.over(times) if isinstance(other, Times) else None
    return rows


class Row(NamedTuple):
    """One comparison of `ours` with `plain`; `target` is the largest ratio to accept, if any."""

    name: str
    plain: Times
    ours: Times
    target: float | None

    @property
    def ratio(self) -> float:
        return self.ours.over(self.plain)

    def as_dict(self) -> dict[str, Any]:
        row = {"what": self.name, "ratio": self.ratio, "target": self.target}
        for side, times in (("plain", self.plain), ("ours", self.ours)):
            row |= {f"{side}_ms": 1e3 * times.median, f"{side}_spread": times.spread}
        if self.target is not None:
            row["verdict"] = "met" if self.ratio <= self.target else "missed"
        return row


COMPARISON = (
    Column("", "what"),
    Column("plain ms", "plain_ms", significant),
    Column("spread", "plain_spread", percent),
    Column("ours ms", "ours_ms", significant),
    Column("spread", "ours_spread", percent),
    Column("ratio", "ratio", number(2)),
    Column("target", "target", lambda x: f"<= {x:g}"),
    Column("verdict", "verdict"),
)
