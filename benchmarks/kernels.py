"""Where does the time of a training step go, kernel by kernel?

    python -m benchmarks.kernels [--small] [--network vit|gpt] [--layers unrolled|scan] [--sides ours,torch-compile]

Traces two steps on the device and groups the kernels by purpose: XLA names a kernel after the operations in it, and so
does PyTorch's compiler. A CPU has no kernels to trace.
"""

import re
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax

from . import _torch
from ._contest import prepare
from ._networks import SIZES
from ._sides import SIDES, Case, ask_for_upstream, choose
from ._tables import Column, number, parser, percent, progress, publish
from ._timing import Failure, Unavailable, attempt
from .train_step import SMALL

STEPS = 2
GROUPS = {  # the first match counts
    "attention": "flash|fmha|sdpa",
    "convolutions": "cudnn|fprop|dgrad|wgrad|implicit|convolve|winograd",
    "matmuls": "nvjet|gemm|cutlass|cublas|splitk|_dot",
    "zeros": "^loop_broadcast|^memset",
    "copies": "^memcpy|dynamic_update_slice",
    "transposes": "transpose|concatenate",
    "sums and maxima": "reduce",
    "softmaxes and norms in one kernel": "^fusion",
    "element by element": "^loop|^wrapped|^input|^copy|elementwise|multi_tensor",
    "other": "",
}
COLUMNS = (
    Column("network", "network"),
    Column("layers", "layers"),
    Column("side", "title"),
    Column("kernels", "group"),
    Column("ms", "ms", number(2)),
    Column("share", "share", percent),
    Column("ratio to the first side", "ratio", number(2, "x")),
    Column("launches", "launches", number(0)),
    Column("note", "note"),
)
NOTES = (
    "Kernels overlap little: their sum is the time of a step, except for the gaps between them.",
    "Convolutions: cuDNN's kernels that are not attention, and what they need, such as changes of layout.",
    "Zeros and copies: in a scan, these fill the buffers that the backward pass reads.",
    "Ratio: milliseconds divided by those of the first side.",
)


_OF_INDUCTOR = {"poi": "element by element", "tem": "matmuls"}  # `triton_poi_fused_...`, and so on


def group_of(kernel: str) -> str:
    by_inductor = re.match(r"triton_(poi|per|red|tem)_", kernel)
    if by_inductor:
        is_norm = re.search("norm|softmax", kernel) is not None
        whole = "softmaxes and norms in one kernel" if is_norm else "sums and maxima"
        return _OF_INDUCTOR.get(by_inductor[1], whole)
    return next(group for group, names in GROUPS.items() if re.search(names, kernel.lower()))


def traced(fn: Callable[[], Any]) -> Iterator[tuple[str, float]]:
    """Name and milliseconds of each kernel that a call launches."""
    folder = tempfile.mkdtemp()
    try:
        with jax.profiler.trace(folder):
            jax.block_until_ready(fn())
        (path,) = Path(folder).rglob("*.xplane.pb")
        for plane in jax.profiler.ProfileData.from_file(str(path)).planes:
            lines = [line for line in plane.lines if line.name.startswith("Stream")]
            yield from ((e.name, e.duration_ns / 1e6) for line in lines if "GPU" in plane.name for e in line.events)
    finally:
        shutil.rmtree(folder)


def tally(kernels: Iterable[tuple[str, float]], steps: int) -> list[dict[str, Any]]:
    """One row for each group, longest first, for one step."""
    times: dict[str, float] = defaultdict(float)
    launches: Counter[str] = Counter()
    for name, ms in kernels:
        times[group_of(name)] += ms / steps
        launches[group_of(name)] += 1
    total = sum(times.values())
    rows = [
        {"group": group, "ms": ms, "share": ms / total, "launches": launches[group] / steps}
        for group, ms in sorted(times.items(), key=lambda item: -item[1])
    ]
    return [{"group": "all", "ms": total, "launches": sum(launches.values()) / steps}, *rows]


def measure(name: str, case: Case) -> list[dict[str, Any]]:
    if jax.default_backend() != "gpu":
        raise Unavailable("needs a GPU")
    training, _ = prepare(SIDES[name], case, STEPS)
    training()
    return tally(traced(training), STEPS)


def of_torch(got: dict[str, Any]) -> list[dict[str, Any]]:
    if "kernels" not in got:
        raise Unavailable(got.get("why", "no trace"))
    return tally(got["kernels"], STEPS)


def main() -> None:
    asked = parser(__doc__, "one thin layer of a ViT")
    asked.add_argument("--network", choices=["vit", "gpt"], default="vit")
    asked.add_argument("--layers", choices=["unrolled", "scan"], default="scan")
    asked.add_argument("--sides", type=choose, default="ours,ours-attention,mpx")
    ask_for_upstream(asked)
    options = asked.parse_args()
    case = Case(options.network, SMALL if options.small else SIZES[options.network], options.layers == "scan")
    in_torch = [name for name in options.sides if SIDES[name].make is None]
    question = _torch.Asked(case.network, case.sizes, repeats=1, calls=STEPS)
    torch = _torch.ask(in_torch, question, process="_torch_kernels")  # first, because JAX keeps the device's memory
    rows: list[dict[str, Any]] = []
    for name in options.sides:
        progress(f"{options.network}, {options.layers}, {name}")
        found = attempt(of_torch, torch[name]) if name in torch else attempt(measure, name, case)
        about = {"network": options.network, "layers": options.layers, "side": name, "title": SIDES[name].title}
        rows += [{**about, **row} for row in ([{"note": found.why}] if isinstance(found, Failure) else found)]
    first = {row["group"]: row["ms"] for row in rows if row["side"] == options.sides[0] and "ms" in row}
    rows = [row | {"ratio": row["ms"] / first[row["group"]]} if row.get("group") in first else row for row in rows]
    publish("kernels", COLUMNS, rows, NOTES, options.json)


if __name__ == "__main__":
    main()
