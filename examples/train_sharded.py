"""Train a byte-level decoder over many devices: weights split over all of them, heads over some of them.

    pip install -e '.[examples]' && python examples/train_sharded.py --devices 8

With `--devices 8` it trains on eight virtual devices of a CPU, without on the devices that JAX finds. Over the axis
"data" of the mesh (FSDP), each device holds a part of every weight, and a layer gathers its weights before it runs,
forwards and again backwards. Over "model" (tensor parallelism), each device has some of the heads and hidden units.
The model is plain float32 code: under `amp`, weights are gathered in the compute dtype, and their gradients are summed
in float32. The table at the end shows what is sent. The text is Python's own library.
"""

import argparse
import collections
import math
import sysconfig
import tempfile
from pathlib import Path

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
import numpy as np
import optax
from jax.lax import with_sharding_constraint
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich import print
from rich.progress import track
from rich.table import Table

import jaxamp

WIDTH, HEADS = 128, 4
WEIGHTS = {  # of a block: shapes, and the axes of the mesh that the dimensions are split over
    "qkv": ((WIDTH, HEADS, 3 * WIDTH // HEADS), P("data", "model", None)),
    "out": ((HEADS, WIDTH // HEADS, WIDTH), P("model", None, "data")),
    "up": ((WIDTH, 4 * WIDTH), P("data", "model")),
    "down": ((4 * WIDTH, WIDTH), P("model", "data")),
}
HEAD = P("data", None)


def init(key, mesh, depth, length):
    """Parameters, each made where it lies. The small tables of bytes and places lie everywhere."""
    keys = iter(jax.random.split(key, 3 + depth * len(WEIGHTS)))

    def weights(shape, spec):
        std = math.sqrt(WIDTH / math.prod(shape))  # for a square one, 1 / sqrt(WIDTH)
        draw = jax.jit(lambda key: std * jax.random.normal(key, shape), out_shardings=NamedSharding(mesh, spec))
        return draw(next(keys))

    blocks = [{name: weights(*given) for name, given in WEIGHTS.items()} for _ in range(depth)]
    tables = {"bytes": weights((256, WIDTH), P()), "places": weights((length, WIDTH), P())}
    return tables | {"blocks": blocks, "head": weights((WIDTH, 256), HEAD)}


def loss_fn(mesh, params, text):
    def gathered(w, spec):  # in one piece over "data"; over "model" it stays split
        spec = P(*(None if axis == "data" else axis for axis in spec))
        return with_sharding_constraint(w, NamedSharding(mesh, spec))

    @jax.checkpoint  # so that gathered weights are not kept for the backward pass
    def block(p, x):
        p = {name: gathered(w, WEIGHTS[name][1]) for name, w in p.items()}
        q, k, v = jnp.split(jnp.einsum("btd,dhk->bthk", jax.nn.standardize(x), p["qkv"]), 3, axis=-1)
        attended = jax.nn.dot_product_attention(q, k, v, is_causal=True)
        x = x + jnp.einsum("bthk,hkd->btd", attended, p["out"])
        x = x + jax.nn.gelu(jax.nn.standardize(x) @ p["up"]) @ p["down"]
        return with_sharding_constraint(x, NamedSharding(mesh, P("data")))

    x = params["bytes"][text[:, :-1]] + params["places"]
    for p in params["blocks"]:
        x = block(p, x)
    logits = jax.nn.standardize(x) @ gathered(params["head"], HEAD)
    return optax.softmax_cross_entropy_with_integer_labels(logits, text[:, 1:]).mean()


def compile_step(loss_fn, optimizer, *args):
    """A compiled training step, and XLA's text of it with all that it sends."""
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss_fn)

    def step(params, state, scaler, text):
        scaler, (loss, grads) = grad_fn(params, text, dynamic_scaler_state=scaler)
        params, state = jaxamp.update_if_finite(params, optimizer, state, grads, scaler.finite)
        return params, state, scaler, loss

    params, state, scaler = (jax.tree.map(lambda x: x.sharding, each) for each in args[:3])
    results = params, state, scaler, scaler.scaler
    lowered = jax.jit(step, donate_argnums=(0, 1), out_shardings=results).lower(*args)
    if jax.default_backend() != "cpu":
        compiled = lowered.compile()
        return compiled, compiled.as_text()
    # XLA's CPU backend rewrites every collective to float32 in the end. Read the program as it was partitioned.
    with tempfile.TemporaryDirectory() as folder:
        dump = {"xla_dump_to": folder, "xla_dump_hlo_pass_re": "spmd-partitioning"}
        compiled = lowered.compile(compiler_options=dump)
        (text,) = Path(folder).glob("*after_spmd-partitioning*")
        return compiled, text.read_text()


def show(programs, mesh):
    """What programs send in a step, side by side."""
    sent = {name: collections.Counter() for name in programs}
    for name, text in programs.items():
        for row in jaxamp.compiled_collectives(text, mesh):
            sent[name][", ".join(row.axes), row.kind, row.dtype] += row.total
        sent[name]["all", "", ""] = sent[name].total()
    table = Table("over", "what", "dtype", *programs, title="MB that are sent in a step")
    for key in sorted(set().union(*sent.values()), key=lambda key: (key[0] == "all", key)):
        table.add_row(*key, *(f"{sizes[key] / 1e6:.3f}" for sizes in sent.values()))
    print(table)


def draw(losses, path):
    plt.switch_backend("Agg")
    fig, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    axes.plot(range(1, len(losses) + 1), np.asarray(losses) / math.log(2))
    axes.set(xlabel="step", ylabel="bits per byte", title="Training loss")
    axes.grid(alpha=0.3)
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--devices", type=int, help="train on so many virtual devices of the CPU")
    parser.add_argument("--model", type=int, default=2, help="the size of the axis 'model'; the rest is 'data'")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="bfloat16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="a shallow model on short texts")
    parser.add_argument("--out", default="sharded.png", help="where to save the picture of the loss")
    options = parser.parse_args()
    if options.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", options.devices)
    depth, length = (1, 32) if options.small else (4, 128)
    mesh = jax.make_mesh((jax.device_count() // options.model, options.model), ("data", "model"), (AxisType.Auto,) * 2)

    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)

    def batch(step):
        starts = np.random.default_rng(step).integers(len(library) - length, size=(2 * mesh.shape["data"], 1))
        return jax.device_put(library[starts + np.arange(length + 1)], NamedSharding(mesh, P("data")))

    def everywhere(tree):  # single numbers: the scale of the loss, the optimizer's count of steps
        return jax.tree.map(lambda x: x if x.ndim else jax.device_put(x, NamedSharding(mesh, P())), tree)

    float32 = lambda params, text: loss_fn(mesh, params, text)
    is_low, is_half = options.precision != "float32", options.precision == "float16"
    loss = jaxamp.amp(float32, compute_dtype=options.precision) if is_low else float32
    scaler = jaxamp.DynamicScalerState(patience=50) if is_half else jaxamp.DynamicScalerState.no_op()
    optimizer = optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 2e-3, options.steps // 10, options.steps))
    params, scaler = init(jax.random.key(0), mesh, depth, length), everywhere(scaler.as_arrays())
    state = everywhere(optimizer.init(params))  # zeros like the parameters lie where these do
    step, text = compile_step(loss, optimizer, params, state, scaler, batch(0))
    other = {"float32": compile_step(float32, optimizer, params, state, scaler, batch(0))[1]} if is_low else {}

    losses = []
    for i in track(range(options.steps), f"{options.precision}, {mesh.devices.size} devices"):
        params, state, scaler, loss = step(params, state, scaler, batch(i))
        losses.append(float(loss))
    print(f"Loss {losses[0]:.3f} to {losses[-1]:.3f}; {jaxamp.scaler_metrics(scaler)['total_skipped']} steps skipped.")
    show(other | {options.precision: text}, mesh)
    jaxamp.assert_collectives(text, gather=options.precision, mesh=mesh)
    print(f"Everything that is gathered is {options.precision}.")
    draw(losses, options.out)
    print(f"Picture of the loss: {options.out}")


if __name__ == "__main__":
    main()
