"""What a scan over layers keeps for the backward pass.

JAX saves for each nonlinear float32 operation its own operands, and a scan stacks them. Under `amp` the body of a scan
is a `jax.checkpoint` that keeps what is dear: results of matmuls, random draws, masks, what came over the wire, and
whatever is not known to be cheap. Element-wise work and reductions are computed again from these. A body in which the
user has placed a checkpoint is left alone.
"""

from typing import Any

import jax
import jax.extend.core as jec

from ._compat import Jaxpr, open_jaxpr
from ._facts import CHEAP


def keeps(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether the results of an operation are kept."""
    return primitive.name not in CHEAP


def keeping_little(jaxpr: Jaxpr) -> Jaxpr:
    """The body of a scan, such that little is kept of it."""
    if _has_checkpoint(jaxpr) or open_jaxpr(jaxpr).effects:
        return jaxpr
    run = jax.checkpoint(jec.jaxpr_as_fun(jaxpr), policy=keeps, prevent_cse=False)
    return jax.make_jaxpr(run)(*(v.aval for v in open_jaxpr(jaxpr).invars))


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    return any(
        eqn.primitive.name == "remat2" or any(map(_has_checkpoint, jec.jaxprs_in_params(eqn.params)))
        for eqn in open_jaxpr(jaxpr).eqns
    )
