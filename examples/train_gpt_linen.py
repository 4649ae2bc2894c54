"""Train a byte-level GPT in Flax Linen on the sources of Python's standard library.

    pip install -e '.[examples]' flax && python examples/train_gpt_linen.py --precision bfloat16

The model is plain float32 code. Under `amp`, the loss runs in mixed precision while parameters, gradients and the
optimizer stay in float32. For float16 the loss is scaled as well; the other precisions use a scaler that does nothing.
"""

import argparse
import math
import sysconfig
from pathlib import Path

import flax.linen as nn
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from flax.training.train_state import TrainState
from rich import print
from rich.progress import track

import jaxamp


class Block(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        width, causal = x.shape[-1], nn.make_causal_mask(jnp.ones(x.shape[:2]))
        dropout = nn.Dropout(0.1, deterministic=not train)
        x = x + dropout(nn.MultiHeadDotProductAttention(4)(nn.LayerNorm()(x), mask=causal))
        return x + dropout(nn.Dense(width)(nn.gelu(nn.Dense(4 * width)(nn.LayerNorm()(x)))))


class GPT(nn.Module):
    width: int
    depth: int

    @nn.compact
    def __call__(self, text, train=False):
        places = jnp.arange(text.shape[1])
        x = nn.Embed(256, self.width)(text) + nn.Embed(text.shape[1], self.width)(places)
        for _ in range(self.depth):
            x = Block()(x, train)
        return nn.Dense(256)(nn.LayerNorm()(x))


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
    parser.add_argument("--out", default="gpt_linen.png", help="where to save the picture of the loss")
    options = parser.parse_args()
    width, depth, length, rows = (32, 1, 32, 8) if options.small else (128, 4, 128, 16)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    train_text, test_text = np.split(library, [9 * len(library) // 10])

    def batch(text, seed):
        starts = np.random.default_rng(seed).integers(len(text) - length, size=(rows, 1))
        return text[starts + np.arange(length + 1)]

    network = GPT(width, depth)

    def loss_fn(params, text, key=None):
        dropout = {"train": key is not None, "rngs": None if key is None else {"dropout": key}}
        logits = network.apply({"params": params}, text[:, :-1], **dropout)
        return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()

    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(loss_fn, compute_dtype=options.precision) if is_low else loss_fn
    scaler = jaxamp.DynamicScalerState(patience=50) if is_half else jaxamp.DynamicScalerState.no_op()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)

    @jax.jit
    def step(state, scaler, text):
        key = jax.random.fold_in(jax.random.key(1), state.step)
        scaler, (loss, grads) = grad_fn(state.params, text, key, dynamic_scaler_state=scaler)
        params, opt_state = jaxamp.update_if_finite(state.params, state.tx, state.opt_state, grads, scaler.finite)
        return state.replace(step=state.step + 1, params=params, opt_state=opt_state), scaler, loss

    schedule = optax.warmup_cosine_decay_schedule(0.0, 2e-3, max(1, options.steps // 10), options.steps)
    params = network.init(jax.random.key(0), batch(train_text, 0)[:, :-1])["params"]
    state = TrainState.create(apply_fn=network.apply, params=params, tx=optax.adamw(schedule))
    losses = []
    for i in track(range(options.steps), f"Linen, {options.precision}"):
        state, scaler, value = step(state, scaler, batch(train_text, i))
        losses.append(float(value))

    test_loss = float(jax.jit(loss)(state.params, batch(test_text, 0)))
    print(f"Loss {losses[0]:.3f} to {losses[-1]:.3f}, {test_loss:.3f} on files that were not trained on.")
    print(f"{jaxamp.scaler_metrics(scaler)['total_skipped']} of {options.steps} steps skipped.")
    if is_low:
        report = jaxamp.amp_report(loss_fn, compute_dtype=options.precision)(state.params, batch(test_text, 0))
        print(f"{report.low_share:.1%} of the matmul FLOPs ran in {options.precision}.")
    draw(losses, test_loss, options.out)
    print(f"Picture of the loss: {options.out}")


if __name__ == "__main__":
    main()
