"""A matmul that is repeated is computed once, and so is what is made of its result; nothing else changes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, error, in_float64, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import jaxamp
from jaxamp._passes.repeats import merge_repeats

W, X = (normal(0, 3, 16), normal(1, 16, 16), normal(2, 16, 1)), normal(3, 32, 3)
ACTIVATIONS = [jnp.tanh, jnp.sin, jax.nn.silu, jax.nn.gelu, jax.nn.relu]


def network(w, x, activation=jnp.tanh):
    for matrix in w[:-1]:
        x = activation(x @ matrix)
    return (x @ w[-1])[0]


def energy_and_forces(w, x, activation=jnp.tanh):
    energy = jax.vmap(lambda x: network(w, x, activation))(x)
    forces = jax.vmap(jax.grad(lambda x: network(w, x, activation)))(x)
    return jnp.mean(energy**2) + jnp.mean(forces**2)


def laplacian(w, x, activation=jnp.tanh):
    def at(x):
        slope = jax.grad(lambda x: network(w, x, activation))
        return sum(jax.jvp(slope, (x,), (one,))[1] @ one for one in jnp.eye(len(x), dtype=x.dtype))

    return jnp.mean(jax.vmap(at)(x) ** 2)


def matmuls(jaxpr) -> int:
    return sum(eqn.primitive.name == "dot_general" for eqn in equations(jaxpr))


def before_and_after(fn, *args) -> tuple[int, int]:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return matmuls(jaxpr), matmuls(merge_repeats(jaxpr))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_a_network_and_its_derivative_share_the_forward_pass(activation):
    before, after = before_and_after(lambda w, x: energy_and_forces(w, x, activation), W, X)
    assert (before, after) == (9, 6)


@pytest.mark.parametrize("activation", ACTIVATIONS[:-1])
def test_directions_share_what_does_not_depend_on_them(activation):
    before, after = before_and_after(lambda w, x: laplacian(w, x, activation), W, X)
    assert (before, after) == (36, 24)


def test_gradients_have_fewer_matmuls():
    gradient = lambda **options: jax.make_jaxpr(jax.grad(jaxamp.amp(laplacian, **options)))(W, X)
    count = lambda jaxpr: sum("dot_general" in eqn.primitive.name for eqn in equations(jaxpr))
    assert count(gradient()) <= 0.7 * count(gradient(disable_passes=["merge_repeats"]))


@pytest.mark.parametrize("activation", [jnp.tanh, jnp.sin])
@pytest.mark.parametrize("loss", [energy_and_forces, laplacian])
def test_gradients_are_near_to_float64(loss, activation):
    fn = functools.partial(loss, activation=activation)
    jaxpr = merge_repeats(jax.make_jaxpr(fn)(W, X))
    found = {
        "merged": jax.grad(lambda w: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, *w, X)[0])(W),
        "low": jax.jit(jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16)))(W, X),
        "without": jax.jit(jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, disable_passes=["merge_repeats"])))(
            W, X
        ),
    }
    flat = lambda w: np.concatenate([np.ravel(x) for x in w])
    errors = {name: error(flat(w), flat(in_float64(jax.grad(fn), W, X))) for name, w in found.items()}
    assert errors["merged"] < 1e-5
    assert errors["low"] < min(5e-2, 1.5 * errors["without"])  # one rounding in place of two


# -- what is left alone


def unchanged(fn, *args) -> bool:
    jaxpr = jax.make_jaxpr(fn)(*args)
    return merge_repeats(jaxpr) is jaxpr


def test_what_has_no_repeated_matmul_is_the_same_jaxpr():
    assert unchanged(lambda w, x: network(w, x[0]) + jnp.sum(jnp.tanh(x) * jnp.tanh(x)) + jnp.sum(jnp.tanh(x)), W, X)


def test_other_operands_and_parameters_are_not_equal():
    assert unchanged(lambda w, x: x @ w + x @ -w + (2 * x) @ w + jnp.dot(x, w, precision="highest"), W[0], X)
    assert unchanged(lambda w, x: (x * 0.0) @ w + (x * -0.0) @ w, W[0], X)


def test_equal_numbers_are_equal():
    assert before_and_after(lambda w, x: (x * jnp.nan) @ w + (x * jnp.nan) @ w, W[0], X) == (2, 1)


def test_scopes_of_other_names_are_other_operations():
    def loss(w, x):
        with jax.named_scope("a"):
            one = x @ w
        with jax.named_scope("b"):
            return jnp.sum(one * (x @ w))

    assert unchanged(loss, W[0], X)


def test_a_stopped_gradient_is_not_passed_on():
    fn = lambda w, x: jnp.sum(jnp.tanh(x @ w) * lax.stop_gradient(jnp.tanh(x @ w)))
    jaxpr = merge_repeats(jax.make_jaxpr(fn)(W[0], X))
    found = jax.grad(lambda w: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, w, X)[0])(W[0])
    assert matmuls(jaxpr) == 1
    np.testing.assert_allclose(found, jax.grad(fn)(W[0], X), rtol=1e-5, atol=1e-5)


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvp(lambda primals, tangents: (jnp.round(*primals), *tangents))


@jax.custom_vjp
def clipped(x):
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (jnp.clip(g, -1e-3, 1e-3),))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sum(straight_through(x @ w) @ w.T) + jnp.sum(jnp.round(x @ w) @ w.T),
        lambda w, x: jnp.sum(clipped(x @ w) @ w.T) + 2 * jnp.sum(clipped(x @ w) @ w.T) + jnp.sum((x @ w * 1.0) @ w.T),
    ],
)
def test_functions_with_rules_of_their_own_are_not_merged_with_others(fn):
    """Each has its own derivative: two rules are not merged, nor a function with a rule and what it computes."""
    jaxpr = merge_repeats(jax.make_jaxpr(fn)(W[0], X))
    found = jax.grad(lambda w: jax.core.eval_jaxpr(jaxpr.jaxpr, jaxpr.consts, w, X)[0])(W[0])
    np.testing.assert_allclose(found, jax.grad(fn)(W[0], X), rtol=1e-5, atol=1e-6)


def test_random_numbers_without_a_key_are_drawn_each_time():
    noise = lambda: lax.rng_uniform(0.0, 1.0, (32, 3))
    assert unchanged(lambda w: jnp.sum((noise() @ w) * (noise() @ w)), W[0])
    jitted = jax.jit(noise)
    assert unchanged(lambda w: jnp.sum((jitted() @ w) * (jitted() @ w)), W[0])


def test_effects_happen_as_often_as_they_are_written():
    def loss(w, x):
        for _ in range(2):
            jax.debug.callback(lambda h: None, x @ w)
        return jnp.sum(x @ w)

    jaxpr = merge_repeats(jax.make_jaxpr(loss)(W[0], X))
    assert sum(eqn.primitive.name == "debug_callback" for eqn in jaxpr.jaxpr.eqns) == 2
    assert matmuls(jaxpr) == 1


# -- inside of loops, calls and checkpoints


@pytest.mark.parametrize(
    "around", [jax.jit, jax.checkpoint, lambda f: lambda x: lax.scan(lambda c, _: (f(c), None), x, None, 3)[0]]
)
def test_bodies_are_rewritten(around):
    fn = lambda w, x: jnp.sum(around(lambda h: jnp.tanh(h @ w) * jnp.cos(h @ w))(x))
    assert before_and_after(fn, W[1], normal(4, 8, 16)) == (2, 1)


def test_arrays_that_a_jitted_function_closes_over_may_be_multiplied():
    inner = jax.jit(lambda x: jnp.tanh(x @ W[1]) @ W[1])
    loss = lambda x: jnp.sum(inner(x) + inner(x) * x)
    found = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))(W[1])
    written_out = lambda x, w: jnp.sum(jnp.tanh(x @ w) @ w * (1 + x))
    assert error(found, in_float64(jax.grad(written_out), W[1], W[1])) < 2e-2


def test_results_lie_where_each_function_puts_them():
    """Jitted functions that compute the same are not merged if they put their results on other devices."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def twice(x):
        placed = lambda spec: jax.jit(lambda x: x @ W[1], out_shardings=NamedSharding(mesh, spec))(x)
        return placed(PartitionSpec("d")), placed(PartitionSpec())

    outs = jax.jit(jaxamp.amp(twice, compute_dtype=jnp.bfloat16))(W[1])
    assert [out.sharding.spec for out in outs] == [PartitionSpec("d"), PartitionSpec()]


def test_results_of_the_function_may_be_one_value():
    both = jaxamp.amp(lambda w, x: (jnp.tanh(x @ w), jnp.tanh(x @ w)))
    one, other = both(W[0], X)
    np.testing.assert_array_equal(one, other)
    assert matmuls(merge_repeats(jax.make_jaxpr(lambda w, x: (x @ w, x @ w))(W[0], X))) == 1
