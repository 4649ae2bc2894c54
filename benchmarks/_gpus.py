"""GPUs to compile for, without having them. It takes JAX's CUDA plugin: `pip install "jax[cuda12]"`."""

import os
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 7 }
runtime_version { major: 12 minor: 9 patch: 0 }
device_description_str: "NVIDIA H200"
"""


def plugin_is_here() -> bool:
    return find_spec("jax_cuda12_plugin") is not None


def devices(number: int, nodes: int = 1) -> np.ndarray:
    """So many H200s in so many nodes, which can be compiled for. Nothing can be put on them.

    Without the plugin, the devices here.
    """
    from jax.experimental import topologies

    if not plugin_is_here():
        return np.array(jax.devices()[:number])
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    topology = topologies.get_topology_desc(
        platform="cuda", target_config=H200, topology=f"1x{nodes}x{number // nodes}"
    )
    return np.array(topology.devices)


def lower_for(fn: Any, *specs: Any, **options: Any) -> Any:
    """A function of arrays that lie on such devices, lowered for them."""
    traced = jax.jit(fn, **options).trace(*specs)
    return traced.lower(lowering_platforms=("cuda",)) if plugin_is_here() else traced.lower()


def compile_for(fn: Any, *specs: Any, **options: Any) -> Any:
    """What XLA makes of it."""
    return lower_for(fn, *specs, **options).compile()
