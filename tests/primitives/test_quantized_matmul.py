"""Quantised matmuls: values beside float64 and the rounded operands, transforms, and what is kept."""

import functools

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import equations, error, names, normal, raises
from hypothesis import given, settings
from jax import lax

import jaxamp
from jaxamp._number_formats.names import format as number_format
from jaxamp._primitives.quantize import dequantized as values_of
from jaxamp._primitives.quantize import quantize, scale_of

X, W = normal(0, 48, 32), normal(1, 32, 24)
FP8 = functools.partial(
    jaxamp.amp, amp_policy=dict(jaxamp.load_policy("default")) | {lax.dot_general_p: jaxamp.use_formats()}
)
DTYPES = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}


def rounded(x, name, powers_of_two=False):
    """An array in fp8 with a scale, by NumPy in float64: the scale has four bits, or one."""
    x = np.asarray(x, np.float64)
    finite = np.abs(np.where(np.isfinite(x), x, 0)).max(initial=0)
    if finite == 0:
        return x
    scale = max(finite / float(ml_dtypes.finfo(DTYPES[name]).max), 2.0**-126)
    step = 2.0 ** (np.floor(np.log2(scale)) - (0 if powers_of_two else 3))
    scale = np.ceil(scale / step * (1 - 2.0**-24)) * step
    scaled = x.astype(np.float32) * (np.float32(1) / np.float32(scale))
    return scaled.astype(DTYPES[name]).astype(np.float64) * scale


KINDS = {
    "normal": lambda r, n: r.standard_normal(n),
    "heavy": lambda r, n: r.standard_cauchy(n),
    "constant": lambda r, n: np.full(n, 3.7),
    "zero": lambda r, n: np.zeros(n),
    "tiny": lambda r, n: 1e-30 * r.standard_normal(n),
    "huge": lambda r, n: 1e12 * r.standard_normal(n),
    "one large": lambda r, n: np.where(np.arange(np.prod(n)).reshape(n) == 0, 1e5, r.standard_normal(n)),
}


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(list(KINDS)), st.sampled_from(list(KINDS)), st.integers(0, 1000))
def test_values_and_gradients_are_those_of_the_rounded_operands(kind_x, kind_w, seed):
    random = np.random.default_rng(seed)
    x = jnp.asarray(KINDS[kind_x](random, (6, 16)), jnp.bfloat16)
    w = jnp.asarray(KINDS[kind_w](random, (16, 4)), jnp.float32)
    ct = jnp.asarray(random.standard_normal((6, 4)), jnp.bfloat16)
    out, pull = jax.vjp(FP8(lambda x, w: x @ w), x.astype(jnp.float32), w)
    dx, dw = pull(ct.astype(jnp.float32))
    qx, qw, qct = rounded(x, "e4m3"), rounded(w, "e4m3"), rounded(ct, "e5m2")
    for found, expected in ((out, qx @ qw), (dx, qct @ qw.T), (dw, qx.T @ qct)):
        assert np.isfinite(np.asarray(found)).all()
        np.testing.assert_allclose(found, expected, rtol=0, atol=2e-2 * np.abs(expected).max() + 1e-38)


@pytest.mark.parametrize("name", DTYPES)
@pytest.mark.parametrize("powers_of_two", [False, True])
def test_rounding_is_that_of_the_dtype_under_jit(name, powers_of_two):
    x, format_ = normal(3, 64, 64, scale=7.0), number_format(name)

    @jax.jit
    def dequantized(x):
        found = quantize(x, scale_of(x, format_, powers_of_two), format_, jnp.dtype(jnp.bfloat16), 0)
        return values_of(found, format_, jnp.dtype(jnp.float32))

    np.testing.assert_array_equal(dequantized(x), rounded(x, name, powers_of_two))


def test_one_entry_that_is_not_finite_leaves_the_others_exact():
    x = X.at[0, 0].set(jnp.inf)
    out = FP8(lambda x, w: x @ w)(x, W)
    assert not np.isfinite(np.asarray(out[0])).any()  # seen by a loss scaler
    assert error(out[1:], rounded(X, "e4m3")[1:] @ rounded(W, "e4m3")) < 2e-2


def test_dtypes_of_values_and_gradients():
    jaxpr = jax.make_jaxpr(jax.grad(lambda w, x: jnp.sum(jnp.sin(FP8(lambda w, x: jnp.tanh(x @ w) @ w.T)(w, x)))))(W, X)
    dots = [eqn for eqn in equations(jaxpr) if eqn.primitive is lax.dot_general_p]
    operands = [{v.aval.dtype.name for v in eqn.invars} for eqn in dots]
    assert operands == [{"float8_e4m3fn"}] * 2 + [{"float8_e4m3fn", "float8_e5m2"}] * 3
    assert [eqn.outvars[0].aval.dtype.name for eqn in dots].count("float32") == 2  # the gradients of the parameter


