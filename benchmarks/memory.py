"""How much memory does a training step take, and how large a batch fits?

    python -m benchmarks.memory [--small] [--network vit|gpt] [--layers unrolled|scan] [--sides a,b,c]
                               [--ahead --limit-gib 125.8]

Nothing runs: the step is compiled from shapes, and XLA says how much memory it would need. The largest batch is a
multiple of a sixteenth of the usual one; its arguments, results and temporaries stay below the limit that JAX may
allocate on the device. If the device reports no limit, set one with `--limit-gib`. With `--ahead`, it is compiled for
an H200 that need not be there.
"""

import argparse
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
from jax.sharding import Sharding, SingleDeviceSharding

from ._contest import Compiled, compile_step
from ._gpus import devices, plugin_is_here
from ._networks import SIZES, Sizes
from ._sides import SIDES, Case, ask_for_upstream, choose
from ._tables import Column, number, parser, progress, publish, significant
from ._timing import Failure, Unavailable, attempt

SMALL = Sizes(layers=1, width=32, heads=2, tokens=8, batch=16, classes=50)
USUAL = "float32", "ours", "ours-attention", "ours-attention-keep", "mpx", "hand-cudnn"
COLUMNS = (
    Column("network", "network"),
    Column("layers", "layers"),
    Column("side", "title"),
    Column("temporary GiB", "gib", significant),
    Column("ratio to float32", "vs_float32", number(2)),
    Column("largest batch", "largest"),
    Column("ratio to float32's", "largest_vs_float32", number(2, "x")),
    Column("compiled", "compiled", lambda n: f"{n} times"),
    Column("note", "note"),
)


def largest(needed: Callable[[int], int | None], limit: int, first: int, unit: int, probes: int) -> int:
    """The largest multiple of `unit` that was found to need at most `limit` bytes, in at most `probes` calls.

    `needed` grows almost linearly; None means that the batch does not fit. Each guess is the point where the line
    through the last two answers meets the limit, kept between the largest batch known to fit and the smallest known not
    to.
    """
    fits, too_large, points, guess = 0, None, [(0, 0)], first
    for _ in range(probes):
        bytes_ = needed(guess)
        if bytes_ is not None:
            points.append((guess, bytes_))
        if bytes_ is not None and bytes_ <= limit:
            fits = max(fits, guess)
        else:
            too_large = guess if too_large is None else min(too_large, guess)
        if too_large is not None and too_large - fits <= unit:
            break
        guess = _between(_meet(points[-2:], limit, unit) if bytes_ is not None else 0, fits, too_large, unit)
    return fits


def _meet(points: list[tuple[int, int]], limit: int, unit: int) -> int:
    """The point where the line through two points meets the limit, in whole units; 0 if the line does not rise."""
    (a, at_a), (b, at_b) = points
    if a == b or (at_b - at_a) / (b - a) <= 0:
        return 0
    return int(b + (limit - at_b) * (b - a) / (at_b - at_a)) // unit * unit


def _between(guess: int, fits: int, too_large: int | None, unit: int) -> int:
    """The guess if it tells something new, else the middle."""
    if too_large is None:
        return min(max(guess, fits + unit), 8 * fits)
    if fits < guess < too_large:
        return guess
    if guess == fits:
        return fits + unit
    return (fits + too_large) // 2 // unit * unit


class Question(NamedTuple):
    """What is asked of each side."""

    case: Case
    limit: int
    probes: int
    place: Sharding | None


def ask(name: str, question: Question) -> dict[str, Any]:
    """The row of a side: its temporaries at the usual batch, and the largest batch."""
    case, limit, probes, place = question
    seen: list[Compiled | None] = []

    def needed(batch: int) -> int | None:
        got = attempt(compile_step, SIDES[name], case._replace(sizes=case.sizes._replace(batch=batch)), place)
        if isinstance(got, Failure) and got.why != "out of memory":
            raise Unavailable(got.why)
        seen.append(None if isinstance(got, Failure) else got)
        return None if isinstance(got, Failure) else got.needed

    usual = case.sizes.batch
    found = largest(needed, limit, usual, max(usual // 16, 1), probes)
    gib = None if seen[0] is None else seen[0].temporary / 2**30  # the search starts at the usual batch
    return {"gib": gib, "largest": found, "compiled": len(seen)}


def row_of(name: str, question: Question) -> dict[str, Any]:
    got = attempt(ask, name, question)
    row = {"note": got.why} if isinstance(got, Failure) else got
    progress(f"{name}: {row}")
    return row


def compare(rows: dict[str, dict[str, Any]]) -> None:
    """Fill in the ratios to float32."""
    plain = rows.get("float32", {})
    for row in rows.values():
        if plain.get("gib") and row.get("gib"):
            row["vs_float32"] = row["gib"] / plain["gib"]
        if plain.get("largest") and row.get("largest") is not None:
            row["largest_vs_float32"] = row["largest"] / plain["largest"]


def main() -> None:
    options = arguments()
    sizes = SMALL if options.small else SIZES[options.network]
    limit = limit_of(options)
    case = Case(options.network, sizes, options.layers == "scan")
    if options.ahead and not plugin_is_here():
        raise SystemExit('--ahead needs JAX\'s CUDA plugin, which is not here. Install it: pip install "jax[cuda12]".')
    place = SingleDeviceSharding(devices(1)[0]) if options.ahead else None
    question = Question(case, limit, 2 if options.small else 6, place)
    names = choose(options.sides)
    with ThreadPoolExecutor(max(os.cpu_count() // 3, 1)) as pool:  # nothing is timed, and most of the work is compiling
        rows = dict(zip(names, pool.map(lambda name: row_of(name, question), names), strict=True))
    compare(rows)
    about = {"network": options.network, "layers": options.layers, "sizes": sizes._asdict()}
    table = [{**about, "side": name, "title": SIDES[name].title, **row} for name, row in rows.items()]
    notes = [f"Temporary GiB at batch {sizes.batch}; limit {limit / 2**30:.4g} GiB, including arguments and results."]
    notes += ["Compiled for an NVIDIA H200 without having it, with cuBLAS for all matmuls."] if options.ahead else []
    publish("memory", COLUMNS, table, notes, options.json)


def limit_of(options: argparse.Namespace) -> int:
    """The limit from the options, else from the device; for a small run, 2 MiB."""
    known = (jax.devices()[0].memory_stats() or {}).get("bytes_limit")
    if options.limit_gib:
        return int(options.limit_gib * 2**30)
    if known is None and not options.small:
        raise SystemExit("This device does not report a memory limit. Set one with --limit-gib.")
    return known if known and not options.small else 2 * 2**20


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "one thin layer and two sides")
    asked.add_argument("--network", choices=["vit", "gpt"], default="vit")
    asked.add_argument("--layers", choices=["unrolled", "scan"], default="scan")
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; by default {','.join(USUAL)}")
    asked.add_argument("--limit-gib", type=float)
    asked.add_argument("--ahead", action="store_true", help="for an H200 that need not be there")
    ask_for_upstream(asked)
    options = asked.parse_args()
    options.sides = options.sides or ",".join(USUAL[:2] if options.small else USUAL)
    return options


if __name__ == "__main__":
    main()
