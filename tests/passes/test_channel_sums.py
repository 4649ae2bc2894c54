"""The cotangent of a BatchNorm or GroupNorm is summed over the batch once for all that is repeated along it."""

import functools

import equinox as eqx
import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, in_float64, normal
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxamp._primitives.affine import affine

WITHOUT = functools.partial(AMP, disable_passes=["sum_channels_once", "square_centered"])
X, W = normal(0, 6, 5, 4, 8) + 1, normal(1, 8, 8)
SCALE, OFFSET = 1 + normal(2, 8, scale=0.1), normal(3, 8)
AXES = 0, 1, 2


def plain(x, scale, offset):
    mean = x.mean(AXES, keepdims=True)
    variance = jnp.square(x - mean).mean(AXES, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + offset


def like_haiku(x, scale, offset):
    mean, mean_of_squares = jnp.mean(x, AXES, keepdims=True), jnp.mean(jnp.square(x), AXES, keepdims=True)
    factor = scale * jax.lax.rsqrt(mean_of_squares - jnp.square(mean) + 1e-5)
    return (x - mean) * factor + offset


def like_equinox(x, scale, offset):
    return scale * ((x - x.mean(AXES)) / jnp.sqrt(jnp.var(x, AXES) + 1e-5)) + offset


def shared(x, scale, offset):
    centered = x - x.mean(AXES)
    return centered / jnp.sqrt((centered**2).mean(AXES) + 1e-5) * scale + offset


def channels_first(x, scale, offset):
    x, scale, offset = jnp.moveaxis(x, -1, 1), scale[:, None, None], offset[:, None, None]
    mean = x.mean((0, 2, 3), keepdims=True)
    out = (x - mean) / jnp.sqrt(x.var((0, 2, 3), keepdims=True) + 1e-5) * scale + offset
    return jnp.moveaxis(out, 1, -1)


def of_each_instance(x, scale, offset):
    """Statistics of each image, and a scale and an offset for all of them."""
    mean = x.mean((1, 2), keepdims=True)
    return (x - mean) * jax.lax.rsqrt(x.var((1, 2), keepdims=True) + 1e-5) * scale + offset


def of_groups(x, scale, offset):
    """Statistics of each image and of each two channels. The array is reshaped before it is scaled."""
    groups = x.reshape(6, 5, 4, 4, 2)
    mean, mean_of_squares = (jnp.mean(a, (1, 2, 4), keepdims=True) for a in (groups, groups**2))
    factor = jax.lax.rsqrt(mean_of_squares - mean**2 + 1e-5)
    return ((groups - mean) * factor).reshape(x.shape) * scale + offset


def of_groups_as_they_are(x, scale, offset):
    groups = x.reshape(6, 5, 4, 4, 2)
    mean = groups.mean((1, 2, 4), keepdims=True)
    factor = jax.lax.rsqrt(jnp.square(groups - mean).mean((1, 2, 4), keepdims=True) + 1e-5)
    return ((groups - mean) * (factor * scale.reshape(4, 2)) + offset.reshape(4, 2)).reshape(x.shape)


def of_groups_by_equinox(x, scale, offset):
    """Channels first, mapped over the batch. Equinox repeats scale and offset in all of an image."""
    norm = eqx.tree_at(lambda n: (n.weight, n.bias), eqx.nn.GroupNorm(4, 8), (scale, offset))
    return jnp.moveaxis(jax.vmap(norm)(jnp.moveaxis(x, -1, 1)), 1, -1)


GROUPED = [of_groups, of_groups_as_they_are, of_groups_by_equinox]
NORMS = [plain, like_haiku, like_equinox, shared, channels_first, of_each_instance, *GROUPED]


def network(norm, activation=jax.nn.relu):
    return lambda w, scale, offset, x: jnp.mean(jnp.sin(activation(norm(x @ w, scale, offset)) @ w))


def large_sums(amp, fn):
    jaxpr = jax.make_jaxpr(jax.grad(amp(fn), (0, 1, 2)))(W, SCALE, OFFSET, X)
    return sum(eqn.primitive.name == "reduce_sum" and eqn.invars[0].aval.size == X.size for eqn in equations(jaxpr))


@pytest.mark.parametrize("norm", NORMS)
def test_there_are_fewer_sums(norm):
    assert large_sums(AMP, network(norm)) < large_sums(WITHOUT, network(norm))


@pytest.mark.parametrize(("norm", "forward"), [(plain, 2), (like_equinox, 3), (shared, 2)])
def test_two_sums_are_left_in_the_backward_pass(norm, forward):
    """In the forward pass there are the mean, perhaps twice, and the variance."""
    found = equations(jax.make_jaxpr(jax.grad(AMP(network(norm), keep="all"), (0, 1, 2)))(W, SCALE, OFFSET, X))
    sums = [e for e in found if e.primitive.name == "reduce_sum" and e.invars[0].aval.size == X.size]
    assert len(sums) == forward + 2 + 1  # that of the loss


@pytest.mark.parametrize("norm", GROUPED)
def test_the_sums_for_groups_are_those_of_channels(norm):
    """What is summed for each image and channel is enough for the mean and the variance, the scale and the offset."""
    found = list(equations(jax.make_jaxpr(jax.grad(AMP(network(norm), keep="all"), (0, 1, 2)))(W, SCALE, OFFSET, X)))
    assert [e.invars[1].aval.size for e in found if e.primitive.name == "affine"] == [6 * 8]


def test_second_derivatives_of_a_group_norm():
    fn = lambda w, x: network(of_groups, jnp.sin)(w, SCALE.astype(x.dtype), OFFSET.astype(x.dtype), x)
    hvp = lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (w,))[1]
    found, expected = jax.jit(hvp(AMP(fn)))(W, X), in_float64(hvp(fn), W, X)
    assert np.linalg.norm(found - expected) < 5e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    ("shape", "axes"), [((6, 20, 8), (1,)), ((3, 2, 5, 4, 4, 2), (0, 2, 3)), ((6, 4, 5, 8), (1, 2)), ((960,), (0,))]
)
def test_other_shapes_between(shape, axes):
    """Whether the shapes can be split into common axes or not, the numbers are right."""

    def norm(x, scale, offset):
        y = x.reshape(shape)
        mean = y.mean(axes, keepdims=True)
        y = (y - mean) * jax.lax.rsqrt(y.var(axes, keepdims=True) + 1e-5)
        return y.reshape(x.shape) * scale + offset

    args = W, SCALE, OFFSET, X
    found, expected = (
        jax.jit(jax.grad(AMP(network(norm)), (0, 1, 2)))(*args),
        in_float64(jax.grad(network(norm), (0, 1, 2)), *args),
    )
    before = jax.jit(jax.grad(WITHOUT(network(norm)), (0, 1, 2)))(*args)
    for new, old, wanted in zip(found, before, expected, strict=True):
        error = lambda x, wanted=wanted: np.linalg.norm(x - wanted) / np.linalg.norm(wanted)
        assert error(new) < max(2e-2, 1.1 * error(old))


