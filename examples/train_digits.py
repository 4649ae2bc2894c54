"""Train a small vision transformer on handwritten digits twice: in float32, and in mixed precision.

    pip install -e '.[examples]' && python examples/train_digits.py

The model below is written in plain float32. One line differs between the two runs: the loss goes through `jaxamp.amp`.
"""

import argparse
import math
import time

import equinox as eqx
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.extend.core import jaxprs_in_params
from matplotlib.ticker import PercentFormatter
from rich import print
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import jaxamp

plt.switch_backend("Agg")
WIDTH, HEADS, DEPTH, BATCH = 64, 4, 2, 64


class Block(eqx.Module):
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP
    norms: tuple[eqx.nn.LayerNorm, eqx.nn.LayerNorm]

    def __init__(self, key):
        first, second = jax.random.split(key)
        self.attention = eqx.nn.MultiheadAttention(HEADS, WIDTH, key=first)
        self.mlp = eqx.nn.MLP(WIDTH, WIDTH, 4 * WIDTH, depth=1, activation=jax.nn.gelu, key=second)
        self.norms = eqx.nn.LayerNorm(WIDTH), eqx.nn.LayerNorm(WIDTH)

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    embed: eqx.nn.Linear
    places: jax.Array
    blocks: list[Block]
    head: eqx.nn.Linear

    def __init__(self, key):
        embed, places, head, *blocks = jax.random.split(key, 3 + DEPTH)
        self.embed = eqx.nn.Linear(8, WIDTH, key=embed)
        self.places = 0.5 * jax.random.normal(places, (8, WIDTH))
        self.blocks = [Block(key) for key in blocks]
        self.head = eqx.nn.Linear(WIDTH, 10, key=head)

    def __call__(self, image):
        patches = image.reshape(4, 2, 2, 4).swapaxes(1, 2).reshape(8, 8)  # 8 patches of 2x4 pixels
        x = jax.vmap(self.embed)(patches) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(0))


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits.argmax(-1) == labels).mean()


def train(name, loss_fn, train_set, test_set, steps):
    """Train on `loss_fn` and return what was seen on the way. Nothing in here knows about precision."""
    model, random = Transformer(jax.random.key(0)), np.random.default_rng(0)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps), weight_decay=0.05)
    state = optimizer.init(eqx.filter(model, eqx.is_array))

    @eqx.filter_jit
    def step(model, state, images, labels):
        (loss, _), grads = eqx.filter_value_and_grad(loss_fn, has_aux=True)(model, images, labels)
        updates, state = optimizer.update(grads, state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), state, loss

    evaluate, losses, accuracies, times = eqx.filter_jit(loss_fn), [], [], []
    for i in track(range(steps), f"{name:>14}"):
        rows = random.choice(len(train_set[0]), BATCH, replace=False)
        noise = 0.5 * random.standard_normal((BATCH, 8, 8), np.float32)  # so that it can't learn the images by heart
        batch = train_set[0][rows] + noise, train_set[1][rows]
        start = time.perf_counter()
        model, state, loss = jax.block_until_ready(step(model, state, *batch))
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        if i % 10 == 9 or i == steps - 1:
            accuracies.append((i + 1, float(evaluate(model, *test_set)[1])))
    flops = list(matmuls(eqx.filter_make_jaxpr(step)(model, state, *batch)[0].jaxpr))
    return {
        "losses": losses,
        "accuracies": accuracies,
        "time": np.median(times[1:]),  # the first step compiles
        "kept": bytes_kept(loss_fn, model, *batch),
        "low": sum(n for n, dtype in flops if dtype.itemsize == 2) / sum(n for n, _ in flops),
    }


def bytes_kept(loss_fn, model, *batch):
    """Bytes that the forward pass keeps for the backward pass."""
    arrays, rest = eqx.partition(model, eqx.is_array)
    pullback = jax.eval_shape(lambda a: jax.vjp(lambda a: loss_fn(eqx.combine(a, rest), *batch)[0], a)[1], arrays)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))


def matmuls(jaxpr, times=1):
    """The FLOPs of each matmul in a jaxpr, with the dtype of its operands."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            x, contracted = eqn.invars[0].aval, eqn.params["dimension_numbers"][0][0]
            yield times * 2 * eqn.outvars[0].aval.size * math.prod(x.shape[i] for i in contracted), x.dtype
        for inner in jaxprs_in_params(eqn.params):
            yield from matmuls(getattr(inner, "jaxpr", inner), times * eqn.params.get("length", 1))  # a scan's length


def draw(runs, path):
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    looks = {"color": "C0", "lw": 5, "alpha": 0.4}, {"color": "C3", "lw": 1.2}  # they lie on top of each other
    for (name, run), look in zip(runs.items(), looks, strict=True):
        left.semilogy(range(1, len(run["losses"]) + 1), run["losses"], label=name, **look)
        right.plot(*np.transpose(run["accuracies"]), label=f"{name}: {run['accuracies'][-1][1]:.1%} at the end", **look)
    left.set(xlabel="step", ylabel="cross entropy of the batch", title="Training loss")
    right.set(xlabel="step", title="Test accuracy")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--out", default="digits.png", help="where the picture of both runs goes")
    options = parser.parse_args()

    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    images = ((digits.images - digits.images.mean()) / digits.images.std()).astype(np.float32)[order]
    labels = digits.target.astype(np.int32)[order]
    data = (images[360:], labels[360:]), (images[:360], labels[:360])

    losses = {"float32": loss_fn, "amp, bfloat16": jaxamp.amp(loss_fn, compute_dtype=jnp.bfloat16)}
    runs = {name: train(name, loss, *data, options.steps) for name, loss in losses.items()}

    table = Table("", *runs, title=f"{options.steps} steps on {jax.devices()[0].device_kind}")
    table.add_row("test accuracy", *(f"{run['accuracies'][-1][1]:.1%}" for run in runs.values()))
    table.add_row("final loss", *(f"{run['losses'][-1]:.4f}" for run in runs.values()))
    table.add_row("median step", *(f"{1e3 * run['time']:.1f} ms" for run in runs.values()))
    table.add_row("kept for the backward pass", *(f"{run['kept'] / 2**20:.1f} MiB" for run in runs.values()))
    table.add_row("matmul FLOPs in low precision", *(f"{run['low']:.0%}" for run in runs.values()))
    print(table)
    print("A CPU shows correctness and bytes, not speed.")
    draw(runs, options.out)
    print(f"Both runs in a picture: {options.out}")


if __name__ == "__main__":
    main()
