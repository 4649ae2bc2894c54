"""The laws of the codecs: bounds over random arrays, and over all mantissas of some exponents."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16
from hypothesis import given, settings

from jaxamp.optim import Momentum, Variance, Weight
from jaxamp.optim._moment_codecs import round_to_int
from jaxamp.optim._scale_formats import FORMATS, HALF, WIDE
from jaxamp.optim._weight_codec import join, split, widen

quickly = settings(max_examples=40, deadline=None)


def arrays(low, high, signed):
    """32 numbers with magnitudes of many decades, zeros among them."""
    exponents = st.one_of(st.none(), st.floats(low, high))
    numbers = st.tuples(exponents, st.sampled_from([-1, 1] if signed else [1]))
    value = lambda number: 0.0 if number[0] is None else number[1] * 10.0 ** number[0]
    return st.lists(numbers, min_size=32, max_size=32).map(lambda xs: np.array([*map(value, xs)], np.float32))


# -- scales


@partial(jax.jit, static_argnames="form")
def stored(x, count=None, form=WIDE):
    """A scale, written and read."""
    return form.decode(form.encode(x, count))


@quickly
@given(st.floats(-18.5, 19.0), st.integers(0, 10**6))
def test_a_wide_scale_is_within_a_unit(exponent, count):
    x = np.float32(10.0**exponent)
    assert abs(float(stored(x, count)) / x - 1) <= 2.0**-9
    assert abs(float(stored(x)) / x - 1) <= 2.0**-10


def test_a_wide_scale_is_unbiased_over_steps():
    """The mean over steps is nearer than rounding to nearest: by the golden ratio, errors of neighbours cancel."""
    x = np.random.default_rng(0).uniform(1, 2, 256).astype(np.float32)
    over_steps = np.asarray(jax.vmap(partial(stored, x))(np.arange(100)))
    assert np.abs(over_steps.mean(0) / x - 1).max() < 4e-5
    assert np.abs(np.asarray(stored(x)) / x - 1).max() > 5e-4


@pytest.mark.parametrize("count", [None, 0, 7])
def test_all_wide_scales_are_read_as_written(count):
    codes = np.arange(2**16, dtype=np.uint16)
    np.testing.assert_array_equal(jax.jit(lambda x: WIDE.encode(WIDE.decode(x), count))(codes), codes)


def test_scales_out_of_range_are_the_nearest_that_there_are():
    x = jnp.array([0.0, 2.0**-80, 2.0**-63, 2.0**100], jnp.float32)
    assert jax.jit(WIDE.encode)(x, 3).tolist() == [0, 0, 0, 65535]
    assert float(WIDE.decode(jnp.uint16(65535))) > 3e19


def test_the_published_scale_is_float16():
    x = np.float32([0.0, 1e-9, 3e-6, 1.0, 1e5])
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(jax.jit(HALF.encode)(x, 5), x.astype(np.float16), strict=True)


# -- moments


@partial(jax.jit, static_argnums=(0, 1))
def _written(codec, form, x, count):
    top = codec.top(x, 0)
    codes = codec.encode(x, top)
    return codes, codec.decode(codes, form.decode(form.encode(codec.scale(top), count)))


def written(codec, form, x, count):
    """The codes of a group, and what is read of them."""
    return tuple(np.asarray(part) for part in _written(codec, form, x, count))


@quickly
@given(arrays(-12, 8, signed=True), st.sampled_from(sorted(FORMATS)), st.integers(0, 1000))
def test_momentum_is_within_a_hundredth_of_the_largest(x, scales, count):
    largest = np.abs(x).max()
    if scales == "float16" and not 1e-4 < largest < 6e4:
        return
    _, again = written(Momentum(), FORMATS[scales], x, count)
    assert np.abs(again - x).max() <= largest / 100 + 2.0**-63
    assert not again[x == 0].any()


@quickly
@given(arrays(-20, 12, signed=False), st.booleans(), st.integers(0, 1000))
def test_the_root_of_variance_is_within_a_250th_of_the_largest(x, floor, count):
    codes, again = written(Variance(floor), WIDE, x, count)
    again = np.sqrt(again)
    assert np.abs(again - np.sqrt(x)).max() <= np.sqrt(x.max()) / 250 + 2.0**-63
    assert not again[x == 0].any()
    if floor:
        assert codes[x > 0].all()


def test_all_codes_are_read_as_written():
    for codec, codes in ((Momentum(), np.arange(-127, 128)), (Variance(), np.arange(256))):
        codes = codes.astype(codec.dtype)
        again = jax.jit(lambda codes, top, codec=codec: codec.encode(codec.decode(codes, codec.scale(top)), top))
        np.testing.assert_array_equal(again(codes, np.float32(3.0)), codes)


@pytest.mark.parametrize("dtype", [jnp.int8, jnp.uint8, jnp.int16])
def test_codes_are_rounded_to_nearest_even(dtype):
    least, most = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    halves = np.arange(2 * least, 2 * most + 1, dtype=np.float32) / 2
    for x in (halves, np.nextafter(halves[1:-1], np.float32(-np.inf)), np.nextafter(halves[1:-1], np.float32(np.inf))):
        np.testing.assert_array_equal(jax.jit(round_to_int, static_argnums=1)(x, dtype), np.rint(x).astype(dtype))


def test_a_group_of_zeros_is_zeros():
    for codec in (Momentum(), Variance(), Variance(floor=False)):
        codes, again = written(codec, WIDE, np.zeros(32, np.float32), 0)
        assert not codes.any()
        assert not again.any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", [WIDE, HALF])
def test_a_group_with_a_momentum_that_is_not_finite_starts_anew(bad, form):
    x = np.ones(32, np.float32)
    x[5] = bad
    _, again = written(Momentum(), form, x, 0)
    assert np.abs(again).max() < 1e-15
    _, again = written(Variance(), form, np.where(np.isnan(x), x, 1.0), 0)
    assert np.all(again < 1e-15) == np.isnan(bad)


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
    twice = np.asarray(jax.jit(lambda x: join(*split(x, dtype, correction.dtype)))(again))
    assert (np.abs(twice - again) > 2.0**-22 * np.abs(again)).mean() < 2e-4
    assert (np.abs(twice - again) <= BOUNDS[dtype, bits] * np.abs(again)).all()


EXPONENTS = {BF16: (-100, 0, 100), F16: (-13, 0, 14)}


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
    x = np.random.default_rng(0).normal(size=10_000).astype(np.float32)
    error = lambda again: np.abs(np.asarray(again, np.float32) - x).sum()
    by_byte, by_two = (error(jax.jit(lambda x, n=n: join(*split(x, BF16, n)))(x)) for n in (jnp.int8, jnp.int16))
    assert by_two < by_byte < error(x.astype(BF16)) / 100


def test_subnormal_float16_parameters_have_a_correction():
    x = np.linspace(-6e-5, 6e-5, 1001, dtype=np.float32)
    low, correction = jax.jit(Weight(F16, 24).encode)(x)
    assert np.abs(np.asarray(jax.jit(join)(low, correction)) - x).max() <= 2.0**-25 / 127 * 0.51
    np.testing.assert_array_equal(low, x.astype(np.float16))


def test_all_float16_numbers_are_widened_by_their_bits():
    x = np.arange(2**16, dtype=np.uint16).view(np.float16)
    wide = np.asarray(jax.jit(widen)(x))
    with np.errstate(invalid="ignore"):
        np.testing.assert_array_equal(wide, x.astype(np.float32))


def test_zeros_and_infinities_are_what_they_are():
    x = np.float32([0.0, -0.0, np.inf, -np.inf])
    for dtype in (BF16, F16):
        low, correction = jax.jit(Weight(dtype, 24).encode)(x)
        np.testing.assert_array_equal(np.asarray(low).astype(np.float32), x)
        assert not np.asarray(correction)[:2].any()
