"""Eight virtual CPU devices, quick compilation, and strict promotion where a test asks for nothing else."""

import gc
import os
import re
from importlib.metadata import version
from pathlib import Path

os.environ["JAX_PLATFORMS"] = "cpu"
# The programs are small: compiling them is what takes time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
    + " --xla_cpu_parallel_codegen_split_count=1"
    + (" --xla_cpu_use_fusion_emitters=false" if version("jaxlib").startswith("0.10.") else "")  # newer ones have none
)

import jax
import pytest
from models import plugin as models_plugin
from models.plugin import pytest_terminal_summary as pytest_terminal_summary
from soak import plugin as soak_plugin
from xdist.scheduler import LoadScopeScheduling

jax.config.update("jax_threefry_partitionable", True)
pytest.register_assert_rewrite("attention_cases", "helpers", "oracles", "side_by_side")


def pytest_addoption(parser: pytest.Parser) -> None:
    models_plugin.pytest_addoption(parser)
    parser.addoption("--thorough", action="store_true", help="run all tests; else those that fit into ten minutes")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    models_plugin.pytest_collection_modifyitems(config, items)
    if not config.getoption("--thorough"):
        names = {item.nodeid for item in items}
        named = [Path(arg.split("::")[0]).resolve() for arg in config.args if ".py" in arg]  # files
        is_left_out = {item: item.path not in named and _is_left_out(item, names) for item in items}
        config.hook.pytest_deselected(items=[item for item in items if is_left_out[item]])
        items[:] = [item for item in items if not is_left_out[item]]


# Tests that take long, and mostly say of more programs what others say of a few.
_LONG = re.compile(
    r"test_(remembered|pool|step_length|in_format|fp8_composition|noise)\.py|test_send_low\.py::test_gradients"
    r"|test_states\.py::test_derivatives"
)


def _is_left_out(item: pytest.Item, names: set[str]) -> bool:
    """Whether a test is run in bfloat16 too, or is a long one, or a law of a model from a library."""
    if any(item.get_closest_marker(name) for name in ("slow", "models", "soak")):  # these are asked for
        return False
    twin = re.sub(r"\bfloat16", "bfloat16", item.nodeid)
    is_of_library = "test_laws.py" in item.nodeid and item.get_closest_marker("promotes") is not None
    return (twin != item.nodeid and twin in names) or is_of_library or _LONG.search(item.nodeid) is not None


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(soak_plugin, "soak")
    gc.set_threshold(200_000, 20, 20)  # traces make many objects that live on, and a full collection looks at them all


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()


class _Together(LoadScopeScheduling):
    """Tests that share what is slow to make run in one process: of a program, a model, two processes, a wheel."""

    def _split_scope(self, nodeid: str) -> str:
        program = re.search(r"test_laws\.py::\w+\[(.+)-b?float\d+\]", nodeid)
        if program:
            return program[1]
        model = re.search(r"test_models\.py::\w+\[(.+?)(?:-b?float\d+-\w+)?\]", nodeid)
        if model:
            return model[1]
        return next((name for name in _SHARING if name in nodeid), nodeid)


_SHARING = ("test_distributed.py", "test_processes.py", "test_html_in_a_browser.py", "test_packaging.py")


# The groups of `--dist loadgroup` have no effect with pytest 9.2 and pytest-xdist 3.8.
@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    return _Together(config, log)


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    """Tests of libraries that promote on their own opt out with `@pytest.mark.promotes`."""
    mode = "standard" if request.node.get_closest_marker("promotes") else "strict"
    with jax.numpy_dtype_promotion(mode):
        yield
