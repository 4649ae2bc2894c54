"""What is kept for the backward pass.

JAX saves for each nonlinear float32 operation its own operands, and a scan stacks them. Under `amp` the body of a scan
is a `jax.checkpoint` that keeps what is expensive to make: results of matmuls, random draws, masks that are not made
from positions alone, results of collectives, reductions of many entries, and everything that is not known to be cheap.
Element-wise work is computed again from these. With `keep="matmuls"` the whole function is such a checkpoint. A user's
own checkpoint is never put inside of one of ours.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.extend.core as jec

from .._compat import Jaxpr, inside_hi, open_jaxpr, with_hi_checkpoint, without_consts
from .._jaxpr import bind
from .._traits import traits_of

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
        _is_cheap(eqn) or _is_activation(eqn.primitive, eqn.params)
        for body in jec.jaxprs_in_params(params)
        for eqn in open_jaxpr(body).eqns
    )


def _is_cheap(eqn: Any) -> bool:
    traits = traits_of(eqn.primitive)
    if not (traits.cheap or traits.compares):
        return False
    return traits.reduces or traits.kept is None or not traits.kept(*(v.aval for v in eqn.invars), **eqn.params)


def may_keep_little(written: Jaxpr) -> bool:
    """Whether a user's program may become a checkpoint of ours: not with one of theirs in it, nor with effects."""
    return not (_has_checkpoint(written) or open_jaxpr(written).effects)


def has_work(written: Jaxpr) -> bool:
    """Whether there is something to compute again, other than in the bodies of loops inside."""
    return any(map(_is_work, open_jaxpr(written).eqns))


def _is_work(eqn: Any) -> bool:
    traits = traits_of(eqn.primitive)
    if traits.plain_call:
        return any(map(has_work, jec.jaxprs_in_params(eqn.params)))
    return traits.nonlinear or traits.product or traits.own_jvp


def keeping_little(fun: Callable[..., Sequence[Any]], in_loop: bool = False) -> Callable[..., Sequence[Any]]:
    """`fun`, of arrays, as a checkpoint that keeps little.

    In a loop XLA can't merge the second computation of a value with the first, so barriers against that would only
    cost.
    """

    def checkpointed(*operands: Any) -> Sequence[Any]:
        jaxpr, consts = without_consts(jax.make_jaxpr(fun)(*operands))
        eqn = _checkpoint_equation(in_loop)
        is_hi = "_prim" in eqn.params
        changed = {"_prim": with_hi_checkpoint(eqn.params["_prim"], jaxpr, 0)} if is_hi else {"jaxpr": jaxpr}
        return bind(eqn, [*consts, *operands], **changed)

    return checkpointed


@functools.cache
def _checkpoint_equation(in_loop: bool) -> Any:
    """An equation of `jax.checkpoint` with our policy."""
    fun = jax.checkpoint(lambda x: x, policy=is_kept, prevent_cse=not in_loop)
    (eqn,) = open_jaxpr(jax.make_jaxpr(fun)(0.0)).eqns
    return eqn


def _has_checkpoint(jaxpr: Jaxpr) -> bool:
    def is_one(eqn: Any) -> bool:
        hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
        if hi is not None:
            return hi.kind == "checkpoint" or _has_checkpoint(hi.jaxpr)
        return traits_of(eqn.primitive).checkpoints or any(map(_has_checkpoint, jec.jaxprs_in_params(eqn.params)))

    return any(map(is_one, open_jaxpr(jaxpr).eqns))
