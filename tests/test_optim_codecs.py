"""The laws of the codecs: bounds over random arrays, and over all mantissas of some exponents."""

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings

from jaxamp.optim import Momentum, Variance, Weight
from jaxamp.optim._scales import FORMATS, HALF, WIDE
from jaxamp.optim._weights import join, split, widen

quickly = settings(max_examples=40, deadline=None)
BF16, F16 = jnp.bfloat16, jnp.float16


def arrays(low, high, signed):
    """32 numbers with magnitudes of many decades, zeros among them."""
    exponents = st.one_of(st.none(), st.floats(low, high))
    numbers = st.tuples(exponents, st.sampled_from([-1, 1] if signed else [1]))
    value = lambda number: 0.0 if number[0] is None else number[1] * 10.0 ** number[0]
    return st.lists(numbers, min_size=32, max_size=32).map(lambda xs: np.array([*map(value, xs)], np.float32))


# -- scales


@quickly
@given(st.floats(-18.5, 19.0), st.integers(0, 10**6))
def test_a_wide_scale_is_within_a_unit(exponent, count):
    x = np.float32(10.0**exponent)
    again = float(WIDE.decode(WIDE.encode(jnp.asarray(x), count)))
    assert abs(again / x - 1) <= 2.0**-9
    assert abs(float(WIDE.decode(WIDE.encode(jnp.asarray(x)))) / x - 1) <= 2.0**-10


def test_a_wide_scale_is_unbiased_over_steps():
    """The mean over steps is nearer than rounding to nearest: by the golden ratio, errors of neighbours cancel."""
    x = jnp.asarray(np.random.default_rng(0).uniform(1, 2, 256).astype(np.float32))
    stored = jax.vmap(lambda count: WIDE.decode(WIDE.encode(x, count)))(jnp.arange(100))
    assert float(jnp.max(jnp.abs(jnp.mean(stored, 0) / x - 1))) < 4e-5
    assert float(jnp.max(jnp.abs(WIDE.decode(WIDE.encode(x)) / x - 1))) > 5e-4


@pytest.mark.parametrize("count", [None, 0, 7])
def test_all_wide_scales_are_read_as_written(count):
    codes = jnp.arange(2**16, dtype=jnp.uint16)
    assert jnp.array_equal(WIDE.encode(WIDE.decode(codes), count), codes)


def test_scales_out_of_range_are_the_nearest_that_there_are():
    x = jnp.array([0.0, 2.0**-80, 2.0**-63, 2.0**100], jnp.float32)
    assert WIDE.encode(x, 3).tolist() == [0, 0, 0, 65535]
    assert float(WIDE.decode(jnp.uint16(65535))) > 3e19


def test_the_published_scale_is_float16():
    x = jnp.array([0.0, 1e-9, 3e-6, 1.0, 1e5])
    assert HALF.encode(x, 5).dtype == F16
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(np.asarray(HALF.encode(x, 5)), np.asarray(x).astype(np.float16))


# -- moments


@quickly
@given(arrays(-12, 8, signed=True), st.sampled_from(sorted(FORMATS)), st.integers(0, 1000))
def test_momentum_is_within_a_hundredth_of_the_largest(x, scales, count):
    codec, form = Momentum(), FORMATS[scales]
    top = codec.top(jnp.asarray(x), 0)
    if scales == "float16" and not 1e-4 < float(top) < 6e4:
        return
    again = codec.decode(codec.encode(jnp.asarray(x), top), form.decode(form.encode(top, count)))
    largest = np.abs(x).max()
    assert np.abs(np.asarray(again) - x).max() <= largest / 100 + 2.0**-63
    assert not np.asarray(again)[x == 0].any()


@quickly
@given(arrays(-20, 12, signed=False), st.booleans(), st.integers(0, 1000))
def test_the_root_of_variance_is_within_a_250th_of_the_largest(x, floor, count):
    codec = Variance(floor)
    top = codec.top(jnp.asarray(x), 0)
    codes = codec.encode(jnp.asarray(x), top)
    again = np.sqrt(np.asarray(codec.decode(codes, WIDE.decode(WIDE.encode(top, count)))))
    assert np.abs(again - np.sqrt(x)).max() <= np.sqrt(x.max()) / 250 + 2.0**-63
    assert not again[x == 0].any()
    if floor:
        assert np.asarray(codes)[x > 0].all()


