"""The laws of the codecs: bounds over random arrays, and over all mantissas of some exponents."""

from functools import partial

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16
from hypothesis import given, settings

from jaxamp.optim import Momentum, PublishedMomentum, PublishedVariance, Variance, Weight
from jaxamp.optim._dither import DITHER_BITS, dither
from jaxamp.optim._groups import Groups
from jaxamp.optim._published_codecs import round_to_int
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
@given(st.floats(-37.5, 38.0), st.integers(0, 10**6))
def test_a_wide_scale_is_within_a_unit(exponent, count):
    x = np.float32(10.0**exponent)
    assert abs(float(stored(x, count)) / x - 1) <= 2.0**-8
    assert abs(float(stored(x)) / x - 1) <= 2.0**-9


def test_a_wide_scale_is_unbiased_over_steps():
    """The mean over steps is nearer than rounding to nearest: by the golden ratio, errors of neighbours cancel."""
    x = np.random.default_rng(0).uniform(1, 2, 256).astype(np.float32)
    over_steps = np.asarray(jax.vmap(partial(stored, x))(np.arange(100)))
    assert np.abs(over_steps.mean(0) / x - 1).max() < 8e-5
    assert np.abs(np.asarray(stored(x)) / x - 1).max() > 1e-3


@pytest.mark.parametrize("count", [None, 0, 7])
def test_all_wide_scales_are_read_as_written(count):
    codes = np.arange(0x100, 0xFF00, dtype=np.uint16)  # normal numbers
    np.testing.assert_array_equal(jax.jit(lambda x: WIDE.encode(WIDE.decode(x), count))(codes), codes)


def test_the_largest_scale_is_finite():
    x = jnp.array([0.0, np.finfo(np.float32).max, np.inf], jnp.float32)
    assert jax.jit(WIDE.encode)(x, 3).tolist() == [0, 0xFEFF, 0xFEFF]
    assert np.isfinite(WIDE.decode(jnp.uint16(0xFEFF)))


def test_the_published_scale_is_float16():
    x = np.float32([0.0, 1e-9, 3e-6, 1.0, 1e5])
    expected = np.minimum(x, 65504.0).astype(np.float16)
    np.testing.assert_array_equal(jax.jit(HALF.encode)(x, 5), expected, strict=True)


# -- moments


@partial(jax.jit, static_argnums=(0, 1))
def _written(codec, form, x, count, up):
    top = codec.top(x, 0)
    codes = codec.encode(x, top, up)
    return codes, codec.decode(codes, form.decode(form.encode(codec.scale(top), count)))


def written(codec, form, x, count, up=None):
    """The codes of a group, and what is read of them."""
    return tuple(np.asarray(part) for part in _written(codec, form, x, count, up))


@quickly
@given(arrays(-12, 8, signed=True), st.sampled_from(sorted(FORMATS)), st.integers(0, 1000))
def test_published_momentum_is_within_a_hundredth_of_the_largest(x, scales, count):
    largest = np.abs(x).max()
    if scales == "float16" and not 1e-4 < largest < 6e4:
        return
    _, again = written(PublishedMomentum(), FORMATS[scales], x, count)
    assert np.abs(again - x).max() <= largest / 100 + 2.0**-63
    assert not again[x == 0].any()


@quickly
@given(arrays(-20, 12, signed=False), st.booleans(), st.integers(0, 1000))
def test_the_root_of_a_published_variance_is_within_a_170th_of_the_largest(x, floor, count):
    codes, again = written(PublishedVariance(floor), WIDE, x, count)
    again = np.sqrt(again)
    assert np.abs(again - np.sqrt(x)).max() <= np.sqrt(x.max()) / 170 + 2.0**-63
    assert not again[x == 0].any()
    if floor:
        assert codes[x > 0].all()


def position_dither(count):
    """For each position in a group of 32."""
    return dither(count, Groups((32,), 32, -1))[0]


SLACK = 2.0**-7  # of a scale in two bytes, rounded by the step's number


@quickly
@given(arrays(-12, 8, signed=True), st.sampled_from(sorted(FORMATS)), st.integers(0, 1000), st.booleans())
def test_momentum_is_within_a_code(x, scales, count, dithered):
    largest = np.abs(x).max()
    if scales == "float16" and not 1e-2 < largest < 6e4:
        return
    up = position_dither(count) if dithered else None
    _, again = written(Momentum(half=scales == "float16"), FORMATS[scales], x, count, up)
    size = np.abs(x)
    bound = np.where(size > largest / 16, size / 16, size / 8 + largest / 2**14) / (1 if dithered else 2)
    assert np.all(np.abs(again - x) <= bound + SLACK * size + 1e-36)
    assert not again[x == 0].any()


