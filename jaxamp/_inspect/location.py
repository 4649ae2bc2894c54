"""Where an equation is in the user's program: named scopes, source line, step of the plan, round of a loop."""

import functools
import os
import sysconfig
from pathlib import Path
from typing import Any, NamedTuple

import jax

from .._compat import first_frame, marks_of, scopes, up_to_mark
from .._transform.ledger import Ledger


class Source(NamedTuple):
    """A line of the user's code."""

    file: str
    line: int
    function: str
    library: str = ""  # the line of a library that it called, if that made the equation: "flax/linen/linear.py:271"

    def __str__(self) -> str:
        line = f"{Path(self.file).name}:{self.line}"
        return f"{line} ({self.library})" if self.library else line

    @property
    def short(self) -> str:
        """For a narrow column, which cuts it on the left: the innermost line last, without folders."""
        return str(self._replace(library=self.library.rpartition("/")[2]))


class Place(NamedTuple):
    """Where a jaxpr, or one equation of it, runs."""

    phase: str  # forward, backward
    scopes: tuple[str, ...] = ()
    times: int = 1  # how often it runs: the length of a scan, the devices of a shard_map
    rounds: tuple[int, ...] = ()  # while it runs: the round of each loop around it
    turns: tuple[tuple[int, int], ...] = ()  # the same for loops and conds: which of them, and its round or branch
    mark: int | None = None  # the ledger's number of the step behind it
    run: int = 0  # while it runs: the number of this run of the jaxpr
    mark_run: int = 0  # the number of the run that the step is in
    marks_here: bool = False  # whether the step is one of the jaxpr that runs, or of a function that it calls
    source: Source | None = None
    touched: tuple[int, ...] = ()  # while it runs: the operands that may have infs or NaNs that an operation has made
    mapped: Any = None  # while it runs: the `Mapped` of the `shard_map` around it

    @property
    def scope(self) -> str:
        return "/".join(self.scopes)

    def of(self, eqn: Any, ledger: Ledger) -> "Place":
        """The place of an equation of the jaxpr that is here."""
        stack = eqn.source_info.name_stack
        marks = marks_of(stack)
        stack = up_to_mark(stack, marks[0]) if marks else stack
        lines = [_source(e.source_info.traceback) for e in (*(ledger.records[mark].eqn for mark in marks), eqn)]
        lines = [line for line in lines if line is not None]
        users = [line for line in (*lines, self.source) if line is not None and _is_the_users(line.file)]
        return self._replace(
            scopes=self.scopes + scopes(stack),
            mark=marks[0] if marks else self.mark,
            mark_run=self.run if marks else self.mark_run,
            marks_here=self.marks_here or bool(marks),
            source=next(iter((*users, *lines)), self.source),
        )


# -- source lines


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The folders of jaxamp and JAX, and those of other libraries."""
    ours = Path(__file__).parent.parent, Path(jax.__file__).parent
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return tuple(f"{folder}{os.sep}" for folder in ours), tuple(f"{folder}{os.sep}" for folder in libraries)


@functools.cache
def _is_not_ours(file: str) -> bool:
    return not file.startswith((*_folders()[0], "<frozen"))


@functools.cache
def _is_a_librarys(file: str) -> bool:
    return _is_not_ours(file) and _inside_of_packages(file) is not None


def _inside_of_packages(file: str) -> str | None:
    """The path of a file inside of the folder where libraries are installed; None for one elsewhere."""
    for name in ("purelib", "platlib"):
        folder = f"{sysconfig.get_path(name)}{os.sep}"
        if file.startswith(folder):
            return file.removeprefix(folder)
    return None


@functools.cache
def _is_the_users(file: str) -> bool:
    return _is_not_ours(file) and not file.startswith(_folders()[1])


@functools.lru_cache(2**14)
def _source(traceback: Any) -> Source | None:
    """The user's line in a traceback: the innermost one outside of all libraries, or at least outside of JAX and us."""
    found = first_frame(traceback, _is_the_users)
    if found is None:
        found = first_frame(traceback, _is_not_ours)
        return None if found is None else Source(*found)
    inner = first_frame(traceback, lambda file: _is_the_users(file) or _is_a_librarys(file))
    if inner is None or inner == found:
        return Source(*found)
    return Source(*found, f"{Path(_inside_of_packages(inner[0]) or inner[0]).as_posix()}:{inner[1]}")
