"""The policies are found in a wheel, in a wheel made from an sdist, in an editable install and in a bare checkout."""

import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from helpers import ROOT

pytestmark = pytest.mark.slow

ASK = "import jaxamp; print(jaxamp.__file__); print(*jaxamp.presets())"
# No installation of this environment is to be seen: neither its metadata nor its editable path.
HIDE = (
    "import sys, importlib.metadata as m; real = m.version\n"
    "def version(name):\n"
    "    if name == 'jaxamp': raise m.PackageNotFoundError(name)\n"
    "    return real(name)\n"
    "m.version = version\n"
)


def ask(*paths):
    """Ask for the presets in a fresh interpreter that finds jaxamp under `paths`."""
    code = f"{HIDE}sys.path[:0] = {[str(p) for p in paths]}\n{ASK}"
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, cwd="/")
    where, presets = out.stdout.splitlines()
    return Path(where), presets.split()


@pytest.fixture(scope="module")
def dists(tmp_path_factory):
    out = tmp_path_factory.mktemp("dist")
    subprocess.run([sys.executable, "-m", "build", "--outdir", str(out), str(ROOT)], check=True, capture_output=True)
    return out


def test_a_wheel_made_from_the_sdist_has_the_policies(dists, tmp_path):
    (wheel,) = dists.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        archive.extractall(tmp_path)
    assert {"jaxamp/policies/default.toml", "jaxamp/py.typed"} <= names
    assert {f"jaxamp/_inspect/page/page.{kind}" for kind in ("html", "css", "js")} <= names
    assert not [name for name in names if name.startswith("tests")]
    where, presets = ask(tmp_path)
    assert where.is_relative_to(tmp_path)
    assert "default" in presets


def test_a_wheel_has_the_command(dists):
    (wheel,) = dists.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (points,) = [name for name in archive.namelist() if name.endswith(".dist-info/entry_points.txt")]
        assert "[console_scripts]\njaxamp = jaxamp.__main__:main" in archive.read(points).decode()
        assert "jaxamp/__main__.py" in archive.namelist()


def test_a_wheel_says_where_the_project_lives(dists):
    (wheel,) = dists.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (metadata,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        lines = archive.read(metadata).decode().splitlines()
    addresses = dict(line.removeprefix("Project-URL: ").split(", ") for line in lines if line.startswith("Project-URL"))
    assert addresses.keys() == {"Homepage", "Repository", "Issues", "Changelog"}
    assert all(address.startswith(addresses["Homepage"]) for address in addresses.values())


def test_a_bare_checkout_has_the_policies():
    where, presets = ask(ROOT)
    assert where.is_relative_to(ROOT)
    assert "default" in presets


def test_an_editable_install_has_the_policies(tmp_path):
    venv.create(tmp_path, with_pip=True)
    python = tmp_path / "bin" / "python"
    install = [str(python), "-m", "pip", "install", "-q", "--no-deps", "-e", str(ROOT)]
    subprocess.run(install, check=True, capture_output=True)
    site = subprocess.run(
        [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()
    pointers = [line for pth in Path(site).glob("*.pth") for line in pth.read_text().splitlines()]
    assert str(ROOT) in pointers
    _, presets = ask(*pointers)
    assert "default" in presets
