"""Train an Equinox classifier."""

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

import jaxamp

model = eqx.nn.MLP(8, 4, width_size=32, depth=2, key=jax.random.key(0))
optimizer = optax.adam(1e-2)
state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))


def loss_fn(model, x, y):
    return optax.softmax_cross_entropy_with_integer_labels(jax.vmap(model)(x), y).mean()


@eqx.filter_jit
def train_step(model, state, x, y):
    loss, grads = eqx.filter_value_and_grad(jaxamp.amp(loss_fn, compute_dtype=jnp.bfloat16))(model, x, y)
    updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_inexact_array))
    return eqx.apply_updates(model, updates), state, loss


x = jax.random.normal(jax.random.key(1), (64, 8))
y = jnp.argmax(x[:, :4], axis=-1)
losses = []
for _ in range(20):
    model, state, loss = train_step(model, state, x, y)
    losses.append(float(loss))
