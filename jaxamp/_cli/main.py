"""The command line: `jaxamp policies`, `show`, `diff`, `report`, `doctor`.

Each command makes an `Answer`, data and text; `main` prints one of the two. Exit codes: 0 fine, 1 policies differ or
something was found, 2 the command can't be carried out, with the reason on stderr.
"""

import argparse
import json
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from .. import __version__
from .._inspect.check import problems_of
from .._inspect.report import AmpReport, amp_report
from .._inspect.text import is_colourful, render
from .._plan.residuals import Keep
from .._policy.toml import Policy, header, load_policy, presets
from .arguments import format_argument, parse_dtype
from .doctor import diagnose, render_diagnosis
from .policies import differences, entries_of, render_differences, render_policy, render_presets
from .target import CommandError, current_directory_first, load_arguments, load_function, users_code


class Answer(NamedTuple):
    """What a command found."""

    data: dict[str, Any]  # for --json
    text: str
    code: int = 0


Command = Callable[[argparse.Namespace], Answer]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command, and return its exit code."""
    code = 0
    try:
        try:
            options = _parse(argv)
        except SystemExit as end:  # --help, --version, bad usage
            code = int(end.code or 0)
        else:
            answer: Answer = options.run(options)
            code = answer.code
            print(json.dumps(answer.data, indent=2) if options.json else answer.text)
        sys.stdout.flush()
    except CommandError as error:
        if options.traceback:
            traceback.print_exception(error)
        print(f"jaxamp {options.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # who reads has read enough, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's own flush finds no pipe
    except KeyboardInterrupt:
        return 130
    return code


# -- commands


def _policies(options: argparse.Namespace) -> Answer:
    found = {name: header(name) for name in presets()}
    return Answer(
        {"presets": [{"name": name, **about._asdict()} for name, about in found.items()]}, render_presets(found)
    )


def _show(options: argparse.Namespace) -> Answer:
    dtype, policy = _dtype(options.dtype), _policy(options.name)
    about, entries = header(options.name), entries_of(policy, dtype)
    data = {
        "name": options.name,
        **about._asdict(),
        "dtype": dtype and dtype.name,
        "entries": [entry.to_dict() for entry in entries],
    }
    return Answer(data, render_policy(options.name, about, entries, dtype))


def _diff(options: argparse.Namespace) -> Answer:
    dtype = _dtype(options.dtype)
    found = differences(_policy(options.a), _policy(options.b), dtype)
    data = {
        "a": options.a,
        "b": options.b,
        "dtype": dtype and dtype.name,
        "differences": [difference.to_dict() for difference in found],
    }
    return Answer(data, render_differences(options.a, options.b, found), int(bool(found)))


def _report(options: argparse.Namespace) -> Answer:
    if not options.check and (options.low or options.max_casts is not None):
        raise CommandError("got --low or --max-casts alone; expected them to go with --check. Write --check too.")
    _spare_memory()
    with current_directory_first():
        report = _traced(options)
    if options.html is not None:
        _save(report, options.html)
    problems = list(problems_of(report, options.low or "*", options.max_casts, None, False, None))
    data = report.to_dict() | {"problems": problems if options.check else None}
    text = render(report, limit=options.limit, colour=is_colourful(), more="--limit all")
    if not options.check or not problems:
        return Answer(data, text)
    return Answer(data, "\n- ".join([f"{text}\n\n{report.name} is not mixed as asked:", *problems]), 1)


def _doctor(options: argparse.Namespace) -> Answer:
    _spare_memory()
    found = diagnose()
    return Answer(found.to_dict(), render_diagnosis(found), int(bool(found.problems)))


# -- parts of commands


def _dtype(text: str | None) -> np.dtype | None:
    if text is None:
        return None
    try:
        dtype = parse_dtype(text)
    except ValueError:
        dtype = None
    if dtype is None or not jnp.issubdtype(dtype, jnp.floating) or dtype.itemsize < 2:
        raise CommandError(f"got --dtype {text!r}; expected bf16, f16, f32 or f64. Write --dtype bf16.")
    return dtype


def _policy(text: str) -> Policy:
    try:
        return load_policy(text)
    except UnicodeDecodeError as error:
        message = f"got the table {text!r}, which is no text; expected a TOML table. Save it as UTF-8."
        raise CommandError(message) from error
    except (FileNotFoundError, ValueError) as error:
        message = str(error)
        ours = "amp_policy is "
        raise CommandError("got " + message.removeprefix(ours) if message.startswith(ours) else message) from error
    except OSError as error:
        raise CommandError(
            f"got the table {text!r}, which can't be read: {error.strerror}; expected a TOML table. Write the path "
            f"of one, or a preset's name: {', '.join(presets())}."
        ) from error


def _traced(options: argparse.Namespace) -> AmpReport:
    dtype, policy = _dtype(options.dtype), _policy(options.policy)
    function, arguments = load_function(options.target), load_arguments(options.arguments)
    given = textwrap.shorten(", ".join(map(format_argument, arguments)) or "no arguments", 300, placeholder=" ...")
    doing = f"tracing {options.target} with {given}"
    with users_code(doing, "a function that JAX can trace with them", "Give other arguments"):
        trace = amp_report(
            function, compute_dtype=dtype, amp_policy=policy, keep=options.keep, backward=options.backward
        )
        return trace(*arguments)


def _save(report: Any, path: str) -> None:
    try:
        report.save(path)
    except OSError as error:
        raise CommandError(
            f"got --html {path!r}, which can't be written: {error.strerror}; expected a file in a folder that is "
            "there. Write for example --html report.html."
        ) from error


def _spare_memory() -> None:
    """Leave the memory of a GPU to whoever trains on it: next to nothing is computed here."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def _limit(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number of lines. Write --limit 100 or --limit all.")
    return int(text)


