"""The sum of all entries of many arrays, in few kernels.

An unrolled network has hundreds of gradients, and each sum is a kernel or two: those of a ViT-B's 200 gradients take 2
of 92 ms (H200, jax 0.11), mostly to start. On one GPU, arrays of one shape are added up first, in the kernel that sums
them. On several devices each array is summed by itself, because the shards of two arrays need not be in one place.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import batching, mlir, xla

from .._compat import Primitive, is_for_one_device, jet_of
from .._traits import Traits, declare

FUSED_SUM = Primitive("fused_sum")


def fused_sum(arrays: Sequence[jax.Array]) -> jax.Array:
    """The sum of all entries of arrays of dtype float32. It has no derivative."""
    if not arrays or not jax.sharding.get_abstract_mesh().empty:
        return _each(*arrays)
    return FUSED_SUM.bind(*arrays)


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
        return FUSED_SUM.bind(*operands), None
    return jax.vmap(_each, dims)(*operands), 0


declare(FUSED_SUM, Traits(fixed_dtype=True, jet=jet_of(_each)))
FUSED_SUM.def_impl(functools.partial(xla.apply_primitive, FUSED_SUM))
FUSED_SUM.def_abstract_eval(lambda *avals: jax.core.ShapedArray((), jnp.float32))
mlir.register_lowering(FUSED_SUM, mlir.lower_fun(_each, multiple_results=False))
mlir.register_lowering(FUSED_SUM, _on_cuda, platform="cuda")
batching.fancy_primitive_batchers[FUSED_SUM] = _batch
