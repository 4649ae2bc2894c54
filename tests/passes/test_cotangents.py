"""Cotangents that a bias and the matmul before it share."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_near, dtypes_of, equations, in_float64, names, near, normal
from jax import lax
from plans import plan_of

from jaxamp._passes.cotangents import SharedCotangent, share_cotangents

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def test_a_plan_with_a_bias():
    plan = plan_of(lambda w, b, x: (x @ w.T + b) @ w, W, B, X)
    at = [eqn.primitive.name for eqn in plan.eqns].index("add")
    (region,) = [part for part in share_cotangents(plan).parts if not isinstance(part, int)]
    assert isinstance(region, SharedCotangent)
    assert region.parts == (at,)
    assert share_cotangents(plan).steps is plan.steps


def test_a_bias_inside_of_another_region_is_found_too():
    class Around(NamedTuple):
        parts: tuple

        def with_parts(self, parts):
            return self._replace(parts=parts)

    plan = plan_of(lambda w, b, x: (x @ w.T + b) @ w, W, B, X)
    at = [eqn.primitive.name for eqn in plan.eqns].index("add")
    (around,) = [
        part for part in share_cotangents(plan.with_regions([Around((at,))])).parts if not isinstance(part, int)
    ]
    assert [type(part) for part in around.parts] == [SharedCotangent]


def test_a_constant_that_is_reshaped_beside_a_bias():
    def fn(w, b, x):
        return jnp.sum(jnp.tanh(x @ w.T + b) @ w * lax.reshape(lax.convert_element_type(2.0, x.dtype), (1, 1, 1)))

    assert_near(jax.grad(AMP(fn), (0, 1))(W, B, X), in_float64(jax.grad(fn, (0, 1)), W, B, X), 2e-2)


def test_a_plan_without_low_operations_is_left_as_it_is():
    plan = plan_of(lambda b, x: jnp.sin(x + b), X[0, 0], X)
    assert share_cotangents(plan) is plan


def test_a_bias_that_is_added_low_is_summed_in_float32_from_what_the_matmul_reads():
    fn = lambda w, b, x: jnp.sum(jax.nn.silu(x @ w.T + b) @ w)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, B, X)
    (held,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert held.params["dtype"] == jnp.bfloat16
    assert set(dtypes_of("reduce_sum", jaxpr)) == {"float32"}


@pytest.mark.parametrize(
    ("after", "readers"),
    [
        (lambda y, w: jnp.sum(jax.nn.silu(y) @ w), ["convert_element_type", "mixed_dot_general", "mixed_dot_general"]),
        (lambda y, w: jnp.sum(y**2), ["convert_element_type", "reduce_sum"]),  # rounded, and back for both
    ],
)
def test_a_bias_and_the_matmul_before_it_read_one_held_cotangent(after, readers):
    """XLA would repeat the matmul's operand for it alone: in a ViT, the concatenation of three cotangents."""
    fn = lambda w, b, x: after(x @ w.T + b, w)
    found = list(equations(jax.make_jaxpr(jax.grad(AMP(fn), (0, 1, 2)))(W, B, X)))
    (held,) = [eqn for eqn in found if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert sorted(eqn.primitive.name for eqn in found if held.outvars[0] in eqn.invars) == readers


@pytest.mark.parametrize(
    "activation",
    [
        jax.nn.relu,
        jax.nn.leaky_relu,
        jax.nn.relu6,
        lambda y: jnp.maximum(y, 0.1),
        lambda y: jnp.where(y > 0, y, -2 * y),
    ],
)
def test_a_cotangent_that_a_comparison_makes_is_not_held(activation):
    """XLA writes it in the kernel that sums it for the bias. The sum is in float32 all the same."""
    fn = lambda w, b, x: jnp.sum(activation(x @ w.T + b) @ w)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, B, X)
    assert not [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert set(dtypes_of("reduce_sum", jaxpr)) == {"float32"}
    assert_near(jax.jit(jax.grad(AMP(fn), (0, 1)))(W, B, X), in_float64(jax.grad(fn, (0, 1)), W, B, X), 3e-2)


def test_a_bias_gradient_over_many_rows_is_not_lost():
    rows = 4099  # bfloat16 counts to 256
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(x @ w + b) @ w)
    w, b, x = jnp.eye(4), jnp.ones(4), jnp.ones((rows, 4))
    assert np.array_equal(jax.jit(jax.grad(AMP(fn), 1))(w, b, x), np.full(4, rows, np.float32))
    gelu = lambda w, b, x: jnp.sum(jax.nn.gelu(x @ w + b) @ w)
    assert near(jax.jit(jax.grad(AMP(gelu), 1))(w, b, x), in_float64(jax.grad(gelu, 1), w, b, x), 5e-3)


