"""The user's code on the command line: a function given by name, arguments given as strings, and errors in both."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx

from .._errors import nearest, summary
from .arguments import parse_argument

_FORM = "module:function, as in 'package.module:function'"


class CommandError(Exception):
    """What is wrong with a command line: what was given, what was expected, what to write instead."""


@contextlib.contextmanager
def current_directory_first() -> Iterator[None]:
    """Let modules be found in the current directory, as `python -m` does."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def users_code(doing: str, expected: str, instead: str) -> Iterator[None]:
    """Run the user's code. Its output goes to stderr, and its errors become a `CommandError`.

    Args:
        doing: What is run.
        expected: What it should have been.
        instead: What the user should do.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        raised = f"{doing} raised {summary(error).rstrip('.')}{_where(error)}"
        message = f"{raised}; expected {expected}. {instead}, or add --traceback to see more."
        raise CommandError(message) from error


def _where(error: BaseException) -> str:
    """The innermost line in the current directory that an error passed through; empty if there is none."""
    here, ours = Path.cwd(), Path(__file__).parent.parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        is_installed = "site-packages" in path.parts or path.is_relative_to(ours)
        if path.is_relative_to(here) and not is_installed:
            return f" ({path.relative_to(here)}:{frame.lineno})"
    return ""


def load_function(target: str) -> Callable[..., Any]:
    """The function that `package.module:attribute.path` names."""
    name, colon, path = target.partition(":")
    parts = path.split(".")
    if name.endswith(".py") or "/" in name:
        file = Path(name)
        if file.is_absolute() or ".." in file.parts:
            instead = f"Change to the folder of {file.name!r}, and write '{file.stem}:{path or 'function'}'."
        else:
            instead = f"Write '{'.'.join(file.with_suffix('').parts)}:{path or 'function'}'."
        raise CommandError(f"got the target {target!r}; expected {_FORM}. {instead}")
    if not all(part.isidentifier() for part in name.split(".")) or not all(part.isidentifier() for part in parts):
        head, _, tail = name.rpartition(".")
        instead = f"{head}:{tail}" if head and not colon else "package.module:function"
        raise CommandError(f"got the target {target!r}; expected {_FORM}. Write for example '{instead}'.")
    found, seen = _import(name), name
    for part in parts:
        if not hasattr(found, part):
            near = nearest(part, [other for other in dir(found) if not other.startswith("_")])
            instead = near or f" Write one that is in {seen!r}."
            raise CommandError(
                f"got the target {target!r}, but {seen!r} has no {part!r}; expected the name of a function.{instead}"
            )
        found, seen = getattr(found, part), f"{seen}.{part}"
    if not callable(found):
        raise CommandError(
            f"got the target {target!r}, of type {type(found).__name__}; expected a function. "
            "Write the name of the function that you would pass to jaxamp.amp."
        )
    return found


def _import(name: str) -> Any:
    with users_code(f"importing {name!r}", "a module that can be imported", "Fix the error there"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            missing = error
    raise CommandError(
        f"got the module {name!r}, but there is no {missing.name!r}; expected an installed module or one in the "
        "current directory. Write its name as in an import, or change to its directory."
    ) from missing


def load_arguments(texts: Sequence[str]) -> list[Any]:
    """The arguments that strings stand for; `@module:function` stands for all that the function returns."""
    arguments: list[Any] = []
    for text in texts:
        if text.startswith("@"):
            arguments += _returned_by(text)
            continue
        try:
            arguments.append(parse_argument(text))
        except ValueError as error:
            raise CommandError(str(error)) from error
    return arguments


def _returned_by(text: str) -> tuple[Any, ...]:
    function = load_function(text[1:])
    with users_code(
        f"calling {text[1:]}()", "a function that takes no arguments and returns some", "Fix the error there"
    ):
        returned = eqx.filter_eval_shape(function)  # only traced
    if not isinstance(returned, tuple):
        raise CommandError(
            f"{text} returned {type(returned).__name__}; expected a tuple with one entry per argument. "
            "Write `return (x,)` for a single argument."
        )
    return returned
