"""How fast is a whole training step, and how much memory does it take, against every peer?

    python -m benchmarks.train_step [--small] [--network vit|gpt] [--layers unrolled|scan] [--sides a,b,c]

One AdamW step of a ViT-B (12 layers, width 768, 196 tokens, batch 256) and of a decoder like GPT-2 small (1024 tokens,
vocabulary 50257, batch 16), with layers unrolled and in a `scan`. Without `--sides`, each case has those that tell
something there; `--sides all` runs all of them. Peers are described in `_sides.py`.

The sides of JAX take turns. Those of PyTorch take turns before them, in a process of their own. All train from the same
parameters on the same batch. A side whose loss, after the same number of steps, is away from float32's by more than
10 % of what float32's fell is flagged.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from . import _torch
from ._contest import STEPS, TOLERANCE, conclude, contest
from ._networks import SIZES, Sizes
from ._sides import SIDES, Case, ask_for_upstream, choose
from ._tables import Column, number, parser, percent, publish, save, significant

SMALL = Sizes(layers=1, width=32, heads=2, tokens=8, batch=4, classes=50)
SMALL_SIDES = "float32", "ours", "upstream", "hand-cudnn", "torch"
CORE = "float32", "ours", "ours-attention", "mpx"
# An unrolled network takes long to compile: it meets each peer once. A scan does not: there the presets are compared.
USUAL = {
    ("vit", "unrolled"): (
        *("float32", "ours", "ours-float16", "ours-attention", "ours-attention-fast", "ours-attention-keep", "mpx"),
        *("upstream", "upstream-mended", "hand", "hand-cudnn", "torch", "torch-compile", "torch-compile-sdpa"),
    ),
    ("vit", "scan"): (
        *("float32", "ours", "ours-conservative", "ours-fast", "ours-torch", "ours-float16", "ours-float16-constant"),
        *("ours-attention", "ours-attention-fast", "mpx", "jmp", "upstream", "upstream-mended", "hand", "hand-cudnn"),
    ),
    ("gpt", "unrolled"): (*CORE, "hand-cudnn", "torch-compile-sdpa"),
    ("gpt", "scan"): CORE,
}
COLUMNS = (
    Column("network", "network"),
    Column("layers", "layers"),
    Column("side", "title"),
    Column("ms", "ms", number(1)),
    Column("spread", "spread", percent),
    Column("ratio to float32", "vs_float32", number(2, "x")),
    Column("ratio to MPX", "vs_mpx", number(2, "x")),
    Column("temporary GiB", "gib", significant),
    Column("compile s", "compile_s", number(1)),
    Column("loss", "loss", number(4)),
    Column("note", "note"),
)
NOTES = (
    "Ratios: how many times as fast, the median over the repeats, each of two neighbours in time.",
    "Temporary GiB: what XLA allocates beside arguments and results; of PyTorch, the peak, parameters included.",
    "Compile s: XLA alone, the autotuning of kernels that no earlier side needed included; of PyTorch, the first call.",
    f"Loss: after the same number of steps; flagged if away from float32's by over {TOLERANCE:.0%} of what that fell.",
    "PyTorch runs in a process of its own, before the others: its repeats are not interleaved with theirs.",
)


def sides_of(network: str, layers: str, options: argparse.Namespace) -> Sequence[str]:
    if options.sides == "all":
        return [name for name, side in SIDES.items() if layers == "unrolled" or side.make is not None]
    if options.sides:
        return choose(options.sides)
    return SMALL_SIDES if options.small else USUAL[network, layers]


def torch_row(got: dict[str, Any]) -> dict[str, Any]:
    if "why" in got:
        return {"note": got["why"]}
    gib = None if got["peak"] is None else got["peak"] / 2**30
    return {"gib": gib, "compile_s": got["first_s"], "seconds": got["seconds"], "losses": got["losses"]}


def main() -> None:
    options = arguments()
    repeats, calls = (3, 1) if options.small else (options.repeats, STEPS)
    networks = [options.network] if options.network else ["vit"] if options.small else ["vit", "gpt"]
    layers = [options.layers] if options.layers else ["unrolled"] if options.small else ["unrolled", "scan"]
    cases = [(network, how) for network in networks for how in layers]
    sizes = {network: SMALL if options.small else SIZES[network] for network in networks}
    torch = {}  # first: JAX keeps the device's memory once it has it
    for network, how in cases:
        names = [name for name in sides_of(network, how, options) if SIDES[name].make is None]
        torch[network, how] = _torch.ask(names, _torch.Asked(network, sizes[network], repeats, calls))

    table: list[dict[str, Any]] = []
    notes = [*NOTES, f"{repeats} repeats of {calls} steps."]
    for network, how in cases:
        names = [name for name in sides_of(network, how, options) if SIDES[name].make is not None]
        rows = contest(names, Case(network, sizes[network], how == "scan"), repeats, calls)
        rows |= {name: torch_row(got) for name, got in torch[network, how].items()}
        conclude(rows)
        about = {"network": network, "layers": how, "sizes": sizes[network]._asdict()}
        table += [{**about, "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
        save("train_step", table, notes, options.json)
    publish("train_step", COLUMNS, table, notes, options.json)


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer of a ViT and few sides")
    asked.add_argument("--network", choices=["vit", "gpt"])
    asked.add_argument("--layers", choices=["unrolled", "scan"])
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; or all")
    asked.add_argument("--repeats", type=int, default=5)
    ask_for_upstream(asked)
    return asked.parse_args()


if __name__ == "__main__":
    main()
