"""The table of models: what an entry says, and how to add one.

A builder imports its library, makes a small model as the library ships it, and returns a `Model`. Nothing is imported
before a builder runs, so this folder can be read without any of the libraries.
"""

import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

Loss = Callable[..., Any]  # (params, state, batch) -> (loss, new state)
LAWS = ("gradient", "own", "share", "kept", "state", "training")
TRACE = "trace"  # the law about the time to trace, which is asserted only if asked for
RULES = "a large function with its own backward rule is traced as it is written, and again as it is run"


class Model(NamedTuple):
    """A small model in float32, ready to train."""

    loss: Loss
    params: Any
    batch: Any
    state: Any = ()  # batch statistics, counters, keys: what a step carries on beside the parameters
    wrapped: Callable[[Callable[[Any], Any]], Loss] | None = None  # `loss`, with the user's function transformed inside
    own: Callable[[Any], Loss | None] | None = None  # `loss` in the library's own mode for a low dtype, if it has one
    rate: float = 1e-3  # of Adam
    oracle: bool = False  # whether gradients are compared with those in float64, because float32's own error matters

    def under(self, transform: Callable[[Any], Any]) -> Loss:
        """The loss with `transform` around the function that a user would wrap."""
        return transform(self.loss) if self.wrapped is None else self.wrapped(transform)


class Entry(NamedTuple):
    """A model by name, and the laws that it cannot follow, each with the reason."""

    library: str
    name: str
    needs: tuple[str, ...]  # modules, without which the model is skipped
    build: Callable[[], Model]
    reasons: dict[str, str]  # law -> why the program itself or its numbers rule it out
    quick: bool  # whether it belongs to the few that CI runs

    @property
    def id(self) -> str:
        return f"{self.library}-{self.name}"


ENTRIES: dict[str, Entry] = {}


def model(
    library: str, name: str, *needs: str, quick: bool = False, **reasons: str
) -> Callable[[Callable[[], Model]], Callable[[], Model]]:
    """Register the builder of a model. Keywords name laws that the model cannot follow, with the reason."""
    if unknown := set(reasons) - {*LAWS, TRACE}:
        raise ValueError(f"{name} gives reasons for {sorted(unknown)}; the laws are {', '.join((*LAWS, TRACE))}.")

    def register(build: Callable[[], Model]) -> Callable[[], Model]:
        entry = Entry(library, name, needs, build, reasons, quick)
        ENTRIES[entry.id] = entry
        return build

    return register


def entries() -> dict[str, Entry]:
    """All entries. Every file of this folder whose name starts with `of_` has some."""
    for path in sorted(Path(__file__).parent.glob("of_*.py")):
        importlib.import_module(f"models.{path.stem}")
    return ENTRIES
