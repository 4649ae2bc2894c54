"""What is kept for the backward pass.

JAX saves for each nonlinear float32 operation its own operands, and a scan stacks them. Under `amp` the body of a scan,
and each section of the rest (`_passes/recompute.py`), is a `jax.checkpoint` that keeps what is expensive to make:
results of matmuls, random draws, results of collectives, reductions of many entries, and everything that is not known
to be cheap. Element-wise work is computed again from these. A user's own checkpoint is never put inside of one of ours.
"""

from typing import Any, Literal

import jax.extend.core as jec

from .._compat import Jaxpr, inside_hi, open_jaxpr
from .._formats import is_complex
from .._traits import traits_of
from .bodies import functions_in

Keep = Literal["auto", "matmuls", "all"]


def is_kept(primitive: Any, *avals: Any, **params: Any) -> bool:
    """A policy of `jax.checkpoint`: whether the results of an operation are kept."""
    traits = traits_of(primitive)
    if traits.kept is not None:
        return traits.kept(*avals, **params)
    return not traits.cheap and not _is_activation(primitive, params)


def _is_activation(primitive: Any, params: dict[str, Any]) -> bool:
    """Whether it calls a function of only cheap operations and comparisons, such as an activation."""
    traits = traits_of(primitive)
    return (traits.plain_call or traits.own_jvp) and all(
        is_cheap_or_activation(eqn) for body in jec.jaxprs_in_params(params) for eqn in open_jaxpr(body).eqns
    )


def is_cheap_or_activation(eqn: Any) -> bool:
    """Whether it is computed again rather than kept."""
    return is_cheap(eqn) or _is_activation(eqn.primitive, eqn.params)


def is_cheap(eqn: Any) -> bool:
    """Whether an operation is computed again at no great cost."""
    traits = traits_of(eqn.primitive)
    if not traits.cheap:
        return False
    return traits.reduces or traits.kept is None or not traits.kept(*(v.aval for v in eqn.invars), **eqn.params)


def is_expensive(eqn: Any) -> bool:
    """Whether it is transcendental, or has something that is inside."""
    if traits_of(eqn.primitive).plain_params:
        return traits_of(eqn.primitive).transcendental
    return any(is_expensive(inner) for body in functions_in(eqn) for inner in open_jaxpr(body).eqns)


def may_keep_little(written: Jaxpr) -> bool:
    """Whether a user's program may become a checkpoint of ours: not with one of theirs in it, nor with effects.

    Nor with complex values, which `jax.checkpoint` can't keep (0.10 to 0.12).
    """
    return not (_has_checkpoint(written) or open_jaxpr(written).effects or _has_complex(written))


def has_work(written: Jaxpr) -> bool:
    """Whether there is something to compute again, other than in the bodies of loops inside."""
    return any(map(is_work, open_jaxpr(written).eqns))


def is_work(eqn: Any) -> bool:
    """Whether the derivative of an operation needs values that it reads or makes."""
    traits = traits_of(eqn.primitive)
    if traits.plain_call:
        return any(map(has_work, jec.jaxprs_in_params(eqn.params)))
    of_two = traits.product and not any(isinstance(v, jec.Literal) for v in eqn.invars)
    return traits.nonlinear or of_two or traits.own_jvp


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    def is_one(eqn: Any) -> bool:
        hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
        if hi is not None:
            return hi.kind == "checkpoint" or _has_checkpoint(hi.jaxpr)
        return traits_of(eqn.primitive).checkpoints or any(map(_has_checkpoint, jec.jaxprs_in_params(eqn.params)))

    return any(map(is_one, open_jaxpr(jaxpr).eqns))


def _has_complex(jaxpr: Jaxpr) -> bool:
    return any(
        makes_complex(eqn) or any(map(_has_complex, jec.jaxprs_in_params(eqn.params))) for eqn in open_jaxpr(jaxpr).eqns
    )


def makes_complex(eqn: Any) -> bool:
    """Whether a result is complex."""
    return any(is_complex(v.aval) for v in eqn.outvars)
