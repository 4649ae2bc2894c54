"""Transposes folded into the matmuls before them."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, MATMULS, equations, in_float64, matmul_dtypes, names, near, normal
from jax import lax
from plans import plan_of, step

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
