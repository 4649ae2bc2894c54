"""Arguments as strings: what they stand for, and what a bad one is answered with."""

import jax
import jax.numpy as jnp
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from jaxamp._cli.arguments import _NAMES, format_argument, parse_argument, parse_dtype


def array(dtype, *shape):
    return jax.ShapeDtypeStruct(shape, dtype)


@pytest.mark.parametrize(
    ("text", "argument"),
    [
        ("f32[32,128]", array(jnp.float32, 32, 128)),
        (" float32 [ 32 , 128 ] ", array(jnp.float32, 32, 128)),
        ("f32[]", array(jnp.float32)),
        ("f32[0]", array(jnp.float32, 0)),
        ("bf16[3]", array(jnp.bfloat16, 3)),
        ("f16[3]", array(jnp.float16, 3)),
        ("i8[3]", array(jnp.int8, 3)),
        ("u32[2]", array(jnp.uint32, 2)),
        ("pred[4]", array(jnp.bool, 4)),
        ("bool[4]", array(jnp.bool, 4)),
        ("c64[4]", array(jnp.complex64, 4)),
        ("f8_e4m3fn[4]", array(jnp.float8_e4m3fn, 4)),
        ("float8_e5m2[4]", array(jnp.float8_e5m2, 4)),
        ("3", 3),
        ("-0.5", -0.5),
        ("true", True),
        ("null", None),
        ('{"w": "f32[8,8]", "b": ["f32[8]", 2]}', {"w": array(jnp.float32, 8, 8), "b": [array(jnp.float32, 8), 2]}),
        ("[]", []),
    ],
)
def test_a_string_stands_for_an_argument(text, argument):
    found = parse_argument(text)
    assert (found, type(found)) == (argument, type(argument))


def test_a_key_of_a_random_number_generator():
    assert parse_argument("key[2]") == jax.eval_shape(lambda: jax.random.split(jax.random.key(0)))
    assert format_argument(parse_argument("key[2]")) == "key[2]"


def test_64_bits_are_there_where_jax_has_them_on():
    with jax.enable_x64(True):
        for text in ("f64[3]", "i64[3]", "u64[3]", "c128[3]"):
            assert format_argument(parse_argument(text)) == text


@pytest.mark.parametrize(
    ("text", "beats"),
    [
        (
            "f32",
            ["the argument 'f32'", "a shape, a number, true, false, null, or JSON", "'f32[]' for a scalar"],
        ),
        ("", ["the argument ''", "expected a shape", "'f32[32,128]'"]),
        ("f32[3", ["the argument 'f32[3'", "expected a shape", "'f32[32,128]'"]),
        ("NaN", ["the argument 'NaN'", "expected a shape", "'f32[32,128]'"]),
        ("[" * 100_000, ["the argument '[[", "[...'; expected a shape", "'f32[32,128]'"]),
        ("9" * 5000, ["the argument '99", "expected a shape", "'f32[32,128]'"]),
        ("f32[3,]", ["the shape 'f32[3,]'", "expected sizes", "'f32[32,128]', or 'f32[]' for a scalar"]),
        ("f32[-3]", ["the shape 'f32[-3]'", "expected sizes", "'f32[32,128]'"]),
        ("f32[3x4]", ["the shape 'f32[3x4]'", "expected sizes", "'f32[32,128]'"]),
        ("f32[" + "9" * 19 + "]", ["expected sizes", "'f32[32,128]'"]),
        ("f31[3]", ["the dtype 'f31'", "expected one of f16, f32", "Did you mean 'f32'?"]),
        ("x[3]", ["the dtype 'x'", "expected one of f16, f32", "Write for example 'f32'"]),
        ('{"mode": "relu"}', ["the string 'relu'", "expected a shape", "'f32[32,128]'"]),
        ("f64[3]", ["the shape 'f64[3]' while JAX has 64-bit types disabled", "at most 32 bits", "'f32[3]'", "X64=1"]),
        ("i64[3]", ["64-bit types disabled", "Write 'i32[3]'"]),
    ],
)
def test_a_bad_string_is_told_what_to_write(text, beats):
    with pytest.raises(ValueError) as error:
        parse_argument(text)
    for beat in beats:
        assert beat in str(error.value)


def test_short_and_long_names_of_dtypes():
    assert parse_dtype("bf16") == parse_dtype("bfloat16") == jnp.bfloat16
    assert parse_dtype("pred") == parse_dtype("bool") == jnp.bool


def test_what_has_no_string_is_shown_by_its_type():
    assert format_argument((jnp.ones(3), jax.nn.relu)) == '["f32[3]", "custom_jvp"]'
    assert format_argument({("a", 1): jnp.ones(3)}) == "dict"


NAMES = sorted(name for name in _NAMES if not name.endswith(("64", "128")) or name in ("c64", "complex64"))
shapes = st.builds(
    lambda name, shape: array(parse_dtype(name), *shape),
    st.sampled_from(NAMES),
    st.lists(st.integers(0, 10**18 - 1), max_size=5),
)
numbers = (
    st.none() | st.booleans() | st.integers(-(10**100), 10**100) | st.floats(allow_nan=False, allow_infinity=False)
)
arguments = st.recursive(
    shapes | numbers, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3)
)


@given(arguments)
def test_parsing_is_the_inverse_of_formatting(argument):
    assert parse_argument(format_argument(argument)) == argument


shapelike = st.text('f32bi[],{}":-. 1e@key\u0663', max_size=24)


@given(st.text() | shapelike)
@example("f32[\u0663]")
@example("key[2")
@example("[" * 900 + "]" * 900)
def test_garbage_is_an_argument_or_a_value_error_of_ours(text):
    try:
        parse_argument(text)
    except ValueError as error:
        message = str(error)
    else:
        return
    assert message.startswith("got the ")
    assert "; expected " in message
