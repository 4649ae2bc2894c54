"""Train with several processes that are killed and go on, also as another number of processes.

    pip install -e '.[examples]' && python examples/train_processes.py

Without `--process` this is a driver, which starts processes on this machine: a run of two that nothing disturbs; a run
that it kills in the middle and starts again; and one that goes on from the same checkpoint as one process, is killed
again, and ends as two. The second run ends with the bits of the first. The third ends near it: other numbers of devices
sum the gradients in other parts, and rounding depends on them.

On a cluster, start the same file once on each host, and again after a failure:

    python examples/train_processes.py --coordinator HOST:PORT --processes N --process I --folder SHARED_FOLDER
"""

import argparse
import json
import shutil
import socket
import subprocess
import sys
import sysconfig
import tempfile
from pathlib import Path

import jax
import matplotlib.pyplot as plt
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.experimental.multihost_utils import process_allgather
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from rich.progress import Progress

import jaxamp

CONTEXT, WIDTH, ROWS, EVERY = 16, 32, 64, 5  # bytes that a prediction sees; a checkpoint is saved after EVERY steps
OPTIMIZER = optax.adamw(2e-3)


def loss_fn(mesh, params, text):
    """How well a network with one hidden layer predicts the next byte. Each device holds a part of each weight."""
    up, down = (jax.lax.with_sharding_constraint(params[name], NamedSharding(mesh, P())) for name in ("up", "down"))
    x = params["bytes"][text[:, :-1]].reshape(len(text), -1)
    return optax.softmax_cross_entropy_with_integer_labels(jax.nn.gelu(x @ up) @ down, text[:, -1]).mean()


def begin(mesh):
    """Parameters and states of the first step, each array where it belongs."""
    sizes = {"bytes": (256, WIDTH), "up": (CONTEXT * WIDTH, 256), "down": (256, 256)}
    keys = jax.random.split(jax.random.key(0), len(sizes))
    params = {name: jax.random.normal(key, s) / s[0] ** 0.5 for key, (name, s) in zip(keys, sizes.items(), strict=True)}
    scaler = jaxamp.DynamicScalerState(scaler=2.0**24, patience=10).as_arrays()  # too large: some steps are skipped
    run = jax.tree.map(np.asarray, (params, OPTIMIZER.init(params), scaler))
    shardings = jax.tree.map(lambda x: NamedSharding(mesh, P("data") if x.ndim else P()), run)
    return jax.tree.map(lambda x, s: jax.make_array_from_callback(x.shape, s, lambda i: x[i]), run, shardings)


def work(options):
    """What one of the processes does: train from the latest checkpoint to the end."""
    if options.devices:
        jax.config.update("jax_num_cpu_devices", options.devices)
    jax.distributed.initialize(options.coordinator, options.processes, options.process)
    mesh = jax.make_mesh((jax.device_count(),), ("data",), (AxisType.Auto,))
    folder, is_first = Path(options.folder).absolute(), jax.process_index() == 0
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    library = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int32)
    loss = lambda params, text: loss_fn(mesh, params, text)
    if options.precision != "float32":
        loss = jaxamp.amp(loss, compute_dtype=options.precision)
    grad_fn = jaxamp.dynamic_scale_value_and_grad(loss)

    def step(run, text):
        params, state, scaler = run
        scaler, (loss, grads) = grad_fn(params, text, dynamic_scaler_state=scaler)
        params, state = jaxamp.update_if_finite(params, OPTIMIZER, state, grads, scaler.finite)
        return (params, state, scaler), loss

    run = begin(mesh)
    shardings = jax.tree.map(lambda x: x.sharding, run)
    step = jax.jit(step, donate_argnums=0, out_shardings=(shardings, NamedSharding(mesh, P())))
    how = ocp.CheckpointManagerOptions(save_interval_steps=EVERY, max_to_keep=2, enable_async_checkpointing=False)
    with ocp.CheckpointManager(folder / "checkpoints", options=how) as manager:
        done = manager.latest_step() or 0
        if done:  # the restored arrays lie as those of `run` do, on whatever mesh the saved ones lay
            run = manager.restore(done, args=ocp.args.StandardRestore(run))
        for i in range(done, options.steps):
            starts = np.random.default_rng(i).integers(len(library) - CONTEXT, size=(ROWS, 1))
            text = library[starts + np.arange(CONTEXT + 1)]  # each device takes its rows
            text = jax.make_array_from_callback(text.shape, NamedSharding(mesh, P("data")), text.__getitem__)
            run, loss = step(run, text)
            manager.save(i + 1, args=ocp.args.StandardSave(run))
            if is_first:
                print(json.dumps({"step": i + 1, "loss": float(loss), **jaxamp.scaler_metrics(run[2])}), flush=True)
    whole = process_allgather(run, tiled=True)
    if is_first:
        np.savez(folder / "end.npz", *jax.tree.leaves(whole))


