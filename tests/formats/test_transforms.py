"""Quantised arrays under JAX's transforms."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, assert_same_bits, names, normal
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

import jaxamp
from jaxamp._number_formats.quantize import emulate, quantize

FORMATS = [jaxamp.format("mxfp4"), *(jaxamp.format(name, rounding="stochastic") for name in ("e4m3", "nvfp4"))]
EACH = pytest.mark.parametrize("format", FORMATS, ids=str)


@EACH
def test_vmap_and_scan(format):
    x = normal(0, 3, 4, 40)
    rows = jnp.stack([quantize(row, format, key=i) for i, row in enumerate(x)])
    assert_same_bits(jax.vmap(lambda row, i: quantize(row, format, key=i))(x, jnp.arange(3)), rows)
    scanned = jax.lax.scan(lambda i, row: (i + 1, quantize(row, format, key=i)), jnp.int32(0), x)[1]
    assert_same_bits(scanned, rows)


@EACH
def test_shard_map(format):
    mesh, x = Mesh(jax.devices()[:4], "x"), normal(0, 8, 40)

    def local(x):
        return quantize(x, format, key=jax.lax.axis_index("x"))

    found = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")))(x)
    parts = [quantize(part, format, key=i) for i, part in enumerate(jnp.split(x, 4))]
    assert_same_bits(jax.device_get(found), jax.device_get(jnp.concatenate(parts)))


@EACH
def test_derivatives_pass_straight_through(format):
    x, w = normal(0, 4, 32).astype(BF16), normal(1, 4, 32).astype(BF16)

    def fn(x, w):
        value = emulate(x, format, key=0)
        return jnp.sum(value * w), value

    gradient, value = jax.jit(jax.grad(fn, has_aux=True))(x, w)
    assert_same_bits(gradient, w)
    assert_same_bits(value, quantize(x, format, key=0))
    assert_same_bits(jax.jvp(lambda x: emulate(x, format, key=0), (x,), (w,))[1], w)
    assert_same_bits(jax.vmap(jax.grad(fn, has_aux=True))(x, w)[0], w)


@pytest.mark.slow
def test_derivatives_through_scales_and_checkpoints():
    fn = lambda x, s: jnp.sum(jax.checkpoint(lambda x: emulate(x, jaxamp.format("e4m3"), scale=s) ** 2)(x))
    x = normal(0, 8)
    gradients = jax.grad(fn, argnums=(0, 1))(x, jnp.float32(0.5))
    assert_same_bits(gradients, (2 * quantize(x, jaxamp.format("e4m3"), scale=0.5), jnp.float32(0)))


def test_the_derivative_of_quantize_is_zero():
    assert not np.any(jax.grad(lambda x: jnp.sum(quantize(x, jaxamp.format("e4m3"))))(normal(0, 8)))


def test_nothing_is_kept_for_the_backward_pass():
    _, pullback = jax.vjp(lambda x: emulate(x, jaxamp.format("mxfp4")), normal(0, 4, 64))
    assert sum(np.size(leaf) for leaf in jax.tree.leaves(pullback)) == 0


def test_no_keys_and_no_products_where_none_are_needed():
    fn = lambda x, key: quantize(x, jaxamp.format("mxfp8"), key=key)
    found = names(jax.make_jaxpr(fn)(normal(0, 4, 64), jax.random.key(0)))
    assert not {"mul", "div", "random_bits", "exp2", "log"} & set(found)
