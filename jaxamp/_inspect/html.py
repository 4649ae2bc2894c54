"""A report as HTML: a page that needs nothing but itself, and a summary for notebooks.

The law: a page holds the whole of `to_dict()`, and what comes from the user's program is text in it, never markup.

What is fixed is written here: totals, the bar, what was found. The script of the page draws what moves, the map of
scopes and the table, out of the data. Columns of the table are stored as their distinct values and, for each row, the
number of one: a deep network says the same thing many times.
"""

import functools
import json
import re
from collections.abc import Callable, Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp

from .rows import Row
from .text import Line, lines_of, reason_of, si, sizes_of, totals_of

_SHOWN = 8  # lines of a section


def page_of(report: Any) -> str:
    """A page with all of a report, and no reference to anything outside it."""
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


def data_of(report: Any) -> str:
    """`to_dict()` with its rows as columns, and what the page shows of them; as JSON that no `<` ends early."""
    columns = {name: _column(getattr(row, name) for row in report.rows) for name in Row._fields}
    ran_in = _column(map(_ran_in, report.rows))
    page = {
        "texts": {name: [str(value or "") for value in columns[name][0]] for name in ("written", "run", "source")},
        "why": _plain(_column(map(reason_of, report.rows))),
        "ran_in": _plain(ran_in),
        "families": [_family(name) for name in ran_in[0]],
        "wide": _numbers(report, report.wide_matmuls),
        "wasteful": _numbers(report, report.wasteful_matmuls),
    }
    rows = {name: _plain(column) for name, column in columns.items()}
    whole = report.to_dict() | {"rows": rows, "page": page}
    return json.dumps(whole, separators=(",", ":")).replace("<", "\\u003c")


Column = tuple[list[Any], list[int]]  # distinct values, and the number of one for each row


def _column(values: Iterable[Any]) -> Column:
    numbers: dict[Any, int] = {}
    codes = [numbers.setdefault(value, len(numbers)) for value in values]
    return list(numbers), codes


def _plain(column: Column) -> dict[str, Any]:
    values, codes = column
    return {"values": [value._asdict() if hasattr(value, "_asdict") else value for value in values], "codes": codes}


def _numbers(report: Any, chosen: Iterable[Row]) -> list[int]:
    """Where rows stand in the report."""
    ids = set(map(id, chosen))
    return [i for i, row in enumerate(report.rows) if id(row) in ids]


def _ran_in(row: Row) -> str:
    """The dtype that an operation runs in: the widest float of it, which is what a matmul multiplies in."""
    if row.kind == "matmul":
        return row.multiplied
    floats = (name for name in (*row.run.operands, *row.run.results) if _family(name) != "none")
    return max(floats, key=lambda name: jnp.dtype(name).itemsize, default="")


@functools.cache
def _family(dtype: str) -> str:
    """What a dtype is coloured as."""
    if "float" not in dtype:
        return "none"
    bits = 8 * jnp.dtype(dtype).itemsize
    return {8: "tiny", 16: "low", 32: "wide"}.get(bits, "double" if bits > 32 else "tiny")


# -- what is fixed on the page


def _head(report: Any) -> str:
    total, scopes = sum(report.matmul_flops.values()), {row.scope for row in report.rows}
    tiles = [
        ("matmul FLOPs", si(total) if total else "none", f"{_percent(report.low_share)} in {report.compute_dtype}"),
        ("casts", f"{report.cast_count:,}", f"{si(report.cast_bytes)}B if none is fused"),
    ]
    if report.kept is not None:
        before, after = report.kept
        ratio = f" ({after / before:.2f} times)" if before else ""
        tiles.append(("kept for the backward pass", f"{si(after)}B", f"under amp; {si(before)}B in float32{ratio}"))
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


def _bar(report: Any) -> str:
    total = sum(report.matmul_flops.values())
    if not total:
        return '<p class="quiet">There are no matmuls.</p>'
    shares = [(name, flops / total, flops) for name, flops in report.matmul_flops.items()]
    parts = "".join(
        f'<span class="{_family(name)}" style="flex-grow:{share:.6f}"></span>' for name, share, _ in shares if share
    )
    legend = "".join(
        f'<li><i class="swatch {_family(name)}"></i>{escape(name)} <b>{_percent(share)}</b> {si(flops)}</li>'
        for name, share, flops in shares
    )
    said = escape(", ".join(f"{_percent(share)} {name}" for name, share, _ in shares))
    return f'<div class="bar" role="img" aria-label="{said}">{parts}</div><ul class="legend">{legend}</ul>'


