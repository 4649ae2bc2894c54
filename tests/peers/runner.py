"""Run suites, compare their outcomes with what is expected of them, and print it."""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from jaxamp._table import cut, table

from .redirect import MODULES, OUTCOMES
from .suites import SUITES, Suite

ROOT = Path(__file__).parents[2]  # of the repository
INI = "[pytest]\npython_files = test_*.py *_test.py\n"


class Result(NamedTuple):
    """What came of a suite.

    Attributes:
        suite: The suite.
        passed: How many tests passed.
        skipped: How many were skipped.
        faults: Tests that assert a fault and failed, each with the fault.
        unexpected: Tests that failed, or should have failed and did not, each with what happened.
    """

    suite: Suite
    passed: int
    skipped: int
    faults: dict[str, str]
    unexpected: dict[str, str]


def main(argv: Sequence[str] | None = None, suites: Sequence[Suite] = SUITES) -> int:
    """The command line: run the suites at all paths, print a table, and return the exit status."""
    from . import __doc__ as text

    parser = argparse.ArgumentParser(
        prog="python -m tests.peers", description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("paths", metavar="PATH", nargs="+", type=Path, help="a peer's checkout, or its tests")
    paths = parser.parse_args(argv).paths
    try:
        found = [(recognise(path, suites), path) for path in paths]
    except ValueError as error:
        parser.error(str(error))
    results = [run_suite(suite, path) for suite, path in found]
    print("\n".join(describe(results)))
    return int(any(result.unexpected for result in results))


def recognise(path: Path, suites: Sequence[Suite] = SUITES) -> Suite:
    """The suite whose package the tests at a path import."""
    text = "\n".join(file.read_text(encoding="utf-8") for file in files_of_tests(path))
    imported = set(re.findall(r"^\s*(?:from|import)\s+(\w+)", text, re.MULTILINE))
    found = [suite for suite in suites if suite.package in imported]
    if len(found) != 1:
        packages = ", ".join(suite.package for suite in suites)
        imports = " and ".join(suite.package for suite in found) or "none of them"
        raise ValueError(
            f"the tests in {path} import {imports}; expected one of {packages}. Pass a checkout of a peer's "
            "repository, or its folder of tests."
        )
    return found[0]


def files_of_tests(path: Path) -> list[Path]:
    """Files of tests at a path, without hidden folders."""
    files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
    is_test = lambda name: re.fullmatch(r"test_.*\.py|.*_test\.py", name)
    return [x for x in files if is_test(x.name) and not any(p.startswith(".") for p in x.relative_to(path).parts)]


def run_suite(suite: Suite, path: Path) -> Result:
    """Run the tests at a path with the peer's modules being ours."""
    with tempfile.TemporaryDirectory() as folder:
        outcomes = _outcomes(suite, path, Path(folder))
    return compare(suite, outcomes)


def _outcomes(suite: Suite, path: Path, folder: Path) -> dict[str, str]:
    """The outcome of each test. The tests are copied, so that the peer's own package is not beside them."""
    tests, written = folder / "tests", folder / "outcomes.json"
    start = path if path.is_dir() else path.parent
    files = files_of_tests(path)
    around = {parent / "conftest.py" for file in files for parent in file.parents if parent.is_relative_to(start)}
    for file in [*files, *filter(Path.exists, around)]:
        copy = tests / file.relative_to(start)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(file, copy)
    (tests / "pytest.ini").write_text(INI, encoding="utf-8")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    environment |= {MODULES: json.dumps(suite.modules), OUTCOMES: str(written)}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    command = [sys.executable, "-m", "pytest", "-q", "--import-mode=importlib", "-p", "tests.peers.redirect"]
    command += ["-p", "no:cacheprovider", "--continue-on-collection-errors"]
    done = subprocess.run(command, cwd=tests, env=environment, capture_output=True, text=True)
    if not written.exists():
        lines = (done.stdout + done.stderr).strip().splitlines() or ["it printed nothing"]
        return {"pytest": f"stopped with status {done.returncode}: {lines[-1]}"}
    return json.loads(written.read_text(encoding="utf-8")) or {"pytest": "found no tests"}


def compare(suite: Suite, outcomes: dict[str, str]) -> Result:
    """Compare outcomes, by the name of each test, with those that are expected."""
    faults, unexpected, counts = {}, {}, {"passed": 0, "skipped": 0}
    files = {_file_of(test) for test in outcomes}
    left = {test: fault for test, fault in suite.faults.items() if _file_of(test) in files}
    for test, outcome in outcomes.items():
        name = _file_of(test) + test[len(test.partition("::")[0]) :]
        fault = left.pop(name, None)
        if outcome in counts and fault is None:
            counts[outcome] += 1
        elif fault is None:
            unexpected[test] = outcome
        elif outcome in counts:
            unexpected[test] = f"{outcome}, but is listed as asserting a fault: {fault}"
        else:
            faults[name] = fault
    unexpected |= {test: f"is listed as asserting a fault, but was not found: {fault}" for test, fault in left.items()}
    return Result(suite, **counts, faults=faults, unexpected=unexpected)


def _file_of(test: str) -> str:
    return test.partition("::")[0].rpartition("/")[2]


def describe(results: Sequence[Result]) -> list[str]:
    """A table of the suites, then tests by name."""
    rows = [("suite", "passed", "skipped", "assert a fault", "unexpected")]
    for x in results:
        rows.append((x.suite.name, *map(str, (x.passed, x.skipped, len(x.faults), len(x.unexpected)))))
    lines = table(rows)
    for title, field in (("Tests that assert a fault", "faults"), ("Unexpected", "unexpected")):
        tests = [(x.suite.name, *test) for x in results for test in getattr(x, field).items()]
        if tests:
            lines += ["", f"{title}:"]
        for suite, test, text in tests:
            lines += [f"  {suite}: {test}", f"      {cut(text, 200)}"]
    return lines
