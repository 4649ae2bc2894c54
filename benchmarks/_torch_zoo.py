"""The process that `benchmarks.zoo` starts through `_torch.py`: four of its networks in PyTorch, with autocast.

    python -m benchmarks._torch_zoo --sides torch-compile < case.json

The networks have the sizes of those in `_zoo`, and parameters of their own. Images are laid out with channels last,
the layout in which PyTorch convolves fastest. What is timed is the loss and its gradient. For each side, the process
prints what `_torch_process` prints, with the bytes on top of parameters, inputs and gradients as the peak, and the
error of the gradient against PyTorch's float32 without TF32.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from ._torch import Asked
from ._torch_process import Timed, answer, fused_attention, plain_attention
from ._zoo import NETWORKS

Attend = Callable[..., Any]
Made = tuple[nn.Module, list[Any]]  # a module that returns the loss, and its inputs


# -- ResNet-50


def conv_norm(before: int, after: int, size: int, stride: int = 1) -> nn.Module:
    return nn.Sequential(nn.Conv2d(before, after, size, stride, size // 2, bias=False), nn.BatchNorm2d(after))


class Bottleneck(nn.Module):
    def __init__(self, before: int, after: int, stride: int, project: bool):
        super().__init__()
        self.convs = nn.ModuleList(
            [
                conv_norm(before, after // 4, 1),
                conv_norm(after // 4, after // 4, 3, stride),
                conv_norm(after // 4, after, 1),
            ]
        )
        self.project = conv_norm(before, after, 1, stride) if project else nn.Identity()
        nn.init.constant_(self.convs[2][1].weight, 0.2)  # as in `_zoo`

    def forward(self, x: Any) -> Any:
        h = F.relu(self.convs[1](F.relu(self.convs[0](x))))
        return F.relu(self.convs[2](h) + self.project(x))


class ResNet(nn.Module):
    def __init__(self, blocks: Sequence[int], channels: Sequence[int], classes: int):
        super().__init__()
        layers: list[nn.Module] = [conv_norm(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
        before = 64
        for group, (number, after) in enumerate(zip(blocks, channels, strict=True)):
            for i in range(number):
                layers.append(Bottleneck(before, after, 2 if group and not i else 1, project=not i))
                before = after
        self.layers, self.head = nn.Sequential(*layers), nn.Linear(before, classes)

    def forward(self, x: Any, y: Any) -> Any:
        return F.cross_entropy(self.head(self.layers(x).mean((2, 3))), y)


def resnet(
    attend: Attend, batch: int, pixels: int, blocks: Sequence[int], channels: Sequence[int], classes: int
) -> Made:
    images = torch.randn(batch, 3, pixels, pixels)
    return ResNet(blocks, channels, classes), [images, torch.randint(classes, (batch,))]


# -- U-Net


class Residual(nn.Module):
    def __init__(self, before: int, after: int):
        super().__init__()
        self.norms = nn.ModuleList([nn.GroupNorm(8, before), nn.GroupNorm(8, after)])
        self.convs = nn.ModuleList([nn.Conv2d(a, after, 3, padding=1) for a in (before, after)])
        self.skip = nn.Conv2d(before, after, 1)

    def forward(self, x: Any) -> Any:
        h = x
        for norm, conv in zip(self.norms, self.convs, strict=True):
            h = conv(F.silu(norm(h)))
        return self.skip(x) + h


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend, bias: bool):
        super().__init__()
        self.heads, self.attend = heads, attend
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width, bias=bias)

    def forward(self, x: Any) -> Any:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        return self.out(self.attend(q, k, v, False).transpose(1, 2).reshape(batch, tokens, width))


class PixelAttention(nn.Module):
    def __init__(self, width: int, attend: Attend):
        super().__init__()
        self.norm, self.attention = nn.GroupNorm(8, width), Attention(width, 4, attend, bias=False)

    def forward(self, x: Any) -> Any:
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        return x + self.attention(tokens).transpose(1, 2).reshape(x.shape)


class UNet(nn.Module):
    def __init__(self, widths: Sequence[int], attend: Attend):
        super().__init__()
        back, pairs = widths[::-1], list(itertools.pairwise(widths))
        self.first, self.last = nn.Conv2d(3, widths[0], 3, padding=1), nn.Conv2d(widths[0], 3, 3, padding=1)
        self.downs = nn.ModuleList([Residual(width, width) for width in widths])
        self.shrink = nn.ModuleList([nn.Conv2d(a, b, 3, 2, 1) for a, b in pairs])
        self.middle = nn.Sequential(Residual(back[0], back[0]), PixelAttention(back[0], attend))
        self.ups = nn.ModuleList([Residual(2 * width, width) for width in back])
        self.grow = nn.ModuleList([nn.ConvTranspose2d(b, a, 4, 2, 1) for a, b in reversed(pairs)])

    def forward(self, x: Any, y: Any) -> Any:
        x, skips = self.first(x), []
        for down, shrink in zip(self.downs, [*self.shrink, nn.Identity()], strict=True):
            x = down(x)
            skips.append(x)
            x = shrink(x)
        x = self.middle(x)
        for up, grow in zip(self.ups, [*self.grow, nn.Identity()], strict=True):
            x = grow(up(torch.cat([x, skips.pop()], 1)))
        return F.mse_loss(self.last(x), y)


def unet(attend: Attend, batch: int, pixels: int, widths: Sequence[int]) -> Made:
    return UNet(widths, attend), [torch.randn(batch, 3, pixels, pixels) for _ in range(2)]


# -- BERT


class Encoder(nn.Module):
    def __init__(self, width: int, heads: int, attend: Attend):
        super().__init__()
        self.attention = Attention(width, heads, attend, bias=True)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norms = nn.ModuleList([nn.LayerNorm(width), nn.LayerNorm(width)])
        self.drop = nn.Dropout(0.1)

    def forward(self, x: Any) -> Any:
        x = self.norms[0](x + self.drop(self.attention(x)))
        return self.norms[1](x + self.drop(self.down(F.gelu(self.up(x), approximate="tanh"))))


class Bert(nn.Module):
    def __init__(self, layers: int, width: int, heads: int, tokens: int, vocabulary: int, attend: Attend):
        super().__init__()
        self.embed, self.positions = nn.Embedding(vocabulary, width), nn.Parameter(0.02 * torch.randn(tokens, width))
        self.norm, self.drop = nn.LayerNorm(width), nn.Dropout(0.1)
        self.layers = nn.Sequential(*[Encoder(width, heads, attend) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Any, labels: Any) -> Any:
        x = self.layers(self.drop(self.norm(self.embed(ids) + self.positions)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def bert(attend: Attend, layers: int, width: int, heads: int, tokens: int, batch: int, vocabulary: int) -> Made:
    inputs = [torch.randint(vocabulary, (batch, tokens)) for _ in range(2)]
    return Bert(layers, width, heads, tokens, vocabulary, attend), inputs


# -- a decoder like Llama


class RMSNorm(nn.Module):
    def __init__(self, width: int):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(width))

    def forward(self, x: Any) -> Any:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6) * self.scale


def rotate(x: Any) -> Any:
    """Rotary positions for (batch, heads, tokens, width)."""
    half = x.shape[-1] // 2
    rates = 10000.0 ** (-torch.arange(half, device=x.device) / half)
    angles = torch.arange(x.shape[-2], device=x.device)[:, None] * rates
    sin, cos = angles.sin().to(x.dtype), angles.cos().to(x.dtype)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)


class DecoderLayer(nn.Module):
    def __init__(self, width: int, heads: int, shared: int, hidden: int, attend: Attend, rotary: bool = True):
        super().__init__()
        self.heads, self.shared, self.attend = heads, shared, attend
        self.turn = rotate if rotary else lambda x: x
        kept = width // heads * shared
        linear = lambda a, b: nn.Linear(a, b, bias=False)
        self.q, self.k, self.v, self.out = (linear(width, n) for n in (width, kept, kept, width))
        self.gate, self.up, self.down = linear(width, hidden), linear(width, hidden), linear(hidden, width)
        self.before, self.between = RMSNorm(width), RMSNorm(width)

    def attention(self, x: Any) -> Any:
        split = lambda a, heads: a.view(*a.shape[:2], heads, -1).transpose(1, 2)
        q, k = self.turn(split(self.q(x), self.heads)), self.turn(split(self.k(x), self.shared))
        k, v = (a.repeat_interleave(self.heads // self.shared, 1) for a in (k, split(self.v(x), self.shared)))
        return self.out(self.attend(q, k, v, True).transpose(1, 2).reshape(x.shape))

    def forward(self, x: Any) -> Any:
        x = x + self.attention(self.before(x))
        h = self.between(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Decoder(nn.Module):
    def __init__(self, layers: int, width: int, vocabulary: int, **sizes: Any):
        super().__init__()
        self.embed, self.norm = nn.Embedding(vocabulary, width), RMSNorm(width)
        self.layers = nn.Sequential(*[DecoderLayer(width, **sizes) for _ in range(layers)])
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids: Any, labels: Any) -> Any:
        logits = self.head(self.norm(self.layers(self.embed(ids))))
        return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


def decoder(attend: Attend, tokens: int, batch: int, vocabulary: int, scan: bool, **sizes: Any) -> Made:
    ids = torch.randint(vocabulary, (batch, tokens + 1))
    return Decoder(vocabulary=vocabulary, attend=attend, **sizes), [ids[:, :-1].clone(), ids[:, 1:].clone()]


# -- the process


class Gradient(Timed):
    """The loss and its gradient, by autocast."""

    def __init__(self, side: str, asked: Asked, device: str):
        super().__init__(asked.calls, device)
        torch.manual_seed(0)
        (small,) = asked.sizes
        attend = fused_attention if side.endswith("sdpa") else plain_attention
        module, inputs = MAKERS[asked.network](attend, **NETWORKS[asked.network].sizes(bool(small)))
        self.module, self.inputs = module.to(device), [x.to(device) for x in inputs]
        if self.inputs[0].ndim == 4:
            self.module = self.module.to(memory_format=torch.channels_last)
            self.inputs = [x.to(memory_format=torch.channels_last) if x.ndim == 4 else x for x in self.inputs]
        self.call = torch.compile(self.module) if "compile" in side else self.module

    @property
    def params(self) -> list[Any]:
        return list(self.module.parameters())

    def once(self) -> None:
        self.module.zero_grad(set_to_none=True)
        with torch.autocast(self.device, dtype=torch.bfloat16):
            loss = self.call(*self.inputs)
        loss.backward()
        self.losses.append(loss.detach())

    def figures(self) -> dict[str, Any]:
        return {"peak": self.peak(), "error": self.error()}

    def peak(self) -> int | None:
        """Bytes of one step on top of parameters, inputs and gradients."""
        self.module.zero_grad(set_to_none=True)
        found = self.bytes_of_step()
        return None if found is None else found - sum(p.grad.nbytes for p in self.params)

    def error(self) -> float | None:
        """The relative error of the gradient. None with dropout, which drops other elements in another program."""
        if any(isinstance(part, nn.Dropout) for part in self.module.modules()):
            return None
        torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
        expected = torch.autograd.grad(self.module(*self.inputs), self.params)
        torch.backends.cudnn.allow_tf32 = True  # PyTorch's own default
        self.once()
        wrong = sum(float(((p.grad - e) ** 2).sum()) for p, e in zip(self.params, expected, strict=True))
        return (wrong / sum(float((e**2).sum()) for e in expected)) ** 0.5


MAKERS: dict[str, Callable[..., Made]] = {"resnet": resnet, "unet": unet, "bert": bert, "decoder": decoder}


def prepare(asked: Asked, device: str) -> Callable[[str], Timed]:
    return lambda side: Gradient(side, asked, device)


if __name__ == "__main__":
    answer(prepare, __doc__)
