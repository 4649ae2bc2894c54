"""`jaxamp.format`: names, dtypes, bits, what a format says of itself, and what is refused."""

import pickle

import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises

import jaxamp
from jaxamp._number_formats.number_format import KNOWN

UNUSUAL = [
    jaxamp.format("mxfp8", rounding="stochastic"),
    jaxamp.format("e4m3", subnormals=False, saturate=False),
    jaxamp.format("int8", scale="none"),
    jaxamp.format("int8", block="axis"),
    jaxamp.format("int6"),
    jaxamp.format("e3m4fn"),
    jaxamp.format("e2m3", specials="fnuz", bias=-3),
    jaxamp.format(exponent=8, mantissa=2, bias=130, specials="fn", rounding="stochastic"),
    jaxamp.format(exponent=8, mantissa=23, specials="fnuz", subnormals=False),
    jaxamp.format(exponent=3, mantissa=0, block=7),
    jaxamp.format("mxfp4", scale="float32", block=128),
]
EVERY = pytest.mark.parametrize("format", [*KNOWN.values(), *UNUSUAL], ids=str)


@EVERY
def test_shown_as_it_is_written(format):
    again = eval(repr(format), {"jaxamp": jaxamp})
    assert again == format
    assert hash(again) == hash(format)
    assert pickle.loads(pickle.dumps(format)) == format


def test_known_names_are_shown():
    assert [str(jaxamp.format(name)) for name in KNOWN] == list(KNOWN)
    assert str(jaxamp.format("e3m3")) == "e3m3"
    assert str(jaxamp.format("mxfp4", rounding="stochastic")) == "mxfp4 rounding=stochastic"


@pytest.mark.parametrize(
    ("given", "name"),
    [
        (jnp.float8_e4m3fn, "e4m3"),
        (np.dtype(jnp.float8_e5m2), "e5m2"),
        (jnp.float8_e4m3fnuz, "e4m3fnuz"),
        (jnp.float8_e5m2fnuz, "e5m2fnuz"),
        (jnp.float8_e4m3, "float8_e4m3"),
        (jnp.float8_e4m3b11fnuz, "float8_e4m3b11fnuz"),
        (jnp.float8_e3m4, "e3m4"),
        (jnp.float6_e3m2fn, "e3m2"),
        (jnp.float6_e2m3fn, "e2m3"),
        (jnp.float4_e2m1fn, "e2m1"),
        (jnp.bfloat16, "e8m7"),
        (np.float16, "e5m10"),
        (np.float32, "e8m23"),
        (np.int8, "int8"),
        ("e4m3fn", "e4m3"),
        ("e2m1fn", "e2m1"),
        ("mxfp6_e3m2", "mxfp6"),
    ],
)
def test_other_spellings(given, name):
    assert jaxamp.format(given) == jaxamp.format(name)


def test_bits_alone_are_the_format_of_that_name():
    for exponent, mantissa in ((4, 3), (5, 2), (3, 2), (2, 3), (2, 1), (8, 7), (5, 10), (3, 3)):
        named = jaxamp.format(f"e{exponent}m{mantissa}")
        assert jaxamp.format(exponent=exponent, mantissa=np.int64(mantissa)) == named


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float4_e2m1fn", "float16"])
def test_facts_are_those_of_the_dtype(dtype):
    found, expected = jaxamp.format(dtype), jnp.finfo(dtype)
    assert found.max == expected.max
    assert found.smallest_normal == expected.tiny
    assert found.smallest_subnormal == expected.smallest_subnormal
    assert found.epsilon == expected.eps
    assert found.bits == expected.bits
    assert (found.has_infinity, found.has_nan) == (dtype in ("float16", "float8_e5m2"), "float4" not in dtype)


def test_facts_of_integers_and_blocks():
    assert jaxamp.format("int8").values().tolist() == list(range(-127, 128))
    assert jaxamp.format("int4").max == 7
    assert jaxamp.format("mxint8").max == 127 / 64
    assert [jaxamp.format(name).bits_with_scale for name in ("mxfp4", "nvfp4", "mxfp8", "int8")] == [4.25, 4.5, 8.25, 8]
    assert jaxamp.format("e2m1", subnormals=False).values()[6:].tolist() == [0, 1, 1.5, 2, 3, 4, 6]
    assert jaxamp.format("e2m1", subnormals=False).smallest_subnormal == 1


