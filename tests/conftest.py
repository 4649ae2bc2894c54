"""Eight virtual CPU devices, quick compilation, and strict promotion where a test asks for nothing else."""

import os

os.environ["JAX_PLATFORMS"] = "cpu"
# The programs are small: compiling them is what takes time.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_force_host_platform_device_count=8"
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest

jax.config.update("jax_threefry_partitionable", True)


@pytest.fixture(autouse=True)
def _strict_promotion(request: pytest.FixtureRequest):
    """Tests of libraries that promote on their own opt out with `@pytest.mark.promotes`."""
    mode = "standard" if request.node.get_closest_marker("promotes") else "strict"
    with jax.numpy_dtype_promotion(mode):
        yield
