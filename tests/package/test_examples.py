"""Each example runs with `--small`, says what it found, and draws its picture."""

import importlib.util
import os
import re
import subprocess
import sys

import pytest
from helpers import ROOT, with_the_package

EXAMPLES = {path.name for path in (ROOT / "examples").glob("*.py")}


def run_example(name, picture, *flags):
    """What an example prints. It makes its own devices."""
    pytest.importorskip("rich", reason="the examples extra is not installed")
    pytest.importorskip("sklearn", reason="the examples extra is not installed")
    environment = with_the_package(XLA_FLAGS=re.sub(r"--xla_force_host\S+", "", os.environ["XLA_FLAGS"]))
    command = [sys.executable, str(ROOT / "examples" / name), "--small", "--out", str(picture), *flags]
    run = subprocess.run(command, capture_output=True, text=True, cwd=picture.parent, env=environment)
    assert run.returncode == 0, run.stderr[-2000:]
    assert picture.read_bytes().startswith(b"\x89PNG")
    return run.stdout


def losses(told):
    """The first and the last loss that an example prints."""
    return tuple(map(float, re.search(r"Loss (\S+) to (\S+?)[.,;]? ?\b", told).groups()))


def test_every_example_has_a_test():
    text = (ROOT / "tests" / "package" / "test_examples.py").read_text(encoding="utf-8")
    assert {name for name in EXAMPLES if f'"{name}"' not in text} == set()


@pytest.mark.parametrize("name", sorted(EXAMPLES - {"train_processes.py"}))
def test_examples_take_the_same_precisions(name):
    text = (ROOT / "examples" / name).read_text(encoding="utf-8")
    assert '"--precision", choices=("float32", "bfloat16", "float16")' in text
    assert '"--small"' in text
    assert '"--out"' in text


@pytest.mark.slow
def test_digits_compares_the_three_precisions(tmp_path):
    told = run_example("train_digits.py", tmp_path / "digits.png", "--steps", "2")
    kept = [float(size) for size in re.search(r"backward pass" + r" *│ (\S+) MiB" * 3, told).groups()]
    assert max(kept[1:]) < 0.8 * kept[0]
    assert re.search(r"loss scale at the end *│ 1 *│ 1 *│ \d{2,}", told)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("train_gpt_nnx.py", marks=pytest.mark.slow),
        pytest.param("train_gpt_linen.py", marks=pytest.mark.soak),
    ],
)
def test_a_gpt_learns_low(name, tmp_path):
    told = run_example(name, tmp_path / "gpt.png", "--steps", "12", "--precision", "float16")
    before, after = losses(told)
    assert after < before - 0.3
    assert "100.0% of the matmul FLOPs ran in float16." in told


@pytest.mark.slow
def test_an_rnn_keeps_less(tmp_path):
    told = run_example("train_rnn_haiku.py", tmp_path / "rnn.png", "--steps", "3")
    after, before = map(float, re.search(r"backward pass: (\S+) MiB, (\S+) in float32", told).groups())
    assert after < 0.5 * before


@pytest.mark.models
@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_a_keras_network_learns_with_float32_variables(precision, tmp_path):
    if importlib.util.find_spec("keras") is None:  # imported here, it would ask for its default backend
        pytest.skip("the models extra is not installed")
    told = run_example("train_cnn_keras.py", tmp_path / "cnn.png", "--precision", precision)
    before, after = losses(told)
    assert after < before
    assert "All variables are float32." in told


@pytest.mark.slow
def test_a_pinn_has_one_part_in_float32(tmp_path):
    told = run_example("train_pinn.py", tmp_path / "pinn.png", "--steps", "3")
    assert re.search(r"[89]\d\.\d% of the matmul FLOPs ran in bfloat16; [1-9]\d* matmuls in float32", told)
    with_pin, without = map(float, re.search(r"gradient: (\S+) with the pin, (\S+) without", told).groups())
    assert with_pin < 0.7 * without


@pytest.mark.slow
def test_accumulation_leaves_out_what_overflows(tmp_path):
    told = run_example("train_accumulated.py", tmp_path / "accumulated.png", "--steps", "5", "--accumulate", "3")
    total, left_out = map(int, re.search(r"(\d+) micro-batches, (\d+) of them left out", told).groups())
    stepped, begun = map(int, re.search(r"(\d+) steps of the optimizer, (\d+) micro-batches", told).groups())
    assert total == 15
    assert left_out > 0
    assert 3 * stepped + begun == total - left_out


@pytest.mark.slow
def test_an_edited_policy_makes_the_router_exact(tmp_path):
    told = run_example("edit_policy.py", tmp_path / "policy.png", "--table", str(tmp_path / "mine.toml"))
    assert 'router = "float32"' in (tmp_path / "mine.toml").read_text(encoding="utf-8")
    assert re.search(r"^router +- +float32$", told, re.MULTILINE)
    default, mine = map(float, re.search(r"gradient of router *│ (\S+) *│ (\S+)", told).groups())
    assert mine < 0.5 * default


@pytest.mark.slow
def test_the_sharded_example_gathers_low(tmp_path):
    told = run_example("train_sharded.py", tmp_path / "loss.png", "--devices", "8", "--steps", "2")
    assert "Everything that is gathered is bfloat16." in told
    sent = {tuple(cells[:3]): cells[3:] for cells in re.findall(r"│ *(.*?) *│" + r" *(.*?) *│" * 4, told)}
    assert float(sent["data", "all-gather", "bfloat16"][1]) == pytest.approx(0.459)
    assert sent["data", "all-gather", "float32"] == ("0.918", "0.000")
    assert sent["data", "all-reduce", "float32"] == ("0.672", "0.672")
    assert sent["model", "all-reduce", "float32"][1] == "0.000"


@pytest.mark.slow
def test_processes_that_are_killed_end_as_if_they_were_not(tmp_path):
    told = run_example("train_processes.py", tmp_path / "loss.png", "--folder", str(tmp_path / "runs"))
    assert re.search(r"scale \d+, [1-9]\d* steps skipped in all", told)
    assert re.search(r"Started again after step 5: the same bits", told)
    assert float(re.search(r"for a while: (\S+) away", told)[1]) < 1e-3
