"""Matmuls whose results are returned give them in float32."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, MATMULS, dtypes_of, equations, in_float64, matmul_dtypes, near, normal
from jax import lax
from plans import held_in, plan_of, read_in, step

import jaxamp
from jaxamp._passes.wide_results import widen_results
from jaxamp._plan.classify import Mode
from jaxamp._plan.reasons import Reason, Why

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def test_a_plan_whose_matmul_is_returned_rearranged():
    fn = lambda w, x: jnp.transpose(x @ w.T, (2, 0, 1)).reshape(-1)
    before, after = (plan_of(fn, W, X, passes=passes) for passes in ((), (widen_results,)))
    for name, nth in (("dot_general", 0), ("transpose", 1), ("reshape", 0)):
        assert (held_in(step(before, name, nth)), held_in(step(after, name, nth))) == (["bfloat16"], ["float32"])
    assert step(after, "dot_general").params["preferred_element_type"] == jnp.float32
    assert (read_in(step(after, "reshape")), step(after, "reshape").touched) == (["float32"], False)
    assert step(after, "transpose", 1).reason == Reason(Why.READ_ONLY_BY, ("reshape",))
    assert [value.format.name for value in after.outs] == ["float32"]


def test_what_a_users_rule_makes_of_the_wider_result():
    def rule(compute_dtype, original_dtypes, x, **params):
        return [x], params

    policy = jaxamp.default_amp_policy | {lax.reshape_p: rule}
    plan = plan_of(lambda w, x: (x @ w.T).reshape(-1), W, X, passes=(widen_results,), policy=policy)
    assert (step(plan, "reshape").mode, held_in(step(plan, "reshape"))) == (Mode.RULE, ["float32"])


def test_what_a_later_operation_wants_low_stays_low():
    policy = jaxamp.default_amp_policy | {lax.transpose_p: jaxamp.use_compute_precision}
    fn = lambda w, x: jnp.transpose((x @ w.reshape(8, 16)).reshape(15, 16))
    plan = plan_of(fn, W, X, passes=(widen_results,), policy=policy)
    assert held_in(step(plan, "dot_general")) == ["float32"]
    assert (read_in(step(plan, "reshape", 1)), held_in(step(plan, "reshape", 1))) == (["bfloat16"], ["bfloat16"])


def test_a_plan_that_returns_no_matmul_is_left_as_it_is():
    plan = plan_of(lambda w, x: jnp.exp(x @ w.T), W, X)
    assert widen_results(plan) is plan


def test_a_matmul_that_is_only_returned_comes_out_in_float32():
    for fn in (lambda w, x: x @ w.T, lambda w, x: jnp.transpose(x @ w.T, (2, 0, 1)), jax.jit(lambda w, x: x @ w.T)):
        jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
        assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")]
        assert [dtypes_of(name, jaxpr) for name in ("mixed_dot_general", "convert_element_type")] == [["float32"], []]
        rounded = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
        assert near(AMP(fn)(W, X), in_float64(fn, *rounded), 1e-6)


def test_a_matmul_of_which_a_part_is_returned_stays_low():
    jaxpr = jax.make_jaxpr(AMP(lambda w, x: (x @ w.T)[:, -1]))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


def test_a_matmul_that_is_read_as_well_stays_low():
    def fn(w, x):
        y = x @ w.T
        return y, jnp.tanh(y)

    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_weight_gradients_under_amp_come_straight_out_of_the_matmul(wrap):
    fn = lambda w, x: jnp.sum(jax.nn.relu(x @ w.T))
    low = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
    found = AMP(wrap(jax.grad(fn)))(W, X)
    assert found.dtype == jnp.float32
    assert near(found, in_float64(jax.grad(fn), *low), 1e-6)