# -- the driver


def start(name, processes, folder, options, progress, kill_at=None):
    """Run processes until they are done or, after a step, killed. Returns what the first said of each step."""
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        port = sock.getsockname()[1]
    command = [sys.executable, __file__, "--coordinator", f"localhost:{port}", "--processes", str(processes)]
    for flag in ("devices", "precision", "steps"):
        command += [f"--{flag}", str(getattr(options, flag))]
    folder.mkdir(parents=True, exist_ok=True)
    task, steps = progress.add_task(f"{name:>32}", total=options.steps), {}
    with open(folder / "log.txt", "a") as log:
        workers = [
            subprocess.Popen(
                [*command, "--folder", str(folder), "--process", str(i)],
                stdout=subprocess.PIPE if i == 0 else log,
                stderr=log,
            )
            for i in range(processes)
        ]
        for line in workers[0].stdout:
            if not line.startswith(b"{"):  # other libraries print too
                continue
            told = json.loads(line)
            steps[told["step"]] = told
            progress.update(task, completed=told["step"])
            if told["step"] == kill_at:
                for worker in workers:
                    worker.kill()
        codes = [worker.wait() for worker in workers]
    if any(codes) and kill_at is None:
        raise SystemExit(f"A process failed; the last of its log:\n{(folder / 'log.txt').read_text()[-2000:]}")
    return steps


def distance(folder, other):
    """The largest relative distance of an array of one run from that of another; 0 if all are the same on bits."""
    with np.load(folder / "end.npz") as found, np.load(other / "end.npz") as expected:
        pairs = [(found[name], expected[name]) for name in expected]
    if all(x.tobytes() == y.tobytes() for x, y in pairs):
        return 0.0
    return max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in pairs if x.ndim)


def drive(options):
    """Three runs, two of them disturbed."""
    folder, middle = Path(options.folder or tempfile.mkdtemp()), options.steps // 2
    whole, again, moved = (folder / name for name in ("whole", "again", "moved"))
    with Progress() as progress:
        run = lambda *args, **kwargs: start(*args, options, progress, **kwargs)
        runs = {"nothing happens": run("two processes", 2, whole)}
        killed = run(f"two, killed at step {middle}", 2, again, kill_at=middle)
        shutil.copytree(again, moved)
        resumed = run("started again as two", 2, again)
        later = middle + EVERY + 1
        killed_again = run(f"or as one, killed at step {later}", 1, moved, kill_at=later)
        runs["killed and started again"] = killed | resumed
        runs["on one process, then on two"] = killed | killed_again | run("which goes on as two", 2, moved)
    last, same, other = runs["nothing happens"][options.steps], distance(again, whole), distance(moved, whole)
    print(f"Loss {last['loss']:.4f}, scale {last['scale']:.0f}, {last['total_skipped']} steps skipped in all.")
    print(f"Started again after step {min(resumed) - 1}: {'the same bits' if same == 0 else f'{same:.1e} away'}.")
    print(f"On other devices for a while: {other:.1e} away, because they round the sum of other parts.")
    draw(runs, options.out)
    print(f"Picture of the runs: {options.out}")
    if same != 0 or not other < 1e-2:
        raise SystemExit("A disturbed run did not end where the undisturbed one did.")


def draw(runs, path):
    plt.switch_backend("Agg")
    fig, axes = plt.subplots(figsize=(6, 4), layout="constrained")
    looks = ({"lw": 6, "alpha": 0.4}, {"lw": 2.5}, {"lw": 0.8, "color": "k"})  # a wide line first, thin ones on top
    for (name, run), look in zip(runs.items(), looks, strict=True):
        axes.plot(sorted(run), [run[step]["loss"] for step in sorted(run)], label=name, **look)
    axes.set(xlabel="step", ylabel="cross entropy of the batch", title="Training loss")
    axes.grid(alpha=0.3)
    axes.legend()
    fig.savefig(path, dpi=150)


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--coordinator", help="of a cluster: the address of the first process")
    parser.add_argument("--processes", type=int, help="of a cluster: how many there are")
    parser.add_argument("--process", type=int, help="of a cluster: which of them this is")
    parser.add_argument("--folder", help="where to save checkpoints; all processes see it")
    parser.add_argument("--devices", type=int, default=2, help="virtual devices of a process, where it has a CPU only")
    parser.add_argument("--precision", choices=("float32", "bfloat16", "float16"), default="float16")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--small", action="store_true", help="16 steps")
    parser.add_argument("--out", default="processes.png", help="where to save the picture of the runs")
    options = parser.parse_args()
    options.steps = 16 if options.small else options.steps
    (drive if options.process is None else work)(options)


if __name__ == "__main__":
    main()
