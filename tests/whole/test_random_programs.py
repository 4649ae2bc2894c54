"""Random small programs: whatever is composed, the laws of `amp` hold."""

import re
from collections.abc import Callable
from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import jax.random as jr
import numpy as np
from hypothesis import HealthCheck, given, settings
from jax import lax

import jaxamp

SIZE = 4
Op = Callable[[jax.Array, jax.Array], jax.Array]


def _scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, row: (jnp.tanh(h + row @ w), h * row), x[0], x)[1]


def _while(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 3, lambda _, y: y / 2 + jnp.tanh(y @ w), x)


def _cond(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.cond(x.shape[0] > jnp.array(2), lambda x, w: x @ w, lambda x, w: x + w, x, w)


def _attend(x: jax.Array, w: jax.Array) -> jax.Array:
    scores = jnp.where(jnp.tril(jnp.ones((SIZE, SIZE), bool)), x @ w.T, -1e9)
    return jax.nn.softmax(scores) @ x


# Each keeps the shape, and magnitudes of order one, so that the bound on the error of a whole program is known.
OPS: dict[str, Op] = {
    "matmul": lambda x, w: x @ w,
    "matmul_left": lambda x, w: w @ x,
    "add": lambda x, w: x + w,
    "sub": lambda x, w: x - w,
    "mul": lambda x, w: x * jnp.tanh(w),
    "tanh": lambda x, w: jnp.tanh(x),
    "relu": lambda x, w: jax.nn.relu(x),
    "exp": lambda x, w: jnp.exp(jnp.clip(x, -2, 1)),
    "softmax": lambda x, w: jax.nn.softmax(x),
    "norm": lambda x, w: x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-2),
    "sum": lambda x, w: x / 2 + jnp.sum(x, 0, keepdims=True) / SIZE,
    "transpose": lambda x, w: x.T,
    "reshape": lambda x, w: x.reshape(2, -1)[::-1].reshape(SIZE, SIZE),
    "concatenate": lambda x, w: jnp.concatenate([x[:2], w[2:]]),
    "attend": _attend,
    "scan": _scan,
    "while": _while,
    "cond": _cond,
}
WRAPS: dict[str, Callable[[Op], Op]] = {
    "plain": lambda op: op,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "vmap": lambda op: lambda x, w: jax.vmap(op, (0, None))(jnp.stack([x, -x]), w)[0],
    "branches": lambda op: lambda x, w: op(x, w) / 2 + x / 2,
}

Steps = list[tuple[str, str]]
steps = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.sampled_from(sorted(WRAPS))), min_size=3, max_size=8)


def random_programs(examples: int) -> settings:
    quiet = list(HealthCheck)
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


def compose(chosen: Steps) -> Op:
    wrapped = [WRAPS[wrap](OPS[op]) for op, wrap in chosen]

    def program(x: jax.Array, w: jax.Array) -> tuple[jax.Array, jax.Array]:
        for op in wrapped:
            x = op(x, w)
        return x, jnp.sum(x)

    return program


def arguments(dtype: Any = jnp.float32) -> tuple[jax.Array, jax.Array]:
    x, w = (jr.normal(jr.key(seed), (SIZE, SIZE), jnp.float32) for seed in (0, 1))
    return x.astype(dtype), (w / 2).astype(dtype)


def assert_near(got: Any, want: Any, rtol: float) -> None:
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(1.0, np.abs(y).max()))


def types(out: Any) -> list[tuple[Any, ...]]:
    return [(x.shape, x.dtype, x.weak_type) for x in out]


def text(fn: Callable[..., Any], *args: Any) -> str:
    """A jaxpr to compare: without the addresses of functions."""
    return re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(fn)(*args)))


@random_programs(15)
@given(chosen=steps, low=st.sampled_from([jnp.float16, jnp.bfloat16]))
def test_values_and_types_are_those_of_the_program(chosen: Steps, low: Any):
    program, args = compose(chosen), arguments()
    amped = jaxamp.amp(program, compute_dtype=low)
    out = amped(*args)
    assert types(out) == types(jax.eval_shape(program, *args))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, jax.jit(program)(*arguments(jnp.float64)))
    tolerance = 8 * len(chosen) * float(jnp.finfo(low).eps)
    assert_near(out, want, tolerance)
    twice = jaxamp.amp(amped, compute_dtype=low)
    for again in jax.jit(lambda *args: (amped(*args), twice(*args)))(*args):
        assert types(again) == types(out)
        assert_near(again, out, tolerance)


@random_programs(6)
@given(chosen=steps)
def test_gradient_commutes_with_amp(chosen: Steps):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(compose(chosen)(x, w)[0]))

    args, low = arguments(), jnp.bfloat16
    of_amp = jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=low), (0, 1)))(*args)
    amp_of = jaxamp.amp(jax.grad(loss, (0, 1)), compute_dtype=low)(*args)
    assert types(of_amp) == types(amp_of)
    assert_near(of_amp, amp_of, 16 * len(chosen) * float(jnp.finfo(low).eps))


@random_programs(30)
@given(chosen=steps)
def test_empty_policy_leaves_the_jaxpr_equal(chosen: Steps):
    program, args = compose(chosen), arguments()
    assert text(jaxamp.amp(program, amp_policy={}), *args) == text(program, *args)
