"""Rounding against `gfloat`, which has formats of any bits, and blocks of the OCP's microscaling formats."""

import itertools

import jax
import numpy as np
import pytest
from rounding_points import F32, assert_same, points

import jaxamp
from jaxamp._number_formats.quantize import quantize

gfloat = pytest.importorskip("gfloat")
formats = pytest.importorskip("gfloat.formats")

HIGH_NANS = {"ieee": lambda mantissa: 2**mantissa - 1, "fn": lambda _: 1, "fnuz": lambda _: 0, "finite": lambda _: 0}


def info(format):
    """The same format for `gfloat`."""
    return gfloat.FormatInfo(
        str(format),
        format.bits,
        format.mantissa + 1,
        bias=format.bias,
        is_signed=True,
        domain=gfloat.Domain.Extended if format.has_infinity else gfloat.Domain.Finite,
        has_nz=format.has_negative_zero,
        num_high_nans=HIGH_NANS[format.specials](format.mantissa),
        has_subnormals=format.subnormals,
        is_twos_complement=False,
    )


@pytest.mark.slow
@pytest.mark.parametrize("specials", list(HIGH_NANS))
def test_a_grid_of_formats(specials):
    tried = 0
    for exponent, mantissa, offset in itertools.product((1, 2, 3, 5), (0, 1, 3, 4), (0, -9, 7)):
        if exponent == 1 and (specials == "ieee" or (specials, mantissa) == ("fn", 0)):
            continue  # no normal number
        plain = jaxamp.format(exponent=exponent, mantissa=mantissa, specials=specials, saturate=True)
        format = jaxamp.format(plain, bias=plain.bias + offset)
        x = points(format)
        x = np.resize(x[~np.isnan(x)], 2**11)  # one shape, to compile once
        assert info(format).max == format.max
        for saturate in (True, False) if specials != "finite" else (True,):
            expected = gfloat.round_ndarray(info(format), x.astype(np.float64), sat=saturate)
            with jax.disable_jit():  # the operations of all these formats are compiled once
                assert_same(quantize(x, jaxamp.format(format, saturate=saturate)), expected, x)
            tried += 1
    assert tried > 40


@pytest.mark.parametrize("name", ["mxfp8_e4m3", "mxfp8_e5m2", "mxfp6_e3m2", "mxfp6_e2m3", "mxfp4_e2m1", "mxint8"])
def test_blocks(name):
    block, random = getattr(formats, f"format_info_{name}"), np.random.default_rng(0)
    exponents = random.integers(-130, 126, (40, 1)) + random.integers(-8, 2, (40, 32))
    x = np.ldexp(random.standard_normal((40, 32)), exponents).astype(F32)
    x[:2] = [[0.0], [-0.0]]
    x[2] = 0.0
    x[2, 5] = 3e-45
    if name == "mxint8":  # `gfloat` has -128/64 too
        x = np.where(x < 0, x * F32(0.9), np.abs(x))
        x[:, 0] = np.abs(x).max(axis=1)
    rows = [gfloat.quantize_block(block, row, gfloat.compute_scale_amax) for row in x.astype(np.float64)]
    expected = np.stack(rows)
    if name == "mxint8":
        expected = expected + 0.0
        expected[expected == 0] = 0.0
    assert_same(quantize(x, jaxamp.format(name)), expected, x)
