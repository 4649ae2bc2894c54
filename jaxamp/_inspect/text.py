"""A report as text: totals, what is not as it might be, and a table grouped by scope, within 100 columns."""

import os
import sys
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from .rows import Row

WIDTH = 100
_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}


class Line(NamedTuple):
    """Rows of one scope that differ in nothing that is shown."""

    scope: str
    phase: str
    primitive: str
    dtypes: str
    reason: str
    source: str
    times: int
    flops: int
    is_wide_matmul: bool


def is_colourful(stream: Any = None) -> bool:
    stream = sys.stdout if stream is None else stream
    return "NO_COLOR" not in os.environ and hasattr(stream, "isatty") and stream.isatty()


def render(
    report: Any, *, limit: int | None = 40, colour: bool = False, more: str = "print(report.text(limit=None))"
) -> str:
    """The text of a report, with at most `limit` lines in its table; None: with all of them. `more` says how."""

    def paint(text: str, name: str) -> str:
        return f"\033[{_COLOURS[name]}m{text}\033[0m" if colour else text

    parts = [paint(f"amp report of {report.name}, compute dtype {report.compute_dtype}"[:WIDTH], "bold")]
    parts += [_pair(title, text) for title, text in totals_of(report)]
    parts += [paint(_cut(f"note: {note}", WIDTH), "yellow") for note in report.notes]
    if report.wide_matmuls:
        parts += ["", paint(f"Matmuls not in {report.compute_dtype}, and why", "red")]
        parts += [_matmul(row, reason_of(row)) for row in _unlike(report.wide_matmuls)[:10]]
    if report.wasteful_matmuls:
        parts += ["", paint(f"Matmuls with a dimension that is no multiple of {report.multiple}", "yellow")]
        parts += [_matmul(row, sizes_of(row)) for row in _unlike(report.wasteful_matmuls)[:10]]
    lines = lines_of(report)
    shown = lines if limit is None else lines[:limit]
    parts += ["", paint(_columns("operation", "times", "MFLOP", "dtypes as run", "reason", "source"), "bold")]
    scope = None
    for line in shown:
        if line.scope != scope:
            scope = line.scope
            parts.append(paint(_cut(f"{scope or '(no scope)'}", WIDTH), "green"))
        text = _columns(
            f"  {line.primitive}{'' if line.phase == 'forward' else chr(39)}",
            str(line.times),
            _millions(line.flops),
            line.dtypes,
            line.reason,
            line.source,
        )
        parts.append(paint(text, "red") if line.is_wide_matmul else text)
    if len(shown) < len(lines):
        parts.append(f"... and {len(lines) - len(shown)} lines more: {more}")
    parts.append(paint("' is the backward pass.", "dim"))
    return "\n".join(parts)


def lines_of(report: Any) -> list[Line]:
    """The table without what only moves, worst scope first: by FLOPs of matmuls that are not low, then by all FLOPs."""
    wide = set(map(id, report.wide_matmuls))
    groups: dict[tuple[Any, ...], Line] = {}
    for row in report.rows:
        if row.flops or row.kind != "other":
            source = "" if row.source is None else str(row.source)
            key = row.scope, row.phase, row.primitive, str(row.run), reason_of(row), source
            line = groups.get(key) or Line(*key, 0, 0, id(row) in wide)
            groups[key] = line._replace(times=line.times + row.times, flops=line.flops + row.flops)
    lines = list(groups.values())
    cost: dict[str, tuple[int, int]] = {}
    for line in lines:
        bad, total = cost.get(line.scope, (0, 0))
        cost[line.scope] = bad + line.flops * line.is_wide_matmul, total + line.flops
    ranks = {scope: (-bad, -total, scope) for scope, (bad, total) in cost.items()}
    return sorted(lines, key=lambda line: (ranks[line.scope], not line.is_wide_matmul, -line.flops))


def totals_of(report: Any) -> Iterator[tuple[str, str]]:
    total = sum(report.matmul_flops.values())
    shares = ", ".join(f"{100 * flops / (total or 1):.1f} % {dtype}" for dtype, flops in report.matmul_flops.items())
    yield "matmul FLOPs", f"{si(total)}: {shares}" if total else "none"
    yield "casts", f"{report.cast_count}, {si(report.cast_bytes)}B if none is fused"
    if report.kept is not None:
        before, after = report.kept
        ratio = f" ({after / before:.2f} times)" if before else ""
        yield "kept for the backward pass", f"{si(before)}B in float32, {si(after)}B under amp{ratio}"
    if report.not_entered:
        yield "not entered", ", ".join(f"{name} ({times})" for name, times in report.not_entered.items())
    if report.unmatched:
        yield "keys that matched nothing", ", ".join(map(repr, report.unmatched))


def reason_of(row: Row) -> str:
    """Backwards, the reason of what is differentiated: a stroke says that it is a derivative."""
    return row.reason.partition(": ")[2] if row.phase == "backward" and ": " in row.reason else row.reason


def sizes_of(row: Row) -> str:
    return "" if row.dims is None else " ".join(f"{name} {size}" for name, size in row.dims._asdict().items())


def _unlike(rows: Iterable[Row]) -> list[Row]:
    """One row of each kind that would be shown in the same words."""
    return list({(row.phase, row.scope, row.primitive, row.reason, row.dims, row.source): row for row in rows}.values())


def _matmul(row: Row, why: str) -> str:
    place = f"{row.scope or '(no scope)'}  {row.primitive}{'' if row.phase == 'forward' else chr(39)}"
    flops = f"{_millions(row.flops)} MFLOP".rjust(14)
    return "  " + _fit((place, 36), (flops, 14), (why, 25), (_end(str(row.source or ""), 20), 20))


def _columns(operation: str, times: str, flops: str, dtypes: str, reason: str, source: str) -> str:
    cells = (
        (operation, 22),
        (times.rjust(5), 5),
        (flops.rjust(9), 9),
        (dtypes, 18),
        (reason, 22),
        (_end(source, 19), 19),
    )
    return _fit(*cells)


def _fit(*cells: tuple[str, int]) -> str:
    return " ".join(_cut(text, width).ljust(width) for text, width in cells).rstrip()


def _cut(text: str, width: int) -> str:
    return text if len(text) <= width else text[: width - 1] + "…"


def _end(text: str, width: int) -> str:
    return text if len(text) <= width else "…" + text[1 - width :]


def _pair(title: str, text: str) -> str:
    return _cut(f"{title:<28}{text}", WIDTH)


def _millions(flops: int) -> str:
    return f"{flops / 1e6:.3g}" if flops < 999.5e6 else f"{flops / 1e6:,.0f}"


def si(number: float) -> str:
    """1234567 as 1.23 M."""
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:  # what would be rounded to 1000 is 1 of the next unit
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"


_UNITS = ("", "k", "M", "G", "T", "P", "E")