@pytest.mark.parametrize("shape", [(5, 8), (1, 5, 8)])
def test_the_gradient_of_a_table_of_positions_keeps_the_order_of_axes(shape):
    def fn(table, w, x):
        return jnp.sum(jnp.tanh((x + table) @ w.T) ** 2)

    table = normal(5, *shape)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn)))(table, W, X)
    (held,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert (held.params["row_major"], held.invars[0].aval.shape) == (True, (3, 5, 8))
    assert near(jax.jit(jax.grad(AMP(fn)))(table, W, X), in_float64(jax.grad(fn), table, W, X))


def test_a_bias_of_channels_first_has_no_say_in_the_layout():
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(x @ w + b[:, None, None]) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(normal(6, 6, 6), normal(7, 4), normal(8, 2, 4, 6, 6))
    assert not any(eqn.params["row_major"] for eqn in equations(jaxpr) if eqn.primitive.name == "materialized")


@pytest.mark.parametrize("bias", [lambda b, y: b, lambda b, y: jnp.broadcast_to(b, y.shape[1:])])
def test_cotangents_of_convolutions_and_of_what_was_repeated_by_hand_are_left_alone(bias):
    def fn(w, b, x):
        y = lax.conv_general_dilated(x, w, (1, 1), "SAME")
        return jnp.sum(jax.nn.relu(y + bias(b, y)) ** 2)

    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(normal(6, 4, 3, 3, 3), normal(7, 4, 1, 1), normal(8, 2, 3, 6, 6))
    assert [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized"] == []


def test_cotangents_of_statistics_are_left_alone():
    fn = lambda w, x: jnp.sum(jnp.tanh(x @ w.T - (x**2 @ w.T).mean(0)) @ w)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn)))(W, X)
    assert [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized"] == []


PAIRS = {
    "as it is": lambda h, w, b: h @ w,
    "with a bias": lambda h, w, b: h @ w + b,
    "scaled": lambda h, w, b: (h @ w + b) * 0.5,
    "of few": lambda h, w, b: h[..., :2] @ w[:2],
    "an outer product": lambda h, w, b: jnp.einsum("ic,jc,ch->ijh", h[0], h[1], w),
}


@pytest.mark.parametrize("pair", PAIRS.values(), ids=PAIRS)
def test_scores_and_a_bias_for_each_pair_share_one_cotangent(pair):
    """As in AlphaFold: all rows attend with a bias that is made from the pairs. XLA would write float32 for its sum."""

    def fn(params, z):
        (_, w, b), h = params, jnp.tanh(z @ params[0])
        bias = pair(h, w, b).transpose(2, 0, 1)
        heads = h.reshape(*h.shape[:2], 4, -1)
        scores = jnp.einsum("iqhd,ikhd->ihqk", heads, heads) / 2 + bias[None]
        return jnp.sum(jnp.einsum("ihqk,ikhd->iqhd", jax.nn.softmax(scores), heads) ** 2)

    params, z = (normal(6, 16, 16, scale=0.3), normal(7, 16, 4), normal(8, 4)), normal(9, 6, 6, 16)
    found = list(equations(jax.make_jaxpr(jax.grad(AMP(fn)))(params, z)))
    held = {v for eqn in found if eqn.primitive.name == "materialized" for v in eqn.outvars}
    held |= {eqn.outvars[0] for eqn in found if eqn.primitive.name == "convert_element_type" and eqn.invars[0] in held}
    summed = [eqn.invars[0] for eqn in found if eqn.primitive.name == "reduce_sum" and eqn.params["axes"] == (0,)]
    assert [v in held for v in summed if v.aval.shape == (6, 4, 6, 6)] == [True]
    grads, expected = jax.jit(jax.grad(AMP(fn)))(params, z), in_float64(jax.grad(fn), params, z)
    assert_near(grads[:2], expected[:2], 3e-2)  # a softmax does not feel the last: it is the same for all entries


@pytest.mark.parametrize("after", [lambda y, x: y, lambda y, x: y * jnp.exp(x[..., :1])])  # low, and an island
def test_a_sum_with_a_bias_is_transposed_as_the_linear_function_it_is(after):
    fn = lambda w, b, x: jnp.sum(after(x @ w.T + b, x), (0, 1))
    transposed = lambda fn: lambda w, b, x: jax.linear_transpose(lambda w, b: fn(w, b, x), w, b)(b)
    for found, expected in zip(transposed(AMP(fn))(W, B, X), in_float64(transposed(fn), W, B, X), strict=True):
        assert near(found, expected)
    alone = lambda fn: lambda w, b, x: jax.linear_transpose(lambda b: fn(0 * w, b, x), b)(b)[0]
    assert near(alone(AMP(fn))(W, B, X), in_float64(alone(fn), W, B, X))


def test_without_low_operations_nothing_is_held():
    assert "materialized" not in names(
        jax.make_jaxpr(AMP(lambda table, x: jnp.sum(jnp.sin(x + table))))(normal(9, 5, 8), X)
    )


def test_nor_are_those_of_a_convolution_whose_result_is_reshaped():
    """As that of a mapped layer is."""
    conv = lambda w, b, x: lax.conv_general_dilated(x[None], w, (1, 1), "SAME")[0] + b
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(jax.vmap(conv, (None, None, 0))(w, b, x)) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(normal(6, 4, 3, 3, 3), normal(7, 4, 1, 1), normal(8, 2, 3, 6, 6))
    assert [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized"] == []


def test_the_gradient_of_a_factor_is_summed_where_its_product_is_made():
    """Of a product with a parameter for each channel nothing is written for the parameter."""
    fn = lambda w, b, x: jnp.sum(((x @ w.T) * b) @ w)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, B, X)
    assert "materialized" not in names(jaxpr)
    assert set(dtypes_of("reduce_sum", jaxpr)) == {"float32"}
    assert_near(jax.grad(AMP(fn), (0, 1))(W, B, X), in_float64(jax.grad(fn, (0, 1)), W, B, X), 2e-2)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


IMAGE, FILTERS = normal(20, 2, 6, 6, 16), normal(21, 3, 3, 16, 16, scale=0.1)


@pytest.mark.parametrize(
    ("act", "is_shared"),
    [(jax.nn.gelu, True), (jax.nn.elu, True), (jax.nn.relu, False), (lambda x: x, False)],
    ids=["gelu", "elu", "relu", "none"],
)
def test_a_convolution_and_its_bias_share_one_cotangent_in_front_of_a_costly_activation(act, is_shared):
    fn = lambda w, b, x: jnp.sum(conv(act(conv(x, w) + b), w) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(FILTERS, B, IMAGE)
    held = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert [eqn.params["dtype"].name for eqn in held] == ["bfloat16"] * is_shared
    found = jax.grad(AMP(fn), (0, 1))(FILTERS, B, IMAGE)
    assert_near(found, in_float64(jax.grad(fn, (0, 1)), FILTERS, B, IMAGE), 2e-2)


# -- scores, with more than one thing added to them


TOKENS, HEADS, QUERIES, KEYS, VALUES = 6, 2, normal(11, 2, 6, 4), normal(12, 2, 6, 4), normal(13, 2, 6, 4)
DECAYS, SLOPES, PAIRS = normal(14, 2, 6), normal(15, 2), normal(16, 6, 6)
CAUSAL = np.tril(np.ones((6, 6), bool))


def attend(scores, v):
    return jnp.sum((jax.nn.softmax(scores) @ v) ** 2)


def forgetting(w, c, s, q, k, v):
    """Decays between any two tokens, as a difference of sums."""
    c = jnp.cumsum(jax.nn.log_sigmoid(c), axis=1)
    scores = (q @ w) @ k.mT / jnp.sqrt(q.shape[-1]) + (c[:, :, None] - c[:, None, :])
    return attend(jnp.where(CAUSAL, scores, -jnp.inf), v)


def by_rows_and_columns(w, c, s, q, k, v):
    """A bias for each query and one for each key, of which one is scaled."""
    return attend(0.5 * ((q @ w) @ k.mT) + (c[:, :, None] + jnp.exp(c)[:, None, :]), v)


def with_a_table(w, c, s, q, k, v):
    """A bias for each pair, repeated over heads, under a mask."""
    return attend(jnp.where(CAUSAL, (q @ w) @ k.mT + s, -1e9), v)


def held(fn, argnums, *args, **options):
    """How many cotangents of scores are written once, rounded."""
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn, **options), argnums))(*args)
    found = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    return sum(eqn.invars[0].aval.shape == (HEADS, TOKENS, TOKENS) for eqn in found)


SCORED = normal(10, 4, 4), DECAYS, PAIRS, QUERIES, KEYS, VALUES


@pytest.mark.parametrize("fn", [forgetting, by_rows_and_columns, with_a_table])
def test_scores_and_what_is_added_to_them_read_one_held_cotangent(fn):
    without = held(fn, (0, 1, 2), *SCORED, disable_passes=["share_cotangents"])
    assert held(fn, (0, 1, 2), *SCORED) > without
    found = jax.jit(jax.grad(AMP(fn), (0, 1, 2)))(*SCORED)
    for a, b in zip(found, in_float64(jax.grad(fn, (0, 1, 2)), *SCORED), strict=True):
        assert near(a, b, 3e-2) or not np.any(b)


def test_what_is_added_and_not_trained_holds_nothing():
    assert held(forgetting, 0, *SCORED) == held(forgetting, 0, *SCORED, disable_passes=["share_cotangents"])


def test_a_mean_that_is_subtracted_is_not_one_of_several():
    """It is part of a norm's kernel."""
    jaxpr = jax.make_jaxpr(jax.grad(AMP(lambda w, x: jnp.sum(jax.nn.standardize(x @ w.T) @ w))))(W, X)
    assert not [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