@pytest.mark.parametrize("activation", [jax.nn.relu, jax.nn.silu])
@pytest.mark.parametrize("norm", NORMS)
def test_gradients_are_near_to_float64(norm, activation):
    fn = network(norm, activation)
    expected = in_float64(jax.grad(fn, (0, 1, 2)), W, SCALE, OFFSET, X)
    found, before = (jax.jit(jax.grad(amp(fn), (0, 1, 2)))(W, SCALE, OFFSET, X) for amp in (AMP, WITHOUT))
    for new, old, wanted in zip(found, before, expected, strict=True):
        error = lambda x, wanted=wanted: np.linalg.norm(x - wanted) / np.linalg.norm(wanted)
        assert error(new) < max(2e-2, 1.1 * error(old))


def test_it_is_exact_far_from_zero():
    """The mean is subtracted first, as it is written, and not combined with the offset."""
    fn = lambda scale, offset, x: jnp.mean(jnp.sin(plain(x, scale, offset)))
    with_matmul = lambda scale, offset, x: fn(scale, offset, x) + 0 * jnp.mean(x @ W)
    far = X + 1000
    expected = in_float64(jax.grad(fn, (0, 1)), SCALE, OFFSET, far)
    for found, wanted in zip(jax.jit(jax.grad(AMP(with_matmul), (0, 1)))(SCALE, OFFSET, far), expected, strict=True):
        assert np.linalg.norm(found - wanted) < 1e-3 * np.linalg.norm(wanted)


@pytest.mark.parametrize(
    "norm",
    [
        lambda x, scale, offset: x * scale + offset,  # two sums as it is
        lambda x, scale, offset: (x - x.mean(-1, keepdims=True)) * scale / jnp.exp(x),
        lambda x, scale, offset: (x - x.mean(-1, keepdims=True)) * (scale + x.std(-1, keepdims=True)) + x.min(0),
    ],
)
def test_what_is_left_alone(norm):
    jaxpr = lambda amp: str(jax.make_jaxpr(amp(network(norm)))(W, SCALE, OFFSET, X))
    without = functools.partial(AMP, disable_passes=["sum_channels_once"])
    assert jaxpr(AMP) == jaxpr(without)


# -- the primitive

SMALL = [normal(i, 1, 1, 1, 8) for i in (4, 5, 6)]


def by_hand(x, m, a, b):
    return (x - m) * a + b


