"""What a policy says of values that go from device to device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, raises

import jaxamp
from jaxamp import COMMUNICATION, Communication
from jaxamp._policy.lookup import Lookup

BF16 = np.dtype(jnp.bfloat16)
DEFAULT = dict(jaxamp.load_policy("default"))
W = jnp.ones((4, 4))


def asked(policy, path=""):
    return Lookup(policy, BF16).communication(tuple(path.split("/")) if path else ())


def table(tmp_path, text, name="table.toml"):
    path = tmp_path / name
    path.write_text(text)
    return path


@pytest.mark.parametrize("name", jaxamp.presets())
def test_presets_gather_low_and_sum_in_float32(name):
    assert asked(jaxamp.load_policy(name)) == Communication("compute", "float32")


def test_the_outermost_scope_wins():
    policy = DEFAULT | {
        COMMUNICATION: Communication(reduce="compute"),
        ("head", COMMUNICATION): Communication(gather="float32"),
        ("*/norm", COMMUNICATION): Communication(reduce="wire"),
        "head": jaxamp.use_original_precision,  # a rule is another thing
    }
    assert asked(policy).reduce == "compute"
    assert asked(policy, "body").reduce == "compute"
    assert asked(policy, "head").gather == "float32"
    assert asked(policy, "block/norm").reduce == "wire"
    assert asked(policy, "head/norm").gather == "float32"


def test_a_table(tmp_path):
    path = table(
        tmp_path,
        """
        extends = "default"
        [communication]
        reduce = "compute"
        [communication.scopes]
        head = { gather = "float32" }
        """,
    )
    policy = jaxamp.load_policy(path)
    assert asked(policy) == Communication("compute", "compute")
    assert asked(policy, "head") == Communication("float32", "compute")
    more = jaxamp.load_policy(table(tmp_path, f'extends = "{path}"\n[communication]\ngather = "float32"', "more.toml"))
    assert asked(more) == Communication("float32", "compute")
    assert asked(more, "head") == Communication("float32", "compute")


def test_gradients_of_a_scope_come_out_low():
    def loss(ws, x):
        for name, w in zip(("body", "head"), ws, strict=True):
            with jax.named_scope(name):
                x = jnp.tanh(x @ w)
        return jnp.sum(x)

    policy = DEFAULT | {("head", COMMUNICATION): Communication(reduce="compute")}
    jaxpr = jax.make_jaxpr(jax.grad(AMP(loss, amp_policy=policy)))([W, W], W)
    before = jax.make_jaxpr(jax.grad(AMP(loss)))([W, W], W)
    assert all(aval.dtype == jnp.float32 for aval in jaxpr.out_avals)
    count = lambda jaxpr: str(jaxpr).count("mixed_dot_general")
    assert count(jaxpr) == count(before) - 1 == 1


def test_keys_that_matched_nothing():
    policy = DEFAULT | {
        COMMUNICATION: Communication(reduce="compute"),
        ("heads", COMMUNICATION): Communication(),
        ("head", COMMUNICATION): Communication(gather="float32"),
    }
    found = jaxamp.unmatched_keys(jax.named_scope("head")(lambda w: w @ w), compute_dtype=BF16, amp_policy=policy)(W)
    assert found == [("heads", COMMUNICATION)]


def test_the_command_line_shows_it(tmp_path, capsys):
    from jaxamp.__main__ import main

    text = '[communication]\ngather = "float32"\n[communication.scopes]\nhead = { reduce = "compute" }'
    assert main(["show", str(table(tmp_path, f'extends = "default"\n{text}'))]) == 0
    shown = capsys.readouterr().out
    assert "between devices: gather float32, reduce float32" in shown
    assert "gather float32, reduce compute" in shown.split("head: communication")[1]


# -- bad input


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('gather = "bfloat16"', ("line 2: got 'bfloat16'", "expected compute or float32 after gather")),
        ('reduce = "compte"', ("got 'compte'", "expected float32 or compute or wire", "Did you mean 'compute'")),
        ('reduces = "compute"', ("got 'reduces'", "expected gather, reduce", "Did you mean 'reduce'")),
        ("gather = 3", ("got '3'", "expected compute or float32")),
        ('[communication.scopes]\nhead = "compute"', ("got 'head'", "expected gather or reduce", "Write head = {")),
        ('[communication.scopes]\nhead = { gather = "low" }', ("line 3: got 'low'", "expected compute or float32")),
        ("scopes = 3", ("got 'scopes'", "expected a section", "communication.scopes")),
    ],
)
def test_bad_tables(tmp_path, text, words):
    with raises(ValueError, *words):
        jaxamp.load_policy(table(tmp_path, f"[communication]\n{text}"))


def test_bad_words():
    with raises(ValueError, "Communication got reduce='flaot32'", "expected 'float32' or", "Did you mean 'float32'"):
        Communication(reduce="flaot32")
    with raises(ValueError, "Communication got gather=3; expected 'compute' or 'float32'", "Write Communication"):
        Communication(gather=3)
    for key in (COMMUNICATION, ("head", COMMUNICATION)):
        with raises(TypeError, "amp_policy", "expected a Communication", "Write for example"):
            jaxamp.amp(lambda x: x, amp_policy=DEFAULT | {key: jaxamp.use_original_precision})