def test_saturation_is_for_narrow_formats_unless_asked_for():
    assert [jaxamp.format(name).saturate for name in ("e5m2", "e4m3", "float16", "e6m3")] == [True, True, False, False]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"exponent": 0, "mantissa": 3}, ("exponent=0 is out of range", "Write exponent= as an integer from 1 to 8")),
        ({"exponent": 9, "mantissa": 3}, ("exponent=9 is out of range", "emulated in float32", "from 1 to 8")),
        ({"exponent": 4, "mantissa": -1}, ("mantissa=-1", "Write mantissa= as an integer from 0 to 23")),
        ({"exponent": 4, "mantissa": 24}, ("mantissa=24", "Write mantissa= as an integer from 0 to 23")),
        ({"exponent": 4.0, "mantissa": 3}, ("exponent=4.0 is not an integer", "Write exponent=")),
        ({"exponent": 4, "mantissa": True}, ("mantissa=True is not an integer", "Write mantissa=")),
        ({"exponent": 4, "mantissa": 3, "bias": 0.5}, ("bias=0.5 is not an integer", "Write bias=")),
        ({"exponent": 4}, ("neither a name nor both", "Write a name as")),
        ({"exponent": 1, "mantissa": 2}, ("leaves no normal number", "Write a larger exponent=")),
        ({"exponent": 8, "mantissa": 2, "specials": "fn"}, ("to 2\\*\\*128, and float32", "Write a smaller exponent=")),
        ({"exponent": 5, "mantissa": 20, "bias": 140}, ("reach from 2\\*\\*-159", "Write a smaller exponent=")),
        ({"exponent": 3, "mantissa": 2, "saturate": False}, ("no code for an overflow", "Write saturate=True")),
        ({"exponent": 2, "mantissa": 2, "specials": "integer"}, ("evenly spaced", "Write exponent=1")),
        (
            {"exponent": 4, "mantissa": 3, "rounding": "up"},
            ("rounding='up' is unknown", "Write rounding= as 'nearest'"),
        ),
        ({"exponent": 4, "mantissa": 3, "specials": "inf"}, ("specials='inf' is unknown", "Write specials= as 'ieee'")),
        ({"exponent": 4, "mantissa": 3, "saturate": "yes"}, ("saturate='yes' is not a bool", "Write saturate=True")),
        ({"exponent": 4, "mantissa": 3, "block": 0}, ("block=0 is not a size", "Write block= as a positive integer")),
        (
            {"exponent": 4, "mantissa": 3, "block": 8, "scale": "none"},
            ("block=8 with scale='none'", "Write scale='e8m0'"),
        ),
        ({"exponent": 4, "mantissa": 3, "scale": "e4m3"}, ("scale of a block", "Write block=16")),
    ],
    ids=str,
)
def test_bits_that_make_no_format(changes, words):
    with raises(ValueError, "jaxamp.format: ", *words):
        jaxamp.format(**changes)


def test_names_that_are_unknown():
    with raises(ValueError, "no format 'mxpf8'", "Did you mean 'mxfp8'", "Write one of e4m3, "):
        jaxamp.format("mxpf8")
    with raises(ValueError, "no format 'float64'", "Write one of"):
        jaxamp.format(np.float64)
    with raises(ValueError, "'float8_e8m0fnu' is a format of scales", "Write scale='e8m0'"):
        jaxamp.format(jnp.float8_e8m0fnu)
    with raises(ValueError, "exponent=44 is out of range", "Write"):
        jaxamp.format("e44m3")
    with raises(TypeError, "3.5 is neither a name nor a dtype", "Write a name"):
        jaxamp.format(3.5)
    with raises(ValueError, "float32 has 2\\*\\*32 values, too many to list", "Write values"):
        jaxamp.format("float32").values()
