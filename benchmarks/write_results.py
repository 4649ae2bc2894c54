"""Write measured results to `benchmarks/RESULTS.md`, and pictures next to it.

    python -m benchmarks.write_results DIR [--out PATH]

`DIR` holds the files that the benchmarks wrote with `--json`. Several files of one benchmark are merged. Pictures need
matplotlib and are left out without it.
"""

import argparse
import importlib
import json
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from ._pictures import save_growth, save_losses, save_step_lengths, save_steps, save_zoo
from ._tables import markdown

# In the order of RESULTS.md.
QUESTIONS = (
    "train_step zoo fp8 curves passes kernels memory growth matmul communication compile_time scaler optimizer"
    " step_length report_time numerics"
).split()
TABLES = {  # the keys that the rows of a table share, and the name of the table
    "train_step": (("network", "layers"), "{network}, layers {layers}"),
    "passes": (("network", "layers"), "{network}, layers {layers}"),
    "kernels": (("network", "layers", "title"), "{network}, layers {layers}, {title}"),
    "memory": (("network", "layers"), "{network}, layers {layers}"),
    "growth": (("growing",), "growing {growing}"),
    "matmul": (("x", "w"), "({x}) @ ({w})"),
    "communication": (("model", "devices", "layout"), "{model}, {devices} devices, {layout}"),
    "optimizer": (("tree", "grads"), "{tree}, {grads} gradients"),
}


class Section(NamedTuple):
    """The results of one benchmark."""

    question: str
    setting: str  # device and versions
    rows: list[dict[str, Any]]
    notes: list[str]


def read(folder: Path) -> list[Section]:
    """The sections in order. Files of one benchmark with the same setting become one section."""
    found: dict[tuple[str, str], Section] = {}
    for path in sorted(folder.glob("*.json")):
        record = json.loads(path.read_text(encoding="utf-8"))
        versions = ", ".join(f"{name} {version}" for name, version in record["versions"].items())
        setting, question = f"{record['device']}; {versions}", record["question"]
        section = found.setdefault((question, setting), Section(question, setting, [], []))
        section.rows.extend(record["rows"])
        section.notes.extend(note for note in record["notes"] if note not in section.notes)
    return sorted(found.values(), key=lambda section: QUESTIONS.index(section.question))


def is_ours(row: dict[str, Any]) -> bool:
    return row.get("side", "").startswith("ours")


def ordered(question: str, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows with our sides in bold. Where sides compete, the fastest comes first and failures come last."""
    rows = [{**row, "title": f"**{row['title']}**"} if is_ours(row) else row for row in rows]
    if question in ("train_step", "matmul", "optimizer"):
        return sorted(rows, key=lambda row: row.get("ms") or float("inf"))
    return rows


def tables(section: Section) -> Iterable[tuple[str, list[dict[str, Any]]]]:
    """The rows grouped into tables, each with its name."""
    keys, name = TABLES.get(section.question, ((), ""))
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in section.rows:
        groups.setdefault(tuple(row[key] for key in keys), []).append(row)
    for common, rows in groups.items():
        yield name.format(**dict(zip(keys, common, strict=True))), rows


def pictures(section: Section, folder: Path) -> list[str]:
    """Save the pictures of a section, and return the names of their files."""
    said = []
    if section.question == "growth":
        said.append(save_growth(section.rows, folder / "growth.png"))
    if section.question == "curves":
        said.append(save_losses(section.rows, folder / "curves.png"))
    if section.question == "step_length":
        said.append(save_step_lengths(section.rows, folder / "step_length.png"))
    if section.question == "zoo":
        said.append(save_zoo(section.rows, folder / "zoo.png"))
    if section.question == "train_step":
        for name, rows in tables(section):
            said.append(save_steps(rows, folder / f"step_{re.sub('[^a-z]+', '_', name.replace('layers', ''))}.png"))
    for line in said:
        print(line)
    return [one.removeprefix("picture ") for one in said if one.startswith("picture ")]


def render(section: Section, images: Sequence[str], top: str) -> str:
    module = importlib.import_module(f".{section.question}", __package__)
    keys, _ = TABLES.get(section.question, ((), ""))
    columns = [column for column in module.COLUMNS if column.key not in keys]
    parts = [f"## {module.__doc__.splitlines()[0]}", f"`python -m benchmarks.{section.question}`"]
    if section.setting != top:
        parts.append(f"On {section.setting}.")
    for name, rows in tables(section):
        parts += [f"**{name}**"] if name else []
        shown = [c for c in columns if c.key != "note" or any(row.get("note") for row in rows)]
        parts.append(markdown(shown, ordered(section.question, rows)))
    parts += module.summary(section.rows) if hasattr(module, "summary") else []
    parts += [f"![{section.question}]({image})" for image in images]
    parts.append("\n".join(f"- {note}" for note in section.notes))
    return "\n\n".join(parts)


def document(sections: Sequence[Section], folder: Path) -> str:
    top = sections[0].setting
    parts = [
        "# Results",
        f"Measured on {top}.",
        "Medians over interleaved repeats. The spread is half the distance between the quartiles, divided by the"
        " median. Our sides are bold. Written by `python -m benchmarks.write_results` from the output of the"
        " benchmarks.",
    ]
    parts += [render(section, pictures(section, folder), top) for section in sections]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("RESULTS.md"))
    options = parser.parse_args()
    sections = read(options.folder)
    if not sections:
        raise SystemExit(f"{options.folder} has no results. Run a benchmark with --json {options.folder}/NAME.json.")
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(document(sections, options.out.parent), encoding="utf-8")
    print(options.out)


if __name__ == "__main__":
    main()
