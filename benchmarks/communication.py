"""How many bytes does a training step of a large decoder send between devices, and how long does that take?

    python -m benchmarks.communication [--small] [--models "8B,70B"] [--devices 8,64]

Nothing runs: the step is compiled from shapes alone, for H200s that need not be there, and what it sends is read from
the program. Parameters and gradients are split over all devices, as in FSDP; a layer gathers its parameters, and
gathers them again in the backward pass (`jax.checkpoint`). Over more than one node of eight, there is a second layout,
with as many sequences: parameters are split over the nodes, and the devices of a node share the matmuls of each layer
(tensor parallelism), so that they send activations. Sides: float32, a plain cast of the parameters to bfloat16, `amp`,
`amp` with gradients that are summed in bfloat16, and `amp` under the policy `fp8`.
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
    tokens: int  # of a sequence; there are as many as devices


class Layout(NamedTuple):
    """Which devices there are, and what they share."""

    nodes: int
    in_node: int  # devices of a node
    is_tensor_parallel: bool = False

    @property
    def devices(self) -> int:
        return self.nodes * self.in_node

    @property
    def name(self) -> str:
        return "tensor parallelism in nodes, FSDP over nodes" if self.is_tensor_parallel else "FSDP"

    @property
    def data(self) -> tuple[str, ...]:
        """The axes of the mesh that split parameters and batch."""
        return ("node",) if self.is_tensor_parallel else ("node", "gpu")


MODELS = {
    "8B": Decoder(32, 4096, 14336, 1024, 128256, 32, 4096),
    "70B": Decoder(80, 8192, 28672, 1024, 128256, 64, 4096),
}
SMALL = {"small": Decoder(2, 64, 128, 32, 256, 4, 16)}
IN_NODE = 8
BANDWIDTHS = {"NVLink": 450e9, "400 Gb/s": 50e9}  # bytes per second and device, each way; in a node and between nodes

COLUMNS = (
    Column("model", "model"),
    Column("devices", "devices"),
    Column("layout", "layout"),
    Column("side", "title"),
    Column("gathered GB", "gathered", number(2)),
    Column("in", "gathered_in"),
    Column("summed GB", "summed", number(2)),
    Column("in", "summed_in"),
    *(Column(f"s, {name}", name, number(3)) for name in BANDWIDTHS),
    Column("ratio to float32", "ratio", number(2, "x")),
)
NOTES = [
    "Compiled for NVIDIA H200s without having them; nothing runs. As many sequences as devices, of 4096 "
    "tokens in 8B and 70B.",
    "Gathered, summed: bytes of the whole arrays that a device has after it or before it, for each device and step.",
    "s: the time that they take, if nothing else is done meanwhile, at "
    + " and ".join(f"{speed / 1e9:g} GB/s ({name})" for name, speed in BANDWIDTHS.items())
    + " for each device. Of n devices, each sends and receives (n - 1) / n of an array to gather it or to sum it into "
    "parts, and twice that to have the sum everywhere.",
    f"{IN_NODE} devices: if they are in one node, or if each is in a node of its own. More: nodes of {IN_NODE}, with "
    "NVLink inside and 400 Gb/s for each device between them. Over n nodes with m devices in each, a device receives "
    "(n - 1) / (n m) of an array from other nodes, and (m - 1) / m of it by NVLink; both at the same time, at best.",
    "Ratio: how many times less time, both columns together.",
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


COLUMN_PARALLEL = ("q", "k", "v", "gate", "up", "head", "tokens")  # their last axis is split over the devices of a node


def spec_of(name: str, shape: tuple[int, ...], layout: Layout, is_gathered: bool = False) -> PartitionSpec:
    """How a parameter is split, at rest or where a layer reads it."""
    if len(shape) == 1 or name.startswith("norm"):
        return PartitionSpec()
    data = None if is_gathered else layout.data
    stacked = (None,) * (len(shape) - 2)
    if layout.is_tensor_parallel:
        return PartitionSpec(*stacked, *((data, "gpu") if name in COLUMN_PARALLEL else ("gpu", data)))
    is_even = shape[-2] % layout.devices == 0
    return PartitionSpec(*stacked, data) if is_even else PartitionSpec(*stacked, None, data)


def loss(model: Decoder, layout: Layout, mesh: Mesh, params: dict[str, jax.Array], ids: jax.Array) -> jax.Array:
    placed = lambda x, *spec: lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))
    gathered = lambda name, w: placed(w, *spec_of(name, w.shape, layout, is_gathered=True))
    # Between layers, each device of a node has all activations of the node's sequences.
    stream = (lambda x: placed(x, layout.data)) if layout.is_tensor_parallel else (lambda x: x)
    params = dict(params)
    head, last, table = (params.pop(name) for name in ("head", "norm", "tokens"))

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(*x.shape[:2], -1, model.width // model.heads)

    @jax.checkpoint
    def layer(x: jax.Array, w: dict[str, jax.Array]) -> tuple[jax.Array, None]:
        w = {name: gathered(name, p) if p.ndim > 1 else p for name, p in w.items()}
        h = normalized(x, w["norm1"])
        repeats = model.width // model.key_width
        q, k, v = (split(h @ w[name]) for name in "qkv")
        k, v = (jnp.repeat(a, repeats, axis=2) for a in (k, v))
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape)
        x = stream(x + attended @ w["o"])
        h = normalized(x, w["norm2"])
        return stream(x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]), None

    x, _ = lax.scan(layer, stream(gathered("tokens", table)[ids]), params)
    logits = (normalized(x, last) @ gathered("head", head)).astype(jnp.float32)
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


def sent(model: Decoder, layout: Layout, over: Any, side: Callable[..., Any]) -> list[Any]:
    mesh = Mesh(over.reshape(layout.nodes, layout.in_node), ("node", "gpu"))
    placed = lambda shape, dtype, spec: jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, spec))
    shapes = shapes_of(model).items()
    params = {name: placed(shape, jnp.float32, spec_of(name, shape, layout)) for name, shape in shapes}
    ids = placed((len(over), model.tokens), jnp.int32, PartitionSpec(layout.data))
    gradient = jax.grad(side(functools.partial(loss, model, layout, mesh)))
    shardings = jax.tree.map(lambda p: p.sharding, params)
    return jaxamp.compiled_collectives(compile_for(gradient, params, ids, out_shardings=shardings))


def received(row: Any, layout: Layout) -> dict[str, float]:
    """The bytes that a device receives by NVLink and from other nodes, for all runs of a collective."""
    axes = row.axes or ("node", "gpu")
    nodes = layout.nodes if "node" in axes else 1
    in_node = layout.in_node if "gpu" in axes else 1
    times = 2 if row.kind == "all-reduce" else 1
    shares = (in_node - 1) / in_node, (nodes - 1) / nodes / in_node
    if row.kind == "all-to-all":  # nobody needs a part that another device of its node has
        shares = (in_node - 1) / in_node / nodes, (nodes - 1) / nodes
    elif row.kind == "collective-permute":
        shares = (0.0, 1.0) if nodes > 1 else (1.0, 0.0)
    return {link: times * share * row.total for link, share in zip(BANDWIDTHS, shares, strict=True)}


def times_of(found: list[Any], layout: Layout) -> dict[str, float]:
    """Seconds by NVLink and between nodes. On one node: by NVLink, and if each device had a node of its own."""
    if layout.nodes == 1:
        layouts = {"NVLink": layout, "400 Gb/s": Layout(layout.in_node, 1)}
        found = [row._replace(axes=()) for row in found]
    else:
        layouts = dict.fromkeys(BANDWIDTHS, layout)
    return {
        link: sum(received(row, layouts[link])[link] for row in found) / speed for link, speed in BANDWIDTHS.items()
    }


def measure(name: str, model: Decoder, layout: Layout, over: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for side, (title, transform) in SIDES.items():
        progress(f"{name}, {len(over)} devices, {layout.name}, {title}")
        found = sent(model, layout, over, transform)
        sums = [row for row in found if row.kind in ("all-reduce", "reduce-scatter")]
        moves = [row for row in found if row not in sums]
        row = {"model": name, "devices": len(over), "layout": layout.name, "side": side, "title": title}
        row |= {"gathered": _gigabytes(moves), "gathered_in": _dtypes(moves)}
        row |= {"summed": _gigabytes(sums), "summed_in": _dtypes(sums)}
        row |= times_of(found, layout)
        rows.append(row | {"ratio": _seconds(rows[0]) / _seconds(row) if rows and _seconds(row) else 1.0})
    return rows


def _seconds(row: dict[str, Any]) -> float:
    return sum(row[link] for link in BANDWIDTHS)


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
        over = devices(count, max(count // IN_NODE, 1))
        for layout in layouts_of(len(over)):
            for name, model in models.items():
                rows += measure(name, model, layout, over)
                save("communication", rows, notes, options.json)
    publish("communication", COLUMNS, rows, notes, options.json)


def layouts_of(count: int) -> list[Layout]:
    if count <= IN_NODE:
        return [Layout(1, count)]
    nodes = count // IN_NODE
    return [Layout(nodes, IN_NODE), Layout(nodes, IN_NODE, is_tensor_parallel=True)]


if __name__ == "__main__":
    main()
