"""The documented usage of the library whose API we keep: `amp`, policies, and the dynamic loss scaler."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
import pytest
from helpers import dtypes_of, matmul_dtypes

import jaxamp


def cast_tree(dtype, tree):
    return jax.tree.map(lambda x: x.astype(dtype) if eqx.is_inexact_array(x) else x, tree)


def documented_rule(
    compute_dtype: type, original_dtypes: Sequence[type], *invars: Sequence[Any], **bind_params: dict[str, Any]
):
    for invar in invars:
        # if anything is an integer, let's not cast anything.
        if not eqx.is_inexact_array(invar):
            return invars, bind_params
    invars = cast_tree(compute_dtype, invars)
    bind_params = cast_tree(compute_dtype, bind_params)
    bind_params = dict(bind_params)
    if "preferred_element_type" in bind_params:
        bind_params["preferred_element_type"] = compute_dtype
    return invars, bind_params


W = jnp.ones((4, 4))


def test_the_documented_rule_runs_in_a_policy():
    policy = {jax.lax.dot_general_p: documented_rule, jax.lax.add_p: documented_rule}
    jaxpr = jax.make_jaxpr(jaxamp.amp(lambda w, x: jnp.exp(x @ w + 1.0), amp_policy=policy))(W, W)
    assert matmul_dtypes(jaxpr) == [("float16", "float16")]
    assert dtypes_of("add", jaxpr) == ["float16"]
    assert dtypes_of("exp", jaxpr) == ["float32"]


def test_the_documented_rule_runs_in_a_scope_with_integers_in_it():
    def fn(w, i):
        with jax.named_scope("eqx.nn.Linear"):
            return (w * 2.0) @ w, i + 1

    policy = jaxamp.default_amp_policy | {"eqx.nn.Linear": documented_rule}
    out, i = jaxamp.amp(fn, amp_policy=policy)(W, jnp.arange(3))
    assert (out.dtype, i.dtype) == (jnp.float32, jnp.int32)


def test_scope_keys_are_outermost_first_and_the_special_scopes_stop():
    def fn(x):
        with jax.named_scope("amp_step"):
            x = x @ x
        with jax.named_scope("amp_default"):
            x = x @ x
        with jax.named_scope("outer"), jax.named_scope("inner"):
            return x @ x

    policy = jaxamp.default_amp_policy | {
        "outer": jaxamp.use_original_precision,
        "inner": jaxamp.use_compute_precision,
    }
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, amp_policy=policy))(W)
    assert matmul_dtypes(jaxpr) == [("float32", "float32")] * 3


# -- the documented training loop, with a loss in place of its ellipsis

MINIBATCH = jax.random.normal(jax.random.key(1), (32, 4)), jnp.arange(32) % 3


def loss_fn(model_state, minibatch):
    x, y = minibatch
    logits = jax.nn.relu(x @ model_state["up"]) @ model_state["down"]
    accuracy = jnp.mean((jnp.argmax(logits, -1) == y).astype(jnp.float32))
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), accuracy


def model_state():
    up, down = jax.random.split(jax.random.key(0))
    return {"up": jax.random.normal(up, (4, 8)), "down": jax.random.normal(down, (8, 3))}


def train_step(model_state, opt_state, minibatch, dynamic_scaler_state, optimizer):
    amp_loss_fn = jaxamp.amp(loss_fn)

    value_and_grad_fn = jaxamp.dynamic_scale_value_and_grad(amp_loss_fn, has_aux=True)

    dynamic_scaler_state, ((loss, accuracy), grads) = value_and_grad_fn(
        model_state, minibatch, dynamic_scaler_state=dynamic_scaler_state
    )

    updates, opt_state = optimizer.update(grads, opt_state, model_state)
    model_state = optax.apply_updates(model_state, updates)
    return model_state, opt_state, dynamic_scaler_state, loss, accuracy


def test_the_documented_train_step_learns():
    optimizer, model = optax.sgd(0.5), model_state()
    opt_state, scaler = optimizer.init(model), jaxamp.DynamicScalerState()
    step, losses = jax.jit(train_step, static_argnums=4), []
    for _ in range(20):
        model, opt_state, scaler, loss, accuracy = step(model, opt_state, MINIBATCH, scaler, optimizer)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
    assert accuracy.shape == ()
    assert (int(scaler.count), int(scaler.total_resets)) == (20, 0)


@pytest.mark.slow
def test_the_documented_short_form():
    def loss(model, minibatch):
        return loss_fn(model, minibatch)[0]

    scaler_state = jaxamp.DynamicLossScaler()
    amp_loss = jaxamp.amp(loss)
    grad_fn = jaxamp.dynamic_scale_grad(amp_loss)
    scaler_state, grad = grad_fn(model_state(), MINIBATCH, dynamic_scaler_state=scaler_state)
    exact = jax.grad(loss)(model_state(), MINIBATCH)
    for name, expected in exact.items():
        assert jnp.linalg.norm(grad[name] - expected) < 1e-2 * jnp.linalg.norm(expected)
    assert scaler_state.finite


def test_the_documented_defaults():
    state = jaxamp.DynamicScalerState()
    assert (int(state.patience), float(state.adjust_factor), float(state.scaler), int(state.count)) == (
        2000,
        2,
        2**15,
        0,
    )


def test_the_documented_alternative_to_skip_a_step():
    """`optax.apply_if_finite` around the optimizer, in place of `update_if_finite`."""
    optimizer, model = optax.apply_if_finite(optax.sgd(0.5), 5), model_state()
    opt_state, minibatch = optimizer.init(model), (MINIBATCH[0].at[0, 0].set(jnp.nan), MINIBATCH[1])
    after, *_ = train_step(model, opt_state, minibatch, jaxamp.DynamicScalerState(), optimizer)
    assert all(jnp.array_equal(after[name], model[name]) for name in model)
