"""Policies on the command line: listed, shown, and compared."""

import jax
import pytest
from commands import answer, document, table
from jax import lax

import jaxamp
from jaxamp._cli.policies import differences
from jaxamp._compat import primitives


def test_policies_lists_presets_with_their_descriptions(capsys):
    code, out, err = answer(capsys, "policies")
    assert (code, err) == (0, "")
    assert [line.split()[0] for line in out.splitlines()] == list(jaxamp.presets())
    assert "Matmuls and convolutions low, everything else as written." in out
    code, data = document(capsys, "policies")
    assert (code, set(data)) == (0, {"presets"})
    assert [preset["name"] for preset in data["presets"]] == list(jaxamp.presets())
    assert all(
        set(preset) == {"name", "description", "extends"} and preset["description"] for preset in data["presets"]
    )


def test_show_groups_primitives_by_rule(capsys):
    code, out, err = answer(capsys, "show", "default")
    assert (code, err) == (0, "")
    assert "\ncompute   conv_general_dilated, dot_general, dot_product_attention, ragged_dot_general\n" in out
    assert "\nwhere the compute dtype is float16\nfloat32   psum, psum_invariant, reduce_scatter\n" in out
    assert "\nscopes\namp_default  float32\n" in out
    assert max(map(len, out.splitlines())) <= 100


@pytest.mark.parametrize(("dtype", "rule"), [("f16", "float32"), ("float16", "float32"), ("bf16", "infer")])
def test_show_for_one_compute_dtype(capsys, dtype, rule):
    code, out, _ = answer(capsys, "show", "default", "--dtype", dtype)
    assert code == 0
    assert "where the compute dtype is" not in out
    assert out.startswith("default, compute dtype ")
    _, data = document(capsys, "show", "default", "--dtype", dtype)
    assert data["dtype"] == jax.numpy.dtype({"f16": "float16", "bf16": "bfloat16"}.get(dtype, dtype)).name
    (psum,) = [entry for entry in data["entries"] if entry["primitive"] == "psum"]
    assert psum == {"scope": None, "primitive": "psum", "rule": rule, "by_dtype": {}}


@pytest.mark.parametrize("name", jaxamp.presets())
def test_show_has_each_entry_of_a_policy(capsys, name):
    code, data = document(capsys, "show", name)
    assert (code, set(data)) == (0, {"name", "description", "extends", "dtype", "entries"})
    assert len(data["entries"]) == len(jaxamp.load_policy(name))
    assert all(set(entry) == {"scope", "primitive", "rule", "by_dtype"} for entry in data["entries"])


def test_show_a_table_of_the_user(capsys, tmp_path):
    text = """
    description = "Mine."
    extends = "conservative"
    [rules.float16]
    original = ["dot_general"]
    [scopes]
    head = "float32"
    "*/mlp/*" = { dot_general = "infer" }
    """
    path = table(tmp_path, text)
    code, out, _ = answer(capsys, "show", path)
    assert code == 0
    for line in ("Mine.", "extends conservative", "head                  float32", "*/mlp/*: dot_general  infer"):
        assert line in out.splitlines()
    _, data = document(capsys, "show", path)
    entries = {(entry["scope"], entry["primitive"]): entry for entry in data["entries"]}
    assert entries[None, "dot_general"]["by_dtype"] == {"float16": "float32"}
    assert entries["*/mlp/*", "dot_general"]["rule"] == "infer"
    assert (data["description"], data["extends"]) == ("Mine.", "conservative")


def test_diff_is_silent_about_what_is_the_same(capsys, tmp_path):
    assert answer(capsys, "diff", "default", "default") == (0, "default and default are the same.\n", "")
    same = table(tmp_path, 'extends = "default"\n[rules]\nfloat32 = ["exp"]')
    assert document(capsys, "diff", "default", same) == (
        0,
        {"a": "default", "b": same, "dtype": None, "differences": []},
    )


def test_diff_tells_key_and_rules(capsys):
    code, out, err = answer(capsys, "diff", "default", "fast")
    assert (code, err) == (1, "")
    rows = [line.split(maxsplit=2) for line in out.splitlines()]
    assert rows[0] == ["default", "fast"]
    for row in (["log", "float32", "infer"], ["exp", "float32", "infer (float16: float32)"], ["scan", "-", "infer"]):
        assert row in rows
    assert out.endswith("- is not named there.\n")
    code, data = document(capsys, "diff", "default", "fast")
    assert (code, set(data)) == (1, {"a", "b", "dtype", "differences"})
    found = {row["primitive"]: row for row in data["differences"]}
    assert found["exp"] == {
        "scope": None,
        "primitive": "exp",
        "a": {"rule": "float32", "by_dtype": {}},
        "b": {"rule": "infer", "by_dtype": {"float16": "float32"}},
    }
    assert found["scan"]["a"] is None


def test_diff_for_one_compute_dtype(capsys):
    code, data = document(capsys, "diff", "default", "fast", "--dtype", "f16")
    names = {row["primitive"] for row in data["differences"]}
    assert (code, data["dtype"]) == (1, "float16")
    assert "log" in names
    assert "exp" not in names


def test_diff_takes_as_written_for_what_is_not_named(capsys, tmp_path):
    named = table(tmp_path, 'extends = "conservative"\n[rules]\nfloat32 = ["exp", "cholesky"]')
    assert answer(capsys, "diff", "conservative", named)[0] == 0
    scope = table(tmp_path, 'extends = "conservative"\n[scopes]\nhead = "float32"')
    code, out, _ = answer(capsys, "diff", "conservative", scope)
    assert code == 1
    assert [line.split() for line in out.splitlines()][1] == ["head", "-", "float32"]


def test_a_primitive_with_a_body_that_is_named_is_another_one():
    policy = jaxamp.load_policy("default")
    original = jaxamp.use_original_precision
    assert [d.primitive for d in differences(policy, {**policy, primitives()["scan"]: original})] == ["scan"]
    low = {**policy, "amp_default": jaxamp.use_compute_precision}
    named = {**low, primitives()["cholesky"]: original}
    assert [d.primitive for d in differences(low, named)] == ["cholesky"]
    assert differences({**policy, lax.exp_p: jaxamp.use_inferred_precision}, policy)[0].primitive == "exp"
