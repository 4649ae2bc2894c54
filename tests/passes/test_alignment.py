"""Matmuls whose rows don't start at multiples of 16 bytes."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, both, equations, in_float64, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plans import plan_of

import jaxamp
from jaxamp._passes import alignment

WORDS, WIDTH, TOKENS = 50257, 768, 4096
SHAPES = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((WORDS, WIDTH), (TOKENS, WIDTH))]
WITHOUT = functools.partial(AMP, disable_passes=["align_matmuls"])


def head(embedding, x):
    """As at the end of a GPT-2, whose words are its input too."""
    return jnp.sum(jax.nn.logsumexp(jnp.tanh(x) @ embedding.T, axis=-1))


def head_of_layers(embedding, x):
    """The same by a layer that is mapped over tokens, as Equinox writes it."""
    return jnp.sum(jax.nn.logsumexp(jax.vmap(lambda x: embedding @ x)(jnp.tanh(x)), axis=-1))


def with_bias(embedding, x):
    return jnp.sum(jnp.sin(jnp.tanh(x) @ embedding.T + jnp.arange(WORDS) / WORDS))


def shapes(jaxpr):
    """The shapes that the matmuls of a program read and make."""
    matmuls = [eqn for eqn in equations(jaxpr) if "dot_general" in eqn.primitive.name]
    return [[v.aval.shape for v in (*eqn.invars[:2], *eqn.outvars)] for eqn in matmuls]


@pytest.mark.parametrize("net", [head, head_of_layers, with_bias])
def test_all_three_matmuls_of_a_head_are_aligned(net):
    found = shapes(jax.make_jaxpr(jax.grad(AMP(net), (0, 1)))(*SHAPES))
    assert len(found) == 3
    assert all(size % 8 == 0 for matmul in found for shape in matmul for size in shape)
    before = shapes(jax.make_jaxpr(jax.grad(WITHOUT(net), (0, 1)))(*SHAPES))
    assert all(WORDS in (size for shape in matmul for size in shape) for matmul in before)


def contracted(w, x):
    """The odd axis is the one that is summed over."""
    return jnp.sum(jnp.sin(jnp.tanh(x) @ w))


def test_a_contracted_axis_is_padded_on_both_sides():
    w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1001, 2048), (4096, 1001)))
    found = shapes(jax.make_jaxpr(AMP(contracted))(w, x))
    assert found == [[(4096, 1008), (1008, 2048), (4096, 2048)]]


LEFT_ALONE = {
    "aligned": ((1000, 2048), (4096, 1000)),
    "an odd number of rows": ((1024, 2048), (4095, 1024)),
    "small": ((513, 64), (64, 513)),
    "much waste": ((65, 8192), (8192, 65)),
}


@pytest.mark.parametrize("sizes", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_what_is_left_alone(sizes):
    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in sizes]
    jaxprs = [str(jax.make_jaxpr(jax.grad(amp(contracted), (0, 1)))(*args)) for amp in (AMP, WITHOUT)]
    assert jaxprs[0] == jaxprs[1]


def test_a_matmul_that_the_user_keeps_in_float32_is_left_alone():
    amp = functools.partial(AMP, amp_policy={"*": jaxamp.use_original_precision})
    assert shapes(jax.make_jaxpr(amp(head))(*SHAPES)) == [[(TOKENS, WIDTH), (WIDTH, WORDS), (TOKENS, WORDS)]]


def test_what_devices_share_is_left_alone_and_their_own_part_is_not():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(AxisType.Auto,))
    split = [
        jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for s, spec in zip(SHAPES, ((None, "d"), ("d",)), strict=True)
    ]
    assert {s for m in shapes(jax.make_jaxpr(AMP(head))(*split)) for s in m} >= {(TOKENS, WORDS)}
    by_hand = jax.shard_map(
        lambda e, x: lax.psum(AMP(head)(e, x), "d"),
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec("d")),
        out_specs=PartitionSpec(),
    )
    assert (TOKENS // 8, WORDS + 7) in {s for m in shapes(jax.make_jaxpr(jax.grad(by_hand))(*SHAPES)) for s in m}


@pytest.fixture
def small(monkeypatch):
    """Pads small matmuls too, so that they can be run."""
    monkeypatch.setattr(alignment, "_FLOPS", 0)
    monkeypatch.setattr(alignment, "_WASTE", 1)


NETS = {"head": head, "layers": head_of_layers}


@both
@pytest.mark.parametrize("net", NETS.values(), ids=NETS)
def test_values_and_gradients(net, low, small):
    e, x = normal(0, 13, 5, scale=0.4), normal(1, 6, 5)
    amp = jaxamp.amp(net, compute_dtype=low)
    assert (6, 16) in {s for m in shapes(jax.make_jaxpr(amp)(e, x)) for s in m}
    assert_near(jax.jit(amp)(e, x), in_float64(net, e, x), 1e-2)
    for got, expected in zip(
        jax.jit(jax.grad(amp, (0, 1)))(e, x), in_float64(jax.grad(net, (0, 1)), e, x), strict=True
    ):
        assert_near(got, expected, 3e-2)


def test_under_vmap_and_jvp(small):
    e, x = normal(0, 13, 5, scale=0.4), normal(1, 3, 6, 5)
    mapped = jax.vmap(AMP(head), (None, 0))(e, x)
    assert_near(mapped, in_float64(jax.vmap(head, (None, 0)), e, x), 1e-2)
    got, tangent = jax.jvp(AMP(head), (e, x[0]), (e, x[0]))
    expected = in_float64(lambda e, x: jax.jvp(head, (e, x), (e, x))[1], e, x[0])
    assert_near(tangent, expected, 3e-2)
    assert got == AMP(head)(e, x[0])


def test_batches_keep_their_axes(small):
    """A batch of matmuls, whose odd axis is contracted in one and free in the other."""

    def scores(q, k):
        p = jnp.tanh(jnp.einsum("btd,bsd->bts", q, k))
        return jnp.sum(jnp.sin(jnp.einsum("bts,bsd->btd", p, k)))

    q, k = normal(0, 2, 7, 8), normal(1, 2, 7, 8)
    plan = plan_of(scores, q, k, passes=(alignment.align_matmuls,))
    assert plan.touched
    found = shapes(jax.make_jaxpr(AMP(scores))(q, k))
    assert found[0][-1] == (2, 7, 8)  # the other 7 is never the last axis of what is in memory
    assert_near(jax.grad(AMP(scores))(q, k), in_float64(jax.grad(scores), q, k), 3e-2)
