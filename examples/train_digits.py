"""Train a small vision transformer on handwritten digits, in float32 and in mixed precision with both half dtypes.

    pip install -e '.[examples]' && python examples/train_digits.py

The model is plain float32 code. For mixed precision, its loss is wrapped in `jaxamp.amp`. The float16 run also scales
the loss; the other two use a scaler that does nothing.
"""

import argparse
import math
import time

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from matplotlib.ticker import PercentFormatter
from rich import print
from rich.progress import track
from rich.table import Table
from sklearn.datasets import load_digits

import jaxamp

WIDTH, HEADS, DEPTH, BATCH = 64, 4, 2, 64


def init(key):
    keys = iter(jax.random.split(key, 3 + 4 * DEPTH))

    def weights(*shape):
        return jax.random.normal(next(keys), shape) / math.sqrt(shape[0])

    sizes = {"qkv": (WIDTH, 3 * WIDTH), "out": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}
    blocks = [{name: weights(*shape) for name, shape in sizes.items()} for _ in range(DEPTH)]
    return {"embed": weights(8, WIDTH), "places": weights(8, WIDTH), "blocks": blocks, "head": weights(WIDTH, 10)}


def attention(p, x):
    q, k, v = jnp.split((x @ p["qkv"]).reshape(*x.shape[:-1], HEADS, -1), 3, axis=-1)
    return jax.nn.dot_product_attention(q, k, v).reshape(x.shape) @ p["out"]


def loss_fn(params, images, labels):
    patches = images.reshape(-1, 4, 2, 2, 4).swapaxes(2, 3).reshape(-1, 8, 8)  # 8 patches of 2x4 pixels
    x = patches @ params["embed"] + params["places"]
    for p in params["blocks"]:
        x = x + attention(p, jax.nn.standardize(x))
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
    logits = jax.nn.standardize(x).mean(1) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean(), (logits.argmax(-1) == labels).mean()


def train(name, loss_fn, scaler, train_set, test_set, steps):
    """Train on `loss_fn` and return losses, accuracies and times. Nothing in here knows about precision."""
    params, random = init(jax.random.key(0)), np.random.default_rng(0)
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, steps // 10, steps), weight_decay=0.05)
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss_fn, has_aux=True)

    @jax.jit
    def step(params, state, scaler, images, labels):
        scaler, ((loss, _), grads) = grad_fn(params, images, labels, dynamic_scaler_state=scaler)
        params, state = jaxamp.update_if_finite(params, optimizer, state, grads, scaler.finite)
        return params, state, scaler, loss

    state, evaluate = optimizer.init(params), jax.jit(loss_fn)
    losses, accuracies, times = [], [], []
    for i in track(range(steps), f"{name:>14}"):
        rows = random.choice(len(train_set[0]), BATCH, replace=False)
        noise = 0.5 * random.standard_normal((BATCH, 8, 8), np.float32)  # so that the model can't memorise the images
        batch = train_set[0][rows] + noise, train_set[1][rows]
        start = time.perf_counter()
        params, state, scaler, loss = jax.block_until_ready(step(params, state, scaler, *batch))
        times.append(time.perf_counter() - start)
        losses.append(float(loss))
        if i % 10 == 9 or i == steps - 1:
            accuracies.append((i + 1, float(evaluate(params, *test_set)[1])))

    return {
        "losses": losses,
        "accuracies": accuracies,
        "time": np.median(times[1:]),  # the first step compiles
        "kept": jaxamp.bytes_kept(loss_fn)(params, *batch).before,  # before another amp: loss_fn as passed in
        "scaler": jaxamp.scaler_metrics(scaler),
    }


def draw(runs, path):
    plt.switch_backend("Agg")
    fig, (left, right) = plt.subplots(1, 2, figsize=(10, 4), layout="constrained")
    looks = (
        {"color": "C0", "lw": 6, "alpha": 0.4},
        {"color": "C1", "lw": 2.5},
        {"color": "k", "lw": 0.8},
    )  # a wide line first, thin ones on top of it
    for (name, run), look in zip(runs.items(), looks, strict=True):
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
    parser.add_argument("--steps", type=int, default=300, help="at least 2")
    parser.add_argument("--out", default="digits.png", help="where to save the picture of the runs")
    options = parser.parse_args()

    digits, order = load_digits(), np.random.default_rng(0).permutation(1797)
    images = ((digits.images - digits.images.mean()) / digits.images.std()).astype(np.float32)[order]
    labels = digits.target.astype(np.int32)[order]
    data = (images[360:], labels[360:]), (images[:360], labels[:360])

    no_op, amp = jaxamp.DynamicScalerState.no_op(), jaxamp.amp
    how = {
        "float32": (loss_fn, no_op),
        "amp, bfloat16": (amp(loss_fn, compute_dtype=jnp.bfloat16), no_op),
        "amp, float16": (amp(loss_fn, compute_dtype=jnp.float16), jaxamp.DynamicScalerState(patience=50)),
    }
    runs = {name: train(name, *loss_and_scaler, *data, options.steps) for name, loss_and_scaler in how.items()}

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
