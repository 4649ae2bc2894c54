"""Where the rounding of a low matmul is magnified: by a difference of large numbers, a sum or an exponential.

The result of a low matmul is right to two or three digits. Most operations keep it so. Where the error of a result is
many times that of an operand, and large, the matmul that the operand comes from should not be low.
"""

import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from .._traits import shown_name, traits_of
from .comparison import Error, Magnified
from .location import Place

_TIMES = 8.0  # the error of the result over that of the operand, from which on it is told
_ROUNDINGS = 16  # the error of the result, in roundings of the compute dtype, from which on it is told
_NOISE = 1e-5  # a result that is smaller than this share of its operands is noise in float32, too


class _Trail(NamedTuple):
    """What is known of a value that is made from a low matmul by cheap operations."""

    matmul: Place
    name: str  # of the matmul's primitive
    error: float  # relative, of the value


class Trails:
    """Follows the results of low matmuls through a run, and notes where their errors grow."""

    def __init__(self, compute_dtype: Any) -> None:
        self._enough = _ROUNDINGS * float(jnp.finfo(compute_dtype).eps)
        self._trails: dict[int, tuple[weakref.ref[Any], _Trail]] = {}  # by the id of an array that is alive
        self._found: dict[Any, Magnified] = {}

    @property
    def found(self) -> tuple[Magnified, ...]:
        """The worst case of each operation in each scope, largest error first."""
        return tuple(sorted(self._found.values(), key=lambda case: -case.error))

    def follow(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any], error: Error | None) -> None:
        """See an operation. `error` is that of its first result, if it was compared with the reference."""
        traits, out = traits_of(eqn.primitive), outs[0] if outs else None
        if not _is_float(out):
            return
        if traits.matrix_unit:
            if error is not None and (traits.multiplies_in is not None or any(map(_is_low, ins[:2]))):
                self._set(out, _Trail(place, shown_name(eqn.primitive), error.relative))
            return
        if not (traits.moves or traits.passes_on or traits.cheap or traits.sum or traits.product):
            return
        trails = [(x, trail) for x in ins if (trail := self._get(x)) is not None]
        if not trails:
            return
        operand, trail = max(trails, key=lambda pair: pair[1].error * _largest(pair[0]))
        if error is None:
            self._set(out, trail)
            return
        if traits.sum or traits.reduces or traits.nonlinear:
            self._judge(eqn, place, operand, trail, error)
        self._set(out, trail._replace(error=error.relative))

    def _judge(self, eqn: Any, place: Place, operand: Any, trail: _Trail, error: Error) -> None:
        if trail.error >= self._enough or not np.isfinite(error.relative):  # it began before, or overflowed
            return
        large, is_sum = _largest(operand), not traits_of(eqn.primitive).nonlinear
        if error.relative < max(self._enough, _TIMES * trail.error) or (is_sum and error.largest <= _NOISE * large):
            return
        key = shown_name(eqn.primitive), place.scope, place.source, trail.matmul.source
        if key not in self._found or self._found[key].error < error.relative:
            self._found[key] = Magnified(
                key[0], place.scope, place.source, trail.name, trail.matmul.scope, trail.matmul.source,
                trail.error, error.relative, large, error.largest,
            )  # fmt: skip

    def _get(self, x: Any) -> _Trail | None:
        ref, trail = self._trails.get(id(x), (None, None))
        return trail if ref is not None and ref() is x else None

    def _set(self, x: Any, trail: _Trail) -> None:
        self._trails[id(x)] = weakref.ref(x), trail


def _is_float(x: Any) -> bool:
    return x is not None and jnp.issubdtype(x.dtype, jnp.floating)


def _is_low(x: Any) -> bool:
    return _is_float(x) and x.dtype.itemsize < 4


def _largest(x: Any) -> float:
    return float(np.abs(np.asarray(x).astype(np.float64)).max(initial=0))
