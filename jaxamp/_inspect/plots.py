"""Pictures, drawn with matplotlib: FLOPs by dtype for a report, ranges of values for a comparison.

The law: nothing is dropped in silence. Scopes that do not fit are summed in a last line, which says how many they are,
and values outside the axis are counted.

Colours are of Okabe and Ito's palette, which colour-blind readers can tell apart; wide dtypes are hatched as well.
"""

import functools
import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol, TypeVar

import jax.numpy as jnp

from .._number_formats.names import format as number_format
from .._number_formats.number_format import NumberFormat
from .._table import cut, percent
from .layers import merge_layers
from .ranges import Range
from .report_data import ReportData

_MOST_SCOPES = 24  # in one picture
_LONGEST_NAME = 44
# By the bytes of a float: colour and hatching.
_LOOKS = {1: ("#56B4E9", None), 2: ("#0072B2", None), 4: ("#E69F00", "////"), 8: ("#D55E00", "xxxx")}
_OTHER_LOOK = ("#999999", "....")  # integers
_PREFIXES = ("", "k", "M", "G", "T", "P", "E")
# The formats whose ranges are drawn, and what the picture calls them.
_FORMATS = {"float16": "float16", "bfloat16": "bfloat16", "float8 e4m3": "e4m3", "float8 e5m2": "e5m2"}
_RARE = 1e-3  # the share of a scope's values that may lie to the left of the axis
_FAINTEST = 1e-4  # the smallest share of values that has a colour of its own


T = TypeVar("T", bound=Any)


def _pyplot() -> Any:
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise ImportError(
            "got a call to plot, but matplotlib is not installed; expected it to be available. "
            "Run pip install 'jaxamp[plots]'."
        ) from None
    return plt


def _finish(figure: Any, path: Any) -> Any:
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


# -- a report


def draw_flops(report: ReportData, path: Any = None) -> Any:
    """Draw the FLOPs of matmuls by scope and dtype, largest scopes first."""
    plt = _pyplot()
    lines = _flops_by_scope(report)
    figure, axes = plt.subplots(figsize=(8, 1.6 + 0.28 * max(2, len(lines))), layout="constrained")
    power = _prefix(max((sum(found.values()) for _, found in lines), default=0))
    start, total = [0.0] * len(lines), sum(report.matmul_flops.values())
    for dtype, flops in report.matmul_flops.items():
        widths = [found.get(dtype, 0) / 1000**power for _, found in lines]
        colour, hatch = _look(dtype)
        look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        axes.barh(range(len(lines)), widths, left=start, label=f"{dtype} ({percent(flops / total)})", **look)
        start = [left + width for left, width in zip(start, widths, strict=True)]
    axes.set_yticks(range(len(lines)), [label for label, _ in lines], fontsize=8)
    axes.set_ylim(max(1, len(lines)) - 0.4, -0.6)
    axes.set_xlabel(f"matmuls, forward and backward [{_PREFIXES[power]}FLOP]")
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{report.name}: {100 * report.low_share:.1f} % in {report.compute_dtype}", fontsize=10)
    if report.matmuls:
        figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    else:
        axes.set_xticks([])
        axes.text(0.5, 0.5, "There are no matmuls.", transform=axes.transAxes, ha="center", va="center")
    return _finish(figure, path)


def _flops_by_scope(report: ReportData) -> list[tuple[str, Counter[str]]]:
    """The lines of a picture: what is written beside each, and its FLOPs by dtype."""
    scopes = [row.scope for row in report.matmuls]
    if len(set(scopes)) > _MOST_SCOPES:
        scopes = merge_layers(scopes)
    found: dict[str, Counter[str]] = {}
    for scope, row in zip(scopes, report.matmuls, strict=True):
        found.setdefault(scope, Counter())[row.multiplied] += row.flops
    return _lines(found, lambda flops: flops.total(), Counter())


def _lines(found: Mapping[str, T], size: Callable[[T], float], nothing: T) -> list[tuple[str, T]]:
    """The largest scopes with what was found of them, and a last line for the sum of all others."""
    largest = sorted(found, key=lambda scope: -size(found[scope]))
    shown = len(found) if len(found) <= _MOST_SCOPES else _MOST_SCOPES - 1
    lines = [(cut(scope or "(no scope)", _LONGEST_NAME, "left"), found[scope]) for scope in largest[:shown]]
    rest = [found[scope] for scope in largest[shown:]]
    return lines + [(f"and {len(rest):,} more", functools.reduce(operator.add, rest, nothing))] * bool(rest)


