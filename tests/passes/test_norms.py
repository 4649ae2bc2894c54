"""The cotangents of norms' results."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, both, equations, in_float64, normal
from jax import lax
from plans import plan_of

import jaxamp
from jaxamp._passes.cotangents import share_cotangents
from jaxamp._passes.early_rounding import round_early
from jaxamp._passes.norms import RoundedCotangent, round_norm_cotangents

W, SCALE, OFFSET, X = normal(0, 8, 8, scale=0.4), 1 + 0.1 * normal(1, 8), normal(2, 8), normal(3, 16, 8)
PARAMS = W, SCALE, OFFSET


def layer_norm(x, scale, offset):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6) * scale + offset


def rms_norm(x, scale, offset):
    return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def batch_norm(x, scale, offset):
    return (x - x.mean(0)) * (scale * lax.rsqrt(jnp.mean(x**2, 0) - x.mean(0) ** 2 + 1e-5)) + offset


def group_norm(x, scale, offset):
    y = x.reshape(-1, 2, 4)
    y = (y - y.mean(-1, keepdims=True)) * lax.rsqrt(y.var(-1, keepdims=True) + 1e-6)
    return y.reshape(x.shape) * scale + offset


def block(norm, act):
    return lambda params, x: jnp.sum((act(norm(x @ params[0], *params[1:])) @ params[0]) ** 2)


def found(fn):
    plan = plan_of(fn, PARAMS, X, passes=(round_early, round_norm_cotangents, share_cotangents))
    return [part for part in plan.parts if isinstance(part, RoundedCotangent)]


NORMS = layer_norm, rms_norm, batch_norm, group_norm
ACTS = jax.nn.silu, jax.nn.gelu, jnp.tanh, lambda z: z * jax.nn.sigmoid(z)


@pytest.mark.parametrize("norm", NORMS)
def test_norms_are_found_however_they_are_written(norm):
    assert len(found(block(norm, jax.nn.silu))) == 1


@pytest.mark.parametrize("act", ACTS)
def test_activations_too(act):
    assert len(found(block(layer_norm, act))) == 1


@pytest.mark.parametrize(
    "turned",
    [
        lambda w, z: z.T @ z,
        lambda w, z: z.reshape(4, 4, 8).swapaxes(1, 2) @ w[:4],
        lambda w, z: z[::-1].reshape(4, 4, 8).swapaxes(1, 2) @ w[:4],
    ],
    ids=["whole", "axes", "after moves"],
)
def test_transposes_in_front_of_a_matmul_too(turned):
    """As in an MLP mixer: XLA would write the cotangent turned, in float32."""
    fn = lambda params, x: jnp.sum(turned(params[0], layer_norm(x @ params[0], *params[1:])) ** 2)
    assert len(found(fn)) == 1
    for got, expected in zip(jax.jit(jax.grad(AMP(fn)))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), strict=True):
        assert_near(got, expected, 3e-2)


def pinned(x, *rest):
    with jax.named_scope("norm"):
        return layer_norm(x, *rest)


LEFT_ALONE = {
    "a relu": block(layer_norm, jax.nn.relu),
    "no activation": block(layer_norm, lambda z: z),
    "windows": block(layer_norm, lambda z: z.reshape(2, 2, 2, 2, 8).swapaxes(1, 2)),
    "no norm": block(lambda x, scale, offset: x * scale + offset, jax.nn.silu),
    "read in float32 as well": block(layer_norm, lambda z: jax.nn.silu(z) + jnp.sum(z)),
    "returned": lambda params, x: jax.nn.silu(layer_norm(x @ params[0], *params[1:])),
    "no matmul": lambda params, x: jnp.sum(jax.nn.silu(layer_norm(x, *params[1:]))),
}


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_cotangents_are_left_alone(fn):
    assert found(fn) == []


def test_equations_without_results_are_no_obstacle():
    def fn(params, x):
        jax.debug.callback(lambda _: None, x[0, 0])
        return block(layer_norm, jax.nn.silu)(params, x)

    assert len(found(fn)) == 1


def test_a_norm_that_the_policy_keeps_in_float32_is_left_alone():
    plan = plan_of(
        block(pinned, jax.nn.silu),
        PARAMS,
        X,
        passes=(round_norm_cotangents,),
        policy={"*norm": jaxamp.use_original_precision},
    )
    assert all(isinstance(part, int) for part in plan.parts)


def test_the_cotangent_is_rounded_once_and_read_in_float32():
    jaxpr = jax.make_jaxpr(jax.grad(AMP(block(layer_norm, jax.nn.silu))))(PARAMS, X)
    held = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert [(eqn.params["dtype"], eqn.invars[0].aval.dtype) for eqn in held] == [(jnp.bfloat16, jnp.float32)]


@both
@pytest.mark.parametrize("norm", NORMS)
def test_gradients(low, norm):
    fn = block(norm, jax.nn.silu)
    amp = jaxamp.amp(fn, compute_dtype=low)
    for got, expected in zip(jax.jit(jax.grad(amp))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), strict=True):
        assert_near(got, expected, 3e-2)


def test_forward_derivatives_are_not_rounded():
    fn = block(layer_norm, jax.nn.silu)
    without = jaxamp.amp(fn, compute_dtype=jnp.bfloat16, disable_passes=["round_norm_cotangents"])
    tangents = [jax.jvp(f, (PARAMS, X), (PARAMS, X))[1] for f in (AMP(fn), without)]
    assert tangents[0] == tangents[1]
