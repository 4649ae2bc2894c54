"""The process that `kernels.py` starts: the kernels of PyTorch's training steps.

    python -m benchmarks._torch_kernels --sides torch-compile-sdpa < case.json

For each side, the process prints what `_torch_process` does, and the name and milliseconds of each kernel.
"""

import functools
import json
import tempfile
from pathlib import Path
from typing import Any

import torch

from ._torch_process import Training, answer, prepare

ON_DEVICE = "kernel", "gpu_memcpy", "gpu_memset"  # of the events in a trace; others span several of these


class Traced(Training):
    """A training step whose kernels are traced."""

    def figures(self) -> dict[str, Any]:
        return {**super().figures(), "kernels": self.kernels()}

    def kernels(self) -> list[tuple[str, float]]:
        """Name and milliseconds of each kernel of a call, after one that is not traced."""
        self()
        with torch.profiler.profile() as profile:
            self()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            profile.export_chrome_trace(str(path))
            events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
        return [(event["name"], event["dur"] / 1e3) for event in events if event.get("cat") in ON_DEVICE]


if __name__ == "__main__":
    answer(functools.partial(prepare, training=Traced), __doc__)
