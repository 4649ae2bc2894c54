"""What goes over the wire, read from programs compiled for eight GPUs without having them."""

import collections

import gpu_compiler
import pytest
import sharded_programs

GATHERED = [name for name in sharded_programs.NAMES if name != "wide reader"]


@pytest.fixture(scope="module")
def answers():
    why = gpu_compiler.why_not(any_jax=True)
    if why:
        pytest.skip(why)
    asked = [(name, side) for name in sharded_programs.NAMES for side in (False, True)]
    return dict(zip(asked, gpu_compiler.ask([["wire", *each] for each in asked]), strict=True))


def sent(rows):
    """Bytes by kind, whether it gathers or sums, and dtype."""
    total = collections.Counter()
    for kind, dtype, size, _, _ in rows:
        total["sum" if kind in ("all-reduce", "reduce-scatter") else "gather", dtype] += size
    return dict(total)


@pytest.mark.parametrize("name", GATHERED)
def test_weights_are_gathered_low_and_gradients_are_summed_in_float32(answers, name):
    written, found = sent(answers[name, False]), sent(answers[name, True])
    assert set(written) == {("gather", "float32"), ("sum", "float32")}
    assert found["gather", "bfloat16"] * 2 == written["gather", "float32"]
    assert ("gather", "float32") not in found
    if name == "two axes":  # activations are summed over the other axis, low
        activations = [row for row in answers[name, True] if row[3] == ["t"]]
        assert {dtype for _, dtype, *_ in activations} == {"bfloat16"}
    else:
        assert found["sum", "float32"] == written["sum", "float32"]
        assert ("sum", "bfloat16") not in found


@pytest.mark.parametrize("name", sharded_programs.NAMES)
def test_there_are_no_more_collectives_than_in_float32(answers, name):
    count = lambda rows: collections.Counter(kind for kind, *_ in rows)
    assert not count(answers[name, True]) - count(answers[name, False])


def test_a_weight_that_an_exponential_reads_is_gathered_in_float32(answers):
    assert sent(answers["wide reader", True]) == sent(answers["wide reader", False])


def test_axes_and_lines_are_known(answers):
    rows = answers["two axes", True]
    assert {tuple(axes) for *_, axes, _ in rows} == {("d",), ("t",)}
    assert any("sharded_programs.py:" in source for *_, source in rows)
