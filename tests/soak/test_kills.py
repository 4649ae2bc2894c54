"""A run that is killed again and again, at random moments, ends with the bits of the run that never was."""

import os
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from helpers import ROOT, assert_same_bits, with_the_package
from soak import kills_worker as worker

import jaxamp

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore")]  # of Orbax
SEED, KILLS = 50_000, {"numpy": 8, "orbax": 4}


def live(kind, folder, kill_after, delay):
    """Run the training until it is done, or kill it some time after a number of steps. Its exit status and lines."""
    environment = with_the_package(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    process = subprocess.Popen(
        [sys.executable, worker.__file__, kind, str(folder)],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    lines = []
    try:
        for line in process.stdout:
            lines.append(line.split())
            if kill_after is not None and len(lines) > kill_after:
                time.sleep(delay)
                os.kill(process.pid, signal.SIGKILL)
                break
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
        process.wait()
    assert process.returncode in (0, -signal.SIGKILL), errors
    return process.returncode, lines


@pytest.mark.parametrize("kind", worker.FILES)
def test_a_run_that_is_killed_is_the_run_that_never_was(kind, tmp_path, figures):
    rng, steps = np.random.default_rng(SEED), worker.STEPS[kind]
    starts = []
    for life in range(KILLS[kind] + 1):
        last = life == KILLS[kind]
        # A part of what is left, and now and then before the first step.
        kill_after = None if last else int(rng.integers(0, steps // (KILLS[kind] + 1)))
        status, lines = live(kind, tmp_path, kill_after, delay=rng.uniform(0, 0.01))
        assert status == (0 if last else -signal.SIGKILL)
        starts.append(int(lines[0][1]))
    assert starts == sorted(starts)
    assert len({*starts}) > KILLS[kind] // 2
    found, done = worker.FILES[kind](tmp_path).load()
    assert done == steps
    expected = worker.train(worker.begin(), 0, steps)
    assert_same_bits(found, expected)
    told = jaxamp.scaler_metrics(expected[2])
    assert told["total_skipped"] > 0
    assert told["total_redone"] > 0
    figures(kind, steps=steps, kills=KILLS[kind], skipped=told["total_skipped"], redone=told["total_redone"])
