"""What every reader of jaxprs needs: bind an equation, evaluate a jaxpr, remember results by identity.

Under `grad` or `vmap`, JAX applies the rules of a primitive each time that it is bound. For jitted functions it
remembers the outcome, by the types of the operands: the functions of `jnp` profit from that, and here each primitive
with its parameters is such a function. It is inlined where it is bound, so that jaxprs, source lines and scopes are
those of the bare primitive. `jit` tells apart what a trace depends on: equation contexts, meshes, JAX's configuration.
"""

import functools
import sys
from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

import jax
import jax.extend.core as jec

from ._compat import (
    EARLY_INLINE,
    Jaxpr,
    Literal,
    Primitive,
    Var,
    consts_of,
    current_name_stack,
    is_transformed,
    open_jaxpr,
    user_context,
)
from ._traits import traits_of

T = TypeVar("T")

_CACHED_BINDS = 4096


# -- binding


def bind_primitive(primitive: Primitive, /, *operands: Any, **params: Any) -> Any:
    """What `primitive.bind` does, faster under a transform."""
    if traits_of(primitive).plain_params and any(map(is_transformed, operands)):
        return _jitted(primitive, tuple(params.items()))(*operands)  # JAX wants parameters that can be hashed
    return primitive.bind(*operands, **params)


@functools.lru_cache(_CACHED_BINDS)
def _jitted(primitive: Primitive, params: tuple[tuple[str, Any], ...]) -> Callable[..., Any]:
    def bound(*operands: Any) -> Any:
        return primitive.bind(*operands, **dict(params))

    bound.__name__ = primitive.name
    return jax.jit(bound, inline=EARLY_INLINE)


def bind(eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
    """Bind an equation's primitive to other operands and parameters."""
    params = eqn.primitive.get_bind_params({**eqn.params, **changed})
    out = bind_primitive(eqn.primitive, *operands, **params)
    return list(out) if eqn.primitive.multiple_results else [out]


# -- evaluating


def evaluate(
    jaxpr: Jaxpr, operands: Sequence[Any], apply: Callable[[Any, list[Any]], Sequence[Any]] = bind
) -> list[Any]:
    """Run a jaxpr: `apply(eqn, operands)` gives the results of each equation.

    Equations run under the user's source line, name stack and equation context. A value is dropped after its last use.
    """
    body, outer = open_jaxpr(jaxpr), current_name_stack()
    env = dict(zip((*body.constvars, *body.invars), (*consts_of(jaxpr), *operands), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn, dead in zip(body.eqns, _last_uses(body), strict=True):
        info = eqn.source_info
        with user_context(info.traceback, name_stack=outer + info.name_stack), eqn.ctx.manager:
            env.update(zip(eqn.outvars, apply(eqn, [read(v) for v in eqn.invars]), strict=True))
        for var in dead:
            env.pop(var, None)
    return [read(v) for v in body.outvars]


def _last_uses(body: Jaxpr) -> list[list[Var]]:
    """For each equation of an open jaxpr, the variables that nothing reads after it."""
    seen = {v for v in body.outvars if not isinstance(v, Literal)}
    found: list[list[Var]] = []
    for eqn in reversed(body.eqns):
        mine = {v: None for v in (*eqn.invars, *eqn.outvars) if not isinstance(v, Literal) and v not in seen}
        seen.update(mine)
        found.append(list(mine))
    found.reverse()
    return found


_USUAL_DEPTH = 10
_FRAMES = 50  # of Python's stack, for a function inside of a function while it is planned, traced or differentiated


def make_room(jaxpr: Jaxpr) -> None:
    """Raise Python's recursion limit if functions are nested too deep for it. It stays there: threads share it."""
    depth = _depth(jaxpr, Memo())
    if depth > _USUAL_DEPTH:
        sys.setrecursionlimit(max(sys.getrecursionlimit(), 1000 + _FRAMES * depth))


def _depth(jaxpr: Jaxpr, known: "Memo") -> int:
    inside = (body for eqn in open_jaxpr(jaxpr).eqns for body in jec.jaxprs_in_params(eqn.params))
    return known.get(jaxpr, None, lambda: 1 + max((_depth(body, known) for body in inside), default=0))


def along(fun: Callable[..., Any], operands: Sequence[Any], which: Sequence[int]) -> Callable[..., Any]:
    """`fun` as a function of some of its operands, given by their places; the others are fixed."""

    def of_some(*some: Any) -> Any:
        xs = list(operands)
        for i, x in zip(which, some, strict=True):
            xs[i] = x
        return fun(*xs)

    return of_some


# -- remembering


def signature(eqn: Any) -> Hashable | None:
    """Equal for equations that do the same with operands of the same types and the same constants; None if unknown.

    It holds while the equations are alive: JAX makes a type once for all equations of a kind, so its identity will do.
    """
    if not traits_of(eqn.primitive).plain_params:
        return None
    ins = tuple([(id(v.aval), v.val) if isinstance(v, Literal) else id(v.aval) for v in eqn.invars])
    found = eqn.primitive, ins, tuple([id(v.aval) for v in eqn.outvars]), tuple(eqn.params.values())
    try:
        hash(found)
    except TypeError:
        return None
    return found


class Memo:
    """A cache of results by the identity of an object and a key.

    It holds the objects, so that no other object gets the id of one that was remembered.
    """

    def __init__(self) -> None:
        self._found: dict[tuple[int, Hashable], tuple[Any, Any]] = {}

    def get(self, subject: Any, key: Hashable, make: Callable[[], T]) -> T:
        """What was made for `subject` and `key`; the first time, what `make` makes."""
        found = self._found.get((id(subject), key))
        if found is None:
            found = self._found[id(subject), key] = subject, make()
        return found[1]
