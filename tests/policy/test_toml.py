"""Policies: presets, tables, look-up, and what a bad one is answered with."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LOW, WIDE, dtypes_of, matmul_dtypes, raises
from jax import lax

import jaxamp
from jaxamp._compat import primitives
from jaxamp._policy.lookup import Lookup
from jaxamp._policy.rules import ByTarget

BF16 = np.dtype(jnp.bfloat16)
original, compute, infer = (
    jaxamp.use_original_precision,
    jaxamp.use_compute_precision,
    jaxamp.use_inferred_precision,
)


def find(policy, path, primitive=lax.add_p):
    return Lookup(policy, BF16)(tuple(path.split("/")) if path else (), primitive)


def matmuls(fn, policy, *args):
    return matmul_dtypes(jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(*args))


W = jnp.ones((4, 4))


# -- presets


def test_presets_are_found():
    assert {"default", "conservative", "torch", "fast"} <= set(jaxamp.presets())


@pytest.mark.parametrize("name", jaxamp.presets())
def test_preset_runs_matmuls_low_and_pins_the_stop_scopes(name):
    def fn(w, x):
        with jaxamp.amp_stop():
            x = x @ w
        return x @ w

    assert matmuls(fn, name, W, W) == [WIDE, LOW]


def test_default_policy_is_a_mapping_that_can_be_extended_but_not_changed():
    policy = jaxamp.default_amp_policy | {"head": original}
    assert policy["head"] is original
    assert policy[lax.dot_general_p] is compute
    with pytest.raises(TypeError):
        jaxamp.default_amp_policy["head"] = original


def test_conservative_lowers_matmuls_only():
    fn = lambda w, x: jnp.tanh(x @ w + 1.0) @ w
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy="conservative"))(W, W)
    assert matmul_dtypes(jaxpr) == [LOW, LOW]
    assert dtypes_of("tanh", jaxpr) == dtypes_of("add", jaxpr) == ["float32"]


def test_fast_lets_exp_and_carries_be_low():
    fn = lambda w, x: lax.scan(lambda c, _: (jnp.exp(c @ w), None), x, length=2)[0]
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy="fast"))(W, W)
    assert dtypes_of("exp", jaxpr) == dtypes_of("scan", jaxpr) == ["bfloat16"]


def test_torch_promotes_like_torch():
    fn = lambda w, x, y: ((x @ w) * y) @ w
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy="torch"))(W, W, W)
    assert dtypes_of("mul", jaxpr) == ["float32"]
    assert matmul_dtypes(jaxpr) == [LOW, LOW]


def test_torch_keeps_bias_and_relu_low_between_linear_layers():
    fn = lambda w, b, x: jax.nn.relu(x @ w + b) @ w
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy="torch"))(W, W[0], W)
    assert dtypes_of("add", jaxpr) == dtypes_of("kept_relu", jaxpr) == ["bfloat16"]


def test_a_table_can_be_stricter_for_float16():
    psum = primitives()["psum"]
    assert Lookup(jaxamp.default_amp_policy, np.dtype(jnp.float16))((), psum).rule is original
    assert Lookup(jaxamp.default_amp_policy, BF16)((), psum).rule is infer


def test_an_empty_policy_leaves_everything_original_and_amp_stop_in_force():
    assert matmuls(lambda x: x @ x, {}, W) == [WIDE]
    assert find({lax.add_p: compute}, "amp_stop").rule is original


# -- look-up


def test_primitive_then_default():
    assert find({lax.add_p: compute}, "").rule is compute
    assert find({}, "") == (original, None)
    assert find({"amp_default": compute}, "").rule is compute


def test_outermost_scope_wins():
    policy = {"outer": original, "inner": compute}
    assert find(policy, "outer/inner").key == "outer"
    assert find(policy, "inner/outer").key == "inner"
    assert find(policy, "x/inner/outer").key == "inner"


def test_amp_stop_around_a_keyed_scope_wins_and_inside_it_loses():
    policy = jaxamp.default_amp_policy | {"layer": compute}
    assert find(policy, "amp_stop/layer").key == "amp_stop"
    assert find(policy, "layer/amp_stop").key == "layer"


@pytest.mark.parametrize("scope", ["amp_stop", "amp_step", "amp_default"])
def test_stop_scopes_pin_and_can_be_overridden(scope):
    def fn(x):
        with jax.named_scope(scope):
            return x @ x

    assert matmuls(fn, "default", W) == [WIDE]
    assert matmuls(fn, jaxamp.default_amp_policy | {scope: compute}, W) == [LOW]


def test_pair_before_name_before_glob_at_one_scope():
    pair, name, glob = ("attention", lax.add_p), "attention", "att*"
    assert find({glob: compute, name: original, pair: infer}, "attention").key == pair
    assert find({glob: compute, name: original, pair: infer}, "attention", lax.mul_p).key == name
    assert find({glob: compute}, "attention").key == glob


@pytest.mark.parametrize(
    ("glob", "path", "matches"),
    [
        ("*/attention/*", "block/attention/softmax", True),
        ("*/attention/*", "block/attention", True),
        ("*/attention/*", "attention", True),
        ("*/attention/*", "block/attentive", False),
        ("block_?", "block_3", True),
        ("block_?", "model/block_3/mlp", True),
        ("block_?", "block_13", False),
        ("block_1/mlp", "model/block_1/mlp", True),
        ("block_1/mlp", "model/block_1/x/mlp", False),
        ("block_*/mlp", "model/block_1/mlp/dense", True),
        ("block_*/mlp", "model/block_1/attention", False),
    ],
)
def test_globs_match_the_scope_path(glob, path, matches):
    assert (find({glob: compute}, path).key == glob) == matches


def test_glob_pairs():
    key = ("*/attention/*", lax.add_p)
    assert find({key: compute}, "block/attention").key == key
    assert find({key: compute}, "block/attention", lax.mul_p).key is None


def test_scopes_are_matched_under_transforms_and_in_nested_bodies():
    def block(w, x):
        with jax.named_scope("head"):
            return lax.scan(lambda c, _: (jax.jit(lambda c: c @ w)(c), None), x, length=2)[0].sum()

    policy = jaxamp.default_amp_policy | {"head": original}
    assert matmuls(block, policy, W, W) == [WIDE]
    assert set(matmuls(jax.grad(block), policy, W, W)) == {WIDE}
    assert set(matmuls(jax.vmap(jax.checkpoint(block), (None, 0)), policy, W, W[None])) == {WIDE}
    assert set(matmuls(jax.grad(block), "default", W, W)) == {LOW}


def test_scopes_around_the_call_are_part_of_the_cache():
    traces = []

    def fn(x):
        traces.append(1)
        return x @ x

    policy = jaxamp.default_amp_policy | {"exact": original}
    amped = jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy)
    x = jnp.full((4, 4), 1.001)
    with jax.named_scope("exact"):
        exact = amped(x)
    low = amped(x)
    assert len(traces) == 2
    np.testing.assert_array_equal(exact, fn(x))
    assert not np.array_equal(low, exact)


def test_unmatched_keys_are_told():
    def fn(x):
        with jax.named_scope("head"):
            return x @ x

    policy = jaxamp.default_amp_policy | {
        "head": infer,
        "haed": original,
        ("head", lax.sin_p): original,
        "*/tail/*": original,
    }
    assert jaxamp.unmatched_keys(fn, amp_policy=policy)(W) == ["haed", ("head", lax.sin_p), "*/tail/*"]
    assert jaxamp.unmatched_keys(fn)(W) == jaxamp.unmatched_keys(fn, amp_policy="fast")(W) == []
    shapes = jax.ShapeDtypeStruct((4, 4), jnp.float32)
    assert "haed" in jaxamp.unmatched_keys(fn, amp_policy=policy)(shapes)


# -- tables of the user


def table(tmp_path, text):
    path = tmp_path / "policy.toml"
    path.write_text(text)
    return path


def test_a_table_of_the_user(tmp_path):
    path = table(
        tmp_path,
        """
        extends = "default"
        [rules]
        float32 = ["tanh"]
        [rules.float16]
        float32 = ["logistic"]
        [scopes]
        head = "float32"
        "*/mlp/*" = { dot_general = "original" }
        """,
    )
    for form in (path, str(path)):
        policy = jaxamp.load_policy(form)
        assert policy[lax.tanh_p] is original
        assert policy[lax.logistic_p] == ByTarget(infer, {"float16": original})
        assert policy["head"] is original
        assert policy["*/mlp/*", lax.dot_general_p] is original
        assert policy[lax.exp_p] is original
    jaxpr = jax.make_jaxpr(jaxamp.amp(lambda x: jnp.tanh(x @ x) @ x, amp_policy=path))(W)
    assert dtypes_of("tanh", jaxpr) == ["float32"]


def test_a_table_extends_another_beside_it(tmp_path):
    (tmp_path / "base.toml").write_text('extends = "conservative"\n[scopes]\nhead = "float32"')
    policy = jaxamp.load_policy(table(tmp_path, 'extends = "base.toml"\n[scopes]\ntail = "float32"'))
    assert policy["head"] is policy["tail"] is original
    assert lax.tanh_p not in policy


@pytest.mark.parametrize(
    ("text", "beats"),
    [
        ('[rules]\ncompute = ["dot_genral"]', ["line 2", "'dot_genral'", "primitive", "Did you mean 'dot_general'?"]),
        ('[rules]\ncompte = ["dot_general"]', ["line 2", "'compte'", "a rule's name", "Did you mean 'compute'?"]),
        ('[rules]\ncompute = "dot_general"', ["line 2", "'compute'", "a list", "compute = ['dot_general']"]),
        (
            '[rules]\ncompute = ["exp"]\n# exp again\nfloat32 = ["log", "exp"]',
            ["'exp'", "one rule", "under 'compute' and under 'float32'", "remove one"],
        ),
        (
            '[rule]\ncompute = ["exp"]',
            ["line 1", "'rule'", "[rules], [scopes], [quantized] or [communication]", "Did you mean 'rules'?"],
        ),
        ('[scopes]\nhead = "flot32"', ["line 2", "'flot32'", "a rule's name", "Did you mean 'float32'?"]),
        ('[scopes]\nhead = { ad = "float32" }', ["line 2", "'ad'", "primitive", "Did you mean"]),
        ('extends = "defualt"', ["line 1", "'defualt'", "a preset's name or the path", "Did you mean 'default'?"]),
        ("a = " + "[" * 5000, ["policy.toml", "not a TOML table", "[rules] and [scopes]"]),
        ("extends = 3", ["line 1", "'extends'", "a preset's name", 'extends = "default"']),
        ("rules = 3", ["line 1", "'rules'", "a section", "[rules] on a line of its own"]),
        ('scopes = "x"', ["line 1", "'scopes'", "a section", "[scopes] on a line of its own"]),
        ('[rules]\nfloat16 = ["div"]', ["line 2", "'float16'", "a section", "[rules.float16] on a line of its own"]),
        ('[rules]\nfloat32 = [["tanh"]]', ["\"['tanh']\"", "the name of a JAX primitive", "'dot_general'"]),
        ('extends = "policy.toml"', ["line 1", "'policy.toml'", "doesn't extend itself", 'extends = "default"']),
        ("[rules\n", ["policy.toml", "not a TOML table", "line 1", "[rules] and [scopes]"]),
    ],
)
def test_a_bad_table_is_told_where_and_what_instead(tmp_path, text, beats):
    with pytest.raises(ValueError) as error:
        jaxamp.amp(lambda x: x, amp_policy=table(tmp_path, text))
    for beat in ["policy.toml", *beats]:
        assert beat in str(error.value)


def test_a_table_that_is_not_utf8_is_named_and_a_byte_order_mark_is_left_out(tmp_path):
    path = tmp_path / "policy.toml"
    for content, byte in ((bytes(range(256)), 128), ("description = 'é'".encode("latin-1"), 15)):
        path.write_bytes(content)
        with raises(ValueError, "policy.toml", f"byte {byte} is not UTF-8 text; expected a policy table", "Save it"):
            jaxamp.load_policy(path)
    path.write_text("extends = 'conservative'", encoding="utf-8-sig")
    assert jaxamp.load_policy(path) == jaxamp.load_policy("conservative")


def test_a_chain_of_tables_may_be_long_but_not_endless(tmp_path):
    for i in range(1200):
        (tmp_path / f"{i}.toml").write_text(f'extends = "{i + 1}.toml"')
    with raises(ValueError, "got '.*.toml'; expected at most 50 tables that extend one another", "Write extends"):
        jaxamp.load_policy(tmp_path / "0.toml")
    (tmp_path / "30.toml").write_text('extends = "default"')
    assert jaxamp.load_policy(tmp_path / "0.toml") == jaxamp.load_policy("default")


# -- bad input


@pytest.mark.parametrize("dtype", [jnp.int32, bool, None, "float33"])
def test_a_precision_that_is_no_float_is_refused(dtype):
    with raises(TypeError, "use_precision got the dtype", "expected a float", r"use_precision\(jnp.float32\)"):
        jaxamp.use_precision(dtype)


@pytest.mark.parametrize(
    ("policy", "kind", "beats"),
    [
        ({1: original}, TypeError, ["the key 1", "of type int", "expected a primitive", "jax.lax.add_p"]),
        ({("a", "b"): original}, TypeError, ["('a', 'b')", "tuple", "pair", "('attention', jax.lax.add_p)"]),
        ({lax.add_p: 32}, TypeError, ["is 32", "expected a rule", "jaxamp.use_original_precision"]),
        ("defualt", ValueError, ["'defualt'", "expected a preset", "Did you mean 'default'?"]),
        ("nowhere.toml", FileNotFoundError, ["'nowhere.toml'", "no file", "preset's name: "]),
        (3, TypeError, ["3, of type int", "a mapping, a preset's name or a path", "amp_policy='default'"]),
    ],
)
def test_a_bad_policy_is_refused_when_it_is_given(policy, kind, beats):
    with pytest.raises(kind) as error:
        jaxamp.amp(lambda x: x, amp_policy=policy)
    for beat in beats:
        assert beat in str(error.value)


@pytest.mark.parametrize(
    ("rule", "beats"),
    [
        (lambda c, o, *xs, **p: (xs[:1], p), ["returned 1 operands for dot_general", "expected 2", "leaves alone"]),
        (lambda c, o, *xs, **p: list(xs), ["returned list", "expected a pair", "return invars, bind_params"]),
    ],
)
def test_a_rule_of_the_wrong_arity_is_told(rule, beats):
    with pytest.raises(TypeError) as error:
        jaxamp.amp(lambda x: x @ x, amp_policy={lax.dot_general_p: rule})(W)
    for beat in beats:
        assert beat in str(error.value)
