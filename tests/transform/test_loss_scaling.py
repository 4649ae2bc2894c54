"""Gradients in float16: a scaler that is missing, and one too many."""

import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, W, raises

import jaxamp
from jaxamp import jmp, mpx
from jaxamp._transform import loss_scaling

STATE = jaxamp.DynamicScalerState()


def loss(w, x):
    return jnp.sum((x @ w) ** 2)


@pytest.fixture(autouse=True)
def _alone(monkeypatch):
    """As in a program that has made no loss scale of its own, with each warning shown."""
    monkeypatch.setattr(loss_scaling, "_HAS_OWN_SCALES", [])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        yield


# -- none


DIFFERENTIATED = {
    "grad": lambda fn: jax.grad(fn)(W, W),
    "value_and_grad": lambda fn: jax.value_and_grad(fn)(W, W),
    "jit": lambda fn: jax.jit(jax.grad(fn))(W, W),
    "vjp": lambda fn: jax.vjp(fn, W, W),
    "filter_grad": lambda fn: eqx.filter_grad(fn)(W, W),
    "vmap outside": lambda fn: jax.vmap(jax.grad(fn), (None, 0))(W, W[None]),
    "vmap inside": lambda fn: jax.grad(lambda w: jnp.sum(jax.vmap(fn, (None, 0))(w, W[None])))(W),
    "of the input": lambda fn: jax.grad(fn, 1)(W, W),
}


@pytest.mark.parametrize("use", DIFFERENTIATED.values(), ids=DIFFERENTIATED)
def test_float16_without_a_scaler_is_told(use):
    words = (r"amp\(loss, compute_dtype=float16\) is differentiated in float16", "expected one", "Write jaxamp.dynamic")
    with pytest.warns(jaxamp.MissingScalerWarning, match="(?s)" + ".*".join((*words, "yourself, write warnings"))):
        use(jaxamp.amp(loss))


def test_it_is_told_once():
    amped = jaxamp.amp(loss)
    with pytest.warns(jaxamp.MissingScalerWarning):
        jax.grad(amped)(W, W)
    jax.grad(amped)(W, W)


def scaled(fn):
    return jaxamp.dynamic_scale_value_and_grad(fn)(W, W, dynamic_scaler_state=STATE)


SILENT = {
    "bfloat16": lambda: jax.grad(AMP(loss))(W, W),
    "float32": lambda: jax.grad(jaxamp.amp(loss, compute_dtype=jnp.float32))(W, W),
    "forward": lambda: jax.jit(jaxamp.amp(loss))(W, W),
    "forward mode": lambda: jax.jvp(jaxamp.amp(loss), (W, W), (W, W)),
    "nothing low": lambda: jax.grad(jaxamp.amp(lambda x: jnp.sum(jnp.exp(x))))(W),
    "not differentiated": lambda: jax.grad(lambda x: jnp.sum(x) * jaxamp.amp(loss)(W, W))(W),
    "value_and_grad": lambda: scaled(jaxamp.amp(loss)),
    "jit": lambda: jax.jit(lambda: scaled(jaxamp.amp(loss)))(),
    "grad": lambda: jaxamp.dynamic_scale_grad(jaxamp.amp(loss), redo_on_nan=2)(W, W, dynamic_scaler_state=STATE),
    "tx": lambda: jaxamp.dynamic_scale_tx(jax.grad)(jaxamp.amp(loss))(W, W, dynamic_scaler_state=STATE),
    "mpx": lambda: mpx.filter_grad(loss, mpx.DynamicLossScaling(2.0**15, 1.0), use_amp=True)(W, W),
    "report": lambda: jaxamp.amp_report(loss)(W, W),
    "compare": lambda: jaxamp.compare(loss)(W, W),
    "overflow": lambda: jaxamp.find_overflow(loss)(W, W),
    "kept": lambda: jaxamp.bytes_kept(loss)(W, W),
}


@pytest.mark.parametrize("use", SILENT.values(), ids=SILENT)
def test_there_is_no_false_alarm(use):
    use()


def test_a_program_with_a_loss_scale_of_jmp_is_left_alone():
    scale = jmp.DynamicLossScale(2.0**15)
    scale.unscale(jax.grad(lambda w: scale.scale(jaxamp.amp(loss)(w, W)))(W))


# -- two


def step(make_loss, how=jaxamp.dynamic_scale_value_and_grad):
    """A training step whose loss sees the state of the scaler."""

    def step(w, state):
        return how(make_loss(state))(w, W, dynamic_scaler_state=state)

    return jax.jit(step)(W, STATE.as_arrays())


TWICE = {
    "a factor": lambda s: lambda w, x: loss(w, x) * s.scaler,
    "before": lambda s: lambda w, x: s.scaler * jaxamp.amp(loss)(w, x),
    "inside of amp": lambda s: jaxamp.amp(lambda w, x: loss(w, x) * s.scaler),
    "of a mean": lambda s: lambda w, x: loss(w, x) * s.scaler / 4,
    "cast": lambda s: lambda w, x: (loss(w, x).astype(jnp.float16) * s.scaler.astype(jnp.float16)).astype(jnp.float32),
    "jmp": lambda s: lambda w, x: jmp.StaticLossScale(s.scaler).scale(loss(w, x)),
    "jmp inside of amp": lambda s: jaxamp.amp(lambda w, x: jmp.StaticLossScale(s.scaler).scale(loss(w, x))),
    "mpx": lambda s: mpx.scaled(loss, mpx.DynamicLossScaling(s.scaler, 1.0)),
}


@pytest.mark.parametrize("make", TWICE.values(), ids=TWICE)
def test_a_loss_that_is_scaled_already_is_refused(make):
    words = ("got a loss that is multiplied by a loss scale already", "expected the loss itself", "Return the loss")
    with raises(ValueError, "dynamic_scale_value_and_grad", *words):
        step(make)
    with raises(ValueError, "dynamic_scale_grad", *words):
        step(make, jaxamp.dynamic_scale_grad)
    with raises(ValueError, "dynamic_scale_tx", *words):
        step(make, jaxamp.dynamic_scale_tx(jax.grad))


def test_outside_of_jit_a_loss_that_jmp_has_scaled_is_refused():
    scale = jmp.DynamicLossScale(2.0**10)
    with raises(ValueError, "multiplied by a loss scale already"):
        scaled(lambda w, x: scale.scale(loss(w, x)))


def inner_gradient(s):
    """A step of training inside of the loss, scaled on its own."""

    def outer(w, x):
        scale = jmp.StaticLossScale(s.scaler)
        grads = scale.unscale(jax.grad(lambda w: scale.scale(loss(w, x)))(w))
        return loss(w - 0.1 * grads, x)

    return outer


ONCE = {
    "the loss": lambda s: jaxamp.amp(loss),
    "another factor": lambda s: lambda w, x: loss(w, x) * s.adjust_factor,
    "a sum": lambda s: lambda w, x: loss(w, x) + 0 * s.scaler,
    "inside of the loss": inner_gradient,
}


@pytest.mark.parametrize("make", ONCE.values(), ids=ONCE)
def test_other_losses_pass(make):
    step(make)


def test_a_scaler_around_a_scaler_is_refused():
    inner = jaxamp.dynamic_scale_value_and_grad(loss)
    with raises(TypeError, "loss has a loss scaler already", "expected a loss without one", "Pass the function itself"):
        jaxamp.dynamic_scale_grad(inner)
