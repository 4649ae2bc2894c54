"""How much time and memory does an AdamW step take, compressed and not, and how many kernels?

    python -m benchmarks.optimizer [--small] [--trees "4096 x 12288,GPT-2 small"] [--grads float32,bfloat16]

One step on given gradients, with donated parameters and state. Sides: ours; ours with loss scaling, where the step
unscales the gradients, checks that they are finite, and skips the update if not; `optax.adamw` in float32;
flashoptim-jax with its Pallas kernels; PyTorch's fused float32 AdamW and FlashAdamW, in a separate process. The floor
is the time that the device takes to copy the bytes that a side must move: parameters and state twice, gradients once.
"""

import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxamp import optim

from ._tables import Column, number, parser, percent, progress, publish, save, significant
from ._timing import Failure, Times, Unavailable, attempt, figures, race, seconds
from ._torch_optimizer import ask
from ._trees import SMALL, TREES, floor_bytes
from ._trees import number as numbers
from .kernels import traced

COLUMNS = (
    Column("tree", "tree"),
    Column("gradients", "grads"),
    Column("side", "title"),
    Column("ms", "ms", significant),
    Column("spread", "spread", percent),
    Column("on the device ms", "busy", significant),
    Column("times the floor", "floor", number(2)),
    Column("ratio to optax", "vs_optax", number(2, "x")),
    Column("ratio to Pallas", "vs_pallas", number(2, "x")),
    Column("kernels", "kernels"),
    Column("bytes/parameter", "bytes", number(3)),
    Column("temporary bytes/parameter", "temporary", number(3)),
    Column("note", "note"),
)
NOTES = (
    "Ms: a step called from Python, which costs the host some microseconds per array. In a training step the host runs"
    " ahead, and the time of the kernels on the device counts, taken from a trace. PyTorch has only the first.",
    "Ratio: how many times as fast on the device.",
    "Bytes: parameters and state, held between steps. Temporary: allocated during a step on top of these.",
    "The floor: the bytes that a side must move, divided by the bandwidth of a copy on this device.",
)
CHECKED = (256, 1024), (2048, 8192)  # small kernels have one number per thread, others four
Tree = dict[str, tuple[int, ...]]


class Side:
    """A compiled step that keeps parameters and state. A call runs `calls` steps and returns the seconds per step."""

    def __init__(self, make: Callable[[Tree], tuple[Any, Any, Any]], tree: Tree, grads: Any, calls: int):
        step, params, state = make(tree)
        self.calls, self.held, self.grads = calls, (params, state), grads
        lowered = jax.jit(step, donate_argnums=(0, 1)).lower(params, state, grads)
        self.program = lowered.compile()

    def once(self) -> Any:
        self.held = self.program(*self.held, self.grads)
        return self.held

    def __call__(self) -> float:
        return seconds(self.once, self.calls)

    def busy(self) -> float | None:
        """Milliseconds that the kernels of a step take; None if the device has no trace of them."""
        found = [ms for _, ms in traced(self)]
        return sum(found) / self.calls if found else None

    def about(self, tree: Tree) -> dict[str, Any]:
        params, state, grads = (sum(x.nbytes for x in jax.tree.leaves(t)) for t in (*self.held, self.grads))
        return {
            "bytes": (params + state) / numbers(tree),
            "temporary": self.program.memory_analysis().temp_size_in_bytes / numbers(tree),
            "kernels": kernels(self.program.as_text()),
            "least": floor_bytes(params, state, grads),
        }


def kernels(text: str) -> int:
    """The number of kernels that a compiled program launches, counted in its entry computation."""
    entry = text[text.index("ENTRY") :]
    return len(re.findall(r" = \S.* (?:fusion|copy|custom-call|reduce|concatenate)\(", entry))


def drawn(tree: Tree, dtype: Any) -> dict[str, jax.Array]:
    return {name: _draw(i, shape, jnp.dtype(dtype)) for i, (name, shape) in enumerate(tree.items())}


@functools.partial(jax.jit, static_argnums=(1, 2))
def _draw(seed: Any, shape: tuple[int, ...], dtype: Any) -> jax.Array:
    return (0.02 * jax.random.normal(jax.random.key(seed), shape)).astype(dtype)


def ours(tree: Tree) -> tuple[Any, Any, Any]:
    optimizer, params = optim.flash_adamw(1e-4), drawn(tree, jnp.bfloat16)
    return optimizer.step, params, optimizer.init(params)


def ours_scaled(tree: Tree) -> tuple[Any, Any, Any]:
    optimizer, params = optim.flash_adamw(1e-4), drawn(tree, jnp.bfloat16)

    def step(params: Any, state: Any, grads: Any) -> Any:
        return optimizer.step_if_finite(params, state, grads, scale=2.0**-7)[:2]

    return step, params, optimizer.init(params)


def optax_float32(tree: Tree) -> tuple[Any, Any, Any]:
    tx, params = optax.adamw(1e-4), drawn(tree, jnp.float32)

    def step(params: Any, state: Any, grads: Any) -> Any:
        grads = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    return step, params, tx.init(params)


