"""Operations that send entries from device to device, in the compute dtype.

    sent_low(x) = float32(base(low(x)))

The law: it has the types of the base, its value is the base's, rounded, and its derivative is the base's. So what goes
over the wire in the forward pass has half the bytes. Gradients are summed over devices as `reduce` says: in float32, in
the compute dtype, or sent in the compute dtype and summed in float32.

Rounding first is not enough: left to itself, XLA's partitioner sends the float32 values and rounds then. The barrier
between the two keeps their order. When it is differentiated, the low result is a value of its own, for JAX to keep.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.extend.core.primitives import sharding_constraint_p
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive
from .._jaxpr import bind, evaluate
from .._traits import Traits, declare
from .matmul import batching_rule
from .wide_sums import with_wide_sums


@functools.cache
def sent_low(base: Primitive, stays_low: bool = False, is_quantized: bool = False) -> Primitive:
    """The low form of a primitive of one operand, with two more parameters: the dtype `low`, and `reduce`.

    `stays_low`: its result has that dtype too. If the dtype is that of the operand, it is sent as it is. Bytes are the
    bits of numbers of that dtype, and stay bytes. `is_quantized`: quantised matmuls read it. XLA would sum their
    gradients on all devices, multiply the sums by a scale, and take a part then; so there is no constraint on these.
    """
    own = Primitive(f"low_{base.name}")

    def lower(x: Any, *, low: np.dtype, reduce: str, **params: Any) -> Any:
        if x.dtype == np.uint8:
            out = base.bind(lax.optimization_barrier(lax.bitcast_convert_type(x, low)), **params)
            return lax.bitcast_convert_type(lax.optimization_barrier(out), np.uint8)
        out = base.bind(lax.optimization_barrier(lax.convert_element_type(x, low)), **params)
        out = lax.optimization_barrier(out) if low == x.dtype else out  # or XLA might round first on its own
        return out if stays_low else lax.convert_element_type(out, x.dtype)

    def abstract_eval(x: Any, *, low: np.dtype, reduce: str, **params: Any) -> tuple[Any, Any]:
        out, effects = base.abstract_eval(x, **params)
        return out.update(dtype=low, weak_type=False) if stays_low and x.dtype != np.uint8 else out, effects

    def jvp(primals: Any, tangents: Any, *, low: np.dtype, reduce: str, **params: Any) -> tuple[Any, Any]:
        (x,), (tangent,) = primals, tangents
        out = sent_low(base, stays_low=True).bind(x, low=low, reduce=reduce, **params)
        if is_quantized and base is sharding_constraint_p:
            moved = tangent
        elif reduce == "float32":
            moved = base.bind(tangent, **params)
        else:
            moved = reduced_low(base).bind(tangent, low=low, reduce=reduce, **params)
        if stays_low:
            return out, lax.convert_element_type(moved, low)
        return lax.convert_element_type(out, x.dtype), moved

    _register(own, base, lower, abstract_eval)
    ad.primitive_jvps[own] = jvp
    return own


@functools.cache
def reduced_low(base: Primitive) -> Primitive:
    """The base as it is, except that its cotangents are sent in the dtype `low`."""
    own = Primitive(f"{base.name}_reduced_low")

    def lower(x: Any, *, low: np.dtype, reduce: str, **params: Any) -> Any:
        return base.bind(x, **params)

    def abstract_eval(x: Any, *, low: np.dtype, reduce: str, **params: Any) -> tuple[Any, Any]:
        return base.abstract_eval(x, **params)

    def transpose(ct: Any, x: Any, *, low: np.dtype, reduce: str, **params: Any) -> list[Any]:
        ct, dtype = lax.convert_element_type(ct, low), x.aval.dtype
        aval = x.aval.update(dtype=low, weak_type=False)
        transposed = lambda ct: jax.linear_transpose(functools.partial(base.bind, **params), aval)(ct)[0]
        out = with_wide_sums(transposed, ct, dtype) if reduce == "wire" else transposed(ct)
        return [lax.convert_element_type(out, dtype)]

    _register(own, base, lower, abstract_eval)
    ad.deflinear2(own, transpose)
    return own


def takes_wire(base: Primitive) -> bool:
    """Whether gradients through a primitive are summed by an equation of the program, and not by XLA's partitioner."""
    return base.name in ("all_gather", "pvary")


def _register(own: Primitive, base: Primitive, lower: Callable[..., Any], abstract_eval: Callable[..., Any]) -> None:
    own.def_effectful_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    batching.fancy_primitive_batchers[own] = functools.partial(_batch, base, own)
    declare(own, Traits(moves=True, relays=True, communicates=True, shown_as=base.name, fixed_dtype=True))


_OURS = ("low", "reduce")  # parameters that the base does not have


def _batch(base: Primitive, own: Primitive, axis_data: Any, operands: Any, dims: Any, **params: Any) -> Any:
    """The base's rule, with our primitive in place of the base."""
    more = {name: params.pop(name) for name in _OURS if name in params}
    rule, found = batching_rule(base, axis_data, dims, params)

    def apply(eqn: Any, ins: list[Any]) -> Any:
        return bind(eqn.replace(primitive=own), ins, **more) if eqn.primitive is base else bind(eqn, ins)

    return evaluate(jax.make_jaxpr(rule)(*operands), operands, apply)[0], found[-1]