def test_the_backward_pass_keeps_no_more_than_without():
    def loss(ws, x):
        for w in ws:
            x = x + jax.nn.silu(x @ w) @ w.T
        return jnp.sum(x**2)

    args = ([normal(i, 64, 256) for i in range(3)], normal(9, 128, 64))
    low = jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16)(*args).after
    assert jaxamp.bytes_kept(loss, compute_dtype="e4m3")(*args).after <= low + 4 * 100  # a scale for each tensor
    plain = jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16, keep="all")(*args).after
    assert jaxamp.bytes_kept(loss, compute_dtype="e4m3", keep="all")(*args).after < 0.9 * plain


def test_vmap_gives_a_batch_one_scale():
    xs = normal(5, 7, 12, 32) * jnp.arange(1.0, 8.0)[:, None, None]
    matmul = FP8(lambda x, w: x @ w)
    expected = rounded(xs, "e4m3") @ rounded(W, "e4m3")
    assert error(jax.vmap(matmul, (0, None))(xs, W), expected) < 1e-2
    gradient = jax.vmap(jax.grad(lambda w, x: matmul(x, w).sum()), (None, 0))(W, xs)
    assert gradient.shape == (7, 32, 24)


@pytest.mark.parametrize("around", [jax.checkpoint, jax.jit, lambda f: lambda *a: lax.cond(True, f, f, *a)])
def test_gradients_through_other_transforms(around):
    loss = lambda x, w: jnp.sum(jnp.tanh(x @ w))
    plain = jax.grad(FP8(loss), 1)(X, W)
    assert error(jax.grad(FP8(around(loss)), 1)(X, W), np.asarray(plain, np.float64)) < 3e-2


@pytest.mark.parametrize("name", ["everything_saveable", "dots_saveable", "nothing_saveable"])
def test_checkpoint_policies_keep_numbers_as_they_are(name):
    policy = getattr(jax.checkpoint_policies, name)
    loss = lambda x, w: jnp.sum(jnp.tanh(jax.checkpoint(lambda x: jnp.tanh(x @ w) @ w.T, policy=policy)(x)))
    plain = lambda x, w: jnp.sum(jnp.tanh(jnp.tanh(x @ w) @ w.T))
    found, expected = (jax.jit(jax.grad(FP8(f), (0, 1)))(X, W) for f in (loss, plain))
    for g, e, exact in zip(found, expected, jax.grad(plain, (0, 1))(X, W), strict=True):
        exact = np.asarray(exact, np.float64)
        assert error(g, exact) < 1.2 * error(e, exact)


def test_scan_over_layers():
    ws = normal(6, 3, 32, 32, scale=0.2)
    loss = lambda ws, x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)
    exact = jax.grad(loss)(ws, X)
    found = jax.jit(jax.grad(FP8(loss)))(ws, X)
    assert error(found, np.asarray(exact, np.float64)) < 0.15
    assert "quantize" in names(jax.make_jaxpr(FP8(loss))(ws, X))


def test_forward_mode_has_tangents_in_the_compute_dtype():
    _, tangent = jax.jvp(FP8(lambda x, w: x @ w), (X, W), (X, jnp.zeros_like(W)))
    assert error(tangent, np.asarray(X, np.float64) @ rounded(W, "e4m3")) < 1e-2


def test_second_derivatives_are_refused():
    loss = FP8(lambda x: jnp.sum(jnp.tanh(x @ W) ** 2))
    with raises(TypeError, "differentiated twice; its second derivative is not defined", "rule 'compute'"):
        jax.jvp(jax.grad(loss), (X,), (X,))


@pytest.mark.parametrize("name", ["e2m1", "mxfp8", "mxfp4", "int8", "nvfp4", "e3m4"])
def test_emulated_formats(name):
    f = jaxamp.amp(lambda x, w: x @ w, compute_dtype=name)
    out, pull = jax.vjp(f, X, W)
    bound = {"int8": 0.03, "e3m4": 0.04, "mxfp8": 0.06}.get(name, 0.25)
    exact = np.asarray(X, np.float64) @ np.asarray(W, np.float64)
    assert 1e-3 < error(out, exact) < bound
    assert [g.dtype for g in pull(out)] == [jnp.float32, jnp.float32]


def test_stochastic_rounding_can_be_repeated_and_has_no_bias():
    format_ = jaxamp.format("e2m1", rounding="stochastic")
    f = jax.jit(jaxamp.amp(lambda x, w: x @ w, compute_dtype=format_))
    w = jnp.asarray(np.random.default_rng(0).choice([-6.0, -4, -3, -2, -1, 1, 2, 3, 4, 6], (32, 24)), jnp.float32)
    exact = np.asarray(X, np.float64) @ np.asarray(w, np.float64)
    np.testing.assert_array_equal(f(X, w), f(X, w))
    many = np.mean([np.asarray(f(X * (1 + 1e-6 * i), w), np.float64) for i in range(64)], axis=0)
    assert error(many, exact) < 0.3 * error(f(X, w), exact)


