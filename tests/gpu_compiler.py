"""Programs compiled for an H200 on a machine that has none: the text of the program, and the bytes that it needs.

It takes JAX's CUDA plugin, `pip install "jax[cuda12]"`. Run in a process of its own:

    XLA_FLAGS=--xla_dump_to=FOLDER python gpu_compiler.py FOLDER < questions.json > answers.json

A question is the name of an answer below, and its arguments.
"""

import functools
import itertools
import json
import math
import re
import subprocess
import sys
import tempfile
from pathlib import Path


def why_not(any_jax=False):
    """Why nothing can be compiled for a GPU here, or None. Kernels are read as XLA of JAX 0.10 makes them."""
    import jax

    from benchmarks._gpus import plugin_is_here

    if not plugin_is_here():
        return "needs JAX's CUDA plugin, to compile for a GPU"
    return None if any_jax or jax.__version__.startswith("0.10.") else "reads kernels as jax 0.10 makes them"


def ask(questions):
    """The answers of a process of its own, for it must know of no other backend."""
    from helpers import with_the_package

    with tempfile.TemporaryDirectory() as folder:
        environment = with_the_package(
            JAX_PLATFORMS="cpu",
            JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1",
            XLA_FLAGS=f"--xla_gpu_autotune_level=0 --xla_dump_to={folder}",
        )
        command, question = [sys.executable, __file__, folder], json.dumps(questions)
        out = subprocess.run(command, input=question, env=environment, capture_output=True, text=True, timeout=600)
    assert out.returncode == 0, out.stderr[-2000:]
    return json.loads(out.stdout.splitlines()[-1])


def reads_of_last(entry):
    """How many kernels of a program take its last argument as it came."""
    arguments = {int(number): name for name, number in re.findall(r"%(\S+) = .* parameter\((\d+)\)", entry)}
    last = re.escape(arguments[max(arguments)])
    return len(re.findall(rf" fusion\((?:[^)]*, )?%{last}[,)]", entry))


def bytes_from(kernel):
    """Of which type, by the operations that made them, the registers are whose last byte a kernel stores."""
    made = {register: kind for kind, register in re.findall(r"\.(\w+)\s+(%\w+),", kernel)}
    return {made[register] for register in re.findall(r"st\.global\.b8\s+\[\S+\], (%\w+);", kernel)}


