"""`python -m tests.peers` on small suites of a peer that does not exist; the real ones need checkouts."""

import re
import textwrap
from importlib import import_module
from importlib.util import module_from_spec

import peers
import pytest
from helpers import raises
from peers.redirect import Redirect
from peers.runner import compare, main, recognise
from peers.suites import SUITES, Suite

pytestmark = pytest.mark.slow

TIES = {"test_it.py::Test::test_ties": "It rounds ties up."}
PEER = Suite("Peer", "fake_peer", {"fake_peer": "math", "fake_peer._src": "math", "fake_peer._src.roots": "math"}, TIES)


def write(folder, name="test_it.py", **tests):
    """A file of tests: each a line of Python, all in one class."""
    lines = ["import fake_peer", "import pytest", "from fake_peer._src import roots", "class Test:"]
    lines += [f"    def test_{test}(self):\n        {line}" for test, line in tests.items()]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text("\n".join(lines))


GOOD = {
    "floor": "assert fake_peer.floor(1.5) == 1",
    "root": "assert roots.isqrt(9) == 3",
    "ties": "assert round(0.5) == 1",
}


def test_a_suite_passes_over_our_modules(tmp_path, capsys):
    write(tmp_path / "src" / "tests", **GOOD, skips="pytest.skip()")
    (tmp_path / "src" / "tests" / "conftest.py").write_text("import fake_peer\n")
    (tmp_path / "fake_peer.py").write_text("raise AssertionError('the module of the peer itself')")
    assert main([str(tmp_path)], [PEER]) == 0
    assert capsys.readouterr().out == textwrap.dedent(
        """\
        suite  passed  skipped  assert a fault  unexpected
        Peer   2       1        1               0

        Tests that assert a fault:
          Peer: test_it.py::Test::test_ties
              It rounds ties up.
        """
    )


def test_what_is_unexpected_is_named_and_fails(tmp_path, capsys):
    write(tmp_path / "good", **GOOD)
    bad = GOOD | {"ties": "pass", "cubes": "roots.cubes(3)"}
    write(tmp_path / "bad", **bad)
    (tmp_path / "bad" / "test_names.py").write_text("from fake_peer import no_such_name")
    assert main([str(tmp_path / "bad"), str(tmp_path / "good")], [PEER]) == 1
    rows, _, unexpected = capsys.readouterr().out.split("\n\n")
    assert [line.split()[1:] for line in rows.splitlines()[1:]] == [["2", "0", "0", "3"], ["2", "0", "1", "0"]]
    found = dict(re.findall(r"Peer: (\S+)\n +(.*)", unexpected))
    assert found.keys() == {"test_it.py::Test::test_ties", "test_it.py::Test::test_cubes", "test_names.py"}
    assert found["test_it.py::Test::test_ties"] == "passed, but is listed as asserting a fault: It rounds ties up."
    assert "no attribute 'cubes'" in found["test_it.py::Test::test_cubes"]
    assert "cannot import name 'no_such_name'" in found["test_names.py"]


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.package)
def test_the_modules_of_a_peer_are_our_faces(suite):
    redirect = Redirect(suite.modules)
    assert redirect.find_spec(f"{suite.package}.no_such_module") is None
    for name, face in suite.modules.items():
        module, ours = module_from_spec(redirect.find_spec(name)), import_module(face)
        redirect.exec_module(module)
        assert module.__all__
        assert all(getattr(module, public) is getattr(ours, public) for public in module.__all__)
        with pytest.raises(AttributeError, match="no_such_name"):
            _ = module.no_such_name


def test_a_listed_test_that_is_gone_is_unexpected():
    result = compare(PEER, {"tests/test_it.py::Test::test_floor": "passed"})
    assert result.passed == 1
    assert "was not found" in result.unexpected["test_it.py::Test::test_ties"]
    assert not compare(PEER, {"tests/test_other.py::test_floor": "passed"}).unexpected  # another file alone was given
    assert compare(PEER, {"test_it.py::Test::test_ties": "skipped"}).unexpected


def test_a_suite_without_tests_is_unexpected(tmp_path, capsys):
    write(tmp_path)
    (tmp_path / "test_it.py").write_text("import fake_peer\n")
    assert main([str(tmp_path)], [PEER]) == 1
    assert "found no tests" in capsys.readouterr().out


def test_a_path_that_is_no_peers_is_refused(tmp_path, capsys):
    (tmp_path / "test_it.py").write_text("import numpy")
    with raises(ValueError, "import none of them; expected one of mpx, jmp, flashoptim_jax, jaxamp", "Pass a checkout"):
        recognise(tmp_path)
    (tmp_path / "test_it.py").write_text("import jmp\nfrom mpx import cast_tree")
    with raises(ValueError, "import mpx and jmp; expected one of", "Pass a checkout"):
        recognise(tmp_path)
    with pytest.raises(SystemExit):
        main([str(tmp_path)])
    assert "import mpx and jmp" in capsys.readouterr().err


@pytest.mark.parametrize("suite", SUITES, ids=lambda suite: suite.package)
def test_a_suite_is_recognised_by_what_its_tests_import(tmp_path, suite):
    (tmp_path / "nested").mkdir()
    (tmp_path / "nested" / "it_test.py").write_text(f"import jax\nfrom {suite.package}._src import x")
    (tmp_path / ".venv").mkdir()
    (tmp_path / ".venv" / "test_it.py").write_text("import mpx, jmp")
    assert recognise(tmp_path) is suite


def test_the_docstring_lists_the_tests_that_assert_a_fault():
    listed = re.findall(r"^(\S+\.py::\S+)\n((?:    .*\n)+)", peers.__doc__, re.MULTILINE)
    table = {test: fault for suite in SUITES for test, fault in suite.faults.items()}
    assert {test: " ".join(fault.split()) for test, fault in listed} == table
