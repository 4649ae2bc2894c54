"""How cotangents are held in memory.

Two of XLA's habits on a GPU (seen with jax 0.10 and 0.11) cost more than the work itself:

- It drops float32 -> bfloat16 -> float32. What flows back to a matmul and its bias is rounded for the matmul and summed
  in float32 for the bias: it would be written and read in float32 for the sum's sake alone. Held as it is rounded, it
  is written once, in half the bytes.
- Its layouts follow reductions: to sum a cotangent of shape (batch, tokens, width) over the batch, as the gradient of a
  table of positions does, it turns the batch innermost, and with it all activations around. Matmuls want the width
  innermost, so that each of them is between two transposes: 97 in a step of a ViT of 12 layers.
"""

import functools
from typing import Any

import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, mlir

from ._bind import bind_primitive
from ._compat import Primitive, apply_primitive, batching_rules

HELD = Primitive("held")


def held(x: Any, dtype: np.dtype, ordered: bool) -> Any:
    """`x`, whose cotangent is rounded to `dtype` if it is not yet, and held so; `ordered`: in the order of its axes."""
    return bind_primitive(HELD, x, here=False, dtype=dtype, ordered=ordered)


def round_and_hold(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`, held so: what reads it later reads the rounded values."""
    return HELD.bind(lax.convert_element_type(x, dtype), here=True, dtype=dtype, ordered=False)


def _identity(x: Any, **params: Any) -> Any:
    return x


def _rounded(x: Any, *, here: bool, dtype: np.dtype, ordered: bool) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype) if here else x


def _on_cuda(x: Any, *, here: bool, dtype: np.dtype, ordered: bool) -> Any:
    if not here:
        return x
    held = lax.convert_element_type(x, dtype)
    held = lax.optimization_barrier(held) if dtype != np.float32 else held
    held = with_layout_constraint(held, Layout(tuple(range(x.ndim)))) if ordered else held
    return lax.convert_element_type(held, x.dtype)


def _transpose(ct: Any, x: Any, *, here: bool, **params: Any) -> list[Any]:
    return [ct if type(ct) is ad.Zero else HELD.bind(ct, here=not here, **params)]


def _batch(axis_data: Any, operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    return HELD.bind(*operands, **params), dims[0]


HELD.def_impl(functools.partial(apply_primitive, HELD))
HELD.def_abstract_eval(_identity)
mlir.register_lowering(HELD, mlir.lower_fun(_rounded, multiple_results=False))
mlir.register_lowering(HELD, mlir.lower_fun(_on_cuda, multiple_results=False), platform="cuda")
ad.deflinear2(HELD, _transpose)
batching_rules()[HELD] = _batch
