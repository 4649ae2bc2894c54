"""One of two processes that train for hundreds of steps, in many of which one of the two overflows."""

import sys

import distributed_worker as worker
import numpy as np

STEPS, SEED = 500, 60_000


def plan(step):
    """Which of the two processes overflows: at any scale, at large ones, or not at all."""
    rng = np.random.default_rng((SEED, step))
    kind = rng.choice(["none", "infinite", "nan", "large"], p=[0.7, 0.05, 0.05, 0.2])
    return kind, int(rng.integers(2))


def batch(step):
    x, y = worker.batch(1000 + step)  # one without overflows
    kind, process = plan(step)
    row = -1 if process else 0  # the first half of the batch belongs to the first process
    if kind != "none":
        x[row], y[row] = 0.0, 128.0
        x[row, 0] = {"infinite": np.inf, "nan": np.nan, "large": 1.0}[kind]
    return x, y


HOW = {"steps": STEPS, "batch": batch}

if __name__ == "__main__":
    worker.main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], **HOW)
