"""A weight that stays the same in all rounds of a loop is rounded once, in front of it."""

import contextlib
import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, BF16, F32, assert_near, assert_same_bits, equations, in_float64, normal
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp

WITHOUT = functools.partial(AMP, disable_passes=["round_in_loops"])
W, V, X = normal(0, 32, 32, scale=0.2), normal(1, 32, 32, scale=0.2), normal(2, 5, 8, 32)


def recurrent(w, v, x):
    def cell(h, x):
        h = jnp.tanh(h @ w + jnp.tanh(x @ v))
        return h, h

    return jnp.mean(lax.scan(cell, x[0], x)[1] ** 2)


def moved(w, v, x):
    """Weights that are joined, split and transposed in the loop."""

    def cell(h, x):
        joined = jnp.concatenate([w, v])
        first, _ = jnp.split(joined, 2)
        h = jnp.tanh(jnp.concatenate([h, x], -1) @ joined + x @ first.T)
        return h, None

    return jnp.mean(lax.scan(cell, x[0], x)[0] ** 2)


def checkpointed(w, v, x):
    cell = jax.checkpoint(lambda h, x: (jnp.tanh(h @ w + x @ v), None))
    return jnp.mean(lax.scan(cell, x[0], x)[0] ** 2)


def nested(w, v, x):
    def outer(h, x):
        return lax.scan(lambda h, _: (jnp.tanh(h @ w) + x @ v, None), h, length=2)[0], None

    return jnp.mean(lax.scan(outer, x[0], x)[0] ** 2)


def in_a_function(w, v, x):
    return jax.jit(recurrent)(w, v, x) + recurrent(v, w, x)


def while_loop(w, v, x):
    step = lambda state: (state[0] + 1, jnp.tanh(state[1] @ w) @ v)
    return jnp.mean(lax.while_loop(lambda state: state[0] < 3, step, (0, x[0]))[1] ** 2)


LOOPS = [recurrent, moved, checkpointed, nested, in_a_function]


def in_loops(jaxpr):
    loops = (eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("scan", "while"))
    return [eqn for loop in loops for body in jec.jaxprs_in_params(loop.params) for eqn in equations(body)]


def roundings(jaxpr):
    """How many arrays, as large as a weight, are rounded in loops, and how many matmuls are there."""
    eqns = in_loops(jaxpr)
    copied = {v for eqn in eqns if eqn.primitive.name == "with_copy" for v in eqn.outvars}  # rounded already
    rounded = [
        eqn
        for eqn in eqns
        if eqn.primitive.name in ("convert_element_type", "low_copy")
        and (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) == (F32, BF16)
        and eqn.invars[0].aval.size >= W.size
        and eqn.invars[0] not in copied
    ]
    return len(rounded), sum("dot_general" in eqn.primitive.name for eqn in eqns)


@pytest.mark.parametrize("loss", LOOPS)
def test_no_weight_is_rounded_in_a_loop(loss):
    gradient = lambda amp: jax.make_jaxpr(jax.grad(amp(loss), (0, 1, 2)))(W, V, X)
    (ours, matmuls), (without, same) = roundings(gradient(AMP)), roundings(gradient(WITHOUT))
    assert ours == 0 < without
    assert matmuls == same > 0


@pytest.mark.parametrize("loss", LOOPS)
def test_the_numbers_are_the_same(loss):
    found, before = (jax.jit(jax.value_and_grad(amp(loss), (0, 1, 2)))(W, V, X) for amp in (AMP, WITHOUT))
    assert_same_bits(found, before)
    assert_near(found, in_float64(jax.value_and_grad(loss, (0, 1, 2)), W, V, X), 3e-2)


def test_gradients_of_weights_are_float32_and_not_rounded():
    grads = jax.grad(AMP(recurrent), (0, 1))(W, V, X)
    for grad in grads:
        assert grad.dtype == F32
        assert not np.array_equal(grad, grad.astype(BF16).astype(F32))


def copies(eqns):
    return [eqn for eqn in eqns if eqn.primitive.name == "low_copy"]


def test_a_while_loop_reads_copies_too():
    jaxpr = jax.make_jaxpr(AMP(while_loop))(W, V, X)
    assert len(copies(equations(jaxpr))) == 2
    assert not copies(in_loops(jaxpr))
    assert_same_bits(AMP(while_loop)(W, V, X), WITHOUT(while_loop)(W, V, X))


def test_layers_in_a_loop_have_no_copies():
    """Each is read in one round."""
    fn = lambda ws, x: jnp.mean(lax.scan(lambda h, w: (jnp.tanh(h @ w), None), x, ws)[0] ** 2)
    assert not copies(equations(jax.make_jaxpr(jax.grad(AMP(fn)))(jnp.stack([W, V]), X[0])))


def test_on_a_mesh_loops_are_left_alone():
    mesh = Mesh(np.asarray(jax.devices()), ("d",))
    w, v, x = jax.device_put((W, V, X), NamedSharding(mesh, PartitionSpec(None, "d")))
    assert not copies(equations(jax.make_jaxpr(jax.grad(AMP(recurrent)))(w, v, x)))
    with jax.set_mesh(mesh):
        assert not copies(equations(jax.make_jaxpr(jax.grad(AMP(recurrent)))(W, V, X)))


def test_each_device_of_a_shard_map_rounds_in_front_of_its_loop():
    mesh, spec = Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec()
    mean = lambda *args: lax.pmean(recurrent(*args), "d")
    loss = jax.shard_map(mean, mesh=mesh, in_specs=(spec, spec, PartitionSpec(None, "d")), out_specs=spec)
    for around in (contextlib.nullcontext(), jax.set_mesh(mesh)):
        with around:
            jaxpr = jax.make_jaxpr(jax.grad(AMP(loss), (0, 1)))(W, V, X)
        assert roundings(jaxpr)[0] == 0
    assert_near(jax.jit(jax.grad(AMP(loss), (0, 1)))(W, V, X), in_float64(jax.grad(recurrent, (0, 1)), W, V, X), 3e-2)


def test_a_loop_that_gathers_in_each_round_goes_on_to():
    mesh, policy = Mesh(np.asarray(jax.devices()), ("d",)), dict(jaxamp.load_policy("default"))
    policy[jaxamp.COMMUNICATION] = jaxamp.Communication(gather="float32")

    def loss(w, x):
        cell = lambda h, x: (jnp.tanh(h @ lax.all_gather(w, "d", tiled=True) + x), None)
        return lax.pmean(jnp.mean(lax.scan(cell, x[0], x)[0] ** 2), "d")

    specs = PartitionSpec("d"), PartitionSpec(None, "d")
    mapped = jax.shard_map(loss, mesh=mesh, in_specs=specs, out_specs=PartitionSpec())
    jaxpr = jax.make_jaxpr(AMP(mapped, amp_policy=policy))(W, X)
    gathers = [
        ["all_gather" in eqn.primitive.name for eqn in eqns].count(True) for eqns in (equations(jaxpr), in_loops(jaxpr))
    ]
    assert gathers == [1, 1]
