"""Draw results with matplotlib: bars of time and memory for each side, and curves of growth and of losses."""

from collections.abc import Iterable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

OURS, THEIRS, PLAIN = "#d1495b", "#8d99ae", "#2b2d42"
Rows = Sequence[dict[str, Any]]


def colour(row: dict[str, Any]) -> str:
    if row["side"] == "float32":
        return PLAIN
    return OURS if row["side"].startswith("ours") else THEIRS


def save_steps(rows: Rows, path: Path) -> str:
    """Bars for one case, fastest first: milliseconds on the left, GiB on the right."""
    shown = sorted((row for row in rows if row.get("ms")), key=lambda row: row["ms"])
    if not shown:
        return f"no picture {path.name}: nothing was timed"
    if find_spec("matplotlib") is None:
        return f"no picture {path.name}: matplotlib is not installed"
    figure, axes = _figure(2, 9, 0.8 + 0.32 * len(shown))
    titles = [row["title"] for row in shown]
    for axis, key, label in zip(axes, ("ms", "gib"), ("step, ms", "temporary memory, GiB"), strict=True):
        values = [row.get(key) or 0 for row in shown]
        bars = axis.barh(titles, values, color=[colour(row) for row in shown])
        axis.bar_label(bars, [f"{value:.3g}" if value else "?" for value in values], padding=3, fontsize=8)
        axis.set_xlabel(label)
        axis.margins(x=0.15)
        axis.invert_yaxis()
    axes[1].set_yticklabels([])
    figure.suptitle(f"{shown[0]['network']}, layers {shown[0]['layers']}", fontsize=10)
    return _save(figure, path)


def save_growth(rows: Rows, path: Path) -> str:
    """Curves over depth and over length: milliseconds above, GiB below."""
    if find_spec("matplotlib") is None:
        return f"no picture {path.name}: matplotlib is not installed"
    figure, axes = _figure(4, 8, 6)
    panels = [(g, x, k) for k in ("ms", "gib") for g, x in (("depth", "depth"), ("length", "tokens"))]
    for axis, (growing, x, key) in zip(axes, panels, strict=True):
        for curve in _curves([row for row in rows if row["growing"] == growing and row.get(key)]):
            style = "--" if "attention" in curve[0]["side"] else "-"
            points = [row[x] for row in curve], [row[key] for row in curve]
            axis.plot(*points, style, marker="o", color=colour(curve[0]), label=curve[0]["title"])
        axis.set_xscale("log", base=2)
        axis.set_xticks(ticks := sorted({row[x] for row in rows if row["growing"] == growing}), [str(t) for t in ticks])
        axis.set_yscale("log")
        axis.set_xlabel("layers" if growing == "depth" else "tokens")
        axis.set_ylabel("step, ms" if key == "ms" else "temporary memory, GiB")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def save_zoo(rows: Rows, path: Path) -> str:
    """Bars of the time of each side relative to the plain cast, a group for each network."""
    shown = [row for row in rows if row.get("vs_cast") and row["side"] != "cast"]
    if not shown:
        return f"no picture {path.name}: nothing was timed"
    if find_spec("matplotlib") is None:
        return f"no picture {path.name}: matplotlib is not installed"
    networks, sides = (list(dict.fromkeys(row[key] for row in shown)) for key in ("network", "title"))
    figure, (axis,) = _figure(1, 8, 1 + 0.2 * len(shown))
    height = 0.85 / len(sides)
    of_network = {name: [row["title"] for row in shown if row["network"] == name] for name in networks}

    def place(row: dict[str, Any]) -> float:
        """The bars of a network are next to each other, whichever sides it has."""
        titles = of_network[row["network"]]
        return networks.index(row["network"]) + (titles.index(row["title"]) - (len(titles) - 1) / 2) * height

    for side in sides:
        bars = [row for row in shown if row["title"] == side]
        places = [place(row) for row in bars]
        values = [1 / row["vs_cast"] for row in bars]
        style = {"alpha": 1 - 0.4 * (side == "ours, fast"), "hatch": "//" if side.startswith("torch") else None}
        drawn = axis.barh(places, values, height, color=colour(bars[0]), edgecolor="white", label=side, **style)
        axis.bar_label(drawn, [f"{value:.2f}" for value in values], padding=2, fontsize=7)
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_yticks(range(len(networks)), networks)
    axis.set_xlabel("time relative to a plain cast to bfloat16 (shorter is faster)")
    axis.margins(x=0.08, y=0.01)
    axis.invert_yaxis()
    axis.legend(fontsize=8)
    return _save(figure, path)


