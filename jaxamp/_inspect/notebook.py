"""A report in a notebook: one piece of HTML with its styles inline, without a script."""

from collections.abc import Iterable
from html import escape

from .._table import percent, si
from .html import dtype_family, group_rows
from .report_data import ReportData
from .text import lines_of, operation_text, short_reason, totals_of

_MOST_MATMULS = 10
_COLOURS = {"tiny": "#1f5a96", "low": "#4a86c5", "wide": "#dd9a3c", "double": "#b5532b", "none": "#999"}
_TABLE = "border-collapse:collapse;color:inherit;font-size:inherit;margin:4px 0"
_CELL = "padding:1px 12px 1px 0;text-align:left;vertical-align:top;border:0;background:none"
_NUMBER = _CELL.replace("left", "right") + ";font-variant-numeric:tabular-nums;white-space:nowrap"
_RULE = "1px solid rgba(128,128,128,.35)"


def summary_of(report: ReportData, limit: int = 30) -> str:
    """The totals, the matmuls that stayed wide, and the first `limit` lines of the table."""
    totals = "".join(_tr([(title, f"{_CELL};opacity:.7"), (text, _CELL)]) for title, text in totals_of(report))
    notes = "".join(f'<div style="margin:4px 0">note: {escape(note)}</div>' for note in report.notes)
    return (
        '<div style="font-size:13px;line-height:1.45;max-width:1000px;overflow-x:auto">'
        f'<div style="font-size:15px;font-weight:600">amp report of {escape(report.name)}, '
        f"compute dtype {escape(report.compute_dtype)}</div>"
        f'<table style="{_TABLE}">{totals}</table>'
        f"{_bar(report)}{notes}{_wide_matmuls(report)}{_first_lines(report, limit)}</div>"
    )


def _tr(cells: Iterable[tuple[str, str]]) -> str:
    """A row of a table, from texts and their styles."""
    return "<tr>" + "".join(f'<td style="{style}">{escape(text)}</td>' for text, style in cells) + "</tr>"


def _bar(report: ReportData) -> str:
    total = sum(report.matmul_flops.values())
    parts = "".join(
        f'<div title="{escape(name)} {percent(flops / total)}" '
        f'style="width:{100 * flops / total:.3f}%;background:{_COLOURS[dtype_family(name)]}"></div>'
        for name, flops in report.matmul_flops.items()
        if flops
    )
    style = "display:flex;height:8px;max-width:480px;margin:6px 0;border-radius:2px;overflow:hidden"
    return f'<div style="{style}">{parts}</div>' if parts else ""


def _wide_matmuls(report: ReportData) -> str:
    groups = group_rows(report.wide_matmuls, short_reason, lambda row: row.flops)
    if not groups:
        return ""
    rows = "".join(
        _tr(
            [
                (group.scope, _CELL),
                (group.operation, _CELL),
                (f"{si(group.cost)}FLOP", _NUMBER),
                (group.remark, _CELL),
                (group.source, _CELL),
            ]
        )
        for group in groups[:_MOST_MATMULS]
    )
    return (
        f'<div style="font-weight:600;margin-top:8px">Matmuls not in {escape(report.compute_dtype)}, and why</div>'
        f'<table style="{_TABLE}">{rows}</table>'
    )


def _first_lines(report: ReportData, limit: int) -> str:
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
            (operation_text(line), f"{_CELL};padding-left:12px{mark}"),
            (f"{line.times:,}", _NUMBER),
            (si(line.flops), _NUMBER),
            (line.dtypes, f"{_CELL};white-space:nowrap"),
            (line.reason, _CELL),
            (line.source, _CELL),
        ]
        rows.append(_tr(cells))
    hidden = len(lines) - limit
    more = f"... and {hidden:,} more lines: report.save('report.html'). " if hidden > 0 else ""
    return (
        f'<table style="{_TABLE}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table>"
        f'<div style="opacity:.7;margin-top:4px">{escape(more)}&#x27; marks the backward pass.</div>'
    )
