"""Pools and activations that choose among numbers, between low operations."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, assert_same_bits, both, equations, in_float64, kept, normal
from jax import lax
from plans import plan_of, step

import jaxamp
from jaxamp._inspect.reasons import text_of
from jaxamp._passes.choices import choose_low
from jaxamp._passes.streams import hold_streams_low

FILTERS, IMAGE = normal(0, 3, 3, 4, 4, scale=0.2), normal(1, 2, 12, 12, 4)
WITHOUT = functools.partial(AMP, disable_passes=["choose_low"])
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
    before, after = (step(plan_of(fn, FILTERS, IMAGE, passes=passes), name) for passes in ((), (choose_low,)))
    assert not before.outs[0].is_low
    assert [format_.low for format_ in after.reads] == [after.outs[0].is_low] == [True]


@both
def test_its_values_and_gradients(low):
    amp = jaxamp.amp(between, compute_dtype=low)
    assert_near(jax.jit(amp)(FILTERS, IMAGE), in_float64(between, FILTERS, IMAGE), 1e-2)
    assert_near(jax.jit(jax.grad(amp))(FILTERS, IMAGE), in_float64(jax.grad(between), FILTERS, IMAGE), 3e-2)


def test_what_is_pooled_is_the_same_as_without_the_pass():
    """Rounding keeps the order of numbers."""
    without = jaxamp.amp(between, compute_dtype=jnp.bfloat16, disable_passes=["choose_low"])
    assert AMP(between)(FILTERS, IMAGE) == without(FILTERS, IMAGE)


READ_IN_FLOAT32 = {
    "returned": lambda w, x: pool(jnp.tanh(conv(x, w))),
    "in a sum": lambda w, x: jnp.sum(jnp.exp(pool(jnp.tanh(conv(x, w))))),
    "no low operation": lambda w, x: pool(x),
}


@pytest.mark.parametrize("fn", READ_IN_FLOAT32.values(), ids=READ_IN_FLOAT32)
def test_a_pool_that_is_read_in_float32_is_left_alone(fn):
    before, after = (plan_of(fn, FILTERS, IMAGE, passes=passes) for passes in ((), (choose_low,)))
    assert step(after, "reduce_window_max") == step(before, "reduce_window_max")


def test_nor_is_one_in_a_scope_that_the_policy_keeps_in_float32():
    def fn(w, x):
        with jax.named_scope("pool"):
            x = pool(jnp.exp(conv(x, w)))
        return jnp.sum(conv(x, w))

    plan = plan_of(fn, FILTERS, IMAGE, passes=(choose_low,), policy={"*pool": jaxamp.use_original_precision})
    assert not step(plan, "reduce_window_max").outs[0].is_low


def test_the_operand_of_a_pool_is_kept_low():
    wide = [shape for shape, dtype in kept(AMP(between), FILTERS, IMAGE) if dtype == "float32" and shape == IMAGE.shape]
    assert wide == []


# -- activations


def norm(x):
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)


def residual(w, x, activation=jax.nn.relu):
    """As in a ResNet."""
    x = activation(norm(conv(x, w)))
    for _ in range(2):
        x = activation(norm(conv(activation(norm(conv(x, w))), w)) + x)
    return jnp.sum(conv(x, w) ** 2)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "by jnp": lambda x: jnp.maximum(x, 0),
    "of a function": jax.jit(lambda x: -jnp.minimum(-x, 0.0)),
    "abs": jnp.abs,
}
OTHERS = {"relu6": jax.nn.relu6, "clip": lambda x: jnp.clip(x, -1, 1), "tanh": jnp.tanh, "leaky": jax.nn.leaky_relu}


def wide_masks(jaxpr):
    """The choices of a backward pass that are made in float32."""
    return [
        eqn
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("select_n", "max", "min", "abs", "sign")
        and eqn.outvars[0].aval.dtype == jnp.float32
        and eqn.outvars[0].aval.shape == IMAGE.shape
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_choose_among_low_numbers(activation):
    fn = functools.partial(residual, activation=activation)
    assert not wide_masks(jax.make_jaxpr(jax.grad(AMP(fn)))(FILTERS, IMAGE))
    assert wide_masks(jax.make_jaxpr(jax.grad(WITHOUT(fn)))(FILTERS, IMAGE))


@pytest.mark.parametrize("activation", OTHERS.values(), ids=OTHERS)
def test_others_are_left_alone(activation):
    fn = functools.partial(residual, activation=activation)
    programs = [str(jax.make_jaxpr(jax.grad(amp(fn)))(FILTERS, IMAGE)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_their_values_are_the_same_as_without_the_pass(activation):
    fn = lambda w, x: activation(norm(conv(x, w)))
    read_low = lambda w, x: conv(fn(w, x), w)
    assert_same_bits(AMP(read_low)(FILTERS, IMAGE), WITHOUT(read_low)(FILTERS, IMAGE))


@both
def test_the_gradients_of_a_residual_network(low):
    amp = jaxamp.amp(residual, compute_dtype=low)
    assert_near(jax.jit(jax.grad(amp))(FILTERS, IMAGE), in_float64(jax.grad(residual), FILTERS, IMAGE), 5e-2)


def test_an_activation_that_something_reads_in_float32_is_left_alone():
    def fn(w, x):
        x = jax.nn.relu(norm(conv(x, w)))
        return conv(x, w), x

    programs = [str(jax.make_jaxpr(amp(fn))(FILTERS, IMAGE)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]


def test_the_report_says_so():
    plan = plan_of(residual, FILTERS, IMAGE, passes=(hold_streams_low, choose_low))
    (body,) = step(plan, "custom_jvp_call").bodies
    while body.steps[0].bodies:
        (body,) = body.steps[0].bodies
    assert text_of(body.steps[0].reason).startswith("rounded before it")


def test_second_derivatives_and_jvp():
    fn = lambda w, x: residual(w, x) / IMAGE.size
    hvp = lambda w, x: jax.jvp(jax.grad(lambda w: fn(w, x)), (w,), (w,))[1]
    amp_hvp = lambda w, x: jax.jvp(jax.grad(lambda w: AMP(fn)(w, x)), (w,), (w,))[1]
    assert_near(jax.jit(amp_hvp)(FILTERS, IMAGE), in_float64(hvp, FILTERS, IMAGE), 0.2)


def test_the_sum_before_a_relu_is_not_kept():
    """A section ends after the relu: its result is what the next convolution reads."""
    wide = [dtype for shape, dtype in kept(AMP(residual), FILTERS, IMAGE) if shape == IMAGE.shape]
    without = [dtype for shape, dtype in kept(WITHOUT(residual), FILTERS, IMAGE) if shape == IMAGE.shape]
    assert len(wide) <= len(without)
    assert set(wide) == {"bfloat16"}
