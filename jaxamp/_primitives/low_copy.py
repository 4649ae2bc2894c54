"""A parameter and its low copy: one rounded copy that several readers share, and the gradient of the parameter itself.

    c = low_copy(w)    with_copy(w, c) = float32(c)

The law: `with_copy` has the type of `w`, the value of its copy, and the derivative by `w`, which is not rounded. The
copy has no derivative. Transposed as a function of `w`, it is the same: what arrives goes to `w`.

    widened(x, c) = float32(c)    where x = float32(c)

is the same for a value that was widened before. Its derivative keeps the low value and never `x`: through a barrier, as
in front of a checkpoint's backward pass, XLA would write what nobody reads.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of
from .._traits import Traits, declare

LOW_COPY = Primitive("low_copy")
WITH_COPY = Primitive("with_copy")
WIDENED = Primitive("widened")

Moves = tuple[tuple[Primitive, tuple[tuple[str, Any], ...]], ...]  # primitives of one operand, and their parameters


def _copied(x: Any, *, low: np.dtype, moves: Moves) -> Any:
    """Rounded, and then transposed, reshaped, and so on."""
    return _moved(lax.convert_element_type(x, low), moves)


def _moved(x: Any, moves: Moves) -> Any:
    for primitive, params in moves:
        x = primitive.bind(x, **dict(params))
    return x


def _value(x: Any, copy: Any) -> Any:
    return lax.convert_element_type(copy, x.dtype)


def _copied_aval(x: Any, *, low: np.dtype, moves: Moves) -> Any:
    out = x.update(dtype=low, weak_type=False)
    for primitive, params in moves:
        out = primitive.abstract_eval(out, **dict(params))[0]
    return out


def _copied_jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out = LOW_COPY.bind(*primals, **params)
    return out, ad.Zero(jax.typeof(out).to_tangent_aval())


def _with_copy_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    return WITH_COPY.bind(*primals), tangents[0]


def _widened_jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    """The derivative of the value is that of the copy, of which `x` is made: it is needed for second derivatives."""
    return _value(*primals), tangents[0]


def _with_copy_transpose(ct: Any, x: Any, copy: Any) -> list[Any]:
    given, without = ad.is_undefined_primal(x), ad.is_undefined_primal(copy)
    return [ct if given else None, ad.Zero(copy.aval.to_tangent_aval()) if without else None]


def _copied_transpose(ct: Any, x: Any, **params: Any) -> list[Any]:
    """Only of zeros: nothing but `with_copy` reads a copy."""
    return [ad.Zero(x.aval.to_tangent_aval())]


def _copied_batch(axis_data: Any, operands: Any, dims: Any, *, low: np.dtype, moves: Moves) -> tuple[Any, Any]:
    if dims[0] is None:
        return LOW_COPY.bind(*operands, low=low, moves=moves), None
    copy = LOW_COPY.bind(operands[0], low=low, moves=())
    return jax.vmap(lambda x: _moved(x, moves), dims)(copy), 0


def _with_copy_batch(primitive: Primitive, axis_data: Any, operands: Any, dims: Any) -> tuple[Any, Any]:
    if all(dim is None for dim in dims):
        return primitive.bind(*operands), None
    first = [batching.bdim_at_front(x, dim, axis_data.size) for x, dim in zip(operands, dims, strict=True)]
    return primitive.bind(*first), 0


def _register(primitive: Primitive, fun: Callable[..., Any], aval: Any, jvp: Any, batch: Any) -> None:
    primitive.def_impl(functools.partial(xla.apply_primitive, primitive))
    primitive.def_abstract_eval(aval)
    mlir.register_lowering(primitive, mlir.lower_fun(fun, multiple_results=False))
    ad.primitive_jvps[primitive] = jvp
    batching.fancy_primitive_batchers[primitive] = batch
    declare(primitive, Traits(elementwise=True, passes_on=True, shown_as="convert_element_type", jet=jet_of(fun)))


_register(LOW_COPY, _copied, _copied_aval, _copied_jvp, _copied_batch)
for _primitive, _jvp in ((WITH_COPY, _with_copy_jvp), (WIDENED, _widened_jvp)):
    _register(_primitive, _value, lambda x, copy: x, _jvp, functools.partial(_with_copy_batch, _primitive))
    ad.primitive_transposes[_primitive] = _with_copy_transpose
ad.primitive_transposes[LOW_COPY] = _copied_transpose
