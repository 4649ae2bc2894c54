"""What is looked up many times in a low array has a gradient that is summed in float32."""

import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_same_bits, equations, in_float64, normal

WITHOUT = functools.partial(AMP, disable_passes=["sum_lookups"])
NODES, EDGES = 16, 6000
W, X, C = normal(0, 8, 8, scale=0.3), normal(1, NODES, 8), 1 + normal(2, EDGES, 8, scale=0.1)
DRAW = np.random.default_rng(0)
SENDERS = jnp.asarray(
    np.where(DRAW.random(EDGES) < 0.8, 0, DRAW.integers(0, NODES, EDGES))
)  # most edges are of one node
RECEIVERS = (SENDERS + 1) % NODES


def named(jaxpr, name):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == name]


def edges(w, x, c):
    return jnp.mean(((x @ w)[SENDERS] * c) @ w)


def differences(w, x, c):
    h = x @ w
    return jnp.mean(jax.nn.silu((h[SENDERS] - h[RECEIVERS]) @ w) * c)


def taken(w, x, c):
    return jnp.mean(jnp.take(jax.nn.relu(x @ w), SENDERS, axis=0, mode="clip") @ w * c)


def columns(w, x, c):
    return jnp.mean((x @ w).T[:, SENDERS].T @ w * c)


def of_each(w, x, c):
    """A lookup for each of two graphs."""
    h = jnp.stack([x @ w, x @ w + 1])
    return jnp.mean(jax.vmap(lambda h: (h[SENDERS] * c) @ w)(h))


FUNCTIONS = [edges, differences, taken, columns, of_each]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_are_near_to_float64(fn):
    """Summed in bfloat16, they are off by a third or more."""
    expected = in_float64(jax.grad(fn), W, X, C)
    error = lambda amp: float(np.linalg.norm(jax.jit(jax.grad(amp(fn)))(W, X, C) - expected) / np.linalg.norm(expected))
    assert error(AMP) < 2e-2
    assert error(WITHOUT) > 0.3


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_sums_are_in_float32_and_values_the_same(fn):
    sums = named(jax.make_jaxpr(jax.grad(AMP(fn)))(W, X, C), "scatter-add")
    assert {eqn.outvars[0].aval.dtype.name for eqn in sums} == {"float32"}
    assert {
        eqn.outvars[0].aval.dtype.name for eqn in named(jax.make_jaxpr(jax.grad(WITHOUT(fn)))(W, X, C), "scatter-add")
    } == {"bfloat16"}
    one_by_one = lambda amp: jec.jaxpr_as_fun(jax.make_jaxpr(amp(fn, keep="all"))(W, X, C))(
        W, X, C
    )  # XLA skips roundings
    assert_same_bits(one_by_one(AMP), one_by_one(WITHOUT))


@pytest.mark.parametrize("outside", [True, False])
def test_under_vmap(outside):
    fn = lambda c: jax.grad(AMP(edges))(W, X, c)
    both = jnp.stack([C, 2 * C])
    found = jax.jit(jax.vmap(fn))(both) if outside else jnp.stack([jax.jit(fn)(c) for c in both])
    expected = in_float64(lambda w, x, c: jnp.stack([jax.grad(edges)(w, x, d) for d in (c, 2 * c)]), W, X, C)
    assert np.linalg.norm(found - expected) < 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x, c: jnp.mean(w[SENDERS] @ w),  # the table is float32 already
        lambda w, x, c: jnp.mean((x @ w).at[SENDERS[:4]].get(unique_indices=True) @ w),
        lambda w, x, c: jnp.mean(
            jnp.take_along_axis(x @ w, jnp.zeros((NODES, 1), int), axis=1) ** 2
        ),  # one of each row
        lambda w, x, c: jnp.mean((x @ w)[2:5] @ w),
    ],
)
def test_what_is_left_alone(fn):
    assert str(jax.make_jaxpr(AMP(fn))(W, X, C)) == str(jax.make_jaxpr(WITHOUT(fn))(W, X, C))
