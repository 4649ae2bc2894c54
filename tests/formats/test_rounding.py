"""Rounding to a format, to the bit: against `ml_dtypes`, `lax.reduce_precision`, and the format's values."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from helpers import equations, names, raises
from hypothesis import given, settings
from jax import lax
from rounding_points import F32, PLAIN, SMALL, assert_same, other_saturation, points, rounded, with_neighbours

import jaxamp
from jaxamp._number_formats.quantize import quantize

DTYPES = {
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "float8_e4m3": ml_dtypes.float8_e4m3,
    "float8_e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "float8_e3m4": ml_dtypes.float8_e3m4,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
}
EACH = pytest.mark.parametrize("name", list(DTYPES))


def cast(x, format, dtype):
    """What `dtype` makes of float32 values, of a format with or without saturation."""
    with np.errstate(all="ignore"):
        if format.saturate:
            x = np.where(np.isnan(x), x, np.clip(x, -F32(format.max), F32(format.max)))
        found = x.astype(dtype).astype(F32)
    return found if format.has_nan else np.where(np.isnan(x), F32(np.nan), found)


@EACH
def test_as_the_dtype_casts(name):
    format, dtype = jaxamp.format(name), DTYPES[name]
    x = points(format)
    assert_same(quantize(x, format), cast(x, format, dtype), x)
    if format.has_nan:
        assert_same(quantize(x, other_saturation(format)), cast(x, other_saturation(format), dtype), x)


@EACH
def test_values_are_those_of_the_dtype(name):
    bits = jaxamp.format(name).bits
    codes = np.arange(2**bits).astype(np.uint8 if bits <= 8 else np.uint16).view(DTYPES[name])
    with np.errstate(invalid="ignore"):
        every = codes.astype(F32)
    assert jaxamp.format(name).values().tolist() == np.unique(every[np.isfinite(every)]).tolist()


@pytest.mark.slow
def test_compiled_is_as_not_compiled():
    formats = [
        *list(SMALL.values())[::2],
        *(jaxamp.format(f, rounding="stochastic") for f in ("e4m3", "mxfp4", "int8")),
    ]
    x = points(jaxamp.format("e4m3"))
    fn = lambda x: [quantize(x, format, key=3) for format in formats]
    with jax.disable_jit():
        separate = fn(x)
    for found, expected in zip(jax.jit(fn)(x), separate, strict=True):
        assert_same(found, expected, x)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_every_number_of_16_bits_is_rounded_once(dtype):
    x = np.arange(2**16).astype(np.uint16).view(dtype)
    with np.errstate(invalid="ignore"):
        x[np.isnan(x)] = np.nan  # not signalling
    for name in ("e4m3", "e5m2fnuz", "e2m1", "bfloat16" if dtype == jnp.float16 else "e8m4"):
        found = quantize(x, jaxamp.format(name))
        assert found.dtype == dtype
        with np.errstate(over="ignore"):
            expected = rounded(x.astype(F32), jaxamp.format(name)).astype(dtype)
        assert_same(found, expected, x)


@pytest.mark.parametrize("name", ["float32", "tf32", "e8m9", "e6m14", "e7m23"])
def test_formats_with_too_many_values_to_list(name):
    """A float64 has room to round by adding and subtracting a large number."""
    format = jaxamp.format(name)
    x = with_neighbours(np.random.default_rng(0).integers(0, 2**31, 20000).astype(np.int32).view(F32))
    x[np.isnan(x)] = np.nan  # not signalling
    wide = x.astype(np.float64)
    exponent = np.maximum(np.frexp(wide)[1] - 1, format.smallest_exponent)
    large = np.ldexp(1.5, exponent - format.mantissa + 52)
    with np.errstate(all="ignore"):
        expected = np.copysign((wide + large) - large, wide)
        expected = np.where(np.abs(expected) > format.max, np.copysign(np.inf, wide), expected)
    assert_same(quantize(x, format), np.where(np.isnan(x), np.nan, expected), x)


@pytest.mark.parametrize(("exponent", "mantissa"), [(5, 10), (4, 3), (8, 7), (2, 1), (8, 10), (3, 0)])
def test_without_subnormals_as_reduce_precision(exponent, mantissa):
    format = jaxamp.format(exponent=exponent, mantissa=mantissa, specials="ieee", subnormals=False, saturate=False)
    x = points(dataclasses.replace(format, subnormals=True)) if format.bits <= 16 else points(PLAIN["bfloat16"])
    x = x[(np.abs(x) >= 2.0**-126) | (x == 0) | np.isnan(x)]
    if mantissa == 0:  # which rounds ties up then, and makes NaN infinite
        x = x[(np.abs(np.frexp(x)[0]) != 0.75) & ~np.isnan(x)]
    assert_same(quantize(x, format), lax.reduce_precision(jnp.asarray(x), exponent, mantissa), x)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.integers(1, 5),
    st.integers(0, 6),
    st.integers(-20, 40),
    st.sampled_from(["ieee", "fn", "fnuz", "finite"]),
    st.booleans(),
    st.lists(st.floats(width=32, allow_nan=True), min_size=64, max_size=64),
)
def test_any_bits_and_bias(exponent, mantissa, bias, specials, saturate, numbers):
    exponent += specials == "ieee" or (specials == "fn" and mantissa == 0)  # else there are no normal numbers
    saturate = saturate or specials == "finite"
    format = jaxamp.format(exponent=exponent, mantissa=mantissa, bias=bias, specials=specials, saturate=saturate)
    near = np.random.default_rng(0).choice(points(format), 448)
    x = np.concatenate([np.asarray(numbers, F32), near])
    with jax.disable_jit():  # the operations of all formats are compiled once
        found = quantize(x, format)
        assert_same(found, rounded(x, format), x)
        assert_same(quantize(found, format), found, x)


def test_dtypes_that_cannot_be_rounded():
    with raises(TypeError, "array of int32", "takes floats of 32 bits or fewer", r"Write x\.astype"):
        quantize(jnp.arange(3), jaxamp.format("e4m3"))
    with raises(ValueError, "array of bfloat16", "largest number, 65504", "bfloat16 does not have", "Write x"):
        quantize(jnp.ones(3, jnp.bfloat16), jaxamp.format("float16", saturate=True))


def test_no_cast_that_a_compiler_could_drop():
    jaxpr = jax.make_jaxpr(lambda x: quantize(x, jaxamp.format("e4m3")))(jnp.ones(3, jnp.bfloat16))
    found = {str(v.aval.dtype) for e in equations(jaxpr) for v in e.outvars}
    assert {name for name in found if "float" in name} == {"bfloat16"}
    assert "bitcast_convert_type" in names(jaxpr)
