"""Threads that trace, run and differentiate at once; memory over ten thousand eager calls."""

import contextlib
import gc
import sys
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits
from random_programs import OPS, WRAPS, arguments, compose
from small_networks import PARAMS, X, attention, mlp

import jaxamp

pytestmark = pytest.mark.soak
SEED = 80_000

# -- threads

THREADS, ROUNDS = 6, 2
POLICIES: dict[str, Any] = {
    "default": "default",
    "torch": "torch",
    "wide tanh": {**jaxamp.load_policy("fast"), jax.lax.tanh_p: jaxamp.use_original_precision},
    "low exp": {**jaxamp.load_policy("default"), jax.lax.exp_p: jaxamp.use_precision(jnp.bfloat16)},
}
CONTEXTS: list[Callable[[], Any]] = [
    contextlib.nullcontext,
    lambda: jax.default_matmul_precision("highest"),
    lambda: jax.numpy_dtype_promotion("strict"),
]


def stopped(x, w):
    with jaxamp.amp_stop():
        x = x @ w
    return jnp.tanh(x @ w)


def loss_of(fn):
    return lambda x, w: jnp.sum(jnp.sin(fn(x, w)))


WAYS: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = {
    "call": lambda fn: fn,
    "jit": jax.jit,
    "grad": lambda fn: jax.grad(loss_of(fn), (0, 1)),
    "vmap": lambda fn: lambda x, w: jax.vmap(fn, (0, None))(jnp.stack([x, 2 * x]), w),
    "scaled": lambda fn: (
        lambda x, w: jaxamp.dynamic_scale_grad(loss_of(fn))(
            x, w, dynamic_scaler_state=jaxamp.DynamicScalerState(scaler=np.float32(8.0))
        )
    ),
}


def tasks():
    """Functions of the same arguments: a program, under a policy, in a dtype, in one of the ways. New each time."""
    rng, made = np.random.default_rng(SEED), {}
    for i in range(16):
        chosen = [(str(rng.choice(sorted(OPS))), str(rng.choice(sorted(WRAPS)))) for _ in range(4)]
        whole = compose(chosen)
        program = stopped if i % 8 == 0 else lambda x, w, whole=whole: whole(x, w)[0]
        policy, way = str(rng.choice(list(POLICIES))), list(WAYS)[i % len(WAYS)]
        low = (jnp.bfloat16, jnp.float16)[i % 2]
        amped = jaxamp.amp(program, compute_dtype=low, amp_policy=POLICIES[policy])
        made[i, policy, way, low.__name__] = WAYS[way](amped)
    return made


def test_threads_get_what_one_thread_gets(figures):
    args = arguments()
    expected = []
    for context in CONTEXTS:
        with context():
            expected.append({name: fn(*args) for name, fn in tasks().items()})
    together = threading.Barrier(THREADS)

    def work(thread, shared):
        """All tasks, in an order of its own: half of them on functions that all threads call first at once."""
        rng, which = np.random.default_rng((SEED, thread)), thread % len(CONTEXTS)
        own, out = tasks(), {}
        together.wait()
        with CONTEXTS[which]():
            for name in [list(own)[i] for i in rng.permutation(len(own))]:
                out[name] = (shared if rng.random() < 0.5 else own)[name](*args)
        return which, out

    interval, calls = sys.getswitchinterval(), 0
    sys.setswitchinterval(1e-5)
    try:
        with ThreadPoolExecutor(THREADS) as pool:
            for _ in range(ROUNDS):
                shared = tasks()
                for which, out in pool.map(work, range(THREADS), [shared] * THREADS):
                    for name, found in out.items():
                        assert_same_bits(found, expected[which][name])
                        calls += 1
    finally:
        sys.setswitchinterval(interval)
    assert calls == THREADS * ROUNDS * len(tasks())
    figures(threads=THREADS, calls=calls)


# -- memory

CALLS, WARM_UP = 10_000, 3_000
LEAK = 512  # bytes per call: half of what the test must see
STATM = Path("/proc/self/statm")


def resident():
    """Bytes of this process that are in memory."""
    gc.collect()
    return int(STATM.read_text().split()[1]) * 4096


def cached():
    """How many entries the package's own caches have."""
    entries = 0
    for name, module in list(sys.modules.items()):
        for x in vars(module).values() if name.split(".")[0] == "jaxamp" else ():
            if hasattr(x, "cache_info"):
                entries += x.cache_info().currsize
            elif isinstance(x, weakref.WeakKeyDictionary | weakref.WeakSet):
                entries += len(x)
    return entries


CALLED = {
    "amp": jaxamp.amp(mlp),
    "gradient": jax.grad(jaxamp.amp(mlp)),
    "amp of the gradient": jaxamp.amp(jax.grad(mlp)),
}


@pytest.mark.skipif(not STATM.exists(), reason="resident memory is read from Linux")
@pytest.mark.parametrize("name", CALLED)
def test_calls_leave_nothing_behind(name, figures):
    fn = CALLED[name]
    for _ in range(WARM_UP):
        fn(PARAMS, X)
    before, arrays, entries = resident(), len(jax.live_arrays()), cached()
    for _ in range(CALLS):
        fn(PARAMS, X)
    grown = resident() - before
    assert len(jax.live_arrays()) == arrays
    assert cached() == entries
    assert grown < LEAK * CALLS, f"{grown / CALLS:.0f} bytes per call"
    figures(name, calls=CALLS, bytes_per_call=grown / CALLS)


def test_functions_that_are_dropped_are_freed(figures):
    """Each is new, is traced, differentiated and let go, and holds an array."""
    dropped = []
    for i in range(200):
        held = jnp.full((64, 64), float(i))
        fn = lambda params, x, held=held, net=(attention, mlp)[i % 2]: net(params, x) + held.sum()
        if i % 4 == 0:
            jax.grad(jaxamp.amp(fn))(PARAMS, X)
        else:
            jaxamp.amp(fn)(PARAMS, X)
        dropped.append(weakref.ref(fn))
        del fn, held
    gc.collect()
    alive = sum(ref() is not None for ref in dropped)
    assert alive == 0
    figures(functions=len(dropped), still_alive=alive)
