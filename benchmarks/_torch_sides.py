"""The same networks, parameters, batch and AdamW in PyTorch, in a process of their own.

    python -m benchmarks._torch_sides --sides torch,torch-compile < case.json

A process of its own, because JAX and PyTorch each keep the memory of the device to themselves. JAX makes the parameters
there, on the CPU. What comes back, for each side: seconds of the repeats, the first call's, peak bytes, and the losses.
"""

import argparse
import dataclasses
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np

from ._networks import Sizes, make
from ._timing import Failure, Unavailable, attempt, race, seconds

SIDES = "torch", "torch-compile", "torch-compile-sdpa"


@dataclasses.dataclass
class Asked:
    """What the process is asked for."""

    network: str
    sizes: Sequence[int]
    repeats: int
    calls: int


# -- in the process


def linear(layer: Any, x: Any) -> Any:
    from torch.nn.functional import linear

    return linear(x, layer["weight"], layer["bias"])


def norm(layer: Any, x: Any) -> Any:
    from torch.nn.functional import layer_norm

    return layer_norm(x, x.shape[-1:], layer["weight"], layer["bias"])


def plain_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    import torch

    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ v


def fused_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    from torch.nn.functional import scaled_dot_product_attention

    return scaled_dot_product_attention(q, k, v, is_causal=causal)


def block(p: Any, x: Any, heads: int, causal: bool, attend: Callable[..., Any]) -> Any:
    from torch.nn.functional import gelu

    batch, tokens, width = x.shape
    qkv = linear(p["qkv"], norm(p["norms"][0], x)).view(batch, tokens, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    x = x + linear(p["out"], attend(q, k, v, causal).transpose(1, 2).reshape(batch, tokens, width))
    return x + linear(p["down"], gelu(linear(p["up"], norm(p["norms"][1], x)), approximate="tanh"))


def network(kind: str, p: Any, x: Any, heads: int, attend: Callable[..., Any]) -> Any:
    """The logits of a batch."""
    x = (linear(p["embed"], x) if kind == "vit" else p["embed"][x]) + p["positions"]
    for one in p["blocks"]:
        x = block(one, x, heads, kind == "gpt", attend)
    x = norm(p["norm"], x)
    return linear(p["head"], x.mean(1)) if kind == "vit" else x @ p["embed"].T


def parameters(module: Any, device: str) -> Any:
    """An Equinox module's arrays, as nested dicts and lists of parameters."""
    import torch

    if isinstance(module, list | tuple):
        return [parameters(one, device) for one in module]
    if dataclasses.is_dataclass(module):
        fields = {f.name: getattr(module, f.name) for f in dataclasses.fields(module) if not f.metadata.get("static")}
        return {name: parameters(value, device) for name, value in fields.items()}
    return torch.nn.Parameter(torch.tensor(np.asarray(module), device=device))


def leaves(tree: Any) -> list[Any]:
    if isinstance(tree, dict | list):
        return [leaf for one in (tree.values() if isinstance(tree, dict) else tree) for leaf in leaves(one)]
    return [tree]


class Training:
    """A training step that keeps its parameters; a call runs `calls` steps and returns the seconds of one."""

    def __init__(self, side: str, asked: Asked, model: Any, batch: Any, device: str):
        import torch

        self.torch, self.asked, self.device, self.losses = torch, asked, device, []
        self.params = parameters(model, device)
        self.batch = [torch.tensor(np.asarray(a), device=device) for a in batch]
        self.optimizer = torch.optim.AdamW(leaves(self.params), lr=1e-4, weight_decay=1e-4, fused=device == "cuda")
        attend = fused_attention if side.endswith("sdpa") else plain_attention
        heads = Sizes(*asked.sizes).heads

        def loss(params: Any, x: Any, y: Any) -> Any:
            logits = network(asked.network, params, x, heads, attend).float()
            return torch.nn.functional.cross_entropy(logits.flatten(0, -2), y.flatten().long())

        self.loss = torch.compile(loss) if "compile" in side else loss

    def once(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with self.torch.autocast(self.device, dtype=self.torch.bfloat16):
            loss = self.loss(self.params, *self.batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def ready(self, _: Any) -> None:
        if self.device == "cuda":
            self.torch.cuda.synchronize()

    def __call__(self) -> float:
        return seconds(self.once, self.asked.calls, self.ready)

    def peak(self) -> int | None:
        """Bytes at the peak of one step, with its parameters and optimizer's state, without those of other sides."""
        if self.device != "cuda":
            return None
        cuda = self.torch.cuda
        others = cuda.memory_allocated() - 3 * sum(p.nbytes for p in leaves(self.params))
        cuda.reset_peak_memory_stats()
        seconds(self.once, 1, self.ready)
        return cuda.max_memory_allocated() - others


def measure(sides: Sequence[str], asked: Asked, device: str) -> dict[str, Any]:
    model, *batch = make(asked.network, Sizes(*asked.sizes))
    results: dict[str, Any] = {}
    made: dict[str, Training] = {}
    for side in sides:
        training = attempt(Training, side, asked, model, batch, device)
        first = training if isinstance(training, Failure) else attempt(seconds, training.once, 1, training.ready)
        if isinstance(first, Failure):
            results[side] = {"why": first.why}
            continue
        made[side] = training
        results[side] = {"first_s": first, "peak": training.peak()}
    for side, times in race(made, asked.repeats).items():
        if isinstance(times, Failure):
            results[side] = {"why": times.why}
        else:
            results[side] |= {"seconds": times.seconds, "losses": [float(loss) for loss in made[side].losses]}
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    import torch

    asked = Asked(**json.load(sys.stdin))
    if options.device == "cuda" and not torch.cuda.is_available():
        results = {side: {"why": "needs a GPU"} for side in options.sides.split(",")}
    else:
        results = measure(options.sides.split(","), asked, options.device)
    print("\n" + json.dumps(results))


# -- outside of it


def ask(sides: Sequence[str], asked: Asked, limit_s: float = 200) -> dict[str, Any]:
    """Run the process. To be called before JAX takes the device's memory."""
    if not sides:
        return {}
    got = attempt(_run, sides, asked, limit_s)
    if not isinstance(got, Failure):
        return got
    if len(sides) == 1:
        return {sides[0]: {"why": got.why}}
    return {name: row for side in sides for name, row in ask([side], asked, limit_s).items()}  # one took all with it


def _run(sides: Sequence[str], asked: Asked, limit_s: float) -> dict[str, Any]:
    if find_spec("torch") is None:
        raise Unavailable("needs PyTorch and a GPU")
    command = [sys.executable, "-m", "benchmarks._torch_sides", "--sides", ",".join(sides)]
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    question = json.dumps(dataclasses.asdict(asked))
    run = subprocess.run(command, input=question, env=environment, capture_output=True, text=True, timeout=limit_s)
    if run.returncode:
        last = run.stderr.strip().splitlines()[-1:]
        raise Unavailable(last[0][:100] if last else f"PyTorch died with exit code {run.returncode}")
    return json.loads(run.stdout.strip().splitlines()[-1])


if __name__ == "__main__":
    main()
