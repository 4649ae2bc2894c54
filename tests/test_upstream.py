"""The documented usage of the library whose API we keep, as far as it concerns `amp` and policies."""

from collections.abc import Sequence
from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import optax
from program import dtypes_of, matmul_dtypes

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


def test_the_documented_train_step():
    def loss_fn(model_state, minibatch):
        x, y = minibatch
        logits = jax.vmap(model_state)(x)
        accuracy = jnp.mean((jnp.argmax(logits, -1) == y).astype(jnp.float32))
        return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean(), accuracy

    def train_step(model_state, opt_state, minibatch, optimizer):
        amp_loss_fn = jaxamp.amp(loss_fn)
        value_and_grad_fn = eqx.filter_value_and_grad(amp_loss_fn, has_aux=True)
        (loss, accuracy), grads = value_and_grad_fn(model_state, minibatch)
        updates, opt_state = optimizer.update(grads, opt_state, eqx.filter(model_state, eqx.is_array))
        return eqx.apply_updates(model_state, updates), opt_state, loss, accuracy

    model = eqx.nn.MLP(4, 3, 8, 1, key=jax.random.key(0))
    optimizer = optax.sgd(0.5)
    opt_state = optimizer.init(eqx.filter(model, eqx.is_array))
    batch = jax.random.normal(jax.random.key(1), (32, 4)), jnp.arange(32) % 3
    step, losses = eqx.filter_jit(train_step), []
    for _ in range(20):
        model, opt_state, loss, _ = step(model, opt_state, batch, optimizer)
        losses.append(float(loss))
    assert losses[-1] < losses[0]
