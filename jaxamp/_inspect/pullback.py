"""The backward pass of a traced function: its jaxpr, and what is kept for it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from .._compat import Jaxpr, Literal, open_jaxpr
from .._formats import float_dtype
from .._jaxpr import along, evaluate
from .._scaling.cotangent import as_cotangent


class Pullback(NamedTuple):
    """A function split in two for reverse mode.

    `forward` returns the results and the residuals; `jaxpr` takes the residuals and the cotangent of the first float
    result to the cotangents of the operands. Other results are aux, as in `jax.grad(..., has_aux=True)`.
    """

    forward: Jaxpr
    jaxpr: Jaxpr
    results: int  # how many results come before the residuals

    @property
    def made(self) -> dict[int, Any]:
        """Types of what is made in the forward pass and read in the backward pass, by places among its results.

        Arguments and constants are there anyway, and a value counts once.
        """
        jaxpr = open_jaxpr(self.forward)
        known = {*jaxpr.invars, *jaxpr.constvars}
        found: dict[int, Any] = {}
        for place, v in enumerate(jaxpr.outvars[self.results :], self.results):
            if not isinstance(v, Literal) and v not in known:
                found[place] = v.aval
                known.add(v)
        return found

    @property
    def kept(self) -> int:
        """The bytes of all that."""
        return sum(aval.size * aval.dtype.itemsize for aval in self.made.values())

    def seeds(self, outs: Sequence[Any], scale: float) -> list[Any]:
        """The cotangent that a backward pass starts with, in a list."""
        floats = [x for x in outs if float_dtype(jax.typeof(x)) is not None]
        return [jnp.full_like(x, as_cotangent(jnp.float32(scale), x.dtype)) for x in floats[:1]]


def pullback_of(jaxpr: Jaxpr, differentiated: Sequence[int]) -> Pullback:
    """Differentiate a closed jaxpr by some of its operands. Nothing is computed."""
    avals = [v.aval for v in open_jaxpr(jaxpr).invars]
    results = [i for i, v in enumerate(open_jaxpr(jaxpr).outvars) if float_dtype(v.aval) is not None][:1]
    trees: list[Any] = []

    def function(*operands: Any) -> tuple[list[Any], list[Any]]:
        outs = evaluate(jaxpr, operands)
        return [outs[i] for i in results], outs

    def forward(*operands: Any) -> tuple[list[Any], list[Any]]:
        some = [operands[i] for i in differentiated]
        _, pull, outs = jax.vjp(along(function, operands, differentiated), *some, has_aux=True)
        leaves, tree = jtu.tree_flatten(pull)
        trees.append(tree)
        return outs, leaves

    def backward(leaves: list[Any], cotangents: list[Any]) -> Any:
        return jtu.tree_unflatten(trees[-1], leaves)(cotangents)

    closed = jax.make_jaxpr(forward)(*avals)
    outs = open_jaxpr(jaxpr).outvars
    kept = closed.out_avals[len(outs) :]
    back = jax.make_jaxpr(backward)(kept, [outs[i].aval.to_tangent_aval() for i in results])
    return Pullback(closed, back, len(outs))
