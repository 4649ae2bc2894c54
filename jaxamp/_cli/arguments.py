"""Arguments as strings: `f32[32,128]` is an array of that type, `0.5` a number, `{"w": "f32[8,8]"}` a pytree.

The law: `parse_argument(format_argument(x)) == x`. A string that can't be parsed is a `ValueError` that says what to
write.
"""

import json
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._errors import nearest

_KINDS = {"f": "float", "bf": "bfloat", "i": "int", "u": "uint", "c": "complex"}
_BITS = {"f": (16, 32, 64), "bf": (16,), "i": (4, 8, 16, 32, 64), "u": (4, 8, 16, 32, 64), "c": (64, 128)}
_FLOAT8 = ("e4m3fn", "e5m2")
# From the names that a jaxpr prints to those of dtypes.
_LONG = (
    {f"{kind}{bits}": f"{_KINDS[kind]}{bits}" for kind, sizes in _BITS.items() for bits in sizes}
    | {f"f8_{form}": f"float8_{form}" for form in _FLOAT8}
    | {"bool": "bool"}
)
_SHORT = {long: short for short, long in _LONG.items()}
_NAMES = _LONG | {long: long for long in _SHORT} | {"pred": "bool"}
_KEY = "key"  # a key of random numbers

_SHAPE = re.compile(r"\s*([A-Za-z_]\w*)\s*\[([^\[\]]*)\]\s*", re.ASCII)
_SIZE = re.compile(r"\s*([0-9]{1,18})\s*")
_EXPECTED = "a shape, a number, true, false, null, or JSON of these"


def parse_dtype(text: str) -> np.dtype:
    """The dtype that a short or a long name stands for.

    >>> parse_dtype("bf16") == parse_dtype("bfloat16")
    True
    """
    if text not in _NAMES:
        instead = nearest(text, _NAMES) or " Write for example 'f32'."
        raise ValueError(f"got the dtype {text!r}; expected one of {', '.join(_LONG)}, or its long name.{instead}")
    return jnp.dtype(_NAMES[text])


def parse_argument(text: str) -> Any:
    """The argument that a string stands for, with a `jax.ShapeDtypeStruct` for each array.

    >>> parse_argument("f32[32,128]")
    ShapeDtypeStruct(shape=(32, 128), dtype=float32)
    >>> parse_argument('{"rate": 0.5, "w": "bf16[8]"}')
    {'rate': 0.5, 'w': ShapeDtypeStruct(shape=(8,), dtype=bfloat16)}
    """
    if _SHAPE.fullmatch(text):
        return _parse_shape(text)
    try:
        tree = json.loads(text, parse_constant=_reject)
    except (ValueError, RecursionError):
        shown = text if len(text) <= 60 else text[:57] + "..."
        instead = f"Write '{text}[]' for a scalar." if text in _NAMES else "Write for example 'f32[32,128]'."
        raise ValueError(f"got the argument {shown!r}; expected {_EXPECTED}. {instead}") from None
    return jtu.tree_map(lambda leaf: _parse_shape(leaf) if isinstance(leaf, str) else leaf, tree)


def _reject(name: str) -> None:
    """NaN and infinities, which Python's parser would accept, are not JSON."""
    raise ValueError(name)


def _parse_shape(text: str) -> jax.ShapeDtypeStruct:
    found = _SHAPE.fullmatch(text)
    if found is None:
        raise ValueError(f"got the string {text!r}; expected a shape. Write for example 'f32[32,128]'.")
    name, inside = found.groups()
    sizes = [_SIZE.fullmatch(size) for size in inside.split(",")] if inside.strip() else []
    if not all(sizes):
        raise ValueError(
            f"got the shape {text!r}; expected sizes separated by commas. Write for example '{name}[32,128]', or "
            f"'{name}[]' for a scalar."
        )
    shape = tuple(int(size[1]) for size in sizes if size is not None)
    if name == _KEY:
        return jax.ShapeDtypeStruct(shape, jax.eval_shape(lambda: jax.random.key(0)).dtype)
    dtype = parse_dtype(name)
    canonical = jax.dtypes.canonicalize_dtype(dtype)
    if canonical != dtype:
        raise ValueError(
            f"got the shape {text!r} while JAX has 64-bit types disabled; expected at most 32 bits. "
            f"Write '{_SHORT[canonical.name]}[{inside}]', or set JAX_ENABLE_X64=1."
        )
    return jax.ShapeDtypeStruct(shape, dtype)


def format_argument(argument: Any) -> str:
    """The string that `parse_argument` turns into this argument. A leaf without such a string is shown by its type.

    >>> format_argument([jnp.ones((2, 3)), 1])
    '["f32[2,3]", 1]'
    """
    if _is_array(argument):
        return _format_shape(argument)
    try:
        return json.dumps(argument, default=_format_leaf)
    except TypeError:  # keys that JSON does not allow
        return type(argument).__name__


def _is_array(x: Any) -> bool:
    return hasattr(x, "shape") and hasattr(x, "dtype")


def _format_leaf(x: Any) -> str:
    return _format_shape(x) if _is_array(x) else type(x).__name__


def _format_shape(x: Any) -> str:
    is_key = jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    name = _KEY if is_key else _SHORT.get(x.dtype.name, x.dtype.name)
    return f"{name}[{','.join(map(str, x.shape))}]"
