"""How `vmap` goes through a primitive that takes any number of axes in front."""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax.interpreters import batching

from .._compat import Primitive

Params = dict[str, Any]


def map_in_front(primitive: Primitive, params_of_batch: Callable[[Params], Params] = lambda params: params) -> None:
    """Let `vmap` put the mapped axis of all operands in front, and bind the primitive with the parameters for that."""

    def batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int | None]:
        if all(dim is None for dim in dims):
            return primitive.bind(*operands, **params), None
        first = [
            jnp.broadcast_to(x, (axis_data.size, *x.shape)) if dim is None else jnp.moveaxis(x, dim, 0)
            for x, dim in zip(operands, dims, strict=True)
        ]
        return primitive.bind(*first, **params_of_batch(params)), 0

    batching.fancy_primitive_batchers[primitive] = batch
