"""The suites: for each peer, our module for each of its modules, and the tests of it that assert a fault."""

from typing import NamedTuple


class Suite(NamedTuple):
    """A peer's tests.

    Attributes:
        name: How the peer is called.
        package: What its tests import.
        modules: Which module of ours each module of the peer is, the package included.
        faults: Tests that assert a fault, as `file.py::Class::test`, each with the fault.
    """

    name: str
    package: str
    modules: dict[str, str]
    faults: dict[str, str]


def _modules(package: str, face: str, *names: str) -> dict[str, str]:
    return {package: face} | {f"{package}.{name}": face for name in names}


MPX = Suite("MPX", "mpx", _modules("mpx", "jaxamp.mpx", "_cast", "_dtypes", "_grad_tools", "_loss_scaling"), {})

JMP = Suite("JMP", "jmp", _modules("jmp", "jaxamp.jmp", "_src", "_src.loss_scale", "_src.policy"), {})

FLASHOPTIM = Suite(
    "flashoptim-jax",
    "flashoptim_jax",
    _modules("flashoptim_jax", "jaxamp.flashoptim", "adamw", "lion", "sgd", "utils")
    | {f"flashoptim_jax.{name}": f"jaxamp.flashoptim.{name}" for name in ("compression", "quantization")},
    {
        "test_quantization.py::test_round_to_nearest_matches_torch_tie_behavior": (
            "Ties are rounded up, so that -63.5 becomes -63 and 63.5 becomes 64: momenta of both signs drift upwards. "
            "Ours go to even."
        ),
    },
)

UPSTREAM = Suite(
    "jaxamp 0.0.4",
    "jaxamp",
    {f"jaxamp.{name}": "jaxamp" for name in ("__about__", "_amp", "_dynamic_scaler")},
    {
        "test_amp.py::test_linear_amp": (
            "A layer's float32 result is rounded to float16 at its bias. Ours is the sum in float32, which is nearer "
            "to the layer in float32."
        ),
    },
)

SUITES = (MPX, JMP, FLASHOPTIM, UPSTREAM)
