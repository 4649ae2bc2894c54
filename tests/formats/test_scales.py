"""Scales of tensors, rows and blocks."""

import dataclasses

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal, raises
from hypothesis import given, settings
from hypothesis.extra.numpy import arrays
from rounding_points import F32, assert_same, rounded

import jaxamp
from jaxamp._number_formats.quantize import quantize
from jaxamp._number_formats.scales import scale_for

MX = ["mxfp8", "mxfp8_e5m2", "mxfp6", "mxfp6_e2m3", "mxfp4", "mxint8"]
INF, NAN = F32(np.inf), F32(np.nan)


def in_blocks(x, format, size):
    """The microscaling specification for finite numbers along the last axis, in float64, block by block."""
    element = dataclasses.replace(format, scale="none", block="tensor")
    found = np.empty(x.shape)
    for start in range(0, x.shape[-1], size):
        part = x[..., start : start + size].astype(np.float64)
        largest = np.abs(part).max(axis=-1, keepdims=True)
        exponent = np.where(largest > 0, np.frexp(largest)[1] - 1, -127 + format.largest_exponent)
        scale = np.exp2(np.clip(exponent - format.largest_exponent, -127, 127).astype(np.float64))
        found[..., start : start + size] = rounded(part / scale, element) * scale
    return found


@pytest.mark.parametrize("name", ["mxfp8", "mxfp4", "mxint8"])
def test_blocks_along_any_axis_and_of_any_length(name):
    format = jaxamp.format(name)
    x = np.asarray(normal(0, 3, 70, 5)) * np.exp2(np.random.default_rng(1).integers(-150, 120, (3, 70, 5))).astype(F32)
    x[0], x[1, :, 0] = 0, F32(2e-44)
    for axis in (1, -2):
        found = np.moveaxis(np.asarray(jax.jit(lambda x, a=axis: quantize(x, format, axis=a))(x)), 1, -1)
        assert_same(found, in_blocks(np.moveaxis(x, 1, -1), format, 32), np.moveaxis(x, 1, -1))
    assert_same(quantize(x, format), in_blocks(x, format, 32), x)  # shorter than a block
    low = jnp.asarray(x, jnp.bfloat16)
    assert_same(quantize(low, format, axis=0), quantize(low.astype(F32), format, axis=0), x)


@settings(max_examples=25, deadline=None)
@given(arrays(F32, 24, elements=st.floats(width=32, allow_nan=False, allow_infinity=False)), st.sampled_from(MX))
def test_blocks_of_any_finite_numbers(x, name):
    format = jaxamp.format(name, block=8)
    found = np.asarray(quantize(x, format))
    assert_same(found, in_blocks(x, format, 8), x)
    assert_same(quantize(found, format), found, x)


def test_blocks_with_other_elements_and_scales():
    format = jaxamp.format(exponent=4, mantissa=0, block=4)
    x = np.asarray(normal(0, 6, 10))
    assert_same(quantize(x, format), in_blocks(x, format, 4), x)
    rows = quantize(x, jaxamp.format("e3m3", scale="e8m0", block="axis"))
    assert_same(rows, in_blocks(x, jaxamp.format("e3m3"), 10), x)
    whole = quantize(x, jaxamp.format("e3m3", scale="e8m0"))
    assert_same(whole, in_blocks(x.reshape(1, -1), jaxamp.format("e3m3"), 60).reshape(x.shape), x)


@pytest.mark.parametrize("name", MX)
def test_blocks_with_infinities_and_nans(name):
    format, x = jaxamp.format(name), np.ones((4, 64), F32)
    x[0, 3], x[1, 40], x[2, 2] = INF, -INF, NAN
    found = np.asarray(quantize(x, format))
    assert found[0, 3] == INF
    assert found[1, 40] == -INF  # an overflow stays visible
    assert np.isfinite(found[0]).sum() == np.isfinite(found[1]).sum() == 63
    alone = format.has_nan  # else only the scale has a NaN, which all elements share
    assert np.isnan(found[2]).tolist() == [i == 2 if alone else i < 32 for i in range(64)]
    assert (found[3] == 1).all()
    assert (found[2, 32:] == 1).all()


def test_arrays_without_axes_or_entries():
    assert quantize(jnp.float32(5.3), jaxamp.format("mxfp4")) == 6
    assert quantize(jnp.float32(5.3), jaxamp.format("int8", block="axis")) == F32(5.3)
    assert quantize(jnp.ones((3, 0)), jaxamp.format("mxfp4")).shape == (3, 0)
    assert quantize(jnp.ones((0, 3), jnp.bfloat16), jaxamp.format("int8")).dtype == jnp.bfloat16


