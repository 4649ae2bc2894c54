"""Binding a primitive under a transform that JAX runs equation by equation.

Under `grad` or `vmap`, JAX applies the rules of a primitive anew each time that it is bound. What comes of a jitted
function it remembers, for operands of each type: the functions of `jnp` are such, and here each primitive with its
parameters is one. It is inlined where it is bound, so that jaxprs, source lines and scopes are those of the primitive
bound by itself. `jit` tells apart what a trace depends on: equation contexts, meshes, the configuration of JAX.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax

from ._compat import EARLY_INLINE, Primitive, is_transformed
from ._traits.table import PLAIN

_CACHED_BINDS = 4096


def bind_primitive(primitive: Primitive, /, *operands: Any, **params: Any) -> Any:
    """What `primitive.bind` does, sooner."""
    if primitive.name in PLAIN and any(map(is_transformed, operands)):
        return _jitted(primitive, tuple(params.items()))(*operands)  # JAX wants parameters that can be hashed
    return primitive.bind(*operands, **params)


@functools.lru_cache(_CACHED_BINDS)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def bound(*operands: Any) -> Any:
        return primitive.bind(*operands, **dict(params))

    bound.__name__ = primitive.name
    return jax.jit(bound, inline=EARLY_INLINE)
