"""What the README says runs as it is written, and the examples run."""

import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT, W, with_the_package
from plans import plan_of, step

from benchmarks import write_results


@pytest.mark.promotes
def test_the_readmes_code_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) >= 5
    namespace = {}
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)


def test_the_readme_names_the_commands_that_ci_runs():
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert "pip install -e '.[tests]' && pytest" in readme
    assert "pip install -e '.[examples]' && python examples/train_digits.py" in readme


def test_the_pass_of_the_guide_for_contributors_works():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    definition, registration, test = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    namespace = {"W": W, "plan_of": plan_of, "step": step}
    exec(compile(definition.replace("from ..", "from jaxamp."), "CONTRIBUTING.md", "exec"), namespace)
    exec(compile(test, "CONTRIBUTING.md", "exec"), namespace)
    namespace["test_a_product_with_one_is_dropped"]()
    assert "drop_products_with_one" in registration


def test_the_guide_for_contributors_names_files_that_there_are():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:_[a-z]+/|tests/|policies/)[\w/.*]*|_[a-z]+\.py)`", text)) - {
        "tests/passes/test_products.py"
    }
    assert len(named) > 20
    missing = [name for name in named if not [*ROOT.glob(name), *(ROOT / "jaxamp").glob(name)]]
    assert missing == []


@pytest.mark.slow
def test_the_digits_example_runs(tmp_path):
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    pytest.importorskip("rich", reason="the examples extra is not installed")
    out = tmp_path / "digits.png"
    command = [sys.executable, str(ROOT / "examples" / "train_digits.py"), "--steps", "2", "--out", str(out)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert "accuracy" in run.stdout
    assert out.read_bytes().startswith(b"\x89PNG")


def run_example(name, picture, *flags):
    """What an example prints that makes its own devices."""
    pytest.importorskip("rich", reason="the examples extra is not installed")
    environment = with_the_package(XLA_FLAGS=re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"]))
    command = [sys.executable, str(ROOT / "examples" / name), "--small", "--out", str(picture), *flags]
    run = subprocess.run(command, capture_output=True, text=True, cwd=picture.parent, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    assert picture.read_bytes().startswith(b"\x89PNG")
    return run.stdout


def test_the_sharded_example_gathers_low(tmp_path):
    told = run_example("train_sharded.py", tmp_path / "loss.png", "--devices", "8", "--steps", "2")
    assert "Everything that is gathered is bfloat16." in told
    sent = {tuple(cells[:3]): cells[3:] for cells in re.findall(r"│ *(.*?) *│" + r" *(.*?) *│" * 4, told)}
    assert float(sent["data", "all-gather", "bfloat16"][1]) == pytest.approx(0.459)
    assert sent["data", "all-gather", "float32"] == ("0.918", "0.000")
    assert sent["data", "all-reduce", "float32"] == ("0.672", "0.672")
    assert sent["model", "all-reduce", "float32"][1] == "0.000"


@pytest.mark.slow
def test_processes_that_are_killed_end_as_if_they_were_not(tmp_path):
    told = run_example("train_processes.py", tmp_path / "loss.png", "--folder", str(tmp_path / "runs"))
    assert re.search(r"scale \d+, [1-9]\d* steps skipped in all", told)
    assert re.search(r"Started again after step 5: the same bits", told)
    assert float(re.search(r"for a while: (\S+) away", told)[1]) < 1e-3


BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - {"write_results"}


SLOW = BENCHMARKS - {"kernels", "matmul"}


@pytest.mark.parametrize("name", [pytest.param(n, marks=[pytest.mark.slow] * (n in SLOW)) for n in sorted(BENCHMARKS)])
def test_the_benchmarks_run_and_are_rendered(name, tmp_path, monkeypatch):
    written, rendered = tmp_path / f"{name}.json", tmp_path / "RESULTS.md"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(written)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert "ratio" in run.stdout
    monkeypatch.setattr(sys, "argv", ["write_results", str(tmp_path), "--out", str(rendered)])
    write_results.main()
    assert f"python -m benchmarks.{name}" in rendered.read_text(encoding="utf-8")
