"""Formats of values: which are low, and how to get from one to another."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W, count

from jaxamp._formats import Format, Formats, cast, cast_constant, float_dtype, may_lower, saturate

BF16, F32 = np.dtype(jnp.bfloat16), np.dtype(np.float32)


def test_only_the_compute_dtype_is_low():
    formats = Formats(BF16)
    assert formats.of(BF16) is formats.low
    assert [formats.of(np.dtype(d)).low for d in (jnp.bfloat16, jnp.float16, np.float32)] == [True, False, False]
    assert formats.of(None) is None
    assert formats.of_aval(jax.typeof(jnp.arange(3))) is None
    assert formats.of_aval(jax.typeof(W)) == Format(F32)


def test_a_format_that_the_dtype_does_not_name():
    assert (Format(F32).name, Format(F32, low=True, label="e8m3").name) == ("float32", "e8m3")


def test_in_float32_nothing_is_low():
    assert [Formats(np.dtype(d)).narrows for d in (jnp.bfloat16, np.float32, np.float64)] == [True, False, False]


@pytest.mark.parametrize("dtype", [np.float64, jnp.bfloat16, jnp.float16, np.int32])
def test_what_is_not_ours_to_round(dtype):
    assert not may_lower(float_dtype(jax.core.ShapedArray((), np.dtype(dtype))), BF16)


def test_casts_of_what_needs_none_leave_no_equation():
    fn = lambda x, n: (cast(x, F32), cast(n, BF16), cast(x, None), cast(np.float32(1), BF16))
    jaxpr = jax.make_jaxpr(fn)(W, jnp.arange(3))
    assert count("convert_element_type", jaxpr) == 0
    assert [v.aval.dtype for v in jaxpr.jaxpr.outvars] == [F32, np.int32, F32, BF16]


@pytest.mark.parametrize("to", [saturate, cast_constant])
def test_finite_numbers_stay_finite(to):
    found = np.asarray(to(jnp.array([1e30, -1e30, jnp.inf, 1.0], F32), np.dtype(np.float16)), np.float64)
    assert found.tolist() == [65504, -65504, np.inf, 1]
