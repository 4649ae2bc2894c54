"""The doctor: what it says of this machine, and of machines that it is shown."""

import json
import os
import platform

import jax
import jax.numpy as jnp
import pytest

import jaxamp
from jaxamp._cli import doctor as _doctor
from jaxamp._cli.doctor import Device, Diagnosis, FastPath, diagnose
from jaxamp._cli.main import main
from jaxamp._cli.text import render_diagnosis
from jaxamp._primitives import attention_cudnn as _attention

NAMES = [
    "bfloat16 matrix units",
    "float16 matrix units",
    "float8 matrix units",
    "fused attention",
    "bfloat16 matmul as compiled",
    "float16 matmul as compiled",
]


def gpu(capability, id=0):
    return Device(id, "gpu", "NVIDIA something", 2**34, capability)


CPU = Device(0, "cpu", "cpu", None, None)
TPU = Device(0, "tpu", "TPU v5p", 2**34, None)


def units(*devices):
    """Whether devices multiply matrices of bfloat16, float16 and float8, and why."""
    return [(path.here, path.reason) for path in list(_doctor._fast_paths(devices))[:3]]


@pytest.fixture
def no_programs(monkeypatch):
    """Nothing is compiled."""
    monkeypatch.setattr(_doctor, "fused_here", lambda: (False, ""))
    monkeypatch.setattr(_doctor, "_as_compiled", lambda dtype: (False, ""))


@pytest.fixture
def cpuinfo(monkeypatch, tmp_path, no_programs):
    """A CPU with given flags."""

    def write(text):
        (tmp_path / "cpuinfo").write_text(text)
        monkeypatch.setattr(_doctor, "_CPUINFO", tmp_path / "cpuinfo")

    return write


# -- this machine


def test_this_machine():
    found = diagnose()
    assert found.versions["jax"] == jax.__version__
    assert found.versions["python"] == platform.python_version()
    assert {"jaxlib", "jaxamp", "equinox", "optax", "numpy"} <= set(found.versions)
    assert [device.platform for device in found.devices] == ["cpu"] * 8
    assert [path.name for path in found.fast_paths] == NAMES
    assert all(path.reason for path in found.fast_paths)
    assert found.settings["JAX_PLATFORMS"] == "cpu"
    assert found.problems == ()
    paths = {path.name: path for path in found.fast_paths}
    assert paths["fused attention"][1:] == (False, "there is no NVIDIA GPU: attention is the plain one")
    for dtype in ("bfloat16", "float16"):
        here = paths[f"{dtype} matmul as compiled"]
        assert here.reason.startswith(f"XLA multiplies {dtype}" if here.here else "XLA multiplies float32 by float32")


def test_the_command(capsys):
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert [line for line in text.splitlines() if line and not line.startswith(" ")] == [
        "versions",
        "settings",
        f"devices ({platform.system()} {platform.machine()})",
        "fast paths",
    ]
    assert all(name in text for name in NAMES)
    assert main(["doctor", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert set(data) == {"versions", "system", "settings", "devices", "fast_paths", "problems"}
    assert set(data["devices"][0]) == {"id", "platform", "kind", "memory", "compute_capability"}
    assert all(set(row) == {"name", "here", "reason"} for row in data["fast_paths"])
    assert data["problems"] == []


def test_memory_of_a_gpu_is_left_to_others(capsys, monkeypatch):
    monkeypatch.setattr("jaxamp._cli.commands.diagnose", lambda: Diagnosis({"jax": "0"}, "", {}, (), (), ()))
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "true")  # what the user says stays
    main(["doctor"])
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "true"
    monkeypatch.delenv("XLA_PYTHON_CLIENT_PREALLOCATE")
    main(["doctor"])
    assert os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


# -- matrix units


@pytest.mark.parametrize(
    ("capability", "answers"),
    [
        ("6.1", [False, False, False]),
        ("7.0", [False, True, False]),
        ("7.5", [False, True, False]),
        ("8.0", [True, True, False]),
        ("8.6", [True, True, False]),
        ("8.9", [True, True, True]),
        ("9.0", [True, True, True]),
        ("10.0", [True, True, True]),
        (None, [None, None, None]),
    ],
)
def test_units_of_a_gpu_follow_its_compute_capability(no_programs, capability, answers):
    found = units(gpu(capability))
    assert [here for here, _ in found] == answers
    if capability is None:
        assert found[0][1] == "NVIDIA something does not report it"
    else:
        assert found[2][1] == f"compute capability {capability}; 8.9 is needed"


def test_what_a_tpu_has_besides_bfloat16_is_not_known(no_programs):
    assert units(TPU) == [(True, "every TPU has them"), *[(None, "TPU v5p does not report it")] * 2]


def test_the_device_that_has_least_decides(no_programs):
    assert [here for here, _ in units(gpu("9.0"), gpu("7.5", 1), gpu(None, 2))] == [False, None, False]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "processor\t: 0\nflags\t\t: fpu avx512_bf16 amx_bf16 amx_tile\n",
            [(True, "the CPU has amx_bf16, avx512_bf16"), (False, "the CPU has none of amx_fp16")],
        ),
        (
            "processor\t: 0\nFeatures\t: fp asimd bf16 i8mm\n",
            [(True, "the CPU has bf16"), (False, "the CPU has none of amx_fp16")],
        ),
        (
            "flags : fpu avx2 amx_fp16",
            [(False, "the CPU has none of amx_bf16, avx512_bf16, bf16"), (True, "the CPU has amx_fp16")],
        ),
    ],
)
def test_units_of_a_cpu_follow_its_flags(cpuinfo, text, found):
    cpuinfo(text)
    assert units(CPU) == [*found, (False, "the CPU has none of amx_fp8")]


