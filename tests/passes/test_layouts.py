"""How results and cotangents lie in memory: matmuls without transposes around them, cotangents held as they are."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, MATMULS, dtypes_of, equations, in_float64, matmul_dtypes, names, near, normal
from jax import lax

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


# -- transposes


def mapped(w, x):
    """A layer of one token, mapped over tokens and examples."""
    return jax.vmap(jax.vmap(lambda x: w @ x))(x)


def test_a_mapped_layer_has_no_transpose_forward_or_backward():
    fn = lambda w, x: jnp.sum(jnp.tanh(mapped(w, x)) ** 2)
    assert "transpose" in names(jax.make_jaxpr(fn)(W, X))
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, X)
    assert "transpose" not in names(jaxpr)
    assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")] * 3
    expected = in_float64(jax.grad(fn, (0, 1)), W, X)
    assert all(map(near, jax.grad(AMP(fn), (0, 1))(W, X), expected))


@pytest.mark.parametrize(
    ("dims", "shapes", "permutation"),
    [
        ((((1,), (1,)), ((), ())), ((4, 8), (6, 8)), (1, 0)),
        ((((1,), (2,)), ((), ())), ((4, 8), (2, 6, 8)), (1, 2, 0)),
        ((((2,), (1,)), ((0,), (0,))), ((3, 4, 8), (3, 8, 6)), (0, 2, 1)),
        ((((0, 2), (1, 0)), ((), ())), ((3, 4, 8), (8, 3, 6)), (1, 0)),
    ],
)
def test_a_transpose_that_swaps_the_operands_is_folded(dims, shapes, permutation):
    a, b = normal(3, *shapes[0]), normal(4, *shapes[1])
    fn = lambda a, b: jnp.exp(lax.transpose(lax.dot_general(a, b, dims), permutation) * 0.1)
    assert "transpose" not in names(jax.make_jaxpr(AMP(fn))(a, b))
    assert near(AMP(fn)(a, b), in_float64(fn, a, b))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: jnp.sin(jnp.einsum("oi,bti->tbo", w, x)),  # another order than the operands' swapped
        lambda w, x: (lambda y: (jnp.sin(jnp.transpose(y, (1, 2, 0))), jnp.cos(y)))(
            jnp.tensordot(w, x, (1, 2))
        ),  # twice
        lambda w, x: (lambda y: (jnp.sin(jnp.transpose(y, (1, 2, 0))), y))(jnp.tensordot(w, x, (1, 2))),  # returned
    ],
)
def test_other_transposes_stay(fn):
    assert "transpose" in names(jax.make_jaxpr(AMP(fn))(W, X))
    for found, expected in zip(jax.tree.leaves(AMP(fn)(W, X)), jax.tree.leaves(in_float64(fn, W, X)), strict=True):
        assert near(found, expected)


def test_a_layer_mapped_from_outside_puts_tokens_first():
    fn = lambda w, x: jnp.tanh(w @ x)
    jaxpr = jax.make_jaxpr(jax.vmap(AMP(fn), (None, 0)))(W, X[0])
    (matmul,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    assert matmul.outvars[0].aval.shape == (5, 16)
    assert near(jax.vmap(AMP(fn), (None, 0))(W, X[0]), in_float64(jax.vmap(fn, (None, 0)), W, X[0]))


# -- what is returned


def test_a_matmul_that_is_only_returned_comes_out_in_float32():
    for fn in (lambda w, x: x @ w.T, lambda w, x: jnp.transpose(x @ w.T, (2, 0, 1)), jax.jit(lambda w, x: x @ w.T)):
        jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
        assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")]
        assert [dtypes_of(name, jaxpr) for name in ("mixed_dot_general", "convert_element_type")] == [["float32"], []]
        rounded = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
        assert near(AMP(fn)(W, X), in_float64(fn, *rounded), 1e-6)


def test_a_matmul_of_which_a_part_is_returned_stays_low():
    jaxpr = jax.make_jaxpr(AMP(lambda w, x: (x @ w.T)[:, -1]))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


def test_a_matmul_that_is_read_as_well_stays_low():
    def fn(w, x):
        y = x @ w.T
        return y, jnp.tanh(y)

    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    assert {eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS} == {"bfloat16"}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_weight_gradients_under_amp_come_straight_out_of_the_matmul(wrap):
    fn = lambda w, x: jnp.sum(jax.nn.relu(x @ w.T))
    low = [np.asarray(a.astype(jnp.bfloat16).astype(jnp.float32)) for a in (W, X)]
    found = AMP(wrap(jax.grad(fn)))(W, X)
    assert found.dtype == jnp.float32
    assert near(found, in_float64(jax.grad(fn), *low), 1e-6)


# -- cotangents


def test_a_bias_that_is_added_low_is_summed_in_float32_from_what_the_matmul_reads():
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(x @ w.T + b) @ w)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(W, B, X)
    (held,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert held.params["dtype"] == jnp.bfloat16
    assert set(dtypes_of("reduce_sum", jaxpr)) == {"float32"}


@pytest.mark.parametrize(
    ("after", "readers"),
    [
        (lambda y, w: jnp.sum(jax.nn.relu(y) @ w), ["convert_element_type", "mixed_dot_general", "mixed_dot_general"]),
        (lambda y, w: jnp.sum(y**2), ["convert_element_type", "reduce_sum"]),  # rounded, and back for both
    ],
)
def test_a_bias_and_the_matmul_before_it_read_one_held_cotangent(after, readers):
    """XLA would make what the matmul reads anew, for it alone: in a ViT, the concatenation of three cotangents."""
    fn = lambda w, b, x: after(x @ w.T + b, w)
    found = list(equations(jax.make_jaxpr(jax.grad(AMP(fn), (0, 1, 2)))(W, B, X)))
    (held,) = [eqn for eqn in found if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert sorted(eqn.primitive.name for eqn in found if held.outvars[0] in eqn.invars) == readers


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


def test_results_of_matmuls_are_in_order_unless_they_are_read_in_another():
    def ordered(fn) -> int:
        return names(jax.make_jaxpr(AMP(fn))(W, X)).count("row_major")

    assert ordered(lambda w, x: jnp.tanh(x @ w.T)) == 1
    assert ordered(lambda w, x: jnp.tanh(mapped(w, x))) == 1  # the transpose is folded
    assert ordered(lambda w, x: jnp.tanh((x @ w.T).transpose(1, 0, 2))) == 0
    assert ordered(lambda w, x: jnp.tanh(w @ x[0, 0])) == 0  # a vector has one order


def test_a_bias_of_channels_first_has_no_say_in_the_layout():
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(lax.conv_general_dilated(x, w, (1, 1), "SAME") + b[:, None, None]) ** 2)
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn), (0, 1)))(normal(6, 4, 3, 3, 3), normal(7, 4), normal(8, 2, 3, 6, 6))
    assert [eqn.params["row_major"] for eqn in equations(jaxpr) if eqn.primitive.name == "materialized"] == [False]


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
