"""A user's file, for type checkers alone: `test_typing.py` lets them read it. Nothing here runs."""

from typing import Any, assert_type

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxamp
from jaxamp import DynamicScalerState

Params = dict[str, jax.Array]


def loss_fn(params: Params, x: jax.Array, *, scale: float = 1.0) -> jax.Array:
    return jnp.sum(x @ params["w"]) * scale


def loss_with_aux(model: eqx.nn.MLP, x: jax.Array) -> tuple[jax.Array, dict[str, int]]:
    return jnp.sum(model(x)), {"n": 1}


@jaxamp.amp(compute_dtype=jnp.bfloat16, keep="matmuls")
def decorated(params: Params, x: jax.Array) -> jax.Array:
    return x @ params["w"]


def train(params: Params, model: eqx.nn.MLP, x: jax.Array, state: DynamicScalerState) -> None:
    loss = jaxamp.amp(loss_fn)
    assert_type(loss(params, x, scale=2.0), jax.Array)
    assert_type(decorated(params, x), jax.Array)

    state, (value, grads) = jaxamp.dynamic_scale_value_and_grad(loss)(params, x, dynamic_scaler_state=state)
    assert_type(state, DynamicScalerState)
    assert_type(value, jax.Array)
    assert_type(grads, Params)

    with_aux = jaxamp.dynamic_scale_value_and_grad(loss_with_aux, has_aux=True, redo_on_nan=3)
    state, ((value, aux), of_model) = with_aux(model, x, dynamic_scaler_state=state)
    assert_type(aux, dict[str, int])
    assert_type(of_model, eqx.nn.MLP)

    state, grads = jaxamp.dynamic_scale_grad(loss)(params, x, scale=2.0, dynamic_scaler_state=state)
    assert_type(grads, Params)
    state, (of_model, aux) = jaxamp.dynamic_scale_grad(loss_with_aux, has_aux=True)(
        model, x, dynamic_scaler_state=state
    )
    assert_type(of_model, eqx.nn.MLP)

    plain = jaxamp.dynamic_scale_value_and_grad(loss, filter=False, argnums=(0, 1))
    assert_type(plain(params, x, dynamic_scaler_state=state), tuple[DynamicScalerState, Any])

    per_example = jaxamp.dynamic_scale_tx(jax.grad)(loss)
    state, _ = per_example(params, x, dynamic_scaler_state=state)
    assert_type(state, DynamicScalerState)

    optimizer = optax.sgd(0.1)
    params, _ = jaxamp.update_if_finite(params, optimizer, optimizer.init(params), grads, state.finite)
    assert_type(params, Params)
    assert_type(jaxamp.scaler_metrics(state), dict[str, float | int])
    assert_type(DynamicScalerState.torch(accumulate=4).adjust(True), DynamicScalerState)
    policy: jaxamp.Policy = jaxamp.load_policy("fast") | {jax.lax.tanh_p: jaxamp.use_original_precision}
    jaxamp.amp(loss_fn, amp_policy=policy)
    jaxamp.amp(loss_fn, amp_policy=jaxamp.default_amp_policy | {"head": "float32"})
    assert_type(jaxamp.optim.flash_adamw(1e-3).name, str)
    with jaxamp.amp_stop():
        pass


def wrong(params: Params, x: jax.Array, state: DynamicScalerState) -> None:
    jaxamp.amp(loss_fn)(params)  # type: ignore[call-arg]
    jaxamp.dynamic_scale_grad(loss_fn)(params, x)  # type: ignore[call-arg]
    jaxamp.dynamic_scale_grad(loss_fn)(3, x, dynamic_scaler_state=state)  # type: ignore[arg-type]
    jaxamp.amp(loss_fn, keep="some")  # type: ignore[call-overload]
    jaxamp.nothing_of_the_kind()  # type: ignore[attr-defined]
