"""Policies that quantise: which matmuls, the words of a table, reports, and errors."""

import jax
import jax.numpy as jnp
import pytest
from helpers import normal, raises, shape
from jax import lax

import jaxamp

DEFAULT = dict(jaxamp.load_policy("default"))
BIG, SMALL = 4096, 256


def network(ws, x):
    """A first layer, two large ones, a small one, attention scores, and a last one."""
    x = jnp.tanh(x @ ws["first"])
    with jax.named_scope("block"):
        x = jnp.tanh(x @ ws["large"])
        with jax.named_scope("small"):
            y = jnp.tanh(x @ ws["down"])
    h = y.reshape(16, 256, SMALL)
    scores = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", h, h))
    y = jnp.einsum("bqk,bkd->bqd", scores, h).reshape(BIG, SMALL)
    x = x + jnp.tanh(y @ ws["up"]) @ ws["large"]
    return jnp.sum((x @ ws["last"]) ** 2)


WS = {name: shape(BIG, BIG) for name in ("first", "large", "last")}
ARGS = WS | {"down": shape(BIG, SMALL), "up": shape(SMALL, BIG)}, shape(BIG, BIG)


def formats(policy="fp8", **options):
    report = jaxamp.amp_report(network, amp_policy=policy, backward=False, **options)(*ARGS)
    return [(row.multiplied, row.reason) for row in report.matmuls for _ in range(row.times)]


def test_fp8_is_for_large_matmuls_between_the_first_and_the_last():
    found = sorted(formats())
    assert [name for name, _ in found].count("e4m3") == 2
    reasons = " ".join(reason for name, reason in found if name == "bfloat16")
    for why in (
        "the first layer",
        "the last layer",
        "two activations",
        "too small: 1/(1/m + 1/n + 1/k) is 228, below 1024",
    ):
        assert why in reasons
    assert {name for name, _ in found} == {"e4m3", "bfloat16"}


def test_a_scope_overrides_each():
    policy = dict(jaxamp.load_policy("fp8"))
    rule = policy[lax.dot_general_p]
    assert [n for n, _ in formats(policy | {"block": jaxamp.use_compute_precision})].count("e4m3") == 1
    assert [n for n, _ in formats(policy | {"small": rule})].count("e4m3") == 3


def test_flops_by_format_in_the_totals_of_a_report():
    report = jaxamp.amp_report(network, amp_policy="fp8")(*ARGS)
    assert set(report.matmul_flops) == {"e4m3", "e5m2", "bfloat16"}
    assert 2 * report.matmul_flops["e4m3"] == report.matmul_flops["e5m2"]


def test_the_compute_dtype_is_bfloat16_unless_it_is_given():
    assert jaxamp.amp_report(network, amp_policy="fp8", backward=False)(*ARGS).compute_dtype == "bfloat16"
    assert jaxamp.amp_report(network, backward=False)(*ARGS).compute_dtype == "float16"
    kinds = {name for name, _ in formats(compute_dtype=jnp.float16)}
    assert kinds == {"e4m3", "float16"}


def test_float16_does_not_overflow_before_it_is_scaled():
    x, w = normal(0, 64, 512), normal(1, 512, 32)
    policy = DEFAULT | {lax.dot_general_p: jaxamp.use_formats()}
    out = jax.jit(jaxamp.amp(lambda x, w: x @ w, amp_policy=policy, compute_dtype=jnp.float16))(x, w)
    assert jnp.isfinite(out).all()


