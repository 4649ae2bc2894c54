"""The process that `benchmarks.fp8` starts through `_torch.py`: its decoder in PyTorch, with bfloat16 and with torchao.

    python -m benchmarks._torch_fp8 --sides torch-compile-sdpa,torchao,torchao-rows < case.json

Parameters of its own, in float32, autocast to bfloat16, and a fused AdamW. All linear layers but the head are
torchao's, with a scale for each tensor or for each row. For each side, the process prints what `_torch_process` prints,
with the bytes on top of parameters and moments as the peak.
"""

from collections.abc import Callable
from typing import Any

import torch

from ._torch import Asked
from ._torch_process import Timed, answer, fused_attention
from ._torch_zoo import Decoder

RECIPES = {"torchao": "tensorwise", "torchao-rows": "rowwise"}


class Training(Timed):
    """A training step of the decoder. Its sizes: layers, width, hidden, heads, key heads, vocabulary, batch, tokens."""

    def __init__(self, side: str, asked: Asked, device: str):
        super().__init__(asked.calls, device)
        torch.manual_seed(0)
        layers, width, hidden, heads, shared, vocabulary, batch, tokens = asked.sizes
        with torch.device(device):
            module: Any = Decoder(
                layers,
                width,
                vocabulary,
                heads=heads,
                shared=shared,
                hidden=hidden,
                attend=fused_attention,
                rotary=False,
            )
            self.ids = torch.randint(vocabulary, (batch, tokens))
        if side in RECIPES:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            config = Float8LinearConfig.from_recipe_name(RECIPES[side])
            module = convert_to_float8_training(module, config=config, module_filter_fn=lambda _, name: name != "head")
        self.params = list(module.parameters())
        self.optimizer = torch.optim.AdamW(self.params, lr=1e-4, fused=device == "cuda")
        self.module = torch.compile(module)

    def once(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.module(self.ids, self.ids.roll(-1, 1))
        loss.backward()
        self.optimizer.step()
        self.losses.append(loss.detach())

    def figures(self) -> dict[str, Any]:
        self.optimizer.zero_grad(set_to_none=True)
        return {"peak": self.bytes_of_step()}


def prepare(asked: Asked, device: str) -> Callable[[str], Timed]:
    return lambda side: Training(side, asked, device)


if __name__ == "__main__":
    answer(prepare, __doc__)
