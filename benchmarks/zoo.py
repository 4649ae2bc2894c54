"""How does `amp` compare with a plain cast, MPX and PyTorch on many kinds of networks?

    python -m benchmarks.zoo [--small] [--nets resnet,unet] [--sides float32,cast,ours] [--repeats 5]

The loss and the float32 gradients of each network, in one compiled step without an optimizer:

    resnet         ResNet-50 of Haiku, channels last, batch 128 of 224 x 224
    convnext       ConvNeXt-T, depthwise filters, channels last, batch 64 of 224 x 224
    unet           a U-Net of Equinox with GroupNorm and attention, channels first, batch 64 of 64 x 64
    bert           6 layers of BERT-base by Haiku, with dropout, 16 x 512 tokens
    decoder        6 layers like Llama's of width 2048, 4 x 2048 tokens; decoder-scan has its layers in a `scan`
    experts        4 layers of 8 experts by `ragged_dot`, 16384 tokens
    lstm           two LSTMs of Haiku of width 1024, 256 steps, batch 64
    state-space    a selective state space by `associative_scan`, 8 x 1024 steps, width 512, 16 states
    audio          an autoencoder of 1-D convolutions over 16 x 65536 samples
    messages       message passing along 200,000 edges
    laplacian      the Laplacian of an MLP at 4096 points

`--nets all` and `--sides all` run everything. The JAX sides take turns. PyTorch runs before them in a separate process.
With `--json`, the rows are saved after each network. `write_results` merges the files of several runs.
"""

import argparse
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

import jaxamp

from . import _torch
from ._contest import Training, conclude, contest, losses
from ._sides import LOW, Side, Step, choose, mpx_and_scaling
from ._sides import SIDES as TRAINING_SIDES
from ._tables import Column, number, parser, percent, progress, publish, save, significant, text
from ._timing import Failure, attempt
from ._zoo import NETWORKS, Net

CAST = "cast"
IN_TORCH = "resnet", "unet", "bert", "decoder"
USUAL = tuple(name for name in NETWORKS if name != "decoder-scan")
SMALL = "decoder", "lstm", "messages", "laplacian"  # one of each family that compiles fast
STEPS = 4  # per repeat
DRAWS = 4  # of weights and inputs, for the error: that of a U-Net differs by a factor of two between them
COLUMNS = (
    Column("network", "network"),
    Column("side", "title"),
    Column("ms", "ms", significant),
    Column("spread", "spread", percent),
    Column("ratio to the cast", "vs_cast", number(2, "x")),
    Column("temporary GiB", "gib", significant),
    Column("gradient error", "error", "{:.1e}".format),
    Column("trace s", "lower_s", number(1)),
    Column("compile s", "compile_s", number(1)),
    Column("note", "note"),
)
NOTES = (
    "Plain cast: parameters and inputs cast to bfloat16 by `tree.map`, and the loss to float32.",
    "Ratios: how many times as fast as the plain cast. Each repeat is divided by its neighbour in time; the median is"
    " shown.",
    "Temporary GiB: memory on top of arguments and results.",
    "Gradient error: the norm of the difference from the float32 gradient, divided by that gradient's norm, over all"
    f" parameters, on average over {DRAWS} draws of weights and inputs. The reference is computed apart, with matmul"
    " precision `highest`; the float32 side runs as users run it, in TF32 on a GPU. PyTorch is compared with its own"
    " float32, in one draw, and not compared where its dropout differs.",
    "Trace s: tracing and lowering. Compile s: XLA alone, including autotuning of kernels that no earlier side needed."
    " For PyTorch: the first call.",
    "PyTorch runs networks of the same layers and sizes, images with channels last, in a separate process before the"
    " others.",
)


# -- the sides


class Task(NamedTuple):
    """A network to measure, under the title that tables and progress show."""

    title: str
    draws: Sequence[Net]  # the same program with several weights and inputs: the first is timed, the error is of all

    @property
    def net(self) -> Net:
        return self.draws[0]


def step(net: Net, value_and_grad: Callable[..., tuple[Any, Any]]) -> Step:
    """A step whose state is its gradients, so that the last ones can be read."""

    def run(grads: Any, params: Any, *inputs: Any) -> Any:
        value, grads = value_and_grad(params, *inputs)
        return jaxamp.cast_floating(grads, jnp.float32), value

    return Step(run, lambda: (jax.tree.map(jnp.zeros_like, net.params), net.params, *net.inputs))


def float32(task: Task) -> Step:
    return step(task.net, jax.value_and_grad(task.net.loss))


def cast(task: Task) -> Step:
    def loss(*args: Any) -> Any:
        return task.net.loss(*jaxamp.cast_floating(args, LOW)).astype(jnp.float32)

    return step(task.net, jax.value_and_grad(loss))


def mpx(task: Task) -> Step:
    mpx, scaling = mpx_and_scaling()

    def value_and_grad(*args: Any) -> tuple[Any, Any]:
        value, _, _, grads = mpx.filter_value_and_grad(task.net.loss, scaling)(*args)
        return value, grads

    return step(task.net, value_and_grad)


def ours(task: Task, **options: Any) -> Step:
    return step(task.net, jax.value_and_grad(jaxamp.amp(task.net.loss, compute_dtype=LOW, **options)))


SIDES = {
    "float32": Side("float32", float32),
    CAST: Side("plain cast", cast),
    "mpx": Side(TRAINING_SIDES["mpx"].title, mpx),
    "ours": Side("ours", ours),
    "ours-fast": Side("ours, fast", functools.partial(ours, amp_policy="fast")),
    **{name: TRAINING_SIDES[name] for name in ("torch-compile", "torch-compile-sdpa")},
}
USUAL_SIDES = tuple(name for name in SIDES if name != "torch-compile-sdpa")


