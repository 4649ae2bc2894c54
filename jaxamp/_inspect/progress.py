"""A line on a terminal that says how far a run has come, for runs that take longer than a few seconds."""

import importlib.util
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from .._compat import Jaxpr, open_jaxpr
from .._plan.higher_order import describe

_AFTER = 3.0  # seconds, before anything is shown
_EVERY = 0.2


class Silent:
    """Shows nothing."""

    def advance(self, operations: int) -> None:
        pass


class Progress:
    """Shows how many operations of a run are done: with Rich if it is installed, else as plain text."""

    def __init__(self, title: str, total: int):
        self._title, self._total = title, max(total, 1)
        self._done = 0
        self._next = time.monotonic() + _AFTER
        self._bar: Any = None
        self._task: Any = None
        self._is_shown = False

    def advance(self, operations: int) -> None:
        self._done += operations
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + _EVERY
            self._show()

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()
        elif self._is_shown:
            sys.stderr.write("\r\x1b[K")
            sys.stderr.flush()

    def _show(self) -> None:
        total = max(self._total, self._done)  # a `while` loop may take any number of rounds
        if not self._is_shown and importlib.util.find_spec("rich") is not None:
            from rich.console import Console
            from rich.progress import Progress as Bar

            self._bar = Bar(console=Console(file=sys.stderr), transient=True)
            self._bar.start()
            self._task = self._bar.add_task(self._title, total=total)
        self._is_shown = True
        if self._bar is not None:
            self._bar.update(self._task, completed=self._done, total=total)
        else:
            sys.stderr.write(f"\r{self._title}: {100 * self._done // total} % of {total} operations")
            sys.stderr.flush()


@contextmanager
def progress_of(title: str, *jaxprs: Jaxpr) -> Iterator[Progress | Silent]:
    """Progress of a run of these jaxprs, on a terminal; nothing where stderr goes to a file or a notebook."""
    if not sys.stderr.isatty():
        yield Silent()
        return
    progress = Progress(title, sum(map(operations_of, jaxprs)))
    try:
        yield progress
    finally:
        progress.close()


def operations_of(jaxpr: Jaxpr) -> int:
    """How many operations a jaxpr runs: those of a loop once for each round that is known."""
    total = 0
    for eqn in open_jaxpr(jaxpr).eqns:
        entry = describe(eqn)
        if entry is None:
            total += 1
        else:
            times = entry.times if eqn.primitive.name != "shard_map" else 1
            total += times * max((operations_of(body.jaxpr) for body in entry.bodies), default=1)
    return total
