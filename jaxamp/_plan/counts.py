"""Which integers of a program count places along an axis: 0, 1, 2, ..., and the same along all other axes.

So are the rows of `scores[jnp.arange(n), labels]` numbered. JAX adds the length to negative indices, as NumPy does. A
count has none, so that choice is followed as well.
"""

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Literal, Var
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
        elif eqn.primitive is lax.lt_p:  # no count is below zero
            never.update(eqn.outvars if operands[0] is not None and _is_zero(eqn.invars[1]) else [])
            continue
        elif eqn.primitive is lax.broadcast_in_dim_p:
            axis = eqn.params["broadcast_dimensions"][operands[0]]
            if eqn.outvars[0].aval.shape[axis] != eqn.invars[0].aval.shape[operands[0]]:
                continue  # one entry, repeated
        elif eqn.primitive is lax.convert_element_type_p or traits_of(eqn.primitive).passes_on:
            axis = operands[0]
        else:
            continue
        (out,) = eqn.outvars
        if axis is not None and _can_count(out.aval, axis):
            counts[out] = axis
    return counts


def _can_count(aval: Any, axis: int) -> bool:
    if not jnp.issubdtype(aval.dtype, jnp.integer) or not isinstance(aval.shape[axis], int):
        return False
    return aval.shape[axis] - 1 <= int(jnp.iinfo(aval.dtype).max)


def _is_zero(atom: Any) -> bool:
    return isinstance(atom, Literal) and np.ndim(atom.val) == 0 and bool(atom.val == 0)
