"""How do step time and memory grow with depth and with the length of the sequence?

    python -m benchmarks.growth [--small] [--layers unrolled|scan] [--picture PATH]

One AdamW step of a ViT: 6, 12, 24 and 48 layers at 196 tokens and batch 64; and 128, 512, 2048 and 4096 tokens, 12
layers, always with 8192 tokens in a batch. Sides: float32, ours, ours with our attention.
"""

import argparse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from ._contest import STEPS, conclude, contest
from ._networks import Sizes
from ._pictures import save_growth
from ._sides import SIDES, Case, choose
from ._tables import Column, number, parser, percent, publish, save, significant

USUAL = "float32", "ours", "ours-attention"
DEPTHS, LENGTHS, TOKENS = (6, 12, 24, 48), (128, 512, 2048, 4096), 8192
SMALL = Sizes(layers=1, width=16, heads=2, tokens=8, batch=2, classes=10)
COLUMNS = (
    Column("growing", "growing"),
    Column("layers", "depth"),
    Column("tokens", "tokens"),
    Column("batch", "batch"),
    Column("side", "title"),
    Column("ms", "ms", number(1)),
    Column("spread", "spread", percent),
    Column("ratio to float32", "vs_float32", number(2, "x")),
    Column("temporary GiB", "gib", significant),
    Column("note", "note"),
)


def points(small: bool) -> Iterator[tuple[str, Sizes]]:
    if small:
        yield from (("depth", SMALL), ("length", SMALL._replace(tokens=16, batch=1)))
        return
    for depth in DEPTHS:
        yield "depth", Sizes(layers=depth, batch=64)
    for length in LENGTHS:
        yield "length", Sizes(tokens=length, batch=TOKENS // length)


def main() -> None:
    options = arguments()
    names = choose(options.sides or ",".join(USUAL[:2] if options.small else USUAL))
    repeats, calls = (3, 1) if options.small else (5, STEPS)
    notes = [
        f"Layers: {options.layers}. {repeats} repeats of {calls} steps. Ratio: how many times as fast as float32.",
        "Temporary GiB: memory that XLA allocates on top of arguments and results.",
    ]
    table: list[dict[str, Any]] = []
    for growing, sizes in points(options.small):
        rows = contest(
            {name: SIDES[name] for name in names}, Case("vit", sizes, options.layers == "scan"), repeats, calls
        )
        conclude(rows)
        about = {"growing": growing, "depth": sizes.layers, "tokens": sizes.tokens, "batch": sizes.batch}
        table += [{**about, "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
        save("growth", table, notes, options.json)
    publish("growth", COLUMNS, table, notes, options.json)
    if options.picture:
        print(save_growth(table, options.picture))


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer and two sides")
    asked.add_argument("--layers", choices=["unrolled", "scan"], default="scan")
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; by default {','.join(USUAL)}")
    asked.add_argument("--picture", type=Path, metavar="PATH", help="save the curves as a PNG")
    return asked.parse_args()


if __name__ == "__main__":
    main()
