"""The square of `x - mean(x)`, for a variance.

    centered_square(x, m) = (x - m) ** 2,    where `m` is the mean of `x` along the axes along which it is repeated

The law: summed along these axes, it has the derivatives of the plain square, of all orders. Its tangent leaves out that
of `m`, which would be multiplied with the sum of all `x - m`, that is zero.
"""

import functools
from collections.abc import Sequence
from typing import Any

from jax import lax
from jax.interpreters import ad, mlir, xla

from .._compat import Primitive, jet_of
from .._traits import Traits, declare
from .batches import map_in_front

CENTERED_SQUARE = Primitive("centered_square")


def centered_square(x: Any, m: Any) -> Any:
    """`(x - m) ** 2`, to be summed along the axes along which `m` is repeated."""
    return CENTERED_SQUARE.bind(x, m)


def _square(x: Any, m: Any) -> Any:
    return lax.square(x - m)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[Any, Any]:
    out, (x, m) = CENTERED_SQUARE.bind(*primals), primals
    return out, tangents[0] if type(tangents[0]) is ad.Zero else 2 * (x - m) * tangents[0]


declare(CENTERED_SQUARE, Traits(elementwise=True, fixed_dtype=True, plain_params=True, jet=jet_of(_square)))
CENTERED_SQUARE.def_impl(functools.partial(xla.apply_primitive, CENTERED_SQUARE))
CENTERED_SQUARE.def_abstract_eval(lambda x, m: x)
mlir.register_lowering(CENTERED_SQUARE, mlir.lower_fun(_square, multiple_results=False))
ad.primitive_jvps[CENTERED_SQUARE] = _jvp
map_in_front(CENTERED_SQUARE)
