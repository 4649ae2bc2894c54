"""Train an LSTM in Haiku to add numbers that it reads digit by digit.

    pip install -e '.[examples]' dm-haiku && python examples/train_rnn_haiku.py --precision bfloat16

The network reads "38+46=" and then writes "48 ", the sum with its units first. The recurrence is a `scan`, whose body
`amp` rewrites. For float16 the loss is scaled as well; the other precisions use a scaler that does nothing.
"""

import argparse

import haiku as hk
import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from rich import print
from rich.progress import track

import jaxamp

SIGNS = "0123456789+= "


def problems(random, rows, digits):
    """Sums as text: what is read, with blanks where the answer is to be written, and what is to be written."""
    numbers = random.integers(10**digits, size=(rows, 2))
    asked = [f"{a:>{digits}}+{b:>{digits}}={'':>{digits}}" for a, b in numbers]  # the answer has one digit more
    wanted = [f"{a + b:>{digits + 1}}"[::-1] for a, b in numbers]  # units first, as one adds by hand
    return tuple(np.array([[SIGNS.index(sign) for sign in line] for line in lines]) for lines in (asked, wanted))


def network(asked, width):
    x = jax.nn.one_hot(asked, len(SIGNS))
    core = hk.DeepRNN([hk.LSTM(width), jax.nn.tanh, hk.LSTM(width)])
    outputs, _ = hk.dynamic_unroll(core, x, core.initial_state(len(asked)), time_major=False)
    return hk.Linear(len(SIGNS))(outputs)


def draw(losses, accuracies, path):
    plt.switch_backend("Agg")
    fig, (left, right) = plt.subplots(1, 2, figsize=(9, 3.5), layout="constrained")
    left.semilogy(range(1, len(losses) + 1), losses)
    left.set(xlabel="step", ylabel="cross entropy of the batch", title="Training loss")
    right.plot(*np.transpose(accuracies), color="C1")
    right.set(xlabel="step", ylabel="digits written correctly", ylim=(0, 1.02), title="New problems")
    for axes in (left, right):
        axes.grid(alpha=0.3)
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="a narrow network on sums of one digit")
    parser.add_argument("--out", default="rnn.png", help="where to save the picture of the loss")
    options = parser.parse_args()
    width, digits, rows = (32, 1, 32) if options.small else (128, 2, 128)
    model = hk.without_apply_rng(hk.transform(lambda asked: network(asked, width)))

    def loss_fn(params, asked, wanted):
        logits = model.apply(params, asked)[:, -wanted.shape[1] :]
        return optax.softmax_cross_entropy_with_integer_labels(logits, wanted).mean(), logits.argmax(-1) == wanted

    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(loss_fn, compute_dtype=options.precision) if is_low else loss_fn
    scaler = jaxamp.DynamicScalerState(patience=50) if is_half else jaxamp.DynamicScalerState.no_op()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss, has_aux=True)
    schedule = optax.warmup_cosine_decay_schedule(0.0, 5e-3, max(1, options.steps // 10), options.steps)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(schedule))

    @jax.jit
    def step(params, state, scaler, asked, wanted):
        scaler, ((loss, _), grads) = grad_fn(params, asked, wanted, dynamic_scaler_state=scaler)
        params, state = jaxamp.update_if_finite(params, optimizer, state, grads, scaler.finite)
        return params, state, scaler, loss

    random, test_set = np.random.default_rng(0), problems(np.random.default_rng(1), 256, digits)
    params = model.init(jax.random.key(0), jnp.asarray(test_set[0][:1]))
    state, evaluate = optimizer.init(params), jax.jit(loss)
    losses, accuracies = [], []
    for i in track(range(options.steps), f"Haiku, {options.precision}"):
        params, state, scaler, value = step(params, state, scaler, *problems(random, rows, digits))
        losses.append(float(value))
        if i % 20 == 19 or i == options.steps - 1:
            accuracies.append((i + 1, float(evaluate(params, *test_set)[1].mean())))

    print(f"Loss {losses[0]:.3f} to {losses[-1]:.3f}; {accuracies[-1][1]:.1%} of the digits of new problems correct.")
    print(f"{jaxamp.scaler_metrics(scaler)['total_skipped']} of {options.steps} steps skipped.")
    if is_low:
        kept = jaxamp.bytes_kept(loss_fn, compute_dtype=options.precision)(params, *test_set)
        print(f"Kept for the backward pass: {kept.after / 2**20:.2f} MiB, {kept.before / 2**20:.2f} in float32.")
    draw(losses, accuracies, options.out)
    print(f"Picture of the loss: {options.out}")


if __name__ == "__main__":
    main()
