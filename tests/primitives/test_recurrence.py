"""The values and derivatives of a linear recurrence are those of a loop."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import error, in_float64, normal
from jax import lax
from jax.experimental import jet

from jaxamp._primitives.recurrence import linear_recurrence

LENGTHS = [1, 2, 3, 8, 13]


def loop(decays, x, logarithmic):
    """As it is defined, along the first axis."""
    factors = jnp.exp(decays) if logarithmic else decays
    step = lambda y, both: (both[0] * y + both[1],) * 2
    return lax.scan(step, jnp.zeros_like(x[0]), (jnp.broadcast_to(factors, x.shape), x))[1]


def operands(n, logarithmic, *shape):
    decays = -jnp.exp(normal(0, n, *shape))
    return decays if logarithmic else jnp.exp(decays), normal(1, n, 3)


@pytest.mark.parametrize("by_pairs", [False, True])
@pytest.mark.parametrize("logarithmic", [False, True])
@pytest.mark.parametrize("n", LENGTHS)
def test_values_and_derivatives(n, logarithmic, by_pairs):
    for shape in ((3,), (1,)):
        decays, x = operands(n, logarithmic, *shape)
        own = lambda d, x: linear_recurrence(d, x, 0, logarithmic, by_pairs)
        for transform in (lambda f: f, _gradients, _tangents, _second):
            of_loop = transform(lambda d, x: loop(d, x, logarithmic))
            found, expected = transform(own)(decays, x), in_float64(of_loop, decays, x)
            for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
                assert np.allclose(a, b, rtol=1e-4, atol=1e-4)


def _gradients(f):
    return jax.grad(lambda d, x: jnp.sum(jnp.sin(f(d, x))), (0, 1))


def _tangents(f):
    return lambda d, x: jax.jvp(f, (d, x), (jnp.cos(d), jnp.sin(x)))


def _second(f):
    return lambda d, x: jax.jvp(_gradients(f), (d, x), (jnp.cos(d), jnp.sin(x)))[1]


def test_what_decays_before_the_first_step_is_nothing():
    """The first decay does not matter, whatever it is."""
    decays, x = operands(6, False, 3)
    for first in (jnp.nan, jnp.inf, 0.0):
        y, pull = jax.vjp(lambda d: linear_recurrence(d, x, 0, False, False), decays.at[0].set(first))
        assert np.allclose(y, loop(decays, x, False), atol=1e-5)
        assert np.isfinite(pull(y)[0]).all()


def test_states_may_be_reset():
    decays, x = operands(9, True, 3)
    decays = decays.at[4].set(-jnp.inf)
    y, pull = jax.vjp(lambda d, x: linear_recurrence(d, x, 0, True, False), decays, x)
    assert np.allclose(y[4], x[4])
    assert all(np.isfinite(g).all() for g in pull(y))


@pytest.mark.parametrize(("of_decays", "of_x"), [(0, 0), (None, 0), (1, None), (2, 1)])
def test_mapped(of_decays, of_x):
    decays, x = normal(0, 7, 3), normal(1, 7, 3)
    if of_decays is not None:
        decays = jnp.moveaxis(normal(0, 2, 7, 3), 0, of_decays)
    if of_x is not None:
        x = jnp.moveaxis(normal(1, 2, 7, 3), 0, of_x)
    found = jax.vmap(lambda d, x: linear_recurrence(d, x, 0, True, False), (of_decays, of_x))(decays, x)
    expected = jax.vmap(lambda d, x: loop(d, x, True), (of_decays, of_x))(decays, x)
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_results_have_the_dtype_of_what_is_added():
    decays, x = operands(8, True, 3)
    low = linear_recurrence(decays.astype(jnp.bfloat16), x.astype(jnp.bfloat16), 0, True, False)
    assert low.dtype == jnp.bfloat16
    assert error(low, in_float64(lambda d, x: loop(d, x, True), decays, x)) < 1e-2
    gradient = jax.grad(lambda d: jnp.sum(linear_recurrence(d, x.astype(jnp.bfloat16), 0, True, False) ** 2))(decays)
    assert gradient.dtype == jnp.float32


def test_jet():
    decays, x = operands(6, True, 3)
    along = lambda t: linear_recurrence(decays * (1 + t), x, 0, True, False)
    _, (first, second) = jet.jet(along, (0.5,), ((1.0, 0.0),))
    expected = jax.jacfwd(lambda t: loop(decays * (1 + t), x, True))
    assert np.allclose(first, expected(0.5), rtol=1e-4, atol=1e-4)
    assert np.allclose(second, jax.jacfwd(expected)(0.5), rtol=1e-4, atol=1e-4)