_LAYER = re.compile(r"\d+(?=\]?(/|$))")  # the number that ends a name: of block_3, not of Conv2d


class Found(NamedTuple):
    """Operations that a section shows as one."""

    scope: str
    operation: str
    dtypes: str
    why: str
    source: str
    path: str
    times: int = 0
    cost: int = 0


def _sections(report: Any) -> Iterator[str]:
    """What was found; and in one section what there was none of."""
    wide, wasteful, casts = report.wide_matmuls, report.wasteful_matmuls, report.casts
    left_in = " and ".join(dict.fromkeys(row.multiplied for row in wide)) or "float32"
    parts = [
        (
            f"Matmuls left in {left_in}, and why",
            sum(row.times for row in wide),
            "",
            _table(_grouped(wide, reason_of, lambda row: row.flops), "reason", "FLOPs", "wide"),
        ),
        (
            "Matmul dimensions that waste tensor cores",
            sum(row.times for row in wasteful),
            f"Not a multiple of {report.multiple}.",
            _table(_grouped(wasteful, sizes_of, lambda row: row.flops), "dimensions", "FLOPs", "wasteful"),
        ),
        (
            "Casts",
            report.cast_count,
            "Between floats, and in no line of the program. XLA fuses most of them into their neighbours.",
            _table(_grouped(casts, lambda row: row.reason, lambda row: row.bytes), "reason", "bytes", "cast"),
        ),
        (
            "Not entered",
            sum(report.not_entered.values()),
            "Primitives that amp does not know: they run as written.",
            _names(f"{name} ({times:,})" for name, times in report.not_entered.items())
            + _show("not entered", "Show them in the table"),
        ),
        (
            "Keys that matched nothing",
            len(report.unmatched),
            "They are in the policy, and no operation was found under them.",
            _names(report.unmatched),
        ),
    ]
    for title, count, more, body in parts:
        if count:
            said = f'<p class="quiet">{escape(more)}</p>' if more else ""
            yield f'<section><h2>{escape(title)} <span class="count">{count:,}</span></h2>{said}{body}</section>'
    none = "".join(f"<li>{escape(title)}: <b>none</b></li>" for title, count, _, _ in parts if not count)
    if none:
        yield f'<ul class="none-found">{none}</ul>'


def _grouped(rows: Iterable[Row], why: Callable[[Row], str], cost: Callable[[Row], int]) -> list[Found]:
    """What would be said in the same words is one, the layers of a network too; with its costs, the largest first."""
    groups: dict[Found, list[Row]] = {}
    for row in rows:
        source = ("", "") if row.source is None else (str(row.source), f"{row.source.file}:{row.source.line}")
        key = Found(_LAYER.sub("*", row.scope), _operation(row), str(row.run), why(row), *source)
        groups.setdefault(key, []).append(row)
    found = []
    for key, alike in groups.items():
        scope = key.scope if len({row.scope for row in alike}) > 1 else alike[0].scope
        times, costs = sum(row.times for row in alike), sum(map(cost, alike))
        found.append(key._replace(scope=scope or "(no scope)", times=times, cost=costs))
    return sorted(found, key=lambda one: -one.cost)


def _operation(row: Row | Line) -> str:
    return row.primitive if row.phase == "forward" else f"{row.primitive}'"


def _table(found: list[Found], why: str, unit: str, show: str) -> str:
    head = f'<th>scope<th>operation<th class="n">times<th class="n">{unit}<th>dtypes as run<th>{why}<th>source'
    suffix = "B" if unit == "bytes" else ""
    rows = "".join(
        f'<tr><td title="{escape(one.scope)}">{escape(one.scope)}<td>{escape(one.operation)}'
        f'<td class="n">{one.times:,}<td class="n">{si(one.cost)}{suffix}<td>{escape(one.dtypes)}'
        f'<td title="{escape(one.why)}">{escape(one.why)}<td title="{escape(one.path)}">{escape(one.source)}'
        for one in found[:_SHOWN]
    )
    more = len(found) - _SHOWN
    label = f"Show these and {more:,} more in the table" if more > 0 else "Show them in the table"
    return f'<div class="found"><table><thead><tr>{head}<tbody>{rows}</table></div>{_show(show, label)}'


def _names(names: Iterable[str]) -> str:
    return '<ul class="names">' + "".join(f"<li><code>{escape(name)}</code></li>" for name in names) + "</ul>"


def _show(what: str, label: str) -> str:
    return f'<button type="button" class="show" data-show="{what}">{label}</button>'


