"""Round a value once that several matmuls read, such as the input of three projections.

XLA would find out by itself, but not where JAX keeps each rounded copy for the backward pass of a loop.
"""

from typing import Any

from .._compat import Jaxpr, Literal, Var, open_jaxpr, with_equations
from .._jaxpr import Memo
from .._plan.higher_order import with_rewritten_bodies
from .._plan.plan import Setting
from .._primitives.quantize import QUANTIZE, SCALE


def share_quantized(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with one `scale` and one `quantize` for a value, a format and an axis."""
    return _shared(program, Memo())


def _shared(jaxpr: Jaxpr, known: Memo) -> Jaxpr:
    return known.get(jaxpr, None, lambda: _rewritten(jaxpr, known))


def _rewritten(jaxpr: Jaxpr, known: Memo) -> Jaxpr:
    body = open_jaxpr(jaxpr)
    first: dict[Any, Any] = {}
    instead: dict[Var, Var] = {}
    eqns: list[Any] = []

    def renamed(atoms: Any) -> list[Any]:
        return [atom if isinstance(atom, Literal) else instead.get(atom, atom) for atom in atoms]

    for old in body.eqns:
        eqn = old.replace(invars=renamed(old.invars)) if instead else old
        if eqn.primitive in (SCALE, QUANTIZE) and not any(isinstance(v, Literal) for v in eqn.invars):
            same = first.setdefault((eqn.primitive, *eqn.invars, tuple(eqn.params.items()), eqn.ctx), eqn)
            if same is not eqn:
                instead.update(zip(eqn.outvars, same.outvars, strict=True))
                continue
        eqns.append(with_rewritten_bodies(eqn, lambda inside: _shared(inside, known)))
    if len(eqns) == len(body.eqns) and all(new is old for new, old in zip(eqns, body.eqns, strict=True)):
        return jaxpr
    return with_equations(jaxpr, eqns, renamed(body.outvars))
