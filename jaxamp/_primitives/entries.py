"""One entry of each row, as a loss takes the scores of the labels.

    jnp.take_along_axis(scores, labels[:, None], axis=-1)

Its gradient is a scatter into an array of zeros. XLA makes it a kernel of its own, which needs the rest of the gradient
of the scores in memory, in the dtype in which they are added. Here it is a comparison with the places of the entries,
which is part of any kernel.
"""

import functools
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir, xla

from .._compat import Primitive, jet_of
from .._jaxpr import bind_primitive
from .._traits import Traits, declare
from .batches import map_in_front

ENTRIES = Primitive("entries_of_rows")


def entries_of_rows(x: Any, places: Any, mode: lax.GatherScatterMode, fill_value: Any) -> Any:
    """`x[..., places]`: for each row along the last axis, the entry at its place. Of places outside, as `mode` says."""
    if places.dtype.itemsize < 4:  # too small to count the entries
        places = lax.convert_element_type(places, np.int32)
    return bind_primitive(ENTRIES, x, places, mode=mode, fill_value=fill_value)


def _gathered(x: Any, places: Any, *, mode: lax.GatherScatterMode, fill_value: Any) -> Any:
    batch = tuple(range(places.ndim))
    numbers = lax.GatherDimensionNumbers(
        offset_dims=(),
        collapsed_slice_dims=(x.ndim - 1,),
        start_index_map=(x.ndim - 1,),
        operand_batching_dims=batch,
        start_indices_batching_dims=batch,
    )
    ones = (1,) * x.ndim
    return lax.gather(x, places[..., None], numbers, slice_sizes=ones, mode=mode, fill_value=fill_value)


def _spread(ct: Any, places: Any, size: int, mode: lax.GatherScatterMode) -> Any:
    """The cotangent at its place in each row, and zeros around it."""
    if mode is lax.GatherScatterMode.CLIP:
        places = lax.clamp(places.dtype.type(0), places, places.dtype.type(size - 1))
    shape = (*ct.shape, size)
    here = lax.broadcasted_iota(places.dtype, shape, ct.ndim) == places[..., None]
    return jnp.where(here, ct[..., None], jnp.zeros((), ct.dtype))


def _jvp(t: Any, x: Any, places: Any, *, mode: lax.GatherScatterMode, fill_value: Any) -> Any:
    return ENTRIES.bind(t, places, mode=mode, fill_value=0)  # what is filled in does not depend on `x`


def _transpose(ct: Any, x: Any, places: Any, *, mode: lax.GatherScatterMode, fill_value: Any) -> list[Any]:
    return [ct if type(ct) is ad.Zero else _spread(ct, places, x.aval.shape[-1], mode), None]


declare(ENTRIES, Traits(moves=True, plain_params=True, jet=jet_of(_gathered)))
ENTRIES.def_impl(functools.partial(xla.apply_primitive, ENTRIES))
ENTRIES.def_abstract_eval(lambda x, places, **params: places.update(dtype=x.dtype, weak_type=False))
mlir.register_lowering(ENTRIES, mlir.lower_fun(_gathered, multiple_results=False))
ad.defjvp(ENTRIES, _jvp, None)
ad.primitive_transposes[ENTRIES] = _transpose
map_in_front(ENTRIES)
