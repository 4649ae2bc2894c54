"""Rounding to a number format of few bits, with a scale.

    q = format(x / scale),        scale = largest |x| / largest number of the format

`scale` is a primitive because of `vmap`: a batch has one scale, as the matmul of the whole batch wants it; so is
`largest`, its first half. `quantize` is one because of its derivative: a quantised value is there to be multiplied, and
the matmul is given the value before rounding too, to differentiate by (`quantized_matmul.py`).

Where JAX has a dtype for the format, the result is a byte for each entry: the bits, as integers, because
`jax.checkpoint` passes all floats that it keeps through `reduce_precision`, which knows nothing of fp8's last numbers.
Integers have no tangents, so the scale, which `quantize` returns too, has one in their place; it only tells that there
is one. Other formats are emulated: the numbers of the format, held in the compute dtype, or in float32 if that can't
hold them.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive
from .._formats import saturate
from .._number_formats.number_format import KNOWN, NumberFormat
from .._number_formats.quantize import quantize as emulated
from .._number_formats.scales import scale_for
from .._traits import Traits, declare
from .barriers import ROW_MAJOR

SCALE = Primitive("scale")
LARGEST = Primitive("largest")
CHECKSUM = Primitive("checksum")
QUANTIZE = Primitive("quantize")
QUANTIZE.multiple_results = True
ONCE = Primitive("once")  # a quantised value and its scale, in a derivative: it can't be differentiated again

_NATIVE = {  # where matmuls of them need no emulation on some hardware
    KNOWN["e4m3"]: jnp.dtype(jnp.float8_e4m3fn),
    KNOWN["e5m2"]: jnp.dtype(jnp.float8_e5m2),
    KNOWN["e4m3fnuz"]: jnp.dtype(jnp.float8_e4m3fnuz),
    KNOWN["e5m2fnuz"]: jnp.dtype(jnp.float8_e5m2fnuz),
}

EIGHT_BITS = {dtype: format for format, dtype in _NATIVE.items()}

# Bits of a scale. The product of two scales then has at most eight, so that each 16-bit float can hold it.
_SCALE_BITS = 4


class Quantized(NamedTuple):
    """Numbers of a format, or their bits, and the float32 that they are to be multiplied by."""

    q: Any
    scale: Any


def dtype_of(format: NumberFormat, compute_dtype: np.dtype) -> np.dtype:
    """The dtype of arrays that hold numbers of a format."""
    if format in _NATIVE:
        return _NATIVE[format]
    info = jnp.finfo(compute_dtype)
    in_range = format.smallest_subnormal >= info.smallest_subnormal and format.max <= info.max
    fits = info.nexp == 8 if format.is_scaled else in_range
    exact = format.scale in ("none", "e8m0") and format.mantissa <= info.nmant
    return compute_dtype if fits and exact else np.dtype(np.float32)


def scale_of(x: Any, format: NumberFormat, powers_of_two: bool = False) -> Any:
    """The scale for an array, from its largest number."""
    return SCALE.bind(x, format=format, powers_of_two=powers_of_two, axes=())


def quantize(
    x: Any, scale: Any, format: NumberFormat, compute_dtype: np.dtype, axis: int, in_bytes: bool = False
) -> Quantized:
    """`x` in a format. `axis`: along which blocks share a scale, if the format has blocks.

    Stochastic rounding draws from a number that the array itself makes, so that a run can be repeated.

    `in_bytes`: whether the numbers of a format without a dtype of its own may be held in those of another.
    """
    seed = [CHECKSUM.bind(x)] if format.rounding == "stochastic" else []
    dtype, axis = dtype_of(format, compute_dtype), 0 if format.block == "tensor" else axis
    if in_bytes:
        dtype = byte_dtype(format) or dtype
    return Quantized(*QUANTIZE.bind(x, scale, *seed, format=format, dtype=dtype, axis=axis))


@functools.cache
def byte_dtype(format: NumberFormat) -> np.dtype | None:
    """A dtype of eight bits that has all numbers of a format; None if there is none."""
    if format in _NATIVE:
        return _NATIVE[format]
    if format.is_scaled or format.bits > 8:
        return None
    numbers = set(format.values().tolist())
    return next((dtype for dtype, other in EIGHT_BITS.items() if numbers <= set(other.values().tolist())), None)


def numbers(q: Any, format: NumberFormat | None) -> Any:
    """The numbers that a quantised array has. `format`: None for the compute dtype."""
    dtype = None if format is None or q.dtype != np.uint8 else byte_dtype(format)
    return q if dtype is None else lax.bitcast_convert_type(q, dtype)


def dequantized(quantized: Quantized, format: NumberFormat | None, dtype: np.dtype) -> Any:
    """The values that a quantised array stands for, in a dtype."""
    wide = lax.convert_element_type(numbers(quantized.q, format), np.float32) * quantized.scale
    return wide if dtype == np.float32 else saturate(wide, dtype)  # float16 can't hold each scale


def refuse_second_derivative() -> NoReturn:
    raise TypeError(
        "A matmul in a format of few bits is differentiated twice; its second derivative is not defined. Give the "
        "scope around it the rule 'compute', or write amp_policy='default'."
    )


def largest_of(x: Any) -> Any:
    """The largest magnitude of the finite numbers of an array, as a float32."""
    return LARGEST.bind(x, axes=())


def _find_largest(x: Any, *, axes: tuple[Any, ...]) -> Any:
    """Of the numbers that are finite: one that is not must not take the scale of all others with it.

    `axes`: of a mesh, over which devices have parts of the array.
    """
    size = lax.abs(x)
    largest = jnp.max(lax.select(lax.is_finite(x), size, jnp.zeros_like(size)), initial=0)
    largest = lax.convert_element_type(largest, np.float32)
    return lax.pmax(largest, axes) if axes else largest


def find_scale(x: Any, *, format: NumberFormat, powers_of_two: bool, axes: tuple[Any, ...]) -> Any:
    """The scale for an array, rounded up to a few bits. `axes`: see `_find_largest`."""
    scale = scale_for(_find_largest(x, axes=axes), format)
    dropped = np.uint32(23 if powers_of_two else 24 - _SCALE_BITS)
    slack = np.uint32(2)  # units in the last place that a scale may be off, and is not rounded up for
    bits = lax.bitcast_convert_type(scale, np.uint32) + np.uint32((1 << int(dropped)) - 1) - slack
    return lax.bitcast_convert_type((bits >> dropped) << dropped, np.float32)


def sum_of_bits(x: Any) -> Any:
    """The sum of the bits of all entries, as integers: the same in each order of adding, so on any devices."""
    bits = lax.bitcast_convert_type(lax.convert_element_type(x, np.float32), np.uint32)
    return jnp.sum(bits, dtype=np.uint32)


def _quantize(x: Any, scale: Any, *seed: Any, format: NumberFormat, dtype: np.dtype, axis: int) -> Any:
    """Saturates what is finite. The rest stays so, for a loss scaler to see: NaN where the format has no infinity.

    Bits are laid out in the order of their axes. cuBLAS wants an operand of some matmuls turned; left to itself, XLA
    turns everything from there back to the float32 weight, its magnitudes and a mask too. It can turn the bytes while
    it makes them.
    """
    wide = lax.convert_element_type(x, np.float32)
    scaled = wide if format.is_scaled else wide * (1 / scale)
    if format in _NATIVE:
        limit = np.float32(format.max)
        rounded = lax.convert_element_type(
            lax.select(lax.is_finite(wide), lax.clamp(-limit, scaled, limit), wide), dtype
        )
        return ROW_MAJOR.bind(lax.bitcast_convert_type(rounded, np.uint8)), scale
    rounded = emulated(scaled, format, key=seed[0] if seed else None, axis=axis)
    held = lax.convert_element_type(lax.select(lax.is_finite(wide), rounded, wide), dtype)
    return ROW_MAJOR.bind(lax.bitcast_convert_type(held, np.uint8)) if dtype in EIGHT_BITS else held, scale


def _abstract(fun: Callable[..., Any]) -> Callable[..., Any]:
    """The type of a function's result, sharding and mesh axes included, from a trace of it on one device's part."""

    @functools.lru_cache(1024)
    def traced(avals: Any, params: Any) -> Any:
        return jax.make_jaxpr(functools.partial(fun, **dict(params)))(*avals).out_avals

    def abstract(*avals: Any, **params: Any) -> Any:
        found = traced(avals, tuple((params | ({"axes": ()} if "axes" in params else {})).items()))
        return found if len(found) > 1 else found[0]

    return abstract


def _jvp_of_number(own: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    out = own.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _jvp_of_quantize(primals: Any, tangents: Any, **params: Any) -> Any:
    q, scale = QUANTIZE.bind(*primals, **params)
    zeros = [ad.Zero(jax.typeof(out).to_tangent_aval()) for out in (q, scale)]
    if type(tangents[0]) is ad.Zero:
        return [q, scale], zeros
    return [q, scale], [zeros[0], 0 * jnp.sum(tangents[0], dtype=np.float32)]


def _jvp_of_once(primals: Any, tangents: Any) -> Any:
    if any(type(tangent) is not ad.Zero for tangent in tangents):
        refuse_second_derivative()
    out = ONCE.bind(*primals)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _batch_number(own: Primitive, operands: Any, dims: Any, **params: Any) -> Any:
    return own.bind(*operands, **params), None


def _batch_quantize(operands: Any, dims: Any, *, axis: int, **params: Any) -> Any:
    if dims[1] is not None:
        return _batch_with_scales(operands, dims, axis, **params)
    check_scales(*dims[2:])
    return QUANTIZE.bind(*operands, axis=axis + (dims[0] <= axis), **params), (dims[0], None)


def _batch_with_scales(operands: Any, dims: Any, axis: int, *, format: NumberFormat, **params: Any) -> Any:
    """A scale for each entry of a batch: those that a `cond` kept for its backward pass become such under `vmap`."""
    check_scales(*dims[2:])
    scales = jnp.moveaxis(operands[1], dims[1], 0)
    x = batching.bdim_at_front(operands[0], dims[0], scales.size)
    wide = lax.convert_element_type(x, np.float32)
    if not format.is_scaled:
        largest, inverse = np.finfo(np.float32).max, (1 / scales).reshape(-1, *[1] * (x.ndim - 1))
        wide = lax.select(lax.is_finite(wide), lax.clamp(-largest, wide * inverse, largest), wide)
    q, one = QUANTIZE.bind(wide, np.float32(1), *operands[2:], axis=axis + 1, format=format, **params)
    return [q, scales * one], (0, 0)


def zeros_for(operands: Sequence[Any]) -> list[Any]:
    """The cotangents of operands that have no derivative."""
    return [ad.Zero(v.aval.to_tangent_aval()) if ad.is_undefined_primal(v) else None for v in operands]


def check_scales(*dims: Any) -> None:
    """Refuse a batch of scales."""
    if any(dim is not None for dim in dims):
        raise NotImplementedError("a batch of scales; expected one scale for a batch. Leave scales out of the vmap.")


def define(own: Primitive, fun: Callable[..., Any], jvp: Callable[..., Any], batch: Callable[..., Any]) -> None:
    """Define a primitive by a function and its rules."""
    own.def_impl(functools.partial(xla.apply_primitive, own))
    own.def_abstract_eval(_abstract(fun))
    mlir.register_lowering(own, mlir.lower_fun(fun, multiple_results=own.multiple_results))
    ad.primitive_jvps[own] = jvp
    batching.primitive_batchers[own] = batch


for _own, _fun in ((SCALE, find_scale), (LARGEST, _find_largest), (CHECKSUM, sum_of_bits)):
    define(_own, _fun, functools.partial(_jvp_of_number, _own), functools.partial(_batch_number, _own))
    declare(_own, Traits(reduces=True, kept=lambda *avals, **params: True, fixed_dtype=True))
define(QUANTIZE, _quantize, _jvp_of_quantize, _batch_quantize)
define(ONCE, lambda q, scale: q, _jvp_of_once, lambda operands, dims: (ONCE.bind(*operands), dims[0]))
declare(ONCE, Traits(cheap=True, passes_on=True, plain_params=True, fixed_dtype=True))
declare(QUANTIZE, Traits(cheap=True, plain_params=True, fixed_dtype=True))
for _own in (SCALE, LARGEST, CHECKSUM, QUANTIZE, ONCE):
    ad.primitive_transposes[_own] = lambda ct, *operands, **params: zeros_for(operands)
