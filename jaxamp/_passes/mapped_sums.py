"""Write what a mapped function sums over its batch, and a mean of means, as one sum.

    jax.vmap(lambda x: lax.pmean(jnp.mean(x, (1, 2)), "batch"), axis_name="batch")

So does a BatchNorm that is written for one example, as that of Equinox. `vmap` leaves a collective over an axis of the
array, in which no other device takes part, and it sums what was summed and divided before. Passes that look for norms
know a mean by its one sum.
"""

import collections
import functools
import operator
from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, trace_context, with_equations
from .._jaxpr import Memo, inlined
from .._plan.higher_order import with_rewritten_bodies

_REMEMBERED = 1024  # programs of sums


def merge_sums(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr with sums in place of collectives over axes of arrays, and with one sum where sums are summed."""
    return _Merger().rewritten(jaxpr)


class _Sum(NamedTuple):
    """The sum of an array along some axes, divided by a number."""

    of: Var
    axes: tuple[int, ...]
    divisor: float
    origins: tuple[int | None, ...]  # for each axis of it, which one of the array it is; None: it has size one
    is_merged: bool  # whether the program sums more than once


class _Merger:
    def __init__(self) -> None:
        self._known = Memo()

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        return self._known.get(jaxpr, None, lambda: self._rewrite(jaxpr))

    def _rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        body, sums, eqns = open_jaxpr(jaxpr), dict[Var, _Sum](), list[Any]()
        read = [*(v for eqn in body.eqns for v in eqn.invars), *body.outvars]
        times = collections.Counter(v for v in read if not isinstance(v, Literal))
        for eqn in body.eqns:
            new = with_rewritten_bodies(eqn, self.rewritten)
            found = _sum_of(new, sums)
            if found is not None and times[new.outvars[0]] == 1:  # another reader would need what is summed twice
                sums[new.outvars[0]] = found
            eqns += [new] if found is None or _is_so(new, found) else _equations(new, found)
        if len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns)):
            return jaxpr
        return with_equations(jaxpr, _needed(eqns, body.outvars))


def _sum_of(eqn: Any, sums: dict[Var, _Sum]) -> _Sum | None:
    """What sum of an array the result of an equation is, if it is one."""
    if len(eqn.outvars) != 1 or not eqn.invars or isinstance(eqn.invars[0], Literal) or not _is_plain(eqn.outvars[0]):
        return None
    v, *others = eqn.invars
    own = sums.get(v) or _Sum(v, (), 1.0, tuple(range(v.aval.ndim)), False)
    if eqn.primitive is lax.reduce_sum_p or _is_over_axes(eqn):
        if not _is_plain(v):
            return None
        axes = [int(axis) for axis in eqn.params["axes"]]
        more = [origin for axis in axes if (origin := own.origins[axis]) is not None]
        left = tuple(origin for axis, origin in enumerate(own.origins) if axis not in axes)
        return own._replace(axes=tuple(sorted({*own.axes, *more})), origins=left, is_merged=v in sums)
    if v not in sums:
        return None
    if eqn.primitive is lax.div_p and isinstance(others[0], Literal) and np.ndim(others[0].val) == 0:
        return own._replace(divisor=own.divisor * float(others[0].val))
    origins = _origins(eqn, own.origins)
    return None if origins is None else own._replace(origins=origins)


def _is_plain(v: Var) -> bool:
    """Whether it is float32, of known sizes, and not split over devices."""
    aval: Any = v.aval
    is_known = all(isinstance(size, int) for size in getattr(aval, "shape", (None,)))
    return is_known and aval.dtype == np.float32 and all(axes is None for axes in aval.sharding.spec)


def _is_over_axes(eqn: Any) -> bool:
    """Whether it is a collective that sums along axes of an array, over no devices."""
    if eqn.primitive.name != "psum" or eqn.params["axis_index_groups"] is not None:
        return False
    return all(isinstance(axis, int) for axis in eqn.params["axes"])


def _origins(eqn: Any, origins: Sequence[int | None]) -> tuple[int | None, ...] | None:
    """Where the axes of a result come from, if axes of size one are all that it has more or less than the operand."""
    before, after = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    if eqn.primitive is lax.broadcast_in_dim_p and len(eqn.invars) == 1:
        pass
    elif eqn.primitive is not lax.squeeze_p and (eqn.primitive is not lax.reshape_p or eqn.params["dimensions"]):
        return None
    if [size for size in before if size != 1] != [size for size in after if size != 1]:
        return None
    rest = iter([origin for origin, size in zip(origins, before, strict=True) if size != 1])
    return tuple(next(rest) if size != 1 else None for size in after)


def _is_so(eqn: Any, found: _Sum) -> bool:
    """Whether an equation says so itself, or only divides what was not divided before, or moves it."""
    if _is_over_axes(eqn):
        return False
    if eqn.primitive is lax.div_p:
        return not found.is_merged or found.divisor == float(eqn.invars[1].val)
    return eqn.primitive is not lax.reduce_sum_p or not found.is_merged


def _needed(eqns: Sequence[Any], outs: Sequence[Any]) -> list[Any]:
    """The equations without sums, or parts of them, that nothing reads."""
    read, found = {v for v in outs if not isinstance(v, Literal)}, list[Any]()
    for eqn in reversed(eqns):
        if eqn.primitive not in _PARTS or not read.isdisjoint(eqn.outvars):
            found.append(eqn)
            read.update(v for v in eqn.invars if not isinstance(v, Literal))
    return found[::-1]


_PARTS = lax.reduce_sum_p, lax.div_p, lax.broadcast_in_dim_p, lax.reshape_p, lax.squeeze_p


def _equations(eqn: Any, found: _Sum) -> list[Any]:
    """Equations in place of one that sum once."""
    aval: Any = found.of.aval
    with eqn.ctx.manager:
        program = _program(aval.shape, found.axes, eqn.outvars[0].aval.shape, found.divisor, trace_context())
    own = {"source_info": eqn.source_info, "ctx": eqn.ctx}
    return [inner.replace(**own) for inner in inlined(program, [found.of], eqn.outvars)]


@functools.lru_cache(_REMEMBERED)
def _program(
    shape: tuple[int, ...], axes: tuple[int, ...], out: tuple[int, ...], divisor: float, context: Hashable
) -> Jaxpr:
    def sum_once(x: Any) -> Any:
        found = lax.reduce_sum_p.bind(x, axes=axes, out_sharding=None)
        found = found if found.shape == out else lax.reshape(found, out)
        return found if divisor == 1 else lax.div(found, np.float32(divisor))

    return jax.make_jaxpr(sum_once)(jax.ShapeDtypeStruct(shape, np.float32))
