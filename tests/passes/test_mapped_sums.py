"""Sums over the batch of a mapped function, and means of means, are one sum."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_near, equations, in_float64, normal
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp._passes.mapped_sums import merge_sums

WITHOUT = functools.partial(AMP, disable_passes=["merge_sums"])
X, W = normal(0, 4, 3, 5, 6), normal(1, 3, 3, 3, 3)
ALL = (0, 2, 3)


def centered(x, mean, variance):
    return (x - mean) * lax.rsqrt(variance + 1e-5)


def batch_norm(x):
    """Of one example."""
    mean = lax.pmean(jnp.mean(x, (1, 2), keepdims=True), "batch")
    return centered(x, mean, lax.pmean(jnp.mean((x - mean) ** 2, (1, 2), keepdims=True), "batch"))


def by_channels(x):
    """As in Equinox: of one channel of one example, and mapped over the channels."""

    def of_channel(x):
        mean = lax.pmean(jnp.mean(x), "batch")
        return centered(x, mean, lax.pmean(jnp.mean((x - mean) ** 2), "batch"))

    return jax.vmap(of_channel)(x)


def by_sums(x):
    """Sums are added first, and divided at last."""
    size = x[0].size * lax.psum(1, "batch")
    mean = lax.psum(jnp.sum(x, (1, 2)), "batch")[:, None, None] / size
    return centered(x, mean, lax.psum(jnp.sum((x - mean) ** 2, (1, 2)), "batch")[:, None, None] / size)


def in_two_steps(x):
    """Rows, columns and batch one after the other."""
    average = lambda x: lax.pmean(jnp.mean(jnp.mean(x, 2, keepdims=True), 1), "batch")[:, None]
    mean = average(x)
    return centered(x, mean, average((x - mean) ** 2))


NORMS = [batch_norm, by_channels, by_sums, in_two_steps]
norms = pytest.mark.parametrize("norm", NORMS)


def mapped(norm):
    return jax.vmap(norm, axis_name="batch")


def reductions(jaxpr):
    """The axes of all sums and collectives."""
    found = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("reduce_sum", "psum"))
    return [(eqn.primitive.name, tuple(map(int, eqn.params["axes"]))) for eqn in found]


@norms
def test_two_sums_over_all_axes_are_left(norm):
    assert reductions(merge_sums(jax.make_jaxpr(mapped(norm))(X))) == [("reduce_sum", ALL)] * 2


@norms
def test_values_and_derivatives(norm):
    def loss(w, x):
        x = jax.nn.relu(mapped(norm)(lax.conv(x, w, (1, 1), "SAME")))
        return jnp.mean(lax.conv(x, w, (1, 1), "SAME") ** 2)

    assert_near(jax.jit(AMP(loss))(W, X), in_float64(loss, W, X), 1e-2)
    assert_near(jax.jit(jax.grad(AMP(loss), (0, 1)))(W, X), in_float64(jax.grad(loss, (0, 1)), W, X), 3e-2)
    exact = lambda f: lambda x: jnp.sum(jnp.sin(mapped(f)(x)))
    merged = jax.extend.core.jaxpr_as_fun(merge_sums(jax.make_jaxpr(exact(norm))(X)))
    np.testing.assert_allclose(jax.grad(lambda x: merged(x)[0])(X), jax.grad(exact(norm))(X), atol=2e-5)


@norms
def test_the_backward_pass_of_a_mapped_norm_has_no_more_sums_than_one_over_the_batch(norm):
    """The passes that know norms see it."""

    def over_batch(x):
        mean = jnp.mean(x, ALL, keepdims=True)
        return centered(x, mean, jnp.mean((x - mean) ** 2, ALL, keepdims=True))

    def loss(norm, p, x):
        x = norm(lax.conv(x, p[0], (1, 1), "SAME")) * p[1] + p[2]
        return jnp.mean(lax.conv(jax.nn.silu(x), p[0], (1, 1), "SAME") ** 2)

    def sums(amp, norm):
        jaxpr = jax.make_jaxpr(jax.grad(amp(functools.partial(loss, norm))))((W, *normal(2, 2, 3, 1, 1)), X)
        found = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("reduce_sum", "psum"))
        return sum(eqn.invars[0].aval.size >= X.size for eqn in found)

    assert sums(AMP, mapped(norm)) == sums(AMP, over_batch) < sums(WITHOUT, mapped(norm))


def test_batch_norm_of_equinox():
    norm, state = eqx.nn.make_with_state(eqx.nn.BatchNorm)(3, "batch", mode="batch")
    conv = eqx.nn.Conv2d(3, 3, 3, padding=1, key=jax.random.key(0))

    def loss(modules, x, state):
        conv, norm = modules
        forward = lambda x, state: norm(conv(x), state)
        out, state = jax.vmap(forward, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)
        return jnp.mean(jax.nn.relu(out) ** 2), state

    found = reductions(jax.make_jaxpr(lambda x: AMP(loss)((conv, norm), x, state)[0])(X))
    assert ("reduce_sum", ALL) in found
    assert not [name for name, _ in found if name == "psum"]
    (_, one), (_, other) = AMP(loss)((conv, norm), X, state), loss((conv, norm), X, state)
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        np.testing.assert_allclose(a, b, atol=2e-2)


def test_inside_of_functions_and_loops():
    nested = lambda x: jax.jit(lambda x: lax.scan(lambda t, x: (t + jnp.sum(mapped(batch_norm)(x)), None), 0.0, x)[0])(
        x
    )
    found = reductions(merge_sums(jax.make_jaxpr(nested)(X[None])))
    assert [axes for name, axes in found if name == "psum"] == []
    assert found.count(("reduce_sum", ALL)) == 2


def pooled(x):
    """A norm of averages: these are read too."""
    x = jnp.mean(x, (2, 3))
    return x - jnp.mean(x, -1, keepdims=True)


def of_halves(x):
    """The second sum is over parts of an axis."""
    return jnp.sum(jnp.mean(x, 3).reshape(4, 3, 5, 1, 1)[:, :, :4].reshape(4, 3, 2, 2), 3)


def of_other_values(x):
    return jnp.mean(jnp.exp(jnp.mean(x, (2, 3))), 0)


def repeated(x):
    """Each mean counts as often as it is repeated."""
    return jnp.sum(jnp.broadcast_to(jnp.mean(x, 3, keepdims=True), (4, 3, 5, 2)), 3)


def largest(x):
    return jax.vmap(lambda x: x - lax.pmax(jnp.max(x), "batch"), axis_name="batch")(x)


def of_integers(x):
    return jnp.sum(jnp.sum(x.astype(jnp.int32), 3), 2)


def low(x):
    return jnp.sum(jnp.sum(x.astype(jnp.bfloat16), 3), 2)


@pytest.mark.parametrize(
    "fn", [pooled, of_halves, of_other_values, repeated, largest, of_integers, low, lambda x: jnp.mean(x) / 2]
)
def test_what_is_left_alone(fn):
    jaxpr = jax.make_jaxpr(fn)(X)
    assert merge_sums(jaxpr) is jaxpr


def test_sums_over_devices_are_left_alone():
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))
    fn = jax.shard_map(
        lambda x: lax.pmean(jnp.mean(x, (0, 2)), "d"), mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec()
    )
    jaxpr = jax.make_jaxpr(fn)(X)
    assert merge_sums(jaxpr) is jaxpr


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    axis = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",), axis_types=(axis,))
    norm = mapped(batch_norm)
    if explicit:
        norm = jax.sharding.auto_axes(norm, out_sharding=PartitionSpec("d"))
    loss = lambda norm, w, x: jnp.mean(jax.nn.relu(norm(x)).reshape(4, -1) @ w)
    w = normal(4, X[0].size, 8)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        found = jax.jit(jax.grad(AMP(functools.partial(loss, norm)), 1))(put(w), put(X, "d"))
    expected = in_float64(jax.grad(functools.partial(loss, mapped(batch_norm)), 1), w, X)
    assert np.linalg.norm(np.asarray(found) - expected) < 3e-2 * np.linalg.norm(expected)
