"""One of two processes that train together; how two are started; also the training that both are held against.

Gradients are small integers over 16: sums are exact in any order, and runs can be compared on bits.
"""

import contextlib
import os
import pickle
import socket
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp

STEPS, ROWS = 6, 16
INFINITE, LARGE = 2, 4  # steps with an example that overflows at any scale, and one that does at large scales
OPTIMIZER = optax.sgd(2.0**-6, momentum=0.5)
REDOS = {"skip": 0, "redo": 2}


def batch(step):
    rng = np.random.default_rng(step)
    x = rng.integers(-1, 2, (ROWS, 4)).astype(np.float32)
    y = rng.integers(-2, 3, (ROWS, 2)).astype(np.float32)
    if step in (INFINITE, LARGE):
        x[-1], y[-1] = 0.0, 128.0  # the last example belongs to the last process
        x[-1, 0] = np.inf if step == INFINITE else 1.0
    return x, y


def loss(params, x, y):
    """Linear, so that gradients are exact in float16 at each step."""
    return jnp.sum((x @ params) * y) / ROWS


def step_fn(redo_on_nan, axis_name=None, sum_gradients=lambda grads: grads):
    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(loss), redo_on_nan=redo_on_nan, axis_name=axis_name)

    def step(run, x, y):
        params, opt_state, state = run
        state, grads = grad_fn(params, x, y, dynamic_scaler_state=state)
        params, opt_state = jaxamp.update_if_finite(params, OPTIMIZER, opt_state, sum_gradients(grads), state.finite)
        return params, opt_state, state

    return step


def train(step, put=lambda tree: tree, put_batch=lambda x: x, *, steps=STEPS, batch=batch):
    """The last parameters and states, and what the scaler told after each step."""
    params = jnp.zeros((4, 2))
    state = jaxamp.DynamicScalerState(scaler=2.0**14, patience=3).as_arrays()
    run, told = put((params, OPTIMIZER.init(params), state)), []
    for i in range(steps):
        run = step(run, *map(put_batch, batch(i)))
        told.append(jaxamp.scaler_metrics(jax.tree.map(local, run[2])))
    return jax.tree.map(local, run), [{k: v for k, v in now.items() if k != "underflow"} for now in told]


def local(array):
    """What this process holds of an array that all hold alike."""
    shards = [np.asarray(shard.data) for shard in array.addressable_shards]
    assert all(shard.tobytes() == shards[0].tobytes() for shard in shards)
    return shards[0]


def sharded_runs(mesh, **which):
    everywhere, rows = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))

    def put(tree):
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(everywhere, np.asarray(x)), tree)

    def put_batch(x):
        half = np.split(x, jax.process_count())[jax.process_index()]
        return jax.make_array_from_process_local_data(rows, half)

    def sharded(step, **options):
        return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(P(), P("data"), P("data")), out_specs=P(), **options))

    def psum(grads):
        return lax.psum(grads, "data")

    for name, redos in REDOS.items():
        steps = {
            "jit": jax.jit(step_fn(redos)),
            "shard_map": sharded(step_fn(redos, "data")),
            "shard_map_unchecked": sharded(step_fn(redos, "data", psum), check_vma=False),
        }
        for kind, step in steps.items():
            yield (kind, name), train(step, put, put_batch, **which)


def main(process, port, path, **which):
    jax.config.update("jax_cpu_collectives_implementation", "gloo")
    jax.distributed.initialize(f"127.0.0.1:{port}", 2, process, initialization_timeout=60)
    assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 2, 4)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    results = dict(sharded_runs(mesh, **which))
    with open(path, "wb") as file:
        pickle.dump(jax.tree.map(np.asarray, results), file)
    jax.distributed.shutdown()


# -- both


def free_port():
    with contextlib.closing(socket.socket()) as sock:
        sock.bind(("127.0.0.1", 0))
        return sock.getsockname()[1]


def run_two(script, folder, environment, timeout):
    """What each of two processes ended with, for all cases."""
    port, paths = str(free_port()), [folder / f"{i}.pickle" for i in range(2)]
    flags = os.environ["XLA_FLAGS"].replace("device_count=8", "device_count=2")
    processes = [
        subprocess.Popen(
            [sys.executable, script, str(i), port, str(path)],
            env={**environment, "XLA_FLAGS": flags},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for i, path in enumerate(paths)
    ]

    def output_of(process):
        try:
            return process.communicate(timeout=timeout)[0]
        except subprocess.TimeoutExpired:  # one that waits for the other says why after all
            process.kill()
            return process.communicate()[0]

    try:
        outputs = list(map(output_of, processes))
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)
    return [pickle.loads(path.read_bytes()) for path in paths]


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
