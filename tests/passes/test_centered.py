"""The backward pass of a variance leaves out a sum that is zero."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, in_float64, normal

WITHOUT = functools.partial(AMP, disable_passes=["square_centered"])
X, W, Y = normal(0, 6, 4) + 2, normal(1, 4, 4), normal(2, 6, 4)


def by_var(w, x):
    return jnp.sum(jnp.sin(jnp.var(x @ w, 0)))


def by_square(w, x):
    h = x @ w
    return jnp.sum(jnp.sin(jnp.mean(jnp.square(h - h.mean(0)), 0)))


def by_power(w, x):
    h = x @ w
    centered = h - h.mean(-1, keepdims=True)
    return jnp.sum(jnp.sin(jnp.mean(centered**2, -1)) * centered[:, 0])


def by_product(w, x):
    h = x @ w
    centered = h - jnp.mean(h)
    return jnp.sin(jnp.sum(centered * centered))


VARIANCES = [by_var, by_square, by_power, by_product]


def squares(fn, amp=AMP):
    return sum(eqn.primitive.name == "centered_square" for eqn in equations(jax.make_jaxpr(amp(fn, keep="all"))(W, X)))


@pytest.mark.parametrize("fn", VARIANCES)
def test_it_is_found(fn):
    assert squares(fn) == 1
    assert squares(fn, WITHOUT) == 0


@pytest.mark.parametrize("fn", VARIANCES)
def test_gradients_are_near_to_float64(fn):
    expected = in_float64(jax.grad(fn), W, X)
    error = lambda amp: np.linalg.norm(jax.jit(jax.grad(amp(fn)))(W, X) - expected) / np.linalg.norm(expected)
    assert error(AMP) < max(2e-2, 1.2 * error(WITHOUT))


@pytest.mark.parametrize("transform", [jax.hessian, lambda fn: jax.jacfwd(jax.jacfwd(fn)), jax.jacfwd, jax.jacrev])
@pytest.mark.parametrize("fn", VARIANCES)
def test_derivatives_of_all_kinds(fn, transform):
    """The gradient depends on the mean, though the variance does not. `x` is exact here, and the matmul is another."""
    both = lambda x, w: fn(jnp.eye(4, dtype=x.dtype), x) + jnp.sum(x @ w)
    plain = lambda x, w: fn(jnp.eye(4, dtype=x.dtype), x)
    exact = jnp.round(X * 8) / 8  # in bfloat16 too
    found = transform(lambda x: AMP(both)(x, W))(exact)
    expected = in_float64(lambda x, w: transform(lambda x: plain(x, w))(x), exact, W)
    if transform in (jax.jacfwd, jax.jacrev):
        expected = expected + np.asarray(W, np.float64).sum(1)
    assert np.linalg.norm(found - expected) < 5e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sum((x @ w - (x @ w).mean(0)) ** 2 * Y),  # weighted: the sum is not zero
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((x @ w - x.mean(0)) ** 2, 0))),  # the mean of something else
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((x @ w - (x @ w).mean(0)) ** 2, 1))),  # along other axes
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((x @ w - (x @ w).sum(0) / 5) ** 2, 0))),  # not quite the mean
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((w @ w - (w @ w).mean(0)[:, None]) ** 2, 0))),  # of another column
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((w @ w - (w @ w).mean(0)[:, None]) ** 2, 1))),
        lambda w, x: jnp.sum(jnp.sin(jnp.mean((w @ w - (w @ w).mean(1)) ** 2, 1))),
    ],
)
def test_what_is_left_alone(fn):
    assert squares(fn) == 0


def test_a_mean_that_is_turned():
    def fn(w, x):
        h = jnp.stack([w @ w, x[:4] @ w], -1)
        return jnp.sum(jnp.sin(jnp.mean((h - h.mean(2).T[:, :, None]) ** 2, 2)))

    assert squares(fn) == 0


@pytest.mark.parametrize("fn", VARIANCES)
def test_under_vmap(fn):
    both = jnp.stack([X, X**2])
    found = jax.vmap(jax.grad(AMP(fn)), (None, 0))(W, both)
    expected = jnp.stack([jax.grad(AMP(fn))(W, x) for x in both])
    np.testing.assert_allclose(found, expected, rtol=1e-3, atol=1e-3)


def test_squares_of_numbers_and_of_what_others_sums_were_taken_from():
    """Of a literal, and of an array with fewer axes than the one whose sum is subtracted."""

    def fn(w, x):
        shifted = (x @ w)[0] - jnp.sum(jnp.tanh(x @ w), (0, 1))
        return jnp.sum(shifted**2) * jax.lax.square(jnp.float32(3)) + jnp.sum(x @ w)

    w, x = jnp.ones((4, 3)) / 7, jnp.linspace(-1.0, 1.0, 20).reshape(5, 4)
    found = jax.jit(jax.grad(AMP(fn)))(w, x)
    expected = jax.grad(fn)(w, x)
    assert jnp.max(jnp.abs(found - expected)) < 0.02 * jnp.max(jnp.abs(expected))
