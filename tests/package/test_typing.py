"""A user's file under type checkers: what our signatures say of results, and which mistakes they find."""

import importlib.util
import json
import subprocess
import sys

import pytest
from helpers import ROOT, with_the_package

USER = ROOT / "tests/package/typed_user.py"


def check(*command: str) -> None:
    environment = with_the_package(MYPYPATH=str(ROOT))
    out = subprocess.run([sys.executable, "-m", *command], env=environment, cwd=ROOT, capture_output=True, text=True)
    assert out.returncode == 0, out.stdout + out.stderr


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is in the extra `lint`")
def test_mypy_reads_a_users_file():
    check(
        "mypy",
        "--strict",
        "--config-file=",
        "--disable-error-code=import-untyped",
        "--follow-imports=silent",
        str(USER),
    )


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("basedpyright") is None, reason="basedpyright is in the extra `lint`")
def test_pyright_reads_a_users_file(tmp_path):
    settings = {
        "include": [str(USER)],
        "extraPaths": [str(ROOT)],
        "typeCheckingMode": "standard",
        "reportUnnecessaryTypeIgnoreComment": "error",
        "enableTypeIgnoreComments": True,
    }
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    check("basedpyright", "--project", str(tmp_path), "--pythonpath", sys.executable)
