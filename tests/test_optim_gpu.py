"""What XLA makes of a step on an H200, read from the program that is compiled for one without having one."""

import aot
import pytest

LARGE = [4096, 12288]
QUESTIONS = {
    "adamw": ["flash_adamw", LARGE, "bfloat16", "float32", {}],
    "adamw, bfloat16 gradients": ["flash_adamw", LARGE, "bfloat16", "bfloat16", {}],
    "adamw, loss scaling": ["flash_adamw", LARGE, "bfloat16", "bfloat16", {"scaled": True}],
    "adamw, float16": ["flash_adamw", LARGE, "float16", "float32", {}],
    "adamw, float32": ["flash_adamw", LARGE, "float32", "float32", {}],
    "adamw, 32 bits": ["flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"master_weight_bits": 32}}],
    "adamw, rows": ["flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"layout": "rows"}}],
    "adamw, published": ["flash_adamw", LARGE, "bfloat16", "float32", {"storage": {"scales": "float16"}}],
    "adamw, odd": ["flash_adamw", [768, 50257], "bfloat16", "float32", {}],
    "lion": ["flash_lion", LARGE, "bfloat16", "float32", {}],
    "release": ["release"],
}


@pytest.fixture(scope="module")
def answers():
    why = aot.why_not()
    if why:
        pytest.skip(why)
    return dict(zip(QUESTIONS, aot.ask(list(QUESTIONS.values())), strict=True))


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name != "release"])
def test_no_moment_reaches_memory(answers, name):
    """The largest of each group do, in float32: 4 bytes of 32 parameters for each moment."""
    assert answers[name]["temporary"] <= 0.3


@pytest.mark.parametrize("name", [name for name in QUESTIONS if name not in ("adamw, float16", "release")])
def test_corrections_are_not_dropped(answers, name):
    """XLA makes `x - x` of a rounding error that goes by way of a cast."""
    assert not answers[name]["subtracts_itself"]
    assert answers[name]["reduce_precision"] == (name != "adamw, float32")


def test_a_step_is_three_kernels(answers):
    """Maxima, the step, the scales; and two for the scalars of the step."""
    assert answers["adamw"]["kernels"] <= 5
    assert answers["lion"]["kernels"] <= 5


def test_gradients_are_freed_as_they_are_used(answers):
    """One program of backward pass and step holds a few gradients at a time, not all of them."""
    assert answers["release"]["temporary"] < 0.3
