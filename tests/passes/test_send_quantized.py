"""Weights that only quantised matmuls read are sent in eight bits; the devices agree on their scales."""

import functools

import jax
import jax.numpy as jnp
import pytest
import sharded_programs
from helpers import F32, equations, error, in_float64, normal
from jax import lax

import jaxamp
from jaxamp._traits import traits_of

POLICY = dict(jaxamp.load_policy("default")) | {lax.dot_general_p: jaxamp.use_formats()}
FP8 = functools.partial(jaxamp.amp, amp_policy=POLICY)
NAMES = [name for name in sharded_programs.NAMES if name != "wide reader"]


def sent(jaxpr):
    """The dtypes of the arrays that are sent, and read by something."""
    read = {v for eqn in equations(jaxpr) for v in eqn.invars if not hasattr(v, "val")}
    found = [eqn for eqn in equations(jaxpr) if traits_of(eqn.primitive).communicates and eqn.outvars[0].aval.ndim > 1]
    return {eqn.params.get("low", eqn.invars[0].aval.dtype) for eqn in found if eqn.outvars[0] in read}


@functools.cache
def programs():
    return sharded_programs.programs(jax.devices(), 64, 2)


@pytest.mark.parametrize("name", NAMES)
def test_gradients_are_those_of_one_device(name):
    program = programs()[name]()
    weights, batch = program.specs()
    made = [normal(i, *w.shape, scale=w.shape[-1] ** -0.5) for i, w in enumerate(weights)]
    placed = [jax.device_put(x, w.sharding) for x, w in zip(made, weights, strict=True)]
    x = jax.device_put(normal(9, *batch.shape), batch.sharding)
    with program.context():
        found = jax.jit(program.gradient(FP8))(placed, x)
        exact = in_float64(program.gradient(lambda f: f), placed, x)
    for g, e in zip(found, exact, strict=True):
        assert g.dtype == F32
        assert error(g, e) < 0.25  # of fp8; a device with a scale of its own would be far off


@pytest.mark.parametrize("name", ["constraint", "shard_map"])
def test_what_is_quantised_by_all_is_sent_in_eight_bits(name):
    program = programs()[name]()
    with program.context():
        low = sent(jax.make_jaxpr(FP8(program.loss))(*program.specs()))
        as_it_is = {jaxamp.COMMUNICATION: jaxamp.Communication(gather="float32")}
        wide = sent(jax.make_jaxpr(jaxamp.amp(program.loss, amp_policy=POLICY | as_it_is))(*program.specs()))
    assert jnp.dtype(jnp.float8_e4m3fn) in low
    assert jnp.dtype(jnp.float8_e4m3fn) not in wide


def test_a_value_that_something_else_reads_is_not():
    program = programs()["wide reader"]()
    with program.context():
        assert jnp.dtype(jnp.float8_e4m3fn) not in sent(jax.make_jaxpr(FP8(program.loss))(*program.specs()))
