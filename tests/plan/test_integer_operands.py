"""Matmuls of integers and bools with floats run as if the integers were floats."""

import jax
import jax.numpy as jnp
import pytest
from helpers import in_float64, matmul_dtypes, near, normal

import jaxamp

pytestmark = pytest.mark.promotes  # the programs do

X, W = normal(0, 16, 16, scale=0.3), normal(1, 16, 16, scale=0.3)
MASK = jnp.tril(jnp.ones((16, 16), bool))
LABELS = jnp.arange(16) % 8

CASES = {
    "a mask from the left": lambda w, x: jnp.sum(jnp.tanh(MASK @ (x @ w)) ** 2),
    "a mask from the right": lambda w, x: jnp.sum(jnp.tanh((x @ w) @ MASK) ** 2),
    "a batch": lambda w, x: jnp.sum(jnp.tanh(jax.vmap(lambda a: MASK @ a)(jnp.stack([x @ w, x]))) ** 2),
    "rows of a table": lambda w, x: jnp.sum(jnp.tanh(jax.nn.one_hot(LABELS, 16, dtype=jnp.int8) @ w) ** 2),
    "an unsigned table": lambda w, x: jnp.sum(jnp.einsum("ij,jk->ik", (x > 0).astype(jnp.uint8), w) ** 2),
    "a mask that was counted": lambda w, x: jnp.sum(jnp.tanh(MASK.astype(jnp.int32) @ (x @ w)) ** 2),
}


@pytest.mark.parametrize("fn", CASES.values(), ids=CASES)
def test_they_are_low_and_right(fn):
    amp = jaxamp.amp(fn, compute_dtype=jnp.float16)
    jaxpr = jax.make_jaxpr(jax.value_and_grad(amp))(W, X)
    assert set(matmul_dtypes(jaxpr)) == {("float16", "float16")}
    found, expected = jax.value_and_grad(amp)(W, X), in_float64(jax.value_and_grad(fn), W, X)
    assert all(near(a, b, 4e-3) for a, b in zip(found, expected, strict=True))
    report = jaxamp.amp_report(fn)(W, X)
    assert report.low_share == 1.0


def test_integers_that_may_be_positions_stay_wide():
    fn = lambda w, steps: jnp.sum(jnp.sin(steps @ w))
    steps = jnp.arange(16 * 16).reshape(16, 16)
    assert matmul_dtypes(jax.make_jaxpr(jaxamp.amp(fn))(W, steps)) == [("int32", "float32")]
    (row,) = (row for row in jaxamp.amp_report(fn)(W, steps).rows if row.kind == "matmul" and row.phase == "forward")
    assert (row.multiplied, row.reason) == ("float32", "made from positions")
    report = jaxamp.amp_report(fn)(W, steps)
    assert (report.low_share, report.matmul_flops["float32"] > 0) == (0.0, True)
