"""What joins a joined array reads the arrays that this was joined from."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, assert_same_bits, equations, in_float64, normal, shape
from jax import lax

import jaxamp
from jaxamp._passes.joins import merge_joins

DEPTH = 6


def weights(make, depth):
    """Of a first matmul, and of two for each layer."""
    layers = [w for i in range(depth) for w in (make(16 + 8 * i, 16), make(16, 8))]
    return [make(16, 16), *layers]


X, W = normal(0, 32, 16), weights(functools.partial(normal, 1, scale=0.3), DEPTH)


def dense(w, x):
    """A dense block: each layer reads the results of all before it."""
    x = x @ w[0]
    for first, second in zip(w[1::2], w[2::2], strict=True):
        x = jnp.concatenate([x, jax.nn.silu(jax.nn.silu(x) @ first) @ second], -1)
    return jnp.mean(jnp.tanh(x) ** 2)


def in_functions(w, x):
    return jax.jit(dense)(w, x) + jax.checkpoint(dense)(w, x)


def in_a_loop(w, x):
    return lax.scan(lambda total, x: (total + dense(w, x), None), 0.0, x.reshape(4, 8, 16))[0]


def joins(jaxpr):
    """The number of arrays in each join."""
    return [len(eqn.invars) for eqn in equations(jaxpr) if eqn.primitive is lax.concatenate_p]


@pytest.mark.parametrize("fn", [dense, in_a_loop])
def test_parts_are_not_joined(fn):
    jaxpr = jax.make_jaxpr(fn)(W, X)
    assert joins(jaxpr) == [2] * DEPTH
    assert joins(merge_joins(jaxpr)) == [*range(2, DEPTH + 2)]
    assert_same_bits(jax.extend.core.jaxpr_as_fun(merge_joins(jaxpr))(*W, X), [fn(W, X)])


def test_functions_inside():
    found = joins(merge_joins(jax.make_jaxpr(in_functions)(W, X)))
    assert found == [*range(2, DEPTH + 2)] * 2


@pytest.mark.parametrize("fn", [dense, in_functions, in_a_loop])
def test_gradients_are_near_to_float64(fn):
    for grad, expected in zip(jax.grad(AMP(fn))(W, X), in_float64(jax.grad(fn), W, X), strict=True):
        assert_near(grad, expected, 2e-2)


def test_the_memory_grows_with_the_depth_and_not_with_its_square():
    grown = {}
    for name, disabled in (("with", []), ("without", ["merge_joins"])):
        of_depth = jaxamp.bytes_kept(dense, compute_dtype=jnp.bfloat16, disable_passes=disabled)
        x, few, many = shape(4096, 16), weights(shape, 8), weights(shape, 16)
        grown[name] = of_depth(many, x).after / of_depth(few, x).after
    assert grown["with"] < 2.2 < 2.8 < grown["without"]


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x: jnp.concatenate([jnp.concatenate([x, x], 0), jnp.ones((64, 2))], 1), [2, 2]),  # along two axes
        (lambda x: (y := jnp.concatenate([x, x]), jnp.concatenate([y, x])), [2, 3]),  # a part is a result
        (lambda x: functools.reduce(lambda y, _: jnp.concatenate([y, x]), range(63), x), [64]),
        (lambda x: functools.reduce(lambda y, _: jnp.concatenate([y, x]), range(65), x), [64, 3]),
        (lambda x: jnp.concatenate([jnp.tanh(jnp.concatenate([x, x])), x]), [2, 2]),
    ],
)
def test_which_parts_are_read(fn, expected):
    jaxpr = jax.make_jaxpr(fn)(X)
    assert joins(merge_joins(jaxpr)) == expected
    assert_same_bits(jax.extend.core.jaxpr_as_fun(merge_joins(jaxpr))(X), jax.tree.leaves(fn(X)))


def test_what_is_left_alone():
    jaxpr = jax.make_jaxpr(lambda x: jnp.concatenate([jnp.tanh(x), x]))(X)
    assert merge_joins(jaxpr) is jaxpr
