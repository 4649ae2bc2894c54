"""What is kept for the backward pass.

JAX saves for each nonlinear float32 operation its own operands, and a scan stacks them. Under `amp` the body of a scan
is a `jax.checkpoint` that keeps what is dear: results of matmuls, random draws, masks but for those of positions alone,
what came over the wire, sums and maxima of many entries, and whatever is not known to be cheap. Element-wise work is
computed again from these. With `keep="matmuls"` the whole function is such a checkpoint. Where the user has placed a
checkpoint, theirs stays alone.
"""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.extend.core as jec

from .._compat import Jaxpr, open_jaxpr
from .._primitives.barriers import HELD
from .._traits.table import CHEAP, COMPARES, REDUCES

Keep = Literal["auto", "matmuls", "all"]
FEW = 16  # of so many entries, a reduction makes one: kept, for few bytes spare a pass over many


def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether the results of an operation are kept."""
    if primitive.name in REDUCES:
        sizes = [avals[0].shape[axis] for axis in params["axes"]]
        return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= FEW
    if primitive is HELD:
        return params["here"]
    return primitive.name not in CHEAP and not _is_activation(primitive.name, params)


def _is_activation(name: str, params: dict[str, Any]) -> bool:
    """Whether a function has a derivative of its own, and is made of cheap operations and of comparisons."""
    return name in ("custom_jvp_call", "jit") and all(
        _is_cheap(eqn) or _is_activation(eqn.primitive.name, eqn.params)
        for body in jec.jaxprs_in_params(params)
        for eqn in open_jaxpr(body).eqns
    )


def _is_cheap(eqn: Any) -> bool:
    return eqn.primitive.name in CHEAP | COMPARES and not (eqn.primitive is HELD and eqn.params["here"])


def may_keep_little(written: Jaxpr) -> bool:
    """Whether a program of the user's may become a checkpoint: not with one of theirs in it, nor with effects."""
    return not (_has_checkpoint(written) or open_jaxpr(written).effects)


def keeping_little(fun: Callable[..., Any], in_loop: bool) -> Callable[..., Any]:
    """A function, such that little is kept of it.

    In a loop nothing can be merged with the first computation of a value, and barriers against that would only cost.
    """
    return jax.checkpoint(fun, policy=keeps, prevent_cse=not in_loop)


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "remat2" or any(map(_has_checkpoint, jec.jaxprs_in_params(eqn.params)))
        for eqn in open_jaxpr(jaxpr).eqns
    )
