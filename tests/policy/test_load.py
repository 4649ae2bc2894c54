"""Policies written in Python: rules by their names, and keys that were meant for something else."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, LOW, WIDE, W, dtypes_of, matmuls, raises
from jax import lax

import jaxamp
from jaxamp._policy.rules import WORDS


def tanh_of_matmul(x):
    return jnp.tanh(x @ x)


@pytest.mark.parametrize("word", WORDS)
def test_a_rule_may_be_given_by_its_name(word):
    policy = jaxamp.load_policy({lax.tanh_p: word, ("head", lax.exp_p): word, "body": jaxamp.use_precision("float32")})
    assert policy[lax.tanh_p] is policy["head", lax.exp_p] is WORDS[word]
    assert policy["body"] == jaxamp.use_precision(jnp.float32)


def test_names_and_rules_mean_the_same():
    for rule in ("compute", jaxamp.use_compute_precision):
        jaxpr = jax.make_jaxpr(AMP(tanh_of_matmul, amp_policy=jaxamp.default_amp_policy | {lax.tanh_p: rule}))(W)
        assert dtypes_of("tanh", jaxpr) == ["bfloat16"]
    assert matmuls(AMP(tanh_of_matmul, amp_policy=jaxamp.default_amp_policy | {lax.dot_general_p: "float32"}), W) == [
        WIDE
    ]


def test_quantized_is_the_rule_that_the_policy_has():
    rule = jaxamp.use_formats("e2m1")
    assert jaxamp.load_policy({lax.dot_general_p: rule, "body": "quantized"})["body"] is rule
    assert jaxamp.load_policy({"body": "quantized"})["body"] == jaxamp.use_formats()


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("flaot32", ("is 'flaot32'; expected a rule, or one of the names 'compute', 'float32'", "mean 'float32'")),
        ("bfloat16", ("is 'bfloat16'; expected a rule", r"Write jaxamp.use_precision\('bfloat16'\)")),
        ("zzz", ("is 'zzz'; expected a rule", "Write for example 'float32'")),
    ],
)
def test_a_name_that_is_no_rules_is_told(rule, words):
    with raises(ValueError, *words):
        jaxamp.amp(tanh_of_matmul, amp_policy={lax.tanh_p: rule})


def test_something_else_than_a_rule_is_told():
    with raises(TypeError, "is 3; expected a rule", "'float32'", "Write for example"):
        jaxamp.load_policy({lax.tanh_p: 3})
    for rule in (jnp.float32, np.float32, jnp.dtype("float32"), jaxamp.use_precision):
        for key in (lax.tanh_p, "head"):
            with raises(TypeError, "expected a rule", "Write for example"):
                jaxamp.amp(tanh_of_matmul, amp_policy={key: rule})


# -- a primitive's name as a key


@pytest.mark.parametrize("key", ["jax.lax.tanh_p", "lax.tanh_p", "tanh_p"])
def test_a_primitive_in_quotes_is_told(key):
    with raises(TypeError, f"has the key '{key}', a string", "names of scopes", "Write jax.lax.tanh_p without quotes"):
        jaxamp.load_policy({key: "float32"})


def in_scope(x):
    with jax.named_scope("tanh"):
        return tanh_of_matmul(x)


def test_the_name_of_a_primitive_that_is_no_scope_is_told():
    words = ("has the key 'tanh', the name of a scope", "no operation is in such a scope", r"jax\.lax\.tanh_p", "open")
    with pytest.warns(UserWarning, match="(?s)" + ".*".join(words)):
        jax.make_jaxpr(AMP(tanh_of_matmul, amp_policy=jaxamp.default_amp_policy | {"tanh": "float32"}))(W)


def test_where_the_meaning_is_plain_nothing_is_told(tmp_path):
    table = tmp_path / "own.toml"
    table.write_text('extends = "default"\n[scopes]\ntanh = "float32"\n')
    base = jaxamp.default_amp_policy
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert matmuls(AMP(in_scope, amp_policy=base | {"tanh": "float32"}), W) == [WIDE]  # a scope of that name
        assert matmuls(AMP(tanh_of_matmul, amp_policy=base | {"sort": "float32"}), W) == [LOW]  # nothing of that name
        assert matmuls(AMP(tanh_of_matmul, amp_policy=str(table)), W) == [LOW]  # a table says that it is a scope
