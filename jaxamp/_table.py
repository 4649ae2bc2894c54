"""Plain text in columns, and numbers short enough to stand in them."""

from collections.abc import Iterable, Sequence
from typing import Literal, NamedTuple

WIDTH = 100  # of everything that is printed

Side = Literal["left", "right"]


class Column(NamedTuple):
    """How the cells of a column are set."""

    width: int | None = None  # None: as wide as the widest cell
    align: Side = "left"
    cut: Side = "right"  # where a cell that is too wide loses text


def table(
    rows: Iterable[Sequence[str]],
    columns: Sequence[Column] | None = None,
    *,
    gap: str = "  ",
    indent: str = "",
    width: int | None = None,
) -> list[str]:
    """Set rows of cells in columns, one line per row.

    Args:
        rows: The cells, as many in each row.
        columns: How to set each column. The default fits the widest cell.
        gap: What stands between two columns.
        indent: What each line starts with.
        width: The longest that a line may be. What is longer is cut at its end.

    >>> print("\\n".join(table([("", "a", "b"), ("exp", "float32", "infer")])))
         a        b
    exp  float32  infer
    >>> columns = [Column(8, cut="left"), Column(5, align="right")]
    >>> table([("model/train.py", "3"), ("loss", "12")], columns, indent="- ")
    ['- …rain.py      3', '- loss         12']
    >>> table([("note", "too long for the page")], width=12)
    ['note  too l…']
    """
    rows = list(rows)
    columns = columns or [Column()] * max(map(len, rows), default=0)
    cells_by_column = zip(*rows, strict=True) if rows else [()] * len(columns)
    widths = [
        max(map(len, cells), default=0) if column.width is None else column.width
        for column, cells in zip(columns, cells_by_column, strict=True)
    ]
    lines = (
        indent + gap.join(_set(cell, column, size) for cell, column, size in zip(row, columns, widths, strict=True))
        for row in rows
    )
    return [line.rstrip() if width is None else cut(line.rstrip(), width) for line in lines]


def _set(text: str, column: Column, width: int) -> str:
    text = cut(text, width, column.cut)
    return text.rjust(width) if column.align == "right" else text.ljust(width)


def cut(text: str, width: int, side: Side = "right") -> str:
    """Shorten a text to `width` characters, with an ellipsis on the side where it was cut.

    >>> cut("attention", 5), cut("attention", 5, "left")
    ('atte…', '…tion')
    """
    if len(text) <= width:
        return text
    return text[: width - 1] + "…" if side == "right" else "…" + text[len(text) - width + 1 :]


_UNITS = ("", "k", "M", "G", "T", "P", "E")


def si(number: float) -> str:
    """Three digits and the prefix of a unit.

    >>> si(1234567) + "B"
    '1.23 MB'
    """
    unit = 0
    while number >= 999.5 and unit < len(_UNITS) - 1:  # 999.5 would round to 1000, which is 1 of the next unit
        number, unit = number / 1000, unit + 1
    return f"{number:.3g} {_UNITS[unit]}"


def millions(number: float) -> str:
    """A number in millions: three digits, or every digit of a thousand millions and more.

    >>> millions(1234), millions(12_345_678_900)
    ('0.00123', '12,346')
    """
    return f"{number / 1e6:.3g}" if number < 999.5e6 else f"{number / 1e6:,.0f}"


def percent(share: float) -> str:
    """A share between 0 and 1 in percent.

    >>> percent(0.9767)
    '97.7 %'
    """
    return f"{100 * share:.1f} %"
