"""What this machine has: versions, devices and fast paths, as data.

The answer about a fast path is yes, no, or unknown where neither the device nor this file can tell.
"""

import os
import platform
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._errors import first_line
from .._inspect.compiled import compiled_matmuls
from .._inspect.report import amp_report
from .._primitives.attention_cudnn import fused_here
from .._transform.amp import amp

_NEEDED = ("jax", "jaxlib", "jaxamp", "equinox", "optax", "numpy")
_OPTIONAL = (
    "ml_dtypes flax dm-haiku libtpu jax-cuda12-plugin jax-cuda13-plugin jax-rocm7-plugin jax-rocm60-plugin jax-metal "
    "nvidia-cudnn-cu12 nvidia-cudnn-cu13"
).split()
_ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/version")
_SIZE = 256  # of the matrices that are multiplied to see the dtype XLA picks


class Device(NamedTuple):
    """A device of this process."""

    id: int
    platform: str  # cpu, gpu, tpu
    kind: str  # the name it gives itself
    memory: int | None  # bytes that JAX may use
    compute_capability: str | None  # of an NVIDIA GPU


class FastPath(NamedTuple):
    """Something that makes low precision fast, and whether this machine has it."""

    name: str
    here: bool | None  # None: unknown
    reason: str


class Diagnosis(NamedTuple):
    """What `jaxamp doctor` says."""

    versions: dict[str, str]
    system: str
    settings: dict[str, str]  # those that differ from JAX's defaults
    devices: tuple[Device, ...]
    fast_paths: tuple[FastPath, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """The whole diagnosis, ready for JSON."""
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("devices", "fast_paths")}
        return self._asdict() | rows | {"problems": list(self.problems)}


def diagnose() -> Diagnosis:
    """Examine this machine. This starts a backend and compiles two small matmuls."""
    try:
        devices, problems = tuple(map(_device, jax.local_devices())), tuple[str, ...]()
    except RuntimeError as error:
        devices, problems = (), (f"JAX could not start: {first_line(error)}",)
    problems += tuple(_problems(devices))
    paths = tuple(_fast_paths(devices)) if devices else ()
    return Diagnosis(_versions(), f"{platform.system()} {platform.machine()}", _settings(), devices, paths, problems)


# -- versions, settings, devices


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for name in (*_NEEDED, *_OPTIONAL):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            if name in _NEEDED:
                found[name] = "unknown"
    return found


def _settings() -> dict[str, str]:
    found = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision is not None:
        found["jax_default_matmul_precision"] = precision
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        found["jax_enable_x64"] = "True"
    return found


def _device(device: Any) -> Device:
    capability = str(getattr(device, "compute_capability", ""))
    return Device(
        device.id,
        device.platform,
        device.device_kind,
        _memory(device),
        capability if re.fullmatch(r"\d+\.\d+", capability) else None,  # AMD's is not a number
    )


def _memory(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (NotImplementedError, RuntimeError):  # not every plug-in reports it
        return None


def _problems(devices: Sequence[Device]) -> Iterator[str]:
    chosen = os.environ.get("JAX_PLATFORMS") or os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    if _NVIDIA.exists() and not chosen and {device.platform for device in devices} == {"cpu"}:
        yield "there is an NVIDIA driver, but JAX runs on the CPU: install jax[cuda12] or jax[cuda13]"


# -- fast paths


def _fast_paths(devices: Sequence[Device]) -> Iterator[FastPath]:
    yield FastPath(
        "bfloat16 matrix units", *_matrix_units(devices, (8, 0), {"amx_bf16", "avx512_bf16", "bf16"}, tpu=True)
    )
    yield FastPath("float16 matrix units", *_matrix_units(devices, (7, 0), {"amx_fp16"}))
    yield FastPath("float8 matrix units", *_matrix_units(devices, (8, 9), {"amx_fp8"}))
    yield FastPath("fused attention", *fused_here())
    for dtype in ("bfloat16", "float16"):
        yield FastPath(f"{dtype} matmul as compiled", *_as_compiled(dtype))


def _matrix_units(
    devices: Sequence[Device], capability: tuple[int, int], flags: set[str], tpu: bool | None = None
) -> tuple[bool | None, str]:
    """Whether every device multiplies matrices of a dtype in hardware: the answer for the weakest one, and why.

    Args:
        devices: The devices.
        capability: The first compute capability of NVIDIA GPUs that does.
        flags: The CPU features that do.
        tpu: The answer for TPUs.
    """
    answers = [_matrix_unit(device, capability, flags, tpu) for device in devices]
    return min(answers, key=lambda answer: (answer[0] is True, answer[0] is None))


def _matrix_unit(
    device: Device, capability: tuple[int, int], flags: set[str], tpu: bool | None
) -> tuple[bool | None, str]:
    if device.platform == "cpu":
        return _on_cpu(flags)
    if device.platform == "tpu":
        return tpu, "every TPU has them" if tpu else f"{device.kind} does not report it"
    if device.compute_capability is None:
        return None, f"{device.kind} does not report it"
    mine = tuple(map(int, device.compute_capability.split(".")))
    needed = ".".join(map(str, capability))
    return mine >= capability, f"compute capability {device.compute_capability}; {needed} is needed"


def _on_cpu(wanted: set[str]) -> tuple[bool | None, str]:
    flags = _cpu_flags()
    if flags is None:
        return None, f"the CPU's flags can't be read from {_CPUINFO}"
    found = sorted(wanted & flags)
    if not found:
        return False, f"the CPU has none of {', '.join(sorted(wanted))}"
    return True, f"the CPU has {', '.join(found)}"


def _cpu_flags() -> set[str] | None:
    """The features of the CPU, as Linux names them; None if they can't be read."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return None if found is None else set(found[1].split())


def _as_compiled(dtype: str) -> tuple[bool | None, str]:
    """Whether a matmul under `amp` multiplies in a dtype, according to the program that XLA compiles here."""
    operand = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32)
    (planned,) = amp_report(jnp.matmul, compute_dtype=dtype, backward=False)(operand, operand).matmuls
    if planned.multiplied != dtype:
        return False, f"amp leaves it in {planned.multiplied}: {planned.reason}"
    try:
        found = compiled_matmuls(jax.jit(amp(jnp.matmul, compute_dtype=dtype)).lower(operand, operand).compile())
    except RuntimeError as error:
        return None, f"compiling it failed: {first_line(error)}"
    if not found:
        return None, "the compiled program does not show its matmul"
    return set(found[0].operands) == {dtype}, f"XLA multiplies {' by '.join(found[0].operands)} ({found[0].op})"
