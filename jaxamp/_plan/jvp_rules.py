"""Functions with a forward derivative rule, for `rewrites.py`."""

import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
from jax.custom_derivatives import SymbolicZero

from .._compat import open_jaxpr, without_dead_code
from .._structure import Structure, mark_lasting, structure_of
from .._traits import traits_of

_REMEMBERED = 1024  # functions
_FOUND: dict[Hashable, Callable[[Any], list[Any]] | None] = {}


class Pushed(NamedTuple):
    """Results, and the tangents of those that have one, by their places."""

    outs: list[Any]
    tangents: dict[int, Any]

    def pair(self) -> tuple[list[Any], list[Any]]:
        """As `jax.custom_jvp` takes them."""
        zeros = (SymbolicZero(jax.typeof(x).to_tangent_aval()) for x in self.outs)
        return self.outs, [self.tangents.get(i, zero) for i, zero in enumerate(zeros)]


def with_jvp(
    fun: Callable[..., list[Any]],
    push: Callable[[Sequence[int], Sequence[Any], Sequence[Any]], Pushed],
    name: str,
) -> Callable[..., list[Any]]:
    """`fun` with the rule `push(differentiated, primals, tangents)`, which gets the tangents that are not zero."""

    def named(*xs: Any) -> list[Any]:
        return fun(*xs)

    named.__name__ = name
    made = jax.custom_jvp(named)

    def jvp(primals: Sequence[Any], tangents: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        differentiated = [i for i, t in enumerate(tangents) if not isinstance(t, SymbolicZero)]
        return push(differentiated, primals, [tangents[i] for i in differentiated]).pair()

    made.defjvp(jvp, symbolic_zeros=True)
    return made


def is_remembered(eqn: Any) -> bool:
    """Whether `remembered_jvp` is for this equation."""
    return traits_of(eqn.primitive).own_jvp and len(eqn.invars) == 1


def remembered_jvp(
    fun: Callable[[Any], list[Any]],
    push: Callable[[Any, Any], Pushed],
    aval: Any,
    name: str,
    key: Hashable | None,
) -> Callable[[Any], list[Any]] | None:
    """`with_jvp` of a function of one operand, the same object for all functions that say the same: a `relu`.

    It is made of jaxprs alone. None if a cache must not hold them, or if the rule is not to be called. Functions with
    the same `key` are the same.
    """
    try:
        return _FOUND[key]  # not `in` first: another thread may clear it
    except KeyError:
        pass
    moved: list[int] = []

    def tangents(x: Any, t: Any) -> list[Any]:
        pushed = push(x, t)
        moved[:] = pushed.tangents
        return list(pushed.tangents.values())

    try:
        rule = structure_of(without_dead_code(jax.make_jaxpr(tangents)(aval, aval.to_tangent_aval())))
    except Exception:  # the user's rule says that it can't be differentiated
        return None
    body = None if rule is None else structure_of(jax.make_jaxpr(fun)(aval))
    found = None if rule is None or body is None else _function(body, rule, tuple(moved), name)
    if key is not None:
        if len(_FOUND) >= _REMEMBERED:
            _FOUND.clear()
        _FOUND[key] = found
    return found


@functools.lru_cache(_REMEMBERED)
def _function(body: Structure, rule: Structure, moved: tuple[int, ...], name: str) -> Callable[[Any], list[Any]]:
    def push(differentiated: Sequence[int], primals: Sequence[Any], tangents: Sequence[Any]) -> Pushed:
        found = jec.jaxpr_as_fun(rule.jaxpr)(*primals, *tangents) if differentiated else ()
        return Pushed(list(made(*primals)), dict(zip(moved, found, strict=False)))

    made = with_jvp(jec.jaxpr_as_fun(body.jaxpr), push, name)
    jitted, (operand,) = jax.jit(made), open_jaxpr(body.jaxpr).invars

    def remembered(x: Any) -> list[Any]:
        mark_lasting(jitted.trace(operand.aval).jaxpr)  # each time: `jax.clear_caches` makes JAX trace it again
        return jitted(x)

    return remembered
