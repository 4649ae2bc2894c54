"""Checkpoints of ours, which keep little for the backward pass."""

import functools
from collections.abc import Callable, Sequence, Set
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_hi_checkpoint, without_consts
from .._formats import float_dtype
from .._jaxpr import Memo, bind
from .._primitives.kept import KEPT
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .residuals import is_cheap, is_cheap_or_activation, is_expensive, is_kept


def checkpoint_equation(jaxpr: Jaxpr, in_loop: bool = False, matmuls_alone: bool = False) -> Any:
    """An equation of a checkpoint that keeps little of a closed jaxpr without constants. Its variables are made up.

    In a loop XLA can't merge the second computation of a value with the first, so barriers against that would only
    cost. `matmuls_alone`: no activations are kept.
    """
    eqn, body = _template(in_loop), open_jaxpr(jaxpr)
    kept = _masks_of_draws(body) | _results_as_multiplied(body, in_loop)
    if not (in_loop or matmuls_alone):
        kept |= _activations_between_convolutions(body)
    jaxpr = _with_kept(body, kept)
    is_hi = "_prim" in eqn.params
    changed = {"_prim": with_hi_checkpoint(eqn.params["_prim"], jaxpr, 0)} if is_hi else {"jaxpr": jaxpr}
    return eqn.replace(params={**eqn.params, **changed}, ctx=jaxpr.eqns[0].ctx if jaxpr.eqns else eqn.ctx)


def is_ours(eqn: Any) -> bool:
    """Whether a checkpoint is one that `checkpoint_equation` made."""
    params = vars(eqn.params["_prim"]) if "_prim" in eqn.params else eqn.params
    return params.get("policy") is is_kept


def _with_kept(jaxpr: Jaxpr, variables: Set[Var]) -> Jaxpr:
    """An open jaxpr that marks variables as kept."""
    if not variables:
        return jaxpr
    marks = {v: Var(v.aval) for v in variables}
    marked = lambda atoms: [v if isinstance(v, Literal) else marks.get(v, v) for v in atoms]
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        eqns.append(eqn.replace(invars=marked(eqn.invars)))
        kept = [v for v in eqn.outvars if v in marks]
        eqns += [eqn.replace(primitive=KEPT, invars=[v], outvars=[marks[v]], params={}) for v in kept]
    return jaxpr.replace(eqns=eqns, outvars=marked(jaxpr.outvars))


def _masks_of_draws(jaxpr: Jaxpr) -> set[Var]:
    """Masks made from random draws: one byte each, where a draw has four."""
    known, drawn, masks = Memo(), set[Var](), set[Var]()
    for eqn in jaxpr.eqns:
        if _draws(eqn, known) or (is_cheap(eqn) and not drawn.isdisjoint(_variables(eqn.invars))):
            for v in eqn.outvars:
                (masks if getattr(v.aval, "dtype", None) == np.bool_ else drawn).add(v)
    return masks


def _activations_between_convolutions(jaxpr: Jaxpr) -> set[Var]:
    """Costly float32 activations, such as a gelu, of a convolution's result with a bias, that a convolution reads.

    In the backward pass, XLA computes their exponentials once, for the activation and for its derivative, and writes
    them for the second in float32: more bytes than the activation has. Between other matmuls one kernel makes both.
    """
    made = {v: eqn for eqn in jaxpr.eqns for v in eqn.outvars}
    read = [eqn.invars[0] for eqn in jaxpr.eqns if traits_of(eqn.primitive).convolves]
    return {v for v in read if not isinstance(v, Literal) and _is_costly_activation(v, made)}


