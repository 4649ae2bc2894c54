"""Which integers of a program count places along an axis: 0, 1, 2, ..., and the same along all other axes.

So are the rows of `scores[jnp.arange(n), labels]` numbered. As in NumPy, an index may be negative, and JAX adds the
length to those that are: of a count, none is.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._compat import Literal, Var
from .._formats import is_integer
from .._traits import traits_of


def counts_of(eqns: Sequence[Any]) -> dict[Var, int]:
    """The variables that count places, with the axis along which they do."""
    counts, never = dict[Var, int](), set[Var]()  # bools that are false everywhere
    for eqn in eqns:
        operands = [None if isinstance(v, Literal) else counts.get(v) for v in eqn.invars]
        if eqn.primitive is lax.iota_p:
            axis = eqn.params["dimension"]
        elif eqn.primitive is lax.select_n_p and not isinstance(eqn.invars[0], Literal) and eqn.invars[0] in never:
            axis = operands[1]
        elif all(axis is None for axis in operands):
            continue
        elif eqn.primitive is lax.lt_p:
            never.update(eqn.outvars if _is_zero(eqn.invars[1]) else [])
            continue
        elif eqn.primitive is lax.broadcast_in_dim_p:
            axis = eqn.params["broadcast_dimensions"][operands[0]]
        elif eqn.primitive is lax.convert_element_type_p or traits_of(eqn.primitive).passes_on:
            axis = operands[0]
        else:
            continue
        (out,) = eqn.outvars
        if axis is not None and is_integer(out.aval) and _can_count(out.aval, axis):
            counts[out] = axis
    return counts


def _can_count(aval: Any, axis: int) -> bool:
    return isinstance(aval.shape[axis], int) and aval.shape[axis] - 1 <= np.iinfo(aval.dtype).max


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)
