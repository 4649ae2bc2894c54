"""Scores that a tanh caps in front of a softmax."""

import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import AMP, assert_near, equations, in_float64, kept, normal
from plans import plan_of

import jaxamp
from jaxamp._passes.caps import Cap, hold_caps_low

TOKENS, WIDTH, CAP = 24, 8, 5.0
PARAMS = tuple(normal(i, WIDTH, WIDTH, scale=0.6) for i in range(3))
X = normal(3, TOKENS, WIDTH)
CAUSAL = jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def scores(params, x):
    return (x @ params[0]) @ (x @ params[1]).T


def masked(params, x):
    rows = jnp.where(CAUSAL, jnp.tanh(scores(params, x) / CAP) * CAP, -1e9)
    return jnp.sum((jax.nn.softmax(rows) @ (x @ params[2])) ** 2)


def by_heads(params, x):
    """Scores of two heads, moved between the matmul and the tanh, as in Gemma."""
    q, k, v = ((x @ w).reshape(TOKENS, 2, -1) for w in params)
    rows = jnp.einsum("thd,shd->ths", q, k).reshape(TOKENS, 2, TOKENS)
    rows = CAP * jnp.tanh(rows / CAP)
    return jnp.sum(jnp.einsum("ths,shd->thd", jax.nn.softmax(jnp.where(CAUSAL[:, None], rows, -1e9)), v) ** 2)


def by_hand(params, x):
    rows = CAP * jnp.tanh(scores(params, x) / CAP)
    rows = jnp.exp(rows - jax.lax.stop_gradient(rows.max(-1, keepdims=True)))
    return jnp.sum((rows / rows.sum(-1, keepdims=True) @ (x @ params[2])) ** 2)


def of_logits(params, x):
    """Of a head whose logits are larger than what they are made of."""
    logits = CAP * jnp.tanh(jnp.tanh(x @ params[0]) @ jnp.tile(params[1], (1, 8)) / CAP)
    return -jnp.mean(jax.nn.log_softmax(logits)[:, 3])


def of_labels(params, x):
    logits = CAP * jnp.tanh(jnp.tanh(x @ params[0]) @ jnp.tile(params[1], (1, 8)) / CAP)
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.arange(TOKENS)).mean()


CAPPED = masked, by_heads, by_hand, of_logits, of_labels


def found(fn, **options):
    plan = plan_of(fn, PARAMS, X, passes=(hold_caps_low,), **options)
    return [plan.steps[part.last] for part in plan.parts if isinstance(part, Cap)]


@pytest.mark.parametrize("fn", CAPPED)
def test_a_cap_is_found_however_the_softmax_is_written(fn):
    (step,) = found(fn)
    assert step.reads[0].low
    assert step.outs[0].is_low


@pytest.mark.parametrize("fn", CAPPED)
def test_gradients_are_exact(fn):
    assert_near(jax.jit(jax.grad(AMP(fn)))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), 3e-2)


def test_second_derivatives_and_batches():
    along = lambda fn: lambda params, x: jax.jvp(lambda p: jax.grad(fn)(p, x), (params,), (params,))[1]
    assert_near(jax.jit(along(AMP(masked)))(PARAMS, X), in_float64(along(masked), PARAMS, X), 6e-2)
    rows = lambda fn: jax.grad(lambda p, xs: jnp.sum(jax.vmap(fn, (None, 0))(p, xs)))
    xs = jnp.stack([X, X[::-1]])
    assert_near(jax.jit(rows(AMP(masked)))(PARAMS, xs), in_float64(rows(masked), PARAMS, xs), 3e-2)


def test_the_tanh_is_kept_in_place_of_the_scores():
    squares = lambda **options: [
        dtype
        for shape, dtype in kept(AMP(masked, **options), PARAMS, X)
        if shape == (TOKENS, TOKENS) and dtype != "bool"
    ]
    assert set(squares()) == {"bfloat16"}
    assert len(squares()) <= len(squares(disable_passes=["hold_caps_low"])) + 1


def test_the_tanh_runs_low_and_once():
    tanhs = lambda fn: [eqn for eqn in equations(jax.make_jaxpr(fn)(PARAMS, X)) if "tanh" in eqn.primitive.name]
    assert [eqn.outvars[0].aval.dtype for eqn in tanhs(AMP(masked))] == [jnp.bfloat16]
    assert len(tanhs(jax.grad(AMP(masked)))) == 1


def read_otherwise(params, x):
    """A penalty on large scores: the capped ones are read in float32, too."""
    rows = CAP * jnp.tanh(scores(params, x) / CAP)
    return jnp.sum((jax.nn.softmax(rows) @ (x @ params[2])) ** 2) + jnp.sum(rows**2)


def scores_read_twice(params, x):
    rows = scores(params, x)
    return jnp.sum((jax.nn.softmax(CAP * jnp.tanh(rows / CAP)) @ (x @ params[2])) ** 2) + jnp.sum(jnp.sin(rows))


def exact(params, x):
    with jaxamp.amp_stop():
        rows = CAP * jnp.tanh(scores(params, x) / CAP)
    return jnp.sum((jax.nn.softmax(rows) @ (x @ params[2])) ** 2)


def of_what_is_exact(params, x):
    rows = CAP * jnp.tanh(jnp.exp(scores(params, x) / 30))
    return jnp.sum((jax.nn.softmax(rows) @ (x @ params[2])) ** 2)


def a_loss(params, x):
    return jnp.sum(jnp.log1p(jnp.tanh(scores(params, x)) ** 2))


@pytest.mark.parametrize("fn", [read_otherwise, scores_read_twice, exact, of_what_is_exact, a_loss])
def test_others_stay_float32(fn):
    assert found(fn) == []


@pytest.mark.parametrize("options", [{"keep": "all"}, {"compute_dtype": jnp.float16}])
def test_nothing_changes_where_everything_is_kept_nor_in_float16(options):
    assert found(masked, **options) == []
