"""The way back of a traced function: its jaxpr, and what is kept for it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
from jax import tree_util as jtu

from ._compat import Jaxpr, Literal, open_jaxpr
from ._higher_order import along
from ._standing import float_dtype


class Pullback(NamedTuple):
    """The backward pass of a function: from what is kept and cotangents of its float results to those of operands."""

    jaxpr: Jaxpr
    kept: int  # bytes that are made in the forward pass and read here


def pullback_of(jaxpr: Jaxpr, moving: Sequence[int]) -> Pullback:
    """Differentiate a closed jaxpr by some of its operands. Nothing is computed."""
    avals = [v.aval for v in open_jaxpr(jaxpr).invars]
    results = [i for i, v in enumerate(open_jaxpr(jaxpr).outvars) if float_dtype(v.aval) is not None]
    trees: list[Any] = []

    def floats(*operands: Any) -> list[Any]:
        outs = jec.jaxpr_as_fun(jaxpr)(*operands)
        return [outs[i] for i in results]

    def forward(*operands: Any) -> list[Any]:
        _, pull = jax.vjp(along(floats, operands, moving), *(operands[i] for i in moving))
        leaves, tree = jtu.tree_flatten(pull)
        trees.append(tree)
        return leaves

    def backward(leaves: list[Any], cotangents: list[Any]) -> Any:
        return jtu.tree_unflatten(trees[-1], leaves)(cotangents)

    closed = jax.make_jaxpr(forward)(*avals)
    outs = [open_jaxpr(jaxpr).outvars[i].aval for i in results]
    back = jax.make_jaxpr(backward)(closed.out_avals, [aval.to_tangent_aval() for aval in outs])
    return Pullback(back, _bytes_made(closed))


def _bytes_made(closed: Jaxpr) -> int:
    """The bytes of all results that are made here: arguments and constants are there anyway."""
    jaxpr = open_jaxpr(closed)
    given = {*jaxpr.invars, *jaxpr.constvars}
    made = {v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in given}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made)
