"""The entry point of the command line: parse, run a command, print what it found.

Exit codes: 0 fine; 1 policies differ, or problems were found; 2 an error, explained on stderr.
"""

import json
import os
import sys
import traceback
from collections.abc import Sequence

from .commands import COMMANDS
from .parser import parse
from .target import CommandError


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    code = 0
    try:
        try:
            options = parse(argv)
        except SystemExit as end:  # --help, --version, bad usage
            code = int(end.code or 0)
        else:
            answer = COMMANDS[options.command](options)
            code = answer.code
            print(json.dumps(answer.data, indent=2) if options.json else answer.text)
        sys.stdout.flush()
    except CommandError as error:
        if options.traceback:
            traceback.print_exception(error)
        print(f"jaxamp {options.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # the reader stopped early, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that Python's last flush does not fail
    except KeyboardInterrupt:
        return 130
    return code