@pytest.mark.parametrize("name", ["int8", "int4", "e4m3", "e2m1"])
@pytest.mark.parametrize("block", ["tensor", "axis", 4])
def test_float32_scales(name, block):
    format = jaxamp.format(name, scale="float32", block=block)
    x = np.asarray(normal(0, 6, 8, scale=3.0)) * F32([[1], [10], [100], [1e-3], [1e-20], [0]])
    found = np.asarray(quantize(x, format))
    view = {"tensor": (1, 48), "axis": (6, 8), 4: (12, 4)}[block]
    largest = np.abs(x).reshape(view).max(axis=1, keepdims=True)
    scale = np.where(largest > 0, largest.astype(np.float64) / format.max, 1)
    element = dataclasses.replace(format, scale="none", block="tensor")
    units = x.reshape(view) / scale
    at_a_tie = np.abs(rounded(units * (1 + 1e-6), element) - rounded(units * (1 - 1e-6), element)) > 0
    error = np.abs(found.reshape(view) / scale - rounded(units, element))
    assert (error[~at_a_tie] <= 1e-6 * format.max).all()
    assert at_a_tie.sum() < 3


def test_a_given_scale_is_used():
    x = normal(0, 4, 5)
    found = quantize(x, jaxamp.format("e4m3"), scale=2.0**-6)
    assert_same(found, np.asarray(quantize(x * 64, jaxamp.format("e4m3"))) / 64, np.asarray(x))
    rows = jnp.array([[1.0], [2.0], [4.0], [8.0]])
    assert_same(quantize(x, jaxamp.format("int8"), scale=rows), np.round(x / rows) * rows + 0.0, np.asarray(x))


def test_nvfp4():
    x = np.asarray(normal(0, 5, 40)) * F32([[1], [100], [1e-3], [0], [1e-30]])
    found = np.asarray(quantize(x, jaxamp.format("nvfp4")))
    tensor = np.abs(x).max().astype(np.float64) / (6 * 448)
    padded = np.pad(x.astype(np.float64), ((0, 0), (0, 8))).reshape(5, 3, 16)
    blocks = rounded(np.abs(padded).max(axis=-1, keepdims=True) / 6 / tensor, jaxamp.format("e4m3")) * tensor
    with np.errstate(all="ignore"):
        expected = np.where(blocks > 0, rounded(padded / blocks, jaxamp.format("e2m1")) * blocks, 0.0)
    expected = expected.reshape(5, 48)[:, :40]
    assert np.abs(found - expected).max() <= 1e-6 * np.abs(x).max()
    assert (found[4] == 0).all()  # too small beside the rest
    assert np.isfinite(np.asarray(quantize(np.full(20, 1e-44, F32), jaxamp.format("nvfp4")))).all()


@pytest.mark.parametrize("power_of_two", [False, True])
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e2m1", "int8", "bfloat16", "e4m3fnuz"])
def test_scales_of_any_maximum(name, power_of_two):
    format = jaxamp.format(name)
    amax = F32([0, 1e-45, 1e-38, 1e-10, 1, 3, 448, 1e10, 3.4028235e38, INF, NAN])
    scale = np.asarray(scale_for(amax, format, power_of_two))
    assert scale.dtype == F32
    assert (np.isfinite(scale) & (scale > 0)).all()
    assert scale[0] == 1
    assert scale[-1] == scale[-2] == scale[-3]
    middle = slice(3, 7)
    ratio = scale[middle].astype(np.float64) * format.max / amax[middle]
    if power_of_two:
        assert (np.frexp(scale)[0] == 0.5).all()
    if format.max < 1e30:  # else float32 has no scale so small
        assert (np.abs(ratio - 1) < 1e-6).all() if not power_of_two else ((ratio > 1 - 1e-6) & (ratio < 2)).all()
    x = F32([0, 1e-45, 1e-38, -1, 448, 1e10, -3.4028235e38])
    for one in scale:
        assert not np.isnan(quantize(x, jaxamp.format(format, scale="none", saturate=True), scale=one)).any()


@pytest.mark.parametrize("name", ["e4m3", "e5m2"])
def test_the_scale_of_infinity_overflows_nothing(name):
    format, x = jaxamp.format(name, saturate=False), F32([1, -500, 1e10, -3.4028235e38])
    for amax in (INF, NAN):
        assert np.isfinite(quantize(x, format, scale=scale_for(amax, format))).all()


def test_an_infinity_in_a_scaled_tensor_stays_visible():
    x = jnp.array([1.0, jnp.inf, 2.0])
    assert jnp.max(quantize(x, jaxamp.format("int8"))) > 3e38
    assert np.isnan(quantize(x.at[0].set(jnp.nan), jaxamp.format("int8"))).tolist() == [True, False, False]
    half = quantize(x.astype(jnp.float16), jaxamp.format("int8"))
    assert np.isinf(half).tolist() == [False, True, False]


def test_scales_and_axes_that_are_refused():
    with raises(ValueError, "scale= was given with mxfp4", "find their own", "Write format"):
        quantize(jnp.ones(4), jaxamp.format("mxfp4"), scale=2.0)
    with raises(ValueError, "axis 2", r"shape \(3, 4\)", "Write axis= as an integer from -2 to 1"):
        quantize(jnp.ones((3, 4)), jaxamp.format("mxfp4"), axis=2)
