"""Softmaxes between low matmuls: one low array is kept of each, and what only looks like one is left alone."""

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_near, both, count, dtypes_of, equations, in_float64, kept, normal
from jax import lax
from plans import plan_of
from small_networks import PARAMS, ROWS, WIDTH, X, attention, mlp

import jaxamp
from jaxamp._passes.softmax import low_softmaxes


@both
def test_softmax_between_matmuls_keeps_its_low_result_alone(low):
    amp = jaxamp.amp(attention, compute_dtype=low)
    square = [dtype for shape, dtype in kept(amp, PARAMS, X) if shape == (ROWS, ROWS)]
    assert square == [jnp.dtype(low).name]
    assert_near(
        jax.jit(jax.grad(amp))({"up": PARAMS["up"]}, X),
        in_float64(jax.grad(attention), {"up": PARAMS["up"]}, X),
        4e-2 if low == jnp.bfloat16 else 6e-3,
    )


@pytest.mark.parametrize("axis", [-1, 0, (0, 1)])
def test_softmax_is_found_over_any_axes(axis):
    def fn(x):
        return jnp.sum(jax.nn.softmax(x @ x.T, axis=axis) @ x * x)

    small = 0.2 * X
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(amp)(small)
    assert count("custom_jvp_call", jaxpr) == 1
    assert dtypes_of("exp", jaxpr) == ["float32"]
    assert_near(jax.grad(amp)(small), in_float64(jax.grad(fn), small), 3e-2)


@both
def test_the_gradient_of_a_softmax_ignores_what_all_of_a_row_shares(low):
    """Probabilities that are rounded do not sum to one: taken as they are, they let a common cotangent through."""
    fn = lambda scores: jnp.sum(jax.nn.softmax(scores @ jnp.eye(ROWS)) @ jnp.ones((ROWS, 1)))
    found = jax.grad(jaxamp.amp(fn, compute_dtype=low))(normal(1, ROWS, ROWS))
    assert np.abs(found).max() < 1e-6


def test_softmax_in_float16_survives_scores_beyond_the_range_of_its_exponentials():
    def fn(x):
        return jnp.sum(jax.nn.softmax(x @ x.T * 40.0, axis=-1) @ x)

    found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.float16))(X)
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (lambda y: (y @ x, y))(jax.nn.softmax(x @ x, -1)),  # the result is returned as well
        lambda x: jnp.sum(jax.nn.softmax(x @ x, -1)),  # it is read wide
        lambda x: (lambda e: (e / e.sum(-1, keepdims=True)) @ x + e)(jnp.exp(x @ x)),  # so are the exponentials
        lambda x: (lambda e: (e / e.sum(0)[:, None]) @ x)(jnp.exp(x @ x)),  # not a softmax: sums of the other axis
        lambda x: (lambda e: (e / jnp.broadcast_to(e.sum(1), e.shape)) @ x)(jnp.exp(x @ x)),  # nor of the other axis
        lambda x: (jnp.exp(x @ x) / jnp.exp(x.T @ x).sum(-1, keepdims=True)) @ x,  # two exponentials
    ],
)
def test_what_only_looks_like_a_softmax_is_left_alone(fn):
    square = 0.3 * X[:WIDTH]
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert count("materialized", jax.make_jaxpr(amp)(square)) == 0
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, fn(jnp.asarray(np.asarray(square, np.float64))))
    for a, b in zip(jax.tree.leaves(amp(square)), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("primitive", [lax.exp_p, lax.reduce_sum_p, lax.div_p])
def test_a_softmax_with_a_rule_of_the_user_in_it_is_left_alone(primitive):
    fn = lambda x: jax.nn.softmax(x @ x.T, -1) @ x
    rule = lambda compute_dtype, dtypes, *xs, **params: ([x.astype(jnp.float32) for x in xs], params)
    policy = jaxamp.default_amp_policy | {primitive: rule}
    assert count("materialized", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(X)) == 0
    assert count("materialized", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(X)) == 1


def test_a_softmax_that_is_pinned_is_left_alone():
    def fn(x):
        scores = x @ x.T
        with jaxamp.amp_stop():
            weights = jax.nn.softmax(scores, -1)
        return weights @ x

    assert count("materialized", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(X)) == 0


def test_float32_leaves_softmaxes_and_activations_as_they_are():
    rule = lambda compute_dtype, dtypes, *xs, **params: (xs, params)
    policy = jaxamp.default_amp_policy | {lax.sin_p: rule}
    fn = lambda params, x: attention(params, jnp.sin(x)) + mlp(params, x)
    names = [e.primitive.name for e in equations(jax.make_jaxpr(fn)(PARAMS, X))]
    amp = jaxamp.amp(fn, compute_dtype=jnp.float32, amp_policy=policy)
    assert [e.primitive.name for e in equations(jax.make_jaxpr(amp)(PARAMS, X))] == names


def test_second_order_and_forward_mode_of_a_softmax():
    fn = lambda x: jnp.sum(jax.nn.softmax(x @ x.T, -1) @ x * x)
    small, amp = 0.2 * X, jaxamp.amp(fn, compute_dtype=jnp.float16)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(small, np.float64))
        tangent = np.asarray(jax.jvp(fn, (wide,), (wide,))[1])
        curvature = np.asarray(jax.jvp(jax.grad(fn), (wide,), (wide,))[1])
    assert abs(float(jax.jvp(amp, (small,), (small,))[1]) - tangent) < 5e-3 * abs(tangent)
    found = jax.jvp(jax.grad(amp), (small,), (small,))[1]
    assert np.linalg.norm(found - curvature) < 1e-2 * np.linalg.norm(curvature)