# -- the error


def references(task: Task) -> list[Any]:
    """The gradients in float32, without TF32, by any kernels: to find the fastest takes minutes, and nobody waits."""
    with jax.default_matmul_precision("highest"):
        lowered = jax.jit(jax.grad(task.net.loss)).lower(task.net.params, *task.net.inputs)
    compiled = lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})
    return [jax.block_until_ready(compiled(net.params, *net.inputs)) for net in task.draws]


@jax.jit
def relative_error(grads: Any, expected: Any) -> Any:
    """The norm of the difference over the norm of what is expected."""
    pairs = list(zip(jax.tree.leaves(grads), jax.tree.leaves(expected), strict=True))
    wrong, whole = sum(jnp.sum((a - b) ** 2) for a, b in pairs), sum(jnp.sum(b**2) for _, b in pairs)
    return jnp.sqrt(wrong / whole)


def read(training: Training, draws: Sequence[Net], expected: Sequence[Any]) -> dict[str, Any]:
    """The losses of a side that has run, and the error of its gradients, on average over the draws."""
    errors = []
    for net, wanted in zip(draws, expected, strict=True):
        training.state, _ = training.compiled.call(training.state, net.params, *net.inputs)
        errors.append(float(relative_error(training.state, wanted)))
    return {**losses(training), "errors": errors, **judged(sum(errors) / len(errors))}


def judged(error: float) -> dict[str, Any]:
    """The error, with a complaint if a gradient of zeros would be as close."""
    if not math.isfinite(error):
        return {"note": "WRONG: the gradient is not finite"}
    return {"error": error, "note": "WRONG: as far from float32 as zeros" if error >= 1 else None}


# -- one network, and all of them


def measure(name: str, sides: Sequence[str], torch: dict[str, Any], small: bool, repeats: int, calls: int) -> Any:
    """The rows of one network."""
    draws = attempt(lambda: [NETWORKS[name].build(small, seed) for seed in range(2 if small else DRAWS)])
    if isinstance(draws, Failure):
        rows = {side: {"note": draws.why} for side in sides}
    else:
        rows = compete(Task(NETWORKS[name].title, draws), sides, repeats, calls)
    rows |= {side: torch_row(got) for side, got in torch.items()}
    notes = {side: row.get("note") for side, row in rows.items()}
    conclude(rows, {"vs_cast": CAST}, reference="")
    return [
        {"net": name, "network": NETWORKS[name].title, "side": side, "title": SIDES[side].title, **row}
        | {"note": notes[side]}
        for side, row in rows.items()
    ]


def compete(task: Task, sides: Sequence[str], repeats: int, calls: int) -> dict[str, dict[str, Any]]:
    expected = attempt(references, task)
    if isinstance(expected, Failure):
        progress(f"{task.title}: no reference gradient: {expected.why}")
    how = losses if isinstance(expected, Failure) else functools.partial(read, draws=task.draws, expected=expected)
    return contest({side: SIDES[side] for side in sides}, task, repeats, calls, how)


def torch_row(got: dict[str, Any]) -> dict[str, Any]:
    row = _torch.torch_row(got)
    return row | judged(got["error"]) if got.get("error") is not None else row


def summary(rows: Sequence[dict[str, Any]]) -> list[str]:
    """The geometric mean of each side's speed over the networks on which it and the cast ran."""
    found: dict[str, list[float]] = {}
    for row in rows:
        if row.get("vs_cast") and row["side"] != CAST:
            found.setdefault(row["title"], []).append(math.log(row["vs_cast"]))
    means = [f"{title} {math.exp(sum(x) / len(x)):.2f}x (of {len(x)})" for title, x in found.items()]
    if not means:
        return []
    return [f"Geometric mean of the ratio to the cast, and over how many networks: {', '.join(means)}."]


def main() -> None:
    options = arguments()
    repeats, calls = (2, 1) if options.small else (options.repeats, STEPS)
    in_torch = [side for side in options.sides if SIDES[side].make is None]
    in_jax = [side for side in options.sides if SIDES[side].make is not None]
    torch = {}  # first, because JAX keeps the device's memory once it has it
    for name in options.nets:
        if name in IN_TORCH:
            asked = _torch.Asked(name, (int(options.small),), repeats, calls)
            torch[name] = _torch.ask(in_torch, asked, process="_torch_zoo")
            progress(f"{name}: {torch[name]}")

    table: list[dict[str, Any]] = []
    notes = [*NOTES, f"{repeats} repeats of {calls} steps."]
    for name in options.nets:
        rows = measure(name, in_jax, torch.get(name, {}), options.small, repeats, calls)
        table += rows
        progress(text(COLUMNS, rows))
        save("zoo", table, notes, options.json)
        jax.clear_caches()
    publish("zoo", COLUMNS, table, [*summary(table), *notes], None)
    save("zoo", table, notes, options.json)


def arguments() -> argparse.Namespace:
    asked = parser(__doc__, "tiny networks, few of them unless --nets names others")
    asked.add_argument("--nets", help=f"some of {','.join(NETWORKS)}; or all")
    asked.add_argument("--sides", help=f"some of {','.join(SIDES)}; or all")
    asked.add_argument("--repeats", type=int, default=5)
    options = asked.parse_args()
    options.nets = _chosen(options.nets, SMALL if options.small else USUAL, NETWORKS, "network")
    options.sides = _chosen(options.sides, USUAL_SIDES, SIDES, "side")
    return options


def _chosen(asked: str | None, usual: Sequence[str], among: dict[str, Any], kind: str) -> Sequence[str]:
    if asked == "all":
        return list(among)
    return choose(asked, among, kind) if asked else usual


if __name__ == "__main__":
    main()
