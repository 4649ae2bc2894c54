"""Masks of positions are made in the shape in which they are read, and are the same masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec
from program import equations

import jaxamp
from jaxamp._masks import spread_masks

AMP = jaxamp.amp(compute_dtype=jnp.bfloat16)
HEADS, TOKENS, WIDTH = 3, 6, 4
SCORES = 2, HEADS, TOKENS, TOKENS


def normal(*shape):
    return jnp.asarray(np.random.default_rng(0).standard_normal(shape).astype(np.float32))


def repeated_masks(jaxpr):
    """Masks that come from another by repeating it."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive is lax.broadcast_in_dim_p and eqn.outvars[0].aval.dtype == bool and eqn.invars[0].aval.shape
    ]


def whole_masks(jaxpr):
    return [eqn.outvars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "mask_of_positions"]


def causal():
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def window():
    at = jnp.arange(TOKENS)
    return (at[:, None] >= at) & (at[:, None] - at < 3)


def blocks():
    at = jnp.arange(TOKENS) // 2
    return jnp.expand_dims(at[None, :] == at[:, None], (0, 1))


def of_floats():
    """As Flax makes them."""
    at = jnp.broadcast_to(jnp.arange(TOKENS), (2, TOKENS))
    mask = jnp.greater_equal(jnp.expand_dims(at, -1), jnp.expand_dims(at, -2))
    return jnp.expand_dims(mask, -3).astype(jnp.float32) > 0


def of_one_row():
    return lax.broadcasted_iota(jnp.int32, (1, TOKENS), 0) >= lax.broadcasted_iota(jnp.int32, (1, TOKENS), 1) - 2


def squeezed():
    return jnp.squeeze(jnp.arange(TOKENS).reshape(1, TOKENS, 1, 1), (0, 3)) != jnp.arange(TOKENS)


def turned():
    return causal().T


def per_head():
    return jnp.arange(HEADS)[:, None, None] + jnp.arange(TOKENS)[:, None] > jnp.arange(TOKENS)


def negated():
    return ~jnp.triu(jnp.ones((TOKENS, TOKENS), bool), 2) & jnp.ones(SCORES, bool)


MASKS = causal, window, blocks, of_floats, of_one_row, squeezed, per_head, negated


def masked(mask):
    return lambda scores: jnp.where(mask(), scores, -1e9)


@pytest.mark.parametrize("mask", [*MASKS, turned])
def test_a_mask_is_the_same_mask(mask):
    scores = normal(*SCORES)
    fn = masked(mask)
    found = jax.jit(jax.extend.core.jaxpr_as_fun(spread_masks(jax.make_jaxpr(fn)(scores))))(scores)[0]
    np.testing.assert_array_equal(found, fn(scores))
    assert 0 < np.sum(np.asarray(found) == -1e9) < found.size


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_made_in_the_shape_of_the_scores(mask):
    jaxpr = spread_masks(jax.make_jaxpr(masked(mask))(normal(*SCORES)))
    assert SCORES not in repeated_masks(jaxpr)
    assert SCORES in whole_masks(jaxpr)


def attention(q, k, v):
    scores = jnp.einsum("thd,shd->hts", q, k) / WIDTH**0.5
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(causal(), scores, -jnp.inf)), v)


def test_mapped_attention_makes_its_mask_for_all_examples():
    q = normal(2, TOKENS, HEADS, WIDTH)
    loss = lambda q: jnp.sum(jax.vmap(attention)(q, q, q) ** 2)
    assert repeated_masks(jax.make_jaxpr(loss)(q)) == [SCORES[1:], SCORES]
    jaxpr = jax.make_jaxpr(jax.grad(AMP(loss)))(q)
    assert repeated_masks(jaxpr) == []
    assert whole_masks(jaxpr) == [SCORES]
    found = jax.grad(AMP(loss))(q)
    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(loss)(jnp.asarray(np.asarray(q, np.float64))))
    assert np.linalg.norm(found - expected) < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("keep", ["auto", "matmuls", "all"])
@pytest.mark.parametrize("around", [lambda fn: fn, jax.checkpoint, jax.jit], ids=["bare", "checkpoint", "jit"])
def test_nothing_more_is_kept_for_the_backward_pass(monkeypatch, around, keep):
    q = normal(2, TOKENS, HEADS, WIDTH)
    loss = lambda q: jnp.sum(around(jax.vmap(attention))(q, q, q) ** 2)
    spread = jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16, keep=keep)(q)
    monkeypatch.setattr("jaxamp._amp.spread_masks", lambda jaxpr: jaxpr)
    assert spread.after <= jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16, keep=keep)(q).after


