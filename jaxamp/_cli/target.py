"""The user's code for the command line: a function by its name, arguments by strings, and what goes wrong in them."""

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import equinox as eqx

from .._policy.toml import nearest
from .arguments import parse_argument

_FORM = "module:function, as in 'package.module:function'"


class CommandError(Exception):
    """What is wrong with a command line, in three beats: what was got, what was expected, what to write."""


@contextlib.contextmanager
def current_directory_first() -> Iterator[None]:
    """Modules are found in the current directory, as under `python -m`."""
    before = list(sys.path)
    sys.path.insert(0, os.getcwd())
    try:
        yield
    finally:
        sys.path[:] = before


@contextlib.contextmanager
def users_code(doing: str, expected: str, instead: str) -> Iterator[None]:
    """Run code of the user's. What it prints goes to stderr, what it raises becomes a `CommandError`."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except (Exception, SystemExit) as error:
        said = next(iter(str(error).strip().splitlines()), "")
        what = f"{type(error).__name__}: {said.rstrip('.')}" if said else type(error).__name__
        message = f"{doing} raised {what}{_where(error)}; expected {expected}. {instead}, or see more with --traceback."
        raise CommandError(message) from error


def _where(error: BaseException) -> str:
    """The innermost line of an error that is in the current directory."""
    here, ours = Path.cwd(), Path(__file__).parent.parent
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        path = Path(frame.filename)
        if (
            path.is_relative_to(here)
            and "site-packages" not in path.parts
            and not path.is_relative_to(Path(__file__).parent.parent)
        ):
            return f" ({path.relative_to(here)}:{frame.lineno})"
    return ""


def load_function(target: str) -> Callable[..., Any]:
    """The function that `package.module:attribute.path` names."""
    name, colon, path = target.partition(":")
    parts = path.split(".")
    if name.endswith(".py") or "/" in name:
        module = name.removesuffix(".py").removeprefix("./").strip("/").replace("/", ".")
        raise CommandError(f"got the target {target!r}; expected {_FORM}. Write '{module}:{path or 'function'}'.")
    if not all(part.isidentifier() for part in name.split(".")) or not all(part.isidentifier() for part in parts):
        head, _, tail = name.rpartition(".")
        instead = f"{head}:{tail}" if head and not colon else "package.module:function"
        raise CommandError(f"got the target {target!r}; expected {_FORM}. Write for example '{instead}'.")
    found, seen = _import(name), name
    for part in parts:
        if not hasattr(found, part):
            near = nearest(part, [other for other in dir(found) if not other.startswith("_")])
            instead = near or f" Write the name of a function that is in {seen!r}."
            raise CommandError(f"got the target {target!r}; expected {part!r} in {seen!r}, which has none.{instead}")
        found, seen = getattr(found, part), f"{seen}.{part}"
    if not callable(found):
        raise CommandError(
            f"got the target {target!r}, of type {type(found).__name__}; expected a function. "
            "Write the name of the function that you would give to jaxamp.amp."
        )
    return found


def _import(name: str) -> Any:
    with users_code(f"importing {name!r}", "a module that can be imported", "Mend it there"):
        try:
            return importlib.import_module(name)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{name}.".startswith(f"{error.name}."):
                raise
            missing = error
    raise CommandError(
        f"got the module {name!r}, and there is no {missing.name!r}; expected a module in the current directory or an "
        "installed one. Write its name as in an import, or change to the directory that it is in."
    ) from missing


def load_arguments(texts: Sequence[str]) -> list[Any]:
    """The arguments that strings stand for; `@module:function` stands for those that the function returns."""
    arguments: list[Any] = []
    for text in texts:
        if text.startswith("@"):
            arguments += _made_by(text)
            continue
        try:
            arguments.append(parse_argument(text))
        except ValueError as error:
            raise CommandError(str(error)) from error
    return arguments


def _made_by(text: str) -> tuple[Any, ...]:
    function = load_function(text[1:])
    with users_code(f"calling {text[1:]}()", "a function without arguments that makes some", "Mend it there"):
        made = eqx.filter_eval_shape(function)  # nothing is computed
    if not isinstance(made, tuple):
        raise CommandError(
            f"{text} returned {type(made).__name__}; expected a tuple, of one entry for each argument. "
            "Write `return (x,)` for a single one."
        )
    return made
