"""A product whose derivative reads a rounded copy of one factor, so that the factor itself need not be kept.

    scaled(decay, state, copy) = decay * state

The law: the value is that of the product, and so is the derivative by `state`. The derivative by `decay`, forward or
backward, is that of `decay * copy`, where the copy is the state, rounded.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of
from .._traits import Traits, declare

SCALED_STATE = Primitive("scaled_state")


def _product(factor: Any, state: Any, copy: Any) -> Any:
    return lax.mul(factor, state)


def _aval(factor: Any, state: Any, copy: Any) -> Any:
    return lax.mul_p.abstract_eval(factor, state)[0]


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    (factor, state, copy), (t_factor, t_state, _) = primals, tangents
    out, parts = SCALED_STATE.bind(*primals), list[Any]()
    if type(t_factor) is not ad.Zero:
        parts.append(lax.mul(t_factor, lax.convert_element_type(copy, state.dtype)))
    if type(t_state) is not ad.Zero:
        parts.append(lax.mul(factor, t_state))
    if not parts:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    return out, functools.reduce(lax.add, parts)


def _transpose(ct: Any, factor: Any, state: Any, copy: Any) -> list[Any]:
    """As a function of one factor. The value does not depend on the copy."""
    of_copy = ad.Zero(copy.aval) if ad.is_undefined_primal(copy) else None
    if type(ct) is ad.Zero:
        return [ad.Zero(x.aval) if ad.is_undefined_primal(x) else None for x in (factor, state, copy)]
    if ad.is_undefined_primal(state):
        return [None, lax.mul(factor, ct), of_copy]
    (out,) = jax.linear_transpose(lambda factor: lax.mul(factor, state), factor.aval)(ct)
    return [out, None, of_copy]


def _batch(axis_data: Any, operands: Any, dims: Any) -> tuple[Any, Any]:
    if all(dim is None for dim in dims):
        return SCALED_STATE.bind(*operands), None
    first = [batching.bdim_at_front(x, dim, axis_data.size) for x, dim in zip(operands, dims, strict=True)]
    return SCALED_STATE.bind(*first), 0


SCALED_STATE.def_impl(functools.partial(xla.apply_primitive, SCALED_STATE))
SCALED_STATE.def_abstract_eval(_aval)
mlir.register_lowering(SCALED_STATE, mlir.lower_fun(_product, multiple_results=False))
ad.primitive_jvps[SCALED_STATE] = _jvp
ad.primitive_transposes[SCALED_STATE] = _transpose
batching.fancy_primitive_batchers[SCALED_STATE] = _batch
declare(SCALED_STATE, Traits(elementwise=True, broadcasts=True, product=True, shown_as="mul", jet=jet_of(_product)))
