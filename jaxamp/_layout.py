"""Cotangents that stay in the order their axes are written in.

XLA's layouts on a GPU follow reductions: to sum a cotangent of shape (batch, tokens, width) over the batch, as the
gradient of a table of positions does, it turns the batch innermost, and with it every activation that the cotangent is
computed with. Matmuls want the width innermost, so that each of them is then between two transposes: 97 of them in a
step of a ViT of 12 layers (0.10 to 0.12).
"""

import functools
from typing import Any

from jax.experimental.layout import Layout, with_layout_constraint
from jax.interpreters import ad, mlir

from ._compat import Primitive, apply_primitive, batching_rules

ORDERED = Primitive("ordered")


def in_order(x: Any) -> Any:
    """`x`, whose cotangent is held in the order of its axes on a GPU."""
    return ORDERED.bind(x, here=False)


def _identity(x: Any, here: bool) -> Any:
    return x


def _on_cuda(x: Any, here: bool) -> Any:
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim)))) if here else x


def _transpose(ct: Any, x: Any, here: bool) -> list[Any]:
    return [ct if type(ct) is ad.Zero else ORDERED.bind(ct, here=not here)]


def _batch(axis_data: Any, operands: Any, dims: Any, here: bool) -> tuple[Any, Any]:
    return ORDERED.bind(*operands, here=here), dims[0]


ORDERED.def_impl(functools.partial(apply_primitive, ORDERED))
ORDERED.def_abstract_eval(_identity)
mlir.register_lowering(ORDERED, mlir.lower_fun(_identity, multiple_results=False))
mlir.register_lowering(ORDERED, mlir.lower_fun(_on_cuda, multiple_results=False), platform="cuda")
ad.deflinear2(ORDERED, _transpose)
batching_rules()[ORDERED] = _batch
