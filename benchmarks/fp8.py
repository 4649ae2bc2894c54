"""How much faster is fp8 than bfloat16, in which matmuls and convolutions, and in a training step of a large decoder?

    python -m benchmarks.fp8 [--small] [--layers 8] [--repeats 3] [--matmuls | --convolutions | --step | --vit]

Matmuls: `x @ w` and its two gradients, of several sizes, each in fp8; from these comes `least_size` in
`policies/fp8.toml`. Convolutions: the same, to see whether that table should name them. The step: a decoder of width
4,096 and hidden width 14,336 on 16,384 tokens, with AdamW, under the policies `default` on bfloat16, `fp8`, and
`fp8_delayed`; and, if they are installed, PyTorch in bfloat16 and torchao, compiled, in a process of their own before
the others. The ViT: the same for a ViT-B, all of whose matmuls are too small. "fp8 matmuls" counts those in the
compiled program. Our sides are compiled without Triton's matmuls, among which XLA would search for minutes in fp8, to
take cuBLAS's in the end.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import jaxamp

from . import _networks, _torch
from ._sides import our_attention
from ._tables import Column, number, parser, percent, progress, publish, save, significant
from ._timing import Times, figures, race, seconds

LOW, DELAYED = jnp.bfloat16, "fp8 delayed"
TORCH = {
    "torch-compile-sdpa": "torch.compile",
    "torchao": "torchao, a scale for each tensor",
    "torchao-rows": "torchao, a scale for each row",
}
MATMULS = ((16384, 768, 3072), (16384, 1024, 4096), (16384, 2048, 8192), (16384, 4096, 4096), (16384, 4096, 14336))
CONVOLUTIONS = ((256, 56, 3, 128, 128), (256, 28, 3, 256, 256), (256, 14, 3, 512, 512), (256, 28, 1, 512, 2048))
COLUMNS = (
    Column("", "what"),
    Column("side", "side"),
    Column("ms", "ms", significant),
    Column("spread", "spread", percent),
    Column("ratio to bfloat16", "vs_bfloat16", number(2, "x")),
    Column("TFLOP/s", "tflops", number(0)),
    Column("temporary GiB", "temporary", number(2)),
    Column("error", "error", "{:.1e}".format),
    Column("fp8 matmuls", "fp8"),
    Column("note", "note"),
)
NOTES = (
    "Ratio: how many times as fast as bfloat16. TFLOP/s: of the matmuls alone, over the whole time.",
    "Matmuls and convolutions: forward and both gradients, rounding and scales included. Error: that of the least exact"
    " of the three, on some of its rows, images or channels beside float64, relative to their norm.",
    "Convolutions: images, their size, window, channels.",
    "PyTorch ran in a process of its own before the others, from float32 parameters, compiled, with autocast and a"
    " fused AdamW. Temporary GiB: its peak on top of parameters and moments.",
)


class Sizes:
    """A decoder in the style of Llama 3."""

    width, hidden, heads, key_heads, vocabulary, batch, length = 4096, 14336, 32, 8, 32000, 8, 2048


class SmallSizes(Sizes):
    width, hidden, heads, key_heads, vocabulary, batch, length = 64, 128, 4, 2, 64, 2, 8


def init(sizes: type[Sizes], layers: int) -> dict[str, Any]:
    keys = iter(jax.random.split(jax.random.key(0), 8 * layers + 2))
    d, f = sizes.width, sizes.hidden
    few = d * sizes.key_heads // sizes.heads
    shapes = {"q": (d, d), "k": (d, few), "v": (d, few), "o": (d, d), "gate": (d, f), "up": (d, f), "down": (f, d)}
    dense = lambda shape: jax.random.normal(next(keys), shape) / np.sqrt(shape[0])
    norms = {"norm1": jnp.ones(d), "norm2": jnp.ones(d)}
    blocks = [{name: dense(shape) for name, shape in shapes.items()} | norms for _ in range(layers)]
    tables = {"tokens": dense((sizes.vocabulary, d)), "head": dense((d, sizes.vocabulary))}
    return tables | {"blocks": blocks, "norm": jnp.ones(d)}


def normalized(x: Any, scale: Any) -> Any:
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6) * scale


def loss(sizes: type[Sizes], params: dict[str, Any], ids: Any) -> Any:
    x = params["tokens"][ids]
    split = lambda a: a.reshape(*a.shape[:2], -1, sizes.width // sizes.heads)
    for w in params["blocks"]:
        h = normalized(x, w["norm1"])
        q, k, v = (split(h @ w[name]) for name in "qkv")
        k, v = (jnp.repeat(a, sizes.heads // sizes.key_heads, axis=2) for a in (k, v))
        x = x + jaxamp.dot_product_attention(q, k, v, is_causal=True).reshape(x.shape) @ w["o"]
        h = normalized(x, w["norm2"])
        x = x + (jax.nn.silu(h @ w["gate"]) * (h @ w["up"])) @ w["down"]
    logits = normalized(x, params["norm"]) @ params["head"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.roll(ids, -1, 1)).mean()


def compiled(fn: Callable[..., Any], *args: Any, **options: Any) -> Any:
    on_gpu = jax.default_backend() == "gpu"
    without = {"compiler_options": {"xla_gpu_enable_triton_gemm": False}} if on_gpu else {}
    return jax.jit(fn, **options).lower(*args).compile(**without)


def about(call: Any, flops: float, row: dict[str, Any]) -> dict[str, Any]:
    operands = [set(row.operands) for row in jaxamp.compiled_matmuls(call)]
    found = {"temporary": call.memory_analysis().temp_size_in_bytes / 2**30}
    found["fp8"] = sum(any("float8" in dtype for dtype in dtypes) for dtypes in operands)
    return row | found | ({"tflops": flops / row["ms"] / 1e9} if "ms" in row else {})


def compare(
    what: str, calls: dict[str, Any], run: Callable[[Any], Callable[[], Any]], flops: float, repeats: int
) -> Any:
    progress(what)
    raced = race({side: functools.partial(seconds, run(call), 5) for side, call in calls.items()}, repeats)
    rows = figures(raced, {"vs_bfloat16": "bfloat16"})
    return [about(calls[side], flops, {"what": what, "side": side} | row) for side, row in rows.items()]


def matmul(sizes: tuple[int, int, int], repeats: int) -> list[dict[str, Any]]:
    """`x @ w` and its gradients, by themselves."""
    m, k, n = sizes
    x, ct = (jax.random.normal(jax.random.key(i), (m, size), LOW) for i, size in enumerate((k, n)))
    w = jax.random.normal(jax.random.key(2), (k, n)) / np.sqrt(k)
    calls = both_ways(jnp.matmul, lax.dot_general_p, x, w, ct)
    rows = compare(f"matmul {m} x {k} x {n}", calls, lambda call: lambda: call(x, w, ct), 6.0 * m * k * n, repeats)
    return [row | {"error": error(calls[row["side"]](x, w, ct), x, w, ct)} for row in rows]


def both_ways(product: Callable[[Any, Any], Any], primitive: Any, *args: Any) -> dict[str, Any]:
    """A product of two arrays and its gradients, from these and a cotangent, in bfloat16 and in fp8, compiled."""

    def run(policy: Any, x: Any, w: Any, ct: Any) -> Any:
        out, pull = jax.vjp(jaxamp.amp(product, compute_dtype=LOW, amp_policy=policy), x, w)
        return out, pull(ct.astype(out.dtype))

    rules = {"bfloat16": jaxamp.use_compute_precision, "fp8": jaxamp.use_formats()}
    policies = {side: dict(jaxamp.load_policy("default")) | {primitive: rule} for side, rule in rules.items()}
    return {side: compiled(functools.partial(run, policy), *args) for side, policy in policies.items()}


def convolved(x: Any, w: Any) -> Any:
    return lax.conv_general_dilated(x.astype(w.dtype), w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def convolution(sizes: tuple[int, int, int, int, int], repeats: int) -> list[dict[str, Any]]:
    """A convolution of images and its gradients, by themselves."""
    images, size, window, few, many = sizes
    x, ct = (jax.random.normal(jax.random.key(i), (images, size, size, c), LOW) for i, c in enumerate((few, many)))
    w = jax.random.normal(jax.random.key(2), (window, window, few, many)) / np.sqrt(window**2 * few)
    calls = both_ways(convolved, lax.conv_general_dilated_p, x, w, ct)
    what = f"convolution {images} x {size}\u00b2, {window}\u00b2, {few} to {many}"
    flops = 6.0 * images * size**2 * window**2 * few * many
    rows = compare(what, calls, lambda call: lambda: call(x, w, ct), flops, repeats)
    return [row | {"error": error_of_convolution(calls[row["side"]](x, w, ct), x, w, ct)} for row in rows]


def error_of_convolution(found: Any, x: Any, w: Any, ct: Any) -> float:
    """The same for a convolution: the first images, and of the weight's gradient the first channels."""
    out, (dx, dw) = found
    some, channels = slice(2), slice(4)
    with jax.enable_x64(True):
        x, w, ct = (a.astype(jnp.float64) for a in (x, w, ct))
        exact, pull = jax.vjp(convolved, x[some], w)
        _, pull_all = jax.vjp(convolved, x[..., channels], w[:, :, channels])
        pairs = [(out[some], exact), (dx[some], pull(ct[some])[0]), (dw[:, :, channels], pull_all(ct)[1])]
        return max(map(relative, pairs))


