"""A report as an HTML page that loads nothing else.

The law: a page holds all of `to_dict()`, and names from the user's program are text in it, never markup.

Totals, the bar and the sections are written here. The page's script draws the interactive parts, the map of scopes and
the table, from the data. Each column of the table is stored as its distinct values and, for each row, the index of one:
a deep network repeats itself a lot.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._table import percent, si
from .layers import without_numbers
from .report_data import ROW_KEYS, ReportData, to_json
from .rows import Row
from .text import dimensions_text, operation_text, sent_text, short_reason

_MOST_GROUPS = 8  # in a section


def page_of(report: ReportData) -> str:
    """The page of a report, which refers to nothing outside itself."""
    parts = {
        "title": escape(f"amp report of {report.name}"),
        "style": _asset("page.css"),
        "head": _head(report),
        "bar": _bar(report),
        "sections": "\n".join(_sections(report)),
        "data": data_of(report),
        "script": _asset("page.js"),
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _asset("page.html"))


def _asset(name: str) -> str:
    return (Path(__file__).parent / "page" / name).read_text(encoding="utf-8")


# -- the data


def data_of(report: ReportData) -> str:
    """`to_dict()` with rows as columns and what the page shows of them, as JSON that cannot close its script tag."""
    columns = {name: _column(getattr(row, name) for row in report.rows) for name in ROW_KEYS}
    ran_in = _column(map(_ran_in, report.rows))
    page = {
        "texts": {name: [str(value or "") for value in columns[name][0]] for name in ("written", "run", "source")},
        "why": _column_json(_column(map(short_reason, report.rows))),
        "ran_in": _column_json(ran_in),
        "families": [dtype_family(name) for name in ran_in[0]],
        "wide": _indices(report, report.wide_matmuls),
        "wasteful": _indices(report, report.wasteful_matmuls),
    }
    rows = {name: _column_json(column) for name, column in columns.items()}
    whole = report.to_dict() | {"rows": rows, "page": page}
    return json.dumps(whole, separators=(",", ":")).replace("<", "\\u003c")


EncodedColumn = tuple[list[Any], list[int]]  # distinct values, and for each row the index of its value


def _column(values: Iterable[Any]) -> EncodedColumn:
    indices: dict[Any, int] = {}
    codes = [indices.setdefault(value, len(indices)) for value in values]
    return list(indices), codes


def _column_json(column: EncodedColumn) -> dict[str, Any]:
    values, codes = column
    return {"values": [to_json(value) for value in values], "codes": codes}


def _indices(report: ReportData, chosen: Iterable[Row]) -> list[int]:
    """Where the chosen rows are in the report."""
    ids = set(map(id, chosen))
    return [i for i, row in enumerate(report.rows) if id(row) in ids]


def _ran_in(row: Row) -> str:
    """The dtype that an operation runs in: its widest float; for a matmul, the dtype it multiplies in."""
    if row.kind == "matmul":
        return row.multiplied
    floats = (name for name in (*row.run.operands, *row.run.results) if dtype_family(name) != "none")
    return max(floats, key=lambda name: jnp.dtype(name).itemsize, default="")


@functools.cache
def dtype_family(dtype: str) -> str:
    """The class of the page's style sheet that colours a dtype."""
    if "float" not in dtype:
        return "none"
    bits = 8 * jnp.dtype(dtype).itemsize
    return {8: "tiny", 16: "low", 32: "wide"}.get(bits, "double" if bits > 32 else "tiny")


# -- the parts without a script


def _head(report: ReportData) -> str:
    total, scopes = sum(report.matmul_flops.values()), {row.scope for row in report.rows}
    tiles = [
        ("matmul FLOPs", si(total) if total else "none", f"{percent(report.low_share)} in {report.compute_dtype}"),
        ("casts", f"{report.cast_count:,}", f"{si(report.cast_bytes)}B if none is fused"),
    ]
    if report.kept is not None:
        before, after = report.kept
        ratio = f" ({after / before:.2f} times)" if before else ""
        tiles.append(("kept for the backward pass", f"{si(after)}B", f"under amp; {si(before)}B in float32{ratio}"))
    if report.sent:
        tiles.append(("sent between devices", f"{si(sum(report.sent.values()))}B", sent_text(report)))
    tiles.append(("operations", f"{len(report.rows):,}", f"in {len(scopes):,} {_plural('scope', len(scopes))}"))
    shown = "".join(
        f"<div><dt>{escape(title)}</dt><dd>{escape(number)}<small>{escape(more)}</small></dd></div>"
        for title, number, more in tiles
    )
    notes = "".join(f'<p class="note"><b>note</b> {escape(note)}</p>' for note in report.notes)
    return (
        f"<header><h1>amp report of <code>{escape(report.name)}</code></h1>"
        f"<p>compute dtype {escape(report.compute_dtype)}</p></header>\n{notes}"
        f'<dl class="totals">{shown}</dl>'
    )


