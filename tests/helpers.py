"""What many tests share: random arrays, oracles in float64, how to read a jaxpr, equality on bits, errors, backends."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp

ROOT = Path(__file__).parents[1]  # of the repository

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
LOWS = (BF16, F16)
both = pytest.mark.parametrize("low", LOWS, ids=["bfloat16", "float16"])


def slow(value):
    """A parameter of a test that is left out unless slow tests are asked for."""
    return pytest.param(value, marks=pytest.mark.slow)


AMP = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)


class Program(NamedTuple):
    """A function in float32, as a user would write it, and what is expected of it under `amp`.

    `fn` must be written for any float dtype: the oracle is the same function on float64 arguments with x64 on.
    """

    name: str
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]  # float32 arrays (and ints, keys, modules), made at each call, and small
    low: int = 0  # matmuls that run low in `amp(fn)`, those in nested bodies counted once each
    kept: int = 0  # matmuls that stay in their original dtype
    without: dict[str, str] = {}  # law -> the reason why it makes no sense here
    rtol: float = 2e-2  # against float64, relative to the largest magnitude of each output


# -- arrays: `device_put` of NumPy's, for `jnp.asarray` compiles a program for each shape


def normal(seed: int, *shape: int, scale: float = 1.0) -> jax.Array:
    return jax.device_put(scale * np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


def shape(*sizes: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sizes, dtype)


W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


# -- values beside those of float64


def in_float64(fn: Callable[..., Any], *args: Any) -> Any:
    """The oracle: `fn` on the same numbers in float64."""

    def wide(x: Any) -> Any:
        return jax.device_put(np.asarray(x, np.float64)) if jnp.issubdtype(x.dtype, jnp.floating) else x

    with jax.enable_x64(True):
        return jax.tree.map(np.asarray, jax.jit(fn)(*jax.tree.map(wide, args)))


def error(found: Any, expected: Any) -> float:
    """The norm of the difference, relative to the norm of what is expected."""
    found, expected = np.asarray(found, np.float64), np.asarray(expected, np.float64)
    return float(np.linalg.norm(found - expected) / np.linalg.norm(expected))


def near(found: Any, expected: Any, bound: float = 2e-2) -> bool:
    return np.linalg.norm(np.asarray(found, np.float64) - expected) <= bound * np.linalg.norm(expected)


def assert_near(found: Any, expected: Any, bound: float) -> None:
    """Float32, and near by the norm of each array."""
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == jnp.float32
        assert near(a, b, bound)


# -- jaxprs

_PLAIN = ("dot_general", "conv_general_dilated", "ragged_dot_general")
MATMULS = (*_PLAIN, *(f"mixed_{name}" for name in _PLAIN))
LOW, WIDE = ("bfloat16", "bfloat16"), ("float32", "float32")  # what a matmul multiplies


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, nested bodies included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jec.jaxprs_in_params(eqn.params):
            yield from equations(inner)


def names(jaxpr: Any) -> list[str]:
    """The primitives of all equations."""
    return [eqn.primitive.name for eqn in equations(jaxpr)]


def count(name: str, jaxpr: Any) -> int:
    return names(jaxpr).count(name)


def matmul_dtypes(jaxpr: Any) -> list[tuple[str, ...]]:
    """The dtypes that each matmul in a jaxpr multiplies: ('bfloat16', 'bfloat16'), ..."""
    return [multiplied(eqn) for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]


def multiplied(eqn: Any) -> tuple[str, ...]:
    """The dtypes that a matmul multiplies. A mixed one rounds its operands to one dtype first."""
    return tuple(eqn.params.get("compute_dtype", v.aval.dtype).name for v in eqn.invars[:2])


def dtypes_of(primitive: str, jaxpr: Any) -> list[str]:
    """The dtype of the first result of each equation of a primitive."""
    return [eqn.outvars[0].aval.dtype.name for eqn in equations(jaxpr) if eqn.primitive.name == primitive]


def jaxpr_of(fn: Callable[..., Any], *args: Any) -> Any:
    return jax.make_jaxpr(fn)(*args)


def matmuls(fn: Callable[..., Any], *args: Any) -> list[tuple[str, ...]]:
    """The dtypes that each matmul of a function multiplies."""
    return matmul_dtypes(jaxpr_of(fn, *args))


def kept(fn: Callable[..., Any], *args: Any) -> list[tuple[tuple[int, ...], str]]:
    """Shapes and dtypes of what the pullback by the first argument holds on to, arguments left out."""
    jaxpr = jax.make_jaxpr(lambda *a: jax.tree.leaves(jax.vjp(lambda first: fn(first, *a[1:]), a[0])[1]))(*args).jaxpr
    made = {v for eqn in jaxpr.eqns for v in eqn.outvars}
    return sorted((v.aval.shape, v.aval.dtype.name) for v in made if any(v is out for out in jaxpr.outvars))


# -- equality on bits: dtypes, shapes, and bytes, so that NaN equals NaN and -0 is not 0


def bits(leaf):
    """What must be equal of a leaf: an array's dtype, shape and bytes, or the leaf itself."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), bits(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return leaf


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert bits(x) == bits(y), f"{jax.tree_util.keystr(path)}: {x} is not {y}"


def dtypes(tree):
    return [str(x.dtype) for x in jax.tree.leaves(tree)]


# -- errors and processes


def raises(error, *words):
    """An error whose message has these words, in this order."""
    return pytest.raises(error, match="(?s)" + ".*".join(words))


def with_the_package(**variables: str) -> dict[str, str]:
    """The environment of a process that is to find this jaxamp."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    return {**os.environ, "PYTHONPATH": path, **variables}


def assert_starts_no_backend(*lines: str) -> None:
    """These lines start no JAX backend in a process of their own; the traceback has the number of one that does."""
    code = "\n".join(["import jax", *lines, "print('done'); jax.devices()"])
    environment = with_the_package(JAX_PLATFORMS="nowhere")  # starting a backend fails
    out = subprocess.run([sys.executable, "-W", "error", "-c", code], env=environment, capture_output=True, text=True)
    assert out.stdout == "done\n", out.stderr
    assert "Unable to initialize backend 'nowhere'" in out.stderr
