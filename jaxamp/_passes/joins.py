"""Join arrays once: what joins a joined array reads the arrays that this was joined from.

    x = concatenate([x, layer(x)])  # in each layer of a DenseNet

So each layer takes the results of all layers before it, and the backward pass joins them again for each of its readers.
Else each layer would keep its own array of all of them, and the memory would grow with the square of the depth.
"""

from typing import Any

from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_equations
from .._jaxpr import Memo
from .._plan.higher_order import with_rewritten_bodies

_MOST = 64  # arrays in one join. A list that grows by one in each round would have a square of them


def merge_joins(jaxpr: Jaxpr) -> Jaxpr:
    """The jaxpr, and those inside, with arrays joined from parts that are not joined; itself if all are."""
    return _merged(jaxpr, Memo())


def _merged(jaxpr: Jaxpr, known: Memo) -> Jaxpr:
    return known.get(jaxpr, None, lambda: _rewritten(jaxpr, known))


def _rewritten(jaxpr: Jaxpr, known: Memo) -> Jaxpr:
    body = open_jaxpr(jaxpr)
    parts: dict[tuple[Var, int], list[Any]] = {}
    eqns: list[Any] = []
    for old in body.eqns:
        eqn = with_rewritten_bodies(old, lambda inside: _merged(inside, known))
        if eqn.primitive is lax.concatenate_p:
            axis = eqn.params["dimension"]
            found = [part for v in eqn.invars for part in _parts(v, axis, parts)]
            if len(eqn.invars) < len(found) <= _MOST:
                eqn = eqn.replace(invars=found)
            parts[eqn.outvars[0], axis] = eqn.invars
        eqns.append(eqn)
    if all(new is old for new, old in zip(eqns, body.eqns, strict=True)):
        return jaxpr
    read = {v for atoms in (*(eqn.invars for eqn in eqns), body.outvars) for v in atoms if not isinstance(v, Literal)}
    is_needed = lambda eqn: eqn.primitive is not lax.concatenate_p or eqn.outvars[0] in read
    return with_equations(jaxpr, list(filter(is_needed, eqns)))


def _parts(v: Any, axis: int, parts: dict[tuple[Var, int], list[Any]]) -> list[Any]:
    return [v] if isinstance(v, Literal) else parts.get((v, axis), [v])