def relative(pair: tuple[Any, Any]) -> float:
    found, exact = pair
    return float(jnp.linalg.norm((found.astype(jnp.float64) - exact).ravel()) / jnp.linalg.norm(exact.ravel()))


def error(found: Any, x: Any, w: Any, ct: Any) -> float:
    """The largest error of a product and its gradients beside float64, on their first rows."""
    out, (dx, dw) = found
    with jax.enable_x64(True):
        x, w, ct = (a.astype(jnp.float64) for a in (x, w, ct))
        some = slice(64)
        pairs = [(out[some], x[some] @ w), (dx[some], ct[some] @ w.T), (dw[some], x[:, some].T @ ct)]
        return max(map(relative, pairs))


class Training(NamedTuple):
    """A training step: the loss, its first parameters, a batch, and the operations of the matmuls."""

    what: str
    loss: Callable[..., Any]
    init: Callable[[], Any]
    batch: tuple[Any, ...]
    flops: float


def decoder(sizes: type[Sizes], layers: int) -> Training:
    ids = jax.random.randint(jax.random.key(7), (sizes.batch, sizes.length), 0, sizes.vocabulary)
    start = functools.partial(init, sizes, layers)
    shapes = jax.eval_shape(start)
    flops = flops_of(ids.size, (shapes["blocks"], shapes["head"]))
    return Training(f"decoder, {layers} layers", functools.partial(loss, sizes), start, (ids,), flops)


