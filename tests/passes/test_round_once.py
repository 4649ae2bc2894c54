"""Each parameter is rounded once, and both passes read that copy."""

import contextlib
import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, BF16, F32, assert_same_bits, equations, error, in_float64, normal
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import jaxamp

WITHOUT = functools.partial(AMP, disable_passes=["round_once"])
MESH = Mesh(np.asarray(jax.devices()), ("d",))
ONE = Mesh(np.asarray(jax.devices()[:1]), ("d",))
WEIGHTS = [normal(i, 64, 64, scale=0.125) for i in range(3)]
X = normal(9, 32, 64)


def placed(*arrays, mesh=MESH):
    sharding = NamedSharding(mesh, PartitionSpec("d"))
    return jax.device_put(arrays, sharding)


on_meshes_and_one_device = pytest.mark.parametrize(
    "where", [placed, functools.partial(placed, mesh=ONE), lambda *arrays: arrays]
)


def layers(x, *weights):
    for w in weights:
        x = x + jax.nn.gelu(x @ w)
    return jnp.mean(x**2)


def turned(x, up, down):
    """Weights that are moved first, on the way into functions too."""
    block = jax.jit(lambda x, w: jnp.tanh(jnp.tanh(x) @ w.reshape(64, 64)))
    return jnp.mean(block(block(x, lax.rev(up, (0,)).reshape(32, 128)), down.reshape(-1)) ** 2)


def convolutions(x, *weights):
    x = x.reshape(2, 8, 4, 32)
    for w in weights:
        x = jnp.tanh(
            lax.conv_general_dilated(
                x, w.reshape(2, 1, 64, 32)[:, :, :32], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
            )
        )
    return jnp.mean(x**2)


PROGRAMS = {layers: 3, turned: 2, convolutions: 3}
FIRST = {layers: 1, turned: 0, convolutions: 1}  # how many weights only the first layer reads


def copies(jaxpr):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "low_copy"]


def gradient(transform, loss, count):
    return jax.value_and_grad(transform(loss), tuple(range(1, 1 + count)))


@on_meshes_and_one_device
@pytest.mark.parametrize("loss", PROGRAMS)
def test_a_parameter_is_rounded_once(loss, where):
    args = where(X, *WEIGHTS[: PROGRAMS[loss]])
    found = copies(jax.make_jaxpr(gradient(AMP, loss, PROGRAMS[loss]))(*args))
    assert [eqn.outvars[0].aval.dtype for eqn in found] == [BF16] * (PROGRAMS[loss] - FIRST[loss])


def test_the_weight_of_the_first_layer_is_read_once_in_any_case():
    first = lambda x, w, v: jnp.mean(jnp.tanh(x @ w) @ v)
    jaxpr = jax.make_jaxpr(gradient(AMP, first, 2))(*placed(X, *WEIGHTS[:2]))
    (copy,) = copies(jaxpr)
    assert copy.invars[0] is jaxpr.jaxpr.invars[2]
    tied = lambda x, w: jnp.mean(jnp.tanh(x @ w) @ w)
    assert len(copies(jax.make_jaxpr(gradient(AMP, tied, 1))(*placed(X, WEIGHTS[0])))) == 1


@on_meshes_and_one_device
@pytest.mark.parametrize("loss", PROGRAMS)
def test_values_and_gradients_are_those_of_a_program_that_rounds_twice(loss, where):
    args = where(X, *WEIGHTS[: PROGRAMS[loss]])
    found, other = (jax.jit(gradient(how, loss, PROGRAMS[loss]))(*args) for how in (AMP, WITHOUT))
    assert_same_bits(jax.tree.leaves(found), jax.tree.leaves(other))
    exact = in_float64(gradient(lambda f: f, loss, PROGRAMS[loss]), *args)
    for g, e in zip(found[1], exact[1], strict=True):
        assert g.dtype == F32
        assert error(g, e) < 2e-2


@on_meshes_and_one_device
def test_what_is_kept_is_the_copy(where):
    args = where(X, *WEIGHTS)
    kept = jax.make_jaxpr(lambda *args: jax.vjp(AMP(layers), *args)[1])(*args).out_avals
    squares = [aval.dtype for aval in kept if aval.shape == (64, 64)]
    assert squares.count(BF16) == 2  # of all but the first


