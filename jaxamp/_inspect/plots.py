"""Pictures, drawn with matplotlib: FLOPs by dtype for a report, ranges of values for a comparison."""

from collections.abc import Mapping
from typing import Any, Protocol

import jax.numpy as jnp

from .ranges import Range
from .report_data import ReportData

# The dtypes whose limits are drawn, and what the legend calls them.
_TITLES = {"float16": "float16", "bfloat16": "bfloat16", "float8_e4m3fn": "float8 e4m3", "float8_e5m2": "float8 e5m2"}
_MOST_SCOPES = 12  # in one picture
_COLOURS = {"float16": "#2a7f9e", "bfloat16": "#2a7f9e", "float32": "#d08a2e", "float64": "#a04040"}


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
    figure.tight_layout()
    if path is not None:
        figure.savefig(path, dpi=150)
    return figure


def draw_flops(report: ReportData, path: Any = None) -> Any:
    """Draw the FLOPs of matmuls by scope and dtype, largest scopes first."""
    plt = _pyplot()
    by_scope: dict[str, dict[str, int]] = {}
    for row in report.matmuls:
        found = by_scope.setdefault(row.scope or "(no scope)", {})
        found[row.multiplied] = found.get(row.multiplied, 0) + row.flops
    scopes = sorted(by_scope, key=lambda scope: -sum(by_scope[scope].values()))[:_MOST_SCOPES]
    figure, axes = plt.subplots(figsize=(8, 1.5 + 0.4 * len(scopes)))
    start = dict.fromkeys(scopes, 0.0)
    for dtype in report.matmul_flops:
        widths = [by_scope[scope].get(dtype, 0) for scope in scopes]
        axes.barh(scopes, widths, left=list(start.values()), label=dtype, color=_COLOURS.get(dtype, "#777777"))
        start = {scope: start[scope] + width for scope, width in zip(scopes, widths, strict=True)}
    axes.invert_yaxis()
    axes.set_xlabel("FLOPs of matmuls, forward and backward")
    axes.set_title(f"{report.name}: {100 * report.low_share:.1f} % in {report.compute_dtype}")
    if report.matmuls:
        axes.legend()
    return _finish(figure, path)


class HasRanges(Protocol):
    """The parts of a `Comparison` that are drawn."""

    @property
    def name(self) -> str: ...

    @property
    def ranges(self) -> Mapping[str, Range]: ...


def draw_ranges(comparison: HasRanges, path: Any = None) -> Any:
    """Draw which powers of two the values of each scope have, with the limits of low-precision dtypes."""
    plt = _pyplot()
    ranges = {scope: found for scope, found in comparison.ranges.items() if found.powers}
    scopes = sorted(ranges, key=lambda scope: -sum(ranges[scope].powers.values()))[:_MOST_SCOPES]
    figure, all_axes = plt.subplots(
        max(1, len(scopes)), 1, sharex=True, squeeze=False, figsize=(9, 1.2 + 1.1 * max(1, len(scopes)))
    )
    for axes, scope in zip(all_axes[:, 0], scopes, strict=False):
        found = ranges[scope]
        total = sum(found.powers.values()) + found.zeros
        powers = sorted(found.powers)
        axes.bar(powers, [found.powers[power] / total for power in powers], width=1, align="edge", color="#2a7f9e")
        axes.set_ylabel(scope or "(no scope)", rotation=0, ha="right", va="center", fontsize=8)
        axes.tick_params(labelsize=7)
        if found.zeros:
            axes.text(
                0.995, 0.85, f"{100 * found.zeros / total:.1f} % zero", transform=axes.transAxes, ha="right", fontsize=7
            )
    powers = [power for scope in scopes for power in ranges[scope].powers]
    all_axes[0, 0].set_xlim(min([-26, *powers]) - 1, max([16, *powers]) + 2)  # bfloat16's limits may lie outside
    for style, (name, title) in zip(("-", "--", "-.", ":"), _TITLES.items(), strict=True):
        info = jnp.finfo(name)
        low, high = int(info.minexp), int(info.maxexp)
        for axes in all_axes[:, 0]:
            axes.axvline(low, linestyle=style, color="#555555", linewidth=0.8)
            axes.axvline(high, linestyle=style, color="#555555", linewidth=0.8)
        all_axes[0, 0].plot([], [], linestyle=style, color="#555555", label=f"{title}: 2^{low} to 2^{high}")
    all_axes[0, 0].legend(fontsize=7, loc="lower left", bbox_to_anchor=(0, 1.02), ncols=4, frameon=False)
    all_axes[-1, 0].set_xlabel("power of two")
    figure.suptitle(f"{comparison.name}: ranges of values, share of entries", fontsize=10)
    return _finish(figure, path)