def test_a_softmax_in_a_scan_is_kept_once():
    def fn(weights, x):
        layer = lambda x, w: (x + jax.nn.softmax((x @ w) @ x.T / 4.0) @ x, None)
        return jnp.sum(lax.scan(layer, x, weights)[0])

    weights = normal(4, 3, WIDTH, WIDTH, scale=0.1)
    stacked = [
        dtype
        for shape, dtype in kept(jaxamp.amp(fn, compute_dtype=jnp.bfloat16), weights, X)
        if shape == (3, ROWS, ROWS)
    ]
    assert stacked == ["bfloat16"]
    assert_near(
        jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(weights, X), in_float64(jax.grad(fn), weights, X), 4e-2
    )


def test_a_softmax_is_held_low():
    """A value that says float32 and is not would be taken for a parameter by the passes after it."""
    policy = jaxamp.default_amp_policy | {lax.add_p: jaxamp.use_compute_precision}
    fn = lambda w, v, x: (jax.nn.softmax(x[:1] @ w) + v @ w) @ w
    w = normal(3, 8, 8)
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(
        w, normal(4, 5, 8), normal(5, 5, 8)
    )
    assert [eqn.params["of_value"] for eqn in equations(jaxpr) if eqn.primitive.name == "materialized"] == [True]


# -- plans


def between_matmuls(x, w):
    return jax.nn.softmax(x @ w) @ w


def test_a_plan_with_a_softmax():
    plan = plan_of(between_matmuls, X, PARAMS["up"][:, :WIDTH])
    (region,) = [part for part in low_softmaxes(plan).parts if not isinstance(part, int)]
    assert [plan.eqns[i].primitive.name for i in region.parts] == ["exp", "reduce_sum", "broadcast_in_dim", "div"]
    assert (region.last, region.axes) == (region.parts[-1], (1,))
    assert low_softmaxes(plan).steps is plan.steps


@pytest.mark.parametrize("options", [{"keep": "all"}, {"compute_dtype": jnp.float32}])
def test_plans_that_are_left_as_they_are(options):
    plan = plan_of(between_matmuls, X, PARAMS["up"][:, :WIDTH], **options)
    assert low_softmaxes(plan) is plan
