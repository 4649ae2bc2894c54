"""Does a language model that trains in fp8 end where it ends in bfloat16?

    python -m benchmarks.curves [--small] [--sizes byte,gpt2] [--steps 600] [--seeds 3] [--sides bfloat16,fp8]

A byte-level transformer on the sources of Python's standard library, trained by AdamW from the same parameters on the
same text: in float32, in bfloat16, and with all matmuls of the blocks in fp8, with current and with delayed scales. All
of them, because the size rule of the policy `fp8` would leave most of these in bfloat16.

    byte    4 layers of width 256, 32 x 256 bytes per step
    gpt2    12 layers of width 768, as in GPT-2 small, 16 x 512 bytes per step

The loss is that on text that no step has seen, after training, in float32. For long runs, `--packages` takes the
packages of the library along, so that a model can't learn its text by heart.
"""

import functools
import math
import sysconfig
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxamp

from ._sides import choose
from ._tables import Column, number, parser, progress, publish, save

COLUMNS = (
    Column("model", "model"),
    Column("side", "side"),
    Column("steps", "steps"),
    Column("loss", "loss", number(4)),
    Column("between seeds", "spread", number(4)),
    Column("ratio to bfloat16", "vs_bfloat16", number(4)),
    Column("ms per step", "ms", number(1)),
)
EVERY = 50  # steps in one compiled loop, and between two points of a curve


class Size(NamedTuple):
    """A model, and how it is trained."""

    layers: int
    width: int
    heads: int
    length: int
    batch: int
    rate: float


SIZES = {"byte": Size(4, 256, 4, 256, 32, 1e-3), "gpt2": Size(12, 768, 12, 512, 16, 6e-4)}
TINY = Size(2, 32, 2, 16, 4, 1e-3)


def text(packages: bool) -> np.ndarray:
    """The bytes of the standard library's modules, or of all its files, always in the same order."""
    library = Path(sysconfig.get_path("stdlib"))
    installed = {"site-packages", "dist-packages"}
    files = sorted(file for file in library.glob("**/*.py" if packages else "*.py") if installed.isdisjoint(file.parts))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), np.uint8)


def init(size: Size, key: Any) -> dict[str, Any]:
    d, n = size.width, size.layers
    shapes = {"qkv": (n, d, 3 * d), "out": (n, d, d), "up": (n, d, 4 * d), "down": (n, 4 * d, d)}
    keys = iter(jax.random.split(key, 3 + len(shapes)))
    draw = lambda shape, std: std * jax.random.normal(next(keys), shape)
    blocks = {name: draw(shape, 1 / math.sqrt(shape[1])) for name, shape in shapes.items()}
    blocks |= {"out": blocks["out"] / math.sqrt(2 * n), "down": blocks["down"] / math.sqrt(2 * n)}
    tables = {"bytes": draw((256, d), 0.02), "places": draw((size.length, d), 0.02), "head": draw((d, 256), 0.02)}
    return tables | {"blocks": blocks | {"norms": jnp.ones((n, 2, d))}, "norm": jnp.ones(d)}


def normalized(x: Any, scale: Any) -> Any:
    x = x - jnp.mean(x, -1, keepdims=True)
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def loss_fn(size: Size, params: dict[str, Any], ids: Any) -> Any:
    def block(x: Any, w: dict[str, Any]) -> Any:
        split = lambda a: a.reshape(*a.shape[:2], size.heads, -1)
        q, k, v = map(split, jnp.split(normalized(x, w["norms"][0]) @ w["qkv"], 3, -1))
        x = x + jaxamp.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["out"]
        return x + jax.nn.gelu(normalized(x, w["norms"][1]) @ w["up"]) @ w["down"], None

    before, after = ids[:, :-1], ids[:, 1:]
    x, _ = lax.scan(block, params["bytes"][before] + params["places"], params["blocks"])
    logits = normalized(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, after).mean()


# -- the sides


def fp8(scaling: str) -> dict[str, Any]:
    """All matmuls of the blocks in fp8, however small."""
    table = dict(jaxamp.load_policy("fp8"))
    rule = jaxamp.use_formats(scaling=scaling, least_size=0, first_layer=False, last_layer=False, attention=False)
    return {"amp_policy": table | {lax.dot_general_p: rule}}


SIDES: dict[str, dict[str, Any] | None] = {
    "float32": None,
    "bfloat16": {"compute_dtype": jnp.bfloat16},
    "fp8": fp8("current"),
    "fp8 delayed": fp8("delayed"),
}


class Run(NamedTuple):
    """One training run."""

    curve: list[float]  # the loss of the training text, a point for each `EVERY` steps
    loss: float  # that of unseen text, at the end
    seconds: float  # per step


