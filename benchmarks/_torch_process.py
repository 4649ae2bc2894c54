"""The process that `_torch.py` starts: the same networks, parameters, batch and AdamW in PyTorch.

    python -m benchmarks._torch_process --sides torch,torch-compile < case.json

JAX makes the parameters on the CPU. For each side, the process prints the seconds of the repeats and of the first call,
the peak bytes, and the losses.
"""

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from ._networks import Sizes, make
from ._timing import Failure, attempt, race, seconds
from ._torch import SIDES, Asked


def linear(layer: Any, x: Any) -> Any:
    return F.linear(x, layer["weight"], layer["bias"])


def norm(layer: Any, x: Any) -> Any:
    return F.layer_norm(x, x.shape[-1:], layer["weight"], layer["bias"])


def plain_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    scores = q @ k.transpose(-2, -1) / q.shape[-1] ** 0.5
    if causal:
        mask = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~mask, torch.finfo(scores.dtype).min)
    return torch.softmax(scores, dim=-1) @ v


def fused_attention(q: Any, k: Any, v: Any, causal: bool) -> Any:
    return F.scaled_dot_product_attention(q, k, v, is_causal=causal)


def block(p: Any, x: Any, heads: int, causal: bool, attend: Callable[..., Any]) -> Any:
    batch, tokens, width = x.shape
    qkv = linear(p["qkv"], norm(p["norms"][0], x)).view(batch, tokens, 3, heads, -1)
    q, k, v = qkv.permute(2, 0, 3, 1, 4)
    x = x + linear(p["out"], attend(q, k, v, causal).transpose(1, 2).reshape(batch, tokens, width))
    return x + linear(p["down"], F.gelu(linear(p["up"], norm(p["norms"][1], x)), approximate="tanh"))


def network(kind: str, p: Any, x: Any, heads: int, attend: Callable[..., Any]) -> Any:
    """The logits of a batch."""
    x = (linear(p["embed"], x) if kind == "vit" else p["embed"][x]) + p["positions"]
    for one in p["blocks"]:
        x = block(one, x, heads, kind == "gpt", attend)
    x = norm(p["norm"], x)
    return linear(p["head"], x.mean(1)) if kind == "vit" else x @ p["embed"].T


def parameters(module: Any, device: str) -> Any:
    """The arrays of an Equinox module, as nested dicts and lists of parameters."""
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


class Timed:
    """A step that keeps its losses. A call runs `calls` steps and returns the seconds per step."""

    def __init__(self, calls: int, device: str):
        self.calls, self.device, self.losses = calls, device, []

    def once(self) -> None:
        raise NotImplementedError

    def figures(self) -> dict[str, Any]:
        """Figures of the step other than its time."""
        raise NotImplementedError

    def bytes_of_step(self) -> int | None:
        """The peak of a step on top of what is there before it."""
        if self.device != "cuda":
            return None
        self.ready()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        self.once()
        self.ready()
        return torch.cuda.max_memory_allocated() - before

    def ready(self, _: Any = None) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def __call__(self) -> float:
        return seconds(self.once, self.calls, self.ready)


class Training(Timed):
    """A training step that keeps its parameters."""

    def __init__(self, side: str, asked: Asked, model: Any, batch: Any, device: str):
        super().__init__(asked.calls, device)
        self.params = parameters(model, device)
        self.batch = [torch.tensor(np.asarray(a), device=device) for a in batch]
        self.optimizer = torch.optim.AdamW(leaves(self.params), lr=1e-4, weight_decay=1e-4, fused=device == "cuda")
        attend = fused_attention if side.endswith("sdpa") else plain_attention
        heads = Sizes(*asked.sizes).heads

        def loss(params: Any, x: Any, y: Any) -> Any:
            logits = network(asked.network, params, x, heads, attend).float()
            return F.cross_entropy(logits.flatten(0, -2), y.flatten().long())

        self.loss = torch.compile(loss) if "compile" in side else loss

    def once(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.loss(self.params, *self.batch)
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def figures(self) -> dict[str, Any]:
        return {"peak": self.peak()}

    def peak(self) -> int | None:
        """Peak bytes of one step, including its parameters and optimizer state, excluding those of other sides."""
        if self.device != "cuda":
            return None
        self.optimizer.zero_grad(set_to_none=True)  # leaves the parameters and two moments
        others = torch.cuda.memory_allocated() - 3 * sum(p.nbytes for p in leaves(self.params))
        torch.cuda.reset_peak_memory_stats()
        seconds(self.once, 1, self.ready)
        return torch.cuda.max_memory_allocated() - others


Prepare = Callable[[Asked, str], Callable[[str], Timed]]  # from a question and a device to the step of each side


def prepare(asked: Asked, device: str, training: type[Training] = Training) -> Callable[[str], Timed]:
    model, *batch = make(asked.network, Sizes(*asked.sizes))
    return lambda side: training(side, asked, model, batch, device)


def measure(sides: Sequence[str], make_side: Callable[[str], Timed], repeats: int) -> dict[str, Any]:
    results: dict[str, Any] = {}
    made: dict[str, Timed] = {}
    for side in sides:
        training = attempt(make_side, side)
        first = training if isinstance(training, Failure) else attempt(seconds, training.once, 1, training.ready)
        if isinstance(first, Failure):
            results[side] = {"why": first.why}
            continue
        found = attempt(training.figures)
        made[side] = training
        results[side] = {"first_s": first, **({"peak": None} if isinstance(found, Failure) else found)}
    for side, times in race(made, repeats).items():
        if isinstance(times, Failure):
            results[side] = {"why": times.why}
        else:
            results[side] |= {"seconds": times.seconds, "losses": [float(loss) for loss in made[side].losses]}
    return results


def answer(prepare: Prepare, doc: str) -> None:
    """The whole process: read the question, measure the sides, print the results."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--device", default="cuda")
    options = parser.parse_args()
    asked = Asked(**json.load(sys.stdin))
    if options.device == "cuda" and not torch.cuda.is_available():
        results = {side: {"why": "needs a GPU"} for side in options.sides.split(",")}
    else:
        results = measure(options.sides.split(","), prepare(asked, options.device), asked.repeats)
    print("\n" + json.dumps(results))


if __name__ == "__main__":
    answer(prepare, __doc__)
