"""Which signs numbers may have, as far as the equations say."""

import jax
import jax.numpy as jnp
import pytest

from jaxamp._compat import open_jaxpr
from jaxamp._plan.signs import ANY, NOT_BELOW, Signs, SignsOf

NOT_ABOVE, ZERO = -NOT_BELOW, Signs(False, False)


def signs_of(fn):
    body = open_jaxpr(jax.make_jaxpr(fn)(jnp.ones(3), jnp.ones(3)))
    return SignsOf(body.eqns)(body.outvars[0])


@pytest.mark.parametrize(
    ("fn", "expected"),
    [
        (lambda x, y: x, ANY),
        (lambda x, y: x * y, ANY),
        (lambda x, y: jnp.exp(x) - jnp.exp(y), ANY),
        (lambda x, y: jnp.log(jnp.exp(x)), ANY),
        (lambda x, y: jnp.where(x > 0, x, 1.0), ANY),
        (lambda x, y: jnp.exp(x), NOT_BELOW),
        (lambda x, y: jax.nn.relu(x) * jnp.abs(y) + 2.0, NOT_BELOW),
        (lambda x, y: (x * y) ** 2 / jax.nn.sigmoid(x), NOT_BELOW),
        (lambda x, y: jnp.sum(x**4), NOT_BELOW),
        (lambda x, y: jnp.maximum(x, 0.5), NOT_BELOW),
        (lambda x, y: jnp.clip(x, 1e-3, 0.1), NOT_BELOW),
        (lambda x, y: jax.nn.softplus(x), NOT_BELOW),
        (lambda x, y: jax.checkpoint(jnp.exp)(x), NOT_BELOW),
        (lambda x, y: -jax.nn.softplus(x)[:, None] * jnp.exp(y), NOT_ABOVE),
        (lambda x, y: jax.nn.log_sigmoid(x), NOT_ABOVE),
        (lambda x, y: -8.0 * jax.nn.sigmoid(x) * jax.nn.softplus(y), NOT_ABOVE),
        (lambda x, y: jnp.einsum("i,j->ij", jax.nn.softplus(x), -jnp.exp(y)), NOT_ABOVE),
        (lambda x, y: jnp.minimum(x, 0.0), NOT_ABOVE),
        (lambda x, y: jnp.clip(x, -20.0, 0.0), NOT_ABOVE),
        (lambda x, y: jnp.expm1(-jnp.abs(x)) ** 3, NOT_ABOVE),
        (lambda x, y: jnp.concatenate([-jnp.exp(x), jnp.tanh(-(y * y))])[::-1], NOT_ABOVE),
        (lambda x, y: 0.0 * x, ZERO),
    ],
)
def test_signs(fn, expected):
    assert signs_of(fn) == expected


def test_long_chains():
    def fn(x, y):
        for _ in range(3000):
            x = jnp.abs(x)
        return -x

    assert signs_of(fn) == NOT_ABOVE
