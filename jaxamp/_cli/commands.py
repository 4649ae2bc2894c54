"""The commands: each turns parsed options into an `Answer`, as data and as text."""

import argparse
import os
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._inspect.check import list_problems, problems_of
from .._inspect.collectives import compiled_collectives
from .._inspect.report import AmpReport, amp_report
from .._inspect.text import is_colourful
from .._inspect.text import render as render_report
from .._policy.load import load_policy
from .._policy.lookup import Policy
from .._policy.toml import header, presets
from .arguments import format_argument, parse_dtype
from .doctor import diagnose
from .policies import differences, entries_of
from .target import CommandError, current_directory_first, load_arguments, load_function, users_code
from .text import render_diagnosis, render_differences, render_policy, render_presets


class Answer(NamedTuple):
    """What a command found."""

    data: dict[str, Any]  # for --json
    text: str
    code: int = 0


def _policies(options: argparse.Namespace) -> Answer:
    found = {name: header(name) for name in presets()}
    data = {"presets": [{"name": name, **about._asdict()} for name, about in found.items()]}
    return Answer(data, render_presets(found))


def _show(options: argparse.Namespace) -> Answer:
    dtype, policy = _compute_dtype(options.dtype), _load_policy(options.name)
    about, entries = header(options.name), entries_of(policy, dtype)
    data = {
        "name": options.name,
        **about._asdict(),
        "dtype": dtype and dtype.name,
        "entries": [entry.to_dict() for entry in entries],
    }
    return Answer(data, render_policy(options.name, about, entries, dtype))


def _diff(options: argparse.Namespace) -> Answer:
    dtype = _compute_dtype(options.dtype)
    found = differences(_load_policy(options.a), _load_policy(options.b), dtype)
    data = {
        "a": options.a,
        "b": options.b,
        "dtype": dtype and dtype.name,
        "differences": [difference.to_dict() for difference in found],
    }
    return Answer(data, render_differences(options.a, options.b, found), int(bool(found)))


def _report(options: argparse.Namespace) -> Answer:
    if not options.check and (options.low or options.max_casts is not None):
        raise CommandError("got --low or --max-casts without --check; expected them together. Add --check.")
    _leave_gpu_memory()
    with current_directory_first():
        report = _trace(options)
    if options.html is not None:
        _save(report, options.html)
    problems = list(problems_of(report, options.low or ["*"], options.max_casts, None, False, None))
    data = report.to_dict() | {"problems": problems if options.check else None}
    text = render_report(report, limit=options.limit, colour=is_colourful(), more="--limit all")
    if not options.check or not problems:
        return Answer(data, text)
    return Answer(data, f"{text}\n\n{list_problems(report.name, problems)}", 1)


def _doctor(options: argparse.Namespace) -> Answer:
    _leave_gpu_memory()
    found = diagnose()
    return Answer(found.to_dict(), render_diagnosis(found), int(bool(found.problems)))


COMMANDS: dict[str, Callable[[argparse.Namespace], Answer]] = {
    "policies": _policies,
    "show": _show,
    "diff": _diff,
    "report": _report,
    "doctor": _doctor,
}


# -- parts of commands


def _compute_dtype(text: str | None) -> np.dtype | None:
    if text is None:
        return None
    try:
        dtype = parse_dtype(text)
    except ValueError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise CommandError(f"got --dtype {text!r}; expected bf16, f16, f32 or f64. Write --dtype bf16.")
    return dtype


def _load_policy(text: str) -> Policy:
    try:
        return load_policy(text)
    except (FileNotFoundError, ValueError) as error:
        message = str(error)
        python_name = "amp_policy is "
        if message.startswith(python_name):
            message = "got " + message.removeprefix(python_name)
        raise CommandError(message) from error
    except OSError as error:
        raise CommandError(
            f"got the table {text!r}, which can't be read: {error.strerror}; expected a TOML table. Write the path "
            f"of one, or a preset's name: {', '.join(presets())}."
        ) from error


def _trace(options: argparse.Namespace) -> AmpReport:
    dtype, policy = _compute_dtype(options.dtype), _load_policy(options.policy)
    function, arguments = load_function(options.target), load_arguments(options.arguments)
    compiled = None if options.compiled is None else _read_compiled(options.compiled)
    given = textwrap.shorten(", ".join(map(format_argument, arguments)) or "no arguments", 300, placeholder=" ...")
    doing = f"tracing {options.target} with {given}"
    with users_code(doing, "a function that JAX can trace with them", "Give other arguments"):
        trace = amp_report(
            function,
            compute_dtype=dtype,
            amp_policy=policy,
            keep=options.keep,
            disable_passes=options.disable_passes,
            backward=options.backward,
            compiled=compiled,
        )
        return trace(*arguments)


def _read_compiled(path: str) -> str:
    instead = "Write compiled.as_text() to a file, of compiled = jax.jit(step).lower(...).compile()."
    try:
        text = Path(path).read_text(encoding="utf-8")
        compiled_collectives(text)
    except OSError as error:
        raise CommandError(
            f"got --compiled {path!r}, which can't be read: {error.strerror}; expected a compiled program. {instead}"
        ) from error
    except (TypeError, UnicodeDecodeError) as error:
        raise CommandError(f"got --compiled {path!r}; expected the text of a compiled program. {instead}") from error
    return text


def _save(report: AmpReport, path: str) -> None:
    try:
        report.save(path)
    except OSError as error:
        raise CommandError(
            f"got --html {path!r}, which can't be written: {error.strerror}; expected a file in an existing folder. "
            "Write for example --html report.html."
        ) from error


def _leave_gpu_memory() -> None:
    """Don't preallocate GPU memory: next to nothing is computed here, and a training may be running."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