# -- the parser

_CODES = "Exit codes: 0 fine; 1 differs, or problems were found; 2 an error, told on stderr."


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """The options of a command line. Arguments may come after options: argparse leaves these over in a subcommand."""
    parser = _parser()
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if re.match(r"-(?![0-9.])", text)]
    if unknown or (rest and options.command != "report"):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        options.arguments += rest
    return options


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxamp",
        description="Mixed precision for JAX: what policies say, what amp does to a function, what this machine has.",
        epilog=f"jaxamp COMMAND --help tells more, with examples. {_CODES}",
    )
    parser.add_argument("--version", action="version", version=f"jaxamp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add(commands, "policies", _policies, "list the policies that come with jaxamp", _POLICIES)

    show = _add(commands, "show", _show, "show the rules and the scopes of a policy", _SHOW)
    show.add_argument("name", metavar="NAME", help="a preset, or the path of a TOML table")
    _add_dtype(show, "show the rules for this compute dtype alone")

    diff = _add(commands, "diff", _diff, "show what differs between two policies", _DIFF)
    diff.add_argument("a", metavar="A", help="a preset, or the path of a TOML table")
    diff.add_argument("b", metavar="B", help="another")
    _add_dtype(diff, "compare the rules for this compute dtype alone")

    report = _add(commands, "report", _report, "report what amp does to a function, and why", _REPORT)
    report.add_argument("target", metavar="MODULE:FUNCTION", help="the function that you would give to jaxamp.amp")
    report.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="its arguments, see below")
    report.add_argument("--policy", metavar="P", default="default", help="a preset or a table (default: %(default)s)")
    _add_dtype(report, "the compute dtype (default: %(default)s)", default="float16")
    report.add_argument("--keep", choices=get_args(Keep), default="auto", help="what is kept for the backward pass")
    report.add_argument("--no-backward", dest="backward", action="store_false", help="report the forward pass alone")
    report.add_argument(
        "--limit", metavar="N", type=_limit, default=40, help="lines of the table, or all (default: 40)"
    )
    report.add_argument("--html", metavar="PATH", help="write a page for a browser as well")
    report.add_argument("--check", action="store_true", help="exit with 1 unless it is mixed as asked, and say why")
    report.add_argument(
        "--low",
        metavar="GLOB",
        action="append",
        help="check matmuls in these scopes; may be given again (default: all)",
    )
    report.add_argument("--max-casts", metavar="N", type=int, help="check that there are at most so many casts")

    _add(commands, "doctor", _doctor, "tell versions, devices and the fast paths of this machine", _DOCTOR)
    return parser


def _add(commands: Any, name: str, run: Command, about: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about.capitalize()}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    wanted = os.environ.get("JAXAMP_TRACEBACK", "") not in ("", "0")
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=wanted,
        help="show the traceback of an error; so does JAXAMP_TRACEBACK=1",
    )
    return parser


def _add_dtype(parser: argparse.ArgumentParser, about: str, default: str | None = None) -> None:
    parser.add_argument("--dtype", metavar="DTYPE", default=default, help=about)


_POLICIES = """\
examples:
  jaxamp policies
  jaxamp policies --json

--json: presets (name, description, extends)
"""

_SHOW = """\
examples:
  jaxamp show default
  jaxamp show default --dtype float16
  jaxamp show mine.toml

--json: name, description, extends, dtype, entries (scope, primitive, rule, by_dtype)
"""

_DIFF = """\
examples:
  jaxamp diff default fast
  jaxamp diff default mine.toml --dtype bf16

A primitive that a policy does not name runs as written, which is what the rule float32 says.

Exit codes: 0 the same; 1 different; 2 an error.
--json: a, b, dtype, differences (scope, primitive, a and b: null, or rule and by_dtype)
"""

_REPORT = """\
examples:
  jaxamp report train:loss 'f32[128,64]' 'f32[32,128]' 'i32[32]' --dtype bf16
  jaxamp report train:loss '{"w": "f32[128,64]", "b": "f32[64]"}' 'f32[32,128]' 0.1
  jaxamp report train:Model.loss @train:example_arguments --html report.html
  jaxamp report train:loss @train:example_arguments --check --low '*/attention' --max-casts 20

An argument is
  f32[32,128]    an array; f16 bf16 f32 f64, i4 to i64, u4 to u64, bool, c64 c128, key, or long names; f32[] a scalar
  3  0.5  true   a Python number, which is a constant of the trace
  {...}  [...]   JSON of these, with shapes as strings
  @module:fn     the arguments in the tuple that fn() returns

Modules are found in the current directory too. Nothing is computed. What your code prints goes to stderr.

Exit codes: 0 fine; 1 --check found problems; 2 an error.
--json: AmpReport.to_dict() (name, compute_dtype, totals, notes, rows) and problems (null without --check)
"""

_DOCTOR = """\
examples:
  jaxamp doctor
  jaxamp doctor --json

Exit codes: 0 fine; 1 JAX does not start, or does not see the GPU; 2 an error.
--json: versions, system, settings, devices (id, platform, kind, memory, compute_capability),
        fast_paths (name, here: true, false, or null for unknown, reason), problems
"""