def main():
    import jax
    import jax.numpy as jnp
    import sharded_programs
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    import jaxamp
    from benchmarks._gpus import compile_for, devices
    from jaxamp import optim

    def mesh_of(number):
        return Mesh(devices(number), ("d",))

    one = NamedSharding(mesh_of(1), PartitionSpec())

    def compiled(fn, *args, donate=(0, 1)):
        placed = lambda a: a if a.sharding else jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=one)
        specs = jax.tree.map(placed, args)
        return compile_for(fn, *specs, donate_argnums=donate)

    def kernels():
        """Those of the latest program, in PTX."""
        files = list(Path(sys.argv[1]).glob("module_*.ptx"))
        latest = max(file.name.split(".")[0] for file in files)
        return [file.read_text() for file in files if file.name.startswith(latest)]

    def step(name, shape, dtype, grad_dtype, options):
        optimizer = getattr(optim, name)(1e-3, storage=optim.Storage(**options.get("storage", {})))
        params = jax.ShapeDtypeStruct(tuple(shape), jnp.dtype(dtype))
        grads = jax.ShapeDtypeStruct(params.shape, jnp.dtype(grad_dtype))
        checked = lambda p, s, g: optimizer.step_if_finite(p, s, g, scale=2.0**-7)
        taken = checked if options.get("scaled") else optimizer.step
        program = compiled(taken, params, jax.eval_shape(optimizer.init, params), grads)
        text = program.as_text()
        entry = text[text.index("ENTRY") :]
        return {
            "temporary": program.memory_analysis().temp_size_in_bytes / params.size,
            "kernels": len(re.findall(r"= .* (?:fusion|copy|custom-call)\(", entry)),
            "reads": reads_of_last(entry),
            "reads_bits": bool(re.search(r"u16\[[\d,]*\]\S* bitcast(?:-convert)?\(%convert", text)),
            "bytes_from": sorted(kind for kernel in kernels() for kind in bytes_from(kernel)),
            "subtracts_itself": bool(re.search(r"subtract\((%[\w.]+), \1\)", text)),
        }

    def two_steps():
        """Two steps without moments as one program: how many kernels write parameters."""
        optimizer = optim.flash_sgd(1e-3)
        params = jax.ShapeDtypeStruct((1024, 4096), jnp.bfloat16)
        both = lambda p, s, g: optimizer.step(*optimizer.step(p, s, g), g)
        text = compiled(both, params, jax.eval_shape(optimizer.init, params), params).as_text()
        return {"kernels": len(re.findall(r"= \(?.*bf16\[1024,4096\].* fusion\(", text[text.index("ENTRY") :]))}

    def law():
        """Weights, as parameters and corrections and in float32 again, as one program: how many kernels it is."""
        optimizer, x = optim.flash_adamw(1e-3), jax.ShapeDtypeStruct((1024, 4096), jnp.float32)
        like = jax.ShapeDtypeStruct(x.shape, jnp.bfloat16)
        there_and_back = (
            lambda x: optim.Weight().decode(*optim.Weight().encode(x)),
            lambda x: optim.float32_weights(*optim.from_float32(optimizer, optim.Float32(0, x, None, None), like)),
        )
        entry = lambda fn: re.split("ENTRY", compiled(fn, x, donate=()).as_text())[1]
        return {"kernels": [len(re.findall(r"= .* fusion\(", entry(fn))) for fn in there_and_back]}

    def release():
        """Backward pass and step of a deep network as one program: temporary bytes, over gradients."""
        optimizer = optim.flash_adamw(1e-3)
        params = [jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16)] * 32
        x = jax.ShapeDtypeStruct((8, 2048), jnp.bfloat16)

        def loss(params, x):
            for w in params:
                x = jnp.tanh(x @ w)
            return jnp.mean(x.astype(jnp.float32))

        both = lambda p, s, x: optimizer.step(p, s, jax.grad(loss)(p, x))
        program = compiled(both, params, jax.eval_shape(optimizer.init, params), x)
        return {"temporary": program.memory_analysis().temp_size_in_bytes / (32 * 2048 * 2048 * 2)}

    def softmax(looped):
        """The kernels that write scores or sums of their rows, in a gradient through attention."""

        def layer(x, w):
            return jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", x @ w, x)) @ x, None

        def loss(w, x):
            return jnp.sum(jax.lax.scan(layer, x, jnp.stack([w] * 4))[0] if looped else layer(x, w)[0])

        w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((128, 128), (16, 1024, 128)))
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), w, x, donate=()).as_text()
        kernel = r"%([a-z_]+)[\d.]* = \(?(?:bf16\[16,1024,1024\]|f32\[16,1024\]).* fusion\("
        return {"kernels": re.findall(kernel, text)}

    def masked():
        """How many rows of how many heads and examples a kernel of a softmax under a causal mask takes at a time."""

        def loss(w, x):
            scores = jnp.einsum("bhqd,bhkd->bhqk", x @ w, x)
            return jnp.sum(jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((1024, 1024), bool)), scores, -1e9)) @ x)

        w, x = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((64, 64), (16, 12, 1024, 64)))
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), w, x, donate=()).as_text()
        kernel = r'= bf16\[16,12,1024,1024\].* fusion\(.*"output_tiles":\[\{"sizes":\["(\d+)","(\d+)","(\d+)","1024"\]'
        return {"rows": [[int(size) for size in sizes] for sizes in re.findall(kernel, text)]}

    def solve():
        """Dtype and precision of the matmuls behind a Gram matrix that a triangular solve reads, in its gradient."""

        def loss(f, b):
            return jnp.sum(jax.lax.linalg.triangular_solve(f @ f.T, b, left_side=True) ** 2)

        f, b = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((1024, 256), (1024, 8)))
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), f, b, donate=()).as_text()
        dot = r"= (\w+)\[[^]]*(?:1024,256|256,1024)\]\S* dot\(.*operand_precision={(\w+),(\w+)}"
        return {"matmuls": re.findall(dot, text), "rounded": "reduce-precision" in text}

    def kept():
        """The arrays of all layers that a gradient through a scan over attention writes outside of its loops."""

        def layer(x, w):
            def attend(x):
                q, k, v = (a.reshape(len(x), 4, -1) for a in jnp.split(x @ w[0], 3, axis=-1))
                scores = jax.nn.softmax(jnp.einsum("thd,shd->hts", q, k))
                return x + jnp.einsum("hts,shd->thd", scores, v).reshape(x.shape) @ w[1]

            return jax.vmap(attend)(x), None

        loss = lambda w, x: jnp.mean(jax.lax.scan(layer, x, w)[0])
        shapes = ((6, 256, 768), (6, 256, 256)), (64, 192, 256)
        w, x = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: len(s) > 2)
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), w, x, donate=()).as_text()
        kernel = r"%([a-z_]+)[\d.]* = \(?\w+\[6,64,.* (?:fusion|copy|transpose)\("
        return {"kernels": sorted(set(re.findall(kernel, text[text.index("ENTRY") :])))}

    def sharded():
        """What devices tell each other for a gradient, the batch shared among them, with a table, a mask and a bias."""
        mesh = mesh_of(4)
        shape = lambda *axes, spec=(): jax.ShapeDtypeStruct(
            axes, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

        def loss(params, x):
            w, positions, v, bias = params
            x = jnp.tanh(x @ w + positions)
            mask = jnp.tril(jnp.ones((64, 64), bool))
            return jnp.mean((jax.nn.softmax(jnp.where(mask, x @ x.mT, -1e9)) @ x @ v + bias) ** 2)

        params = shape(512, 512), shape(64, 512), shape(512, 512), shape(512)
        gradient = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))
        text = compiled(gradient, params, shape(64, 64, 512, spec=("d",)), donate=()).as_text()
        return {"collectives": sorted(set(re.findall(r" (all-\w+|collective-\w+|reduce-scatter)(?:-start)?\(", text)))}

    def looked_up():
        """What devices tell each other for the gradient of a lookup, the nodes and the edges shared among them."""
        mesh = mesh_of(8)
        shape = lambda dtype, *axes, spec=(): jax.ShapeDtypeStruct(
            axes, dtype, sharding=NamedSharding(mesh, PartitionSpec(*spec))
        )

        def loss(w, x, senders):
            return jnp.mean(((x @ w)[senders] @ w) ** 2)

        args = (
            shape(jnp.float32, 256, 256),
            shape(jnp.float32, 4096, 256, spec=("d",)),
            shape(jnp.int32, 32768, spec=("d",)),
        )
        program = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), *args, donate=())
        return sorted(
            [row.kind, row.dtype, row.bytes] for row in jaxamp.compiled_collectives(program) if row.bytes > 64
        )

    def fp8(number):
        """Matmuls by the dtypes of their operands, temporary bytes, and what devices send, under both policies.

        Left to XLA's partitioner, the weights split over so many devices, for a gradient through three blocks.
        """
        mesh, width = mesh_of(number), 512
        split = lambda *axes: jax.ShapeDtypeStruct(axes, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec("d")))
        weights = [(split(width, 4 * width), split(4 * width, width))] * 3

        def loss(weights, x):
            for up, down in weights:
                x = x + jax.nn.silu(x @ up) @ down
            return jnp.mean(x**2)

        def about(policy):
            gradient = lambda w, x: [
                jax.tree.map(lambda g: jax.lax.with_sharding_constraint(g, weights[0][0].sharding), grads)
                for grads in jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16, amp_policy=policy))(w, x)
            ]
            program = compiled(gradient, weights, split(1024 * number, width), donate=())
            dots = re.findall(r" dot\((%[\w.]+), (%[\w.]+)\)", text := program.as_text())
            dtype = lambda name: re.search(rf"{re.escape(name)} = (\w+)\[", text)[1]
            sent = [(row.dtype, row.bytes) for row in jaxamp.compiled_collectives(program)]
            return {
                "dots": sorted(sorted(map(dtype, operands)) for operands in dots),
                "temporary": program.memory_analysis().temp_size_in_bytes,
                "sent": sorted({dtype for dtype, size in sent if size > 64}),
            }

        rule = jaxamp.use_formats()
        return {
            "bfloat16": about("default"),
            "fp8": about({**jaxamp.load_policy("default"), jax.lax.dot_general_p: rule}),
        }

    def quantized_in_loops():
        """How many times a weight is rounded to fp8 inside of the loops of three programs."""
        policy = {**jaxamp.load_policy("default"), jax.lax.dot_general_p: jaxamp.use_formats()}
        amp = functools.partial(jaxamp.amp, amp_policy=policy)
        loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
        steps = lambda w, xs: jax.lax.scan(lambda total, x: (total + loss(w, x), None), 0.0, xs)[0]

        def accumulated(w, xs):
            add = lambda total, x: (total + jax.grad(amp(loss))(w, x), None)
            return jax.lax.scan(add, jnp.zeros_like(w), xs)[0]

        def inside(fn):
            shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=one) for s in ((512, 512), (4, 384, 512))]
            text = compiled(fn, *shapes, donate=()).as_text()
            parts = re.split(r"\n(?=(?:ENTRY )?%[\w.-]+ \()", text)
            named = {re.match(r"(?:ENTRY )?%([\w.-]+)", part)[1]: part for part in parts[1:]}
            found, todo = set(), re.findall(r"body=%([\w.-]+)", text)
            while todo:
                name = todo.pop()
                if name not in found:
                    found.add(name)
                    todo += re.findall(r"(?:calls|to_apply)=%([\w.-]+)", named[name])
            return sum(len(re.findall(r"= f8e4m3fn\[512,512\]\S* convert\(", named[name])) for name in found)

        programs = {"amp": jax.grad(amp(steps)), "around": accumulated, "once": jaxamp.quantize_once(accumulated)}
        return {name: inside(fn) for name, fn in programs.items()}

    def turned():
        """The dtypes of what XLA turns for the fp8 matmuls of a gradient, with cuBLAS's kernels."""
        policy = {**jaxamp.load_policy("default"), jax.lax.dot_general_p: jaxamp.use_formats()}
        loss = lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w) @ w) ** 2)
        shapes = [jax.ShapeDtypeStruct(s, jnp.float32, sharding=one) for s in ((512, 512), (1024, 512))]
        program = (
            jax.jit(jax.grad(jaxamp.amp(loss, amp_policy=policy))).trace(*shapes).lower(lowering_platforms=("cuda",))
        )
        text = program.compile(compiler_options={"xla_gpu_enable_triton_gemm": False}).as_text()
        entry = text[text.index("\nENTRY") :]
        made = re.findall(r"%\w*(?:transpose|copy)[\w.]* = (.*?) (?:fusion|copy|transpose)\(", entry)
        return {
            "matmuls": text.count("$f8"),
            "dtypes": sorted({d for one in made for d in re.findall(r"(\w+)\[", one)}),
        }

    def laplacian():
        """Kernels and temporary bytes of the gradient of a loss with second derivatives: cast by hand, and ours."""

        def loss(weights, x):
            def value(x):
                for w in weights[:-1]:
                    x = jnp.tanh(x @ w)
                return (x @ weights[-1])[0]

            at = lambda x: sum(jax.jvp(jax.grad(value), (x,), (e,))[1] @ e for e in jnp.eye(len(x), dtype=x.dtype))
            return jnp.mean(jax.vmap(at)(x) ** 2)

        cast = lambda *args: loss(*jaxamp.cast_floating(args, jnp.bfloat16)).astype(jnp.float32)
        sizes = (4, 256, 256, 256, 1)
        weights = [jax.ShapeDtypeStruct(size, jnp.float32) for size in itertools.pairwise(sizes)]
        found = []
        for fn in (cast, jaxamp.amp(loss, compute_dtype=jnp.bfloat16)):
            program = compiled(jax.grad(fn), weights, jax.ShapeDtypeStruct((2048, 4), jnp.float32), donate=())
            entry = program.as_text().split("ENTRY")[1]
            kernels = len(re.findall(r"= .* (?:fusion|copy|custom-call)\(", entry))
            found.append([kernels, program.memory_analysis().temp_size_in_bytes])
        return {"cast": found[0], "ours": found[1]}

    def residual():
        """Dtypes of what kernels write for the gradient of a small ResNet, as large as the image or nearly, and how."""
        lax, relu = jax.lax, jax.nn.relu

        def conv(x, w):
            return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))

        def norm(x):
            mean, square = x.mean((0, 1, 2)), (x**2).mean((0, 1, 2))
            return (x - mean) * lax.rsqrt(square - mean**2 + 1e-5)

        def loss(weights, x):
            x = lax.reduce_window(
                relu(norm(conv(x, weights[0]))), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME"
            )
            for v, w in itertools.pairwise(weights[1:]):
                x = relu(norm(conv(relu(norm(conv(x, v))), w)) + x)
            return jnp.mean(conv(x, weights[0]) ** 2)

        weights = [jax.ShapeDtypeStruct((3, 3, 64, 64), jnp.float32)] * 4
        image = jax.ShapeDtypeStruct((16, 64, 64, 64), jnp.float32)
        program = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), weights, image, donate=())
        entry = program.as_text().split("ENTRY")[1]
        written = [m for m in re.findall(r"= (.*?) fusion\(", entry) if re.search(r"\[16,(64,64|32,32),64\]", m)]
        dtypes = {d for one in written for d in re.findall(r"(\w+)\[16,(?:64,64|32,32),64\]", one)}
        return {"dtypes": sorted(dtypes), "scatters": entry.count("scatter")}

    def batch_norm():
        """How often kernels that sum read an array as large as the image, for the gradient of a BatchNorm and silu."""
        lax, axes = jax.lax, (0, 1, 2)

        def norm(x, scale, offset):
            mean = x.mean(axes)
            return (x - mean) / jnp.sqrt(jnp.square(x - mean).mean(axes) + 1e-5) * scale + offset

        def loss(w, scale, offset, x):
            conv = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(conv(jax.nn.silu(norm(conv(x), scale, offset))) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3, 64, 64), (64,), (64,), (16, 32, 32, 64))]
        found = {}
        for name, disabled in (("with", []), ("without", ["sum_channels_once", "square_centered"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            entry = compiled(jax.grad(amp, (0, 1, 2)), *shapes, donate=()).as_text().split("\nENTRY")[1]
            types = dict(re.findall(r"%(\S+) = (\(.*?\)|\S+) \S+\(", entry))
            sums = re.findall(r"%\S*reduce\S* = .* fusion\((.*?)\), kind", entry)
            read = (types[operand] for operands in sums for operand in re.findall(r"%([^\s,]+)", operands))
            found[name] = sum("[16,32,32,64]" in one for one in read)
        return found

    def group_norm():
        """How many float32 arrays as large as the image kernels write, for the gradient of a GroupNorm and silu."""
        lax = jax.lax

        def norm(x, scale, offset):
            groups = x.reshape(16, 32, 32, 8, 8)
            mean, square = (jnp.mean(a, (1, 2, 4), keepdims=True) for a in (groups, groups**2))
            groups = (groups - mean) * lax.rsqrt(square - mean**2 + 1e-5)
            return groups.reshape(x.shape) * scale + offset

        def loss(w, scale, offset, x):
            conv = lambda x: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jnp.mean(conv(jax.nn.silu(norm(conv(x), scale, offset))) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3, 64, 64), (64,), (64,), (16, 32, 32, 64))]
        found = {}
        for name, disabled in (("with", []), ("without", ["sum_channels_once"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            entry = compiled(jax.grad(amp, (0, 1, 2)), *shapes, donate=()).as_text().split("\nENTRY")[1]
            written = " ".join(re.findall(r"%\S+ = (.*?) fusion\(", entry))
            sizes = [math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", written)]
            found[name] = sizes.count(16 * 32 * 32 * 64)
        return found

    def activations():
        """How many arrays as large as a layer's result kernels write for the gradient of an MLP of four layers."""

        def loss(layers, x, fun):
            for w, b in layers:
                x = fun(x @ w + b)
            return jnp.mean((x @ layers[0][0]) ** 2)

        layers = [tuple(jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (512,)))] * 4
        found = {}
        for fun in (jax.nn.relu, jnp.tanh):
            for name, disabled in (("with", []), ("without", ["keep_activations"])):
                amp = jaxamp.amp(
                    lambda p, x, fun=fun: loss(p, x, fun), compute_dtype=jnp.bfloat16, disable_passes=disabled
                )
                x = jax.ShapeDtypeStruct((4096, 512), jnp.float32)
                entry = compiled(jax.grad(amp), layers, x, donate=()).as_text().split("\nENTRY")[1]
                written = re.findall(r"%\S+ = (.*?) (?:fusion|custom-call)\(", entry)
                found[f"{fun.__name__} {name}"] = sum(kernel.count("[4096,512]") for kernel in written)
        return found

    def written_wide(gradient, *shapes, least=1):
        """The MiB of float32 arrays, of so many entries at least, that kernels write."""
        entry = compiled(gradient, *shapes, donate=()).as_text().split("\nENTRY")[1]
        written = " ".join(re.findall(r"%\S+ = (.*?) (?:fusion|copy|transpose)\(", entry))
        sizes = (math.prod(map(int, shape.split(","))) for shape in re.findall(r"f32\[([\d,]+)\]", written))
        return 4 * sum(size for size in sizes if size >= least) / 2**20

    def float32_arrays(loss, shape, name, *args):
        """How many arrays of a shape kernels write in float32 for a gradient, with and without a pass."""
        found = {}
        for key, disabled in (("with", []), ("without", [name])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            text = compiled(jax.grad(amp), *args, donate=()).as_text()
            kernels = re.findall(r"%\S+ = (.*?) (?:fusion|custom-call)\(", text.split("ENTRY")[1])
            found[key] = sum(kernel.count(f"f32[{shape}]") for kernel in kernels)
        return found

    def moved():
        """MiB that kernels write in float32 for the gradient of messages along edges with features and distances."""

        def loss(w, v, rows, points, places):
            other = places[::-1]
            distance = jnp.sum((points[places] - points[other]) ** 2, -1, keepdims=True)
            for _ in range(3):
                moved = jax.nn.silu(jnp.concatenate([rows[places], rows[other], distance], -1) @ w)
                moved = jax.nn.silu(moved @ v)
                rows = rows + jax.ops.segment_sum(moved, places, len(rows)) @ v
            return jnp.mean(rows**2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((257, 128), (128, 128), (2048, 128), (2048, 3))]
        places, found = jax.ShapeDtypeStruct((32768,), jnp.int32), {}
        for name, disabled in (("with", []), ("without", ["round_early"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            found[name] = written_wide(jax.grad(amp), *shapes, places)
        return found

    def negated():
        """Whether kernels that add at given places negate what they add: XLA has no instruction for that."""

        def loss(w, table, x, places):
            return jnp.mean((x @ w - table[places]) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (256, 64), (4096, 64))]
        places = jax.ShapeDtypeStruct((4096,), jnp.int32)
        found = {}
        for name, disabled in (("with", []), ("without", ["write_negated_lookups"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            text = compiled(jax.grad(amp, (0, 1)), *shapes, places, donate=()).as_text()
            found[name] = any(" scatter(" in part and " negate(" in part for part in text.split("\n\n"))
        return found

    def chunks(disabled):
        """What is written in float32 for a state space that is computed by chunks."""

        def loss(w, v, x, rates):
            h = x @ w
            keys, values = h[..., :64], h[..., 64:].reshape(4, 8, 128, 16, 64)
            decays = jnp.exp(-jnp.abs(rates))
            scores = jnp.einsum("bcln,bcsn,bhcls->bhcls", keys, keys, decays[..., None] * decays[..., None, :])
            inside = jnp.einsum("bhcls,bcshp->bclhp", scores, values)
            states = jnp.einsum("bcln,bhcl,bclhp->bchpn", keys, decays, values)
            y = inside + jnp.einsum("bcln,bchpn,bhcl->bclhp", keys, states, decays)
            y = y.reshape(4, 8, 128, 1024)
            return jnp.mean((y * jax.lax.rsqrt(jnp.mean(y**2, -1, keepdims=True) + 1e-6) @ v) ** 2)

        shapes = [
            jax.ShapeDtypeStruct(s, jnp.float32) for s in ((256, 1088), (1024, 256), (4, 8, 128, 256), (4, 16, 8, 128))
        ]
        amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
        return written_wide(jax.grad(amp, (0, 1)), *shapes, least=2**20)

    def u_net(disabled):
        """What is written in float32 for one level of a U-Net with pools."""
        lax = jax.lax

        def layer(x, w):
            x = lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
            return jax.nn.relu((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5))

        def loss(v, w, x):
            x = skipped = layer(x, v)
            x = layer(lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), v)
            x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skipped], -1)
            return jnp.mean(layer(x, w) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3, 64, 64), (3, 3, 128, 64), (8, 64, 64, 64))]
        amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
        return written_wide(jax.grad(amp, (0, 1)), *shapes, least=2**20)

    def head():
        """The widths of what the matmuls of a head of 50257 words read and make, and what writes all scores."""

        def loss(w, x, labels):
            scores = jnp.tanh(x) @ w.T
            return jnp.mean(jax.nn.logsumexp(scores, axis=-1) - jnp.take_along_axis(scores, labels, axis=-1)[:, 0])

        shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((50257, 768), (4096, 768))]
        labels = jax.ShapeDtypeStruct((4096, 1), jnp.int32)
        gradient = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), (0, 1))
        text = compiled(gradient, *shapes, labels, donate=()).as_text()
        widths = {int(n) for line in re.findall(r".* dot\(.*", text) for n in re.findall(r"\b(502\d\d)\b", line)}
        written = re.findall(r"%(\S+) = (\w+)\[4096,502\d\d\]\S* (?:fusion|custom-call)\(", text.split("ENTRY")[1])
        return {"widths": sorted(widths), "dtypes": [dtype for _, dtype in written], "scatters": text.count("scatter(")}

    def filters():
        """The kernels that a dilated and a transposed convolution call, and the largest of their filters."""
        lax, numbers = jax.lax, ("NHWC", "HWIO", "NHWC")

        def loss(v, w, x):
            x = lax.conv_general_dilated(x, v, (1, 1), "SAME", rhs_dilation=(4, 4), dimension_numbers=numbers)
            return jnp.mean(lax.conv_transpose(jnp.tanh(x), w, (2, 2), "SAME", dimension_numbers=numbers) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 3, 64, 64), (4, 4, 64, 32), (8, 66, 66, 64))]
        gradient = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), (0, 1))
        text = compiled(gradient, *shapes, donate=()).as_text()
        called = re.findall(r'window={size=(\d+)x\d+.*custom_call_target="__cudnn\$(\w+)"', text)
        return {"kernels": sorted(name for _, name in called), "largest": max(int(size) for size, _ in called)}

    def causal():
        """The kernels of causal convolutions, and the sizes of their filters, which have 3 entries, 8 apart."""

        def loss(w, x):
            for _ in range(2):
                x = x + jax.lax.conv_general_dilated(
                    jnp.tanh(x), w, (1,), ((16, 0),), rhs_dilation=(8,), dimension_numbers=("NWC", "WIO", "NWC")
                )
            return jnp.mean(jnp.tanh(x) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((3, 64, 64), (8, 512, 64))]
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), (0, 1)), *shapes, donate=()).as_text()
        called = re.findall(r'window={size=(\d+).*custom_call_target="__cudnn\$(\w+)"', text)
        return {"kernels": sorted(name for _, name in called), "sizes": sorted(int(size) for size, _ in called)}

    def spectral():
        """How often activations between Fourier transforms and matmuls are written in float32."""

        def loss(w, x):
            x = x @ w
            for _ in range(3):
                spectrum = jnp.fft.rfft(x, axis=1)
                low = jnp.einsum("bki,io->bko", spectrum[:, :16], jax.lax.complex(w, w))
                back = jnp.fft.irfft(jnp.zeros_like(spectrum).at[:, :16].set(low), 512, axis=1)
                x = jax.nn.gelu(back + x @ w)
            return jnp.mean((x @ w) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 64), (8, 512, 64))]
        found = {}
        for name, disabled in (("with", []), ("without", ["hold_streams_low"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            text = compiled(jax.grad(amp), *shapes, donate=()).as_text()
            kernels = re.findall(r"%\S+ = (.*?) (?:fusion|custom-call)\(", text.split("ENTRY")[1])
            found[name] = sum(kernel.count("f32[8,512,64]") for kernel in kernels)
        return found

    def mixed():
        """How often a norm in front of a matmul of tokens is written in float32, in its gradient."""

        def loss(w, x):
            h = x @ w["in"]
            norm = (h - h.mean(-1, keepdims=True)) * jax.lax.rsqrt(jnp.var(h, -1, keepdims=True) + 1e-6)
            tokens = (norm * w["scale"] + w["offset"]).swapaxes(1, 2)
            return jnp.mean((h + (tokens @ w["mix"] @ w["back"]).swapaxes(1, 2)) ** 2)

        sizes = {"in": (64, 256), "scale": (256,), "offset": (256,), "mix": (196, 128), "back": (128, 196)}
        w = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in sizes.items()}
        x = jax.ShapeDtypeStruct((32, 196, 64), jnp.float32)
        return float32_arrays(loss, "32,196,256", "round_norm_cotangents", w, x)

    def decays():
        """How often the decays of linear attention, or their cotangents, are written in float32, in its gradient."""

        def loss(w, x):
            q, k, v = (x @ w[i] for i in range(3))
            logs = jnp.cumsum(jax.nn.log_sigmoid((x @ w[3])[..., :8] + 2.0), 1).swapaxes(1, 2)
            causal = jnp.tril(jnp.ones((256, 256), bool))
            exponent = jnp.where(causal, logs[..., :, None] - logs[..., None, :], -jnp.inf)
            largest = exponent.max(-1, keepdims=True)
            heads = lambda a: a.reshape(*a.shape[:2], 8, -1)
            scores = jnp.einsum("bthd,bshd->bhts", heads(q), heads(k)) * jnp.exp(exponent - largest)
            scores = scores / jnp.maximum(jnp.abs(scores.sum(-1, keepdims=True)), jnp.exp(-largest))
            return jnp.mean(jnp.einsum("bhts,bshd->bthd", scores, heads(v)) ** 2)

        args = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 256, 256), (16, 256, 256))]
        return float32_arrays(loss, "16,8,256,256", "round_exponent_cotangents", *args)

    def forgetting():
        """How often scores, or their cotangents, are written in float32, where decays are added to them."""

        def loss(w, x):
            q, k, v = (jnp.moveaxis((x @ w[i]).reshape(4, 256, 4, 64), 1, 2) for i in range(3))
            c = jnp.cumsum(jax.nn.log_sigmoid((x @ w[3])[..., :4] + 4.0), 1).swapaxes(1, 2)
            scores = q @ k.mT / jnp.sqrt(64) + (c[..., :, None] - c[..., None, :])
            scores = jnp.where(jnp.tril(jnp.ones((256, 256), bool)), scores, -jnp.inf)
            return jnp.mean((jax.nn.softmax(scores) @ v) ** 2)

        args = [jax.ShapeDtypeStruct((4, 256, 256), jnp.float32)] * 2
        return float32_arrays(loss, "4,4,256,256", "share_cotangents", *args)

    def states():
        """The dtypes of the states of all rounds that a loop hands on, as in a linear attention by chunks."""

        def loss(w, k, v, decays):
            def step(state, x):
                k, v, decay = x
                return state * jnp.exp(-jnp.exp(decay))[..., None] + k.mT @ v, state

            states = jax.lax.scan(step, jnp.zeros((16, 128, 128)), (k @ w, v, decays))[1]
            return jnp.mean((jnp.sin(k) @ states) ** 2)

        shapes = (128, 128), (64, 16, 32, 128), (64, 16, 32, 128), (64, 16, 128)
        specs, found = [jax.ShapeDtypeStruct(s, jnp.float32) for s in shapes], {}
        for name, disabled in (("with", []), ("without", ["keep_states_low"])):
            amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
            text = compiled(jax.grad(amp, (0, 1, 2, 3)), *specs, donate=()).as_text()
            forward = next(line for line in text.splitlines() if " while(" in line)
            found[name] = re.findall(r"(\w+)\[64,16,128,128\]", forward)
        return found

    def handed_on():
        """The bytes of float32 that the two sections of a network hand on, which read one low value in float32."""

        def loss(w, x):
            h = x @ w["first"]
            few = jnp.tanh(jnp.tanh((h * jnp.exp(w["a"])) @ w["square"]) @ w["narrow"]) @ w["back"]
            return jnp.mean(jnp.sin((few + jnp.tile(h * jax.nn.softplus(w["b"]), (1, 4))) @ w["last"]) ** 2)

        sizes = {"first": (64, 256), "square": (256, 256), "narrow": (256, 32), "back": (32, 1024), "last": (1024, 8)}
        sizes |= {"a": (256,), "b": (256,)}
        w = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in sizes.items()}
        x = jax.ShapeDtypeStruct((4096, 64), jnp.float32)
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), w, x, donate=()).as_text()
        forward = [line for line in text.split("ENTRY")[1].splitlines() if "transpose(jvp" not in line]
        kernels = [found for line in forward for found in re.findall(r"%\S+ = (.*?) (?:fusion|custom-call)\(", line)]
        return sum(kernel.count("f32[4096,256]") for kernel in kernels)

    def experts():
        """How many matmuls eight experts have, and how many rows they multiply for each that there is."""

        def loss(v, w, x, sizes):
            x = jnp.tanh(jax.lax.ragged_dot(jnp.tanh(x), v, sizes))
            return jnp.mean(jax.lax.ragged_dot(x, w, sizes) ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((8, 256, 512), (8, 512, 256), (8192, 256))]
        sizes = jax.ShapeDtypeStruct((8,), jnp.int32)
        gradient = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), (0, 1, 2))
        text = compiled(gradient, *shapes, sizes, donate=()).as_text()
        rows = re.findall(r"\[(\d+),(512|1024),(?:256|512)\]\S* (?:dot|custom-call)\(", text)
        return {"matmuls": len(rows), "rows": max(int(a) * int(b) for a, b in rows) / 8192}

    def recurrent():
        """The casts of a weight in the loops of a recurrent network, and outside of them."""

        def loss(w, x):
            return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0] ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((512, 512), (64, 16, 512))]
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), *shapes, donate=()).as_text()
        return len(re.findall(r"bf16\[512,512\]\S* convert\(", text))

    def parallel():
        """The MiB that kernels of a recurrence in parallel read and write, by dtype. Its decays take 4 MiB."""

        def loss(w, x):
            rates, values = jnp.split(x @ w, 2, -1)
            keep = jnp.exp(-jax.nn.softplus(rates))
            later = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
            return jnp.mean(jax.lax.associative_scan(later, (keep, keep * values), axis=1)[1] ** 2)

        shapes = [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((64, 1024), (4, 512, 64))]
        text = compiled(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), *shapes, donate=()).as_text()
        entry = text[text.index("\nENTRY") :]
        types = dict(re.findall(r"%(\S+) = (\(.*?\)|\S+) \S+\(", entry))
        kernels = re.findall(r"%(\S+) = .* fusion\((.*?)\), kind", entry)
        moved = " ".join(types[name] for made, read in kernels for name in (made, *re.findall(r"%([^\s,]+)", read)))
        found = {"f32": 0, "bf16": 0}
        for dtype, shape in re.findall(r"\b(f32|bf16)\[([\d,]+)\]", moved):
            found[dtype] += (4 if dtype == "f32" else 2) * math.prod(map(int, shape.split(","))) / 2**20
        return found

    def selective():
        """Temporary bytes of the gradient of a selective state space: cast by hand, ours, and ours without the pass."""

        def loss(p, x):
            u, gate = jnp.split(x @ p["in"], 2, axis=-1)
            rate = jax.nn.softplus(u @ p["rate"])[..., None]
            later = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
            write = rate * (u @ p["write"])[..., None, :] * u[..., None]
            held = jax.lax.associative_scan(later, (jnp.exp(-rate * jnp.exp(p["decay"])), write), axis=1)[1]
            out = jnp.einsum("btws,bts->btw", held, u @ p["read"]) * jax.nn.silu(gate)
            return jnp.mean((out @ p["out"]) ** 2)

        sizes = {"in": (128, 256), "rate": (128, 128), "write": (128, 16), "read": (128, 16), "out": (128, 128)}
        shapes = {name: jax.ShapeDtypeStruct(s, jnp.float32) for name, s in (sizes | {"decay": (128, 16)}).items()}
        sides = {
            "cast": lambda *args: loss(*jaxamp.cast_floating(args, jnp.bfloat16)).astype(jnp.float32),
            "with": jaxamp.amp(loss, compute_dtype=jnp.bfloat16),
            "without": jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=["derive_recurrences"]),
        }
        x = jax.ShapeDtypeStruct((4, 512, 128), jnp.float32)
        programs = {name: compiled(jax.grad(side), shapes, x, donate=()) for name, side in sides.items()}
        return {name: program.memory_analysis().temp_size_in_bytes for name, program in programs.items()}

    def layers_of(disabled):
        """The matmuls, and the casts of weights, of the gradient of a loss of an energy and of its forces."""

        def energy(weights, x):
            for w in weights:
                x = jax.nn.silu(x @ w)
            return jnp.sum(x, -1)

        def loss(weights, x):
            forces = jax.grad(lambda x: jnp.sum(energy(weights, x)))(x)
            return jnp.mean(energy(weights, x) ** 2) + jnp.mean(forces**2)

        weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 4
        amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, disable_passes=disabled)
        text = compiled(jax.grad(amp), weights, jax.ShapeDtypeStruct((4096, 256), jnp.float32), donate=()).as_text()
        casts = len(re.findall(r"bf16\[256,256\]\S* convert\(%param\S*\)", text))
        return {"matmuls": len(re.findall(r" dot\(", text)), "casts": casts}

    def wire(name, asked):
        """What devices tell each other for a gradient, with weights that are gathered in a certain way."""
        program = sharded_programs.programs(mesh_of(8).devices, 512, 64)[name]()
        transform = lambda fn: fn
        if asked is not None and asked.get("cast"):
            transform = lambda fn: lambda *args: fn(*jaxamp.cast_floating(args, jnp.bfloat16))
        elif asked is not None:
            rules = {jax.lax.dot_general_p: jaxamp.use_formats()} if asked.pop("fp8", False) else {}
            words = {jaxamp.COMMUNICATION: jaxamp.Communication(**asked)}
            policy = {**jaxamp.load_policy("default"), **words, **rules}
            transform = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16, amp_policy=policy)
        with program.context():
            found = jaxamp.compiled_collectives(compiled(program.gradient(transform), *program.specs(), donate=()))
        return [[row.kind, row.dtype, row.total, row.axes, row.source] for row in found if row.bytes > 64]

    answered = {
        "wire": wire,
        "step": step,
        "two steps": two_steps,
        "law": law,
        "release": release,
        "solve": solve,
        "softmax": softmax,
        "masked": masked,
        "kept": kept,
        "laplacian": laplacian,
        "residual": residual,
        "batch norm": batch_norm,
        "group norm": group_norm,
        "activations": activations,
        "moved": moved,
        "selective": selective,
        "layers": layers_of,
        "negated": negated,
        "chunks": chunks,
        "u-net": u_net,
        "head": head,
        "filters": filters,
        "causal": causal,
        "spectral": spectral,
        "mixed": mixed,
        "decays": decays,
        "forgetting": forgetting,
        "states": states,
        "handed on": handed_on,
        "experts": experts,
        "recurrent": recurrent,
        "parallel": parallel,
        "sharded": sharded,
        "looked up": looked_up,
        "fp8": fp8,
        "quantized in loops": quantized_in_loops,
        "turned": turned,
    }
    answers = [answered[name](*rest) for name, *rest in json.load(sys.stdin)]
    print("\n" + json.dumps(answers))


if __name__ == "__main__":
    main()
