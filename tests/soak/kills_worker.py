"""A training run that saves itself after each step and goes on from what it finds, for `test_kills.py`.

python kills_worker.py numpy FOLDER
"""

import os
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from small_networks import PARAMS, ROWS, WIDTH, mlp

import jaxamp
from jaxamp import optim

STEPS = {"numpy": 600, "orbax": 60}
OPTIMIZER = optim.flash_adamw(1e-2)
INFINITE, LARGE = 0.1, 0.2  # the share of steps with an infinite example, and with one that overflows at large scales


def batch(step):
    rng = np.random.default_rng(step)
    x, luck = rng.normal(size=(ROWS, WIDTH)).astype(np.float32), rng.random()
    x[0, 0] = np.inf if luck < INFINITE else 2000.0 if luck < INFINITE + LARGE else x[0, 0]
    return x


def begin():
    params = jaxamp.cast_floating(PARAMS, jnp.bfloat16)
    return params, OPTIMIZER.init(params), jaxamp.DynamicScalerState(patience=5).as_arrays()


@jax.jit
def step(run, x):
    params, opt_state, scaler = run
    loss = jaxamp.amp(lambda params, x: mlp(jaxamp.cast_floating(params, jnp.float32), x), compute_dtype=jnp.float16)
    grad_fn = jaxamp.dynamic_scale_grad(loss, redo_on_nan=1)
    scaler, grads = grad_fn(params, x, dynamic_scaler_state=scaler)
    params, opt_state = OPTIMIZER.step(params, opt_state, grads, ok=scaler.finite)
    return params, opt_state, scaler


def train(run, first, last, save=lambda run, done: None):
    for i in range(first, last):
        run = step(run, batch(i))
        save(run, i + 1)
    return run


# -- files


class Plain:
    """One file of NumPy, written beside the old one and put in its place."""

    def __init__(self, folder):
        self.path = Path(folder) / "run.npz"

    def save(self, run, done):
        params, opt_state, scaler = run
        arrays = optim.to_arrays(params, opt_state)
        arrays |= {f"scaler/{name}": x for name, x in scaler._asdict().items() if x is not None}
        raw = {k: np.asarray(x).view(f"V{x.dtype.itemsize}") for k, x in arrays.items()}  # NumPy knows no bfloat16
        with open(temporary := self.path.with_suffix(".new"), "wb") as file:
            np.savez(file, done=done, **raw)
        os.replace(temporary, self.path)

    def load(self):
        run = begin()
        if not self.path.exists():
            return run, 0
        like = optim.to_arrays(run[0], run[1])
        with np.load(self.path) as file:
            arrays = {k: jnp.asarray(file[k].view(x.dtype)).reshape(x.shape) for k, x in like.items()}
            fields = {
                name: jnp.asarray(file[f"scaler/{name}"].view(x.dtype))
                for name, x in run[2]._asdict().items()
                if x is not None
            }
            done = int(file["done"])
        return (*optim.from_arrays(arrays, run[0]), run[2]._replace(**fields)), done


class Orbax:
    """A folder for each step. Orbax gives it its name when it is complete."""

    def __init__(self, folder):
        import orbax.checkpoint as ocp

        self.folder, self.checkpointer = Path(folder), ocp.StandardCheckpointer()

    def save(self, run, done):
        self.checkpointer.save(self.folder / f"step_{done}", run)
        self.checkpointer.wait_until_finished()

    def load(self):
        run = begin()
        done = max((int(path.name[5:]) for path in self.folder.glob("step_*") if path.name[5:].isdigit()), default=0)
        return (self.checkpointer.restore(self.folder / f"step_{done}", run) if done else run), done


FILES = {"numpy": Plain, "orbax": Orbax}


def main(kind, folder):
    files = FILES[kind](folder)
    run, done = files.load()
    print("from", done, flush=True)

    def save(run, done):
        files.save(run, done)
        print("done", done, flush=True)

    train(run, done, STEPS[kind], save)


if __name__ == "__main__":
    main(*sys.argv[1:])
