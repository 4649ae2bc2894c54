"""Sums over devices of low values, sent low and summed in float32.

    wide_sum(x) = base(x)        for a `psum` or a `psum_scatter` of values in the compute dtype

Each device gets what all have of its part, and sums it in float32. A `psum` then gathers the parts, low again, so each
entry is rounded once before the sum and once after it, however many devices there are. The bytes on the wire are those
of a sum in the compute dtype. The law: the result and the derivative are those of the base, in the dtype that the
caller asks for.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive
from .._jaxpr import bind, evaluate
from .._traits import Traits, declare, traits_of
from .matmul import batching_rule


def can_sum_wide(primitive: Primitive, aval: Any, params: dict[str, Any]) -> bool:
    """Whether there is a wide form of a sum over devices: of an array, over named axes or groups of one size."""
    if not traits_of(primitive).sums_devices or aval.ndim == 0:
        return False
    sizes = set(map(len, params.get("axis_index_groups") or ()))
    return len(sizes) <= 1 and not any(isinstance(axis, int) for axis in _axes(params))


def sum_wide(base: Primitive, x: Any, dtype: np.dtype, params: dict[str, Any]) -> Any:
    """What `base` gives of a low `x`, in `dtype`."""
    return _wide(base).bind(x, dtype=dtype, **params)


def with_wide_sums(fun: Callable[[Any], Any], x: Any, dtype: np.dtype) -> Any:
    """The one result of a linear `fun` of `x`, with wide sums in place of its sums over devices.

    All other operations of such a function move entries, in any dtype, or add results.
    """

    def apply(eqn: Any, ins: list[Any]) -> Any:
        is_sum = can_sum_wide(eqn.primitive, ins[0], eqn.params)
        return [sum_wide(eqn.primitive, ins[0], dtype, eqn.params)] if is_sum else bind(eqn, ins)

    (out,) = evaluate(jax.make_jaxpr(fun)(x), [x], apply)
    return out


def _axes(params: dict[str, Any]) -> tuple[Any, ...]:
    axes = params["axes"] if "axes" in params else params["axis_name"]
    return axes if isinstance(axes, tuple) else (axes,)


@functools.cache
def _wide(base: Primitive) -> Primitive:
    own = Primitive(f"{base.name}_wide")
    is_scatter = base.name == "reduce_scatter"

    def abstract_eval(x: Any, *, dtype: np.dtype, **params: Any) -> tuple[Any, Any]:
        out, effects = base.abstract_eval(x, **params)
        return out.update(dtype=dtype), effects

    def lower(x: Any, *, dtype: np.dtype, **params: Any) -> Any:
        return lax.convert_element_type(_scattered(x, **params) if is_scatter else _summed(x, **params), dtype)

    def transpose(ct: Any, x: Any, *, dtype: np.dtype, **params: Any) -> list[Any]:
        low = x.aval.dtype
        ct = lax.convert_element_type(ct, low)
        fun = lambda ct: jax.linear_transpose(functools.partial(base.bind, **params), x.aval)(ct)[0]
        return [with_wide_sums(fun, ct, low)]

    def batch(axis_data: Any, operands: Any, dims: Any, *, dtype: np.dtype, **params: Any) -> tuple[Any, Any]:
        rule, found = batching_rule(base, axis_data, dims, params)
        out = with_wide_sums(rule, operands[0], dtype)
        return lax.convert_element_type(out, dtype), found[-1]

    own.def_effectful_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    ad.deflinear2(own, transpose)
    batching.fancy_primitive_batchers[own] = batch
    declare(own, Traits(sums_devices=True, shown_as=base.name, fixed_dtype=True))
    return own


def _scattered(
    x: Any, *, axis_name: Any, scatter_dimension: int, axis_size: int, tiled: bool, axis_index_groups: Any
) -> Any:
    """A `psum_scatter` in float32."""
    parts = lax.all_to_all(
        x, axis_name, scatter_dimension, scatter_dimension, axis_index_groups=axis_index_groups, tiled=True
    )
    if tiled:
        shape = parts.shape
        parts = parts.reshape(*shape[:scatter_dimension], axis_size, -1, *shape[scatter_dimension + 1 :])
    return lax.convert_element_type(parts, np.float32).sum(scatter_dimension)


def _summed(x: Any, *, axes: tuple[Any, ...], axis_index_groups: Any = None) -> Any:
    """A `psum` in float32 of parts, rounded and gathered."""
    devices = len(axis_index_groups[0]) if axis_index_groups else math.prod(map(lax.axis_size, axes))
    padded = jnp.pad(x.reshape(-1), (0, -x.size % devices))
    part = _scattered(
        padded,
        axis_name=axes,
        scatter_dimension=0,
        axis_size=devices,
        tiled=True,
        axis_index_groups=axis_index_groups,
    )
    low = lax.optimization_barrier(lax.convert_element_type(part, x.dtype))  # or XLA may gather it in float32
    whole = lax.all_gather(low, axes, axis_index_groups=axis_index_groups, tiled=True)
    return whole[: x.size].reshape(x.shape)
