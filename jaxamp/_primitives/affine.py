"""Shift and scale all entries of a channel, as the end of a BatchNorm does.

    affine(x, m, a, b) = (x - m) * a + b

`m`, `a` and `b` are repeated along some axes. JAX sums the cotangent along these once for each of them, and so reads it
again and again. Two sums are enough, of the cotangent and of its product with `x - m`: all gradients are made of them.

XLA makes one kernel of both, unless there are so few sums that a GPU has processors left: it writes the product in
float32 then, and sums it in a kernel of its own. Of a GroupNorm over few images, the sums are made in two steps.
"""

import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax.interpreters import ad, mlir, xla

from .._compat import Primitive, jet_of
from .._traits import Traits, declare
from .barriers import materialize
from .batches import map_in_front

AFFINE = Primitive("affine")
AFFINE_TANGENT = Primitive("affine_tangent")

Flags = tuple[bool, ...]  # which of x, m, a and b have tangents


def affine(x: Any, m: Any, a: Any, b: Any) -> Any:
    """`(x - m) * a + b`. The last three have one shape, that of `x` with some axes of size one."""
    return AFFINE.bind(x, m, a, b)


def _affine(x: Any, m: Any, a: Any, b: Any) -> Any:
    return (x - m) * a + b


def _tangent(*operands: Any, has: Flags) -> Any:
    """The tangent of `affine`: linear in the tangents, which come first, if it has them."""
    tangents, (x, m, a) = _by_name(operands[:-3], has), operands[-3:]
    moved = [tangents["x"]] if has[0] else []
    moved += [-tangents["m"]] if has[1] else []
    parts = [sum(moved[1:], start=moved[0]) * a] if moved else []
    parts += [(x - m) * tangents["a"]] if has[2] else []
    parts += [tangents["b"]] if has[3] else []
    out = sum(parts[1:], start=parts[0])
    return out if out.shape == x.shape else lax.broadcast_in_dim(out, x.shape, range(x.ndim))


def _by_name(values: Sequence[Any], has: Flags) -> dict[str, Any]:
    return dict(zip((name for name, given in zip("xmab", has, strict=True) if given), values, strict=True))


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out = AFFINE.bind(*primals)
    has = tuple(type(t) is not ad.Zero for t in tangents)
    if not any(has):
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    given = [t for t, flag in zip(tangents, has, strict=True) if flag]
    return out, AFFINE_TANGENT.bind(*given, *primals[:3], has=has)


def _transpose(ct: Any, *operands: Any, has: Flags) -> list[Any]:
    tangents, (x, m, a) = operands[:-3], operands[-3:]
    rest = [None] * 3
    if type(ct) is ad.Zero:
        return [ct if ad.is_undefined_primal(t) else None for t in tangents] + rest
    plain = _total(ct, m.shape)
    gradients = {
        "x": lambda: ct * a,
        "m": lambda: -a * plain,
        "a": lambda: _total(ct * (x - m), m.shape),
        "b": lambda: plain,
    }
    names = [name for name, given in zip("xmab", has, strict=True) if given]
    found = [gradients[name]() if ad.is_undefined_primal(t) else None for name, t in zip(names, tangents, strict=True)]
    return found + rest


def _transpose_of_value(ct: Any, *operands: Any) -> list[Any]:
    """Where it is linear: in `x`, `m` and `b` if `a` is known, in `a` and `b` if the others are."""
    x, m, a, b = operands
    if type(ct) is ad.Zero:
        return [ct if ad.is_undefined_primal(v) else None for v in operands]
    shape = (b.aval if ad.is_undefined_primal(b) else b).shape
    plain = _total(ct, shape)
    gradients = (lambda: ct * a), (lambda: -a * plain), (lambda: _total(ct * (x - m), shape)), (lambda: plain)
    return [make() if ad.is_undefined_primal(v) else None for make, v in zip(gradients, operands, strict=True)]


_SUMS = 256  # in kernels of their own, two for each processor of a large GPU
_COLUMNS = 64  # that one of them sums, or half as many if there are fewer than twice as many


def _total(ct: Any, shape: Sequence[Any]) -> Any:
    """The sums along the axes along which an array of this shape is repeated."""
    axes = [i for i, (whole, own) in enumerate(zip(ct.shape, shape, strict=True)) if whole != own]
    if len(axes) > 1 and _is_too_narrow(shape):
        *axes, last = axes
        ct = materialize(lax.reduce_sum(ct, [last]), ct.dtype)
    return lax.reduce_sum(ct, axes).reshape(shape)


def _is_too_narrow(shape: Sequence[Any]) -> bool:
    """Whether sums of this shape, of images and their channels, are too few for all processors."""
    kept = [size for size in shape if size != 1]
    if len(kept) != 2 or not all(isinstance(size, int) for size in kept):
        return False
    images, channels = kept
    columns = _COLUMNS if channels >= 2 * _COLUMNS else _COLUMNS // 2
    return images * math.ceil(channels / columns) < _SUMS


def _tangent_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, has: Flags) -> tuple[Any, Any]:
    """Of second derivatives, JAX makes what it wants."""
    instantiated = [ad.instantiate_zeros(t) for t in tangents]
    return jax.jvp(functools.partial(_tangent, has=has), tuple(primals), tuple(instantiated))


for _primitive, _fun in ((AFFINE, _affine), (AFFINE_TANGENT, _tangent)):
    _primitive.def_impl(functools.partial(xla.apply_primitive, _primitive))
    mlir.register_lowering(_primitive, mlir.lower_fun(_fun, multiple_results=False))
    declare(_primitive, Traits(elementwise=True, fixed_dtype=True, plain_params=True, jet=jet_of(_fun)))
    map_in_front(_primitive)
AFFINE.def_abstract_eval(lambda x, m, a, b: x)
AFFINE_TANGENT.def_abstract_eval(lambda *avals, has: avals[-3])
ad.primitive_jvps[AFFINE] = _jvp
ad.primitive_jvps[AFFINE_TANGENT] = _tangent_jvp
ad.primitive_transposes[AFFINE_TANGENT] = _transpose
ad.primitive_transposes[AFFINE] = _transpose_of_value