def _is_costly_activation(activation: Var, made: dict[Var, Any]) -> bool:
    """Whether a value is a costly element-wise function in float32 of a convolution's result, perhaps with a bias."""
    waiting, seen, is_costly = [activation], {activation}, False
    while waiting:
        v = waiting.pop()
        if v not in made:
            return False
        eqn = made[v]
        traits, operands = traits_of(eqn.primitive), _variables(eqn.invars)
        large = [u for u in operands if size_of(u.aval) == size_of(activation.aval)]
        is_repeated = traits.elementwise and not large  # such as a bias
        if traits.convolves or is_repeated:
            continue
        if not is_cheap_or_activation(eqn) or not (traits.sum or traits.passes_on or len(large) == len(operands)):
            return False
        is_costly = is_costly or (is_expensive(eqn) and any(float_dtype(u.aval) == np.float32 for u in operands))
        waiting += [u for u in large if u not in seen]
        seen.update(large)
    return is_costly


_LONGEST = 50  # operations between two matmuls


def _results_as_multiplied(jaxpr: Jaxpr, in_loop: bool) -> set[Var]:
    """What results of matmuls have become, with a bias, split and transposed, where other matmuls read them.

    There they are in memory. The derivatives of these operations need nothing, so that the results themselves are not
    kept as well. In a loop, where each value that is kept has a buffer of its own, a result is not split.
    """
    readers: dict[Var, list[Any]] = {}
    for eqn in [*jaxpr.eqns, jaxpr]:
        for v in _variables(eqn.outvars if eqn is jaxpr else _read_by(eqn)):
            readers.setdefault(v, []).append(eqn)
    repeated, ends = set[Var](), set[Var]()
    for eqn in jaxpr.eqns:
        is_larger = lambda v, eqn=eqn: size_of(v.aval) < size_of(eqn.outvars[0].aval)
        if traits_of(eqn.primitive).elementwise and all(v in repeated or is_larger(v) for v in _variables(eqn.invars)):
            repeated.update(eqn.outvars)

    def followed(v: Var, way: int = _LONGEST) -> list[Var] | None:
        """The variables that it has become where matmuls read it; None if something else reads one of them."""
        reading = readers.get(v, []) if way else [jaxpr]
        if not reading:
            return []
        if all(eqn is not jaxpr and _is_multiplied(eqn, v) for eqn in reading):
            return [v]
        if len(reading) > 1 or reading[0] is jaxpr or not _hands_on(reading[0], v, repeated, in_loop):
            return None
        found = [followed(out, way - 1) for out in reading[0].outvars]
        return None if None in found else [end for each in found for end in each or ()]

    for eqn in jaxpr.eqns:
        if traits_of(eqn.primitive).matmul:
            ends.update(followed(eqn.outvars[0]) or ())
            ends -= {*eqn.outvars}
    return ends


def _hands_on(eqn: Any, v: Var, repeated: Set[Var], in_loop: bool) -> bool:
    """Whether it moves or splits a value, or adds few numbers to it, repeated or not."""
    traits, others = traits_of(eqn.primitive), set(_variables(_read_by(eqn))) - {v} - repeated
    moves = traits.keeps_all_entries or traits.passes_on or (eqn.primitive is lax.split_p and not in_loop)
    dtypes = {getattr(out.aval, "dtype", None) for out in (v, *eqn.outvars)}
    return (moves or traits.sum) and len(dtypes) == 1 and all(size_of(u.aval) < size_of(v.aval) for u in others)


def _is_multiplied(eqn: Any, v: Var) -> bool:
    """Whether a matmul reads an operand in the order that it has. XLA turns others, and writes them again."""
    if eqn.primitive is not lax.dot_general_p:
        return traits_of(eqn.primitive).matrix_unit
    _, batch = eqn.params["dimension_numbers"]
    in_order = [tuple(axes) == tuple(range(len(axes))) for axes in batch]
    return all(fits for operand, fits in zip(eqn.invars, in_order, strict=True) if operand is v)


def _read_by(eqn: Any) -> Sequence[Any]:
    """The operands of an equation. A cast, or the like, only asks about others than the first."""
    return eqn.invars[:1] if traits_of(eqn.primitive).passes_on else eqn.invars


def _variables(atoms: Sequence[Any]) -> list[Var]:
    return [v for v in atoms if not isinstance(v, Literal)]


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