def train(size: Size, side: str, seed: int, steps: int, data: jax.Array) -> Run:
    plain, options = functools.partial(loss_fn, size), SIDES[side]
    fn = plain if options is None else jaxamp.amp(plain, **options)
    warm = optax.warmup_cosine_decay_schedule(0.0, size.rate, max(1, steps // 10), steps, 0.1 * size.rate)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(warm, b2=0.95, weight_decay=0.1))
    seen, unseen = data[: 9 * len(data) // 10], data[9 * len(data) // 10 :]

    def batch(key: Any, source: jax.Array) -> Any:
        starts = jax.random.randint(key, (size.batch, 1), 0, len(source) - size.length - 1)
        return source[starts + jnp.arange(size.length + 1)].astype(jnp.int32)

    def gradients(params: Any, scales: Any, ids: Any) -> Any:
        if scales is None:
            return scales, jax.value_and_grad(fn)(params, ids)
        return jaxamp.delayed_scale_value_and_grad(fn)(params, ids, delayed_scales=scales)

    def step(state: Any, key: Any) -> Any:
        params, before, scales = state
        scales, (value, grads) = gradients(params, scales, batch(key, seen))
        updates, after = optimizer.update(grads, before, params)
        return (optax.apply_updates(params, updates), after, scales), value

    params = init(size, jax.random.key(seed))
    first = jax.ShapeDtypeStruct((size.batch, size.length + 1), jnp.int32)
    scales = jaxamp.init_scales(fn)(params, first) if side == "fp8 delayed" else None
    keys = jax.random.split(jax.random.key(100 + seed), steps)
    state, loop = (params, optimizer.init(params), scales), compiled(lambda state, keys: lax.scan(step, state, keys))
    curve, seconds = [], []
    for i in range(0, steps, EVERY):
        start = time.perf_counter()
        state, values = loop(state, keys[i : i + EVERY])
        curve.append(float(jnp.mean(values)))
        seconds.append((time.perf_counter() - start) / len(values))
    test = jax.random.split(jax.random.key(7), 2 if steps < EVERY else 64)
    losses = lax.map(lambda key: plain(state[0], batch(key, unseen)), test)
    return Run(curve, float(jnp.mean(losses)), min(seconds))


def compiled(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Without Triton's matmuls, among which XLA would search for minutes in fp8."""
    on_gpu = jax.default_backend() == "gpu"
    return jax.jit(fn, compiler_options={"xla_gpu_enable_triton_gemm": False} if on_gpu else None)


def measure(
    name: str, size: Size, sides: Sequence[str], seeds: int, steps: int, data: jax.Array
) -> list[dict[str, Any]]:
    rows = []
    for side in sides:
        runs = []
        for seed in range(seeds):
            runs.append(train(size, side, seed, steps, data))
            progress(f"{name}, {side}, seed {seed}: {runs[-1].loss:.4f}, {1e3 * runs[-1].seconds:.1f} ms per step")
        losses = [run.loss for run in runs]
        rows.append(
            {"model": name, "side": side, "steps": steps, "loss": float(np.mean(losses)), "losses": losses}
            | {"spread": float(np.ptp(losses)), "ms": 1e3 * min(run.seconds for run in runs)}
            | {"curves": [run.curve for run in runs], "every": EVERY}
        )
    beside = next((row["loss"] for row in rows if row["side"] == "bfloat16"), None)
    return [row | ({"vs_bfloat16": row["loss"] / beside} if beside else {}) for row in rows]


def main() -> None:
    asked = parser(__doc__, "a tiny model, two steps")
    asked.add_argument("--sizes", default="byte,gpt2", help=f"some of {','.join(SIZES)}")
    asked.add_argument("--sides", default=",".join(SIDES), help=f"some of {','.join(SIDES)}")
    asked.add_argument("--steps", type=int, default=600)
    asked.add_argument("--seeds", type=int, default=3)
    asked.add_argument("--packages", action="store_true", help="train on the packages of the library too")
    options = asked.parse_args()
    data = jnp.asarray(text(options.packages))
    sides = choose(options.sides, SIDES, "side")
    notes = [
        "Loss: in nats per byte. Between seeds: the largest distance. The ratio is one of losses.",
        f"{len(data) / 1e6:.1f} million bytes of text, the last tenth of them unseen.",
    ]
    sizes = {"tiny": TINY} if options.small else {name: SIZES[name] for name in choose(options.sizes, SIZES, "size")}
    rows: list[dict[str, Any]] = []
    for name, size in sizes.items():
        seeds, steps = (1, 2) if options.small else (options.seeds, options.steps)
        rows += measure(name, size, sides, seeds, steps, data)
        save("curves", rows, notes, options.json)
    publish("curves", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
