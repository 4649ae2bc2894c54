"""Operations that send entries from device to device, in the compute dtype.

    sent_low(x) = float32(base(low(x)))

The law: it has the types of the base, its value is the base's, rounded, and its derivative is the base's, in float32.
So what goes over the wire in the forward pass has half the bytes, and gradients are summed over devices in float32.

Rounding first is not enough: left to itself, XLA's partitioner sends the float32 values and rounds then. The barrier
between the two keeps their order. When it is differentiated, the low result is a value of its own, for JAX to keep.
"""

import functools
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive
from .._jaxpr import bind, evaluate
from .._traits import Traits, declare

_LOW: dict[tuple[Primitive, bool], Primitive] = {}  # (base, whether the result stays low) -> ours


def sent_low(base: Primitive, stays_low: bool = False) -> Primitive:
    """The low form of a primitive of one operand, with one more parameter: `low`, the dtype.

    `stays_low`: its result has that dtype too.
    """
    if (base, stays_low) not in _LOW:
        _LOW[base, stays_low] = _define(base, stays_low)
    return _LOW[base, stays_low]


def _define(base: Primitive, stays_low: bool) -> Primitive:
    own = Primitive(f"low_{base.name}")

    def lower(x: Any, *, low: np.dtype, **params: Any) -> Any:
        out = base.bind(lax.optimization_barrier(lax.convert_element_type(x, low)), **params)
        return out if stays_low else lax.convert_element_type(out, x.dtype)

    def abstract_eval(x: Any, *, low: np.dtype, **params: Any) -> tuple[Any, Any]:
        out, effects = base.abstract_eval(x, **params)
        return out.update(dtype=low, weak_type=False) if stays_low else out, effects

    own.def_effectful_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    ad.primitive_jvps[own] = functools.partial(_jvp, base, stays_low)
    batching.fancy_primitive_batchers[own] = functools.partial(_batch, base, own)
    declare(own, Traits(moves=True, relays=True, communicates=True, shown_as=base.name, fixed_dtype=True))
    return own


def _jvp(
    base: Primitive, stays_low: bool, primals: Any, tangents: Any, *, low: np.dtype, **params: Any
) -> tuple[Any, Any]:
    (x,), (tangent,) = primals, tangents
    out = sent_low(base, stays_low=True).bind(x, low=low, **params)
    moved = base.bind(tangent, **params)
    if stays_low:
        return out, lax.convert_element_type(moved, low)
    return lax.convert_element_type(out, x.dtype), moved


def _batch(
    base: Primitive, own: Primitive, axis_data: Any, operands: Any, dims: Any, *, low: np.dtype, **params: Any
) -> Any:
    found: list[Any] = []

    def rule(x: Any) -> Any:
        out, dim = batching.fancy_primitive_batchers[base](axis_data, [x], dims, **params)
        found.append(dim)
        return out

    def apply(eqn: Any, ins: list[Any]) -> Any:
        return bind(eqn.replace(primitive=own), ins, low=low) if eqn.primitive is base else bind(eqn, ins)

    return evaluate(jax.make_jaxpr(rule)(*operands), operands, apply)[0], found[-1]
