"""A program of the table that the laws are tested over, and how to read a jaxpr."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec

_PLAIN = ("dot_general", "conv_general_dilated", "ragged_dot_general")
MATMULS = (*_PLAIN, *(f"mixed_{name}" for name in _PLAIN))


class Program(NamedTuple):
    """A function in float32, as a user would write it, and what is expected of it under `amp`.

    `fn` must be written for any float dtype: the oracle is the same function on float64 arguments with x64 on.
    """

    name: str
    fn: Callable[..., Any]
    args: Callable[[], tuple[Any, ...]]  # float32 arrays (and ints, keys, modules), made anew and small
    low: int = 0  # matmuls that run low in `amp(fn)`, those in nested bodies counted once each
    kept: int = 0  # matmuls that stay in their original dtype
    without: dict[str, str] = {}  # law -> the reason why it makes no sense here
    rtol: float = 2e-2  # against float64, relative to the largest magnitude of each output


def equations(jaxpr: Any) -> Iterator[Any]:
    """All equations of a jaxpr, nested bodies included."""
    for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        yield eqn
        for inner in jec.jaxprs_in_params(eqn.params):
            yield from equations(inner)


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
