"""Train on batches that are too large for the memory: add up gradients over micro-batches, with a scaled loss.

    pip install -e '.[examples]' && python examples/train_accumulated.py --precision float16

`optax.MultiSteps` adds the gradients of several micro-batches and then lets the optimizer step.
`DynamicScalerState(accumulate=...)` goes with it: it counts patience in steps of the optimizer, and raises the scale
only between two of them, so that all gradients of one step have the same scale. A micro-batch that overflows is left
out, and the next one takes its place. The run starts with a scale that is far too high, so that the picture shows it.
"""

import argparse

import equinox as eqx
import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich import print
from rich.progress import track
from sklearn.datasets import load_digits

import jaxamp


def loss_fn(model, images, labels):
    logits = jax.vmap(model)(images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def draw(losses, scales, finite, path):
    plt.switch_backend("Agg")
    fig, (above, below) = plt.subplots(2, 1, figsize=(7, 5), sharex=True, layout="constrained")
    at, finite = np.arange(1, len(losses) + 1), np.asarray(finite)
    above.semilogy(at, losses, lw=1)
    above.set(ylabel="cross entropy", title="Loss of the micro-batches")
    below.step(at, scales, where="post", color="C1")
    below.scatter(at[~finite], np.asarray(scales)[~finite], color="k", marker="x", zorder=3, label="left out")
    below.set_yscale("log", base=2)
    below.set(xlabel="micro-batch", ylabel="scale", title="Scale of the loss")
    if not finite.all():
        below.legend()
    for axes in (above, below):
        axes.grid(alpha=0.3)
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float16")
    parser.add_argument("--steps", type=int, default=100, help="of the optimizer")
    parser.add_argument("--accumulate", type=int, default=4, help="micro-batches for each of them")
    parser.add_argument("--small", action="store_true", help="a narrow network and small micro-batches")
    parser.add_argument("--out", default="accumulated.png", help="where to save the picture of losses and scales")
    options = parser.parse_args()
    width, rows = (32, 16) if options.small else (256, 64)

    digits = load_digits()
    images = ((digits.data - digits.data.mean()) / digits.data.std()).astype(np.float32)
    labels, random = digits.target.astype(np.int32), np.random.default_rng(0)

    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(loss_fn, compute_dtype=options.precision) if is_low else loss_fn
    if is_half:
        scaler = jaxamp.DynamicScalerState(scaler=2.0**24, patience=20, accumulate=options.accumulate)
    else:
        scaler = jaxamp.DynamicScalerState.no_op()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)
    optimizer = optax.MultiSteps(optax.adamw(2e-3), options.accumulate)

    @eqx.filter_jit
    def micro_step(model, state, scaler, images, labels):
        scaler, (loss, grads) = grad_fn(model, images, labels, dynamic_scaler_state=scaler)
        model, state = jaxamp.update_if_finite(model, optimizer, state, grads, scaler.finite)
        return model, state, scaler, loss

    model = eqx.nn.MLP(64, 10, width, 2, key=jax.random.key(0))
    state = optimizer.init(eqx.filter(model, eqx.is_inexact_array))
    losses, scales, finite = [], [], []
    for _ in track(range(options.steps * options.accumulate), f"accumulated, {options.precision}"):
        chosen = random.integers(len(images), size=rows)
        scales.append(float(scaler.scaler))
        model, state, scaler, value = micro_step(model, state, scaler, images[chosen], labels[chosen])
        losses.append(float(value))
        finite.append(bool(scaler.finite))

    print(f"Loss {losses[0]:.3f} to {losses[-1]:.3f}.")
    print(f"{len(losses)} micro-batches, {finite.count(False)} of them left out.")
    print(f"{int(state.gradient_step)} steps of the optimizer, {int(state.mini_step)} micro-batches towards the next.")
    draw(losses, scales, finite, options.out)
    print(f"Picture of losses and scales: {options.out}")


if __name__ == "__main__":
    main()
