"""How sensitive values are to rounding."""

import itertools
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from jaxamp._formats import Format
from jaxamp._plan.sensitivity import (
    FREE,
    LOW,
    OUT_OF_RANGE,
    POSITION,
    PROTECTED,
    Sensitivity,
    Value,
    combine,
    sensitivity_of_constant,
)

F16, BF16 = np.dtype(jnp.float16), np.dtype(jnp.bfloat16)


@pytest.mark.parametrize(
    ("number", "dtype", "expected"),
    [
        (1.0, F16, FREE),
        (0.0, F16, FREE),
        (np.inf, F16, FREE),
        (np.nan, F16, FREE),
        (-1e9, F16, OUT_OF_RANGE),
        (-1e9, BF16, FREE),
        (1e-12, F16, PROTECTED),
        (1e-12, BF16, FREE),
        (np.array([1e-12, 1.0]), F16, FREE),  # among the entries of an array small numbers are everywhere
        (np.array([1e9, 1.0]), F16, OUT_OF_RANGE),
        (np.array([np.inf, np.nan, -1e9, 1.0]), F16, OUT_OF_RANGE),
        (np.array([np.inf, np.nan, 1.0]), F16, FREE),
        (np.zeros((0, 3)), F16, FREE),
        (3 + 4j, F16, FREE),
        (256, BF16, FREE),
        (257, BF16, POSITION),
        (2049, F16, POSITION),
        (True, BF16, FREE),
        (np.uint8(255), BF16, FREE),
    ],
)
def test_constants(number, dtype, expected):
    assert sensitivity_of_constant(number, dtype) is expected


@pytest.mark.parametrize("worst", [1.0, np.inf])
def test_a_large_constant_is_not_copied(worst):
    constant = np.full((1024, 1024), 1.0, np.float32).T
    constant[3, 5] = worst
    tracemalloc.start()
    try:
        assert sensitivity_of_constant(constant, F16) is FREE
        assert tracemalloc.get_traced_memory()[1] < constant.nbytes / 4
    finally:
        tracemalloc.stop()


def test_a_position_that_meets_data_is_one_no_longer():
    assert combine([POSITION, FREE]) is POSITION
    assert combine([POSITION, LOW]) is PROTECTED
    assert combine([POSITION, OUT_OF_RANGE]) is OUT_OF_RANGE
    assert combine([]) is FREE


def test_combining_does_not_depend_on_order_or_repetition():
    for some in itertools.combinations(Sensitivity, 2):
        assert combine(some) is combine(some[::-1]) is combine([*some, *some])


def test_a_value_is_low_by_its_format():
    assert Value(LOW, Format(BF16, low=True)).is_low
    assert not Value(LOW, Format(np.dtype(np.float32))).is_low
    assert not Value(FREE, None).is_low
    assert Value(FREE, None).dtype is None