@pytest.mark.parametrize("argnums", [0, 1, 2, 3, (0, 1), (1, 2, 3), (0, 1, 2, 3)])
def test_derivatives_of_affine(argnums):
    fn = lambda f: jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), argnums)
    expected = in_float64(fn(by_hand), X, *SMALL)
    for found, wanted in zip(jax.tree.leaves(fn(affine)(X, *SMALL)), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("transform", [jax.jacfwd, jax.jacrev, jax.hessian])
def test_other_derivatives_of_affine(transform):
    x, small = X[:2, 0, 0, :2], [s[0, 0, :, :2] for s in SMALL]
    fn = lambda f: transform(lambda x, a: jnp.sin(f(x, small[0], a, small[2])).sum(0), (0, 1))(x, small[1])
    for found, wanted in zip(jax.tree.leaves(fn(affine)), jax.tree.leaves(fn(by_hand)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("axes", [(0, 0, 0, 0), (0, None, None, None), (None, 0, None, None), (1, None, 0, 2)])
def test_affine_under_vmap(axes):
    operands = [x if axis is None else jnp.stack([x, 2 * x], axis) for x, axis in zip((X, *SMALL), axes, strict=True)]
    fn = lambda f: jax.vmap(jax.grad(lambda *args: jnp.sum(jnp.sin(f(*args))), (0, 1, 2, 3)), axes)(*operands)
    for found, wanted in zip(fn(affine), fn(by_hand), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


def test_a_linear_function_is_transposed():
    linear = lambda x: (x @ W) * SCALE * SCALE * (SCALE + 1)
    shifted = lambda x: (affine(x, SMALL[0], SMALL[1], SMALL[2]) - affine(0 * x, *SMALL)) + 0 * x
    for fn in (AMP(linear), AMP(shifted)):
        found = jax.linear_transpose(fn, X)(X)[0]
        np.testing.assert_allclose(found, jax.vjp(fn, X)[1](X)[0], rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda s, x, w, m, a, b: (x @ w - m) * a * jax.lax.rsqrt(1 + b**2) * s,
        lambda s, x, w, m, a, b: (x @ w - m) * jax.lax.rsqrt(1 + a**2) * s + s,
        lambda s, x, w, m, a, b: affine(x @ w, m, s, 3 * s),
        lambda s, x, w, m, a, b: affine(x @ w, s, a, b) - affine(x @ w, 0 * s, a, b),
    ],
)
def test_it_is_transposed_as_a_function_of_each_of_its_numbers(fn):
    given = X, W, *SMALL
    found = jax.linear_transpose(lambda s: AMP(fn)(s, *given), SMALL[0])(X)[0]
    expected = in_float64(lambda s, *given: jax.vjp(lambda s: fn(s, *given), s)[1](given[0])[0], SMALL[0], *given)
    assert np.linalg.norm(np.asarray(found) - expected) < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, m, a, b: (x @ w - m) * a * b + m,
        lambda x, w, m, a, b: (x @ w - m) / (1 / a) * b + m,
        lambda x, w, m, a, b: (x @ w - m) * a * 1e20 + m,
    ],
)
def test_factors_whose_product_is_beyond_float32_are_applied_one_by_one(fn):
    row = jnp.full((8,), 1e20)
    args = X * 1e-30, W, 0 * row, row, row
    found, expected = AMP(fn)(*args), in_float64(fn, *args)
    assert np.linalg.norm(np.asarray(found) - expected) < 2e-2 * np.linalg.norm(expected)


# -- several devices


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    axis = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",), axis_types=(axis,))
    fn = network(plain)
    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        found = jax.jit(jax.grad(AMP(fn), (0, 1, 2)))(put(W), put(SCALE), put(OFFSET), put(X, "d"))
    expected = jax.jit(jax.grad(AMP(fn), (0, 1, 2)))(W, SCALE, OFFSET, X)
    for several, one in zip(found, expected, strict=True):
        np.testing.assert_allclose(several, one, rtol=1e-3, atol=1e-6)


def test_statistics_of_all_devices():
    """In a `shard_map`, with means over devices. The gradients are those of one device."""
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",))

    def synchronised(x, scale, offset):
        mean = jax.lax.pmean(x.mean(AXES), "d")
        variance = jax.lax.pmean(jnp.square(x - mean).mean(AXES), "d")
        return (x - mean) * jax.lax.rsqrt(variance + 1e-5) * scale + offset

    fn = AMP(network(synchronised))
    loss = lambda w, scale, offset, x: jax.lax.pmean(fn(w, scale, offset, x), "d")
    specs = PartitionSpec(), PartitionSpec(), PartitionSpec(), PartitionSpec("d")
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    found = jax.jit(jax.grad(mapped, (0, 1, 2)))(W, SCALE, OFFSET, X)
    for several, wanted in zip(
        found, in_float64(jax.grad(network(plain), (0, 1, 2)), W, SCALE, OFFSET, X), strict=True
    ):
        assert np.linalg.norm(several - wanted) < 5e-2 * np.linalg.norm(wanted)


def test_exported_for_any_batch():
    fn = jax.jit(jax.grad(AMP(network(plain)), (0, 1, 2)))
    (batch,) = jax.export.symbolic_shape("batch")
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in (W, SCALE, OFFSET)]
    program = jax.export.export(fn)(*shapes, jax.ShapeDtypeStruct((batch, *X.shape[1:]), X.dtype))
    expected = in_float64(jax.grad(network(plain), (0, 1, 2)), W, SCALE, OFFSET, X)
    for found, wanted in zip(program.call(W, SCALE, OFFSET, X), expected, strict=True):
        assert np.linalg.norm(found - wanted) < 5e-2 * np.linalg.norm(wanted)
