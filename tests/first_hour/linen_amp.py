"""Train a Flax Linen classifier with a TrainState."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import jaxamp


class Network(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(4)(nn.relu(nn.LayerNorm()(nn.Dense(32)(x))))


def loss_fn(params, state, x, y):
    logits = state.apply_fn({"params": params}, x)
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train_step(state, x, y):
    loss, grads = jax.value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.bfloat16))(state.params, state, x, y)
    return state.apply_gradients(grads=grads), loss


x = jax.random.normal(jax.random.key(1), (64, 8))
y = jnp.argmax(x[:, :4], axis=-1)
network = Network()
params = network.init(jax.random.key(0), x)["params"]
state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adam(1e-2))
losses = []
for _ in range(20):
    state, loss = train_step(state, x, y)
    losses.append(float(loss))
