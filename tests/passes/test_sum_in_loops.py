"""What all rounds of a loop read has a gradient that is added up in float32."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_same_bits, equations, in_float64, normal
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WITHOUT = functools.partial(AMP, disable_passes=["sum_in_loops"])
W, X, STEPS = normal(0, 8, 8, scale=0.3), normal(1, 4, 8), 1 + normal(2, 2000, 8, scale=0.1)


def named(jaxpr, name):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == name]


def mapped(w, x, steps):
    h = x @ w
    return jnp.mean(lax.map(lambda step: (h * step) @ w, steps))


def carried(w, x, steps):
    h = x @ w
    return lax.scan(lambda total, step: (total + jnp.mean((h * step) @ w), None), 0.0, steps)[0] / len(steps)


def looked_up(w, x, steps):
    """A slice, and entries at a place that changes."""
    h = x @ w
    part = lambda i: jnp.mean(lax.dynamic_slice(h, (i % 3, 0), (2, 8)) @ w) + jnp.mean((h[i % 4] * steps[i]) @ w)
    return lax.fori_loop(0, len(steps), lambda i, total: total + part(i), 0.0) / len(steps)


def nested(w, x, steps):
    h = x @ w
    inner = lambda steps: lax.map(lambda step: (h * step) @ w, steps)
    return jnp.mean(lax.map(inner, steps.reshape(20, 100, 8)))


def checkpointed(w, x, steps):
    h = x @ w
    return jnp.mean(lax.map(jax.checkpoint(lambda step: jnp.sin((h * step) @ w)), steps))


def in_a_function(w, x, steps):
    return jax.jit(mapped)(w, x, steps)


FUNCTIONS = [mapped, carried, looked_up, nested, checkpointed, in_a_function]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_gradients_are_near_to_float64(fn):
    """Added up in bfloat16, they stand still after some hundred rounds."""
    expected = in_float64(jax.grad(fn), W, X, STEPS)
    error = lambda amp: float(
        np.linalg.norm(jax.jit(jax.grad(amp(fn)))(W, X, STEPS) - expected) / np.linalg.norm(expected)
    )
    assert error(AMP) < min(1e-2, error(WITHOUT) / 4)


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_are_the_same(fn):
    assert_same_bits(jax.jit(AMP(fn))(W, X, STEPS), jax.jit(WITHOUT(fn))(W, X, STEPS))


def test_loops_carry_no_low_sums():
    """What the backward loop adds up comes out of it."""

    def carries(amp):
        (*_, backward) = named(jax.make_jaxpr(jax.grad(amp(mapped)))(W, X, STEPS), "scan")
        return {v.aval.dtype.name for v in backward.outvars if v.aval.shape == (4, 8)}

    assert carries(AMP) == {"float32"}
    assert carries(WITHOUT) == {"bfloat16"}


def test_with_other_transforms():
    fn = AMP(mapped)
    steps = STEPS[:16]
    _, tangent = jax.jvp(fn, (W, X, steps), (W, X, steps))
    expected = in_float64(lambda *a: jax.jvp(mapped, a, a)[1], W, X, steps)
    assert abs(tangent - expected) < 2e-2 * abs(expected)
    several = jax.vmap(jax.grad(fn), (None, None, 0))(W, X, jnp.stack([steps, steps]))
    one = in_float64(jax.grad(mapped), W, X, steps)
    assert np.linalg.norm(several[1] - one) < 2e-2 * np.linalg.norm(one)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    axis = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",), axis_types=(axis,))
    steps = STEPS[:64]
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        found = jax.jit(jax.grad(AMP(mapped)))(put(W), put(X, "d"), put(steps))
    expected = in_float64(jax.grad(mapped), W, X, steps)
    assert np.linalg.norm(np.asarray(found) - expected) < 1e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x, steps: jnp.mean(lax.map(lambda step: (x * step) @ w, steps)),  # what it reads is float32
        lambda w, x, steps: mapped(w, x, steps[:3]),  # few rounds
        lambda w, x, steps: jnp.mean(jax.vmap(lambda step: ((x @ w) * step) @ w)(steps)),  # no loop
    ],
)
def test_what_is_left_alone(fn):
    assert str(jax.make_jaxpr(AMP(fn))(W, X, STEPS)) == str(jax.make_jaxpr(WITHOUT(fn))(W, X, STEPS))


def gram(steps, v):
    return lax.scan(lambda total, x: (total + jnp.outer(x, x) @ v, None), 0 * v, steps)[0] / len(steps) + v


def test_a_linear_loop_is_transposed():
    steps, v = STEPS[:20], W
    (found,) = jax.linear_transpose(AMP(functools.partial(gram, steps)), v)(W)
    expected = in_float64(lambda steps, v: jax.vjp(functools.partial(gram, steps), v)[1](v)[0], steps, W)
    np.testing.assert_allclose(found, expected, rtol=2e-2, atol=2e-2)


def test_a_solver_that_transposes_its_matrix():
    solve = lambda matrix, b: jnp.sum(jax.scipy.sparse.linalg.gmres(matrix, b, maxiter=4)[0] ** 2)
    found = jax.grad(lambda b: solve(AMP(functools.partial(gram, STEPS[:20])), b))(W)
    expected = in_float64(
        lambda steps, b: jax.grad(lambda b: solve(functools.partial(gram, steps), b))(b), STEPS[:20], W
    )
    assert np.linalg.norm(np.asarray(found) - expected) < 3e-2 * np.linalg.norm(expected)
