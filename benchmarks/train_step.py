"""How fast is a whole training step, and how much memory does it take, against every peer?

    python -m benchmarks.train_step [--small] [--network vit|gpt] [--layers unrolled|scan] [--sides a,b,c]

One AdamW step of a ViT-B (12 layers, width 768, 196 tokens, batch 256) and of a decoder like GPT-2 small (1024 tokens,
vocabulary 50257, batch 16), with layers unrolled and in a `scan`. Without `--sides`, each case runs the sides
that are interesting there; `--sides all` runs every side. `_sides.py` describes the peers.

The JAX sides take turns. The PyTorch sides take turns before them, in a separate process. All start from the same
parameters and train on the same batch. A side is flagged if, after the same number of steps, its loss differs from
float32's by more than 10 % of the distance that float32's loss fell.
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
# An unrolled network takes long to compile, so it runs against each peer once. A scan compiles fast, so it also
# compares the presets.
USUAL = {
    ("vit", "unrolled"): (
        *("float32", "ours", "ours-float16", "ours-attention", "ours-attention-fast", "ours-attention-keep", "mpx"),
        *("upstream", "upstream-fixed", "hand", "hand-cudnn", "torch", "torch-compile", "torch-compile-sdpa"),
    ),
    ("vit", "scan"): (
        *("float32", "ours", "ours-conservative", "ours-fast", "ours-torch", "ours-float16", "ours-float16-constant"),
        *("ours-attention", "ours-attention-fast", "mpx", "jmp", "upstream", "upstream-fixed", "hand", "hand-cudnn"),
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
    "Ratios: how many times as fast. Each repeat is divided by its neighbour in time; the median is shown.",
    "Temporary GiB: memory that XLA allocates on top of arguments and results. For PyTorch: the peak, with parameters.",
    "Compile s: XLA alone, including autotuning of kernels that no earlier side needed. For PyTorch: the first call.",
    f"Loss: after the same number of steps; flagged if further from float32's than {TOLERANCE:.0%} of float32's fall.",
    "PyTorch runs in a separate process before the others, so its repeats are not interleaved with theirs.",
)


def cases_of(options: argparse.Namespace) -> list[Case]:
    """The networks to train. Without `--network` and `--layers`, all of them; with `--small`, one."""
    networks = [options.network] if options.network else ["vit"] if options.small else ["vit", "gpt"]
    layers = [options.layers] if options.layers else ["unrolled"] if options.small else ["unrolled", "scan"]
    sizes = {network: SMALL if options.small else SIZES[network] for network in networks}
    return [Case(network, sizes[network], how == "scan") for network in networks for how in layers]


def repeats_and_calls(options: argparse.Namespace) -> tuple[int, int]:
    return (3, 1) if options.small else (options.repeats, STEPS)


def sides_of(case: Case, options: argparse.Namespace) -> Sequence[str]:
    if options.sides == "all":
        return [name for name, side in SIDES.items() if side.make is not None or not case.stacked]
    if options.sides:
        return choose(options.sides)
    return SMALL_SIDES if options.small else USUAL[case.network, case.layers]


def main() -> None:
    options = arguments()
    cases, repeats, calls = cases_of(options), *repeats_and_calls(options)
    torch = {}  # first, because JAX keeps the device's memory once it has it
    for case in cases:
        names = [name for name in sides_of(case, options) if SIDES[name].make is None]
        torch[case] = _torch.ask(names, _torch.Asked(case.network, case.sizes, repeats, calls))

    table: list[dict[str, Any]] = []
    notes = [*NOTES, f"{repeats} repeats of {calls} steps."]
    for case in cases:
        names = [name for name in sides_of(case, options) if SIDES[name].make is not None]
        rows = contest({name: SIDES[name] for name in names}, case, repeats, calls)
        rows |= {name: _torch.torch_row(got) for name, got in torch[case].items()}
        conclude(rows)
        table += [{**case.about(), "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
        save("train_step", table, notes, options.json)
    publish("train_step", COLUMNS, table, notes, options.json)


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer of a ViT and few sides")
    ask_for_cases(asked)
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; or all")
    ask_for_upstream(asked)
    return asked.parse_args()


def ask_for_cases(asked: argparse.ArgumentParser) -> None:
    """The options that `cases_of` and `repeats_and_calls` read."""
    asked.add_argument("--network", choices=["vit", "gpt"])
    asked.add_argument("--layers", choices=["unrolled", "scan"])
    asked.add_argument("--repeats", type=int, default=5)


if __name__ == "__main__":
    main()