def pallas(tree: Tree) -> tuple[Any, Any, Any]:
    if jax.devices()[0].platform != "gpu":
        raise Unavailable("needs a GPU")
    try:
        import flashoptim_jax
    except ImportError:
        raise Unavailable("needs flashoptim-jax") from None
    optimizer, params = flashoptim_jax.flash_adamw(1e-4), drawn(tree, jnp.bfloat16)
    return optimizer.step, params, optimizer.init(params)


SIDES = {
    "ours": ("ours", ours),
    "ours-scaled": ("ours, loss scaling", ours_scaled),
    "optax": ("optax.adamw, float32", optax_float32),
    "pallas": ("flashoptim-jax, Pallas", pallas),
}


def bandwidth(size: int) -> float:
    """Bytes per second that the device reads and writes while it copies `size` bytes."""
    x = jnp.zeros(size // 4, jnp.float32)
    copy = jax.jit(lambda x: x + 1.0)
    (times,) = race({"copy": lambda: seconds(lambda: copy(x), 10)}, 5).values()
    if isinstance(times, Failure):
        raise Unavailable(times.why)
    return 2 * x.nbytes / times.median


def check(shape: tuple[int, int], steps: int = 3) -> str:
    """Compare compiled steps with the same steps run eagerly: compilers have dropped the correction before."""
    grads = [drawn({"w": shape}, jnp.float32) for _ in range(steps)]
    ends = []
    for compiled in (True, False):
        step, params, state = ours({"w": shape})
        step = jax.jit(step) if compiled else step
        for g in grads:
            params, state = step(params, state, g)
        ends.append({"parameters": params, **state._asdict()})
    differ = {
        name: _share(jax.tree.map(jnp.not_equal, a, ends[1][name])) for name, a in ends[0].items() if name != "count"
    }
    corrections = _share(jax.tree.map(lambda x: x != 0, ends[0]["correction"]))
    if corrections < 0.9 or max(differ.values()) > 0.01:
        raise SystemExit(f"WRONG, {shape}: {corrections:.2f} of corrections are nonzero; differ from eager: {differ}")
    apart = ", ".join(f"{name} {share:.1e}" for name, share in differ.items())
    return f"Checked, {shape}: {corrections:.2f} of corrections are nonzero; shares that differ from eager: {apart}."


def _share(tree: Any) -> float:
    (leaf,) = jax.tree.leaves(tree)
    return float(jnp.mean(leaf.astype(jnp.float32)))


def measure(name: str, tree: Tree, grad_dtype: str, speed: float, repeats: int, calls: int) -> list[dict[str, Any]]:
    torch = ask(tree, grad_dtype, repeats, calls)  # before JAX takes the device's memory
    grads = drawn(tree, grad_dtype)
    rows: dict[str, dict[str, Any]] = {}
    sides: dict[str, Any] = {}
    for key, (_, make) in SIDES.items():
        side = attempt(Side, make, tree, grads, calls)
        if isinstance(side, Failure):
            rows[key] = {"note": side.why}
        else:
            sides[key], rows[key] = side, side.about(tree)
    raced: dict[str, Times | Failure] = dict(race(sides, repeats))
    for key, side in sides.items():
        if not isinstance(raced[key], Failure):
            rows[key]["busy"] = side.busy()
    for key, row in torch.items():
        raced[key] = Failure(row["why"]) if "why" in row else Times(row["seconds"])
        rows[key] = {k: v for k, v in row.items() if k in ("bytes", "least")}
    for key, row in figures(raced, {}).items():
        rows[key] |= row
    compare(rows, speed)
    about = {"tree": name, "grads": grad_dtype}
    titles = {key: title for key, (title, _) in SIDES.items()}
    return [{**about, "side": key, "title": titles.get(key, key), **row} for key, row in rows.items()]


def compare(rows: dict[str, dict[str, Any]], speed: float) -> None:
    """Fill in the ratios: of the times on the device, or without a trace, of the times seen from Python."""
    taken = {key: row.get("busy") or row["ms"] for key, row in rows.items() if row.get("ms")}
    for key, ms in taken.items():
        rows[key]["floor"] = ms / 1e3 / (rows[key]["least"] / speed)
        rows[key] |= {f"vs_{other}": taken[other] / ms for other in ("optax", "pallas") if other in taken}


def main() -> None:
    asked = parser(__doc__, "two small trees")
    asked.add_argument("--trees", default=",".join(TREES), help="names of trees, separated by commas")
    asked.add_argument("--grads", default="float32,bfloat16", help="dtypes of the gradients")
    options = asked.parse_args()
    trees = SMALL if options.small else {name: TREES[name] for name in options.trees.split(",")}
    dtypes = ["bfloat16"] if options.small else options.grads.split(",")
    repeats, calls = (2, 2) if options.small else (10, 10)
    checked = [check(shape) for shape in CHECKED[: 1 if options.small else None]]
    speed = bandwidth(2**16 if options.small else 2**30)
    notes = [*NOTES, *checked, f"Copy: {speed / 1e12:.3g} TB/s. {repeats} repeats of {calls} calls."]
    rows: list[dict[str, Any]] = []
    for name, tree in trees.items():
        for dtype in dtypes:
            progress(f"{name}, {dtype} gradients")
            rows += measure(name, tree, dtype, speed, repeats, calls)
            save("optimizer", rows, notes, options.json)
    publish("optimizer", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
