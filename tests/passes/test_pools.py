"""Maxima over windows, between low operations."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, both, in_float64, kept, normal
from jax import lax
from plans import plan_of, step

import jaxamp
from jaxamp._passes.pools import pool_low

FILTERS, IMAGE = normal(0, 3, 3, 4, 4, scale=0.2), normal(1, 2, 12, 12, 4)
ENDS = {lax.max: -jnp.inf, lax.min: jnp.inf}


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x, by=lax.max):
    return lax.reduce_window(x, ENDS[by], by, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def between(w, x, by=lax.max):
    """As in the stem of a ResNet."""
    x = conv(x, w)
    x = jnp.tanh((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    return jnp.sum(conv(pool(x, by), w) ** 2)


@pytest.mark.parametrize("by", ENDS)
def test_a_pool_between_convolutions_reads_a_low_operand(by):
    fn = lambda w, x: between(w, x, by)
    name = f"reduce_window_{by.__name__}"
    before, after = (step(plan_of(fn, FILTERS, IMAGE, passes=passes), name) for passes in ((), (pool_low,)))
    assert not before.outs[0].is_low
    assert [format_.low for format_ in after.reads] == [after.outs[0].is_low] == [True]


@both
def test_its_values_and_gradients(low):
    amp = jaxamp.amp(between, compute_dtype=low)
    assert_near(jax.jit(amp)(FILTERS, IMAGE), in_float64(between, FILTERS, IMAGE), 1e-2)
    assert_near(jax.jit(jax.grad(amp))(FILTERS, IMAGE), in_float64(jax.grad(between), FILTERS, IMAGE), 3e-2)


def test_what_is_pooled_is_the_same_as_without_the_pass():
    """Rounding keeps the order of numbers."""
    without = jaxamp.amp(between, compute_dtype=jnp.bfloat16, disable_passes=["pool_low"])
    assert AMP(between)(FILTERS, IMAGE) == without(FILTERS, IMAGE)


READ_IN_FLOAT32 = {
    "returned": lambda w, x: pool(jnp.tanh(conv(x, w))),
    "in a sum": lambda w, x: jnp.sum(jnp.exp(pool(jnp.tanh(conv(x, w))))),
    "no low operation": lambda w, x: pool(x),
}


@pytest.mark.parametrize("fn", READ_IN_FLOAT32.values(), ids=READ_IN_FLOAT32)
def test_a_pool_that_is_read_in_float32_is_left_alone(fn):
    before, after = (plan_of(fn, FILTERS, IMAGE, passes=passes) for passes in ((), (pool_low,)))
    assert step(after, "reduce_window_max") == step(before, "reduce_window_max")


def test_nor_is_one_in_a_scope_that_the_policy_keeps_in_float32():
    def fn(w, x):
        with jax.named_scope("pool"):
            x = pool(jnp.exp(conv(x, w)))
        return jnp.sum(conv(x, w))

    plan = plan_of(fn, FILTERS, IMAGE, passes=(pool_low,), policy={"*pool": jaxamp.use_original_precision})
    assert not step(plan, "reduce_window_max").outs[0].is_low


def test_the_operand_of_a_pool_is_kept_low():
    wide = [shape for shape, dtype in kept(AMP(between), FILTERS, IMAGE) if dtype == "float32" and shape == IMAGE.shape]
    assert wide == []
