"""Checkpoints of ours, which keep little for the backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_hi_checkpoint, without_consts
from .._jaxpr import Memo, bind
from .._primitives.kept import KEPT
from .._traits import traits_of
from .residuals import is_cheap, is_kept


def checkpoint_equation(jaxpr: Jaxpr, in_loop: bool = False) -> Any:
    """An equation of a checkpoint that keeps little of a closed jaxpr without constants. Its variables are made up.

    In a loop XLA can't merge the second computation of a value with the first, so barriers against that would only
    cost.
    """
    eqn, jaxpr = _template(in_loop), _with_kept_masks(open_jaxpr(jaxpr))
    is_hi = "_prim" in eqn.params
    changed = {"_prim": with_hi_checkpoint(eqn.params["_prim"], jaxpr, 0)} if is_hi else {"jaxpr": jaxpr}
    return eqn.replace(params={**eqn.params, **changed}, ctx=jaxpr.eqns[0].ctx if jaxpr.eqns else eqn.ctx)


def is_ours(eqn: Any) -> bool:
    """Whether a checkpoint is one that `checkpoint_equation` made."""
    params = vars(eqn.params["_prim"]) if "_prim" in eqn.params else eqn.params
    return params.get("policy") is is_kept


def _with_kept_masks(jaxpr: Jaxpr) -> Jaxpr:
    """An open jaxpr that marks masks made from random draws as kept: one byte each, where a draw has four."""
    known, drawn = Memo(), set[Var]()
    marks: dict[Var, Var] = {}
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=[v if isinstance(v, Literal) else marks.get(v, v) for v in eqn.invars]))
        if not (
            _draws(eqn, known) or (is_cheap(eqn) and any(not isinstance(v, Literal) and v in drawn for v in eqn.invars))
        ):
            continue
        for v in eqn.outvars:
            if getattr(v.aval, "dtype", None) == np.bool_:
                marks[v] = Var(v.aval)
                eqns.append(eqn.replace(primitive=KEPT, invars=[v], outvars=[marks[v]], params={}))
            else:
                drawn.add(v)
    outs = [v if isinstance(v, Literal) else marks.get(v, v) for v in jaxpr.outvars]
    return jaxpr.replace(eqns=eqns, outvars=outs) if marks else jaxpr


def _draws(eqn: Any, known: Memo) -> bool:
    def draws(body: Jaxpr) -> bool:
        return known.get(body, None, lambda: any(_draws(inner, known) for inner in open_jaxpr(body).eqns))

    return traits_of(eqn.primitive).draws or any(map(draws, jec.jaxprs_in_params(eqn.params)))


def keeping_little(fun: Callable[..., Sequence[Any]], in_loop: bool = False) -> Callable[..., Sequence[Any]]:
    """`fun`, of arrays, as a checkpoint that keeps little."""

    def checkpointed(*operands: Any) -> Sequence[Any]:
        jaxpr, consts = without_consts(jax.make_jaxpr(fun)(*operands))
        return bind(checkpoint_equation(jaxpr, in_loop), [*consts, *operands])

    return checkpointed


@functools.cache
def _template(in_loop: bool) -> Any:
    fun = jax.checkpoint(lambda x: x, policy=is_kept, prevent_cse=not in_loop)
    (eqn,) = open_jaxpr(jax.make_jaxpr(fun)(0.0)).eqns
    return eqn
