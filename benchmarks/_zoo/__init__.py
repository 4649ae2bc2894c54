"""The networks of `benchmarks.zoo`, each written in float32 as a user of its library would, by family."""

import functools
import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

from . import language, science, sequences, vision
from .net import Net as Net
from .net import drawn_with


class Entry(NamedTuple):
    """A network: how a table names it, the function that makes it, and the sizes with which it runs on a CPU."""

    title: str
    make: Callable[..., Net]
    small: dict[str, Any]

    def build(self, small: bool, seed: int = 0) -> Net:
        with drawn_with(seed):
            return self.make(**(self.small if small else {}))

    def sizes(self, small: bool) -> dict[str, Any]:
        """All sizes by name, for the same network in PyTorch."""
        usual = {name: one.default for name, one in inspect.signature(self.make).parameters.items()}
        return usual | (self.small if small else {})


THIN = {"layers": 1, "width": 32, "tokens": 16, "batch": 2, "vocabulary": 50}
DECODER = {**THIN, "heads": 4, "shared": 2, "hidden": 48}
NETWORKS = {
    "resnet": Entry(
        "ResNet-50, Haiku",
        vision.resnet,
        {"batch": 4, "pixels": 64, "blocks": (1, 1, 1, 1), "channels": (32, 32, 64, 64), "classes": 10},
    ),
    "convnext": Entry(
        "ConvNeXt-T", vision.convnext, {"batch": 2, "pixels": 32, "depths": (1, 1), "widths": (16, 32), "classes": 10}
    ),
    "unet": Entry("U-Net, Equinox", vision.unet, {"batch": 2, "pixels": 16, "widths": (8, 16)}),
    "bert": Entry("BERT, Haiku", language.bert, {**THIN, "heads": 4}),
    "decoder": Entry("decoder like Llama", language.decoder, DECODER),
    "decoder-scan": Entry("decoder like Llama, scan", functools.partial(language.decoder, scan=True), DECODER),
    "experts": Entry(
        "mixture of experts", language.experts, {"layers": 1, "width": 32, "hidden": 48, "number": 4, "tokens": 64}
    ),
    "lstm": Entry("LSTM, Haiku", sequences.lstm, {"width": 32, "steps": 6, "batch": 4}),
    "state-space": Entry(
        "selective state space", sequences.state_space, {"batch": 2, "steps": 16, "width": 32, "states": 4}
    ),
    "audio": Entry(
        "audio autoencoder", sequences.audio, {"batch": 2, "samples": 256, "widths": (8, 16), "strides": (4,)}
    ),
    "messages": Entry("message passing", science.messages, {"layers": 1, "width": 32, "nodes": 20, "edges": 100}),
    "laplacian": Entry("Laplacian of an MLP", science.laplacian, {"batch": 8, "widths": (4, 32, 32)}),
}
