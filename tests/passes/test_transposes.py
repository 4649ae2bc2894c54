"""Transposes folded into the matmuls before them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, MATMULS, assert_near, equations, in_float64, matmul_dtypes, names, near, normal
from jax import lax
from plans import plan_of, step

import jaxamp
from jaxamp._passes.transposes import fold_transposes
from jaxamp._plan.reasons import Reason, Why

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def mapped(w, x):
    """A layer of one token, mapped over tokens and examples."""
    return jax.vmap(jax.vmap(lambda x: w @ x))(x)


def test_a_plan_with_a_transpose_to_fold():
    fn = lambda w, x: jnp.exp(mapped(w, x))
    before, after = (plan_of(fn, W, X, passes=passes) for passes in ((), (fold_transposes,)))
    assert step(before, "transpose").operation is None
    assert step(after, "transpose").reason == Reason(Why.FOLDED)
    assert step(after, "dot_general").order == (1, 2, 0)
    dims = step(after, "dot_general").params["dimension_numbers"]
    assert dims == tuple(pair[::-1] for pair in step(before, "dot_general").params["dimension_numbers"])
    assert (after.parts, after.outs) == (before.parts, before.outs)


def test_a_plan_without_one_is_left_as_it_is():
    plan = plan_of(lambda w, x: jnp.exp(x @ w.T), W, X)
    assert fold_transposes(plan) is plan


def test_a_mapped_layer_has_no_transpose_forward_or_backward():
    fn = lambda w, x: jnp.sum(jnp.tanh(mapped(w, x)) ** 2)
    assert "transpose" in names(jax.make_jaxpr(fn)(W, X))
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, X)
    assert "transpose" not in names(jaxpr)
    assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")] * 3
    expected = in_float64(jax.grad(fn, (0, 1)), W, X)
    assert all(map(near, jax.grad(AMP(fn), (0, 1))(W, X), expected))


@pytest.mark.parametrize(
    ("dims", "shapes", "permutation"),
    [
        ((((1,), (1,)), ((), ())), ((4, 8), (6, 8)), (1, 0)),
        ((((1,), (2,)), ((), ())), ((4, 8), (2, 6, 8)), (1, 2, 0)),
        ((((2,), (1,)), ((0,), (0,))), ((3, 4, 8), (3, 8, 6)), (0, 2, 1)),
        ((((0, 2), (1, 0)), ((), ())), ((3, 4, 8), (8, 3, 6)), (1, 0)),
    ],
)
def test_a_transpose_that_swaps_the_operands_is_folded(dims, shapes, permutation):
    a, b = normal(3, *shapes[0]), normal(4, *shapes[1])
    fn = lambda a, b: jnp.exp(lax.transpose(lax.dot_general(a, b, dims), permutation) * 0.1)
    assert "transpose" not in names(jax.make_jaxpr(AMP(fn))(a, b))
    assert near(AMP(fn)(a, b), in_float64(fn, a, b))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sin(jnp.einsum("oi,bti->tbo", w, x)),  # another order than the operands' swapped
        lambda w, x: (lambda y: (jnp.sin(jnp.transpose(y, (1, 2, 0))), jnp.cos(y)))(
            jnp.tensordot(w, x, (1, 2))
        ),  # twice
        lambda w, x: (lambda y: (jnp.sin(jnp.transpose(y, (1, 2, 0))), y))(jnp.tensordot(w, x, (1, 2))),  # returned
    ],
)
def test_other_transposes_stay(fn):
    assert "transpose" in names(jax.make_jaxpr(AMP(fn))(W, X))
    for found, expected in zip(jax.tree.leaves(AMP(fn)(W, X)), jax.tree.leaves(in_float64(fn, W, X)), strict=True):
        assert near(found, expected)


def test_a_layer_mapped_from_outside_puts_tokens_first():
    fn = lambda w, x: jnp.tanh(w @ x)
    jaxpr = jax.make_jaxpr(jax.vmap(AMP(fn), (None, 0)))(W, X[0])
    (matmul,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    assert matmul.outvars[0].aval.shape == (5, 16)
    assert near(jax.vmap(AMP(fn), (None, 0))(W, X[0]), in_float64(jax.vmap(fn, (None, 0)), W, X[0]))


# -- operands that are turned in place of the result


EINSUMS = {
    "btghd,bsgd->bghts": ((2, 5, 2, 3, 2), (2, 7, 2, 2)),  # queries share keys
    "bsgd,btghd->bghts": ((2, 7, 2, 2), (2, 5, 2, 3, 2)),
    "btghd,bsgd->bgths": ((2, 5, 2, 3, 2), (2, 7, 2, 2)),
    "tghd,sgd->ghts": ((5, 2, 3, 2), (7, 2, 2)),
    "abk,cdk->bacd": ((5, 6, 2), (3, 7, 2)),
    "abk,cdk->badc": ((5, 6, 2), (3, 7, 2)),
    "abk,cdk->dcba": ((5, 6, 2), (3, 7, 2)),
    "abk,cdk->acbd": ((5, 6, 2), (3, 7, 2)),
    "abk,ck->bca": ((5, 6, 2), (7, 2)),
    "kab,kc->cba": ((2, 5, 6), (2, 7)),
}


def between(spec):
    """The product of two, rounded before and read low after."""

    def fn(x, y):
        z = jnp.einsum(spec, jnp.tanh(x), jnp.tanh(y))
        return jnp.sum(jnp.sin(jnp.einsum("...i,...i->...", jax.nn.softmax(z), z)))

    return fn


@pytest.mark.parametrize("spec", EINSUMS)
def test_results_of_any_einsum(spec):
    x, y = (normal(i, *shape) for i, shape in enumerate(EINSUMS[spec]))
    fn = between(spec)
    assert_near(jax.jit(AMP(fn))(x, y), in_float64(fn, x, y), 1e-2)
    found = jax.jit(jax.grad(AMP(fn), (0, 1)))(x, y)
    for got, expected in zip(found, in_float64(jax.grad(fn, (0, 1)), x, y), strict=True):
        assert_near(got, expected, 4e-2)


def turned(spec):
    """The shapes that are transposed in the forward pass."""
    x, y = (normal(i, *shape) for i, shape in enumerate(EINSUMS[spec]))
    jaxpr = jax.make_jaxpr(AMP(between(spec)))(x, y)
    return [eqn.invars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "transpose"]


@pytest.mark.parametrize("spec", ["btghd,bsgd->bghts", "bsgd,btghd->bghts", "tghd,sgd->ghts", "abk,cdk->badc"])
def test_scores_are_made_as_rows(spec):
    """What is turned is smaller than the result."""
    result = jax.eval_shape(functools.partial(jnp.einsum, spec), *(jnp.ones(shape) for shape in EINSUMS[spec]))
    assert all(2 * np.prod(shape) < result.size for shape in turned(spec))


def test_a_result_smaller_than_its_operands_is_turned_itself():
    """As that of the product of weights with values."""
    weights, values = normal(0, 2, 2, 3, 5, 7), normal(1, 2, 7, 2, 2)
    fn = lambda w, v: jnp.sum(jnp.sin(jnp.einsum("bghts,bsgd->btghd", jnp.tanh(w), jnp.tanh(v))))
    jaxpr = jax.make_jaxpr(AMP(fn))(weights, values)
    shapes = [eqn.invars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "transpose"]
    assert shapes == [(2, 2, 3, 5, 2)]
    assert_near(jax.grad(AMP(fn))(weights, values), in_float64(jax.grad(fn), weights, values), 2e-2)


@pytest.mark.parametrize("spec", EINSUMS)
def test_a_rule_with_another_body_gets_operands_in_their_order(spec):
    """Number formats, forward and backward: the errors are those of fp8, and not of entries in the wrong places."""
    x, y = (normal(i, *shape) for i, shape in enumerate(EINSUMS[spec]))
    policy = {**jaxamp.load_policy("default"), lax.dot_general_p: jaxamp.use_formats()}
    fn = between(spec)
    amp = AMP(fn, amp_policy=policy)
    assert_near(jax.jit(amp)(x, y), in_float64(fn, x, y), 0.05)
    found = jax.jit(jax.grad(amp, (0, 1)))(x, y)
    for got, expected in zip(found, in_float64(jax.grad(fn, (0, 1)), x, y), strict=True):
        assert_near(got, expected, 0.25)


def test_compare_knows_the_order():
    x, y = (normal(i, *shape) for i, shape in enumerate(EINSUMS["btghd,bsgd->bghts"]))
    found = jaxamp.compare(between("btghd,bsgd->bghts"), compute_dtype=jnp.bfloat16)(x, y)
    rows = [row for row in found.operations if "dot_general" in row.name]
    assert rows
    assert all(row.error.relative < 0.1 for row in rows)
