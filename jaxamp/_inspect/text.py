"""A report as text: totals, matmuls that could be better, and a table grouped by scope, within 100 columns."""

import os
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from .._table import WIDTH, Column, cut, millions, percent, si, table
from .report_data import ReportData
from .rows import Row

_COLOURS = {"bold": "1", "red": "31", "green": "32", "yellow": "33", "dim": "2"}
_MOST_MATMULS = 10  # in a list of those that could be better

_TOTALS = (Column(26), Column())
_MATMULS = (Column(36), Column(14, "right"), Column(25), Column(20, cut="left"))
_OPERATIONS = (
    Column(22),
    Column(5, "right"),
    Column(9, "right"),
    Column(18),
    Column(22),
    Column(19, cut="left"),
)
_TITLES = ("operation", "times", "MFLOP", "dtypes as run", "reason", "source")


class Line(NamedTuple):
    """A line of the table: the rows of one scope that would all be shown the same."""

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
    """Whether to print in colour: to a terminal, unless `NO_COLOR` is set."""
    stream = sys.stdout if stream is None else stream
    return "NO_COLOR" not in os.environ and hasattr(stream, "isatty") and stream.isatty()


def render(
    report: ReportData, *, limit: int | None = 40, colour: bool = False, more: str = "print(report.text(limit=None))"
) -> str:
    """The text of a report.

    Args:
        report: The report.
        limit: The most lines of the table to show, or None for all.
        colour: Whether to use the colours of a terminal.
        more: How to see the whole table, for the line that says it was cut.
    """

    def paint(text: str, name: str) -> str:
        return f"\033[{_COLOURS[name]}m{text}\033[0m" if colour else text

    parts = [paint(cut(f"amp report of {report.name}, compute dtype {report.compute_dtype}", WIDTH), "bold")]
    parts += table(totals_of(report), _TOTALS, width=WIDTH)
    parts += [paint(cut(f"note: {note}", WIDTH), "yellow") for note in report.notes]
    if report.wide_matmuls:
        parts += ["", paint(f"Matmuls not in {report.compute_dtype}, and why", "red")]
        parts += _matmul_lines(report.wide_matmuls, short_reason)
    if report.wasteful_matmuls:
        parts += ["", paint(f"Matmuls with a dimension that is not a multiple of {report.multiple}", "yellow")]
        parts += _matmul_lines(report.wasteful_matmuls, dimensions_text)
    lines = lines_of(report)
    shown = lines if limit is None else lines[:limit]
    title, *texts = table([_TITLES, *map(_cells, shown)], _OPERATIONS, gap=" ")
    parts += ["", paint(title, "bold")]
    scope = None
    for line, text in zip(shown, texts, strict=True):
        if line.scope != scope:
            scope = line.scope
            parts.append(paint(cut(scope or "(no scope)", WIDTH), "green"))
        parts.append(paint(text, "red") if line.is_wide_matmul else text)
    if len(shown) < len(lines):
        parts.append(f"... and {len(lines) - len(shown)} more lines: {more}")
    parts.append(paint("' marks the backward pass.", "dim"))
    return "\n".join(parts)


def lines_of(report: ReportData) -> list[Line]:
    """The lines of the table, without operations that only move data.

    The worst scope comes first: the one with the most FLOPs in wide matmuls, then the one with the most FLOPs.
    """
    wide = set(map(id, report.wide_matmuls))
    groups: dict[tuple[Any, ...], Line] = {}
    for row in report.rows:
        if row.flops or row.kind != "other":
            source = "" if row.source is None else row.source.short
            key = row.scope, row.phase, row.primitive, str(row.run), short_reason(row), source
            line = groups.get(key) or Line(*key, 0, 0, id(row) in wide)
            groups[key] = line._replace(times=line.times + row.times, flops=line.flops + row.flops)
    lines = list(groups.values())
    costs: dict[str, tuple[int, int]] = {}
    for line in lines:
        wide_flops, flops = costs.get(line.scope, (0, 0))
        costs[line.scope] = wide_flops + line.flops * line.is_wide_matmul, flops + line.flops
    ranks = {scope: (-wide_flops, -flops, scope) for scope, (wide_flops, flops) in costs.items()}
    return sorted(lines, key=lambda line: (ranks[line.scope], not line.is_wide_matmul, -line.flops))


def totals_of(report: ReportData) -> Iterator[tuple[str, str]]:
    """The totals that there are to tell, each with its title."""
    total = sum(report.matmul_flops.values())
    shares = ", ".join(f"{percent(flops / (total or 1))} {dtype}" for dtype, flops in report.matmul_flops.items())
    yield "matmul FLOPs", f"{si(total)}: {shares}" if total else "none"
    yield "casts", f"{report.cast_count}, {si(report.cast_bytes)}B if none is fused"
    if report.kept is not None:
        before, after = report.kept
        ratio = f" ({after / before:.2f} times)" if before else ""
        yield "kept for the backward pass", f"{si(before)}B in float32, {si(after)}B under amp{ratio}"
    if report.sent:
        yield "sent between devices", sent_text(report)
    if report.not_entered:
        yield "not entered", ", ".join(f"{name} ({times})" for name, times in report.not_entered.items())
    if report.unmatched:
        yield "keys that matched nothing", ", ".join(map(repr, report.unmatched))


def sent_text(report: ReportData) -> str:
    """Bytes by axes of the mesh and dtype: `8.4 MB bfloat16 over d`."""
    over = lambda axes: f" over {axes}" if axes else ""
    return ", ".join(f"{si(size)}B {dtype}{over(axes)}" for (axes, dtype), size in report.sent.items())


def short_reason(row: Row) -> str:
    """The reason of a row, without "derivative of X: " in front: an apostrophe marks the backward pass already."""
    return row.why.short_text()


def dimensions_text(row: Row) -> str:
    """The dimensions of a matmul: `m 16 n 32 k 8`."""
    return "" if row.dims is None else " ".join(f"{name} {size}" for name, size in row.dims._asdict().items())


def operation_text(row: Row | Line) -> str:
    """The name of the primitive, with an apostrophe in the backward pass."""
    return row.primitive if row.phase == "forward" else f"{row.primitive}'"


def _matmul_lines(rows: Iterable[Row], remark: Callable[[Row], str]) -> list[str]:
    """A line for each matmul, with a remark; those that would read the same appear once."""
    distinct = {(row.phase, row.scope, row.primitive, row.reason, row.dims, row.source): row for row in rows}
    cells = [
        (
            f"{row.scope or '(no scope)'}  {operation_text(row)}",
            f"{millions(row.flops)} MFLOP",
            remark(row),
            "" if row.source is None else row.source.short,
        )
        for row in list(distinct.values())[:_MOST_MATMULS]
    ]
    return table(cells, _MATMULS, gap=" ", indent="  ")


def _cells(line: Line) -> tuple[str, ...]:
    operation = f"  {operation_text(line)}"
    return operation, str(line.times), millions(line.flops), line.dtypes, line.reason, line.source
