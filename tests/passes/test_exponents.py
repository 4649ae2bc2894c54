"""The cotangents of exponents that are made of repeated parts or of cumulative sums."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, equations, in_float64, normal
from plans import plan_of

import jaxamp
from jaxamp._passes.exponents import round_exponent_cotangents
from jaxamp._passes.norms import RoundedCotangent
from jaxamp._passes.outer_products import multiply_outer_products

TOKENS, WIDTH = 16, 8
PARAMS = normal(0, WIDTH, WIDTH, scale=0.4), normal(1, WIDTH, WIDTH, scale=0.4), normal(2, WIDTH, scale=0.3)
X = normal(3, TOKENS, WIDTH)
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def logs(params, x):
    return jax.nn.log_sigmoid(x @ params[2] + 1.0)


def scores(params, x):
    return (x @ params[0]) @ (x @ params[1]).T


def decays(params, x):
    """Those of linear attention, with a gate for each token that is read."""
    total, gate = jnp.cumsum(logs(params, x)), x @ params[2]
    return jnp.exp(jnp.where(CAUSAL, total[:, None] - total[None, :] + gate[None, :], -jnp.inf))


def by_differences(params, x):
    return jnp.sum(((scores(params, x) * decays(params, x)) @ (x @ params[0])) ** 2)


def stabilised(params, x):
    """An mLSTM: the largest exponent of a row is subtracted, and each row is divided by its sum."""
    total, gate = jnp.cumsum(logs(params, x)), x @ params[2]
    exponent = jnp.where(CAUSAL, total[:, None] - total[None, :], -jnp.inf) + gate[None, :]
    largest = exponent.max(-1, keepdims=True)
    rows = scores(params, x) * jnp.exp(exponent - largest)
    rows = rows / (jnp.maximum(jnp.abs(rows.sum(-1, keepdims=True)), jnp.exp(-largest)) + 1e-6)
    return jnp.sum((rows @ (x @ params[0])) ** 2)


def by_cumulative_sum(params, x):
    """A state space by chunks: sums of segments of the logarithms."""
    repeated = jnp.where(jnp.tril(CAUSAL, -1), jnp.repeat(logs(params, x)[:, None], TOKENS, 1), 0)
    decay = jnp.exp(jnp.where(CAUSAL, jnp.cumsum(repeated, 0), -jnp.inf))
    return jnp.sum(((scores(params, x) * decay) @ (x @ params[0])) ** 2)


def gated(params, x):
    """Gates for each channel, as in gated linear attention: two exponentials read one cumulative sum."""
    total = jnp.cumsum(jax.nn.log_sigmoid(x @ params[1] + 2.0), 0)
    q, k = (x @ params[0]) * jnp.exp(total), (x @ params[1]) * jnp.exp(-total)
    return jnp.sum((jnp.where(CAUSAL, q @ k.T, 0) @ (x @ params[0])) ** 2)


DECAYS = by_differences, stabilised, by_cumulative_sum, gated


def found(fn, **options):
    plan = plan_of(fn, PARAMS, X, passes=(multiply_outer_products, round_exponent_cotangents), **options)
    return [plan.eqns[part.last].outvars[0] for part in plan.parts if isinstance(part, RoundedCotangent)]


@pytest.mark.parametrize("fn", DECAYS)
def test_the_cotangent_that_several_sums_read_is_rounded_once(fn):
    (var,) = found(fn)
    assert var.aval.size == (TOKENS * WIDTH if fn is gated else TOKENS * TOKENS)


@pytest.mark.parametrize("fn", DECAYS)
def test_gradients_are_exact_as_ever(fn):
    assert_near(jax.jit(jax.grad(AMP(fn)))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), 3e-2)


def test_forward_the_program_is_the_same_but_for_the_mark():
    marks = [
        eqn for eqn in equations(jax.make_jaxpr(AMP(by_differences))(PARAMS, X)) if eqn.params.get("of_value") is False
    ]
    wide = [eqn for eqn in marks if eqn.outvars[0].aval.shape == (TOKENS, TOKENS)]
    assert [eqn.outvars[0].aval.dtype for eqn in wide] == [jnp.float32]


def softmax_by_hand(params, x):
    rows = jnp.exp(scores(params, x) - 3.0)
    return jnp.sum(((rows / rows.sum(-1, keepdims=True)) @ x) ** 2)


def one_repeated(params, x):
    return jnp.sum((jnp.exp(jnp.tanh(x @ params[0]) + params[2]) @ params[1]) ** 2)


def read_in_float32(params, x):
    """Kernels of a Gaussian process: nothing low reads them."""
    a, b = x @ params[2], x @ params[0][0]
    return jnp.sum(jnp.exp(-((a[:, None] - b[None, :]) ** 2)))


def of_two_parts(params, x):
    """XLA makes the cotangent for each of two sums, and does not write it."""
    total = jnp.cumsum(logs(params, x))
    decay = jnp.exp(jnp.where(CAUSAL, total[:, None] - total[None, :], -jnp.inf))
    return jnp.sum(((scores(params, x) * decay) @ (x @ params[0])) ** 2)


def returned(params, x):
    decay = decays(params, x)
    return (scores(params, x) * decay) @ (x @ params[0]), decay


def pinned(params, x):
    with jaxamp.amp_stop():
        decay = decays(params, x)
    return jnp.sum(((scores(params, x) * decay) @ (x @ params[0])) ** 2)


def pinned_sum(params, x):
    with jaxamp.amp_stop():
        total = jnp.cumsum(jax.nn.log_sigmoid(x @ params[1]), 0)
    return jnp.sum((((x @ params[0]) * jnp.exp(total)) @ params[0]) ** 2)


@pytest.mark.parametrize(
    "fn", [softmax_by_hand, one_repeated, of_two_parts, read_in_float32, returned, pinned, pinned_sum]
)
def test_others_are_left_alone(fn):
    assert found(fn) == []


@pytest.mark.parametrize("options", [{"keep": "all"}, {"compute_dtype": jnp.float16}])
def test_nothing_is_rounded_where_everything_is_kept_nor_in_float16(options):
    assert found(by_differences, **options) == []


def test_second_derivatives_and_batches():
    along = lambda fn: lambda params, x: jax.jvp(lambda p: jax.grad(fn)(p, x), (params,), (params,))[1]
    for fn in DECAYS:
        assert_near(jax.jit(along(AMP(fn)))(PARAMS, X), in_float64(along(fn), PARAMS, X), 1e-1)
    both_rows = lambda fn: jax.grad(lambda p, xs: jnp.sum(jax.vmap(fn, (None, 0))(p, xs)))
    xs = jnp.stack([X, X[::-1]])
    for fn in (by_differences, by_cumulative_sum, gated):
        assert_near(jax.jit(both_rows(AMP(fn)))(PARAMS, xs), in_float64(both_rows(fn), PARAMS, xs), 3e-2)


@jax.jit
def sums(a):
    return jnp.cumsum(a, 0), jnp.sum(a)


def of_a_function_with_two_results(params, x):
    total, rest = sums(jax.nn.log_sigmoid(x @ params[1]))
    return jnp.sum((((x @ params[0]) * jnp.exp(total)) @ params[0]) ** 2) + rest


def test_a_cumulative_sum_may_be_one_of_several_results():
    fn = of_a_function_with_two_results
    assert found(fn) == []
    assert_near(jax.jit(jax.grad(AMP(fn)))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), 3e-2)
