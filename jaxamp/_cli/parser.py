"""The parser of the command line, with the help of each command."""

import argparse
import os
import re
from collections.abc import Sequence
from typing import Any, get_args

from .. import __version__
from .._plan.residuals import Keep
from .._transform.options import pass_names


def parse(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse a command line.

    In a subcommand, argparse leaves over the arguments that come after options. They belong to `report`.
    """
    parser = make_parser()
    options, rest = parser.parse_known_args(argv)
    unknown = [text for text in rest if re.match(r"-(?![0-9.])", text)]
    if unknown or (rest and options.command != "report"):
        parser.error(f"unrecognized arguments: {' '.join(unknown or rest)}")
    if rest:
        options.arguments += rest
    return options


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="jaxamp",
        description="Mixed precision for JAX: what policies say, what amp does to a function, what this machine has.",
        epilog=(
            "jaxamp COMMAND --help says more, with examples. "
            "Exit codes: 0 fine; 1 policies differ, or problems were found; 2 an error, explained on stderr."
        ),
    )
    parser.add_argument("--version", action="version", version=f"jaxamp {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    _add_command(commands, "policies", "list the policies that come with jaxamp", _POLICIES)

    show = _add_command(commands, "show", "show the rules and the scopes of a policy", _SHOW)
    show.add_argument("name", metavar="NAME", help="a preset, or the path of a TOML table")
    _add_dtype(show, "only show the rules for this compute dtype")

    diff = _add_command(commands, "diff", "show what differs between two policies", _DIFF)
    diff.add_argument("a", metavar="A", help="a preset, or the path of a TOML table")
    diff.add_argument("b", metavar="B", help="another one")
    _add_dtype(diff, "only compare the rules for this compute dtype")

    _add_report_options(_add_command(commands, "report", "report what amp does to a function, and why", _REPORT))

    _add_command(commands, "doctor", "show versions, devices and the fast paths of this machine", _DOCTOR)
    return parser


def _add_report_options(report: argparse.ArgumentParser) -> None:
    report.add_argument(
        "target",
        metavar="MODULE:FUNCTION",
        help="the function that you would pass to jaxamp.amp; its module is imported, which runs the module's code",
    )
    report.add_argument("arguments", metavar="ARGUMENT", nargs="*", help="its arguments, see below")
    report.add_argument("--policy", metavar="P", default="default", help="a preset or a table (default: %(default)s)")
    _add_dtype(report, "the compute dtype (default: %(default)s)", default="float16")
    report.add_argument("--keep", choices=get_args(Keep), default="auto", help="what to keep for the backward pass")
    report.add_argument(
        "--disable-pass",
        dest="disable_passes",
        metavar="NAME",
        action="append",
        choices=pass_names(),
        default=[],
        help=f"leave an optimisation out; can be repeated ({', '.join(pass_names())})",
    )
    report.add_argument("--no-backward", dest="backward", action="store_false", help="only report the forward pass")
    report.add_argument(
        "--limit", metavar="N", type=_limit, default=40, help="lines of the table, or all (default: 40)"
    )
    report.add_argument(
        "--compiled", metavar="PATH", help="also tell what the compiled program in this file, as_text(), sends"
    )
    report.add_argument("--html", metavar="PATH", help="also write a page for a browser")
    report.add_argument("--check", action="store_true", help="exit with 1 and say why unless it is mixed as asked")
    report.add_argument(
        "--low",
        metavar="GLOB",
        action="append",
        help="check matmuls in these scopes; can be repeated (default: all)",
    )
    report.add_argument("--max-casts", metavar="N", type=int, help="check that there are at most this many casts")


def _limit(text: str) -> int | None:
    if text == "all":
        return None
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"got {text!r}; expected a number of lines. Write --limit 100 or --limit all.")
    return int(text)


def _add_command(commands: Any, name: str, about: str, epilog: str) -> argparse.ArgumentParser:
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=about,
        description=f"{about.capitalize()}.",
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document instead of text")
    parser.add_argument(
        "--traceback",
        action="store_true",
        default=os.environ.get("JAXAMP_TRACEBACK", "") not in ("", "0"),
        help="show the traceback of an error, as does JAXAMP_TRACEBACK=1",
    )
    return parser


def _add_dtype(parser: argparse.ArgumentParser, about: str, default: str | None = None) -> None:
    parser.add_argument("--dtype", metavar="DTYPE", default=default, help=about)


# -- the end of each command's help

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

A primitive that a policy does not name runs as written, as under the rule float32.

Exit codes: 0 no differences; 1 differences; 2 an error.
--json: a, b, dtype, differences (scope, primitive, a and b: null, or rule and by_dtype)
"""

_REPORT = """\
examples:
  jaxamp report train:loss 'f32[128,64]' 'f32[32,128]' 'i32[32]' --dtype bf16
  jaxamp report train:loss '{"w": "f32[128,64]", "b": "f32[64]"}' 'f32[32,128]' 0.1
  jaxamp report train:Model.loss @train:example_arguments --html report.html
  jaxamp report train:loss @train:example_arguments --check --low '*/attention' --max-casts 20

An argument is
  f32[32,128]    an array: f16 bf16 f32 f64, i4 to i64, u4 to u64, bool, c64 c128, key, or long names
  f32[]          a scalar
  3  0.5  true   a Python number, constant while tracing
  {...}  [...]   JSON of these, with arrays as strings
  @module:fn     the arguments that fn() returns, as a tuple

Modules in the current directory are found too. The function is only traced. What your code prints
goes to stderr.

Exit codes: 0 fine; 1 --check found problems; 2 an error.
--json: AmpReport.to_dict() (name, compute_dtype, totals, notes, backward_error, rows) and problems
        (null without --check)
"""

_DOCTOR = """\
examples:
  jaxamp doctor
  jaxamp doctor --json

Exit codes: 0 fine; 1 JAX does not start or does not see the GPU; 2 an error.
--json: versions, system, settings, devices (id, platform, kind, memory, compute_capability),
        fast_paths (name, here: true, false, or null for unknown, reason), problems
"""
