"""Shapes of parameters for the optimizer benchmark: single matrices and two language models."""

import math


def single(*shape: int) -> dict[str, tuple[int, ...]]:
    return {"w": shape}


def gpt(layers: int, width: int, vocabulary: int, positions: int, biases: bool = True) -> dict[str, tuple[int, ...]]:
    """The arrays of a GPT. 12 layers of width 768 and a vocabulary of 50257 give the 148 of GPT-2 small."""
    shapes: dict[str, tuple[int, ...]] = {"tokens": (vocabulary, width), "positions": (positions, width)}
    matrices = {"qkv": (width, 3 * width), "out": (width, width), "up": (width, 4 * width), "down": (4 * width, width)}
    for i in range(layers):
        shapes |= {f"{i}/{name}/weight": shape for name, shape in matrices.items()}
        shapes |= {f"{i}/{name}/bias": shape[1:] for name, shape in matrices.items() if biases}
        shapes |= {f"{i}/norm{j}/{kind}": (width,) for j in (1, 2) for kind in ("weight", "bias")[: 1 + biases]}
    return shapes | {f"norm/{kind}": (width,) for kind in ("weight", "bias")}


TREES: dict[str, dict[str, tuple[int, ...]]] = {
    "4096 x 12288": single(4096, 12288),
    "4096 x 4096": single(4096, 4096),
    "50257 x 768": single(50257, 768),
    "GPT-2 small": gpt(12, 768, 50257, 1024),
    "1.1 billion": gpt(20, 2048, 50257, 2048, biases=False),
}
SMALL: dict[str, dict[str, tuple[int, ...]]] = {"64 x 96": single(64, 96), "small GPT": gpt(1, 32, 100, 16)}


def number(tree: dict[str, tuple[int, ...]]) -> int:
    return sum(map(math.prod, tree.values()))


def floor_bytes(params: int, state: int, grads: int) -> int:
    """The fewest bytes that a step can move: it reads and writes parameters and state, and reads gradients."""
    return 2 * (params + state) + grads