def _bar(report: ReportData) -> str:
    total = sum(report.matmul_flops.values())
    if not total:
        return '<p class="quiet">There are no matmuls.</p>'
    shares = [(name, flops / total, flops) for name, flops in report.matmul_flops.items()]
    parts = "".join(
        f'<span class="{dtype_family(name)}" style="flex-grow:{share:.6f}"></span>'
        for name, share, _ in shares
        if share
    )
    legend = "".join(
        f'<li><i class="swatch {dtype_family(name)}"></i>{escape(name)} <b>{percent(share)}</b> {si(flops)}</li>'
        for name, share, flops in shares
    )
    label = escape(", ".join(f"{percent(share)} {name}" for name, share, _ in shares))
    return f'<div class="bar" role="img" aria-label="{label}">{parts}</div><ul class="legend">{legend}</ul>'


class Group(NamedTuple):
    """Operations that a section shows as one line."""

    scope: str
    operation: str
    dtypes: str
    remark: str  # a reason, or dimensions
    source: str
    path: str  # of the source, in full
    times: int = 0
    cost: int = 0


def _sections(report: ReportData) -> Iterator[str]:
    """A section for each kind of finding, and a list of the kinds that have none."""
    wide, wasteful, casts = report.wide_matmuls, report.wasteful_matmuls, report.casts
    left_in = " and ".join(dict.fromkeys(row.multiplied for row in wide)) or "float32"
    parts = [
        (
            f"Matmuls left in {left_in}, and why",
            sum(row.times for row in wide),
            "",
            _group_table(group_rows(wide, short_reason, lambda row: row.flops), "reason", "FLOPs", "wide"),
        ),
        (
            "Matmul dimensions that waste tensor cores",
            sum(row.times for row in wasteful),
            f"Not a multiple of {report.multiple}.",
            _group_table(
                group_rows(wasteful, dimensions_text, lambda row: row.flops), "dimensions", "FLOPs", "wasteful"
            ),
        ),
        (
            "Casts",
            report.cast_count,
            "Between floats, and not in your program. XLA fuses most of them into their neighbours.",
            _group_table(group_rows(casts, lambda row: row.reason, lambda row: row.bytes), "reason", "bytes", "cast"),
        ),
        (
            "Not entered",
            sum(report.not_entered.values()),
            "Primitives that amp does not know: they run as written.",
            _names(f"{name} ({times:,})" for name, times in report.not_entered.items())
            + _show_button("not entered", "Show them in the table"),
        ),
        (
            "Keys that matched nothing",
            len(report.unmatched),
            "Keys of the policy that no operation was found under.",
            _names(report.unmatched),
        ),
    ]
    for title, count, more, body in parts:
        if count:
            about = f'<p class="quiet">{escape(more)}</p>' if more else ""
            yield f'<section><h2>{escape(title)} <span class="count">{count:,}</span></h2>{about}{body}</section>'
    none = "".join(f"<li>{escape(title)}: <b>none</b></li>" for title, count, _, _ in parts if not count)
    if none:
        yield f'<ul class="none-found">{none}</ul>'


def group_rows(rows: Iterable[Row], remark: Callable[[Row], str], cost: Callable[[Row], int]) -> list[Group]:
    """Group rows that would read the same, with layers of a network taken as one; most expensive first."""
    groups: dict[Group, list[Row]] = {}
    for row in rows:
        source = ("", "") if row.source is None else (str(row.source), f"{row.source.file}:{row.source.line}")
        key = Group(without_numbers(row.scope), operation_text(row), str(row.run), remark(row), *source)
        groups.setdefault(key, []).append(row)
    found = []
    for key, alike in groups.items():
        scope = key.scope if len({row.scope for row in alike}) > 1 else alike[0].scope
        times, costs = sum(row.times for row in alike), sum(map(cost, alike))
        found.append(key._replace(scope=scope or "(no scope)", times=times, cost=costs))
    return sorted(found, key=lambda group: -group.cost)


def _group_table(groups: list[Group], remark_title: str, unit: str, show: str) -> str:
    head = f'<th>scope<th>operation<th class="n">times<th class="n">{unit}<th>dtypes as run<th>{remark_title}<th>source'
    suffix = "B" if unit == "bytes" else ""
    rows = "".join(
        f'<tr><td title="{escape(group.scope)}">{escape(group.scope)}<td>{escape(group.operation)}'
        f'<td class="n">{group.times:,}<td class="n">{si(group.cost)}{suffix}<td>{escape(group.dtypes)}'
        f'<td title="{escape(group.remark)}">{escape(group.remark)}'
        f'<td title="{escape(group.path)}">{escape(group.source)}'
        for group in groups[:_MOST_GROUPS]
    )
    more = len(groups) - _MOST_GROUPS
    label = f"Show these and {more:,} more in the table" if more > 0 else "Show them in the table"
    return f'<div class="found"><table><thead><tr>{head}<tbody>{rows}</table></div>{_show_button(show, label)}'


def _names(names: Iterable[str]) -> str:
    return '<ul class="names">' + "".join(f"<li><code>{escape(name)}</code></li>" for name in names) + "</ul>"


def _show_button(what: str, label: str) -> str:
    return f'<button type="button" class="show" data-show="{what}">{label}</button>'


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"
