"""The command line: what it prints, its exit codes, and what bad input is answered with."""

import argparse
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path

import jax
import pytest
from commands import answer, document, table
from helpers import with_the_package

import jaxamp
from jaxamp._cli import commands as _commands
from jaxamp._cli.parser import make_parser, parse

MODULE = """
import equinox as eqx
import jax
import jax.numpy as jnp

print("the module prints")


def loss(params, x, y):
    print("the function prints")
    with jax.named_scope("body"):
        hidden = jax.nn.relu(x @ params["up"])
    with jax.named_scope("head"):
        logits = hidden @ params["down"]
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], 1).mean()


def example():
    print("the arguments print")
    return {"up": jnp.ones((16, 64)), "down": jnp.ones((64, 8))}, jnp.ones((4, 16)), jnp.zeros(4, int)


class Model:
    def __init__(self):
        self.w = jnp.ones((8, 8))

    @staticmethod
    def square(x):
        return x @ x

    def call(self, x):
        return x @ self.w


def pinned(x):
    with jax.named_scope("amp_stop"):
        return (x @ x).sum()


def scaled(x, factor, flip):
    return (-1 if flip else 1) * factor * (x @ x).sum()


def branch(x):
    return x if x.sum() > 0 else -x


def leave(x):
    raise SystemExit(3)


def wordless(x):
    raise ValueError


def network(mlp, x, key):
    return mlp(x + jax.random.normal(key, x.shape)).sum()


def network_arguments():
    key = jax.random.key(0)
    return eqx.nn.MLP(8, 4, 16, 2, key=key), jnp.ones(8), key


def a_list():
    return [jnp.ones(3)]


def broken_arguments():
    return jnp.ones(3) @ jnp.ones(4),


model = Model()
number = 3
"""
SHAPES = ['{"up": "f32[16,64]", "down": "f32[64,8]"}', "f32[4,16]", "i32[4]"]
PROJECT = iter(range(10_000))


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder to be in, with a module in it. Its name is new each time: modules are imported once."""
    name = f"training_{os.getpid()}_{next(PROJECT)}"
    (tmp_path / f"{name}.py").write_text(MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("JAXAMP_TRACEBACK", raising=False)
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # so that what is set is taken back
    yield name
    sys.modules.pop(name, None)


# -- report


def test_report_prints_the_text_of_a_report(capsys, project):
    code, out, err = answer(capsys, "report", f"{project}:loss", *SHAPES, "--dtype", "bf16")
    assert code == 0
    assert out.startswith("amp report of loss, compute dtype bfloat16\n")
    assert "100.0 % bfloat16" in out
    assert ".py:14\n" in out
    assert "dot_general'" in out
    assert "\033[" not in out
    assert err.splitlines()[0] == "the module prints"
    assert "the function prints" in err


def test_report_takes_arguments_from_a_function(capsys, project):
    code, data = document(capsys, "report", f"{project}:loss", f"@{project}:example", "--dtype", "bf16")
    assert code == 0
    assert set(data) == {
        "name",
        "compute_dtype",
        "totals",
        "notes",
        "backward_error",
        "collectives",
        "rows",
        "problems",
    }
    assert (data["name"], data["compute_dtype"], data["problems"]) == ("loss", "bfloat16", None)
    assert data["totals"]["low_share"] == 1.0
    _, by_shapes = document(capsys, "report", f"{project}:loss", *SHAPES, "--dtype", "bf16")
    assert by_shapes["totals"] == data["totals"]


def test_report_mixes_the_two_and_takes_numbers(capsys, project):
    code, data = document(capsys, "report", f"{project}:scaled", "f32[8,8]", "0.5", "true")
    assert code == 0
    assert {row["primitive"] for row in data["rows"]} >= {"dot_general", "mul"}
    assert answer(capsys, "report", f"{project}:scaled", "f32[8,8]", "-1", "true")[0] == 0


def test_arguments_may_be_modules_and_keys(capsys, project):
    code, data = document(capsys, "report", f"{project}:network", f"@{project}:network_arguments")
    assert code == 0
    assert {row["phase"] for row in data["rows"] if row["kind"] == "matmul"} == {"forward", "backward"}


def test_long_arguments_are_cut_short_in_a_message(capsys, project):
    many = json.dumps(["f32[8,8]"] * 1000)
    code, _, err = answer(capsys, "report", f"{project}:Model.square", many)
    assert code == 2
    assert len(err) < 1000
    assert ' "f32[8,8]", ... raised TypeError' in err


@pytest.mark.parametrize("path", ["Model.square", "model.call"])
def test_report_follows_a_path_of_attributes(capsys, project, path):
    code, out, _ = answer(capsys, "report", f"{project}:{path}", "f32[8,8]")
    assert code == 0
    assert "dot_general" in out


def test_options_may_stand_between_arguments(capsys, project):
    argv = ["--no-backward", f"{project}:scaled", "--dtype", "bf16", "f32[8,8]", "--limit", "1", "-1", "false"]
    code, out, _ = answer(capsys, "report", *argv)
    assert code == 0
    assert "more lines: --limit all" in out
    assert "dot_general'" not in out
    assert "more lines" not in answer(capsys, "report", f"{project}:loss", *SHAPES, "--limit", "all")[1]


def test_report_passes_policy_and_keep_on(capsys, project, tmp_path, monkeypatch):
    path = table(tmp_path, 'extends = "default"\n[scopes]\nhead = "float32"\nhaed = "float32"')
    _, data = document(capsys, "report", f"{project}:loss", *SHAPES, "--policy", path)
    assert data["totals"]["unmatched_keys"] == ["haed"]
    assert {
        row["run"]["operands"][0] for row in data["rows"] if row["scope"] == "head" and row["kind"] == "matmul"
    } == {"float32"}
    asked = []

    def spy(fn, **options):
        asked.append(options)
        return jaxamp.amp_report(fn, **options)

    monkeypatch.setattr(_commands, "amp_report", spy)
    argv = ["report", f"{project}:loss", *SHAPES, "--keep", "matmuls", "--no-backward", "--disable-pass", "recompute"]
    answer(capsys, *argv)
    assert asked[0]["disable_passes"] == ["recompute"]
    assert (asked[0]["keep"], asked[0]["backward"], asked[0]["compute_dtype"]) == ("matmuls", False, "float16")


def test_colour_is_for_terminals(capsys, project, monkeypatch):
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    argv = ["report", f"{project}:loss", *SHAPES]
    assert "\033[" in answer(capsys, *argv)[1]
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033[" not in answer(capsys, *argv)[1]


def test_what_a_compiled_program_sends_is_in_the_report(capsys, project, tmp_path):
    line = "%x = bf16[64,8]{1,0} all-gather(%y), replica_groups={}"
    path = tmp_path / "step.txt"
    path.write_text(f"HloModule step\n\nENTRY %main (y: bf16[8,8]) -> bf16[64,8] {{\n  {line}\n}}\n")
    code, out, _ = answer(capsys, "report", f"{project}:loss", *SHAPES, "--compiled", str(path))
    assert code == 0
    assert "sent between devices        1.02 kB bfloat16" in out


@pytest.mark.parametrize(
    ("name", "beats"),
    [
        ("missing.txt", ("got --compiled", "can't be read: No such file", "expected a compiled program", "as_text()")),
        ("text.txt", ("got --compiled", "expected the text of a compiled program", "Write compiled.as_text()")),
        ("binary.txt", ("got --compiled", "expected the text of a compiled program", "Write compiled.as_text()")),
    ],
)
def test_a_compiled_program_that_is_none(capsys, project, tmp_path, name, beats):
    (tmp_path / "text.txt").write_text("step")
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe")
    code, out, err = answer(capsys, "report", f"{project}:loss", *SHAPES, "--compiled", str(tmp_path / name))
    assert (code, out) == (2, "")
    for beat in beats:
        assert beat in err


def test_html_is_written_by_the_report(capsys, project, monkeypatch):
    saved = []
    monkeypatch.setattr(jaxamp.AmpReport, "save", lambda report, path: saved.append((report.name, path)), raising=False)
    code, out, _ = answer(capsys, "report", f"{project}:loss", *SHAPES, "--html", "out.html")
    assert code == 0
    assert saved == [("loss", "out.html")]
    assert out.startswith("amp report of loss")


def test_html_that_cannot_be_written(capsys, project, monkeypatch):
    save = lambda report, path: Path(path).write_text("")
    monkeypatch.setattr(jaxamp.AmpReport, "save", save, raising=False)
    code, out, err = answer(capsys, "report", f"{project}:loss", *SHAPES, "--html", "nowhere/out.html")
    assert (code, out) == (2, "")
    for beat in ("got --html 'nowhere/out.html'", "can't be written: No such file", "expected a file", "report.html"):
        assert beat in err


def test_check_passes_with_0_and_fails_with_1(capsys, project):
    argv = ["report", f"{project}:loss", *SHAPES, "--check"]
    assert answer(capsys, *argv)[0] == 0
    assert document(capsys, *argv)[1]["problems"] == []
    assert answer(capsys, *argv, "--low", "head", "--low", "body", "--max-casts", "100")[0] == 0
    code, out, _ = answer(capsys, *argv, "--low", "haed", "--max-casts", "0")
    assert code == 1
    assert "\nloss is not mixed as asked:\n- no matmul is in a scope that matches 'haed'\n" in out
    assert "casts; at most 0 are allowed" in out
    code, data = document(capsys, "report", f"{project}:pinned", "f32[8,8]", "--check", "--no-backward")
    assert code == 1
    assert data["problems"][0].startswith("forward dot_general in float32, not in float16: scope 'amp_stop'")
    with pytest.raises(AssertionError) as error:
        jaxamp.amp_report(sys.modules[project].pinned, backward=False)(jax.numpy.ones((8, 8))).check()
    assert str(error.value).splitlines()[1:] == [f"- {problem}" for problem in data["problems"]]


# -- what goes wrong


@pytest.mark.parametrize(
    ("argv", "beats"),
    [
        (["show", "defualt"], ["show: error: got 'defualt'; expected a preset or the path", "Did you mean 'default'?"]),
        (["show", "no.toml"], ["got the path 'no.toml', where there is no file; expected", "a preset's name: conse"]),
        (["show", "bytes.toml"], ["bytes.toml: byte 0 is not UTF-8 text; expected", "a policy table", "as UTF-8"]),
        (["show", "bad.toml"], ["bad.toml, line 2: got 'compte'; expected a rule's name", "Did you mean 'compute'?"]),
        (["diff", "default", "x"], ["diff: error: got 'x'; expected a preset", "The presets are conservative"]),
        (
            ["show", "default", "--dtype", "f31"],
            ["got --dtype 'f31'; expected bf16, f16, f32 or f64. Write --dtype bf16."],
        ),
        (["show", "default", "--dtype", "i32"], ["got --dtype 'i32'; expected bf16"]),
        (["report", "MOD:loss", "f32[3]", "--dtype", "f8_e5m2"], ["got --dtype 'f8_e5m2'; expected bf16"]),
        (["report", "MOD:loss", "--policy", "nowhere"], ["got 'nowhere'; expected a preset"]),
        (["report", "MOD.py:loss"], ["got the target 'MOD.py:loss'; expected module:function", "Write 'MOD:loss'."]),
        (["report", "./a/b.py"], ["got the target './a/b.py'", "Write 'a.b:function'."]),
        (["report", "../x:f"], ["got the target '../x:f'", "Change to the folder of 'x', and write 'x:f'."]),
        (["diff", "default", "deep.toml"], ["deep.toml: not a TOML table", "[rules] and [scopes]"]),
        (
            ["report", "MOD.loss"],
            ["got the target 'MOD.loss'; expected module:function", "Write for example 'MOD:loss'."],
        ),
        (["report", "MOD:"], ["got the target 'MOD:'; expected module:function", "'package.module:function'."]),
        (["report", ":loss"], ["got the target ':loss'; expected module:function", "'package.module:function'."]),
        (
            ["report", "MOD:los"],
            ["got the target 'MOD:los', but 'MOD' has no 'los'; expected the name of a function. Did you mean 'loss'?"],
        ),
        (
            ["report", "MOD:zzzz"],
            ["'MOD' has no 'zzzz'; expected the name of a function", "Write one that is in 'MOD'."],
        ),
        (["report", "MOD:Model.squar"], ["'MOD.Model' has no 'squar'; expected", "Did you mean 'square'?"]),
        (["report", "MOD:number"], ["'MOD:number', of type int; expected a function", "you would pass to jaxamp.amp"]),
        (
            ["report", "nomodule:f"],
            ["got the module 'nomodule', but there is no 'nomodule'", "in the current directory"],
        ),
        (["report", "MOD.inner:f"], ["got the module 'MOD.inner', but there is no 'MOD.inner'", "as in an import"]),
        (
            ["report", "MOD:loss", "f32[3"],
            ["got the argument 'f32[3'; expected a shape", "Write for example 'f32[32,128]'"],
        ),
        (
            ["report", "MOD:loss", "@MOD:los"],
            ["got the target 'MOD:los', but 'MOD' has no 'los'; expected", "Did you mean 'loss'?"],
        ),
        (["report", "MOD:loss", "@MOD:a_list"], ["@MOD:a_list returned list; expected a tuple", "Write `return (x,)`"]),
        (
            ["report", "MOD:loss", "@MOD:broken_arguments"],
            [
                "calling MOD:broken_arguments() raised TypeError: dot_general",
                "(MOD.py:",
                "expected a function",
                "Fix the error there",
            ],
        ),
        (
            ["report", "MOD:Model.square", "f32[3,4]"],
            [
                "tracing MOD:Model.square with f32[3,4] raised TypeError: dot_general",
                "(MOD.py:",
                "Give other arguments",
            ],
        ),
        (
            ["report", "MOD:branch", "f32[3]"],
            ["raised TracerBoolConversionError: Attempted boolean", "(MOD.py:", "can trace"],
        ),
        (
            ["report", "MOD:leave", "f32[3]"],
            ["raised SystemExit: 3 (MOD.py:", "expected a function that JAX can trace"],
        ),
        (["report", "MOD:wordless", "f32[3]"], ["raised ValueError (MOD.py:", "add --traceback to see more."]),
        (["report", "MOD:Model.square"], ["tracing MOD:Model.square with no arguments raised TypeError", "positional"]),
        (
            ["report", "raises:f"],
            ["importing 'raises' raised ValueError: at import (raises.py:2)", "Fix the error there"],
        ),
        (
            ["report", "imports:f"],
            ["importing 'imports' raised ModuleNotFoundError: No module named 'no_such_library'"],
        ),
        (["report", "syntax:f"], ["importing 'syntax' raised SyntaxError: ", "expected a module that can be imported"]),
        (
            ["report", "MOD:loss", "--max-casts", "3"],
            ["got --low or --max-casts without --check", "expected them together", "Add --check"],
        ),
    ],
)
def test_bad_input_is_told_in_three_beats(capsys, project, tmp_path, argv, beats):
    (tmp_path / "bytes.toml").write_bytes(b"\xff\xfe")
    (tmp_path / "deep.toml").write_text("a = " + "[" * 5000 + "]" * 5000)
    (tmp_path / "bad.toml").write_text('[rules]\ncompte = ["dot_general"]')
    (tmp_path / "raises.py").write_text('\nraise ValueError("at import")')
    (tmp_path / "imports.py").write_text("import no_such_library")
    (tmp_path / "syntax.py").write_text("def f(:")
    code, out, err = answer(capsys, *(text.replace("MOD", project) for text in argv))
    message = err.splitlines()[-1].replace(project, "MOD")
    assert (code, out) == (2, "")
    assert "Traceback" not in err
    assert message.startswith(f"jaxamp {argv[0]}: error: ")
    assert "expected" in message
    for beat in beats:
        assert beat in message


def test_a_table_that_may_not_be_read(capsys, tmp_path, monkeypatch):
    path = table(tmp_path, "")

    def refuse(self, *args, **kwargs):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "read_text", refuse)
    code, _, err = answer(capsys, "show", path)
    assert code == 2
    for beat in (
        "got the table ",
        "can't be read: Permission denied",
        "expected a TOML table",
        "a preset's name: cons",
    ):
        assert beat in err


@pytest.mark.parametrize("by", ["option", "environment"])
def test_a_traceback_is_shown_when_asked_for(capsys, project, monkeypatch, by):
    argv = ["report", f"{project}:Model.square", "f32[3,4]"]
    if by == "option":
        argv.append("--traceback")
    else:
        monkeypatch.setenv("JAXAMP_TRACEBACK", "1")
    code, out, err = answer(capsys, *argv)
    assert (code, out) == (2, "")
    assert "Traceback (most recent call last)" in err
    assert "return x @ x" in err
    assert err.splitlines()[-1].startswith("jaxamp report: error: tracing ")
    monkeypatch.setenv("JAXAMP_TRACEBACK", "0")
    assert "Traceback" not in answer(capsys, *argv[:3])[2]


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        ([], "the following arguments are required: COMMAND"),
        (["polices"], "invalid choice: 'polices'"),
        (["show"], "the following arguments are required: NAME"),
        (["show", "default", "more"], "unrecognized arguments: more"),
        (["report", "m:f", "--nope", "f32[3]"], "unrecognized arguments: --nope"),
        (["report", "m:f", "--keep", "some"], "invalid choice: 'some'"),
        (["report", "m:f", "--disable-pass", "some"], "invalid choice: 'some'"),
        (["report", "m:f", "--limit", "x"], "got 'x'; expected a number of lines. Write --limit 100 or --limit all."),
        (["report", "m:f", "--max-casts", "x"], "invalid int value: 'x'"),
    ],
)
def test_bad_usage_exits_with_2(capsys, argv, said):
    code, out, err = answer(capsys, *argv)
    assert (code, out) == (2, "")
    assert said in err


def test_the_search_path_is_left_as_it_was(capsys, project):
    before = list(sys.path)
    answer(capsys, "report", f"{project}:loss", *SHAPES)
    answer(capsys, "report", "nomodule:f")
    assert sys.path == before


def test_an_interrupt_is_no_traceback(capsys, monkeypatch):
    def interrupt(options):
        raise KeyboardInterrupt

    monkeypatch.setitem(_commands.COMMANDS, "policies", interrupt)
    assert answer(capsys, "policies") == (130, "", "")


# -- help and version


def commands():
    (action,) = [a for a in make_parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return sorted(action.choices)


def test_version_and_help(capsys):
    assert answer(capsys, "--version") == (0, f"jaxamp {jaxamp.__version__}\n", "")
    code, out, _ = answer(capsys, "--help")
    assert code == 0
    assert commands() == ["diff", "doctor", "policies", "report", "show"]
    assert all(name in out for name in commands())
    assert "Exit codes: 0 fine" in out


@pytest.mark.parametrize("command", commands())
def test_help_of_a_command_has_examples_and_the_keys_of_its_json(capsys, command):
    code, out, _ = answer(capsys, command, "--help")
    assert code == 0
    assert f"examples:\n  jaxamp {command} " in out or f"examples:\n  jaxamp {command}\n" in out
    assert "\n--json: " in out
    assert "--traceback" in out


@pytest.mark.parametrize("command", commands())
def test_the_examples_of_the_help_are_command_lines(capsys, command):
    lines = [line for line in answer(capsys, command, "--help")[1].splitlines() if line.startswith("  jaxamp ")]
    assert len(lines) >= 2
    for line in lines:
        assert parse(shlex.split(line)[1:]).command == command


# -- real processes


def test_python_m_jaxamp_reports(project, tmp_path):
    command = [sys.executable, "-W", "error", "-m", "jaxamp", "report", f"{project}:loss", *SHAPES, "--json"]
    run = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=with_the_package())
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["totals"]["low_share"] == 1.0
    assert run.stderr.startswith("the module prints\n")


def test_a_reader_that_leaves_is_no_error(tmp_path):
    ours, theirs = os.pipe()
    os.close(ours)
    command = [sys.executable, "-W", "error", "-m", "jaxamp", "diff", "default", "fast"]
    run = subprocess.run(
        command, stdout=theirs, stderr=subprocess.PIPE, text=True, cwd=tmp_path, env=with_the_package()
    )
    os.close(theirs)
    assert (run.returncode, run.stderr) == (1, "")  # they differ
