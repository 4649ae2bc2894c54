"""How results of matmuls and cotangents are held in memory.

Four of XLA's habits on a GPU (seen with jax 0.10 and 0.11) cost more than the work itself:

- It drops float32 -> bfloat16 -> float32. What flows back to a matmul and its bias is rounded for the matmul and summed
  in float32 for the bias: it would be written and read in float32 for the sum's sake alone. Held as it is rounded, it
  is written once, in half the bytes.
- It makes anew, in front of each matmul, what it takes for cheap: the cotangents of queries, keys and values, put
  together, once for the bias and once for the matmuls. Held for all of them, what moves entries takes 7.0 in place of
  9.5 ms of a step of a ViT-B (H200).
- Its layouts follow reductions: to sum a cotangent of shape (batch, tokens, width) over the batch, as the gradient of a
  table of positions does, it turns the batch innermost, and with it all activations around. Matmuls want the width
  innermost, so that each of them is between two transposes: 97 in a step of a ViT of 12 layers.
- They also follow single readers through a loop: where the backward pass of attention reads values turned, queries and
  keys are turned with them, being slices of one matmul's result, and in a scan all of what its layers have kept.

Constraints on layouts are the way out of the last two, where `takes_layouts` says that there is one.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, mlir

from .._compat import Primitive, apply_primitive, batching_rules, takes_layouts
from .._jaxpr import bind_primitive

HELD = Primitive("held")
ORDERED = Primitive("ordered")


def held(x: Any, dtype: np.dtype, ordered: bool, shared_by: Sequence[Any] = ()) -> Any:
    """`x`, whose cotangent is rounded to `dtype` if it is not yet, and held so; `ordered`: in the order of its axes.

    `shared_by`: what the cotangent goes to. Where some of these is not differentiated, it is left as it is.
    """
    return bind_primitive(HELD, x, *shared_by, here=False, dtype=dtype, ordered=ordered)


def round_and_hold(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`, held so: what reads it later reads the rounded values."""
    return HELD.bind(lax.convert_element_type(x, dtype), here=True, dtype=dtype, ordered=False)


def in_order(x: Any) -> Any:
    """`x`, laid out in the order of its axes."""
    return bind_primitive(ORDERED, x)


def _identity(x: Any, *shared_by: Any, **params: Any) -> Any:
    return x


def _laid_out(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _rounded(x: Any, *shared_by: Any, here: bool, dtype: np.dtype, ordered: bool) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype) if here else x


def _on_cuda(x: Any, *shared_by: Any, here: bool, dtype: np.dtype, ordered: bool) -> Any:
    if not here:
        return x
    held = lax.convert_element_type(x, dtype)
    held = lax.optimization_barrier(held) if dtype != np.float32 else held
    held = _laid_out(held) if ordered else held
    return lax.convert_element_type(held, x.dtype)


def _lowered_on_cuda(ctx: Any, *operands: Any, ordered: bool, **params: Any) -> Any:
    return _lowering(_on_cuda)(ctx, *operands, ordered=ordered and takes_layouts(ctx), **params)


def _ordered_on_cuda(ctx: Any, x: Any) -> Any:
    return _lowering(_laid_out if takes_layouts(ctx) else _identity)(ctx, x)


def _lowering(fun: Callable[..., Any]) -> Callable[..., Any]:
    return mlir.lower_fun(fun, multiple_results=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    out = HELD.bind(*primals, **params) if params["here"] else primals[0]  # one value for JAX to keep
    moves = all(type(tangent) is not ad.Zero for tangent in tangents)
    return out, HELD.bind(tangents[0], **params) if moves else tangents[0]


def _transpose(ct: Any, x: Any, *shared_by: Any, here: bool, **params: Any) -> list[Any]:
    moves = type(ct) is not ad.Zero and all(map(ad.is_undefined_primal, shared_by))
    return [HELD.bind(ct, here=not here, **params) if moves else ct, *(None for _ in shared_by)]


def _register(primitive: Primitive, transpose: Callable[..., Any], anywhere: Any, on_cuda: Any) -> None:
    primitive.def_impl(functools.partial(apply_primitive, primitive))
    primitive.def_abstract_eval(_identity)
    mlir.register_lowering(primitive, _lowering(anywhere))
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
    ad.deflinear2(primitive, transpose)
    batching_rules()[primitive] = lambda axis_data, operands, dims, **params: (
        primitive.bind(*operands, **params),
        dims[0],
    )


_register(HELD, _transpose, _rounded, _lowered_on_cuda)
_register(ORDERED, lambda ct, x: [ct], _identity, _ordered_on_cuda)
ad.primitive_jvps[HELD] = _jvp
