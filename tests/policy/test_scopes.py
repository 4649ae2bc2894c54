"""Globs over scopes mean the same in a policy and in a check."""

import contextlib

import jax
import jax.numpy as jnp
import pytest
from helpers import W

import jaxamp
from jaxamp._policy.scopes import covers, is_glob, matches

PATH = ("model", "block_3", "attention", "scores")
KEYS = {
    "attention": True,
    "att*": True,
    "block_?": True,
    "*/attention": True,
    "attention/*": True,
    "*/attention/*": True,
    "model/block_3": True,
    "block_3/attention": True,
    "block_3/scores": False,
    "mlp": False,
    "*/mlp/*": False,
    "attent": False,
    "*": True,
}


@pytest.mark.parametrize("key", KEYS)
def test_keys(key):
    assert covers(key, PATH) == KEYS[key]
    assert covers(key, PATH) == any(matches(key, PATH[:depth]) for depth in range(1, 5))


@pytest.mark.parametrize("key", [key for key in KEYS if key != "*"])
def test_a_policy_and_a_check_agree(key):
    def fn(x):
        with contextlib.ExitStack() as stack:
            for scope in PATH:
                stack.enter_context(jax.named_scope(scope))
            return (x @ x).sum()

    policy = jaxamp.default_amp_policy | {key: jaxamp.use_original_precision}
    report = jaxamp.amp_report(fn, compute_dtype=jnp.bfloat16, amp_policy=policy)(W)
    pinned = report.matmul_flops.keys() == {"float32"}
    assert pinned == KEYS[key]
    with pytest.raises(AssertionError) as raised:
        report.check(low=key, allow_unmatched=True)
    assert ("no matmul is in a scope" in str(raised.value)) == (not KEYS[key])


def test_what_is_a_glob():
    assert [is_glob(key) for key in ("attention", "att*", "a/b", "block_[0-3]", "eqx.nn.Linear")] == [
        False,
        True,
        True,
        True,
        False,
    ]
