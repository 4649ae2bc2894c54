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
import gc
import os
from collections.abc import Sequence
from typing import Any

from . import _torch_sides
from ._networks import SIZES, Sizes
from ._report import Column, number, parser, percent, publish, significant
from ._sides import SIDES, Case, Training, compile_step
from ._timing import Failure, Times, attempt, figures, race

TOLERANCE = 0.1
SMALL = Sizes(layers=1, width=32, heads=2, tokens=8, batch=4, classes=50)
SMALL_SIDES = "float32", "ours", "upstream", "hand-cudnn", "torch"
CORE = "float32", "ours", "ours-attention", "mpx", "hand-cudnn"
# A scan compiles fast: there the presets are compared. The unrolled ViT meets every peer.
USUAL = {
    ("vit", "unrolled"): (
        *("float32", "ours", "ours-float16", "ours-attention", "mpx", "jmp", "upstream", "upstream-mended"),
        *("hand", "hand-cudnn", "torch", "torch-compile", "torch-compile-sdpa"),
    ),
    ("vit", "scan"): tuple(name for name, side in SIDES.items() if side.make is not None),
    ("gpt", "unrolled"): (*CORE, "torch-compile-sdpa"),
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
    "PyTorch runs in a process of its own, before the others: its repeats are not interleaved with theirs.",
)


def sides_of(network: str, layers: str, options: argparse.Namespace) -> Sequence[str]:
    if options.sides == "all":
        return [name for name, side in SIDES.items() if layers == "unrolled" or side.make is not None]
    if options.sides:
        return options.sides.split(",")
    return SMALL_SIDES if options.small else USUAL[network, layers]


def train(name: str, case: Case, calls: int) -> tuple[Training, dict[str, Any]]:
    """A side ready to run, and what compiling it has told."""
    compiled = compile_step(name, case)
    row = {"gib": compiled.temporary / 2**30, "compile_s": compiled.compile_s, "lower_s": compiled.lower_s}
    return Training(compiled, calls), row


def jax_sides(names: Sequence[str], case: Case, repeats: int, calls: int) -> dict[str, dict[str, Any]]:
    """Rows of the sides of JAX: times and losses, or why there are none."""
    rows, running = {}, {}
    for name in names:
        made = attempt(train, name, case, calls)
        if isinstance(made, Failure):
            rows[name] = {"note": made.why}
        else:
            running[name], rows[name] = made
    for name, times in race(running, repeats).items():
        if isinstance(times, Failure):
            rows[name]["note"] = times.why
        else:
            rows[name] |= {"seconds": times.seconds, "losses": [float(loss) for loss in running[name].losses]}
    return rows


def torch_row(got: dict[str, Any]) -> dict[str, Any]:
    if "why" in got:
        return {"note": got["why"]}
    gib = None if got["peak"] is None else got["peak"] / 2**30
    return {"gib": gib, "compile_s": got["first_s"], "seconds": got["seconds"], "losses": got["losses"]}


def judge(loss: float, reference: Sequence[float]) -> str | None:
    """What is wrong with a side's loss, if anything is: the fall of float32's loss is the measure."""
    gap = abs(loss - reference[-1]) / max(abs(reference[0] - reference[-1]), 1e-6)
    return None if gap <= TOLERANCE else f"WRONG: loss off by {gap:.0%} of what float32's fell"


def finish(rows: dict[str, dict[str, Any]]) -> None:
    """Fill in what is read off two rows: ratios, and whether the losses agree."""
    timed = {name: Times(row["seconds"]) for name, row in rows.items() if "seconds" in row}
    reference = rows.get("float32", {}).get("losses")
    for name, found in figures(timed, {"vs_float32": "float32", "vs_mpx": "mpx"}).items():
        losses = rows[name]["losses"]
        last = len(reference or losses) - 1  # PyTorch has made some steps more, to warm up
        rows[name] |= {**found, "loss": losses[last]}
        if reference:
            rows[name]["note"] = judge(losses[last], reference)


def main() -> None:
    options = arguments()
    repeats, calls = (3, 1) if options.small else (options.repeats, 2)
    networks = [options.network] if options.network else ["vit"] if options.small else ["vit", "gpt"]
    layers = [options.layers] if options.layers else ["unrolled"] if options.small else ["unrolled", "scan"]
    cases = [(network, how) for network in networks for how in layers]
    sizes = {network: SMALL if options.small else SIZES[network] for network in networks}
    torch = {}  # first: JAX keeps the device's memory once it has it
    for network, how in cases:
        names = [name for name in sides_of(network, how, options) if SIDES[name].make is None]
        torch[network, how] = _torch_sides.ask(names, _torch_sides.Asked(network, sizes[network], repeats, calls))

    table = []
    for network, how in cases:
        names = [name for name in sides_of(network, how, options) if SIDES[name].make is not None]
        rows = jax_sides(names, Case(network, sizes[network], how == "scan"), repeats, calls)
        rows |= {name: torch_row(got) for name, got in torch[network, how].items()}
        finish(rows)
        about = {"network": network, "layers": how, "sizes": sizes[network]._asdict()}
        table += [{**about, "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
        gc.collect()  # the parameters of this case, before those of the next are made
    publish("train_step", COLUMNS, table, [*NOTES, f"{repeats} repeats of {calls} steps."], options.json)


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer of a ViT and few sides")
    asked.add_argument("--network", choices=["vit", "gpt"])
    asked.add_argument("--layers", choices=["unrolled", "scan"])
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; or all")
    asked.add_argument("--repeats", type=int, default=10)
    asked.add_argument("--upstream", metavar="PATH", help="the folder that jaxamp 0.0.4 is installed in")
    options = asked.parse_args()
    if options.upstream:
        os.environ["JAXAMP_UPSTREAM"] = options.upstream
    return options


if __name__ == "__main__":
    main()