def test_equal_layers_stay_equal():
    """JAX lowers a function once for all layers that are alike."""

    def deep(x, *weights):
        for up, down in zip(weights[::2], weights[1::2], strict=True):
            x = x + jax.nn.gelu(x @ up) @ down
        return jnp.mean(x**2)

    args = placed(X, *[normal(i, *((64, 256), (256, 64))[i % 2]) for i in range(12)])
    jaxpr = jax.make_jaxpr(AMP(deep))(*args)
    sections = [id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    assert (len(sections), len(set(sections))) == (6, 4)  # the first and the last two are not like the others


def test_what_is_read_in_float32_is_not_the_copy():
    loss = lambda x, w: jnp.mean((jnp.tanh(x) @ w) ** 2) + jnp.sum(jnp.exp(w))
    args = placed(X, WEIGHTS[0])
    jaxpr = jax.make_jaxpr(AMP(loss))(*args)
    (read,) = (eqn.invars[0].aval.dtype for eqn in equations(jaxpr) if eqn.primitive.name == "exp")
    assert read == F32
    assert len(copies(jaxpr)) == 1  # for the matmul


def in_a_loop(x, *weights):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, jnp.stack(weights))[0] ** 2)


def in_a_checkpoint(x, *weights):
    for w in weights:
        x = jax.checkpoint(lambda x, w: jnp.tanh(x @ w))(x, w)
    return jnp.mean(x**2)


@pytest.mark.parametrize("loss", [in_a_loop, in_a_checkpoint])
def test_loops_and_checkpoints_of_the_user_gather_as_they_are_told(loss):
    args = placed(X, *WEIGHTS)
    with_it, without = (str(jax.make_jaxpr(gradient(how, loss, 3))(*args)) for how in (AMP, WITHOUT))
    assert with_it == without


def test_copies_are_kept_for_the_backward_pass():
    kept = lambda **options: jaxamp.bytes_kept(
        lambda weights, x: layers(x, *weights), compute_dtype=jnp.bfloat16, **options
    )(WEIGHTS, X)
    copied = sum(w.size for w in WEIGHTS[1:]) * 2
    assert kept().after - kept(disable_passes=["round_once"]).after == copied
    assert kept(keep="matmuls").after == kept(keep="matmuls", disable_passes=["round_once"]).after


def test_less_memory_is_worth_rounding_again_except_on_a_mesh():
    amp = functools.partial(AMP, keep="matmuls")
    assert not copies(jax.make_jaxpr(gradient(amp, layers, 3))(X, *WEIGHTS))
    assert copies(jax.make_jaxpr(gradient(amp, layers, 3))(*placed(X, *WEIGHTS)))


def test_but_not_on_axes_that_are_the_user_s():
    mesh = Mesh(np.asarray(jax.devices()), ("d",), axis_types=(AxisType.Explicit,))
    everywhere = NamedSharding(mesh, PartitionSpec())
    assert not copies(jax.make_jaxpr(AMP(layers))(*jax.device_put((X, *WEIGHTS), everywhere)))
    mapped = jax.shard_map(AMP(layers), mesh=MESH, in_specs=PartitionSpec(), out_specs=PartitionSpec())
    assert not copies(jax.make_jaxpr(mapped)(X, *WEIGHTS))


def test_where_only_jit_knows_the_mesh():
    step = jax.jit(gradient(AMP, layers, 3), in_shardings=NamedSharding(MESH, PartitionSpec("d")))
    assert len(copies(step.trace(X, *WEIGHTS).jaxpr)) == 2


@pytest.mark.parametrize("mesh", [MESH, ONE])
def test_where_a_mesh_is_set(mesh):
    step = jax.jit(gradient(AMP, layers, 3), in_shardings=PartitionSpec("d"))
    with jax.set_mesh(mesh):
        assert len(copies(step.trace(X, *WEIGHTS).jaxpr)) == 2
    with jax.set_mesh(MESH):
        mapped = jax.shard_map(AMP(layers), in_specs=PartitionSpec(), out_specs=PartitionSpec())
        assert not copies(jax.make_jaxpr(mapped)(X, *WEIGHTS))


@on_meshes_and_one_device
@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable", "nothing_saveable"])
def test_a_checkpoint_of_the_user_around_amp(policy, where):
    """JAX splits checkpoints inside of one by its policy, but none that has operands without a barrier."""
    loss = lambda *args: jax.checkpoint(AMP(layers), policy=getattr(jax.checkpoint_policies, policy))(*args)
    args = where(X, *WEIGHTS)
    jax.make_jaxpr(jax.grad(AMP(layers), 1))(*args)  # what is remembered of this is not what the next line needs
    found = jax.jit(jax.grad(loss, 1))(*args)
    assert error(found, in_float64(jax.grad(layers, 1), X, *WEIGHTS)) < 0.02


@pytest.mark.parametrize("policy", ["dots_saveable", "everything_saveable", "nothing_saveable"])
def test_a_checkpoint_of_the_user_around_what_jit_remembers(policy):
    step = jax.jit(AMP(layers))
    assert len(copies(step.trace(X, *WEIGHTS).jaxpr)) == 2
    kept = jax.checkpoint(step, policy=getattr(jax.checkpoint_policies, policy))
    assert error(jax.jit(jax.grad(kept, 1))(X, *WEIGHTS), in_float64(jax.grad(layers, 1), X, *WEIGHTS)) < 0.02


