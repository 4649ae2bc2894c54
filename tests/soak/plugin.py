"""The figures of `pytest -m soak`, and their page."""

import operator
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks._tables import Column, device, markdown, number, text, versions

KEY = "soak"  # of the property that brings figures from a test to the page
PAGE = Path(__file__).parents[2] / "benchmarks" / "SOAK.md"
COLUMNS = (
    Column("law", "law"),
    Column("case", "case"),
    Column("figures", "figures"),
    Column("seconds", "seconds", number(0)),
    Column("outcome", "outcome"),
)
NOTES = (
    "law: the test, in `tests/soak/`, that attacks it.",
    "figures: how much was tried, and what was found. Seeds are fixed: another run has the same figures, apart from "
    "memory and the moments of the kills.",
    "seconds: of the tests that give the row, compilation included.",
)


@pytest.fixture
def figures(request: pytest.FixtureRequest) -> Callable[..., None]:
    """Note what a test has tried and found: `figures("float16", steps=100_000, skipped=12)`.

    Tests of one law that name the same case share a row: whole numbers are added, and of others the largest is shown.
    """
    law = request.node.originalname.removeprefix("test_").replace("_", " ")

    def note(case: str = "", **numbers: Any) -> None:
        plain = {name: np.asarray(x).item() for name, x in numbers.items()}  # which can go to another process
        request.node.user_properties.append((KEY, {"law": law, "case": case or None, "numbers": plain}))

    return note


def gather(reports: Sequence[pytest.TestReport]) -> list[dict[str, Any]]:
    """The rows of the page, from the reports of all tests, in an order that does not depend on who ran first."""
    rows: dict[Any, dict[str, Any]] = {}
    for report in sorted(reports, key=lambda report: report.nodeid):
        for part in (value for key, value in report.user_properties if key == KEY):
            row = rows.setdefault((part["law"], part["case"]), {**part, "numbers": {}, "seconds": 0, "outcome": "held"})
            row["seconds"] += report.duration
            for name, x in part["numbers"].items():
                add = max if isinstance(x, float) else operator.add
                row["numbers"][name] = add(row["numbers"].get(name, 0), x)
            if report.failed:
                row["outcome"] = "broken"
    return [{**row, "figures": _words(row["numbers"])} for row in rows.values()]


def _words(numbers: dict[str, Any]) -> str:
    written = {name: f"{x:.2g}" if isinstance(x, float) else f"{x:,}" for name, x in numbers.items()}
    return ", ".join(f"{x} {name.replace('_', ' ')}" for name, x in written.items())


def page(rows: Sequence[dict[str, Any]], setting: str) -> str:
    head = f"# The soak\n\nMeasured on {setting}. Written by `pytest -m soak --write-results`.\n\n"
    return head + markdown(COLUMNS, rows) + "\n\n" + "".join(f"- {note}\n" for note in NOTES)


def setting() -> str:
    kept = {name: version for name, version in versions().items() if name in ("jax", "optax", "equinox")}
    return f"{device()}; " + ", ".join(f"{name} {version}" for name, version in kept.items())


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if hasattr(config, "workerinput"):  # a process of pytest-xdist, which has seen some of the tests
        return
    rows = gather([r for outcome in ("passed", "failed") for r in terminalreporter.stats.get(outcome, ())])
    if rows:
        terminalreporter.section("soak")
        terminalreporter.write_line(text(COLUMNS, rows))
        if config.getoption("--write-results"):
            PAGE.write_text(page(rows, setting()), encoding="utf-8")
