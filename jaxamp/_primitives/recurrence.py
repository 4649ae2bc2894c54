"""A linear recurrence along an axis, computed in parallel: `y[t] = a[t] y[t - 1] + x[t]`.

JAX derives an `associative_scan` operation by operation, and so it keeps what each of its levels made. But the
derivative of a recurrence is one that runs backwards, and it needs nothing but the result and the decays:

    g[t] = y'[t] + a[t + 1] g[t + 1]        x'[t] = g[t]        a'[t] = g[t] y[t - 1]

The decays may be given as their logarithms. These can be rounded: a decay of .999 is 1 in bfloat16, and its logarithm
has the relative error of all other numbers.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, jet_of
from .._jaxpr import bind_primitive
from .._traits import Traits, declare
from .barriers import materialize

RECURRENCE = Primitive("linear_recurrence")


def linear_recurrence(decays: Any, x: Any, axis: int, logarithmic: bool, by_pairs: bool) -> Any:
    """`y[t] = decays[t] y[t - 1] + x[t]` along an axis, in the dtype of `x`.

    `decays` has the shape of `x`, with any other axes of size one; `logarithmic`: they are given as their logarithms.
    `by_pairs`: the recurrence is that of pairs of neighbours, so that half of `y` is kept, and `x` is read again.
    """
    params = {"axis": axis, "reverse": False, "logarithmic": logarithmic, "depth": int(by_pairs)}
    if not by_pairs or x.shape[axis] < 2:
        return bind_primitive(RECURRENCE, decays, x, **params)
    second = bind_primitive(RECURRENCE, *_joined(decays, x, axis, logarithmic), **params)
    return _filled(decays, x, second, axis, logarithmic)


def _run(decays: Any, x: Any, *, axis: int, reverse: bool, logarithmic: bool, depth: int) -> Any:
    if not reverse:
        return _tree(decays, x, axis, logarithmic, depth, is_whole=True)
    turned = lambda v: lax.rev(v, (axis,))
    return turned(_tree(turned(decays), turned(x), axis, logarithmic, depth, is_whole=True))


def _tree(decays: Any, x: Any, axis: int, logarithmic: bool, depth: int, is_whole: bool) -> Any:
    """A level holds pairs of the one before, in the dtypes of the operands, and is computed in float32.

    Every second level is written, rounded: XLA would write any in float32, or make several of them again in one kernel.
    So are the states of pairs, before those between them are made.
    """
    if x.shape[axis] < 2:
        return x
    level = _joined(decays, x, axis, logarithmic)
    if depth % 2:
        level = tuple(materialize(v, v.dtype) for v in level)
    second = _tree(*level, axis, logarithmic, depth + 1, is_whole=False)
    return _filled(decays, x, materialize(second, x.dtype) if is_whole else second, axis, logarithmic)


def _joined(decays: Any, x: Any, axis: int, logarithmic: bool) -> tuple[Any, Any]:
    """The decays of pairs of neighbours, and what they add."""
    n = x.shape[axis]
    (d, e), (y, z) = ([_every_second(v, i, n - 1 + i, axis) for i in (0, 1)] for v in (decays, x))
    both = _wide(d) + _wide(e) if logarithmic else _wide(d) * _wide(e)
    return both.astype(d.dtype), (_factor(e, logarithmic) * _wide(y) + _wide(z)).astype(x.dtype)


def _filled(decays: Any, x: Any, second: Any, axis: int, logarithmic: bool) -> Any:
    """All states, if those after pairs of neighbours are known."""
    n = x.shape[axis]
    d, y = (_every_second(v, 2, n, axis) for v in (decays, x))
    between = _factor(d, logarithmic) * _wide(lax.slice_in_dim(second, 0, d.shape[axis], axis=axis)) + _wide(y)
    first = lax.concatenate([lax.slice_in_dim(x, 0, 1, axis=axis), between.astype(x.dtype)], axis)
    spread = [[(i, (n + i) % 2 ^ 1, 1) if k == axis else (0, 0, 0) for k in range(x.ndim)] for i in (0, 1)]
    zero = jnp.zeros((), x.dtype)
    return lax.pad(first, zero, spread[0]) + lax.pad(second, zero, spread[1])


def _every_second(x: Any, start: int, stop: int, axis: int) -> Any:
    return lax.slice_in_dim(x, min(start, stop), stop, 2, axis)


def _wide(x: Any) -> Any:
    return x.astype(np.promote_types(x.dtype, np.float32))


def _factor(decays: Any, logarithmic: bool) -> Any:
    return jnp.exp(_wide(decays)) if logarithmic else _wide(decays)


def _one_on(x: Any, axis: int, reverse: bool) -> Any:
    """Each entry where the next one of the recurrence was, and a zero in front of the first."""
    shift = -1 if reverse else 1
    config = [(shift, -shift, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)]
    return lax.pad(x, jnp.zeros((), x.dtype), config)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    out, (decays, x) = RECURRENCE.bind(*primals, **params), primals
    of_decays, of_x = tangents
    if type(of_decays) is ad.Zero and type(of_x) is ad.Zero:
        return out, ad.Zero(jax.typeof(out).to_tangent_aval())
    parts = [] if type(of_x) is ad.Zero else [of_x]
    if type(of_decays) is not ad.Zero:
        before = _wide(_one_on(out, params["axis"], params["reverse"]))
        before = before * jnp.exp(_wide(decays)) if params["logarithmic"] else before
        parts.append((_wide(of_decays) * before).astype(x.dtype))
    return out, RECURRENCE.bind(decays, sum(parts[1:], start=parts[0]), **params)


def _transpose(ct: Any, decays: Any, x: Any, **params: Any) -> list[Any]:
    """Of the recurrence as a function of `x`, in which it is linear."""
    if type(ct) is ad.Zero:
        return [None, ct]
    axis, reverse = params["axis"], not params["reverse"]
    return [None, RECURRENCE.bind(_one_on(decays, axis, reverse), ct, **{**params, "reverse": reverse})]


def _batch(axis_data: Any, operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, int | None]:
    (decays, x), (of_decays, of_x) = operands, dims
    if of_decays is None and of_x is None:
        return RECURRENCE.bind(decays, x, **params), None
    decays = decays[None] if of_decays is None else jnp.moveaxis(decays, of_decays, 0)
    x = jnp.broadcast_to(x, (axis_data.size, *x.shape)) if of_x is None else jnp.moveaxis(x, of_x, 0)
    return RECURRENCE.bind(decays, x, **{**params, "axis": params["axis"] + 1}), 0


RECURRENCE.def_impl(functools.partial(xla.apply_primitive, RECURRENCE))
RECURRENCE.def_abstract_eval(lambda decays, x, **params: x)
mlir.register_lowering(RECURRENCE, mlir.lower_fun(_run, multiple_results=False))
ad.primitive_jvps[RECURRENCE] = _jvp
ad.primitive_transposes[RECURRENCE] = _transpose
batching.fancy_primitive_batchers[RECURRENCE] = _batch
declare(RECURRENCE, Traits(fixed_dtype=True, plain_params=True, kept=lambda *avals, **params: True, jet=jet_of(_run)))
