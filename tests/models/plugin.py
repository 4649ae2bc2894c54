"""The options of `pytest -m models`, and its table."""

from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

from benchmarks._tables import Column, device, markdown, number, text

from . import laws
from .measure import STEPS, Figures
from .registry import Entry

ROOT = Path(__file__).parents[2]
KEY = "model"  # of the property that brings figures from a test to the table
PAGE = ROOT / "benchmarks" / "MODELS.md"


def shortest(x: float) -> str:
    return f"{x:.1e}"


COLUMNS = (
    Column("library", "library"),
    Column("model", "model"),
    Column("dtype", "low"),
    Column("low share", "share", number(3)),
    Column("kept", "kept", number(2)),
    Column("error", "error", shortest),
    Column("own error", "own", shortest),
    Column("error / response", "ratio", number(2)),
    Column("loss off by", "drift", lambda x: f"{100 * x:.2f} %"),
    Column("trace", "trace", number(2)),
    Column("broken", "broken"),
    Column("listed", "listed"),
)
NOTES = (
    "low share: of the matmuls' FLOPs, forward and backward pass.",
    "kept: bytes kept for the backward pass, over those of float32.",
    "error: of the gradient, relative L2 norm, against float32 or float64.",
    "own error: the same in the library's own low precision.",
    "response: how far float32's gradient moves when parameters, state and batch are rounded to it, which no mixed "
    f"precision can avoid. Error / response must be at most {laws.RESPONSES:g}.",
    f"loss off by: distance to float32's loss after {STEPS} steps of Adam, relative to its fall.",
    "trace: time to trace and lower the gradient under amp, over plain float32.",
    "listed: laws that a model cannot keep, with the reason.",
)


def row(entry: Entry, low: str, law: str, found: Figures) -> dict[str, Any]:
    """What the table shows of a model in one dtype, and the law that the test is about."""
    figures = {key: getattr(found, key) for key in ("share", "kept", "error", "own", "drift")}
    listed = "; ".join(f"{law}: {reason}" for law, reason in entry.reasons.items()) or None
    return {**names(entry, low), **figures, "ratio": found.error / found.response, "listed": listed, "law": law}


def trace_row(entry: Entry, low: str, ratio: float) -> dict[str, Any]:
    return {**names(entry, low), "trace": ratio}


def names(entry: Entry, low: str) -> dict[str, Any]:
    return {"library": entry.library, "model": entry.name, "low": low}


def gather(reports: Sequence[pytest.TestReport]) -> list[dict[str, Any]]:
    """The rows of the table, from the reports of all tests."""
    rows: dict[Any, dict[str, Any]] = {}
    for report in reports:
        for part in (value for key, value in report.user_properties if key == KEY):
            whole = rows.setdefault((part["library"], part["model"], part["low"]), {"broken": None})
            law = part.pop("law", None)
            whole.update(part)
            if law and report.failed:
                whole["broken"] = ", ".join(filter(None, [whole["broken"], law]))
    return sorted(rows.values(), key=lambda row: (row["library"].lower(), row["model"].lower(), row["low"]))


def page(rows: Sequence[dict[str, Any]], setting: str) -> str:
    head = f"# Real models\n\nMeasured on {setting}. Written by `pytest -m models --write-results`.\n\n"
    return head + markdown(COLUMNS, rows) + "\n\n" + "".join(f"- {note}\n" for note in NOTES)


def setting(rows: Sequence[dict[str, Any]]) -> str:
    """The device and the versions of what the models come from."""
    installed = {}
    for name in ["jax", *sorted({row["library"] for row in rows})]:
        try:
            installed[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return f"{device()}; " + ", ".join(f"{name} {version}" for name, version in installed.items())


# -- hooks of pytest, which tests/conftest.py takes over


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("models", "pytest -m models")
    group.addoption("--quick", action="store_true", help="only the few models that CI runs")
    group.addoption(
        "--write-results", action="store_true", help="write the table to benchmarks/, as MODELS.md or SOAK.md"
    )
    group.addoption("--check-times", action="store_true", help="assert the time to trace")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--quick"):
        config.hook.pytest_deselected(items=[item for item in items if not _is_quick(item)])
        items[:] = [item for item in items if _is_quick(item)]


def _is_quick(item: Any) -> bool:
    """Whether an item tests no model of the table, or one of the few."""
    from .registry import ENTRIES

    found = ENTRIES.get(getattr(item, "callspec", None) and item.callspec.params.get("name"))
    return found is None or found.quick


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    rows = gather([r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())])
    if rows:
        terminalreporter.section("real models")
        terminalreporter.write_line(text(COLUMNS, rows))
        if config.getoption("--write-results"):
            PAGE.write_text(page(rows, setting(rows)), encoding="utf-8")
