"""Activations between matmuls, whose results are kept."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, assert_same_bits, both, error, in_float64, jaxpr_of, kept, names, normal
from jax.experimental import jet
from plans import plan_of

import jaxamp
from jaxamp._passes.activations import Activation, keep_activations

WITHOUT = functools.partial(AMP, disable_passes=["keep_activations"])
X = normal(0, 8, 16)
WEIGHTS = [(normal(i + 1, 16, 16, scale=0.3), normal(i + 5, 16, scale=0.1)) for i in range(3)]
ACTIVATIONS = {"relu": jax.nn.relu, "tanh": jnp.tanh}
each = pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)


def mlp(weights, x, activation=jax.nn.relu):
    for w, b in weights:
        x = activation(x @ w + b)
    return jnp.sum(jnp.sin(x @ weights[0][0]))


def looped(weights, x, activation=jax.nn.relu):
    layer = lambda x, p: (x + activation(activation(x @ p[0] + p[1]) @ p[0]) @ p[0], None)
    return jnp.sum(jax.lax.scan(layer, x, jax.tree.map(lambda *p: jnp.stack(p), *weights))[0])


def convolutions(weights, x, activation=jax.nn.relu):
    x = x.reshape(1, 8, 16)
    for w, b in weights:
        filters = w.reshape(1, 16, 16)
        x = activation(
            jax.lax.conv_general_dilated(x, filters, (1,), "SAME", dimension_numbers=("NWC", "WIO", "NWC")) + b
        )
    return jnp.sum(jnp.sin(x @ weights[0][0]))


NETWORKS = {"mlp": mlp, "mapped": lambda p, x, f=jax.nn.relu: jnp.sum(jax.vmap(lambda x: mlp(p, x, f))(x))}
NETWORKS |= {"looped": looped, "convolutions": convolutions}
networks = pytest.mark.parametrize("fn", NETWORKS.values(), ids=NETWORKS)


@each
@networks
def test_values_and_gradients_are_those_without_the_pass(fn, activation):
    for transform in (lambda f: f, jax.grad, lambda f: jax.grad(f, 1)):
        found, expected = (
            jax.jit(transform(amp(fn)), static_argnums=2)(WEIGHTS, X, activation) for amp in (AMP, WITHOUT)
        )
        if activation is jax.nn.relu:
            assert_same_bits(found, expected)
        else:  # XLA may leave out a rounding where it makes the result again
            assert_near(found, expected, 1e-2)


@both
@each
@networks
def test_they_are_as_near_to_float64(fn, activation, low):
    gradient = lambda fn: jax.jit(jax.grad(fn, (0, 1)), static_argnums=2)
    found, without = (gradient(amp(fn, compute_dtype=low))(WEIGHTS, X, activation) for amp in (AMP, WITHOUT))
    expected = in_float64(jax.grad(lambda p, x: fn(p, x, activation), (0, 1)), WEIGHTS, X)
    for ours, theirs, exact in zip(*map(jax.tree.leaves, (found, without, expected)), strict=True):
        assert error(ours, exact) <= 1.2 * error(theirs, exact) + 2e-3


@each
@pytest.mark.parametrize("fn", [mlp, convolutions])
def test_the_result_is_kept_and_not_the_matmuls(fn, activation):
    fn = functools.partial(fn, activation=activation)
    sizes = [sum(1 for shape, _ in kept(amp(fn), WEIGHTS, X) if shape[-2:] == (8, 16)) for amp in (AMP, WITHOUT)]
    assert sizes[0] <= sizes[1]
    assert "kept_" + ("relu" if activation is jax.nn.relu else "tanh") in names(jaxpr_of(AMP(fn), WEIGHTS, X))


def test_a_loop_stacks_one_value_for_each_activation():
    stacked = [shape for shape, _ in kept(AMP(looped), WEIGHTS, X) if shape == (3, 8, 16)]
    assert len(stacked) == 3  # the state, and the results of both


def test_at_zero_a_relu_has_the_derivative_that_jax_gives_it():
    w = jnp.array([[1.0, -1.0, 0.0], [1.0, 1.0, 0.0]])
    loss = lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ jnp.ones((3, 3)))
    x = jnp.array([[1.0, 1.0], [0.0, 2.0]])  # 2, 0 and 0; then 2, 2 and 0
    assert "kept_relu" in names(jaxpr_of(AMP(loss), w, x))
    assert_same_bits(jax.grad(AMP(loss), (0, 1))(w, x), jax.grad(loss, (0, 1))(w, x))


def test_nan_and_infinity_pass():
    loss = lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w)
    for bad in (jnp.nan, jnp.inf):
        w = jnp.eye(2).at[0, 0].set(bad)
        found, expected = (jax.grad(f)(w, jnp.ones((2, 2))) for f in (AMP(loss), loss))
        assert (jnp.isfinite(found) == jnp.isfinite(expected)).all()


@each
def test_higher_derivatives(activation):
    fn = lambda p, x: mlp(p, x, activation)
    hvp = lambda f: lambda p, x: jax.jvp(lambda x: jax.grad(f, 1)(p, x), (x,), (x,))[1]
    found, expected = jax.jit(hvp(AMP(fn)))(WEIGHTS, X), in_float64(hvp(fn), WEIGHTS, X)
    if activation is jax.nn.relu:  # its second derivative is zero: what is left is that of the sine
        assert_same_bits(found, jax.jit(hvp(WITHOUT(fn)))(WEIGHTS, X))
    else:
        assert_near(found, expected, 0.1)


def test_taylor_series():
    (w, _), (v, _), _ = WEIGHTS
    fn = lambda w, v, x: jnp.sum((jnp.tanh(x @ w) @ v) ** 2)
    assert "kept_tanh" in names(jaxpr_of(AMP(fn), w, v, X))
    value, terms = jet.jet(lambda x: AMP(fn)(w, v, x), (X,), ((X, jnp.zeros_like(X)),))
    expected = in_float64(lambda w, v, x: jax.jvp(lambda x: fn(w, v, x), (x,), (x,)), w, v, X)
    assert_near((value, terms[0]), expected, 2e-2)


@jax.custom_jvp
def own_relu(x):
    return jnp.maximum(x, 0)


own_relu.defjvps(lambda t, ans, x: jnp.where(x > -1, t, 0))  # a straight-through estimator
OTHERS = {
    "a user's": lambda w, x: own_relu(x @ w) @ w,
    "half a derivative at zero": lambda w, x: jnp.maximum(x @ w, 0) @ w,
    "after a norm": lambda w, x: jax.nn.relu((y := x @ w) - y.mean(0)) @ w,
    "of an argument": lambda w, x: jax.nn.relu(x) @ w,
    "read in float32": lambda w, x: jnp.exp(jax.nn.relu(x @ w)),
    "of a result with other readers": lambda w, x: jax.nn.relu(y := x @ w) @ w + jnp.sin(y),
    "gelu": lambda w, x: jax.nn.gelu(x @ w) @ w,
    "leaky": lambda w, x: jax.nn.leaky_relu(x @ w) @ w,
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_others_are_left_alone(fn):
    plan = plan_of(lambda w, x: jnp.sum(fn(w, x)), WEIGHTS[0][0], X, passes=(keep_activations,))
    assert not any(isinstance(part, Activation) for part in plan.parts)


def test_nor_is_one_that_a_scope_pins():
    def fn(w, x):
        y = x @ w
        with jax.named_scope("exact"):
            y = jnp.tanh(y)
        return jnp.sum(y @ w)

    options = {"passes": (keep_activations,), "policy": {"exact": jaxamp.use_compute_precision}}
    plan = plan_of(fn, WEIGHTS[0][0], X, **options)
    assert not any(isinstance(part, Activation) for part in plan.parts)


def test_the_report_names_them_as_before():
    report = jaxamp.amp_report(mlp, compute_dtype=jnp.bfloat16)(WEIGHTS, X)
    assert [row.primitive for row in report.rows if row.primitive in ("relu", "max")]
