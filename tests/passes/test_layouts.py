"""Results of matmuls in the order of their axes."""

import jax
import jax.numpy as jnp
from helpers import AMP, names, normal
from plans import plan_of, step

from jaxamp._passes.layouts import order_results

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def test_a_plan_with_a_matmul():
    before, after = (plan_of(lambda w, x: jnp.exp(x @ w.T), W, X, passes=passes) for passes in ((), (order_results,)))
    assert step(after, "dot_general").operation is not step(before, "dot_general").operation
    assert step(after, "exp") == step(before, "exp")
    assert after.parts == before.parts


def test_a_plan_whose_matmul_is_turned_is_left_as_it_is():
    plan = plan_of(lambda w, x: jnp.exp(jnp.transpose(x @ w.T, (1, 0, 2))), W, X)
    assert order_results(plan) is plan


def mapped(w, x):
    """A layer of one token, mapped over tokens and examples."""
    return jax.vmap(jax.vmap(lambda x: w @ x))(x)


def test_results_of_matmuls_are_in_order_unless_they_are_read_in_another():
    def ordered(fn) -> int:
        return names(jax.make_jaxpr(AMP(fn))(W, X)).count("row_major")

    assert ordered(lambda w, x: jnp.tanh(x @ w.T)) == 1
    assert ordered(lambda w, x: jnp.tanh(mapped(w, x))) == 1  # the transpose is folded
    assert ordered(lambda w, x: jnp.tanh((x @ w.T).transpose(1, 0, 2))) == 0
    assert ordered(lambda w, x: jnp.tanh(w @ x[0, 0])) == 0  # a vector has one order
