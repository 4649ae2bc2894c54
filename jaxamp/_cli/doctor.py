"""What this machine has: versions, devices, and which of the fast paths. Data first, text second.

An answer is yes, no, or unknown where neither the device nor this file can know.
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

from .._inspect.compiled import compiled_matmuls
from .._inspect.report import amp_report
from .._primitives.attention import fused_here
from .._transform.amp import amp

_NEEDED = ("jax", "jaxlib", "jaxamp", "equinox", "optax", "numpy")
_OPTIONAL = (
    "ml_dtypes flax dm-haiku libtpu jax-cuda12-plugin jax-cuda13-plugin jax-rocm7-plugin jax-rocm60-plugin jax-metal "
    "nvidia-cudnn-cu12 nvidia-cudnn-cu13"
).split()
_ENVIRONMENT = ("JAX_PLATFORMS", "XLA_FLAGS", "CUDA_VISIBLE_DEVICES")
_CPUINFO = Path("/proc/cpuinfo")
_NVIDIA = Path("/proc/driver/nvidia/version")
_SIZE = 256  # of the matrices that are multiplied to see in which dtype


class Device(NamedTuple):
    """A device of this process."""

    id: int
    platform: str  # cpu, gpu, tpu
    kind: str  # as it calls itself
    memory: int | None  # bytes that JAX may use
    compute_capability: str | None  # of an NVIDIA GPU


class FastPath(NamedTuple):
    """Something that makes low precision fast, and whether it is here."""

    name: str
    here: bool | None  # None: unknown
    reason: str


class Diagnosis(NamedTuple):
    """What `jaxamp doctor` says."""

    versions: dict[str, str]
    system: str
    settings: dict[str, str]  # those that are not JAX's own
    devices: tuple[Device, ...]
    fast_paths: tuple[FastPath, ...]
    problems: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        rows = {name: [row._asdict() for row in getattr(self, name)] for name in ("devices", "fast_paths")}
        return self._asdict() | rows | {"problems": list(self.problems)}


def diagnose() -> Diagnosis:
    """Look at this machine. A backend is started, and two small matmuls are compiled."""
    try:
        devices, problems = tuple(map(_device, jax.local_devices())), tuple[str, ...]()
    except RuntimeError as error:
        devices, problems = (), (f"JAX could not start: {_first_line(error)}",)
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
    ours = {name: os.environ[name] for name in _ENVIRONMENT if os.environ.get(name)}
    precision = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if precision is not None:
        ours["jax_default_matmul_precision"] = precision
    if jax.config.jax_enable_x64:  # type: ignore[attr-defined]
        ours["jax_enable_x64"] = "True"
    return ours


def _device(device: Any) -> Device:
    capability = str(getattr(device, "compute_capability", ""))
    return Device(
        device.id,
        device.platform,
        device.device_kind,
        _memory(device),
        capability if re.fullmatch(r"\d+\.\d+", capability) else None,  # AMD's is no number
    )


def _memory(device: Any) -> int | None:
    try:
        return (device.memory_stats() or {}).get("bytes_limit")
    except (NotImplementedError, RuntimeError):  # not every plug-in counts
        return None


def _problems(devices: Sequence[Device]) -> Iterator[str]:
    chosen = os.environ.get("JAX_PLATFORMS") or os.environ.get("CUDA_VISIBLE_DEVICES") is not None
    if _NVIDIA.exists() and not chosen and {device.platform for device in devices} == {"cpu"}:
        yield "there is an NVIDIA driver, but JAX runs on the CPU: install jax[cuda12] or jax[cuda13]"


# -- fast paths


def _fast_paths(devices: Sequence[Device]) -> Iterator[FastPath]:
    yield FastPath("bfloat16 matrix units", *_units(devices, (8, 0), {"amx_bf16", "avx512_bf16", "bf16"}, tpu=True))
    yield FastPath("float16 matrix units", *_units(devices, (7, 0), {"amx_fp16"}))
    yield FastPath("float8 matrix units", *_units(devices, (8, 9), {"amx_fp8"}))
    yield FastPath("fused attention", *fused_here())
    for dtype in ("bfloat16", "float16"):
        yield FastPath(f"{dtype} matmul as compiled", *_as_compiled(dtype))


def _units(
    devices: Sequence[Device], capability: tuple[int, int], flags: set[str], tpu: bool | None = None
) -> tuple[bool | None, str]:
    """Whether each device multiplies matrices of a dtype in hardware. The first that does not, or is not known to."""
    answers = [_unit(device, capability, flags, tpu) for device in devices]
    return min(answers, key=lambda answer: (answer[0] is True, answer[0] is None))


def _unit(device: Device, capability: tuple[int, int], flags: set[str], tpu: bool | None) -> tuple[bool | None, str]:
    if device.platform == "cpu":
        return _on_cpu(flags)
    if device.platform == "tpu":
        return tpu, "each TPU has them" if tpu else f"{device.kind} does not say"
    if device.compute_capability is None:
        return None, f"{device.kind} does not say"
    mine = tuple(map(int, device.compute_capability.split(".")))
    needed = ".".join(map(str, capability))
    return mine >= capability, f"compute capability {device.compute_capability}; {needed} has them"


def _on_cpu(wanted: set[str]) -> tuple[bool | None, str]:
    flags = _cpu_flags()
    if flags is None:
        return None, f"the CPU's flags can't be read from {_CPUINFO}"
    found = sorted(wanted & flags)
    return bool(
        found
    ), f"the CPU has {', '.join(found)}" if found else f"the CPU has none of {', '.join(sorted(wanted))}"


def _cpu_flags() -> set[str] | None:
    """The features of the CPU as Linux names them; None if they are not told."""
    try:
        text = _CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    found = re.search(r"^(?:flags|Features)\s*:(.*)$", text, re.MULTILINE)
    return None if found is None else set(found[1].split())


def _as_compiled(dtype: str) -> tuple[bool | None, str]:
    """What a matmul under `amp` multiplies in, from the program that XLA makes of it here."""
    operand = jax.ShapeDtypeStruct((_SIZE, _SIZE), jnp.float32)
    (planned,) = amp_report(jnp.matmul, compute_dtype=dtype, backward=False)(operand, operand).matmuls
    if planned.multiplied != dtype:
        return False, f"amp leaves it in {planned.multiplied}: {planned.reason}"
    try:
        found = compiled_matmuls(jax.jit(amp(jnp.matmul, compute_dtype=dtype)).lower(operand, operand).compile())
    except RuntimeError as error:
        return None, f"compiling it failed: {_first_line(error)}"
    if not found:
        return None, "the compiled program does not show its matmul"
    return set(found[0].operands) == {dtype}, f"XLA multiplies {' by '.join(found[0].operands)} ({found[0].op})"


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).strip().splitlines()), type(error).__name__)


# -- as text


def render_diagnosis(found: Diagnosis) -> str:
    answers = {True: "yes", False: "no", None: "unknown"}
    sections = {
        "versions": list(found.versions.items()),
        "settings": list(found.settings.items()),
        f"devices ({found.system})": [(f"{d.platform} {d.id}", _about(d)) for d in found.devices],
        "fast paths": [(path.name, f"{answers[path.here]:<9}{path.reason}") for path in found.fast_paths],
        "problems": [("-", problem) for problem in found.problems],
    }
    return "\n\n".join(_section(title, rows) for title, rows in sections.items() if rows)


def _section(title: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([title, *(f"  {name:<{width}}  {text}" for name, text in rows)])


def _about(device: Device) -> str:
    memory = None if device.memory is None else f"{device.memory / 2**30:.1f} GiB for JAX"
    capability = device.compute_capability and f"compute capability {device.compute_capability}"
    return ", ".join(filter(None, (device.kind, capability, memory)))
