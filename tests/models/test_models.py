"""Every model of the table keeps every law of `laws.py`, in both dtypes.

    pip install -e '.[tests,models]'
    pytest -m models                    # each model whose library is installed, and a table at the end
    pytest -m models --quick            # the few that CI runs
    pytest -m models --write-results    # write the table to benchmarks/MODELS.md
    pytest -m models --check-times      # assert the time to trace too; the machine should do nothing else

A model that cannot keep a law lists the reason where it is registered. A reason that is no longer needed fails.
"""

import functools
import importlib.util
from typing import Any

import jax.numpy as jnp
import pytest
from models import laws, measure, plugin, registry

pytestmark = [
    pytest.mark.models,
    pytest.mark.promotes,
    pytest.mark.filterwarnings("ignore"),  # the libraries' own
]

MODELS = pytest.mark.parametrize("name", registry.entries(), scope="module")  # tests of one model follow one another
LOWS = ("bfloat16", "float16")
BOTH = pytest.mark.parametrize("low", LOWS, scope="module")


@functools.lru_cache(1)
def plain(name: str) -> measure.Plain:
    return measure.plain(registry.ENTRIES[name])


@functools.lru_cache(2)
def measured(name: str, low: str) -> measure.Figures:
    return measure.measure(plain(name), jnp.dtype(low))


@pytest.fixture(autouse=True)
def _needs_its_library(name: str):
    for module in registry.ENTRIES[name].needs:
        if importlib.util.find_spec(module) is None:  # one that is there and can't be imported is an error
            pytest.skip(f"{module} is not installed: pip install -e '.[models]'")


@pytest.mark.parametrize("law", laws.LAWS)
@BOTH
@MODELS
def test_a_model_keeps_the_law(name: str, low: str, law: str, record_property: Any):
    found = measured(name, low)
    record_property(plugin.KEY, plugin.row(registry.ENTRIES[name], low, law, found))
    kept, message = laws.LAWS[law](found)
    assert kept or law in registry.ENTRIES[name].reasons, message
    if law == "kept":
        assert found.kept <= laws.NEVER_KEPT, message


@MODELS
def test_listed_reasons_are_needed(name: str):
    for law in set(registry.ENTRIES[name].reasons) - {registry.TRACE}:
        verdicts = [laws.LAWS[law](measured(name, low)) for low in LOWS]
        assert not all(kept for kept, _ in verdicts), f"{law} is kept: {'; '.join(message for _, message in verdicts)}"


@MODELS
def test_tracing_takes_little_longer(name: str, record_property: Any, request: pytest.FixtureRequest):
    ratio = measure.trace_ratio(plain(name).model)
    record_property(plugin.KEY, plugin.trace_row(registry.ENTRIES[name], "bfloat16", ratio))
    if request.config.getoption("--check-times"):
        assert ratio <= laws.TRACE or registry.TRACE in registry.ENTRIES[name].reasons