def test_nor_where_weights_are_to_be_gathered_as_they_are():
    policy = jaxamp.default_amp_policy | {jaxamp.COMMUNICATION: jaxamp.Communication(gather="float32")}
    assert not copies(jax.make_jaxpr(AMP(layers, amp_policy=policy))(*placed(X, *WEIGHTS)))


def quantized(transform_options=(), **options):
    rules = {lax.dot_general_p: jaxamp.use_formats(**options)}
    return functools.partial(AMP, amp_policy=jaxamp.default_amp_policy | rules, **dict(transform_options))


def quantizing(jaxpr, shape):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "quantize" and eqn.invars[0].aval.shape == shape]


@pytest.mark.parametrize("scaling", ["current", "none"])
def test_what_is_quantised_is_quantised_once(scaling):
    args = placed(X, *WEIGHTS)
    amps = (quantized(options, scaling=scaling) for options in ({}, {"disable_passes": ["round_once"]}))
    with_it, without = (jax.make_jaxpr(gradient(amp, layers, 3))(*args) for amp in amps)
    assert len(quantizing(with_it, (64, 64))) == 3 < len(quantizing(without, (64, 64)))
    with jax.disable_jit():  # XLA may leave out roundings to bfloat16, others in other programs
        found, other = (jec.jaxpr_as_fun(jaxpr)(*args) for jaxpr in (with_it, without))
    assert_same_bits(found, other)
    exact = in_float64(gradient(lambda f: f, layers, 3), *args)
    for g, e in zip(found[1:], exact[1], strict=True):
        assert g.dtype == F32
        assert error(g, e) < 0.2


@pytest.mark.parametrize("loss", [in_a_loop, in_a_checkpoint])
def test_what_loops_and_checkpoints_of_the_user_quantise_is_left_there(loss):
    args = placed(X, *WEIGHTS)
    amps = quantized(), quantized({"disable_passes": ["round_once"]})
    with_it, without = (str(jax.make_jaxpr(gradient(how, loss, 3))(*args)) for how in amps)
    assert with_it == without


def test_under_vmap_and_in_derivatives_of_derivatives():
    args = placed(X, *WEIGHTS)
    many = jax.jit(jax.grad(lambda x, *ws: jnp.sum(jax.vmap(AMP(layers), (0, None, None, None))(x, *ws)), 1))
    stacked = args[0].reshape(4, 8, 64)
    assert error(many(stacked, *args[1:]), in_float64(jax.grad(lambda x, *ws: 4 * layers(x, *ws), 1), *args)) < 2e-2
    ensemble = jax.jit(jax.grad(lambda x, ws: jnp.sum(jax.vmap(AMP(layers), (None, 0))(x, ws)), 1))
    exact = in_float64(jax.grad(layers, 1), args[0], args[1])
    found = ensemble(args[0], jnp.stack([args[1]] * 2))[1]
    assert error(found, exact) < 2e-2
    assert not jnp.array_equal(found, lax.reduce_precision(found, 8, 7))  # gradients are not rounded
    along = lambda transform: lambda x, w: jax.jvp(jax.grad(transform(layers), 1), (x, w), (x, jnp.ones_like(w)))[1]
    assert error(jax.jit(along(AMP))(*args[:2]), in_float64(along(lambda f: f), *args[:2])) < 4e-2


def test_copies_are_not_made_in_the_context_of_the_first_equation():
    def fn(x, w, v):
        with set_xla_metadata(tag="first"):
            first = jnp.sin(x)
        return layers(x, w, v) + jnp.sum(first)

    text = jax.jit(jax.grad(AMP(fn), (1, 2))).lower(*placed(X, *WEIGHTS[:2])).as_text()
    tagged = [line for line in text.splitlines() if 'tag = "first"' in line]
    assert not any("convert" in line for line in tagged)
    assert any("bf16" in line and "convert" in line for line in text.splitlines())


@pytest.mark.parametrize("around", [True, False])
def test_a_linear_function_is_transposed(around):
    fn = lambda w: jnp.tanh(X) @ w
    with jax.set_mesh(MESH) if around else contextlib.nullcontext():
        (w,) = (WEIGHTS[0],) if around else placed(WEIGHTS[0])
        (found,) = jax.linear_transpose(AMP(fn), w)(X)
    expected = in_float64(lambda w, x: jax.vjp(lambda w: jnp.tanh(x) @ w, w)[1](x)[0], WEIGHTS[0], X)
    assert error(found, expected) < 1e-2
