"""The cases in which mixed precision goes wrong elsewhere: values against float64, dtypes on jaxprs."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import W, both, count, dtypes_of, jaxpr_of, matmul_dtypes, normal
from jax import lax
from oracles import amped, assert_near, assert_right, with_gradients

import jaxamp

# -- positions

HALF = 4


def rotate(x: jax.Array, angle: jax.Array) -> jax.Array:
    left, right = x[:, :HALF], x[:, HALF:]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def frequencies(dtype: Any) -> jax.Array:
    return 10_000.0 ** (-jnp.arange(HALF, dtype=dtype) / HALF)


ANGLES: dict[str, Callable[[jax.Array, jax.Array], jax.Array]] = {
    "multiply": lambda position, frequency: position[:, None] * frequency,
    "einsum": lambda position, frequency: jnp.einsum("t,f->tf", position, frequency),
    "matmul": lambda position, frequency: position[:, None] @ frequency[None, :],
}
POSITIONS: dict[str, Callable[[jax.Array, Any], jax.Array]] = {
    "arange": lambda _, dtype: jnp.arange(4096, dtype=dtype)[-8:],
    "int_arange": lambda _, dtype: jnp.arange(4096)[-8:].astype(dtype),
    "int_argument": lambda positions, dtype: positions.astype(dtype),
}


@both
@pytest.mark.parametrize("angle", ANGLES)
@pytest.mark.parametrize("position", POSITIONS)
def test_rotary_embedding_is_right_at_position_4095(position: str, angle: str, low: Any):
    def query(x: jax.Array, w: jax.Array, positions: jax.Array) -> jax.Array:
        angles = ANGLES[angle](POSITIONS[position](positions, x.dtype), frequencies(x.dtype))
        return rotate(x @ w, angles)

    assert_right(query, low, normal(0, 8, 4), normal(1, 4, 2 * HALF), jnp.arange(4088, 4096), wrt=(0, 1))


@both
def test_timestep_embedding_then_mlp_is_right(low: Any):
    def model(t: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        phase = t.astype(w1.dtype)[:, None] * frequencies(w1.dtype)
        return jnp.tanh(jnp.concatenate([jnp.sin(phase), jnp.cos(phase)], -1) @ w1) @ w2

    args = jnp.array([0, 257, 611, 999]), normal(0, 2 * HALF, 8) / 2, normal(1, 8, 3)
    assert_right(model, low, *args, wrt=(1, 2), rtol=2e-2)
    assert matmul_dtypes(jaxpr_of(amped(model, low), *args)) == [(jnp.dtype(low).name,) * 2] * 2


@both
def test_pixels_and_one_hots_are_no_positions(low: Any):
    def pixels(x: jax.Array, w: jax.Array) -> jax.Array:
        return (x.astype(w.dtype) / 255) @ w

    def labels(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.one_hot(x, 4, dtype=w.dtype) @ w

    w = normal(0, 4, 3)
    for fn, x in ((pixels, jnp.array([[0, 1, 254, 255]], jnp.uint8)), (labels, jnp.array([0, 3, 1]))):
        assert matmul_dtypes(jaxpr_of(amped(fn, low), x, w)) == [(jnp.dtype(low).name,) * 2]
        assert_right(fn, low, x, w, wrt=(1,))


@both
def test_outer_products_are_not_lowered(low: Any):
    def outer(a: jax.Array, b: jax.Array) -> jax.Array:
        return jnp.einsum("i,j->ij", a, b)

    assert matmul_dtypes(jaxpr_of(amped(outer, low), normal(0, 3), normal(1, 4))) == [("float32", "float32")]


# -- numbers out of range

LOWEST = float(jnp.finfo(jnp.float32).min)
MASKS: dict[str, Callable[[jax.Array, jax.Array, float], jax.Array]] = {
    "where": lambda scores, mask, value: jnp.where(mask, scores, value),
    "additive": lambda scores, mask, value: scores + (1 - mask.astype(scores.dtype)) * value,
    "full_like": lambda scores, mask, value: lax.select(mask, scores, jnp.full_like(scores, value)),
}


def attention(q: jax.Array, k: jax.Array, v: jax.Array, masked: Callable[[jax.Array], jax.Array]) -> jax.Array:
    return jax.nn.softmax(masked(q @ k.T)) @ v


def attention_args() -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    mask = jnp.tril(jnp.ones((5, 5), bool)).at[2].set(False)  # row 2 attends to nothing
    return normal(0, 5, 4), normal(1, 5, 4), normal(2, 5, 3), mask


@both
@pytest.mark.parametrize("value", [-1e9, LOWEST])
@pytest.mark.parametrize("how", MASKS)
def test_masked_attention_is_finite_and_right(how: str, value: float, low: Any):
    """The reference is float32: in float64 an additive mask does not swallow the scores of a fully masked row."""

    def fn(q: jax.Array, k: jax.Array, v: jax.Array, mask: jax.Array) -> jax.Array:
        return attention(q, k, v, lambda scores: MASKS[how](scores, mask, value))

    args, wrt = attention_args(), (0, 1, 2)
    want = jax.jit(with_gradients(fn, wrt))(*args)
    assert_near(jax.jit(with_gradients(amped(fn, low), wrt))(*args), want, 3e-2)
    assert_near(amped(with_gradients(fn, wrt), low)(*args), want, 3e-2)


@both
@pytest.mark.parametrize("value", [-1e9, LOWEST])
def test_attention_bias_in_an_argument_is_finite_and_right(value: float, low: Any):
    def fn(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array) -> jax.Array:
        return attention(q, k, v, lambda scores: scores + bias)

    q, k, v, mask = attention_args()
    args, wrt = (q, k, v, jnp.where(mask, 0.0, value)), (0, 1, 2)
    want = jax.jit(with_gradients(fn, wrt))(*args)
    assert_near(jax.jit(with_gradients(amped(fn, low), wrt))(*args), want, 3e-2)


@both
@pytest.mark.parametrize("eps", [1e-6, 1e-12])
def test_epsilon_of_a_norm_after_a_matmul_survives(eps: float, low: Any):
    def rms_norm(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y / jnp.sqrt(jnp.mean(y * y, -1, keepdims=True) + eps)

    def unit(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y / (jnp.linalg.norm(y, axis=-1, keepdims=True) + eps)

    x, w = normal(0, 3, 4), normal(1, 4, 8)
    for fn in (rms_norm, unit):
        assert_right(fn, low, x, w, wrt=(0, 1), rtol=2e-2)
        assert (amped(fn, low)(jnp.zeros_like(x), w) == 0).all()


@both
def test_norm_of_hundreds_is_300_with_its_gradient(low: Any):
    x = 100 * jnp.ones((3, 3))

    def of_input(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x)

    def of_matmul(x: jax.Array) -> jax.Array:
        return jnp.linalg.norm(x @ jnp.eye(3, dtype=x.dtype))

    for fn in (of_input, of_matmul):
        value, gradient = jax.value_and_grad(amped(fn, low))(x)
        np.testing.assert_allclose(value, 300, rtol=1e-3)
        np.testing.assert_allclose(gradient, jnp.full((3, 3), 1 / 3), rtol=5e-3)
        np.testing.assert_allclose(amped(jax.grad(fn), low)(x), jnp.full((3, 3), 1 / 3), rtol=5e-3)


# -- softmax


@both
def test_log_softmax_over_50000_classes_is_right(low: Any):
    def loss(x: jax.Array, w: jax.Array, labels: jax.Array) -> jax.Array:
        return -jnp.take_along_axis(jax.nn.log_softmax(x @ w), labels[:, None], 1)[:, 0]

    args = normal(0, 2, 8), normal(1, 8, 50_000), jnp.array([7, 49_999])
    assert_right(loss, low, *args, wrt=(0,))


@both
def test_difference_to_logsumexp_is_right(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return y - jax.nn.logsumexp(y, -1, keepdims=True)

    args = normal(0, 3, 4), normal(1, 4, 6)
    assert_right(fn, low, *args, wrt=(0, 1), rtol=2e-2)
    assert set(dtypes_of("sub", jaxpr_of(amped(fn, low), *args))) == {"float32"}


@both
def test_subtraction_of_the_maximum_before_exp_runs_in_float32(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.exp(y - y.max(-1, keepdims=True)) @ w.T

    jaxpr = jaxpr_of(amped(fn, low), normal(0, 3, 4), normal(1, 4, 6))
    assert dtypes_of("sub", jaxpr) == ["float32"]
    assert dtypes_of("exp", jaxpr) == ["float32"]
    assert len(matmul_dtypes(jaxpr)) == 2
    assert {name for pair in matmul_dtypes(jaxpr) for name in pair} == {jnp.dtype(low).name}


@both
def test_softmax_statistics_are_float32(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.nn.softmax(x @ w) @ w.T

    jaxpr = jaxpr_of(amped(fn, low), normal(0, 3, 4), normal(1, 4, 6))
    for primitive in ("sub", "exp", "reduce_sum", "div"):
        assert dtypes_of(primitive, jaxpr) == ["float32"]


# -- long sums

TINY = 0.0025  # four of them make 0.01 in a matmul


def _hundredth(w: jax.Array) -> jax.Array:
    return (jnp.ones((1, 4), w.dtype) @ w)[0, 0]


def _sum_by_scan(w: jax.Array) -> jax.Array:
    xs = (jnp.ones((10_000, 4), w.dtype) @ w)[:, 0]
    return lax.scan(lambda total, x: (total + x, None), jnp.zeros((), w.dtype), xs)[0]


def _sum_by_fori_loop(w: jax.Array) -> jax.Array:
    return lax.fori_loop(0, 10_000, lambda _, total: total + _hundredth(w), jnp.zeros((), w.dtype))


def _sum_by_while_loop(w: jax.Array) -> jax.Array:
    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return carry[0] + 1, carry[1] + _hundredth(w)

    return lax.while_loop(lambda carry: carry[0] < 10_000, body, (0, jnp.zeros((), w.dtype)))[1]


def _sum_by_cumsum(w: jax.Array) -> jax.Array:
    return jnp.cumsum((jnp.ones((10_000, 4), w.dtype) @ w)[:, 0])[-1]


def _sum_by_associative_scan(w: jax.Array) -> jax.Array:
    return lax.associative_scan(jnp.add, (jnp.ones((10_000, 4), w.dtype) @ w)[:, 0])[-1]


def _sum_by_scatter(w: jax.Array) -> jax.Array:
    updates = (jnp.ones((10_000, 4), w.dtype) @ w)[:, 0]
    return jnp.zeros(3, w.dtype).at[jnp.zeros(10_000, int)].add(updates)[0]


def _sum_by_segments(w: jax.Array) -> jax.Array:
    updates = (jnp.ones((10_000, 4), w.dtype) @ w)[:, 0]
    return jax.ops.segment_sum(updates, jnp.zeros(10_000, int), 3)[0]


SUMS = [
    _sum_by_scan,
    _sum_by_fori_loop,
    _sum_by_while_loop,
    _sum_by_cumsum,
    _sum_by_associative_scan,
    _sum_by_scatter,
    _sum_by_segments,
]


@both
@pytest.mark.parametrize("total", SUMS, ids=lambda fn: fn.__name__.removeprefix("_sum_by_"))
def test_ten_thousand_hundredths_make_a_hundred(total: Callable[[jax.Array], jax.Array], low: Any):
    w = jnp.full((4, 1), TINY)
    np.testing.assert_allclose(amped(total, low)(w), 100, rtol=5e-3)


@both
def test_gradient_of_a_long_sum_is_right(low: Any):
    w = jnp.full((4, 1), TINY)
    for total in (_sum_by_scan, _sum_by_cumsum, _sum_by_scatter, _sum_by_segments):
        np.testing.assert_allclose(jax.grad(amped(total, low))(w), jnp.full((4, 1), 10_000.0), rtol=5e-3)


@both
def test_scatter_add_of_4096_hundredths_gives_40_96(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.zeros(2, x.dtype).at[jnp.ones(4096, int)].add((x @ w)[:, 0])

    np.testing.assert_allclose(amped(fn, low)(jnp.ones((4096, 4)), jnp.full((4, 1), TINY)), [0, 40.96], rtol=5e-3)


@both
def test_batch_statistics_of_data_far_from_zero_are_right(low: Any):
    """The matmul rounds each number to 0.5 (bfloat16); the statistics must add nothing to that."""

    def two_pass(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.stack([y.mean(0), y.var(0)])

    def one_pass(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.stack([y.mean(0), (y * y).mean(0) - y.mean(0) ** 2])

    x, w = 100 + normal(0, 2048, 2), jnp.eye(2)
    for fn in (two_pass, one_pass):
        mean, var = amped(fn, low)(x, w)
        np.testing.assert_allclose(mean, 100, rtol=2e-3)
        np.testing.assert_allclose(var, x.var(0), rtol=6e-2)


@both
def test_variance_and_its_gradient_are_right(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.var(x @ w, -1)

    assert_right(fn, low, normal(0, 3, 4), normal(1, 4, 64), wrt=(0, 1), rtol=2e-2)


@both
@pytest.mark.promotes
def test_small_steps_of_an_optimizer_are_not_lost(low: Any):
    optimizer = optax.adam(1e-5)

    def step(w: jax.Array, state: Any, x: jax.Array) -> jax.Array:
        grads = jax.grad(lambda w: jnp.sum(x @ w))(w)
        updates, _ = optimizer.update(grads, state, w)
        return optax.apply_updates(w, updates)

    w = jnp.ones((4, 2))
    moved = amped(step, low)(w, optimizer.init(w), jnp.ones((3, 4)))
    np.testing.assert_allclose(moved - w, -1e-5, rtol=2e-2)


# -- integers


@both
@pytest.mark.parametrize(
    "place",
    [
        lambda x: jnp.argmax(x).astype(x.dtype),
        lambda x: lax.top_k(x, 1)[1][0].astype(x.dtype),
        lambda x: (x[2577] * 2577).astype(jnp.int32).astype(x.dtype),
        lambda x: jnp.cumsum(x >= 0)[2576].astype(x.dtype),
    ],
    ids=["argmax", "top_k", "rounded", "cumsum"],
)
def test_places_are_not_rounded_by_a_matmul(low: Any, place: Any):
    x = jnp.zeros(4096).at[2577].set(1.0)
    assert amped(lambda x: (place(x)[None, None] @ jnp.ones((1, 1)))[0, 0], low)(x) == 2577.0


@both
@pytest.mark.parametrize(
    "mask",
    [
        lambda x: jnp.where(x > 0, x, 0),
        lambda x: x * (x > 0).astype(jnp.int32).astype(x.dtype),
        lambda x: x * jnp.asarray(np.array([1, 0, 1, 1], np.int32)).astype(x.dtype),
    ],
    ids=["where", "cast", "constant"],
)
def test_small_integers_are_harmless(low: Any, mask: Any):
    assert matmul_dtypes(jaxpr_of(amped(lambda x, w: mask(x) @ w, low), normal(0, 3, 4), normal(1, 4, 4))) == [
        (jnp.dtype(low).name,) * 2
    ]


@both
@pytest.mark.parametrize("make", [jnp.full, np.full])
def test_a_mask_that_is_closed_over_stays_finite(low: Any, make: Any):
    mask = make((2, 2), -1e9, jnp.float32)
    out = amped(lambda x: (x @ x + mask) @ jnp.zeros((2, 2)), low)(jnp.ones((2, 2)))
    np.testing.assert_array_equal(out, 0.0)


@both
def test_small_entries_of_a_closed_over_array_are_no_epsilons(low: Any):
    bias = np.array([1e-7, 1.0, 2.0, 3.0], np.float32)
    jaxpr = jaxpr_of(amped(lambda x: jnp.tanh(x @ x + bias) @ x, low), normal(0, 4, 4))
    assert dtypes_of("add", jaxpr) == [jnp.dtype(low).name]


# -- functions in functions


def nested(depth, around):
    def layer(x):
        return jnp.tanh(x @ W)

    for _ in range(depth):
        layer = around(layer)
    return lambda x: jnp.sum(layer(x))


def in_jit(f):
    return jax.jit(lambda x: 1.5 * f(x))


def in_scan(f):
    return lambda x: lax.scan(lambda carry, _: (f(carry), None), x, None, length=1)[0]


@pytest.mark.parametrize("around", [in_jit, in_scan])
def test_functions_sixty_deep(around):
    x = jnp.ones((4, 4)) * 0.1
    fn = nested(60 if around is in_jit else 20, around)
    found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(x)
    np.testing.assert_allclose(found, jax.grad(fn)(x), rtol=2e-2)


def test_loops_that_only_hold_a_loop_are_not_computed_again():
    amp = jaxamp.amp(nested(5, in_scan), compute_dtype=jnp.bfloat16)
    assert count("remat2", jax.make_jaxpr(amp)(jnp.ones((4, 4)))) == 1