def test_a_convolution():
    x, w = normal(7, 2, 8, 8, 16), normal(8, 3, 3, 16, 8)
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    exact = jax.vjp(conv, x, w)
    found = jax.vjp(jaxamp.amp(conv, compute_dtype="e4m3"), x, w)
    assert error(found[0], np.asarray(exact[0], np.float64)) < 0.05
    for g, e in zip(found[1](exact[0]), exact[1](exact[0]), strict=True):
        assert g.dtype == jnp.float32
        assert error(g, np.asarray(e, np.float64)) < 0.1


def test_a_layer_that_is_mapped_over_rows():
    """There amp swaps the operands, to save a transpose."""
    w, x = normal(20, 24, 32, scale=0.2), normal(21, 48, 32)
    fn = lambda w, x: jnp.sum(jnp.tanh(jax.vmap(lambda x: w @ x)(x)))
    assert error(jax.grad(FP8(fn))(w, x), jax.grad(fn)(w, x)) < 0.1
    assert names(jax.make_jaxpr(FP8(fn))(w, x)).count("transpose") == 0


def test_a_users_rule_for_tangents_stays_linear():
    @jax.custom_jvp
    def dense(x, w):
        return jnp.sin(x @ w)

    @dense.defjvp
    def _(primals, tangents):
        return jax.jvp(lambda x, w: jnp.sin(x @ w), primals, tangents)

    loss = lambda w, x: jnp.sum(dense(x, w))
    assert error(jax.grad(FP8(loss))(W, X), jax.grad(loss)(W, X)) < 2e-2
    report = jaxamp.amp_report(loss, amp_policy={lax.dot_general_p: jaxamp.use_formats()}, compute_dtype=jnp.bfloat16)
    assert any("custom_jvp rule" in row.reason for row in report(W, X).matmuls)


def one_of_two(x, w):
    return jnp.sum(lax.cond(x[0] > 0, lambda x: jnp.tanh(jnp.tanh(x) @ w), lambda x: x[:24], x))


def one_of_three(x, w):
    branches = [lambda x: jnp.tanh(x @ w), lambda x: x[:24], lambda x: jnp.sin(x @ w) @ w.T @ w]
    return jnp.sum(lax.switch((x[0] > 0).astype(int) + (x[1] > 0).astype(int), branches, x))


@pytest.mark.parametrize("fn", [one_of_two, one_of_three, jax.checkpoint(one_of_three)])
@pytest.mark.parametrize(
    ("formats", "keep"),
    [({}, "auto"), ({}, "matmuls"), ({}, "all"), ({"operands": "mxfp8"}, "auto"), ({"operands": "e3m2"}, "auto")],
)
def test_each_example_of_a_batch_takes_a_branch_of_its_own(formats, fn, keep):
    policy = dict(jaxamp.load_policy("default")) | {lax.dot_general_p: jaxamp.use_formats(**formats)}
    amp = jaxamp.amp(fn, amp_policy=policy, compute_dtype=jnp.bfloat16, keep=keep)
    each = jax.vmap(jax.grad(amp, (0, 1)), (0, None))(X, W / 6)
    alone = [jax.grad(amp, (0, 1))(x, W / 6) for x in X[:4]]
    expected = jax.vmap(jax.grad(fn, (0, 1)), (0, None))(X, W / 6)
    for i, wanted in enumerate(expected):
        assert error(each[i], wanted) < 0.3
        np.testing.assert_allclose(each[i][:4], jnp.stack([one[i] for one in alone]), atol=0.3 * jnp.abs(wanted).max())


@pytest.mark.parametrize("formats", [{}, {"gradients": None}, {"kept": "e4m3"}, {"operands": "mxfp8"}])
def test_it_is_transposed_as_a_linear_function_of_one_operand(formats):
    policy = dict(jaxamp.load_policy("default")) | {lax.dot_general_p: jaxamp.use_formats(**formats)}
    amp = functools.partial(jaxamp.amp, amp_policy=policy, compute_dtype=jnp.bfloat16)
    ct = normal(7, 48, 24)
    for linear, operand in ((lambda w: jnp.tanh(X) @ w, W), (lambda x: x @ jnp.tanh(W), X)):
        (found,) = jax.linear_transpose(amp(linear), operand)(ct)
        (expected,) = jax.vjp(amp(linear), operand)[1](ct)
        np.testing.assert_array_equal(found, expected)
