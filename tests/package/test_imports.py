"""Imports go one way: no circle between modules or packages, no private names of JAX, no backend. Read, not run."""

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from itertools import pairwise
from pathlib import Path

from helpers import ROOT, assert_starts_no_backend

PACKAGE = ROOT / "jaxamp"
FILES = sorted(PACKAGE.rglob("*.py"))
LONG = 60  # lines of a function that needs a docstring


def name_of(path: Path) -> str:
    """The module in a file below the package: `_plan.classify`, `optim` for its `__init__.py`, "" for the package."""
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def is_type_checking(node: ast.AST) -> bool:
    return isinstance(node, ast.If) and ast.unparse(node.test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def statements(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Those that run: functions are entered, what is for type checkers alone is not."""
    for inner in node.orelse if is_type_checking(node) else ast.iter_child_nodes(node):
        if isinstance(inner, ast.Import | ast.ImportFrom):
            yield inner
        yield from statements(inner)


def asked_for(source: str, inside: list[str]) -> Iterator[tuple[str, str]]:
    """What a module in the package `inside` imports from jaxamp: modules, and names in them."""
    for node in statements(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from ((name.name.partition(".")[2], "") for name in node.names if name.name.split(".")[0] == "jaxamp")
            continue
        parts = node.module.split(".") if node.module else []
        if node.level:
            parts = inside[: len(inside) - node.level + 1] + parts
        elif parts[0] == "jaxamp":
            parts = parts[1:]
        else:
            continue
        yield from ((".".join(parts), name.name) for name in node.names)


def imports_of(path: Path) -> Iterator[tuple[str, str]]:
    return asked_for(path.read_text(encoding="utf-8"), list(path.parent.relative_to(PACKAGE).parts))


def modules_graph() -> dict[str, set[str]]:
    """Which modules each module imports. `from .._plan import plan` imports `_plan.plan`."""
    known = {name_of(path) for path in FILES}
    left_out = {"", "__main__"}
    graph = {}
    for path in FILES:
        if name_of(path) not in left_out:
            found = ((module, f"{module}.{name}".strip(".")) for module, name in imports_of(path))
            graph[name_of(path)] = {inner if inner in known else module for module, inner in found} - left_out
    return graph


def packages_graph() -> dict[str, set[str]]:
    graph: dict[str, set[str]] = {}
    for module, others in modules_graph().items():
        package = module.split(".")[0]
        graph.setdefault(package, set()).update({other.split(".")[0] for other in others} - {package})
    return graph


def circle(graph: dict[str, set[str]]) -> list[str]:
    """Nodes of which each is imported by the next, back to the first; none where imports go one way."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return error.args[1]
    return []


def test_imports_are_read():
    source = """
        import typing
        import jaxamp.optim
        from jaxamp._tree import wider
        from .. import __version__
        from .classify import Classifier
        from .._traits import table as facts
        from typing import TYPE_CHECKING
        if TYPE_CHECKING:
            from .._cli import main
        else:
            from .. import mpx
        def fn():
            from .._policy.rules import Rule
    """
    assert list(asked_for("if True:" + source, ["_plan"])) == [
        ("optim", ""),
        ("_tree", "wider"),
        ("", "__version__"),
        ("_plan.classify", "Classifier"),
        ("_traits", "table"),
        ("", "mpx"),
        ("_policy.rules", "Rule"),
    ]
    graph = modules_graph()
    assert {"_plan.classify", "_tree", "optim", "_compat"} <= graph.keys()
    assert "_plan.higher_order" in graph["_transform.interpreter"]
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) != []


def test_no_modules_import_each_other():
    assert circle(modules_graph()) == []


def test_no_packages_import_each_other():
    found = circle(packages_graph())
    steps = {(b, a) for a, b in pairwise(found)}
    reasons = [
        f"{module} imports {other}"
        for module, others in modules_graph().items()
        for other in sorted(others)
        if (module.split(".")[0], other.split(".")[0]) in steps
    ]
    assert found == [], "\n".join(reasons)


def test_of_the_package_itself_modules_ask_only_for_its_version():
    known = {name_of(path) for path in FILES}
    asked = {
        (name_of(path), name) for path in FILES for module, name in imports_of(path) if not module and name not in known
    }
    assert {name for _, name in asked} <= {"__version__"}, asked


def test_the_repository_has_no_private_jax_names_outside_compat():
    found = [path for folder in ("jaxamp", "benchmarks", "examples", "tests") for path in (ROOT / folder).rglob("*.py")]
    assert len(found) > 100
    for path in found:
        if path.name != "_compat.py":
            assert ".".join(("jax", "_src")) not in path.read_text(encoding="utf-8"), path


def test_long_functions_say_what_they_do():
    functions = [
        (name_of(path), node)
        for path in FILES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]
    long = [(module, node) for module, node in functions if node.end_lineno - node.lineno + 1 > LONG]
    assert [f"{module}.{node.name}" for module, node in long if not ast.get_docstring(node)] == []


ARGVS = [["policies"], ["show", "default"], ["diff", "default", "fast"], ["--help"], ["--version"]]
WITHOUT_A_BACKEND = (
    "import jaxamp; jaxamp.amp(lambda x: x); jaxamp.default_amp_policy",
    "jaxamp.format('mxfp4', rounding='stochastic').values()",
    "from jaxamp import DynamicScalerState as S; S(); S.torch(); S.static(2.0); S.no_op()",
    "from jaxamp import flashoptim, optim",
    "import jaxamp.mpx",
    "import jaxamp.jmp",
    "import io, sys; from jaxamp.__main__ import main; out = sys.stdout; sys.stdout = io.StringIO()",
    f"codes = [main(argv) for argv in {ARGVS}]; sys.stdout = out; assert codes[2] == 1",
)


def test_these_start_no_backend():
    assert_starts_no_backend(*WITHOUT_A_BACKEND)
