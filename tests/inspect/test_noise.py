"""Gradients that are zero in exact arithmetic raise no alarm; wrong ones do, however small."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, both, normal

from jaxamp import assert_amp_close, compare
from jaxamp._inspect.comparison import Compared, Error
from jaxamp._inspect.noise import _beyond_noise

X, W = normal(0, 2, 12, 16), normal(1, 16, 16, scale=0.25)
BIAS = normal(2, 16, scale=0.1)


def attention(q, k, v):
    return jnp.sum(jnp.tanh(jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 4) @ v))


def bias_of_keys(b, x, w):
    return attention(x @ w, x @ w.T + b, x @ w)


def bias_of_queries_with_constant_keys(b, x, w):
    return attention(x @ w + b, jnp.broadcast_to(x[:, :1] @ w.T, x.shape), x @ w)


def normed(x, axes):
    return (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + 1e-5)


def bias_before_a_batch_norm(b, x, w):
    return jnp.sum(jnp.tanh(normed(x @ w + b, (0, 1)) @ w))


def shift_before_a_layer_norm(b, x, w):
    return jnp.sum(jnp.tanh(normed(x @ w + b[0], -1) @ w))


def shift_of_a_softmax(b, x, w):
    return -jnp.mean(jax.nn.log_softmax(x @ w + b[0])[..., 0])


ZERO = (
    bias_of_keys,
    bias_of_queries_with_constant_keys,
    bias_before_a_batch_norm,
    shift_before_a_layer_norm,
    shift_of_a_softmax,
)


@pytest.mark.parametrize("low", [BF16, pytest.param(F16, marks=pytest.mark.slow)])
@pytest.mark.parametrize("fn", ZERO, ids=lambda fn: fn.__name__)
def test_a_gradient_that_is_zero_raises_no_alarm(fn, low):
    with jax.enable_x64(True):
        exact = np.abs(jax.grad(fn)(*(jnp.asarray(x, jnp.float64) for x in (BIAS, X, W)))).max()
    assert exact < 1e-12  # float64 agrees that it is zero
    (row,) = compare(fn, compute_dtype=low)(BIAS, X, W).gradients
    assert row.distance < row.noise
    assert row.error.relative == 0


@pytest.mark.slow
def test_a_note_names_it_and_with_64_bits_too():
    assert_amp_close(bias_of_keys, (BIAS, X, W), compute_dtype=jnp.bfloat16)
    found = compare(bias_of_keys, compute_dtype=jnp.bfloat16)(BIAS, X, W)
    assert found.notes == ("rounding and nothing else, in float32 as under amp: the argument",)
    with jax.enable_x64(True):
        found = compare(bias_of_keys, compute_dtype=jnp.bfloat16)(BIAS, X, W)
    assert (found.reference, found.gradients[0].error.relative) == ("float64", 0.0)


@both
def test_a_small_gradient_is_not_taken_for_zero(low):
    """The same biases with a value in their gradients, a millionth of their neighbours'."""
    fn = lambda b, x, w: 1e-6 * jnp.sum(b) + bias_of_queries_with_constant_keys(0 * b, x, w)
    (row,) = compare(fn, compute_dtype=low)(BIAS, X, W).gradients
    assert row.noise == 0


def test_small_gradients_that_are_flushed_to_zero_are_told():
    fn = lambda b, x, w: 1e-9 * jnp.sum(jnp.tanh((x @ w + b) @ w))
    with pytest.raises(AssertionError, match="gradient the argument: relative error"):
        assert_amp_close(fn, (BIAS, X, W), compute_dtype=jnp.float16)


def test_an_ill_conditioned_gradient_is_told():
    """Float32 has digits that are right, and bfloat16 has none: this is no rounding of a zero."""

    def distances(x):
        squares = jnp.sum(x**2, -1)
        return jnp.sum(jnp.sqrt(jnp.abs(squares[:, None] + squares[None] - 2 * x @ x.T) + 1.0))

    with pytest.raises(AssertionError, match="relative error"):
        assert_amp_close(distances, (normal(3, 16, 8) + 30.0,), compute_dtype=jnp.bfloat16)


def test_what_is_beyond_rounding_is_an_error():
    row = Compared("['k']", "", None, "float32", Error(1e6, 0.0, 1e-9), distance=1e-3)
    assert _beyond_noise(row, noise=0.0, times=8.0) == row
    assert _beyond_noise(row, noise=1e-3, times=8.0).error.relative == 0
    assert _beyond_noise(row, noise=1e-5, times=8.0).error.relative == pytest.approx(0.92e6)
    exact = row._replace(error=Error(float("inf"), 0.0, 0.0))  # the reference happens to be zero
    assert _beyond_noise(exact, noise=1e-3, times=8.0).error.relative == 0
    assert _beyond_noise(exact, noise=1e-5, times=8.0).error.relative == float("inf")
