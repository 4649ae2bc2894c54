"""Values, cotangents and kept values in a number format, away from the operands of a matmul.

    rounded(x) = format(x)                       its derivative is 1: cotangents pass as they are
    with_rounded_cotangent(x) = x                and its cotangent is rounded
    kept_in(x) = x                               a checkpoint that keeps it keeps format(x), and computes from that

A value keeps its dtype: the numbers of the format, times their scale, are held in it.

`kept_in` has a rule for partial evaluation, by which JAX splits a checkpoint in two. The forward pass makes the bytes
beside the value, which it goes on with; the backward pass makes the value of the bytes. A checkpoint whose policy does
not keep the value computes it again, exactly.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, partial_eval

from .._compat import Primitive, Var, is_saved
from .._formats import saturate
from .._number_formats.number_format import NumberFormat
from .._number_formats.quantize import quantize as emulated
from .._traits import Traits, declare
from .quantize import (
    Quantized,
    check_scales,
    define,
    dequantized,
    find_scale,
    quantize,
    refuse_second_derivative,
    scale_of,
    sum_of_bits,
)

ROUNDED = Primitive("rounded")
KEPT_IN = Primitive("kept_in")
KEEP = Primitive("keep_in")  # x -> x, bits, scale: the forward half of `kept_in`
KEEP.multiple_results = True
REMEMBERED = Primitive("remembered")  # bits, scale -> x: the backward half


class Rounding(NamedTuple):
    """How an array is rounded."""

    format: NumberFormat
    is_scaled: bool = True  # whether it is divided by a scale first, if the format has none of its own
    powers_of_two: bool = False  # whether that is one


def rounded(x: Any, rounding: Rounding, axis: int) -> Any:
    """`x` rounded to a format. `axis`: along which blocks share a scale, if the format has blocks."""
    return ROUNDED.bind(x, rounding=rounding, axis=_axis(rounding, axis), of_value=True)


def with_rounded_cotangent(x: Any, rounding: Rounding, axis: int) -> Any:
    """`x`, whose cotangent is rounded to a format."""
    return ROUNDED.bind(x, rounding=rounding, axis=_axis(rounding, axis), of_value=False)


def is_alias(eqn: Any) -> bool:
    """Whether the result of an equation is its operand, and only the cotangent is rounded."""
    return eqn.primitive is ROUNDED and not eqn.params["of_value"]


def kept_in(x: Any, rounding: Rounding, axis: int) -> Any:
    """`x`; what a checkpoint keeps of it is rounded to a format."""
    return KEPT_IN.bind(x, rounding=rounding, axis=_axis(rounding, axis))


def _axis(rounding: Rounding, axis: int) -> int:
    return 0 if rounding.format.block == "tensor" else axis


# -- rounding a value or its cotangent


def _round(x: Any, *, rounding: Rounding, axis: int, of_value: bool) -> Any:
    """By integers, which no compiler simplifies. What is not finite stays so."""
    if not of_value or x.size == 0:
        return x
    format_, wide = rounding.format, lax.convert_element_type(x, np.float32)
    seed = sum_of_bits(x) if format_.rounding == "stochastic" else None
    if rounding.is_scaled and not format_.is_scaled:
        scale = find_scale(x, format=format_, powers_of_two=rounding.powers_of_two, axes=())
        found = emulated(wide * (1 / scale), format_, key=seed) * scale
    else:
        found = emulated(wide, format_, key=seed, axis=axis)
    found = lax.select(lax.is_finite(wide), found, wide)
    return found if x.dtype == np.float32 else saturate(found, x.dtype)


def _round_jvp(primals: Any, tangents: Any, *, of_value: bool, **params: Any) -> tuple[Any, Any]:
    (x,), (t,) = primals, tangents
    out = ROUNDED.bind(x, of_value=True, **params) if of_value else x  # one value for JAX to keep
    return out, t if of_value or type(t) is ad.Zero else ROUNDED.bind(t, of_value=False, **params)


def _round_transpose(ct: Any, x: Any, *, of_value: bool, **params: Any) -> list[Any]:
    return [ct if of_value or type(ct) is ad.Zero else ROUNDED.bind(ct, of_value=True, **params)]


def _round_batch(operands: Any, dims: Any, *, axis: int, **params: Any) -> tuple[Any, Any]:
    return ROUNDED.bind(*operands, axis=axis + (dims[0] <= axis), **params), dims[0]


# -- keeping a value in a format


def _keep(x: Any, *, rounding: Rounding, axis: int) -> tuple[Any, Any, Any]:
    format_ = rounding.format
    has_scale = rounding.is_scaled and not format_.is_scaled
    scale = scale_of(x, format_, rounding.powers_of_two) if has_scale else jnp.ones((), np.float32)
    return x, *quantize(x, scale, format_, np.dtype(x.dtype), axis, in_bytes=True)


def _split(saveable: Any, unknown: Any, known_there: Any, eqn: Any) -> Any:
    """The rule for partial evaluation: (known equation, staged one, unknown results, results there, residuals)."""
    (x,), (out,), params = eqn.invars, eqn.outvars, eqn.params
    needed = [x] if isinstance(x, Var) and not known_there[0] else []
    if unknown[0]:
        return None, eqn, [True], [True], needed
    if not is_saved(saveable(eqn.primitive, x.aval, **params)):
        return eqn, eqn, [False], [True], needed
    _, bits, scale = map(Var, KEEP.abstract_eval(x.aval, **params)[0])
    known = eqn.replace(primitive=KEEP, outvars=[out, bits, scale])
    again = {"format": params["rounding"].format, "dtype": np.dtype(x.aval.dtype)}
    staged = eqn.replace(primitive=REMEMBERED, invars=[bits, scale], params=again)
    return known, staged, [False], [True], [bits, scale]


def _keep_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    """Bits have no tangents; that of the scale tells that there is one, so that `remembered` refuses it."""
    outs, (t,) = KEEP.bind(*primals, **params), tangents
    _, bits, scale = (ad.Zero(jax.typeof(out).to_tangent_aval()) for out in outs)
    return outs, [t, bits, scale if type(t) is ad.Zero else 0 * jnp.sum(t, dtype=np.float32)]


def _keep_batch(operands: Any, dims: Any, *, axis: int, **params: Any) -> tuple[Any, Any]:
    return KEEP.bind(*operands, axis=axis + (dims[0] <= axis), **params), (dims[0], dims[0], None)


def _remember(bits: Any, scale: Any, *, format: NumberFormat, dtype: np.dtype) -> Any:
    return dequantized(Quantized(bits, scale), format, dtype)


def _remember_jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
    if any(type(t) is not ad.Zero for t in tangents):
        refuse_second_derivative()
    out = REMEMBERED.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _remember_batch(operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    check_scales(dims[1])
    return REMEMBERED.bind(*operands, **params), dims[0]


def _kept_in_batch(operands: Any, dims: Any, *, axis: int, **params: Any) -> tuple[Any, Any]:
    return KEPT_IN.bind(*operands, axis=axis + (dims[0] <= axis), **params), dims[0]


define(ROUNDED, _round, _round_jvp, _round_batch)
define(
    KEPT_IN,
    lambda x, **params: x,
    lambda primals, tangents, **params: (KEPT_IN.bind(*primals, **params), tangents[0]),
    _kept_in_batch,
)
define(KEEP, _keep, _keep_jvp, _keep_batch)
define(REMEMBERED, _remember, _remember_jvp, _remember_batch)
ad.primitive_transposes[ROUNDED] = _round_transpose
ad.primitive_transposes[KEPT_IN] = lambda ct, x, **params: [ct]
partial_eval.partial_eval_jaxpr_custom_rules[KEPT_IN] = _split
declare(ROUNDED, Traits(cheap=True, plain_params=True, fixed_dtype=True))
declare(KEPT_IN, Traits(passes_on=True, plain_params=True, fixed_dtype=True, kept=lambda *avals, **params: True))
declare(KEEP, Traits(plain_params=True, fixed_dtype=True))
declare(REMEMBERED, Traits(cheap=True, plain_params=True, fixed_dtype=True))