def vit(sizes: _networks.Sizes) -> Training:
    make = functools.partial(_networks.make, "vit", sizes, our_attention, stacked=True)
    model, *batch = make()
    arrays, static = eqx.partition(model, eqx.is_array)
    flops = flops_of(sizes.batch * sizes.tokens, (arrays.blocks, arrays.embed))
    with_static = lambda params, x, y: _networks.loss_fn(eqx.combine(params, static), x, y)
    first = lambda: eqx.filter(make()[0], eqx.is_array)
    return Training("ViT-B", with_static, first, tuple(batch), flops)


def flops_of(tokens: int, weights: Any) -> float:
    """Forward and both gradients, of matmuls with these weights."""
    return 6.0 * tokens * sum(p.size for p in jax.tree.leaves(weights) if p.ndim >= 2)


def step(training: Training, repeats: int) -> list[dict[str, Any]]:
    """A whole step with AdamW, under each policy."""
    optimizer = optax.adamw(1e-4)

    def first() -> Any:
        params = training.init()
        return params, optimizer.init(params)

    def run(side: str, fn: Any, state: Any, scales: Any, *batch: Any) -> Any:
        params, before = state
        if side == DELAYED:
            scales, (value, grads) = jaxamp.delayed_scale_value_and_grad(fn)(params, *batch, delayed_scales=scales)
        else:
            value, grads = jax.value_and_grad(fn)(params, *batch)
        updates, after = optimizer.update(grads, before, params)
        return (optax.apply_updates(params, updates), after), scales, value

    options = {"bfloat16": {"compute_dtype": LOW}, "fp8": {"amp_policy": "fp8"}, DELAYED: {"amp_policy": "fp8_delayed"}}
    amped = {side: jaxamp.amp(training.loss, **chosen) for side, chosen in options.items()}
    shapes = jax.eval_shape(first)
    scales = [jaxamp.init_scales(amped[DELAYED])(shapes[0], *training.batch)]
    calls = {
        side: compiled(functools.partial(run, side, fn), shapes, scales[0], *training.batch, donate_argnums=0)
        for side, fn in amped.items()
    }
    state = [jax.jit(first)()]  # the sides take turns on one state: there is room for one

    def once(call: Any) -> Callable[[], Any]:
        def next_step() -> Any:
            state[0], scales[0], value = call(state[0], scales[0], *training.batch)
            return value

        return next_step

    return compare(training.what, calls, once, training.flops, repeats)


