"""Primitives with bodies: registered by a user, unknown, and run as written."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, LOW, WIDE, W, dtypes_of, matmul_dtypes, matmuls
from jax import lax
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
