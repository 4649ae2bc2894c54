"""Results, gradients and kept activations of matmuls in number formats: bits, float64, jaxprs and transforms."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import BF16, assert_same_bits, equations, error, in_float64, kept, names, normal, raises
from jax import lax

import jaxamp

MATMULS = (lax.dot_general_p, lax.conv_general_dilated_p)
DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
}
X, W = normal(0, 48, 32), normal(1, 32, 24, scale=0.3)


def amp(fn, keep="auto", **words):
    rule = jaxamp.use_formats(**{"operands": "compute", "gradients": "compute"} | words)
    policy = jaxamp.default_amp_policy | dict.fromkeys(MATMULS, rule)
    return jaxamp.amp(fn, amp_policy=policy, compute_dtype=BF16, keep=keep)


def in_dtype(x, name):
    """Rounded by ml_dtypes, and saturated."""
    top = float(ml_dtypes.finfo(DTYPES[name]).max)
    return np.clip(np.asarray(x, np.float32), -top, top).astype(DTYPES[name]).astype(np.float32)


def mlp(ws, x):
    for w in ws:
        x = jnp.tanh(x @ w)
    return jnp.sum(x**2)


WS = [normal(i, 32, 32, scale=0.2) for i in range(3)]


# -- results


@pytest.mark.parametrize("name", DTYPES)
def test_results_are_the_numbers_of_the_dtype(name):
    plain, matmul = (amp(lambda x, w: x @ w, **words) for words in ({}, {"results": name, "scaling": "none"}))
    for scale in (1.0, 2.0**-7, 100.0):
        np.testing.assert_array_equal(jax.jit(matmul)(X, scale * W), in_dtype(plain(X, scale * W), name))


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1"])
def test_results_with_a_scale_stay_within_the_bound_of_the_format(name):
    exact, format_ = in_float64(lambda x, w: x @ w, X, 1e-4 * W), jaxamp.format(name)
    found = jax.jit(amp(lambda x, w: x @ w, results=name))(X, 1e-4 * W)
    largest = np.abs(exact).max()
    # half a unit in the last place, or of the smallest number; the scale is rounded up by at most an eighth
    bound = np.maximum(np.abs(exact) * format_.epsilon / 2, 1.2 * largest / format_.max * format_.smallest_subnormal)
    assert np.all(np.abs(found - exact) <= bound + 2**-7 * largest)
    assert len(np.unique(np.abs(found))) <= 2 ** (format_.bits - 1)


def test_cotangents_pass_rounded_results_as_they_are():
    loss = lambda w, x: jnp.sum((x @ w) * X[:, :24])
    assert_same_bits(jax.grad(amp(loss, results="e2m1"))(W, X), jax.grad(amp(loss))(W, X))


@pytest.mark.parametrize("compute_dtype", [jnp.bfloat16, jnp.float16])
def test_results_stay_finite_in_the_compute_dtype(compute_dtype):
    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_formats("compute", results="e4m3")}
    f = jaxamp.amp(lambda x, w: x @ w, amp_policy=policy, compute_dtype=compute_dtype)
    assert jnp.isfinite(f(jnp.full((2, 4), 255.0), jnp.full((4, 2), 64.0))).all()  # 65,280: float16 ends at 65,504
    assert not jnp.isfinite(f(jnp.full((2, 4), jnp.inf), W[:4])).any()


def test_stochastic_rounding_of_results_has_no_bias():
    f = jax.jit(amp(lambda x, w: x @ w, results=jaxamp.format("e2m1", rounding="stochastic")))
    exact = in_float64(lambda x, w: x @ w, X, W)
    assert_same_bits(f(X, W), f(X, W))
    many = np.mean([f(X * (1 + 0.01 * i), W) / (1 + 0.01 * i) for i in range(64)], axis=0)
    assert error(many, exact) < 0.3 * error(f(X, W), exact)


# -- gradients that leave


@pytest.mark.parametrize("name", ["e4m3", "e2m1"])
def test_gradients_that_leave_are_the_numbers_of_the_dtype(name):
    loss = lambda w, x: jnp.sum(jnp.sin(x @ w))
    plain, found = (
        jax.jit(jax.grad(amp(loss, **words), (0, 1)))(W, X)
        for words in ({}, {"gradient_results": name, "scaling": "none"})
    )
    for p, f in zip(plain, found, strict=True):
        assert f.dtype == jnp.float32
        np.testing.assert_array_equal(f, in_dtype(p, name))
    assert_same_bits(amp(loss, gradient_results=name)(W, X), amp(loss)(W, X))


# -- kept activations


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "e3m2"])
@pytest.mark.parametrize("keep", ["auto", "matmuls"])
def test_what_is_kept_is_bytes_and_the_forward_pass_does_not_change(name, keep):
    f, plain = amp(mlp, keep, kept=name), amp(mlp, keep)
    assert_same_bits(f(WS, X), plain(WS, X))
    assert [dtype for shape, dtype in kept(f, WS, X) if shape == (48, 32)] == ["uint8"] * 3
    assert [dtype for shape, dtype in kept(plain, WS, X) if shape == (48, 32)] == ["bfloat16"] * 3
    bound = {"e4m3": 0.06, "e5m2": 0.12, "e3m2": 0.12, "e2m1": 0.5}[name]
    for found, close, exact in zip(
        jax.jit(jax.grad(f))(WS, X), jax.grad(plain)(WS, X), in_float64(jax.grad(mlp), WS, X), strict=True
    ):
        assert error(close, exact) < error(found, exact) < bound


def test_the_derivative_of_a_weight_reads_the_bytes():
    """Without sections too: it is that of the activation as ml_dtypes rounds it."""
    loss = lambda w, x: jnp.sum(x @ w)
    f = lambda w, h: amp(lambda w, h: loss(w, jnp.sin(h)), "all", kept="e4m3", scaling="none")(w, h)
    found = jax.grad(f)(W, X)
    rounded = in_dtype(jnp.sin(X).astype(BF16), "e4m3").astype(np.float64)
    assert error(found, rounded.T @ np.ones((48, 24))) < 4e-3
    assert ((48, 32), "uint8") in kept(f, W, X)


def test_formats_of_blocks_are_kept_as_their_numbers():
    exact = in_float64(jax.grad(mlp), WS, X)
    assert error(jax.grad(amp(mlp, kept="mxfp8"))(WS, X)[1], exact[1]) < 0.06


def test_kept_beside_operands_and_gradients_in_formats():
    f = amp(mlp, "all", operands="e4m3", gradients="e5m2", kept="e5m2")
    assert_same_bits(f(WS, X), amp(mlp, "all", operands="e4m3", gradients="e5m2")(WS, X))
    dots = [eqn for eqn in equations(jax.make_jaxpr(jax.grad(f))(WS, X)) if eqn.primitive is lax.dot_general_p]
    found = [tuple(v.aval.dtype.name for v in eqn.invars) for eqn in dots]
    assert ("float8_e4m3fn", "float8_e4m3fn") in found  # forward
    assert ("float8_e5m2", "float8_e5m2") in found  # the kept activation, and the cotangent


def test_gradients_in_a_format_beside_operands_in_the_compute_dtype():
    loss = lambda w, x: jnp.sum(jnp.tanh(jnp.sin(x) @ w))
    f = amp(loss, gradients="e5m2")
    assert_same_bits(f(W, X), amp(loss)(W, X))
    assert 1e-2 < error(jax.grad(f)(W, X), in_float64(jax.grad(loss), W, X)) < 0.15


def test_a_convolution():
    x, w = normal(7, 2, 8, 8, 16), normal(8, 3, 3, 16, 16, scale=0.1)
    conv = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    loss = lambda x: jnp.sum(jnp.tanh(conv(jnp.tanh(conv(x)))))
    f = amp(loss, kept="e4m3", results="e5m2", gradient_results="e5m2")
    assert error(jax.grad(f)(x), jax.grad(loss)(x)) < 0.2
    assert "uint8" in [dtype for shape, dtype in kept(f, x) if shape == (2, 8, 8, 16)]


# -- transforms

ALL = {"results": "e4m3", "gradient_results": "e5m2", "kept": "e4m3"}
AROUND = {
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "all saved": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.everything_saveable),
    "dots saved": lambda f: jax.checkpoint(f, policy=jax.checkpoint_policies.dots_saveable),
    "cond": lambda f: lambda *args: lax.cond(True, f, f, *args),
}


@pytest.mark.parametrize("name", AROUND)
def test_through_other_transforms(name):
    exact = in_float64(jax.grad(mlp), WS, X)
    for f in (amp(AROUND[name](mlp), **ALL), AROUND[name](amp(mlp, **ALL))):
        assert error(jax.jit(jax.grad(f))(WS, X)[0], exact[0]) < 0.2


def test_vmap_and_scan():
    stacked = jnp.stack(WS)
    loss = lambda ws, x: jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)
    exact = in_float64(jax.grad(loss), stacked, X)
    f = amp(loss, **ALL)
    assert error(jax.jit(jax.grad(f))(stacked, X), exact) < 0.2
    assert ((3, 48, 32), "uint8") in kept(f, stacked, X)
    mapped = jax.jit(jax.vmap(jax.grad(f), (None, 0)))(stacked, jnp.stack([X, X]))
    assert error(mapped[0], exact) < 0.2
    assert error(jax.grad(lambda ws: jax.vmap(lambda x: f(ws, x[None]))(X).sum())(stacked), exact) < 0.2


def test_forward_mode_does_not_round_tangents():
    along = lambda f: lambda ws, x: jax.jvp(lambda x: f(ws, x), (x,), (x,))[1]
    exact = in_float64(along(mlp), WS, X)
    assert abs(along(amp(mlp, **ALL))(WS, X) - exact) < 0.1 * abs(exact)


def test_second_derivatives_of_what_was_kept_are_refused():
    f = amp(lambda x: mlp(WS, x), kept="e4m3")
    with raises(TypeError, "differentiated twice; its second derivative is not defined", "rule 'compute'"):
        jax.jvp(jax.grad(f), (X,), (X,))


# -- scopes and reports


def test_a_scope_is_about_its_matmuls_alone():
    def f(x, w):
        with jax.named_scope("block"):
            return jnp.sum(jnp.exp(jnp.sin(x) @ w))

    policy = jaxamp.default_amp_policy | {"block": jaxamp.use_formats("compute", results="e4m3", kept="e5m2")}
    report = jaxamp.amp_report(f, amp_policy=policy)(X, W)
    (matmul,) = [row for row in report.matmuls if row.phase == "forward"]
    assert matmul.reason == "scope 'block'; results in e4m3, kept in e5m2"
    (exp,) = [row for row in report.rows if row.primitive == "exp" and row.phase == "forward"]
    assert (exp.run.operands, exp.reason) == (("float32",), "policy table")
    assert "rounded" in names(jax.make_jaxpr(jaxamp.amp(f, amp_policy=policy))(X, W))


def test_a_comparison_sees_rounded_results_and_draws_their_format():
    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_formats("compute", results="e2m1")}
    found = jaxamp.compare(lambda w, x: jnp.sum(jnp.sin(x @ w)), amp_policy=policy)(W, X)
    (matmul,) = [row for row in found.operations if row.name == "dot_general"]
    assert matmul.error.relative > 0.05
    assert list(map(str, found.formats)) == ["e5m2", "e2m1"]
    drawn = [label.get_text() for label in found.plot().axes[0].get_yticklabels()]
    assert drawn[-1] == "e2m1"
    assert found.to_dict()["formats"] == ["e5m2", "e2m1"]


@pytest.mark.parametrize("dtype", [jnp.float16, jnp.bfloat16])
@pytest.mark.parametrize("scale", [1.0, 1e-3])
def test_small_activations_are_kept_within_the_bound_of_the_format(dtype, scale):
    """The scale of an e5m2 is the largest number over 57344, which float16 may not hold."""
    rule = jaxamp.use_formats("compute", gradients="compute", kept="e5m2")
    policy = jaxamp.default_amp_policy | dict.fromkeys(MATMULS, rule)
    loss = lambda w, x: jnp.sum(jnp.sin(jnp.float32(1 / scale) * ((scale * jnp.cos(x)) @ w)))
    fn = jaxamp.amp(loss, amp_policy=policy, compute_dtype=dtype)
    with jax.numpy_dtype_promotion("standard"):
        assert error(jax.grad(fn)(W, X), in_float64(jax.grad(loss), W, X)) < 0.1


@pytest.mark.parametrize("words", [{"results": "e4m3"}, {"gradient_results": "e5m2"}])
def test_second_derivatives_where_no_operand_is_in_a_format(words):
    fn = lambda x: jnp.sum(jnp.tanh(x @ W.astype(x.dtype)) ** 2)
    found = jax.hessian(amp(fn, **words))(X[0])
    assert error(found, in_float64(jax.hessian(fn), X[0])) < 0.2


def test_what_is_kept_in_a_format_has_no_second_derivative():
    with raises(TypeError, "is differentiated twice", "the rule 'compute'"):
        jax.hessian(amp(lambda x: jnp.sum(jnp.tanh(x @ W) ** 2), kept="e4m3"))(X[0])


@pytest.mark.parametrize(("words", "dtype"), [({}, "bf16"), ({"operands": "e4m3"}, "f8E4M3FN")])
def test_parameters_are_sent_low_where_their_gradients_are_rounded(words, dtype):
    """In eight bits, there is a float32 one too that nothing reads."""
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("d")
    local = lambda w, x: lax.psum(jnp.sum(jnp.tanh(x @ lax.all_gather(w, "d", tiled=True))), "d")
    loss = jax.shard_map(local, mesh=mesh, in_specs=(spec, spec), out_specs=jax.sharding.PartitionSpec())
    for more in ({}, {"gradient_results": "e5m2"}):
        lowered = jax.jit(amp(loss, **words | more)).lower(W, X).as_text()
        sent = {line.rsplit("x", 1)[1].split(">")[0] for line in lowered.splitlines() if "all_gather" in line}
        assert sent - {"f32"} == {dtype}
        assert words or "f32" not in sent
