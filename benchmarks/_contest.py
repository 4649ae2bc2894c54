"""Compare the sides of a training step: compile each, let them take turns, and check that their losses agree."""

import gc
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding

from ._gpus import lower_for
from ._sides import Side, Step
from ._tables import progress
from ._timing import Failure, Times, Unavailable, attempt, figures, race, seconds

STEPS = 6  # per repeat. Starting the first takes up to 17 ms; the others start while it runs, as in training
TOLERANCE = 0.1
AGAINST = {"vs_float32": "float32", "vs_mpx": "mpx"}  # a column of ratios, and the side that they compare with


class Compiled(NamedTuple):
    """A compiled step, and the time it took to get there."""

    step: Step
    call: Any
    lower_s: float  # includes tracing
    compile_s: float

    @property
    def temporary(self) -> int:
        return self.call.memory_analysis().temp_size_in_bytes

    @property
    def needed(self) -> int:
        """Bytes alive while the step runs: arguments, results that do not reuse an argument, and temporaries."""
        found = self.call.memory_analysis()
        arguments, results = found.argument_size_in_bytes, found.output_size_in_bytes - found.alias_size_in_bytes
        return arguments + results + found.temp_size_in_bytes


def lower_step(side: Side, case: Any, place: Sharding | None = None) -> tuple[Step, Any]:
    """A side's step, lowered from shapes, without allocating anything. `place`: on a GPU that need not be here."""
    if side.make is None:
        raise Unavailable("not in this benchmark")
    step = side.make(case)
    shapes = jax.eval_shape(step.init)
    if place is None:
        return step, jax.jit(step.run, donate_argnums=0).lower(*shapes)
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), shapes)
    return step, lower_for(step.run, *shapes, donate_argnums=0)


def compile_step(side: Side, case: Any, place: Sharding | None = None) -> Compiled:
    """Compile a side, as `lower_step` lowers it."""
    done: list[Any] = []
    lower_s = seconds(lambda: done.extend(lower_step(side, case, place)))
    step, lowered = done
    # Without a GPU to try them on, XLA finds no settings for some of its own matmuls.
    options = None if place is None else {"xla_gpu_enable_triton_gemm": False}
    compile_s = seconds(lambda: done.append(lowered.compile(options)))
    return Compiled(step, done[-1], lower_s, compile_s)


class Training:
    """A step that continues from its own state. A call runs `calls` steps and returns the seconds per step."""

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


def prepare(side: Side, case: Any, calls: int) -> tuple[Training, dict[str, Any]]:
    """A side that is ready to run, and the figures from compiling it."""
    compiled = compile_step(side, case)
    row = {"gib": compiled.temporary / 2**30, "compile_s": compiled.compile_s, "lower_s": compiled.lower_s}
    return Training(compiled, calls), row


def losses(training: Training) -> dict[str, Any]:
    return {"losses": [float(loss) for loss in training.losses]}


def contest(
    sides: Mapping[str, Side],
    case: Any,
    repeats: int,
    calls: int,
    read: Callable[[Training], dict[str, Any]] = losses,
) -> dict[str, dict[str, Any]]:
    """One row for each JAX side: its seconds and what `read` says, or a note that says why there are none.

    `case` is what the sides make their step from; progress is reported under its `title`.
    """
    rows: dict[str, dict[str, Any]] = {}
    running: dict[str, Training] = {}
    for name, side in sides.items():
        made = attempt(prepare, side, case, calls)
        if isinstance(made, Failure):
            rows[name] = {"note": made.why}
        else:
            running[name], rows[name] = made
        progress(f"{case.title}, {name}: {_said(rows[name])}")
    gc.collect()
    gc.freeze()  # so that the collection before each repeat takes no time
    for name, times in race(running, repeats).items():
        if isinstance(times, Failure):
            rows[name]["note"] = times.why
        else:
            rows[name] |= {"seconds": times.seconds, **read(running[name])}
    running.clear()
    gc.unfreeze()
    gc.collect()  # frees their parameters before the next case makes its own
    return rows


def _said(row: dict[str, Any]) -> str:
    return row.get("note") or f"compiled in {row['compile_s']:.1f} s"


def judge(loss: float, name: str, reference: Sequence[float]) -> str | None:
    """A complaint if a side's loss is wrong: if it is far from the reference, compared with how far that one fell."""
    gap = abs(loss - reference[-1]) / max(abs(reference[0] - reference[-1]), 1e-6)
    return None if gap <= TOLERANCE else f"WRONG: loss off by {gap:.0%} of the fall of {name}"


def conclude(rows: dict[str, dict[str, Any]], against: Mapping[str, str] = AGAINST, reference: str = "float32") -> None:
    """Fill in ratios to the sides named in `against`, and whether each loss agrees with that of `reference`."""
    timed = {name: Times(row["seconds"]) for name, row in rows.items() if "seconds" in row}
    expected = rows.get(reference, {}).get("losses")
    for name, found in figures(timed, against).items():
        losses = rows[name]["losses"]
        last = len(expected or losses) - 1  # PyTorch has made a few more steps, to warm up
        rows[name] |= {**found, "loss": losses[last]}
        if expected:
            rows[name]["note"] = judge(losses[last], reference, expected)
