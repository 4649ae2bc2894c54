"""Scripts as a new user writes them from the documentation: in float32, and in mixed precision beside it.

The law: at most four lines differ, the script runs as it stands, its matmuls are low, and it learns like its original.
"""

import difflib
import inspect
import re
import runpy
from pathlib import Path

import pytest

import jaxamp

HERE = Path(__file__).parent
SCRIPTS = sorted(path.name.removesuffix("_amp.py") for path in HERE.glob("*_amp.py"))


def lines_of(path):
    return path.read_text(encoding="utf-8").splitlines()


def run(path):
    """What a script has defined, and the dtypes that its training step multiplies in the program that XLA gets."""
    script = runpy.run_path(str(path))
    step = script["train_step"]
    return script, products(step.lower(*arguments_of(step, script)).as_text())


def arguments_of(fn, script):
    """The arguments of a function, which the scripts call by the names of its parameters."""
    return tuple(script[name] for name in inspect.signature(fn).parameters)


def products(program):
    """The dtypes of the operands of each matmul and convolution of a program in StableHLO."""
    found = re.findall(r"stablehlo\.(?:dot_general|convolution).*? : \((tensor<.*?>, tensor<.*?>)\)", program)
    assert len(found) > 2  # forward and backward
    return {tuple(re.findall(r"x?(b?f\d+)>", operands)) for operands in found}


def test_there_are_five_scripts():
    assert SCRIPTS == ["devices", "equinox", "linen", "nnx", "torch"]
    assert [path.name for path in sorted(HERE.glob("*_float32.py"))] == [f"{name}_float32.py" for name in SCRIPTS]


@pytest.mark.parametrize("name", SCRIPTS)
def test_mixed_precision_takes_at_most_four_lines(name):
    before, after = (lines_of(HERE / f"{name}_{side}.py") for side in ("float32", "amp"))
    changed = [line for line in difflib.ndiff(before, after) if line[0] in "+-" and line[2:].strip()]
    added, removed = ([line for line in changed if line[0] == sign] for sign in "+-")
    assert 1 <= len(added) <= 4
    assert len(removed) <= len(added)


@pytest.mark.promotes
@pytest.mark.parametrize("name", SCRIPTS)
def test_the_scripts_matmuls_are_low_and_it_learns(name):
    (plain, wide), (mixed, low) = (run(HERE / f"{name}_{side}.py") for side in ("float32", "amp"))
    assert wide == {("f32", "f32")}
    assert ("bf16", "bf16") in low  # a CPU multiplies the gradients of weights in float32
    loss_fn = mixed["loss_fn"]
    jaxamp.assert_mixed(loss_fn, arguments_of(loss_fn, mixed), compute_dtype="bfloat16")
    before, after = plain["losses"], mixed["losses"]
    assert before[0] - before[-1] > 0.2
    assert abs(after[-1] - before[-1]) < 0.1 * (before[0] - before[-1])
