"""How many bytes does a training step of a large decoder send between devices, and how long does that take?

    python -m benchmarks.communication [--small] [--models "8B,70B"] [--devices 8,64]

Nothing runs: the step is compiled from shapes alone, for H200s that need not be there, and what it sends is read from
the program. Parameters and gradients are split over all devices, as in FSDP; a layer gathers its parameters, and
gathers them again in the backward pass (`jax.checkpoint`). Sides: float32, a plain cast of the parameters to bfloat16,
`amp`, `amp` with gradients that are summed in bfloat16, and `amp` under the policy `fp8`.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp

from ._gpus import compile_for, devices, plugin_is_here
from ._tables import Column, number, parser, progress, publish, save


class Decoder(NamedTuple):
    """The sizes of a decoder in the style of Llama 3."""

    layers: int
    width: int
    hidden: int
    key_width: int  # of the keys of all heads, and of the values
    vocabulary: int
    heads: int
    tokens: int  # of a sequence; each device has one


MODELS = {
    "8B": Decoder(32, 4096, 14336, 1024, 128256, 32, 4096),
    "70B": Decoder(80, 8192, 28672, 1024, 128256, 64, 4096),
}
SMALL = {"small": Decoder(2, 64, 128, 32, 256, 4, 16)}
BANDWIDTHS = {"NVLink": 450e9, "400 Gb/s": 50e9}  # bytes per second and device, each way

COLUMNS = (
    Column("model", "model"),
    Column("devices", "devices"),
    Column("side", "title"),
    Column("gathered GB", "gathered", number(2)),
    Column("in", "gathered_in"),
    Column("summed GB", "summed", number(2)),
    Column("in", "summed_in"),
    *(Column(f"s, {name}", name, number(3)) for name in BANDWIDTHS),
    Column("ratio to float32", "ratio", number(2, "x")),
)
NOTES = [
    "Gathered, summed: bytes of the whole arrays, for each device and step.",
    "s: the time that they take, if nothing else is done meanwhile, at "
    + " and ".join(f"{speed / 1e9:g} GB/s ({name})" for name, speed in BANDWIDTHS.items())
    + " for each device. Of n devices, each sends and receives (n - 1) / n of an array to gather it or to sum it into "
    "parts, and twice that to have the sum everywhere.",
    "Ratio: how many times less time.",
]


def shapes_of(model: Decoder) -> dict[str, tuple[int, ...]]:
    """The parameters, those of all layers stacked."""
    d, f, k = model.width, model.hidden, model.key_width
    layer = {"q": (d, d), "k": (d, k), "v": (d, k), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    layers = {name: (model.layers, *shape) for name, shape in layer.items()}
    norms = dict.fromkeys(("norm1", "norm2"), (model.layers, d))
    return layers | norms | {"tokens": (model.vocabulary, d), "head": (d, model.vocabulary), "norm": (d,)}


def normalized(x: jax.Array, scale: jax.Array) -> jax.Array:
    wide = x.astype(jnp.float32)
    return (wide * lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(x.dtype) * scale


def loss(model: Decoder, mesh: Mesh, params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
    gathered = lambda w: lax.with_sharding_constraint(w, NamedSharding(mesh, PartitionSpec()))
    params = dict(params)
    head, last, table = (params.pop(name) for name in ("head", "norm", "tokens"))

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, model.width // model.heads)

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: gathered(p) if p.ndim > 1 else p for name, p in w.items()}
        h = normalized(x, w["norm1"])
        repeats = model.width // model.key_width
        q, k, v = (split(h @ w[name]) for name in "qkv")
        k, v = (jnp.repeat(a, repeats, axis=2) for a in (k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = x + attended @ w["o"]
        h = normalized(x, w["norm2"])
        return x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"], None

    x, _ = lax.scan(layer, gathered(table)[ids], params)
    logits = (normalized(x, last) @ gathered(head)).astype(jnp.float32)
    return -jnp.mean(jnp.take_along_axis(jax.nn.log_softmax(logits), ids[..., None], -1))


def policy(**words: Any) -> Any:
    return {**jaxamp.load_policy("default"), jaxamp.COMMUNICATION: jaxamp.Communication(**words)}


def cast(fn: Callable[..., Any]) -> Callable[..., Any]:
    return lambda params, ids: fn(jax.tree.map(lambda p: p.astype(jnp.bfloat16), params), ids)


AMP = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)
SIDES: dict[str, tuple[str, Callable[..., Any]]] = {
    "float32": ("float32", lambda fn: fn),
    "cast": ("a cast of the parameters", cast),
    "ours": ("ours", AMP),
    "ours low": ("ours, reduce = compute", functools.partial(AMP, amp_policy=policy(reduce="compute"))),
    "ours fp8": ("ours, fp8", functools.partial(AMP, amp_policy="fp8")),
}


def sent(model: Decoder, over: Any, side: Callable[..., Any]) -> list[Any]:
    mesh = Mesh(over, ("d",))
    placed = lambda shape, dtype, *spec: jax.ShapeDtypeStruct(
        shape, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
    )
    split = lambda shape: (None, "d") if len(shape) > 2 else ("d",) if len(shape) == 2 and shape[0] > 128 else ()
    params = {name: placed(shape, jnp.float32, *split(shape)) for name, shape in shapes_of(model).items()}
    ids = placed((len(over), model.tokens), jnp.int32, "d")
    gradient = jax.grad(side(functools.partial(loss, model, mesh)))
    shardings = jax.tree.map(lambda p: p.sharding, params)
    return jaxamp.compiled_collectives(compile_for(gradient, params, ids, out_shardings=shardings))


def measure(name: str, model: Decoder, over: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side, (title, transform) in SIDES.items():
        progress(f"{name}, {len(over)} devices, {title}")
        found = sent(model, over, transform)
        sums = [row for row in found if row.kind in ("all-reduce", "reduce-scatter")]
        moves = [row for row in found if row not in sums]
        share = (len(over) - 1) / len(over)
        wire = share * sum(row.total * (2 if row.kind == "all-reduce" else 1) for row in found)
        row = {"model": name, "devices": len(over), "side": side, "title": title}
        row |= {"gathered": _gigabytes(moves), "gathered_in": _dtypes(moves)}
        row |= {"summed": _gigabytes(sums), "summed_in": _dtypes(sums)}
        row |= {bandwidth: wire / speed for bandwidth, speed in BANDWIDTHS.items()}
        rows.append(row | {"ratio": (rows[0] if rows else row)["NVLink"] / row["NVLink"] if row["NVLink"] else None})
    return rows


def _gigabytes(rows: list[Any]) -> float:
    return sum(row.total for row in rows) / 1e9


def _dtypes(rows: list[Any]) -> str:
    """The dtypes that make up more than a hundredth of the bytes."""
    sizes: dict[str, int] = {}
    for row in rows:
        sizes[row.dtype] = sizes.get(row.dtype, 0) + row.total
    return ", ".join(dtype for dtype, size in sizes.items() if 100 * size > sum(sizes.values()))


def main() -> None:
    asked = parser(__doc__, "a small decoder")
    asked.add_argument("--models", default=",".join(MODELS), help="names of models, separated by commas")
    asked.add_argument("--devices", default="8,64", help="numbers of devices, separated by commas")
    options = asked.parse_args()
    models = SMALL if options.small else {name: MODELS[name] for name in options.models.split(",")}
    if not plugin_is_here() and not options.small:
        raise SystemExit('This needs the compiler for a GPU: pip install "jax[cuda12]". No device is needed.')
    notes, rows = list(NOTES), []
    if not plugin_is_here():
        notes.append("Compiled for a CPU, which sends everything in float32: pip install 'jax[cuda12]' for figures.")
    for count in (8,) if options.small else map(int, options.devices.split(",")):
        for name, model in models.items():
            rows += measure(name, model, devices(count))
            save("communication", rows, notes, options.json)
    publish("communication", COLUMNS, rows, notes, options.json)


if __name__ == "__main__":
    main()
