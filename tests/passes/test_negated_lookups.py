"""The cotangents of lookups are written before they are summed, where they are negated."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, in_float64, normal

WITHOUT = functools.partial(AMP, disable_passes=["write_negated_lookups"])
W, X, T = normal(0, 8, 8, scale=0.3), normal(1, 64, 8), normal(2, 16, 8)
AT = jnp.asarray(np.random.default_rng(0).integers(0, 16, 64))


def held(fn):
    """The dtypes of cotangents that are written."""
    found = equations(jax.make_jaxpr(jax.grad(AMP(fn), (0, 2)))(W, X, T))
    return [
        str(eqn.params["dtype"]) for eqn in found if eqn.primitive.name == "materialized" and eqn.params["of_value"]
    ]


def codes(w, x, t):
    return jnp.mean((x @ w - t[AT]) ** 2)


def taken(w, x, t):
    """`jnp.take` is a function of its own."""
    return jnp.mean((x @ w - jnp.take(t, AT, axis=0).reshape(-1, 8)) ** 2)


def filled(w, x, t):
    return jnp.mean(jnp.exp(-t.at[AT].get(mode="fill", fill_value=0.0)) * (x @ w))


def angles(w, x, t):
    return jnp.mean(jnp.cos(t[AT]) * (x @ w))


def low(w, x, t):
    h = t @ w
    return jnp.mean(((h[AT] - h[AT[::-1]]) @ w) ** 2)


@pytest.mark.parametrize(("fn", "dtypes"), [(codes, 1), (taken, 1), (filled, 1), (angles, 1), (low, 1)])
def test_they_are_written_once(fn, dtypes):
    expected = ["bfloat16" if fn is low else "float32"] * dtypes
    assert held(fn) == expected


@pytest.mark.parametrize("fn", [codes, taken, filled, angles, low])
def test_gradients_are_near_to_float64(fn):
    grads = jax.jit(jax.grad(AMP(fn), (0, 2)))(W, X, T)
    expected = in_float64(jax.grad(fn, (0, 2)), W, X, T)
    for found, wanted in zip(grads, expected, strict=True):
        assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x, t: jnp.mean((t[AT] - x @ w) ** 2),
        lambda w, x, t: jnp.mean((x - x @ w) * t[AT]),
        lambda w, x, t: jnp.mean(jnp.sin(t[AT]) * (x @ w)),
        lambda w, x, t: jnp.mean(x @ w - t[2:3]),
    ],
)
def test_what_is_left_alone(fn):
    assert str(jax.make_jaxpr(AMP(fn))(W, X, T)) == str(jax.make_jaxpr(WITHOUT(fn))(W, X, T))


def test_values_are_the_same():
    run = lambda amp: jax.jit(amp(codes))(W, X, T)
    assert run(AMP) == run(WITHOUT)


def test_complex_tables():
    """They have gradients too, and are left alone."""
    fn = lambda t: jnp.sum(jnp.abs(-t[AT]) @ W)
    t = jax.lax.complex(T, T)
    np.testing.assert_allclose(jax.grad(AMP(fn))(t), jax.grad(fn)(t), rtol=2e-2, atol=2e-2)
