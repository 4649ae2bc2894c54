"""Train on all devices: the batch is split, and so are the weights (FSDP)."""

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp

mesh = jax.make_mesh((jax.device_count(),), ("data",), axis_types=(AxisType.Auto,))
split = NamedSharding(mesh, P("data"))
optimizer = optax.adam(1e-2)


def loss_fn(params, x, y):
    logits = jax.nn.relu(x @ params["up"]) @ params["down"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, y).mean()


@jax.jit
def train_step(params, state, x, y):
    loss, grads = jax.value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.bfloat16))(params, x, y)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


keys = jax.random.split(jax.random.key(0), 3)
params = {"up": 0.3 * jax.random.normal(keys[0], (8, 32)), "down": 0.1 * jax.random.normal(keys[1], (32, 4))}
x = jax.random.normal(keys[2], (64, 8))
params, x, y = jax.device_put((params, x, jnp.argmax(x[:, :4], axis=-1)), split)
state = jax.jit(optimizer.init)(params)
losses = []
for _ in range(20):
    params, state, loss = train_step(params, state, x, y)
    losses.append(float(loss))
