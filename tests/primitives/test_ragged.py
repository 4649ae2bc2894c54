"""Ragged matmuls by blocks of rows. What is compiled for a GPU: `tests/whole`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax import lax

from jaxamp._primitives.ragged import by_blocks, suits

ROWS, GROUPS, IN, OUT = 2048, 8, 6, 5
SIZES = {
    "even": [256] * 8,
    "uneven": [100, 700, 3, 0, 257, 512, 300, 176],
    "all in one": [0, 0, 0, 2048, 0, 0, 0, 0],
    "all in the last": [0] * 7 + [2048],
    "rows in no group": [10, 0, 300, 1, 2, 3, 4, 5],
    "none": [0] * 8,
}
FORWARD = lax.RaggedDotDimensionNumbers((((1,), (1,)), ((), ())), (0,), (0,))
BY_ROWS = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))  # the gradient of the rows
BY_MATRICES = lax.RaggedDotDimensionNumbers((((0,), (0,)), ((), ())), (0,), ())  # that of the matrices
X, DY, W = normal(0, ROWS, IN), normal(1, ROWS, OUT), normal(2, GROUPS, IN, OUT)
PASSES = {"forward": (X, W, FORWARD), "rows": (DY, W, BY_ROWS), "matrices": (X, DY, BY_MATRICES)}


def params(numbers, **others):
    return {
        "ragged_dot_dimension_numbers": numbers,
        "precision": lax.Precision.HIGHEST,
        "preferred_element_type": jnp.float32,
        "group_offset": None,
    } | others


@functools.cache
def compiled(numbers):
    return jax.jit(functools.partial(by_blocks, **params(numbers)))


def multiplied(x, w, sizes, numbers, dtype=jnp.int32):
    return compiled(numbers)(x, w, jnp.asarray(sizes, dtype))


def oracle(x, w, sizes, numbers):
    """In float64, group by group."""
    x, w, ends = np.asarray(x, np.float64), np.asarray(w, np.float64), np.cumsum(sizes)
    parts = [slice(end - size, end) for size, end in zip(sizes, ends, strict=True)]
    if numbers is BY_MATRICES:
        return np.stack([x[part].T @ w[part] for part in parts])
    out = np.zeros((ROWS, OUT if numbers is FORWARD else IN))
    for part, matrix in zip(parts, w, strict=True):
        out[part] = x[part] @ (matrix if numbers is FORWARD else matrix.T)
    return out


@pytest.mark.parametrize("name", PASSES)
@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
def test_it_is_near_float64(name, sizes):
    x, w, numbers = PASSES[name]
    assert suits(x, w, jnp.asarray(sizes), **params(numbers))
    found = multiplied(x, w, sizes, numbers)
    expected = oracle(x, w, sizes, numbers)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * max(1, np.abs(expected).max()))


@pytest.mark.parametrize("name", PASSES)
def test_rows_in_no_group_have_no_say(name):
    """Whatever they are. The block of the last group lies over them."""
    x, w, numbers = PASSES[name]
    sizes = [100, 700, 3, 0, 257, 512, 300, 0]
    bad = jnp.where(jnp.arange(ROWS) >= sum(sizes), jnp.nan, 0.0)[:, None]
    both = (x + bad, w + bad) if name == "matrices" else (x + bad, w)
    found = multiplied(*both, sizes, numbers)
    np.testing.assert_allclose(found, oracle(x, w, sizes, numbers), rtol=0, atol=1e-4)


@pytest.mark.parametrize("dtype", [jnp.uint32, jnp.int16])
def test_sizes_may_be_integers_of_any_kind(dtype):
    sizes = SIZES["uneven"]
    found = multiplied(X, W, sizes, FORWARD, dtype)
    np.testing.assert_allclose(found, oracle(X, W, sizes, FORWARD), rtol=0, atol=1e-5)


def test_low_operands_are_added_up_in_float32():
    x, dy = X.astype(jnp.bfloat16), jnp.ones((ROWS, OUT), jnp.bfloat16)
    sizes = [ROWS] + [0] * 7
    found = multiplied(x, dy, sizes, BY_MATRICES)
    np.testing.assert_allclose(found, oracle(x.astype(jnp.float32), dy.astype(jnp.float32), sizes, BY_MATRICES), 1e-3)


BATCHED = lax.RaggedDotDimensionNumbers((((2,), (2,)), ((0,), (0,))), (1,), (1,))


@pytest.mark.parametrize(
    ("shapes", "numbers", "others"),
    [
        (((128, 8), (8, 8, 8), (8,)), FORWARD, {}),
        (((4096, 8), (2, 8, 8), (2,)), FORWARD, {}),
        (((2, 4096, 8), (2, 8, 8, 8), (2, 8)), BATCHED, {}),
        (((4096, 8), (8, 8, 8), (8,)), FORWARD, {"group_offset": 1}),
    ],
    ids=["few rows", "two groups", "a batch", "an offset"],
)
def test_others_are_left_alone(shapes, numbers, others):
    assert not suits(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes), **params(numbers, **others))