def test_a_scan_makes_its_masks_again():
    q = normal(2, TOKENS, HEADS, WIDTH)
    layers = lambda q: jnp.sum(lax.scan(lambda q, w: (jax.vmap(attention)(q * w, q, q), None), q, jnp.ones(3))[0])
    jaxpr = jax.make_jaxpr(jax.grad(AMP(layers)))(q)
    loops = [eqn for eqn in jaxpr.eqns if eqn.primitive is lax.scan_p]
    # what the first loop reads, JAX makes before it
    assert [whole_masks(loop.params["jaxpr"]) for loop in loops] == [[], [SCORES]]
    assert [v.aval.shape for v in loops[1].invars if v.aval.dtype == bool] == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: jnp.where(x[0, 0] > 0, x, 0),
        lambda x: jnp.where(jnp.arange(TOKENS) < jnp.sum(x).astype(int), x, 0),
        lambda x: jnp.where(np.tril(np.ones((TOKENS, TOKENS), bool)), x, 0),
        lambda x: jnp.where(jax.random.bernoulli(jax.random.key(0), 0.5, (TOKENS, TOKENS)), x, 0),
        lambda x: jnp.where(jnp.cumsum(jnp.arange(TOKENS)) < 9, x, 0),
        lambda x: x + jnp.arange(TOKENS, dtype=x.dtype),
        lambda x: jnp.where(lax.broadcasted_iota(jnp.int32, (1, 1, 1, TOKENS), 2) < 1, x, 0),
    ],
    ids=["data", "rows of data", "lengths", "array", "random", "sums", "floats", "constant"],
)
def test_other_masks_stay_as_they_are(fn):
    jaxpr = jax.make_jaxpr(fn)(normal(*SCORES))
    assert spread_masks(jaxpr) is jaxpr


def test_masks_stay_where_no_rule_changes_anything():
    fn, scores = masked(causal), normal(*SCORES)
    assert repeated_masks(jax.make_jaxpr(jaxamp.amp(fn, amp_policy={}))(scores)) == [SCORES]


def test_a_long_expression_ends_the_search():
    """One that reads its own parts twice has 2**60 operations when written out."""

    def fn(scores):
        at = jnp.arange(TOKENS)
        for _ in range(60):
            at = at + at
        return jnp.where(at > 0, scores, 0)

    jaxpr = jax.make_jaxpr(fn)(normal(*SCORES))
    assert spread_masks(jaxpr) is jaxpr


def test_what_nothing_reads_any_more_is_gone():
    jaxpr = spread_masks(jax.make_jaxpr(lambda x: jnp.where(jnp.arange(TOKENS) < 3, x, 0) + 1)(normal(*SCORES)))
    read = {v for eqn in jaxpr.eqns for v in eqn.invars if isinstance(v, jax.extend.core.Var)} | {*jaxpr.jaxpr.outvars}
    assert [eqn.primitive.name for eqn in jaxpr.eqns if not read & {*eqn.outvars}] == []


def test_a_mask_that_is_printed_is_made(capfd):
    def fn(x):
        jax.debug.print("{}", jnp.broadcast_to(jnp.arange(2) < 1, (3, 2)))
        return jnp.where(jnp.arange(TOKENS) < 3, x, 0)

    jax.block_until_ready(jax.jit(AMP(fn))(normal(*SCORES)))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == "[[ True False] [ True False] [ True False]]".split()


def test_masks_of_unknown_shapes_stay_as_they_are():
    (size,) = export.symbolic_shape("size")
    scores = jax.ShapeDtypeStruct((2, HEADS, size, size), jnp.float32)
    fn = lambda x: jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e9)
    exported = export.export(jax.jit(AMP(fn)))(scores)
    np.testing.assert_array_equal(exported.call(normal(*SCORES)), fn(normal(*SCORES)))


def test_masks_without_jit():
    fn, scores = masked(causal), normal(*SCORES)
    with jax.disable_jit():
        np.testing.assert_array_equal(AMP(fn)(scores), fn(scores))


def test_masks_keep_the_line_of_the_user():
    jaxpr = jax.make_jaxpr(masked(causal))(normal(*SCORES))
    lines = {id(eqn.source_info.traceback) for eqn in equations(jaxpr) if eqn.primitive is lax.broadcast_in_dim_p}
    (mask,) = [eqn for eqn in equations(spread_masks(jaxpr)) if eqn.primitive.name == "mask_of_positions"]
    assert id(mask.source_info.traceback) in lines
    assert str(mask.params["made"]).startswith("broadcast_in_dim(select_n(ge(add(iota 0, 0), iota 1), ")


def test_masks_on_a_mesh():
    """On axes that arrays have in their types a mask stays as it is; inside of `shard_map` it is made for the part."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    fn, scores = masked(causal), normal(*SCORES)
    with jax.set_mesh(mesh):
        placed = jax.device_put(scores, jax.NamedSharding(mesh, PartitionSpec("d")))
        np.testing.assert_array_equal(jax.jit(AMP(fn))(placed), fn(scores))
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))
    each = jax.shard_map(fn, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
    jaxpr = jax.make_jaxpr(AMP(each))(scores)
    assert whole_masks(jaxpr) == [(1, *SCORES[1:])]
    np.testing.assert_array_equal(AMP(each)(scores), fn(scores))
