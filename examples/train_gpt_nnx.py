"""Train a byte-level GPT in Flax NNX on the sources of Python's standard library.

    pip install -e '.[examples]' flax && python examples/train_gpt_nnx.py --precision bfloat16

The model is plain float32 code with dropout, whose random state lives in the model: `amp` and the scaler update it as
`nnx.jit` does. For float16 the loss is scaled as well; the other precisions use a scaler that does nothing.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax import nnx
from rich import print
from rich.progress import track

import jaxamp


class Block(nnx.Module):
    def __init__(self, width, rngs):
        self.norms = nnx.List([nnx.LayerNorm(width, rngs=rngs) for _ in range(2)])
        self.attention = nnx.MultiHeadAttention(4, in_features=width, decode=False, rngs=rngs)
        self.up, self.down = nnx.Linear(width, 4 * width, rngs=rngs), nnx.Linear(4 * width, width, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        causal = nnx.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + self.dropout(self.attention(self.norms[0](x), mask=causal))
        return x + self.dropout(self.down(nnx.gelu(self.up(self.norms[1](x)))))


class GPT(nnx.Module):
    def __init__(self, width, depth, length, rngs):
        self.bytes, self.places = nnx.Embed(256, width, rngs=rngs), nnx.Embed(length, width, rngs=rngs)
        self.blocks = nnx.List([Block(width, rngs) for _ in range(depth)])
        self.norm, self.head = nnx.LayerNorm(width, rngs=rngs), nnx.Linear(width, 256, rngs=rngs)

    def __call__(self, text):
        x = self.bytes(text) + self.places(jnp.arange(text.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_fn(model, text):
    return optax.softmax_cross_entropy_with_integer_labels(model(text[:, :-1]), text[:, 1:]).mean()


def draw(losses, test_loss, path):
    plt.switch_backend("Agg")
    fig, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), np.asarray(losses) / math.log(2), label="batches, with dropout")
    axes.axhline(test_loss / math.log(2), color="k", ls="--", lw=1, label="files not trained on, at the end")
    axes.set(xlabel="step", ylabel="bits per byte", title="A byte-level GPT on Python's library")
    axes.grid(alpha=0.3)
    axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--small", action="store_true", help="a shallow model on short texts")
    parser.add_argument("--out", default="gpt_nnx.png", help="where to save the picture of the loss")
    options = parser.parse_args()
    width, depth, length, rows = (32, 1, 32, 8) if options.small else (128, 4, 128, 16)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    train_text, test_text = np.split(library, [9 * len(library) // 10])

    def batch(text, seed):
        starts = np.random.default_rng(seed).integers(len(text) - length, size=(rows, 1))
        return text[starts + np.arange(length + 1)]

    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(loss_fn, compute_dtype=options.precision) if is_low else loss_fn
    scaler = jaxamp.DynamicScalerState(patience=50) if is_half else jaxamp.DynamicScalerState.no_op()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)

    @nnx.jit
    def step(model, optimizer, scaler, text):
        scaler, (loss, grads) = grad_fn(model, text, dynamic_scaler_state=scaler)
        jaxamp.update_if_finite(model, optimizer, grads=grads, finite=scaler.finite)
        return scaler, loss

    model = GPT(width, depth, length, nnx.Rngs(0))
    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, options.steps // 10), options.steps)
    optimizer = nnx.Optimizer(model, optax.adamw(schedule), wrt=nnx.Param)
    losses = []
    for i in track(range(options.steps), f"NNX, {options.precision}"):
        scaler, value = step(model, optimizer, scaler, batch(train_text, i))
        losses.append(float(value))

    model.eval()  # no dropout
    test_loss = float(nnx.jit(loss)(model, batch(test_text, 0)))
    print(f"Loss {losses[0]:.3f} to {losses[-1]:.3f}, {test_loss:.3f} on files that were not trained on.")
    print(f"{jaxamp.scaler_metrics(scaler)['total_skipped']} of {options.steps} steps skipped.")
    if is_low:
        share = jaxamp.amp_report(loss_fn, compute_dtype=options.precision)(model, batch(test_text, 0)).low_share
        print(f"{share:.1%} of the matmul FLOPs ran in {options.precision}.")
    draw(losses, test_loss, options.out)
    print(f"Picture of the loss: {options.out}")


if __name__ == "__main__":
    main()
