"""A training loop ported from PyTorch, where it ran under autocast: a convolution, clipping, a schedule."""

import jax
import jax.numpy as jnp
import optax
from jax import lax


def network(params, images):
    x = lax.conv_general_dilated(images, params["conv"], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    x = jax.nn.relu(x + params["bias"]).reshape(len(images), -1)
    return x @ params["head"]


def loss_fn(params, images, labels):
    return optax.softmax_cross_entropy_with_integer_labels(network(params, images), labels).mean()


schedule = optax.cosine_decay_schedule(3e-2, 100)
optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(schedule, momentum=0.9))
grad_fn = jax.value_and_grad(loss_fn)


@jax.jit
def train_step(params, state, images, labels):
    loss, grads = grad_fn(params, images, labels)
    updates, state = optimizer.update(grads, state, params)
    return optax.apply_updates(params, updates), state, loss


keys = jax.random.split(jax.random.key(0), 3)
params = {"conv": 0.3 * jax.random.normal(keys[0], (3, 3, 1, 8)), "bias": jnp.zeros(8)}
params["head"] = 0.1 * jax.random.normal(keys[1], (4 * 4 * 8, 4))
images = jax.random.normal(keys[2], (32, 8, 8, 1))
labels = jnp.arange(32) % 4
state = optimizer.init(params)
losses = []
for _ in range(20):
    params, state, loss = train_step(params, state, images, labels)
    losses.append(float(loss))
