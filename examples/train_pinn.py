"""Solve a Helmholtz equation with a physics-informed network: second derivatives, and a part that is kept in float32.

    pip install -e '.[examples]' && python examples/train_pinn.py --precision bfloat16

The network is trained to satisfy u_xx + u_yy + k² u = f on a square, where the solution is known. It reads points
through Fourier features, sin(p @ B): an absolute error of p @ B, an angle, is an error of the same size in the
features. So this one small product stays in float32 (`amp_stop`), while the wide layers run low. The script says how
far gradients are from float32's with this pin and without; `--no-pin` trains without. For float16 the loss is scaled as
well; the other precisions use a scaler that does nothing.
"""

import argparse
import contextlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.flatten_util import ravel_pytree
from rich import print
from rich.progress import track

import jaxamp

WAVES, K = 2, 4.0  # half waves of the solution along an axis; the wave number of the equation


def solution(p):
    return jnp.sin(WAVES * jnp.pi * p[0]) * jnp.sin(WAVES * jnp.pi * p[1])


def source(p):
    return (K**2 - 2 * (WAVES * jnp.pi) ** 2) * solution(p)


def init(key, width):
    keys = jax.random.split(key, 4)
    dense = lambda key, a, b: {"w": jax.random.normal(key, (a, b)) / np.sqrt(a), "b": jnp.zeros(b)}
    frequencies = jax.random.normal(keys[0], (2, width // 2))
    layers = [dense(keys[1], width, width), dense(keys[2], width, width), dense(keys[3], width, 1)]
    return {"frequencies": frequencies, "layers": layers}


def network(params, p, pin):
    with jaxamp.amp_stop() if pin else contextlib.nullcontext():
        angles = 2 * jnp.pi * (p @ params["frequencies"])
    x = jnp.concatenate([jnp.sin(angles), jnp.cos(angles)])
    for layer in params["layers"][:-1]:
        x = jnp.tanh(x @ layer["w"] + layer["b"])
    x = (x @ params["layers"][-1]["w"] + params["layers"][-1]["b"])[0]
    return x * p[0] * (1 - p[0]) * p[1] * (1 - p[1])  # zero on the border, as the solution is


def loss_fn(params, points, pin):
    def residual(p):
        u = lambda p: network(params, p, pin)
        return jnp.trace(jax.hessian(u)(p)) + K**2 * u(p) - source(p)

    return jnp.mean(jax.vmap(residual)(points) ** 2)


def gradient_error(params, points, precision, pin):
    """How far the gradient is from that in float32, relative to it."""
    grads = jax.grad(jaxamp.amp(lambda *args: loss_fn(*args, pin), compute_dtype=precision))(params, points)
    low, exact = ravel_pytree(grads)[0], ravel_pytree(jax.grad(loss_fn)(params, points, pin))[0]
    return float(jnp.linalg.norm(low - exact) / jnp.linalg.norm(exact))


def draw(losses, values, exact, path):
    plt.switch_backend("Agg")
    fig, axes = plt.subplots(1, 3, figsize=(11, 3.4), layout="constrained")
    axes[0].semilogy(range(1, len(losses) + 1), losses, lw=1)
    axes[0].set(xlabel="step", ylabel="mean squared residual", title="Training loss")
    axes[0].grid(alpha=0.3)
    for each, field, title in ((axes[1], values, "the network's u"), (axes[2], values - exact, "its error")):
        top = abs(field).max()
        shown = each.imshow(field, origin="lower", extent=(0, 1, 0, 1), cmap="RdBu", vmin=-top, vmax=top)
        each.set(xlabel="x", ylabel="y", title=title)
        fig.colorbar(shown, ax=each, shrink=0.8)
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--pin", action=argparse.BooleanOptionalAction, default=True, help="keep p @ B in float32")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--small", action="store_true", help="a narrow network and few points")
    parser.add_argument("--out", default="pinn.png", help="where to save the picture of the solution")
    options = parser.parse_args()
    width, count = (16, 16) if options.small else (64, 128)

    float32 = lambda params, points: loss_fn(params, points, options.pin)
    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(float32, compute_dtype=options.precision) if is_low else float32
    scaler = jaxamp.DynamicScalerState(patience=50) if is_half else jaxamp.DynamicScalerState.no_op()
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)
    optimizer = optax.adam(optax.cosine_decay_schedule(3e-3, options.steps))

    @jax.jit
    def step(params, state, scaler, points):
        scaler, (loss, grads) = grad_fn(params, points, dynamic_scaler_state=scaler)
        params, state = jaxamp.update_if_finite(params, optimizer, state, grads, scaler.finite)
        return params, state, scaler, loss

    params, random, losses = init(jax.random.key(0), width), np.random.default_rng(0), []
    state = optimizer.init(params)
    for _ in track(range(options.steps), f"PINN, {options.precision}"):
        params, state, scaler, value = step(params, state, scaler, random.random((count, 2), np.float32))
        losses.append(float(value))

    places = np.linspace(0, 1, 41, dtype=np.float32)
    grid = np.stack(np.meshgrid(places, places), -1).reshape(-1, 2)
    exact, values = jax.vmap(solution)(grid), jax.vmap(lambda p: network(params, p, options.pin))(grid)
    error = float(jnp.linalg.norm(values - exact) / jnp.linalg.norm(exact))
    print(f"Loss {losses[0]:.3g} to {losses[-1]:.3g}; relative error of the solution {error:.2e}.")
    if is_low:
        report = jaxamp.amp_report(float32, compute_dtype=options.precision)(params, grid[:: 1681 // count])
        wide = sum(row.times for row in report.wide_matmuls)
        print(f"{report.low_share:.1%} of the matmul FLOPs ran in {options.precision}; {wide} matmuls in float32.")
        first = init(jax.random.key(0), width), random.random((count, 2), np.float32)
        with_pin, without = (gradient_error(*first, options.precision, pin) for pin in (True, False))
        print(f"Error of the first gradient: {with_pin:.1e} with the pin, {without:.1e} without.")
    draw(losses, np.reshape(values, (41, 41)), np.reshape(exact, (41, 41)), options.out)
    print(f"Picture of the solution: {options.out}")


if __name__ == "__main__":
    main()
