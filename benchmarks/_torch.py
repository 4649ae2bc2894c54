"""Time PyTorch's training steps in a separate process.

JAX and PyTorch each reserve the memory of the device, and a crash of one must not take the other down.
"""

import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

from ._tables import progress
from ._timing import Failure, Unavailable, attempt

SIDES = "torch", "torch-compile", "torch-compile-sdpa"


@dataclasses.dataclass
class Asked:
    """The input of the process; `sizes` are those of `_networks`."""

    network: str
    sizes: Sequence[int]
    repeats: int
    calls: int


def ask(sides: Sequence[str], asked: Asked, limit_s: float = 200, process: str = "_torch_process") -> dict[str, Any]:
    """Run the process. Call this before JAX takes the device's memory."""
    if not sides:
        return {}
    progress(f"{asked.network}: asking PyTorch for {', '.join(sides)}")
    got = attempt(_run, sides, asked, limit_s, process)
    if not isinstance(got, Failure):
        return got
    if len(sides) == 1:
        return {sides[0]: {"why": got.why}}
    # One crash took all of them down: try each alone.
    return {name: row for side in sides for name, row in ask([side], asked, limit_s, process).items()}


def torch_row(got: dict[str, Any]) -> dict[str, Any]:
    """The row of a table, from what the process says about a side."""
    if "why" in got:
        return {"note": got["why"]}
    gib = None if got["peak"] is None else got["peak"] / 2**30
    return {"gib": gib, "compile_s": got["first_s"], "seconds": got["seconds"], "losses": got["losses"]}


def _run(sides: Sequence[str], asked: Asked, limit_s: float, process: str) -> dict[str, Any]:
    if find_spec("torch") is None:
        raise Unavailable("needs PyTorch and a GPU")
    command = [sys.executable, "-m", f"benchmarks.{process}", "--sides", ",".join(sides)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    question = json.dumps(dataclasses.asdict(asked))
    run = subprocess.run(command, input=question, env=environment, capture_output=True, text=True, timeout=limit_s)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:]
        raise Unavailable(last[0][:100] if last else f"PyTorch died with exit code {run.returncode}")
    return json.loads(run.stdout.strip().splitlines()[-1])
