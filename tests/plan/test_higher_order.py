"""Primitives with bodies: registered by a user, unknown, and run as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, LOW, WIDE, W, dtypes_of, equations, matmul_dtypes, matmuls
from jax import lax
from jax.experimental.jet import jet
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxamp


def test_a_primitive_can_be_registered():
    call = Primitive("my_call")
    call.multiple_results = True
    call.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
    lowering = lambda *xs, jaxpr: jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts, *xs)
    mlir.register_lowering(call, mlir.lower_fun(lowering, multiple_results=True))
    body = jax.make_jaxpr(lambda x: x @ x)(W)
    fn = lambda x: call.bind(x, jaxpr=body)[0]

    assert matmuls(AMP(fn), W) == [WIDE]
    jaxamp.register_higher_order(call)
    assert matmuls(AMP(fn), W) == [LOW]
    np.testing.assert_allclose(jax.jit(AMP(fn))(W), W @ W, atol=2e-2)


def test_an_unknown_primitive_runs_on_its_own_dtypes():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda aval: aval)
    jaxpr = jax.make_jaxpr(AMP(lambda x: mystery.bind(x @ x) @ x))(W)
    assert dtypes_of("mystery", jaxpr) == ["float32"]
    assert matmul_dtypes(jaxpr) == [LOW, LOW]


@pytest.mark.parametrize("policy", jaxamp.presets())
def test_bodies_that_run_as_written_take_low_operands(policy):
    body = lambda h: jnp.exp(h) * 3.0
    for nest in (
        jax.jit,
        jax.checkpoint,
        lambda f: lambda h: lax.cond(True, f, f, h),
        lambda f: lambda h: lax.map(f, h),
    ):
        fn = jaxamp.amp(lambda x: nest(body)(x @ x).sum(), compute_dtype=jnp.bfloat16, amp_policy=policy)  # noqa: B023
        np.testing.assert_allclose(jax.jit(fn)(W), body(W @ W).sum(), rtol=2e-2)


def test_a_registered_parameter_that_is_not_there_is_told():
    call = Primitive("my_other_call")
    call.def_abstract_eval(lambda aval, body: aval)
    jaxamp.register_higher_order(call, "jaxpr")
    with pytest.raises(ValueError, match=r"my_other_call .*parameter 'jaxpr'; expected one of its parameters: body"):
        AMP(lambda x: call.bind(x, body=None))(W)


def test_what_names_no_body_is_refused():
    with pytest.raises(TypeError, match=r"got jaxpr=3; expected the name of a parameter or a function. Write for"):
        jaxamp.register_higher_order(Primitive("my_third_call"), 3)
    with pytest.raises(TypeError, match=r"got evaluate=3; expected .* Write for example register_higher_order"):
        jaxamp.register_higher_order(Primitive("my_third_call"), evaluate=3)


def test_a_composite_is_entered():
    layer = lax.composite(lambda x: jnp.tanh(x @ x) @ x, "my.layer")
    jaxpr = jax.make_jaxpr(AMP(layer))(W)
    (composite,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "composite"]
    assert composite.params["name"] == "my.layer"
    assert matmul_dtypes(jaxpr) == [LOW, LOW]
    np.testing.assert_allclose(jax.jit(AMP(layer))(W), jnp.tanh(W @ W) @ W, atol=5e-2)


@jax.custom_batching.custom_vmap
def multiplied(x, w):
    return x @ w, jnp.sum(w)


@multiplied.def_vmap
def _multiplied_in_batches(size, in_batched, x, w):
    assert in_batched == [True, False]
    return (x @ w, jnp.sum(w)), (True, False)


def test_a_custom_vmap_is_entered_and_so_is_its_rule():
    fn = lambda x, w: jnp.tanh(multiplied(x, w)[0]) * multiplied(2 * x, w)[1]
    assert matmuls(AMP(lambda x: fn(x, W)), W[0]) == [LOW, LOW]
    want = jnp.tanh(W @ W) * jnp.sum(W)
    mapped = {
        "vmap(amp)": jax.vmap(AMP(fn), (0, None)),
        "amp(vmap)": AMP(jax.vmap(fn, (0, None))),
        "vmap(jit(amp))": jax.vmap(jax.jit(AMP(fn)), (0, None)),
    }
    for by in mapped.values():
        np.testing.assert_allclose(by(W, W), want, atol=2e-2 * float(jnp.abs(want).max()))
        jaxpr = jax.make_jaxpr(by)(W, W)
        assert matmul_dtypes(jaxpr) == [LOW, LOW]
        assert not any(eqn.primitive.name == "custom_vmap_call" for eqn in equations(jaxpr))


def test_forward_mode_of_a_custom_vmap():
    fn = lambda x: jnp.tanh(multiplied(x, W)[0])
    want = jax.jvp(fn, (W[0],), (W[1],))
    got = jax.jvp(AMP(fn), (W[0],), (W[1],))
    np.testing.assert_allclose(jnp.stack(got), jnp.stack(want), atol=2e-2)


JETS = {
    "a network": lambda x: jnp.tanh(x @ W) @ W,
    "a softmax": lambda x: jnp.exp((h := x @ W) - jax.nn.logsumexp(h, -1, keepdims=True)) @ W,
    "a norm": lambda x: ((h := x @ W) - h.mean(-1, keepdims=True)) * lax.rsqrt(h.var(-1, keepdims=True) + 1e-3) @ W,
    "attention": lambda x: jaxamp.dot_product_attention(*[(x @ W)[None, :, None]] * 3),
}


@pytest.mark.parametrize("name", JETS)
def test_jet_on_both_sides(name):
    fn, series = JETS[name], (0.3 * W, 0.1 * W)
    want = jet(fn, (W,), (series,))
    around = jet(AMP(fn), (W,), (series,))
    inside = AMP(lambda x: jet(fn, (x,), (series,)))(W)
    for got in (around, inside):
        for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            assert float(jnp.linalg.norm(x - y)) <= 4e-2 * float(jnp.linalg.norm(y))
    if name != "attention":  # each term of its series is computed in float32
        assert set(matmuls(lambda x: jet(AMP(fn), (x,), (series,)), W)) == {LOW}
