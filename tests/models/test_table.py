"""The suite of real models itself: how many there are, that each law can fail, and the table."""

import math
import subprocess
import sys
from types import SimpleNamespace

import jax.numpy as jnp
import pytest
from helpers import ROOT, with_the_package
from models import laws, measure, plugin, registry

GOOD = measure.Figures(
    share=1.0,
    notes=(),
    kept=0.5,
    error=1e-3,
    response=1e-3,
    own=2e-3,
    drift=0.01,
    losses=[2.0, 1.0],
    states=({"mean": jnp.zeros(2)}, {"mean": jnp.ones(2)}, {"mean": jnp.full(2, 1.01)}),
    counters=([3], [3]),
    finite=True,
)
STILL = ({"mean": jnp.zeros(2)}, {"mean": jnp.ones(2)}, {"mean": jnp.zeros(2)})
BAD = [
    ("gradient", {"error": 4e-3}),
    ("gradient", {"error": math.nan}),
    ("gradient", {"error": 0.6, "response": 0.6}),
    ("own", {"error": 3e-3}),
    ("share", {"share": 0.9}),
    ("share", {"notes": ("no backward pass",)}),
    ("kept", {"kept": 0.9}),
    ("kept", {"kept": math.nan}),
    ("state", {"states": STILL}),
    ("state", {"states": (*STILL[:2], {})}),
    ("state", {"counters": ([3], [0])}),
    ("training", {"drift": 0.1}),
    ("training", {"finite": False}),
]


def test_there_are_enough_models():
    entries = registry.entries().values()
    assert len(entries) >= 25
    assert len({entry.library for entry in entries}) >= 12
    assert {entry.library for entry in entries if entry.quick} == {
        *"transformers flax keras diffrax flowjax ott-jax tinygp".split()
    }


def test_reading_the_table_imports_none_of_the_libraries():
    code = "import sys; from models import registry; registry.entries(); "
    code += "print(*{'flax', 'keras', 'haiku', 'transformers', 'diffrax'} & {*sys.modules})"
    environment = with_the_package(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}", JAX_PLATFORMS="cpu")
    out = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == ""


def test_a_reason_names_a_law():
    with pytest.raises(ValueError, match=r"net gives reasons for \['speed'\]; the laws are gradient, own, share"):
        registry.model("library", "net", speed="slow")


def test_good_figures_keep_every_law():
    assert tuple(laws.LAWS) == registry.LAWS
    assert all(law(GOOD)[0] for law in laws.LAWS.values())


@pytest.mark.parametrize(("law", "change"), BAD)
def test_bad_figures_break_one_law(law, change):
    found = GOOD._replace(**change)
    if law == "gradient":
        found = found._replace(own=None)
    assert [name for name, check in laws.LAWS.items() if not check(found)[0]] == [law]


def test_the_table_has_one_row_for_each_dtype_and_names_broken_laws():
    entry = registry.Entry("library", "net", (), None, {"kept": "a reason"}, False)
    report = lambda row, failed=False: SimpleNamespace(user_properties=[(plugin.KEY, row)], failed=failed)
    reports = [
        *(report(plugin.row(entry, "bfloat16", law, GOOD), law != "kept") for law in ("share", "kept", "state")),
        report(plugin.trace_row(entry, "bfloat16", 1.2)),
        report(plugin.row(entry, "float16", "share", GOOD)),
    ]
    first, second = plugin.gather(reports)
    assert (first["broken"], first["trace"], first["listed"]) == ("share, state", 1.2, "kept: a reason")
    assert (second["low"], second["broken"]) == ("float16", None)
    assert "| library | net | bfloat16 | 1.000 | 0.50 |" in plugin.page([first, second], "a device")


def test_rounding_and_distances():
    tree = {"w": jnp.array([1.0, 1.001]), "n": jnp.array([3])}
    rounded = measure.round_to(tree, jnp.bfloat16)
    assert rounded["w"].tolist() == [1.0, 1.0]
    assert rounded["w"].dtype == jnp.float32
    found, expected = {"w": jnp.array([3.0, 5.0])}, {"w": jnp.array([3.0, 4.0])}
    assert measure.distance(found, expected) == pytest.approx(0.2)
    assert [x.tolist() for x in measure.integers(tree)] == [[3]]
