"""fp8, with current and with delayed scales, over Flax NNX models and in forward mode."""

import flax.nnx as nnx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import assert_same_bits, equations, error, in_float64, normal
from jax import lax

import jaxamp

MATMULS = (lax.dot_general_p, lax.conv_general_dilated_p)
X, IMAGES = normal(0, 16, 8), normal(1, 8, 6, 6, 3)


def policy(scaling="current"):
    rule = jaxamp.use_formats(scaling=scaling, history=1)
    return jaxamp.default_amp_policy | dict.fromkeys(MATMULS, rule)


def settled(fn, *args, **options):
    """A function with delayed scales that have seen the numbers."""
    delayed = jaxamp.amp(fn, amp_policy=policy("delayed"))
    scales = jaxamp.init_scales(delayed)(*args)
    for _ in range(6):
        scales, _ = jaxamp.delayed_scale_value_and_grad(delayed, **options)(*args, delayed_scales=scales)
    return jaxamp.with_scales(delayed, scales)


# -- NNX


class Network(nnx.Module):
    def __init__(self, rngs):
        self.conv, self.norm = nnx.Conv(3, 8, (3, 3), use_bias=False, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
        self.last = nnx.Linear(8, 4, rngs=rngs)

    def __call__(self, x):
        return self.last(jnp.mean(nnx.relu(self.norm(self.conv(x))), (1, 2)))


def loss(model, x):
    return jnp.mean(model(x) ** 2)


WRAPPED = {
    "value_and_grad(amp)": lambda wrap: nnx.value_and_grad(wrap(loss)),
    "jit(value_and_grad(amp))": lambda wrap: nnx.jit(nnx.value_and_grad(wrap(loss))),
    "value_and_grad(amp(remat))": lambda wrap: nnx.value_and_grad(wrap(nnx.remat(loss))),
}


@pytest.mark.parametrize("name", WRAPPED)
def test_an_nnx_model_in_fp8(name):
    step = WRAPPED[name](lambda fn: jaxamp.amp(fn, amp_policy=policy()))
    model, plain = Network(nnx.Rngs(0)), Network(nnx.Rngs(0))
    value, grads = step(model, IMAGES)
    exact, exact_grads = nnx.value_and_grad(loss)(plain, IMAGES)
    assert abs(value - exact) < 0.1 * exact
    for found, expected in zip(jax.tree.leaves(grads), jax.tree.leaves(exact_grads), strict=True):
        assert found.dtype == jnp.float32
        assert error(found, expected) < (0.4 if found.ndim == 4 else 0.1)  # batch norm cancels most of the first one
    assert error(model.norm.mean[...], plain.norm.mean[...]) < 0.1  # updated in place
    report = jaxamp.amp_report(loss, amp_policy=policy())(Network(nnx.Rngs(0)), IMAGES)
    assert set(report.matmul_flops) == {"e4m3", "e5m2", "bfloat16"}  # gradients of convolutions are multiplied so


@pytest.mark.slow
@pytest.mark.promotes
@pytest.mark.parametrize("scaling", ["current", "delayed"])
def test_an_nnx_model_trains(scaling):
    model = Network(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
    target = normal(2, 8, 4)
    fn = jaxamp.amp(lambda model, x: jnp.mean((model(x) - target) ** 2), amp_policy=policy(scaling))
    scales = jaxamp.init_scales(fn)(model, IMAGES)
    values = []
    for _ in range(12):
        if scaling == "delayed":
            grad_fn = jaxamp.delayed_scale_value_and_grad(fn)
            scales, (value, grads) = grad_fn(model, IMAGES, delayed_scales=scales)
        else:
            value, grads = nnx.value_and_grad(fn)(model, IMAGES)
        optimizer.update(model, grads)
        values.append(float(value))
    assert values[-1] < 0.8 * values[0]
    assert len(scales.histories) == (6 if scaling == "delayed" else 0)


# -- forward mode

WS = [normal(i, 8, 8, scale=0.4) for i in range(3, 5)]


def mlp(ws, x):
    return jnp.sum(jnp.tanh(jnp.tanh(x @ ws[0]) @ ws[1]) ** 2)


def recurrence(ws, x):
    return jnp.sum(lax.scan(lambda h, x: (jnp.tanh(x @ ws[0] + h @ ws[1]), None), jnp.zeros(8), x)[0] ** 2)


PROGRAMS = {
    "plain": mlp,
    "jit": jax.jit(mlp),
    "checkpoint": jax.checkpoint(mlp),
    "scan": recurrence,
    "vmap": lambda ws, x: jnp.sum(jax.vmap(lambda x: mlp(ws, x[None]))(x)),
    "cond": lambda ws, x: lax.cond(x[0, 0] < 9, mlp, recurrence, ws, x),
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("cond", "scan"))) for name in PROGRAMS]
)
def test_forward_mode(name):
    """Tangents stay in the compute dtype, and are those of the rounded operands."""
    fn = PROGRAMS[name]
    along = lambda f: lambda ws, x: jax.jvp(lambda ws: f(ws, x), (ws,), (ws,))
    exact = in_float64(along(fn), WS, X)
    current = along(jaxamp.amp(fn, amp_policy=policy()))(WS, X)
    for found, expected in zip(current, exact, strict=True):
        assert found.dtype == jnp.float32
        assert abs(found - expected) < 0.1 * abs(expected)
    delayed = along(settled(fn, WS, X))(WS, X)
    if name == "scan":  # whose rounds share a scale
        assert abs(delayed[1] - exact[1]) < 0.1 * abs(exact[1])
    else:
        assert_same_bits(delayed, current)


def test_tangents_are_multiplied_in_the_compute_dtype():
    f = jaxamp.amp(mlp, amp_policy=policy())
    jaxpr = jax.make_jaxpr(lambda ws, t: jax.jvp(lambda ws: f(ws, X), (ws,), (t,))[1])(WS, WS)
    kinds = {eqn.primitive.name for eqn in equations(jaxpr)}
    assert {"quantize", "dot_general_with_quantized"} <= kinds


@pytest.mark.slow
def test_linearize_and_jacfwd():
    f = jaxamp.amp(lambda ws, x: jnp.tanh(x @ ws[0]) @ ws[1], amp_policy=policy())
    along = lambda x: f(WS, x)
    _, linear = jax.linearize(along, X)
    assert error(linear(X), jax.jvp(along, (X,), (X,))[1]) < 1e-2
    forward, backward = (jacobian(lambda x: f(WS, x[None])[0])(X[0]) for jacobian in (jax.jacfwd, jax.jacrev))
    assert forward.shape == (8, 8)
    assert error(forward, backward) < 0.2  # in backward mode, cotangents are in e5m2
