"""Barriers: values and cotangents that are written to memory once, in a given dtype and order of axes.

Four habits of XLA on a GPU (seen with jax 0.10 and 0.11) cost more than the work itself:

- It drops float32 -> bfloat16 -> float32. The cotangent of a matmul and its bias is rounded for the matmul and summed
  in float32 for the bias: for the sum alone it would be written and read in float32. Materialized as it is rounded, it
  is written once, in half the bytes.
- It repeats cheap work in front of each matmul: it concatenates the cotangents of queries, keys and values once for the
  bias and once for the matmuls. Materialized for all of them, moving entries takes 7.0 instead of 9.5 ms of a step of a
  ViT-B (H200).
- Its layouts follow reductions: to sum a cotangent of shape (batch, tokens, width) over the batch, as the gradient of a
  table of positions does, it turns the batch innermost, and all activations around with it. Matmuls want the width
  innermost, so each of them ends up between two transposes: 97 in a step of a ViT of 12 layers.
- Layouts also follow single readers through a loop: where the backward pass of attention reads values turned, it turns
  queries and keys too, since they are slices of one matmul's result, and in a scan everything that its layers keep.

Layout constraints are the way out of the last two, where `takes_layouts` says that they can be asked for.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import lax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of, takes_layouts
from .._jaxpr import bind_primitive
from .._traits import Traits, declare

MATERIALIZED = Primitive("materialized")
ROW_MAJOR = Primitive("row_major")


def materialize(x: Any, dtype: np.dtype, row_major: bool = False) -> Any:
    """`x` in `dtype`, written to memory, in the order of its axes if `row_major`: readers see the rounded values."""
    return MATERIALIZED.bind(lax.convert_element_type(x, dtype), of_value=True, dtype=dtype, row_major=row_major)


def materialize_cotangent(x: Any, dtype: np.dtype, row_major: bool, readers: Sequence[Any] = ()) -> Any:
    """`x`, whose cotangent is rounded to `dtype` and written to memory, in the order of its axes if `row_major`.

    `readers`: the values that the cotangent flows on to. If one of them is not differentiated, nothing is done.
    """
    return bind_primitive(MATERIALIZED, x, *readers, of_value=False, dtype=dtype, row_major=row_major)


def row_major(x: Any) -> Any:
    """`x`, laid out in the order of its axes."""
    return bind_primitive(ROW_MAJOR, x)


def _identity(x: Any, *readers: Any, **params: Any) -> Any:
    return x


def _laid_out(x: Any) -> Any:
    return with_layout_constraint(x, Layout(tuple(range(x.ndim))))


def _rounded(x: Any, *readers: Any, of_value: bool, dtype: np.dtype, row_major: bool) -> Any:
    return lax.convert_element_type(lax.convert_element_type(x, dtype), x.dtype) if of_value else x


def _on_cuda(x: Any, *readers: Any, of_value: bool, dtype: np.dtype, row_major: bool, may_lay_out: bool = False) -> Any:
    if not of_value:
        return x
    out = lax.convert_element_type(x, dtype)
    if not (row_major and dtype == np.float32):  # float32 is asked for by its layout alone
        out = lax.optimization_barrier(out)
    out = _laid_out(out) if row_major and may_lay_out else out
    return lax.convert_element_type(out, x.dtype)


def _materialized_on_cuda(ctx: Any, *operands: Any, **params: Any) -> Any:
    return _lowering(_on_cuda)(ctx, *operands, may_lay_out=takes_layouts(ctx), **params)


def _row_major_on_cuda(ctx: Any, x: Any) -> Any:
    return _lowering(_laid_out if takes_layouts(ctx) else _identity)(ctx, x)


def _lowering(fun: Callable[..., Any]) -> Callable[..., Any]:
    return mlir.lower_fun(fun, multiple_results=False)


def _jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    out = MATERIALIZED.bind(*primals, **params) if params["of_value"] else primals[0]  # one value for JAX to keep
    all_differentiated = all(type(tangent) is not ad.Zero for tangent in tangents)
    return out, MATERIALIZED.bind(tangents[0], **params) if all_differentiated else tangents[0]


def _transpose(ct: Any, x: Any, *readers: Any, of_value: bool, **params: Any) -> list[Any]:
    all_differentiated = type(ct) is not ad.Zero and all(map(ad.is_undefined_primal, readers))
    out = MATERIALIZED.bind(ct, of_value=not of_value, **params) if all_differentiated else ct
    return [out, *(None for _ in readers)]


def _register(primitive: Primitive, transpose: Callable[..., Any], anywhere: Any, on_cuda: Any) -> None:
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(_identity)
    mlir.register_lowering(primitive, _lowering(anywhere))
    mlir.register_lowering(primitive, on_cuda, platform="cuda")
    ad.deflinear2(primitive, transpose)
    batching.fancy_primitive_batchers[primitive] = lambda axis_data, operands, dims, **params: (
        primitive.bind(*operands, **params),
        dims[0],
    )


declare(
    MATERIALIZED,
    Traits(
        elementwise=True,
        passes_on=True,
        kept=lambda *avals, of_value, **params: of_value,
        jet=jet_of(_rounded),
    ),
)
declare(ROW_MAJOR, Traits(elementwise=True, passes_on=True, jet=jet_of(_identity)))
_register(MATERIALIZED, _transpose, _rounded, _materialized_on_cuda)
_register(ROW_MAJOR, lambda ct, x: [ct], _identity, _row_major_on_cuda)
ad.primitive_jvps[MATERIALIZED] = _jvp