def _percent(share: float) -> str:
    """As the text has it."""
    return f"{100 * share:.1f} %"


def _plural(word: str, count: int) -> str:
    return word if count == 1 else f"{word}s"


# -- for notebooks


_COLOURS = {"tiny": "#1f5a96", "low": "#4a86c5", "wide": "#dd9a3c", "double": "#b5532b", "none": "#999"}
_TABLE = "border-collapse:collapse;color:inherit;font-size:inherit;margin:4px 0"
_CELL = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;border:0;background:none"
_NUMBER = _CELL.replace("left", "right") + ";font-variant-numeric:tabular-nums;white-space:nowrap"
_RULE = "1px solid rgba(128,128,128,.35)"


def summary_of(report: Any, limit: int = 30) -> str:
    """The totals, the matmuls that are not low, and the first lines of the table; without a script."""
    totals = "".join(_tr([(title, f"{_CELL};opacity:.7"), (text, _CELL)]) for title, text in totals_of(report))
    notes = "".join(f'<div style="margin:4px 0">note: {escape(note)}</div>' for note in report.notes)
    return (
        '<div style="font-size:13px;line-height:1.45;max-width:1000px;overflow-x:auto">'
        f'<div style="font-size:15px;font-weight:600">amp report of {escape(report.name)}, '
        f"compute dtype {escape(report.compute_dtype)}</div>"
        f'<table style="{_TABLE}">{totals}</table>'
        f"{_plain_bar(report)}{notes}{_wide_list(report)}{_first_lines(report, limit)}</div>"
    )


def _tr(cells: Iterable[tuple[str, str]]) -> str:
    """A row of texts, each with its style."""
    return "<tr>" + "".join(f'<td style="{style}">{escape(text)}</td>' for text, style in cells) + "</tr>"


def _plain_bar(report: Any) -> str:
    total = sum(report.matmul_flops.values())
    parts = "".join(
        f'<div title="{escape(name)} {_percent(flops / total)}" '
        f'style="width:{100 * flops / total:.3f}%;background:{_COLOURS[_family(name)]}"></div>'
        for name, flops in report.matmul_flops.items()
        if flops
    )
    style = "display:flex;height:8px;max-width:480px;margin:6px 0;border-radius:2px;overflow:hidden"
    return f'<div style="{style}">{parts}</div>' if parts else ""


def _wide_list(report: Any) -> str:
    found = _grouped(report.wide_matmuls, reason_of, lambda row: row.flops)
    if not found:
        return ""
    rows = "".join(
        _tr(
            [
                (one.scope, _CELL),
                (one.operation, _CELL),
                (f"{si(one.cost)}FLOP", _NUMBER),
                (one.why, _CELL),
                (one.source, _CELL),
            ]
        )
        for one in found[:10]
    )
    return (
        f'<div style="font-weight:600;margin-top:8px">Matmuls not in {escape(report.compute_dtype)}, and why</div>'
        f'<table style="{_TABLE}">{rows}</table>'
    )


def _first_lines(report: Any, limit: int) -> str:
    lines = lines_of(report)
    titles = {"operation": _CELL, "times": _NUMBER, "FLOPs": _NUMBER, "dtypes as run": _CELL, "reason": _CELL}
    head = "".join(
        f'<th style="{style};font-weight:600;border-bottom:{_RULE}">{title}</th>'
        for title, style in (titles | {"source": _CELL}).items()
    )
    rows, scope = [], None
    for line in lines[:limit]:
        if line.scope != scope:
            scope = line.scope
            rows.append(
                f'<tr><td colspan="6" style="{_CELL};font-weight:600;padding-top:5px">'
                f"{escape(scope or '(no scope)')}</td></tr>"
            )
        mark = f";box-shadow:inset 3px 0 {_COLOURS['wide']}" if line.is_wide_matmul else ""
        cells = [
            (_operation(line), f"{_CELL};padding-left:12px{mark}"),
            (f"{line.times:,}", _NUMBER),
            (si(line.flops), _NUMBER),
            (line.dtypes, f"{_CELL};white-space:nowrap"),
            (line.reason, _CELL),
            (line.source, _CELL),
        ]
        rows.append(_tr(cells))
    more = len(lines) - limit
    left = f"... and {more:,} lines more: report.save('report.html'). " if more > 0 else ""
    return (
        f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        f'<div style="opacity:.7;margin-top:4px">{escape(left)}&#x27; is the backward pass.</div>'
    )
