"""Sides of a training step against each other: compile each, let them take turns, and see if their losses agree."""

import gc
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax

from ._sides import SIDES, Case, Step
from ._tables import progress
from ._timing import Failure, Times, Unavailable, attempt, figures, race, seconds

STEPS = 6  # of a repeat. To start the first one takes up to 17 ms; those of the others are hidden, as in training
TOLERANCE = 0.1


class Compiled(NamedTuple):
    """A step ready to run, and what it took to get there."""

    step: Step
    call: Any
    lower_s: float  # tracing included
    compile_s: float

    @property
    def temporary(self) -> int:
        return self.call.memory_analysis().temp_size_in_bytes

    @property
    def needed(self) -> int:
        """Bytes that are alive while it runs: the arguments, the results that are not arguments again, temporaries."""
        found = self.call.memory_analysis()
        arguments, results = found.argument_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes
        return arguments + results + found.temp_size_in_bytes


def compile_step(name: str, case: Case) -> Compiled:
    """Compile a side for shapes alone: nothing is allocated."""
    made = SIDES[name].make
    if made is None:
        raise Unavailable("not in this benchmark")
    step = made(case)
    lowered: list[Any] = []
    shapes = jax.eval_shape(step.init)
    lower_s = seconds(lambda: lowered.append(jax.jit(step.run, donate_argnums=0).lower(*shapes)))
    compiled: list[Any] = []
    compile_s = seconds(lambda: compiled.append(lowered[0].compile()))
    return Compiled(step, compiled[0], lower_s, compile_s)


class Training:
    """A step that goes on from its own state; a call runs `calls` steps and returns the seconds of one."""

    def __init__(self, compiled: Compiled, calls: int):
        self.compiled, self.calls = compiled, calls
        self.state, *self.batch = compiled.step.init()
        self.losses: list[Any] = []

    def once(self) -> Any:
        self.state, loss = self.compiled.call(self.state, *self.batch)
        self.losses.append(loss)
        return loss, self.state

    def __call__(self) -> float:
        return seconds(self.once, self.calls)


def prepare(name: str, case: Case, calls: int) -> tuple[Training, dict[str, Any]]:
    """A side ready to run, and what compiling it has told."""
    compiled = compile_step(name, case)
    row = {"gib": compiled.temporary / 2**30, "compile_s": compiled.compile_s, "lower_s": compiled.lower_s}
    return Training(compiled, calls), row


def contest(names: Sequence[str], case: Case, repeats: int, calls: int) -> dict[str, dict[str, Any]]:
    """Rows of sides of JAX: seconds and losses, or a note why there are none."""
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, Training] = {}
    for name in names:
        made = attempt(prepare, name, case, calls)
        if isinstance(made, Failure):
            rows[name] = {"note": made.why}
        else:
            running[name], rows[name] = made
        progress(f"{case.network}, {'scan' if case.stacked else 'unrolled'}, {name}: {_said(rows[name])}")
    gc.collect()
    gc.freeze()  # so that collecting before each repeat takes no time
    for name, times in race(running, repeats).items():
        if isinstance(times, Failure):
            rows[name]["note"] = times.why
        else:
            rows[name] |= {"seconds": times.seconds, "losses": [float(loss) for loss in running[name].losses]}
    running.clear()
    gc.unfreeze()
    gc.collect()  # their parameters, before those of the next case are made
    return rows


def _said(row: dict[str, Any]) -> str:
    return row.get("note") or f"compiled in {row['compile_s']:.1f} s"


def judge(loss: float, reference: Sequence[float]) -> str | None:
    """What is wrong with a side's loss, if anything is: the fall of float32's loss is the measure."""
    gap = abs(loss - reference[-1]) / max(abs(reference[0] - reference[-1]), 1e-6)
    return None if gap <= TOLERANCE else f"WRONG: loss off by {gap:.0%} of what float32's fell"


def conclude(rows: dict[str, dict[str, Any]]) -> None:
    """Fill in what is read off two rows: ratios, and whether the losses agree."""
    timed = {name: Times(row["seconds"]) for name, row in rows.items() if "seconds" in row}
    reference = rows.get("float32", {}).get("losses")
    for name, found in figures(timed, {"vs_float32": "float32", "vs_mpx": "mpx"}).items():
        losses = rows[name]["losses"]
        last = len(reference or losses) - 1  # PyTorch has made some steps more, to warm up
        rows[name] |= {**found, "loss": losses[last]}
        if reference:
            rows[name]["note"] = judge(losses[last], reference)
