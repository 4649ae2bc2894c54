"""The sum of all entries of many arrays, in few kernels.

An unrolled network has hundreds of gradients, and a sum is a kernel or two of its own: of the 200 of a ViT-B they take
2 of 92 ms (H200, jax 0.11), most of it to start. On one GPU, arrays of one shape are added up first, in the kernel that
sums them. Devices that each hold parts of arrays sum their own: parts of two arrays need not be in one place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import mlir

from .._compat import Primitive, apply_primitive, batching_rules, is_for_one_device

TOTAL = Primitive("total")


def total(arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of all entries of arrays of dtype float32. It has no derivative."""
    if not arrays or not jax.sharding.get_abstract_mesh().empty:
        return _each(*arrays)
    return TOTAL.bind(*arrays)


def _each(*arrays: Any) -> Any:
    return sum(map(jnp.sum, arrays), start=jnp.float32(0))


def _by_shape(*arrays: Any) -> Any:
    alike: dict[Any, list[Any]] = {}
    for x in arrays:
        alike.setdefault(x.shape, []).append(x)  # sizes that are symbols have no order
    return _each(*(functools.reduce(lax.add, some) for some in alike.values()))


def _on_cuda(ctx: Any, *operands: Any) -> Any:
    return mlir.lower_fun(_by_shape if is_for_one_device(ctx) else _each, multiple_results=False)(ctx, *operands)


def _batch(axis_data: Any, operands: Any, dims: Any) -> tuple[Any, int | None]:
    if all(dim is None for dim in dims):
        return TOTAL.bind(*operands), None
    return jax.vmap(_each, dims)(*operands), 0


TOTAL.def_impl(functools.partial(apply_primitive, TOTAL))
TOTAL.def_abstract_eval(lambda *avals: jax.core.ShapedArray((), jnp.float32))
mlir.register_lowering(TOTAL, mlir.lower_fun(_each, multiple_results=False))
mlir.register_lowering(TOTAL, _on_cuda, platform="cuda")
batching_rules()[TOTAL] = _batch
