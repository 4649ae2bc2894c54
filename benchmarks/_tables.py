"""The output of every benchmark: the device, the versions and one table, as text, JSON and Markdown."""

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax

PACKAGES = (
    "jax",
    "jaxlib",
    "equinox",
    "optax",
    "jaxamp",
    "mixed-precision-for-jax",
    "jmp",
    "flashoptim-jax",
    "flashoptim",
    "torch",
)


class Column(NamedTuple):
    """A column of a table: its title, the key of its values in a row, and how to format them."""

    title: str
    key: str
    form: Callable[[Any], str] = str


def number(digits: int, unit: str = "") -> Callable[[float], str]:
    return lambda x: f"{x:.{digits}f}{unit}"


def significant(x: float) -> str:
    return f"{x:.4g}"


def percent(x: float) -> str:
    return f"{100 * x:.1f} %"


def versions() -> dict[str, str]:
    """The versions of the packages that are installed."""
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def device() -> str:
    first = jax.devices()[0]
    return f"{first.device_kind} ({first.platform})"


def header() -> str:
    return f"device {device()}, " + ", ".join(f"{name} {version}" for name, version in versions().items())


def cells(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> list[list[str]]:
    """The table as strings, titles first. A missing value is shown as a dash."""
    body = [["-" if row.get(c.key) is None else c.form(row[c.key]) for c in columns] for row in rows]
    return [[c.title for c in columns], *body]


def text(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> str:
    table = cells(columns, rows)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in table]
    return "\n".join(line.rstrip() for line in lines)


def markdown(columns: Sequence[Column], rows: Iterable[dict[str, Any]]) -> str:
    title, *body = ([cell.replace("|", "\\|") for cell in line] for line in cells(columns, rows))
    return "\n".join("| " + " | ".join(line) + " |" for line in [title, ["---"] * len(title), *body])


def parser(doc: str, small: str) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    made = argparse.ArgumentParser(description=doc.splitlines()[0])
    made.add_argument("--small", action="store_true", help=f"{small}: does it run at all?")
    made.add_argument(
        "--json", type=Path, metavar="PATH", help="write the rows to this file, for benchmarks.write_results"
    )
    return made


def save(question: str, rows: Sequence[dict[str, Any]], notes: Sequence[str], path: Path | None) -> None:
    """Write the rows if there is a path. A long run saves after each part, so that a crash loses little."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        record = {"question": question, "device": device(), "versions": versions(), "notes": notes, "rows": rows}
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


def publish(
    question: str, columns: Sequence[Column], rows: Sequence[dict[str, Any]], notes: Sequence[str], path: Path | None
) -> None:
    """Print the table, and save it if there is a path."""
    print(header(), text(columns, rows), *notes, sep="\n")
    save(question, rows, notes, path)


def progress(line: str) -> None:
    """Print how far a long run has come, to stderr so that stdout has only results."""
    print(line, file=sys.stderr, flush=True)