@quickly
@given(arrays(-20, 12, signed=False), st.integers(0, 1000), st.booleans())
def test_variance_is_within_a_code_and_never_zero(x, count, dithered):
    up = position_dither(count) if dithered else None
    _, again = written(Variance(), WIDE, x, count, up)
    s = x.max()
    bound = np.where(x > s / 16, x / 32, np.where(x > s / 2**14, x / 8, x / 4 + s / 2**25))
    assert np.all(np.abs(again - x) <= bound / (1 if dithered else 2) + SLACK * x + s / 2**25 + 1e-36)
    assert again.all() or x.max() < 1e-30


@pytest.mark.parametrize("codec", [Momentum(), Variance()])
def test_the_mean_over_steps_is_what_was_written(codec):
    """Over all positions and 2000 steps, within a hundredth of a code, from the largest to where codes end."""
    x = np.float32(2.0 ** -np.linspace(0, 12, 32))
    top = codec.top(x, 0)
    read = jax.jit(jax.vmap(lambda count: codec.decode(codec.encode(x, top, position_dither(count)), codec.scale(top))))
    mean = np.asarray(read(jnp.arange(2000)), np.float64).mean(0)
    assert np.abs(mean / x - 1).max() < 4e-3
    nearest = np.asarray(codec.decode(codec.encode(x, top), codec.scale(top)))
    assert np.abs(nearest / x - 1).max() > 2e-2  # so that this test is known to see it


def test_the_dither_of_a_group_is_even_and_that_of_a_step_is_its_own():
    over_steps = np.asarray(jax.vmap(position_dither)(jnp.arange(4096))) / 2.0**DITHER_BITS
    assert over_steps.min() >= 0
    assert over_steps.max() < 1
    gaps = np.diff(np.sort(over_steps, axis=1), axis=1)
    assert gaps.max() < 2.5 / 32  # of 32 positions in the unit interval
    assert np.abs(over_steps.mean(0) - 0.5).max() < 0.03
    correlation = np.corrcoef(over_steps[:-1, 0], over_steps[1:, 0])[0, 1]
    assert abs(correlation) < 0.06


def test_the_dither_is_by_position_in_the_group_in_every_layout():
    count = 7
    expected = np.asarray(position_dither(count))
    along_rows = np.asarray(dither(count, Groups((64, 3), 32, -2)))
    assert along_rows.shape == (1, 32, 1)
    np.testing.assert_array_equal(along_rows[0, :, 0], expected)
    flat = np.asarray(dither(count, Groups((5, 7), 32, None)))
    assert flat.shape == (1, 32)
    np.testing.assert_array_equal(flat[0], expected)


def test_all_codes_are_read_as_written():
    for codec, codes in (
        (PublishedMomentum(), np.arange(-127, 128)),
        (PublishedVariance(), np.arange(256)),
        (Momentum(), np.arange(256)),
        (Variance(), np.arange(-128, 128)),
        (Momentum(half=True), np.arange(256)),
        (Variance(half=True), np.arange(-128, 128)),
    ):
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
    for codec in (Momentum(), Variance(), PublishedMomentum(), PublishedVariance(), PublishedVariance(floor=False)):
        codes, again = written(codec, WIDE, np.zeros(32, np.float32), 0)
        assert not codes.any()
        assert not again.any()


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize("form", [WIDE, HALF])
def test_a_group_with_a_momentum_that_is_not_finite_starts_again(bad, form):
    x = np.ones(32, np.float32)
    x[5] = bad
    for codec in (Momentum(form is HALF), PublishedMomentum()):
        _, again = written(codec, form, x, 0)
        assert np.abs(again).max() < 1e-15
    for codec in (Variance(form is HALF), PublishedVariance()):
        _, again = written(codec, form, np.where(np.isnan(x), x, 1.0), 0)
        assert np.all(again < 1e-15) == np.isnan(bad)


@pytest.mark.parametrize("codec", [Variance(), PublishedVariance()])
def test_an_infinite_variance_is_stored_as_a_large_one(codec):
    x = np.ones(32, np.float32)
    x[5] = np.inf
    _, again = written(codec, WIDE, x, 0)
    assert np.isfinite(again).all()
    assert again.min() > 1e25


def test_codecs_are_values():
    assert Momentum() == Momentum()
    assert hash(Variance(False)) == hash(Variance())
    assert PublishedVariance(True) == PublishedVariance()
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
