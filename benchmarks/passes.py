"""How much time and memory does each optimisation pass of `amp` save in a training step?

    python -m benchmarks.passes [--small] [--network vit|gpt] [--layers unrolled|scan]

One AdamW step of the networks of `train_step`, in bfloat16 with plain attention: with all passes, with each pass
disabled in turn, and with all passes disabled. The sides take turns. A pass that changes nothing in the program of a
network is not timed there. A side is flagged if its loss is too far from the loss with all passes.
"""

import argparse
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jaxamp._passes import JAXPR_PASSES, PLAN_PASSES, PROGRAM_PASSES

from ._contest import TOLERANCE, conclude, contest, lower_step
from ._sides import Case, Side, ours
from ._tables import Column, number, parser, percent, progress, publish, save, significant
from .train_step import ask_for_cases, cases_of, repeats_and_calls

ALL, NONE = "all passes", "no passes"
PASSES = tuple(one.__name__ for one in (*JAXPR_PASSES, *PLAN_PASSES, *PROGRAM_PASSES))
COLUMNS = (
    Column("network", "network"),
    Column("layers", "layers"),
    Column("side", "title"),
    Column("ms", "ms", number(1)),
    Column("spread", "spread", percent),
    Column("time ratio", "time_ratio", number(3, "x")),
    Column("temporary GiB", "gib", significant),
    Column("memory ratio", "memory_ratio", number(3, "x")),
    Column("compile s", "compile_s", number(1)),
    Column("loss", "loss", number(4)),
    Column("note", "note"),
)
NOTES = (
    "Ratios: time and temporary memory, divided by those with all passes. Above 1, the disabled pass saves something.",
    "Each repeat is divided by its neighbour in time; the median is shown.",
    "Passes that are not in a table change nothing in that network.",
    "Temporary GiB: memory that XLA allocates on top of arguments and results.",
    f"Loss: flagged if further from the loss with all passes than {TOLERANCE:.0%} of the distance that one fell.",
)


def without(title: str, *names: str) -> Side:
    return Side(title, functools.partial(ours, disable_passes=names))


SIDES = {
    ALL: without(ALL),
    **{name: without(f"without {name}", name) for name in PASSES},
    NONE: without(NONE, *PASSES),
}
SMALL_SIDES = ALL, "recompute", NONE


def with_own_programs(sides: Mapping[str, Side], case: Case) -> dict[str, Side]:
    """The sides whose program is not that of an earlier one."""
    found: dict[str, str] = {}  # program -> the side that has it
    for name, side in sides.items():
        first = found.setdefault(lower_step(side, case)[1].as_text(), name)
        if first != name:
            progress(f"{case.title}, {name}: the program of {first}")
    return {name: sides[name] for name in found.values()}


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Fill in the ratios to the side with all passes."""
    conclude(rows, {"vs_all": ALL}, reference=ALL)
    full = rows[ALL].get("gib")
    for row in rows.values():
        if row.get("vs_all"):
            row["time_ratio"] = 1 / row["vs_all"]
        if full and row.get("gib") is not None:
            row["memory_ratio"] = row["gib"] / full


def main() -> None:
    options = arguments()
    repeats, calls = repeats_and_calls(options)
    sides = {name: SIDES[name] for name in SMALL_SIDES} if options.small else SIDES
    if options.small:  # compiling is most of a small run
        jax.config.update("jax_disable_most_optimizations", True)
    table: list[dict[str, Any]] = []
    notes = [*NOTES, f"{repeats} repeats of {calls} steps."]
    for case in cases_of(options):
        rows = contest(with_own_programs(sides, case), case, repeats, calls)
        compare(rows)
        table += [{**case.about(), "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
        save("passes", table, notes, options.json)
    publish("passes", COLUMNS, table, notes, options.json)


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer of a ViT and few sides, compiled without optimisation")
    ask_for_cases(asked)
    return asked.parse_args()


if __name__ == "__main__":
    main()
