"""What the README says runs as it is written, and the benchmarks run."""

import re
import subprocess
import sys

import pytest
from helpers import LOW, ROOT, WIDE, W, matmuls
from plans import plan_of, step

from benchmarks import write_results

README = (ROOT / "README.md").read_text(encoding="utf-8")
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


@pytest.mark.promotes
def test_the_readmes_code_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert len(CODE) >= 4
    namespace = {}
    for block in CODE:
        exec(compile(block, "README.md", "exec"), namespace)
    assert (tmp_path / "report.html").stat().st_size > 10_000


@pytest.mark.promotes
def test_the_readmes_diff_makes_its_step_mixed():
    (diff,) = re.findall(r"```diff\n(.*?)```", README, re.DOTALL)
    changed = [line for line in diff.splitlines() if line]
    assert [line[0] for line in changed] == ["+", "-", "+"]
    new_import, before, after = (line[1:] for line in changed)
    namespace = {}
    for code in (CODE[0], f"{new_import}\n{CODE[0]}".replace(before, after)):
        exec(compile(code, "README.md", "exec"), namespace)
        step, arguments = namespace["train_step"], [namespace[name] for name in ("params", "state", "x", "y")]
        found = set(matmuls(step, *arguments))
        assert found == ({WIDE} if code == CODE[0] else {LOW})


def test_the_readme_is_short_and_names_the_commands_that_ci_runs():
    assert len(README.splitlines()) < 250
    assert "pip install -e '.[tests]' && pytest" in README
    assert "pip install -e '.[examples]' && python examples/train_digits.py" in README


def test_the_figures_of_the_readme_are_those_that_were_measured():
    results = (ROOT / "benchmarks" / "RESULTS.md").read_text(encoding="utf-8")
    (table,) = re.findall(r"\*\*vit, layers scan\*\*\n\n(\|.*? float32 \|.*?)\n\n", results, re.DOTALL)[:1]
    measured = [[cell.strip() for cell in line.split("|")[2:]] for line in table.splitlines()[2:]]
    rows = re.findall(r"^\| [^|]+ \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", README, re.MULTILINE)
    assert len(rows) == 6
    for ms, memory, ratio in rows:
        assert [ms, f"{ratio}x", memory] in [
            [line[0], line[2], f"{float(line[4]):.1f}"] for line in measured if line[0] != "-"
        ]


def test_links_between_documents_lead_to_files():
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "policies").glob("*.md")]
    links = [
        (page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text("utf-8"))
    ]
    assert len(links) > 30
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


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


BENCHMARKS = {path.stem for path in (ROOT / "benchmarks").glob("[!_]*.py")} - {"write_results"}


QUICK = {"kernels", "matmul"}
LONG = {"curves", "growth", "memory", "passes", "report_time", "zoo"}  # much of what they run, others run too


def marks(name):
    return () if name in QUICK else pytest.mark.soak if name in LONG else pytest.mark.slow


@pytest.mark.parametrize("name", [pytest.param(name, marks=marks(name)) for name in sorted(BENCHMARKS)])
def test_the_benchmarks_run_and_are_rendered(name, tmp_path, monkeypatch):
    written, rendered = tmp_path / f"{name}.json", tmp_path / "RESULTS.md"
    command = [sys.executable, "-m", f"benchmarks.{name}", "--small", "--json", str(written)]
    run = subprocess.run(command, check=True, capture_output=True, text=True, cwd=ROOT)
    assert "ratio" in run.stdout
    monkeypatch.setattr(sys, "argv", ["write_results", str(tmp_path), "--out", str(rendered)])
    write_results.main()
    assert f"python -m benchmarks.{name}" in rendered.read_text(encoding="utf-8")
