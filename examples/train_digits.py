"""Train a small vision transformer in Equinox on handwritten digits, in float32 and in mixed precision.

    pip install -e '.[examples]' && python examples/train_digits.py

The model is plain float32 code. For mixed precision, its loss is wrapped in `jaxamp.amp`. The float16 run also scales
the loss; the other two use a scaler that does nothing. `--precision` chooses one of the three; without it, all are
trained and compared.
"""

import argparse
import time

import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.ticker import PercentFormatter
from rich import print
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import jaxamp

BATCH = 64


class Block(eqx.Module):
    norms: list[eqx.nn.LayerNorm]
    attention: eqx.nn.MultiheadAttention
    mlp: eqx.nn.MLP

    def __init__(self, width, key):
        keys = jax.random.split(key)
        self.norms = [eqx.nn.LayerNorm(width), eqx.nn.LayerNorm(width)]
        self.attention = eqx.nn.MultiheadAttention(4, width, key=keys[0])
        self.mlp = eqx.nn.MLP(width, width, 4 * width, 1, jax.nn.gelu, key=keys[1])

    def __call__(self, x):
        y = jax.vmap(self.norms[0])(x)
        x = x + self.attention(y, y, y)
        return x + jax.vmap(self.mlp)(jax.vmap(self.norms[1])(x))


class Transformer(eqx.Module):
    embed: eqx.nn.Linear
    places: jax.Array
    blocks: list[Block]
    norm: eqx.nn.LayerNorm
    head: eqx.nn.Linear

    def __init__(self, width, depth, key):
        keys = jax.random.split(key, 3 + depth)
        self.embed, self.head = eqx.nn.Linear(8, width, key=keys[0]), eqx.nn.Linear(width, 10, key=keys[1])
        self.places = 0.3 * jax.random.normal(keys[2], (8, width))
        self.blocks = [Block(width, key) for key in keys[3:]]
        self.norm = eqx.nn.LayerNorm(width)

    def __call__(self, image):
        patches = image.reshape(4, 2, 2, 4).swapaxes(1, 2).reshape(8, 8)  # 8 patches of 2x4 pixels
        x = jax.vmap(self.embed)(patches) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(jax.vmap(self.norm)(x).mean(0))


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits.argmax(-1) == labels).mean()


def train(name, loss_fn, scaler, model, train_set, test_set, steps):
    """Train on `loss_fn` and return losses, accuracies and times. Nothing in here knows about precision."""
    random = np.random.default_rng(0)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, steps // 10), steps)
    optimizer = optax.adamw(schedule, weight_decay=0.05)
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss_fn, has_aux=True)

    @eqx.filter_jit
    def step(model, state, scaler, images, labels):
        scaler, ((loss, _), grads) = grad_fn(model, images, labels, dynamic_scaler_state=scaler)
        model, state = jaxamp.update_if_finite(model, optimizer, state, grads, scaler.finite)
        return model, state, scaler, loss

    state, evaluate = optimizer.init(eqx.filter(model, eqx.is_inexact_array)), eqx.filter_jit(loss_fn)
    losses, accuracies, times = [], [], []
    for i in track(range(steps), f"{name:>8}"):
        rows = random.choice(len(train_set[0]), BATCH, replace=False)
        noise = 0.5 * random.standard_normal((BATCH, 8, 8), np.float32)  # so that the model can't memorise the images
        batch = train_set[0][rows] + noise, train_set[1][rows]
        start = time.perf_counter()
        model, state, scaler, loss = step(model, state, scaler, *batch)
        loss.block_until_ready()
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        if i % 10 == 9 or i == steps - 1:
            accuracies.append((i + 1, float(evaluate(model, *test_set)[1])))

    kept = jaxamp.bytes_kept(loss_fn)(model, *batch)
    return {
        "losses": losses,
        "accuracies": accuracies,
        "time": np.median(times[1:]),  # the first step compiles
        "kept": kept.before if name == "float32" else kept.after,
        "scaler": jaxamp.scaler_metrics(scaler),
    }


def draw(runs, path):
    plt.switch_backend("Agg")
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    looks = {
        "float32": {"color": "C0", "lw": 6, "alpha": 0.4},
        "bfloat16": {"color": "C1", "lw": 2.5},
        "float16": {"color": "k", "lw": 0.8},
    }  # a wide line first, thin ones on top of it
    for name, run in runs.items():
        look = looks[name]
        left.semilogy(range(1, len(run["losses"]) + 1), run["losses"], label=name, **look)
        right.plot(*np.transpose(run["accuracies"]), label=f"{name}: {run['accuracies'][-1][1]:.1%} at the end", **look)
    left.set(xlabel="step", ylabel="cross entropy of the batch", title="Training loss")
    right.set(xlabel="step", ylabel="test images recognised", title="Test accuracy")
    right.yaxis.set_major_formatter(PercentFormatter(1))
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), help="all three, if not given")
    parser.add_argument("--steps", type=int, default=300, help="at least 2")
    parser.add_argument("--small", action="store_true", help="a narrow and shallow model")
    parser.add_argument("--out", default="digits.png", help="where to save the picture of the runs")
    options = parser.parse_args()

    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    images = ((digits.images - digits.images.mean()) / digits.images.std()).astype(np.float32)[order]
    labels = digits.target.astype(np.int32)[order]
    data = (images[360:], labels[360:]), (images[:360], labels[:360])

    no_op, amp = jaxamp.DynamicScalerState.no_op(), jaxamp.amp
    how = {
        "float32": (loss_fn, no_op),
        "bfloat16": (amp(loss_fn, compute_dtype="bfloat16"), no_op),
        "float16": (amp(loss_fn, compute_dtype="float16"), jaxamp.DynamicScalerState(patience=50)),
    }
    model = Transformer(*((16, 1) if options.small else (64, 2)), jax.random.key(0))
    chosen = [options.precision] if options.precision else list(how)
    runs = {name: train(name, *how[name], model, *data, options.steps) for name in chosen}

    table = Table("", *runs, title=f"{options.steps} steps on {jax.devices()[0].device_kind}")
    table.add_row("test accuracy", *(f"{run['accuracies'][-1][1]:.1%}" for run in runs.values()))
    table.add_row("final loss", *(f"{run['losses'][-1]:.4f}" for run in runs.values()))
    table.add_row("median step", *(f"{1e3 * run['time']:.1f} ms" for run in runs.values()))
    table.add_row("kept for the backward pass", *(f"{run['kept'] / 2**20:.2f} MiB" for run in runs.values()))
    table.add_row("loss scale at the end", *(f"{run['scaler']['scale']:.0f}" for run in runs.values()))
    table.add_row("steps skipped", *(f"{run['scaler']['total_skipped']}" for run in runs.values()))
    print(table)
    print("On a CPU, compare accuracy and bytes, not speed.")
    draw(runs, options.out)
    print(f"Picture of the runs: {options.out}")


if __name__ == "__main__":
    main()
