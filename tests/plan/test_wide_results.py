"""Matmuls give their results in float32 where that is worth it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, MATMULS, dtypes_of, equations, in_float64, matmul_dtypes, near, normal
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from plans import held_in, plan_of, read_in, step

import jaxamp
from jaxamp._plan.classify import Mode
from jaxamp._plan.reasons import Reason, Why

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def test_a_plan_whose_matmul_is_returned_rearranged():
    fn = lambda w, x: jnp.transpose(x @ w.T, (2, 0, 1)).reshape(-1)
    plan = plan_of(fn, W, X)
    for name, nth in (("dot_general", 0), ("transpose", 1), ("reshape", 0)):
        assert held_in(step(plan, name, nth)) == ["float32"]
    assert step(plan, "dot_general").params["preferred_element_type"] == jnp.float32
    assert (read_in(step(plan, "reshape")), step(plan, "reshape").touched) == (["float32"], False)
    assert step(plan, "transpose", 1).reason == Reason(Why.READ_ONLY_BY, ("reshape",))
    assert [value.format.name for value in plan.outs] == ["float32"]


def test_what_a_users_rule_makes_of_the_wider_result():
    def rule(compute_dtype, original_dtypes, x, **params):
        return [x], params

    policy = jaxamp.default_amp_policy | {lax.reshape_p: rule}
    plan = plan_of(lambda w, x: (x @ w.T).reshape(-1), W, X, policy=policy)
    assert (step(plan, "reshape").mode, held_in(step(plan, "reshape"))) == (Mode.RULE, ["float32"])


def test_what_a_later_operation_wants_low_stays_low():
    policy = jaxamp.default_amp_policy | {lax.transpose_p: jaxamp.use_compute_precision}
    fn = lambda w, x: jnp.transpose((x @ w.reshape(8, 16)).reshape(15, 16))
    plan = plan_of(fn, W, X, policy=policy)
    assert held_in(step(plan, "dot_general")) == ["float32"]
    assert (read_in(step(plan, "reshape", 1)), held_in(step(plan, "reshape", 1))) == (["bfloat16"], ["bfloat16"])


def test_a_matmul_that_is_only_returned_comes_out_in_float32():
    for fn in (lambda w, x: x @ w.T, lambda w, x: jnp.transpose(x @ w.T, (2, 0, 1)), jax.jit(lambda w, x: x @ w.T)):
        jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
        assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")]
        assert [dtypes_of(name, jaxpr) for name in ("mixed_dot_general", "convert_element_type")] == [["float32"], []]
        rounded = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
        assert near(AMP(fn)(W, X), in_float64(fn, *rounded), 1e-6)


def in_a_shard_map(w, x):
    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    everywhere = PartitionSpec()
    over = jax.shard_map(lambda w, x: x @ w.T, mesh=mesh, in_specs=(everywhere, everywhere), out_specs=everywhere)
    return over(w, x)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (x @ w.T) / 8.0,
        lambda w, x: 0.5 * (x @ w.T),
        lambda w, x: jax.lax.cond(x[0, 0, 0] > 0.0, lambda: x @ w.T, lambda: 2.0 * x @ w.T),
        in_a_shard_map,
    ],
    ids=["divided by a number", "multiplied by a number", "in a branch", "in a shard_map"],
)
def test_so_does_one_that_is_scaled_or_returned_from_a_body(fn):
    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"float32"}
    rounded = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
    assert near(AMP(fn)(W, X), in_float64(fn, *rounded), 1e-6)


@pytest.mark.parametrize("fn", [lambda w, x: 8.0 / (x @ w.T), lambda w, x: (x @ w.T) * x[..., :1]])
def test_one_that_is_divided_by_or_multiplied_by_an_array_stays_low(fn):
    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


def test_gradients_of_weights_come_straight_out_of_a_users_backward_rule():
    """They are multiplied low and come out in float32, as without the rule."""

    @jax.custom_vjp
    def dense(w, x):
        return x @ w.T

    dense.defvjp(lambda w, x: (x @ w.T, (w, x)), lambda saved, ct: (ct.T @ saved[1], ct @ saved[0]))
    loss = lambda w, x: jnp.mean(jnp.tanh(dense(w, jnp.tanh(dense(w, x)))) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(loss)))(*LARGE_AND_FEW)
    made = [v.aval for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS for v in eqn.outvars]
    assert [aval.dtype.name for aval in made if aval.shape == (64, 64)] == ["float32"] * 2
    assert set(matmul_dtypes(jaxpr)) == {("bfloat16", "bfloat16")}
    args = 0.1 * LARGE_AND_FEW[0], LARGE_AND_FEW[1]
    assert near(jax.grad(AMP(loss))(*args), in_float64(jax.grad(loss), *args), 2e-2)


def test_a_matmul_of_which_a_part_is_returned_stays_low():
    jaxpr = jax.make_jaxpr(AMP(lambda w, x: (x @ w.T)[:, -1]))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


def test_a_matmul_that_is_read_as_well_stays_low():
    def fn(w, x):
        y = x @ w.T
        return y, jnp.tanh(y)

    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


LARGE_AND_FEW = normal(3, 64, 64), normal(4, 8, 64)  # a weight, and rows that are few next to it


def test_gradients_of_a_weight_that_is_gathered_twice_are_added_in_float32():
    everywhere = NamedSharding(Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec())
    gathered = lambda w: lax.with_sharding_constraint(w, everywhere)
    loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ gathered(w)) @ gathered(w)) ** 2)
    jaxpr = jax.make_jaxpr(AMP(jax.grad(loss)))(*LARGE_AND_FEW)
    made = [v.aval for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS for v in eqn.outvars]
    assert [aval.dtype.name for aval in made if aval.shape == (64, 64)] == ["float32"] * 2


def test_gradients_are_summed_over_devices_in_float32():
    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    specs = {"in_specs": (PartitionSpec(), PartitionSpec("d")), "out_specs": PartitionSpec()}

    def step(w, x):
        grads = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w.T)))(w)
        return lax.psum(grads, "d")

    fn = jax.shard_map(AMP(step), mesh=mesh, check_vma=False, **specs)
    jaxpr = jax.make_jaxpr(fn)(*LARGE_AND_FEW)
    assert [dtype for name in ("psum", "psum_invariant") for dtype in dtypes_of(name, jaxpr)] == ["float32"]


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_weight_gradients_under_amp_come_straight_out_of_the_matmul(wrap):
    fn = lambda w, x: jnp.sum(jax.nn.relu(x @ w.T))
    low = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
    found = AMP(wrap(jax.grad(fn)))(W, X)
    assert found.dtype == jnp.float32
    assert near(found, in_float64(jax.grad(fn), *low), 1e-6)


# -- results that only float32 operations read

LONG, SHORT = normal(3, 4, 64), normal(4, 64, 4)  # sixteen entries of a result, 256 of each operand


def results(fn, *args, **options):
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, **{"compute_dtype": jnp.bfloat16} | options))(*args)
    return [eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: jnp.sum(jnp.exp(x @ w)),
        lambda x, w: jnp.sum(jax.nn.logsumexp(x @ w, -1)),
        lambda x, w: jnp.sum(jax.nn.log_softmax((x @ w).T * 3.0 + 1.0)),
        lambda x, w: jnp.sum(jnp.log(jax.jit(jnp.matmul)(x, w) ** 2)),
    ],
)
def test_a_small_result_that_float32_operations_read_comes_out_in_float32(fn):
    assert results(fn, LONG, SHORT) == ["float32"]
    rounded = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (LONG, SHORT)]
    assert near(AMP(fn)(LONG, SHORT), in_float64(fn, *rounded), 1e-5)


def test_a_result_as_large_as_its_operands_stays_low():
    scores = lambda q, k: jnp.sum(jax.nn.softmax(q @ k.T) ** 2)
    assert results(scores, normal(0, 32, 8), normal(1, 32, 8)) == ["bfloat16"]
    dense = lambda x, w: jnp.sum(jnp.exp(x @ w))
    assert results(dense, normal(0, 32, 32), normal(1, 32, 32)) == ["bfloat16"]


def test_a_small_result_that_something_low_reads_as_well_stays_low():
    def fn(x, w):
        y = x @ w
        return jnp.sum(jnp.exp(y)) + jnp.sum(y @ y)

    assert results(fn, LONG, SHORT)[0] == "bfloat16"


@pytest.mark.parametrize("scale", [lambda y: y * 1e-3, lambda y: y / 1000.0])
def test_float16_products_that_are_scaled_down_are_not_infinite(scale):
    x = w = jnp.full((16, 16), 80.0)  # products of 102,400
    for read in (jnp.tanh, jnp.exp, lambda y: y @ y):
        fn = lambda x, w, read=read: jnp.sum(read(scale(x @ w) / 64.0))
        assert near(jaxamp.amp(fn, compute_dtype=jnp.float16)(x, w), in_float64(fn, x, w), 1e-2)
    assert results(lambda x, w: jnp.sum(jnp.tanh(scale(x @ w))), x, w, compute_dtype=jnp.float16) == ["float32"]
    assert results(lambda x, w: jnp.sum(jnp.tanh(scale(x @ w))), x, w) == ["bfloat16"]