def test_all_codes_are_read_as_written():
    codes = jnp.arange(-127, 128, dtype=jnp.int8)
    assert jnp.array_equal(Momentum().encode(Momentum().decode(codes, jnp.float32(3.0)), jnp.float32(3.0)), codes)
    codes = jnp.arange(256).astype(jnp.uint8)
    assert jnp.array_equal(Variance().encode(Variance().decode(codes, jnp.float32(3.0)), jnp.float32(3.0)), codes)


def test_a_group_of_zeros_is_zeros():
    x = jnp.zeros(32)
    for codec in (Momentum(), Variance(), Variance(floor=False)):
        codes = codec.encode(x, codec.top(x, 0))
        assert not codec.decode(codes, WIDE.decode(jnp.uint16(0))).any()


def test_codecs_are_values():
    assert Momentum() == Momentum()
    assert hash(Variance(True)) == hash(Variance())
    assert Weight(BF16, 24) != Weight(BF16, 32)


# -- weights


BOUNDS = {(BF16, 24): 1.6e-5, (F16, 24): 2e-6, (BF16, 32): 1.3e-7, (F16, 32): 1.3e-7}


def mantissas(exponent, stride):
    return ((exponent + 127) << 23 | np.arange(0, 2**23, stride, dtype=np.uint32)).astype(np.uint32).view(np.float32)


def check_weights(dtype, bits, exponent, stride):
    """The law of `_weights.py`, on the mantissas of one exponent, of both signs."""
    x = mantissas(exponent, stride)
    x = np.concatenate([x, -x])
    low, correction = jax.jit(Weight(dtype, bits).encode)(x)
    np.testing.assert_array_equal(np.asarray(low), x.astype(np.dtype(dtype)))
    again = np.asarray(jax.jit(join)(low, correction))
    assert np.abs(again.astype(np.float64) / x - 1).max() <= BOUNDS[dtype, bits]
    exact = np.asarray(low).astype(np.float32) == x
    assert exact.any()
    assert not np.asarray(correction)[exact].any()
    np.testing.assert_array_equal(again[exact], x[exact])
    # Written again, a weight is what it was, on one side or the other of a tie: a step of length zero changes nothing.
    # Only the tie below a power of two has a coarser side.
    twice = np.asarray(join(*split(jnp.asarray(again), dtype, correction.dtype)))
    assert (np.abs(twice - again) > 2.0**-22 * np.abs(again)).mean() < 2e-4
    assert (np.abs(twice - again) <= BOUNDS[dtype, bits] * np.abs(again)).all()


EXPONENTS = {BF16: (-100, -20, -1, 0, 7, 100), F16: (-13, -5, -1, 0, 7, 14)}


@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize(("dtype", "exponent"), [(BF16, -20), (BF16, 0), (F16, -13), (F16, 7)])
def test_weights_keep_their_law(dtype, bits, exponent):
    check_weights(dtype, bits, exponent, stride=61)


@pytest.mark.slow
@pytest.mark.parametrize("bits", [24, 32])
@pytest.mark.parametrize(("dtype", "exponent"), [(d, e) for d, es in EXPONENTS.items() for e in es])
def test_weights_keep_their_law_on_all_mantissas(dtype, bits, exponent):
    check_weights(dtype, bits, exponent, stride=1)


def test_a_correction_only_helps():
    x = jax.random.normal(jax.random.key(0), 10_000)
    error = lambda low, correction: float(jnp.abs(join(low, correction) - x).sum())
    none = error(x.astype(BF16), None)
    assert error(*split(x, BF16, jnp.int16)) < error(*split(x, BF16, jnp.int8)) < none / 100


def test_subnormal_float16_parameters_have_a_correction():
    x = jnp.linspace(-6e-5, 6e-5, 1001, dtype=jnp.float32)
    low, correction = jax.jit(Weight(F16, 24).encode)(x)
    assert float(jnp.max(jnp.abs(join(low, correction) - x))) <= 2.0**-25 / 127 * 0.51
    assert jnp.array_equal(low, x.astype(F16))


def test_all_float16_numbers_are_widened_by_their_bits():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wide = np.asarray(widen(jnp.asarray(x)))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(wide, x.astype(np.float32))


def test_zeros_and_infinities_are_what_they_are():
    x = jnp.array([0.0, -0.0, jnp.inf, -jnp.inf])
    for dtype in (BF16, F16):
        low, _ = Weight(dtype, 24).encode(x)
        np.testing.assert_array_equal(np.asarray(low).astype(np.float32), np.asarray(x))
    low, correction = Weight(BF16, 24).encode(x[:2])
    assert not correction.any()
