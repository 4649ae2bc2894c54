"""Train a Flax NNX classifier with batch statistics and dropout."""

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jaxamp


class Network(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = nnx.Linear(8, 32, rngs=rngs), nnx.Linear(32, 4, rngs=rngs)
        self.norm, self.dropout = nnx.BatchNorm(32, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.down(self.dropout(nnx.relu(self.norm(self.up(x)))))


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(model(x), y).mean()


@nnx.jit
def train_step(model, optimizer, x, y):
    loss, grads = nnx.value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.bfloat16))(model, x, y)
    optimizer.update(model, grads)
    return loss


model = Network(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.Param)
x = jax.random.normal(jax.random.key(1), (64, 8))
y = jnp.argmax(x[:, :4], axis=-1)
losses = []
for _ in range(20):
    losses.append(float(train_step(model, optimizer, x, y)))
