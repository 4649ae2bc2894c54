"""The options of `amp`, and passes that are switched off."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, names, normal, raises, slow
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp
from jaxamp import _passes

W, X, B = normal(0, 8, 8), normal(1, 4, 8), normal(2, 8)
PASSES = [run.__name__ for run in (*_passes.JAXPR_PASSES, *_passes.PLAN_PASSES, *_passes.PROGRAM_PASSES)]
MASK = jnp.tril(jnp.ones((4, 4), bool))


def network(w, b, x):
    """A bit of everything that a pass is for."""
    w = jax.lax.with_sharding_constraint(w, jax.sharding.SingleDeviceSharding(jax.devices()[0]))
    h = jax.vmap(lambda x: w @ x)(x)
    mask = jnp.broadcast_to(jnp.arange(4)[:, None] >= jnp.arange(4), (2, 4, 4))
    scores = jnp.where(mask, jnp.stack([h @ h.T] * 2), -1e9)
    h = (jax.nn.softmax(scores) @ h)[0]
    h = jax.nn.gelu(h @ w + b) @ w
    h = jax.nn.silu((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-6) * b + b) @ w
    h = jax.lax.reduce_window(jnp.exp(-(h**2)), -jnp.inf, jax.lax.max, (2, 1), (1, 1), "SAME") @ w
    h = jnp.einsum("i,ij->ij", 1 / jnp.sqrt(jnp.sum(h**2, -1)), h)
    h = jnp.sin(h @ w) * (h @ w) + h
    h = jnp.sin(jnp.concatenate([jnp.concatenate([h, x]), h])[:4])
    h = (h - (h @ w)[jnp.array([0, 0, 1, 2])]) @ w
    h = jax.lax.scan(lambda h, x: (jnp.tanh(h @ w) * x, None), h, jnp.stack([h] * 2))[0] @ w
    shared = jax.nn.relu(h @ w) @ w
    h = jax.lax.map(lambda row: jnp.sum((shared * row) @ w, 0), jnp.concatenate([h, h]))[:4]
    later = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    h = jax.lax.associative_scan(later, (jnp.exp(-(h**2)), h @ w))[1] @ w
    h = (h @ w) * jnp.exp(jnp.cumsum(jax.nn.log_sigmoid(h @ w), 0)) @ w
    h = jax.lax.scan(lambda s, x: (s * jnp.exp(-(x**2)) + x, s @ w), h, jnp.stack([h @ w] * 2))[1][1] @ w
    h = jax.vmap(lambda row: row - jax.lax.pmean(jnp.mean(row), "rows"), axis_name="rows")(h) @ w
    h = jax.lax.fori_loop(0, 2, lambda _, h: jnp.sin(h @ w), h)
    with jax.named_scope("quantized"):
        h = jax.lax.scan(lambda h, _: (jnp.sin(h @ w), None), h, length=2)[0]
        return jnp.sin(h @ w) * (h @ w.T)


def with_large_matmul(w, b, x):
    """The same, what is for losses, and a matmul that is too large to be run in a test."""
    h = network(w, b, x)
    h = jnp.take_along_axis(h, jnp.zeros((4, 1), int), axis=-1)
    return h + jnp.sum(jnp.tile(w, (2**8, 2**7)) @ jnp.tile(b, (2**10, 2**7 + 1))[:, :1025])


AMP = functools.partial(AMP, amp_policy=dict(jaxamp.load_policy("default")) | {"quantized": jaxamp.use_formats()})


@pytest.mark.parametrize("name", PASSES)
def test_each_pass_can_be_switched_off(name):
    x = jax.device_put(X, NamedSharding(Mesh(np.asarray(jax.devices()), ("d",)), PartitionSpec()))
    jaxpr = lambda **options: str(
        jax.make_jaxpr(jax.grad(lambda *a: AMP(with_large_matmul, **options)(*a).sum(), (0, 1)))(W, B, x)
    )
    forward = lambda **options: str(jax.make_jaxpr(AMP(with_large_matmul, **options))(W, B, x))
    assert (jaxpr(), forward()) != (jaxpr(disable_passes=[name]), forward(disable_passes=[name]))


def test_all_of_them_can():
    jaxpr = jax.make_jaxpr(AMP(network, disable_passes=PASSES, keep="all"))(W, B, X)  # scans have checkpoints anyway
    ours = {"materialized", "row_major", "mask_of_positions", "remat2"}
    assert not ours & set(names(jaxpr))
    assert ours & set(names(jax.make_jaxpr(AMP(network))(W, B, X)))


def test_a_disabled_pass_is_disabled_for_one_function_alone():
    before = names(jax.make_jaxpr(AMP(network))(W, B, X))
    jax.make_jaxpr(AMP(network, disable_passes=PASSES))(W, B, X)
    assert names(jax.make_jaxpr(AMP(network))(W, B, X)) == before


@pytest.mark.parametrize("tool", ["amp_report", "bytes_kept", slow("compare"), slow("find_overflow")])
def test_the_tools_take_it_too(tool):
    getattr(jaxamp, tool)(lambda *a: network(*a).sum(), disable_passes=["recompute"])(W, B, X)


def test_a_pass_that_there_is_not():
    with raises(
        ValueError,
        "disable_passes has 'recomputed'; expected names of passes: merge_repeats",
        "Did you mean 'recompute'",
    ):
        jaxamp.amp(network, disable_passes=["recomputed"])
    with raises(
        ValueError, "disable_passes has 3; expected names of passes", r"Write for example disable_passes=\['round_once"
    ):
        jaxamp.amp(network, disable_passes=[3])


@pytest.mark.parametrize("given", ["recompute", 3, None])
def test_what_is_not_a_sequence_of_names(given):
    with raises(
        TypeError, f"disable_passes is {given!r}, of type", "expected a sequence of names", "Write for example"
    ):
        jaxamp.amp(network, disable_passes=given)


def test_the_docstring_of_amp_names_the_passes():
    assert all(f"`{name}`" in jaxamp.amp.__doc__ for name in PASSES)
