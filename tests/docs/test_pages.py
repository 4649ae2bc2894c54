"""The documentation: its code runs and prints what it says, its names and messages exist, its site builds."""

import ast
import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys

import pytest
from commands import answer
from helpers import ROOT, with_the_package

import jaxamp

DOCS = ROOT / "docs"
PAGES = {path.relative_to(DOCS).with_suffix("").as_posix(): path for path in sorted(DOCS.rglob("*.md"))}
NEEDS = {"recipes/keras": "keras", "recipes/huggingface": "transformers"}  # of the extra `models`
# A block of code, and what it prints, if that follows as text.
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n+```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE


def text_of(page):
    return PAGES[page].read_text(encoding="utf-8")


@pytest.mark.parametrize("page", PAGES)
def test_links_to_files_hold_in_the_repository(page):
    """And on the site, which is built with `--strict`."""
    links = re.findall(r"\]\((?!https?:|#)([^)#\s]+)", BLOCK.sub("", text_of(page)))
    assert [link for link in links if not (PAGES[page].parent / link).exists()] == []


def run_page(page):
    """Run the blocks of a page in one namespace, and compare what they print. `...` stands for anything."""
    namespace = {"__name__": "page"}
    text = text_of(page)
    for block in BLOCK.finditer(text):
        code, expected = block.groups()
        lines_above = "\n" * (text.count("\n", 0, block.start()) + 1)  # so that a traceback has the page's line
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile(lines_above + code, f"docs/{page}.md", "exec"), namespace)
        if expected:
            same = doctest.OutputChecker().check_output(expected, printed.getvalue(), FLAGS)
            assert same, f"docs/{page}.md says\n{expected}\nbut its code prints\n{printed.getvalue()}"
    return namespace


WITH_CODE = [page for page in PAGES if "```python" in text_of(page)]
FIRST = ("quick-start", "devices", "memory")  # the others are slow together


def marks_of(page):
    return [pytest.mark.models] * (page in NEEDS) + [pytest.mark.slow] * (page not in (*NEEDS, *FIRST))


@pytest.mark.promotes
@pytest.mark.parametrize("page", [pytest.param(page, marks=marks_of(page)) for page in WITH_CODE])
def test_the_code_of_a_page_runs_as_written(page, tmp_path, monkeypatch):
    if page in NEEDS:
        monkeypatch.setenv("KERAS_BACKEND", "jax")
        pytest.importorskip(NEEDS[page], reason="the models extra is not installed")
    monkeypatch.chdir(tmp_path)
    run_page(page)


LISTING = re.compile(r"^```console\n\$ jaxamp (.*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
FILE = re.compile(r'^```python title="(.*)"\n(.*?)^```$', re.MULTILINE | re.DOTALL)
WITH_LISTINGS = [page for page in PAGES if LISTING.search(text_of(page))]


@pytest.mark.parametrize("page", WITH_LISTINGS)
def test_the_listings_of_a_page_are_what_the_command_prints(page, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for name, code in FILE.findall(text_of(page)):
        (tmp_path / name).write_text(code, encoding="utf-8")
    for words, expected in LISTING.findall(text_of(page)):
        _, printed, _ = answer(capsys, *shlex.split(words))
        same = doctest.OutputChecker().check_output(expected, printed, FLAGS)
        assert same, f"docs/{page}.md says\n{expected}\nbut jaxamp {words} prints\n{printed}"


FACES = {"flashoptim", "jmp", "mpx", "optim"}  # which have pages of their own


@pytest.mark.parametrize(("page", "module"), [("api/jaxamp", jaxamp), ("api/optim", jaxamp.optim)])
def test_the_reference_has_every_public_name(page, module):
    listed = re.findall(r"^(?:::: jaxamp(?:\.optim)?\.|### )(\w+)$", text_of(page), re.MULTILINE)
    public = getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")])
    assert sorted(listed) == sorted(set(public) - FACES)


def test_the_navigation_has_every_page():
    listed = set(re.findall(r"([\w./-]+)\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8")))
    assert set(PAGES) <= listed


@pytest.mark.slow
def test_the_site_builds_without_a_warning(tmp_path):
    pytest.importorskip("mkdocs", reason="the docs extra is not installed")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-d", str(tmp_path)]
    built = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=with_the_package())
    assert built.returncode == 0, built.stderr[-4000:]
    assert os.path.exists(tmp_path / "benchmarks" / "step_vit_scan.png")


HOLE = "\0"


def template(node):
    """The text of a string in the source, with holes where values go."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else HOLE
    if isinstance(node, ast.JoinedStr):
        return "".join(map(template, node.values))
    if isinstance(node, ast.BinOp):
        return template(node.left) + template(node.right)
    return HOLE


def messages():
    """What the package can raise or warn."""
    for path in (ROOT / "jaxamp").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Constant | ast.JoinedStr | ast.BinOp):
                text = template(node)
                if " " in text:
                    yield text


def occurs(quoted, sources):
    pattern = ".*".join(map(re.escape, quoted.strip("…").split("…")))
    return any(re.search(pattern, source, re.DOTALL) for source in sources)


def test_the_messages_that_are_explained_are_those_of_the_package():
    quoted = re.findall(r"^> (.+)$", text_of("faq"), re.MULTILINE)
    sources = list(messages())
    assert len(quoted) > 25
    assert [message for message in quoted if not occurs(message, sources)] == []
    assert not occurs("the function changed its argument in place, at …; expected nothing", sources)