def _prefix(largest: float) -> int:
    """How many times a thousand is taken out of numbers up to this one."""
    return min(len(_PREFIXES) - 1, int(math.log10(largest) // 3)) if largest >= 1 else 0


def _look(dtype: str) -> tuple[str, str | None]:
    return _LOOKS.get(jnp.dtype(dtype).itemsize, _OTHER_LOOK) if "float" in dtype else _OTHER_LOOK


# -- a comparison


class HasRanges(Protocol):
    """The parts of a `Comparison` that are drawn."""

    @property
    def name(self) -> str: ...

    @property
    def ranges(self) -> Mapping[str, Range]: ...

    @property
    def formats(self) -> tuple[NumberFormat, ...]: ...


def draw_ranges(comparison: HasRanges, path: Any = None, formats: Any = ()) -> Any:
    """Draw which powers of two the values of each scope have, below the ranges of number formats."""
    plt = _pyplot()
    from matplotlib.colors import LogNorm

    formats = [formats] if isinstance(formats, str | NumberFormat) or not isinstance(formats, Iterable) else formats
    all_formats = {title: number_format(name) for title, name in _FORMATS.items()}
    known = set(all_formats.values())
    all_formats |= {_title(each): each for each in comparison.formats if each not in known}
    all_formats |= {_title(each): number_format(each) for each in formats}
    lines = _ranges_by_scope(comparison.ranges)
    low, high = _limits([found for _, found in lines], all_formats.values())
    heights = 0.26 * len(all_formats), 0.26 * max(2, len(lines))
    figure, (above, below) = plt.subplots(
        2, 1, sharex=True, height_ratios=heights, figsize=(8, 1.4 + sum(heights)), layout="constrained"
    )
    _draw_formats(above, all_formats, low, high)
    if lines:
        shares = [[_share(found, power) for power in range(low, high)] for _, found in lines]
        edges = range(low, high + 1), [row - 0.5 for row in range(len(lines) + 1)]
        colours = plt.get_cmap("cividis_r").with_extremes(under="white")
        drawn = below.pcolormesh(*edges, shares, norm=LogNorm(_FAINTEST, 1), cmap=colours)
        bar = figure.colorbar(drawn, ax=below, label="share of values", extend="min", pad=0.01, aspect=12)
        bar.solids.set_rasterized(False)  # vectors, as everything else
    else:
        below.text(0.5, 0.5, "There are no values.", transform=below.transAxes, ha="center", va="center")
    below.set_yticks(range(len(lines)), [label + _remark(found, low) for label, found in lines], fontsize=8)
    below.set_ylim(max(1, len(lines)) - 0.5, -0.5)
    below.set_xlim(low, high)
    step = 4 if high - low <= 64 else 8
    ticks = [power for power in range(low, high + 1) if power % step == 0]
    below.set_xticks(ticks, [f"$2^{{{power}}}$" for power in ticks], fontsize=8)
    below.set_xlabel("magnitude")
    for power in (number_format("float16").smallest_exponent, 16):  # where float16 begins and ends
        below.axvline(power, color="#D55E00", linestyle="--", linewidth=0.9)
        above.axvline(power, color="#D55E00", linestyle="--", linewidth=0.9)
    above.set_title(f"{comparison.name}: ranges of values, and of number formats (hatched: subnormal)", fontsize=10)
    return _finish(figure, path)


def _title(given: Any) -> str:
    """What a picture calls a format that was given."""
    known = isinstance(given, NumberFormat)
    return repr(given).removeprefix("jaxamp.format(").removesuffix(")").strip("'") if known else str(given)


def _ranges_by_scope(ranges: Mapping[str, Range]) -> list[tuple[str, Range]]:
    scopes = [scope for scope, found in ranges.items() if found.powers]
    names = merge_layers(scopes) if len(scopes) > _MOST_SCOPES else scopes
    found: dict[str, Range] = {}
    for scope, name in zip(scopes, names, strict=True):
        found[name] = found[name] + ranges[scope] if name in found else ranges[scope]
    return _lines(found, lambda each: each.powers.total(), Range(Counter(), 0))


def _limits(ranges: Iterable[Range], formats: Iterable[NumberFormat]) -> tuple[int, int]:
    """The powers of two that the axis shows: all large values, nearly all small ones, and the 8-bit formats."""
    narrow = [each for each in formats if each.exponent <= 5]  # bfloat16 and the like would stretch the axis
    low = [math.floor(math.log2(each.smallest_subnormal)) for each in narrow]
    high = [math.ceil(math.log2(each.max)) for each in narrow]
    for found in ranges:
        rare, powers = _RARE * found.powers.total(), sorted(found.powers)
        while found.powers[powers[0]] < rare:
            rare -= found.powers[powers.pop(0)]
        low.append(powers[0])
        high.append(max(found.powers) + 1)
    return min(low) - 1, max(high) + 1


def _share(found: Range, power: int) -> float:
    return found.powers[power] / (found.powers.total() + found.zeros)


def _remark(found: Range, low: int) -> str:
    """What a line of a heat map cannot show: zeros, and values to the left of the axis."""
    total = found.powers.total() + found.zeros
    below = sum(count for power, count in found.powers.items() if power < low)
    shares = {"zero": found.zeros / total, "below": below / total}
    parts = [f"{percent(x) if x >= 1e-3 else '<0.1 %'} {what}" for what, x in shares.items() if x]
    return f" ({', '.join(parts)})" if parts else ""


def _draw_formats(axes: Any, formats: Mapping[str, NumberFormat], low: int, high: int) -> None:
    """A bar for the normal numbers of each format, and a hatched one for its subnormal numbers."""
    for row, each in enumerate(formats.values()):
        least, normal, end = math.log2(each.smallest_subnormal), math.log2(each.smallest_normal), math.log2(each.max)
        axes.barh(row, end - normal, left=normal, height=0.6, color="#0072B2")
        axes.barh(row, normal - least, left=least, height=0.6, color="#56B4E9", hatch="////", edgecolor="white", lw=0)
        for at, side, text in ((0.005, "left", "\u25c2"), (0.995, "right", "\u25b8")):
            if least < low if side == "left" else end > high:  # it goes on beyond the axis
                where = {"transform": axes.get_yaxis_transform(), "ha": side, "va": "center_baseline"}
                axes.text(at, row, text, color="white", fontsize=8, **where)
    axes.set_yticks(range(len(formats)), list(formats), fontsize=8)
    axes.set_ylim(len(formats) - 0.5, -0.5)
    axes.tick_params(bottom=False, labelbottom=False)
    axes.spines[["top", "right", "bottom"]].set_visible(False)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)
