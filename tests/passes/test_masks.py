"""Masks of positions are made in the shape in which they are read, and are the same masks."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import export, lax
from jax.sharding import AxisType, PartitionSpec

import jaxamp
from jaxamp._passes.masks import spread_masks
from jaxamp._primitives.mask import MASK

HEADS, TOKENS, WIDTH = 3, 6, 4
SCORES = 2, HEADS, TOKENS, TOKENS


def repeated_masks(jaxpr):
    """Masks that come from another by repeating it."""
    return [
        eqn.outvars[0].aval.shape
        for eqn in equations(jaxpr)
        if eqn.primitive is lax.broadcast_in_dim_p and eqn.outvars[0].aval.dtype == bool and eqn.invars[0].aval.shape
    ]


def masks(jaxpr):
    return [eqn for eqn in equations(jaxpr) if eqn.primitive is MASK]


def whole_masks(jaxpr):
    return [eqn.outvars[0].aval.shape for eqn in masks(jaxpr)]


def check_values(fn, *args):
    """The same results with masks made elsewhere, and these the same as they are made on a GPU."""
    jaxpr = spread_masks(jax.make_jaxpr(fn)(*args))
    found = jax.jit(jax.extend.core.jaxpr_as_fun(jaxpr))(*args)
    for one, other in zip(found, jax.tree.leaves(fn(*args)), strict=True):
        np.testing.assert_array_equal(one, other)
    for eqn in masks(jaxpr):
        made = eqn.params["expression"]
        assert made.in_full_shape().shape == made.as_written().shape == eqn.outvars[0].aval.shape
        np.testing.assert_array_equal(made.in_full_shape(), made.as_written())
    return jaxpr


def causal():
    return jnp.tril(jnp.ones((TOKENS, TOKENS), bool))


def window():
    at = jnp.arange(TOKENS)
    return (at[:, None] >= at) & (at[:, None] - at < 3)


def blocks():
    at = lax.div(jnp.arange(TOKENS), 2)
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
    check_values(masked(mask), normal(0, *SCORES))
    found = np.asarray(masked(mask)(normal(0, *SCORES)))
    assert 0 < np.sum(found == -1e9) < found.size


SIZES = st.sampled_from([1, 2, 3])
STEPS = st.lists(
    st.sampled_from("repeat add_one drop_one flatten turn shift scale compare choose clamp cast mix".split()),
    max_size=8,
)


@pytest.mark.slow
@given(st.tuples(SIZES, SIZES), STEPS, st.data())
@settings(max_examples=60, deadline=None)
def test_any_mask_is_the_same_mask(shape, steps, data):
    """Whatever is done to positions before they are compared and repeated."""
    draw = lambda most: data.draw(st.integers(0, most))

    def fn(x):
        a = lax.broadcasted_iota(jnp.int32, shape, draw(1))
        for step in steps:
            at = draw(a.ndim - 1) if a.ndim else 0
            match step:
                case "repeat" if a.size < 50:
                    a = jnp.broadcast_to(a, (draw(1) + 1, *(3 if size == 1 else size for size in a.shape)))
                case "add_one":
                    a = jnp.expand_dims(a, at)
                case "drop_one" if a.ndim and a.shape[at] == 1:
                    a = jnp.squeeze(a, at)
                case "flatten":
                    a = a.reshape(-1)
                case "turn":
                    a = a.T
                case "shift":
                    a = a + draw(3) - 1
                case "scale":
                    a = lax.rem(lax.neg(a) * 2, jnp.int32(3))
                case "compare" if a.ndim:
                    a = (a >= lax.broadcasted_iota(jnp.int32, a.shape, at)).astype(jnp.int32)
                case "choose":
                    a = lax.select(lax.gt(a, lax.full_like(a, 0)), a, lax.full_like(a, 2))
                case "clamp":
                    a = lax.clamp(0, a, 1 + draw(1))
                case "cast":
                    a = a.astype(data.draw(st.sampled_from(["float32", "int8", "bool", "float16"]))).astype(jnp.int32)
                case "mix" if a.ndim:
                    a = jnp.maximum(a, lax.broadcasted_iota(jnp.int32, (1,) * (a.ndim - 1) + a.shape[-1:], a.ndim - 1))
        return jnp.where(jnp.broadcast_to(a > 0, (2, *a.shape)), x, -1.0)

    check_values(lambda x: jax.jit(fn)(x), jnp.float32(1))


@pytest.mark.parametrize("mask", MASKS)
def test_a_mask_is_made_in_the_shape_of_the_scores(mask):
    jaxpr = spread_masks(jax.make_jaxpr(masked(mask))(normal(0, *SCORES)))
    assert SCORES not in repeated_masks(jaxpr)
    assert SCORES in whole_masks(jaxpr)


def attention(q, k, v):
    scores = jnp.einsum("thd,shd->hts", q, k) / WIDTH**0.5
    return jnp.einsum("hts,shd->thd", jax.nn.softmax(jnp.where(causal(), scores, -jnp.inf)), v)


def test_mapped_attention_makes_its_mask_for_all_examples():
    q = normal(0, 2, TOKENS, HEADS, WIDTH)
    loss = lambda q: jnp.sum(jax.vmap(attention)(q, q, q) ** 2)
    assert repeated_masks(jax.make_jaxpr(loss)(q)) == [SCORES[1:], SCORES]
    jaxpr = jax.make_jaxpr(jax.grad(AMP(loss)))(q)
    assert repeated_masks(jaxpr) == []
    assert set(whole_masks(jaxpr)) == {SCORES}
    found = jax.grad(AMP(loss))(q)
    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(loss)(jnp.asarray(np.asarray(q, np.float64))))
    assert np.linalg.norm(found - expected) < 2e-2 * np.linalg.norm(expected)


@pytest.mark.parametrize("keep", ["auto", "matmuls", "all"])
@pytest.mark.parametrize("around", [lambda fn: fn, jax.checkpoint, jax.jit], ids=["bare", "checkpoint", "jit"])
def test_nothing_more_is_kept_for_the_backward_pass(around, keep):
    q = normal(0, 2, TOKENS, HEADS, WIDTH)
    loss = lambda q: jnp.sum(around(jax.vmap(attention))(q, q, q) ** 2)
    spread = jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16, keep=keep)(q)
    written = jaxamp.bytes_kept(loss, compute_dtype=jnp.bfloat16, keep=keep, disable_passes=["spread_masks"])(q)
    assert spread.after <= written.after


def test_a_scan_makes_its_masks_again():
    q = normal(0, 2, TOKENS, HEADS, WIDTH)
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
        lambda x: jnp.where(0.1 * jnp.arange(TOKENS, dtype=x.dtype) < 0.3, x, 0),
        lambda x: jnp.where(lax.broadcasted_iota(jnp.int32, (1, 1, 1, TOKENS), 2) < 1, x, 0),
    ],
    ids=["data", "rows of data", "lengths", "array", "random", "sums", "floats", "rounded", "constant"],
)
def test_other_masks_stay_as_they_are(fn):
    jaxpr = jax.make_jaxpr(fn)(normal(0, *SCORES))
    assert spread_masks(jaxpr) is jaxpr


def test_masks_stay_where_no_rule_changes_anything():
    fn, scores = masked(causal), normal(0, *SCORES)
    assert repeated_masks(jax.make_jaxpr(jaxamp.amp(fn, amp_policy={}))(scores)) == [SCORES]


def test_a_long_expression_ends_the_search():
    """One that reads its own parts twice has 2**60 operations when written out."""

    def fn(scores):
        at = jnp.arange(TOKENS)
        for _ in range(60):
            at = at + at
        return jnp.where(at > 0, scores, 0)

    jaxpr = jax.make_jaxpr(fn)(normal(0, *SCORES))
    assert spread_masks(jaxpr) is jaxpr


def test_masks_stay_where_nothing_is_low():
    fn, scores = masked(causal), normal(0, *SCORES)
    assert whole_masks(jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.float32))(scores)) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: jnp.where(lax.reshape(causal(), (1, TOKENS, TOKENS), dimensions=(1, 0)), x, 0),
        lambda x: jnp.where(jnp.arange(TOKENS**2).reshape(TOKENS, TOKENS) > 9, x, 0),
        lambda x: (jnp.broadcast_to(causal(), (2, TOKENS, TOKENS)), x),
        lambda x: (jax.jit(lambda: jnp.broadcast_to(causal(), (2, TOKENS, TOKENS)))(), x),
        lambda x: jnp.where(lax.cond(x[0, 0, 0, 0] < 0, lambda m: m, jnp.logical_not, causal()), x, 0),
        lambda x: lax.scan(lambda m, _: (~m, jnp.where(m, x, 0)), causal(), None, 2),
        lambda x: lax.scan(lambda x, m: (jnp.where(m, x, 0), None), x, jnp.broadcast_to(causal(), SCORES[1:])),
        lambda x: lax.scan(lambda x, _: (jnp.where(causal(), x, 0), None), x, None, 2),
        lambda x: lax.while_loop(
            lambda s: s[0] < 2, lambda s: (s[0] + 1, ~s[1], jnp.where(s[1], x, 0)), (0, causal(), x)
        ),
        lambda x: jax.checkpoint(lambda x, m: jnp.where(m, x, 0))(x, causal()),
    ],
    ids="turning_reshape reshape returned from_a_jit cond carry xs in_a_scan while checkpoint".split(),
)
def test_masks_around_other_operations(fn):
    check_values(fn, normal(0, *SCORES))


def test_a_function_that_returns_a_mask():
    make = jax.jit(lambda: jnp.broadcast_to(causal(), SCORES))
    assert whole_masks(check_values(lambda x: jnp.where(make(), x, 0), normal(0, *SCORES))) == [SCORES]


def test_a_function_that_is_called_with_two_masks():
    where = jax.jit(lambda m, x: jnp.where(m, x, 0))
    jaxpr = check_values(lambda x: where(causal(), x) - where(window(), x), normal(0, *SCORES))
    assert whole_masks(jaxpr) == [SCORES, SCORES]


def test_a_function_that_is_called_with_many_masks_is_rewritten_for_a_few():
    where = jax.jit(lambda m, x: jnp.where(m, x, 0))
    fn = lambda x: sum(where(causal() & (jnp.arange(TOKENS) != i), x) for i in range(9))
    bodies = {
        id(eqn.params["jaxpr"])
        for eqn in check_values(fn, normal(0, *SCORES)).eqns
        if eqn.params.get("name") == "<lambda>"
    }
    assert 1 < len(bodies) <= 5


def test_a_layer_that_is_called_with_numbers_is_rewritten_once():
    layer = jax.jit(lambda x, i: masked(causal)(x) * i)
    fn = lambda x: layer(layer(layer(x, 1.0), 2.0), 3.0)
    jaxpr = check_values(fn, normal(0, *SCORES))
    assert len({id(eqn.params["jaxpr"]) for eqn in jaxpr.eqns}) == 1
    assert whole_masks(jaxpr) == [SCORES] * 3


def test_masks_of_64_bits_stay_as_they_are():
    """They would be made in 32 bits where they are lowered without `jax_enable_x64`."""

    def fn(x):
        with jax.enable_x64(True):
            mask = jnp.arange(TOKENS, dtype=jnp.int64) * 2**33 > 2**33
        return jnp.where(mask, x, 0)

    assert whole_masks(check_values(fn, normal(0, *SCORES))) == []


def test_effects_stay(capfd):
    @jax.jit
    def mask():
        jax.debug.print("printed")
        return jnp.broadcast_to(causal(), SCORES)

    jax.block_until_ready(jax.jit(AMP(lambda x: jnp.where(mask(), x, 0)))(normal(0, *SCORES)))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == ["printed"]


def test_scopes_stay():
    def fn(x):
        with jax.named_scope("mask"):
            mask = jnp.arange(TOKENS)[:, None] >= jnp.arange(TOKENS)
        return lax.select_n(lax.broadcast_in_dim(mask, SCORES, (2, 3)), x, 2 * x) @ x

    policy = jaxamp.load_policy("default") | {"mask": jaxamp.use_original_precision}
    assert jaxamp.unmatched_keys(fn, amp_policy=policy)(normal(0, *SCORES)) == []


def test_a_mask_that_is_printed_is_made(capfd):
    def fn(x):
        jax.debug.print("{}", jnp.broadcast_to(jnp.arange(2) < 1, (3, 2)))
        return jnp.where(jnp.arange(TOKENS) < 3, x, 0)

    jax.block_until_ready(jax.jit(AMP(fn))(normal(0, *SCORES)))
    jax.effects_barrier()
    assert capfd.readouterr().out.split() == "[[ True False] [ True False] [ True False]]".split()


def test_masks_of_unknown_shapes_stay_as_they_are():
    (size,) = export.symbolic_shape("size")
    scores = jax.ShapeDtypeStruct((2, HEADS, size, size), jnp.float32)
    fn = lambda x: jnp.where(jnp.tril(jnp.ones(x.shape[-2:], bool)), x, -1e9)
    exported = export.export(jax.jit(AMP(fn)))(scores)
    np.testing.assert_array_equal(exported.call(normal(0, *SCORES)), fn(normal(0, *SCORES)))


def test_masks_without_jit():
    fn, scores = masked(causal), normal(0, *SCORES)
    with jax.disable_jit():
        np.testing.assert_array_equal(AMP(fn)(scores), fn(scores))


def test_masks_keep_the_line_of_the_user():
    jaxpr = jax.make_jaxpr(masked(causal))(normal(0, *SCORES))
    lines = {id(eqn.source_info.traceback) for eqn in equations(jaxpr) if eqn.primitive is lax.broadcast_in_dim_p}
    (mask,) = masks(spread_masks(jaxpr))
    assert id(mask.source_info.traceback) in lines
    assert str(mask.params["expression"]).startswith("broadcast_in_dim(select_n(ge(add(iota 0, 0), iota 1), ")


def test_masks_on_a_mesh():
    """On axes that arrays have in their types a mask stays as it is; inside of `shard_map` it is made for the part."""
    spec, scores = PartitionSpec("d"), normal(0, *SCORES)
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):

        def explicit(x):
            mask = lax.broadcast_in_dim(causal(), SCORES, (2, 3), out_sharding=spec)
            return mask, lax.select(mask, x, lax.full_like(x, 0))

        placed = jax.device_put(scores, jax.NamedSharding(mesh, spec))
        assert whole_masks(check_values(explicit, placed)) == []
        assert jax.tree.map(jax.typeof, jax.jit(AMP(explicit))(placed)) == jax.tree.map(jax.typeof, explicit(placed))
    mesh, fn = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,)), masked(causal)
    each = jax.shard_map(fn, mesh=mesh, in_specs=spec, out_specs=spec)
    assert whole_masks(jax.make_jaxpr(AMP(each))(scores)) == [(1, *SCORES[1:])]
    np.testing.assert_array_equal(AMP(each)(scores), fn(scores))
    # that of a function of the user's, which says where its result is
    make = jax.jit(lambda: jnp.broadcast_to(causal(), SCORES), out_shardings=jax.NamedSharding(mesh, spec))
    assert jax.jit(AMP(lambda x: (make(), jnp.where(make(), x, 0))))(scores)[0].sharding.spec == spec
