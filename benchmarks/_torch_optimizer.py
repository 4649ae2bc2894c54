"""Time PyTorch's fused float32 AdamW and FlashAdamW in a separate process; `_torch.py` says why.

python -m benchmarks._torch_optimizer < case.json
"""

import json
import subprocess
import sys
from importlib.util import find_spec
from typing import Any

from ._timing import Failure, Unavailable, attempt, race, seconds
from ._trees import floor_bytes

SIDES = {"torch": "torch, fused AdamW, float32", "torch-flash": "torch, FlashAdamW"}


def ask(tree: dict[str, tuple[int, ...]], grad_dtype: str, repeats: int, calls: int) -> dict[str, Any]:
    """Seconds and bytes of each side, or the reason why there are none."""
    question = {"shapes": {name: list(s) for name, s in tree.items()}, "grads": grad_dtype}
    got = attempt(_run, {**question, "repeats": repeats, "calls": calls})
    rows = {key: {"why": got.why} for key in SIDES} if isinstance(got, Failure) else got
    return {SIDES[key]: row for key, row in rows.items()}


def _run(question: dict[str, Any], limit_s: float = 300) -> dict[str, Any]:
    if find_spec("torch") is None:
        raise Unavailable("needs PyTorch and a GPU")
    command = [sys.executable, "-m", "benchmarks._torch_optimizer"]
    run = subprocess.run(command, input=json.dumps(question), capture_output=True, text=True, timeout=limit_s)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:]
        raise Unavailable(last[0][:100] if last else f"PyTorch died with exit code {run.returncode}")
    return json.loads(run.stdout.strip().splitlines()[-1])


def measure(question: dict[str, Any]) -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {key: {"why": "needs a GPU"} for key in SIDES}
    shapes = [tuple(shape) for shape in question["shapes"].values()]

    def made(dtype: Any, grads: Any) -> list[Any]:
        params = [torch.nn.Parameter(0.02 * torch.randn(s, device="cuda", dtype=dtype)) for s in shapes]
        for p in params:
            p.grad = torch.randn_like(p, dtype=grads)
        return params

    def plain() -> tuple[Any, list[Any]]:
        params = made(torch.float32, torch.float32)
        return torch.optim.AdamW(params, lr=1e-4, fused=True), params

    def flash() -> tuple[Any, list[Any]]:
        try:
            from flashoptim import FlashAdamW
        except ImportError:
            raise Unavailable("needs flashoptim") from None
        params = made(torch.bfloat16, torch.bfloat16)  # it wants gradients in the dtype of the parameters
        return FlashAdamW(params, lr=1e-4), params

    rows: dict[str, Any] = {}
    for key, make in {"torch": plain, "torch-flash": flash}.items():
        found = attempt(make)
        if isinstance(found, Failure):
            rows[key] = {"why": found.why}
            continue
        optimizer, params = found
        once = attempt(seconds, optimizer.step, 1, lambda _: torch.cuda.synchronize())
        if isinstance(once, Failure):
            rows[key] = {"why": once.why}
            continue
        timed = lambda optimizer=optimizer: seconds(
            optimizer.step, question["calls"], lambda _: torch.cuda.synchronize()
        )
        times = race({key: timed}, question["repeats"])[key]
        if isinstance(times, Failure):
            rows[key] = {"why": times.why}
            continue
        held = [t for s in optimizer.state.values() for t in s.values() if torch.is_tensor(t)]
        number, weights = sum(p.numel() for p in params), sum(p.nbytes for p in params)
        state, grads = sum(t.nbytes for t in held), sum(p.grad.nbytes for p in params)
        least = floor_bytes(weights, state, grads)
        rows[key] = {"seconds": times.seconds, "bytes": (weights + state) / number, "least": least}
        del optimizer, params, held
    return rows


if __name__ == "__main__":
    print("\n" + json.dumps(measure(json.load(sys.stdin))))