def test_a_table_of_ones_own(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text('extends = "fp8"\n[quantized]\ngradients = "e4m3"\nleast_size = 0\nfirst_layer = true\n')
    rule = jaxamp.load_policy(path)[lax.dot_general_p]
    assert (str(rule.gradients), str(rule.weight_gradients), rule.least_size) == ("e4m3", "e4m3", 0)
    assert (rule.first_layer, rule.last_layer) == (True, False)
    path.write_text('[rules]\nquantized = ["dot_general"]\n[quantized]\noperands = "int8"\ngradients = "compute"\n')
    rule = jaxamp.load_policy(path)[lax.dot_general_p]
    assert (str(rule.operands), rule.gradients, rule.weight_gradients) == ("int8", None, None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ('recipe = "current"', ("got 'recipe'; expected one of operands",)),
        ('operands = "e4m4x"', ("mine.toml", "operands='e4m4x'", "there is no format")),
        (
            'scaling = "currant"',
            ("scaling='currant'; expected 'current' or 'delayed' or 'none'", "Did you mean 'current'"),
        ),
        ("history = 0", ("history=0; expected a number of steps, 1 or more. Write history=16",)),
        ("least_size = -1", ("least_size=-1; expected a number that is not negative",)),
        ('first_layer = "no"', ("first_layer='no'; expected True or False",)),
    ],
)
def test_bad_words_of_a_table(tmp_path, line, expected):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "fp8"\n[quantized]\n{line}\n')
    with raises(ValueError, *expected):
        jaxamp.load_policy(path)


def test_bad_arguments():
    with raises(ValueError, "use_formats got operands='e4mm3'. there is no format", "Write one of"):
        jaxamp.use_formats("e4mm3")
    with raises(TypeError, "use_formats got powers_of_two=1; expected True or False"):
        jaxamp.use_formats(powers_of_two=1)
    with raises(TypeError, "compute_dtype is 'e4mm3'; expected a float of at least 16 bits, or a number format"):
        jaxamp.amp(network, compute_dtype="e4mm3")


def test_gradients_of_weights_in_the_compute_dtype():
    policy = DEFAULT | {lax.dot_general_p: jaxamp.use_formats(weight_gradients="compute")}
    x, w = normal(0, 64, 32), normal(1, 32, 16)
    f = lambda x, w: jnp.sum(jnp.tanh(jnp.sin(x) @ w))
    jaxpr = str(jax.make_jaxpr(jax.grad(jaxamp.amp(f, amp_policy=policy), (0, 1)))(x, w))
    assert jaxpr.count("mixed_dot_general") == 1
    found = jax.grad(jaxamp.amp(f, amp_policy=policy), 1)(x, w)
    assert found.dtype == jnp.float32


def test_a_table_with_formats_of_scopes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(
        'extends = "fp8"\n[quantized]\ngradients = { name = "e5m2", rounding = "stochastic" }\nresults = "e3m2"\n'
        '[quantized.scopes]\nblock = { kept = "e2m1" }\nhead = { operands = "compute", results = "compute" }\n'
    )
    policy = jaxamp.load_policy(path)
    everywhere, block, head = policy[lax.dot_general_p], policy["block"], policy["head"]
    assert everywhere.gradients == jaxamp.format("e5m2", rounding="stochastic")
    assert (str(everywhere.results), everywhere.kept) == ("e3m2", None)
    assert (str(block.operands), str(block.results), str(block.kept)) == ("e4m3", "e3m2", "e2m1")
    assert (head.operands, head.results) == (None, None)
    assert "kept in e2m1" in " ".join(reason for _, reason in formats(policy))


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[quantized.scopes]\nblock = 'e4m3'", ("'block'; expected formats after it", "Write block = { operands =")),
        (
            "[quantized.scopes]\nblock = { keeps = 'e4m3' }",
            ("'keeps'; expected one of", "Did you mean 'kept'"),
        ),
        (
            "[quantized]\nkept = { name = 'e5m2', round = 'nearest' }",
            ("'round' is not an argument of jaxamp.format; expected name, exponent", "Did you mean 'rounding'"),
        ),
        (
            "[scopes]\nblock = 'float32'\n[quantized.scopes]\nblock = { kept = 'e4m3' }",
            (
                r"'block'; expected one rule, but it is in \[scopes\] and in \[quantized.scopes\]",
                "Leave one of them out",
            ),
        ),
        ("[quantized]\nkept = 'e4m3x'", ("got kept='e4m3x'", "there is no format", "Write one of")),
    ],
)
def test_bad_formats_of_a_table(tmp_path, line, expected):
    path = tmp_path / "mine.toml"
    path.write_text(f'extends = "fp8"\n{line}\n')
    with raises(ValueError, "mine.toml", *expected):
        jaxamp.load_policy(path)