def ask_torch(sizes: type[Sizes], layers: int, repeats: int) -> dict[str, Any]:
    """What PyTorch and torchao say about the decoder, side by side."""
    numbers = (
        layers,
        sizes.width,
        sizes.hidden,
        sizes.heads,
        sizes.key_heads,
        sizes.vocabulary,
        sizes.batch,
        sizes.length,
    )
    found: dict[str, Any] = {}
    for side in TORCH:  # one at a time: two states are too many for a device
        found |= _torch.ask([side], _torch.Asked("decoder", numbers, repeats, 5), process="_torch_fp8")
    return found


def torch_rows(found: dict[str, Any], like: dict[str, Any], flops: float) -> list[dict[str, Any]]:
    """Rows below ours. `like`: ours in bfloat16, to which they are compared."""
    rows = []
    for side, got in found.items():
        row = {"what": like["what"], "side": TORCH[side]}
        if "why" in got:
            rows.append(row | {"note": got["why"]})
            continue
        times = Times(got["seconds"])
        ms, gib = 1e3 * times.median, None if got["peak"] is None else got["peak"] / 2**30
        figures = {"ms": ms, "spread": times.spread, "tflops": flops / ms / 1e9, "temporary": gib}
        rows.append(row | figures | ({"vs_bfloat16": like["ms"] / ms} if "ms" in like else {}))
    return rows


def main() -> None:
    asked = parser(__doc__, "a tiny matmul, a tiny convolution and a tiny decoder")
    asked.add_argument("--layers", type=int, default=8)
    asked.add_argument("--repeats", type=int, default=3)
    asked.add_argument("--matmuls", action="store_true", help="the matmuls alone")
    asked.add_argument("--convolutions", action="store_true", help="the convolutions alone")
    asked.add_argument("--step", action="store_true", help="the step alone")
    asked.add_argument("--vit", action="store_true", help="the ViT alone")
    options = asked.parse_args()
    wanted = {name for name in ("matmuls", "convolutions", "step", "vit") if getattr(options, name)}
    has = lambda name: name in wanted or not wanted
    sizes_of_decoder = SmallSizes if options.small else Sizes
    layers = 1 if options.small else options.layers
    torch = ask_torch(sizes_of_decoder, layers, options.repeats) if has("step") and not options.small else {}
    rows: list[dict[str, Any]] = []
    for sizes in ((32, 64, 32),) if options.small else MATMULS:
        rows += matmul(sizes, options.repeats) if has("matmuls") else []
        save("fp8", rows, NOTES, options.json)
    for shape in ((2, 8, 3, 16, 16),) if options.small else CONVOLUTIONS:
        rows += convolution(shape, options.repeats) if has("convolutions") else []
        save("fp8", rows, NOTES, options.json)
    if has("step"):
        training = decoder(sizes_of_decoder, layers)
        ours = step(training, options.repeats)
        rows += ours + torch_rows(torch, ours[0], training.flops)
        save("fp8", rows, NOTES, options.json)
    if has("vit"):
        rows += step(
            vit(_networks.Sizes(1, 32, 2, 8, 4, 50) if options.small else _networks.SIZES["vit"]), options.repeats
        )
    publish("fp8", COLUMNS, rows, NOTES, options.json)


if __name__ == "__main__":
    main()