def test_a_cpu_that_tells_nothing_is_unknown(cpuinfo, monkeypatch, tmp_path):
    cpuinfo("processor : 0\n")
    assert {here for here, _ in units(CPU)} == {None}
    monkeypatch.setattr(_doctor, "_CPUINFO", tmp_path / "nothing")
    assert units(CPU)[0] == (None, f"the CPU's flags can't be read from {tmp_path / 'nothing'}")


# -- programs


def test_fused_attention_is_asked_of_the_code_that_decides(monkeypatch):
    class Gpu:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [Gpu()])
    assert _attention.fused_here() == (False, "it needs a GPU of compute capability 8.0")
    Gpu.compute_capability = "9.0"
    here, reason = _attention.fused_here()  # what JAX says
    assert not here
    assert "cuDNN" in reason
    monkeypatch.setattr(_attention, "_split", lambda *args: None)
    assert _attention.fused_here() == (True, "attention is cuDNN's where it runs low")


@pytest.mark.parametrize(
    ("rows", "answer"),
    [
        ([("__cublas$gemm", ("bfloat16",) * 2)], (True, "XLA multiplies bfloat16 by bfloat16 (__cublas$gemm)")),
        ([("dot", ("bfloat16", "float32"))], (False, "XLA multiplies bfloat16 by float32 (dot)")),
        ([], (None, "the compiled program does not show its matmul")),
    ],
)
def test_the_compiled_program_is_believed(monkeypatch, rows, answer):
    monkeypatch.setattr(_doctor, "compiled_matmuls", lambda compiled: [_row(*row) for row in rows])
    assert _doctor._as_compiled("bfloat16") == answer


def _row(op, operands):
    (row,) = jaxamp.compiled_matmuls(jax.jit(jnp.matmul).lower(jnp.ones((4, 4)), jnp.ones((4, 4))).compile())
    return row._replace(op=op, operands=operands)


def test_a_precision_that_is_asked_for_is_told():
    with jax.default_matmul_precision("highest"):
        answer, why = _doctor._as_compiled("bfloat16")
        assert not answer
        assert why.startswith("amp leaves it in float32: jax_default_matmul_precision = 'highest' asks for precision")
        assert _doctor._settings()["jax_default_matmul_precision"] == "highest"
    with jax.enable_x64(True):
        assert _doctor._settings()["jax_enable_x64"] == "True"


def test_a_compiler_that_fails_is_told(monkeypatch):
    def fail(compiled):
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nmore")

    monkeypatch.setattr(_doctor, "compiled_matmuls", fail)
    assert _doctor._as_compiled("float16") == (None, "compiling it failed: RESOURCE_EXHAUSTED: Out of memory")


# -- problems


def test_a_backend_that_does_not_start_is_a_problem(capsys, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("Unable to initialize backend 'cuda'\nmore")

    monkeypatch.setattr(jax, "local_devices", fail)
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out.endswith("problems\n  -  JAX could not start: Unable to initialize backend 'cuda'\n")


def test_a_gpu_that_jax_does_not_use_is_a_problem(monkeypatch, tmp_path):
    monkeypatch.setattr(_doctor, "_NVIDIA", tmp_path)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert list(_doctor._problems([CPU])) == []  # JAX_PLATFORMS asks for it
    monkeypatch.delenv("JAX_PLATFORMS")
    message = "there is an NVIDIA driver, but JAX runs on the CPU: install jax[cuda12] or jax[cuda13]"
    assert list(_doctor._problems([CPU])) == [message]
    assert list(_doctor._problems([gpu("9.0")])) == []
    monkeypatch.setattr(_doctor, "_NVIDIA", tmp_path / "nothing")
    assert list(_doctor._problems([CPU])) == []


# -- parts


def test_a_device_tells_what_it_knows():
    class Gpu:
        id, platform, device_kind, compute_capability = 1, "gpu", "NVIDIA H200", "9.0"

        def memory_stats(self):
            return {"bytes_limit": 3 * 2**30}

    class Amd(Gpu):
        compute_capability = "gfx942"

        def memory_stats(self):
            raise NotImplementedError

    assert _doctor._device(Gpu()) == (1, "gpu", "NVIDIA H200", 3 * 2**30, "9.0")
    assert _doctor._device(Amd()) == (1, "gpu", "NVIDIA H200", None, None)


def test_a_version_that_is_not_told_is_unknown(monkeypatch):
    def missing(name):
        raise _doctor.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(_doctor.metadata, "version", missing)
    found = _doctor._versions()
    assert (found["jaxamp"], "flax" in found) == ("unknown", False)


def test_the_text_of_a_diagnosis():
    found = Diagnosis(
        {"python": "3.12.1", "jax": "0.12.0"},
        "Linux x86_64",
        {},
        (gpu("9.0"),),
        (FastPath("this", True, "so"), FastPath("or that", None, "perhaps")),
        (),
    )
    assert render_diagnosis(found).splitlines() == [
        "versions",
        "  python  3.12.1",
        "  jax     0.12.0",
        "",
        "devices (Linux x86_64)",
        "  gpu 0  NVIDIA something, compute capability 9.0, 16.0 GiB for JAX",
        "",
        "fast paths",
        "  this     yes      so",
        "  or that  unknown  perhaps",
    ]
    json.dumps(found.to_dict())
