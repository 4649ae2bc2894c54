"""The command line, run in this process."""

import json
import textwrap

from jaxamp._cli.main import main


def answer(capsys, *argv):
    """Exit code, stdout and stderr of a command."""
    code = main(argv)
    out, err = capsys.readouterr()
    return code, out, err


def document(capsys, *argv):
    """The exit code of a command, and the only thing that it prints: a JSON document."""
    code, out, _ = answer(capsys, *argv, "--json")
    return code, json.loads(out)


def table(tmp_path, text, name="mine.toml"):
    path = tmp_path / name
    path.write_text(textwrap.dedent(text))
    return str(path)