def save_step_lengths(rows: Rows, path: Path) -> str:
    """Curves over steps, a panel for each change of the gradient."""
    if find_spec("matplotlib") is None:
        return f"no picture {path.name}: matplotlib is not installed"
    changes = list(dict.fromkeys(row["change"] for row in rows))
    figure, axes = _figure(len(changes), 8, 5)
    for axis, change in zip(axes, changes, strict=True):
        for row in (row for row in rows if row["change"] == change):
            steps = [row["window"] * (i + 1) for i in range(len(row["curve"]))]
            style = "--" if row["side"] == "float32" else "-"
            axis.plot(steps, row["curve"], style, color=colour(row), label=row["title"])
        axis.set_title(f"gradient {change}", fontsize=9)
        axis.set_ylim(bottom=0)
        axis.set_xlabel("steps after the change")
        axis.set_ylabel("step / learning rate")
        axis.grid(alpha=0.3)
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def save_losses(rows: Rows, path: Path) -> str:
    """The loss over the steps above, and its distance from bfloat16's below; a column for each model."""
    if find_spec("matplotlib") is None:
        return f"no picture {path.name}: matplotlib is not installed"
    models = list(dict.fromkeys(row["model"] for row in rows))
    figure, axes = _figure(2 * len(models), 4.5 * len(models), 5)
    for i, model in enumerate(models):
        above, below = axes[i], axes[i + len(models)]
        found = {row["side"]: row for row in rows if row["model"] == model}
        means = {side: [sum(at) / len(at) for at in zip(*row["curves"], strict=True)] for side, row in found.items()}
        for side, mean in means.items():
            style = {"float32": "--", "fp8 delayed": ":"}.get(side, "-")
            steps = [found[side]["every"] * (j + 1) for j in range(len(mean))]
            look = {"color": PLAIN if side == "float32" else OURS if "fp8" in side else THEIRS, "linestyle": style}
            above.plot(steps, mean, label=side, **look)
            if "bfloat16" in means:
                below.plot(steps, [100 * (a / b - 1) for a, b in zip(mean, means["bfloat16"], strict=True)], **look)
        seeds = len(next(iter(found.values()))["curves"])
        above.set_title(f"{model}, {seeds} seeds" if seeds > 1 else model, fontsize=9)
        above.set_ylabel("loss, nats per byte")
        below.set_ylabel("over bfloat16, %")
        below.set_xlabel("step")
        below.set_ylim(-3, 3)
        for axis in (above, below):
            axis.grid(alpha=0.3)
            axis.locator_params(axis="x", nbins=5)
    axes[0].legend(fontsize=8)
    return _save(figure, path)


def _curves(rows: Rows) -> Iterable[Rows]:
    for side in dict.fromkeys(row["side"] for row in rows):
        yield [row for row in rows if row["side"] == side]


def _figure(panels: int, width: float, height: float) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure((width, height), layout="constrained")
    FigureCanvasAgg(figure)
    columns = min(panels, 2) if width > 5 else 1
    axes = figure.subplots(panels // columns, columns, squeeze=False)
    return figure, list(axes.flat)


def _save(figure: Any, path: Path) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")
    return f"picture {path.name}"
