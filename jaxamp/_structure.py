"""Jaxprs by what they say, so that what was made of one serves another that says the same."""

import functools
import os
import sys
import types
import weakref
from collections.abc import Hashable
from typing import Any

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax

from ._compat import Jaxpr, Literal, Var, consts_of, inside_hi, open_jaxpr, places_nothing, scopes
from ._jaxpr import Memo
from ._traits import traits_of
from ._traits.traits import NONE

# The folders of functions that are made once, and that hold nothing of the user
_LIBRARIES = tuple(
    os.path.join(os.path.dirname(file), folder, "")
    for file, folder in ((jax.__file__, ""), (__file__, "_passes"), (__file__, "_primitives"))
)


class Structure:
    """What a jaxpr says, with its source lines and scopes. Equal to that of any jaxpr that says the same."""

    __slots__ = ("_hash", "_key", "jaxpr")

    def __init__(self, jaxpr: Jaxpr, key: Hashable):
        self.jaxpr, self._key, self._hash = jaxpr, key, hash(key)

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Structure) and self._hash == other._hash and self._key == other._key


def structure_of(jaxpr: Jaxpr) -> Structure | None:
    """What a jaxpr says; None if it holds what a cache must not hold: arrays, effects, or functions of the user."""
    try:
        return _structure(jaxpr, Memo())
    except _NotPlainError:
        return None


def operation_key(eqn: Any) -> tuple[Any, Any, Any] | None:
    """Equal for equations that compute the same of the same operands; None if that can't be said."""
    if eqn.effects or traits_of(eqn.primitive) is NONE or _is_random(eqn):
        return None
    try:
        return eqn.primitive, _params(eqn, Memo()), eqn.ctx
    except _NotPlainError:
        return None


class Numbering:
    """Numbers for the values of a jaxpr: values of one number are equal.

    Those in scopes of other names, or in other contexts, have other numbers, since policies name scopes; unless only
    the numbers that an array holds count.
    """

    def __init__(self, only_values: bool = False) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._only_values = only_values

    def results(self, eqn: Any, numbers: dict[Var, int], path: tuple[str, ...] = ()) -> list[int]:
        """The numbers of an equation's results; `numbers` has those of variables.

        A jitted function has the numbers of its body: an activation is one operation, and several in a derivative.
        """
        path += () if self._only_values else scopes(eqn.source_info.name_stack)
        operands = [self.of(v, numbers) for v in eqn.invars]
        if traits_of(eqn.primitive).plain_call and not eqn.effects and places_nothing(eqn):
            body = eqn.params["jaxpr"]
            inside = open_jaxpr(body)
            own = dict(zip(inside.invars, operands, strict=True))
            own |= {v: self._number(id(x)) for v, x in zip(inside.constvars, consts_of(body), strict=True)}
            for inner in inside.eqns:
                own.update(zip(inner.outvars, self.results(inner, own, path), strict=True))
            return [self.of(v, own) for v in inside.outvars]
        if eqn.primitive in _COMMUTE:
            operands.sort()
        if self._only_values and is_marked_varying(eqn):
            return operands
        operation = operation_key(eqn)
        if operation is None:
            return [self._number(object()) for _ in eqn.outvars]
        if self._only_values:
            primitive, params, _ = operation
            if primitive is lax.broadcast_in_dim_p:
                params = tuple((name, value) for name, value in params if name != "sharding")
            avals: Any = [(v.aval.shape, v.aval.dtype) for v in eqn.outvars]
            key: Hashable = (primitive, params, *operands)
        else:
            avals, key = [v.aval for v in eqn.outvars], (operation, *operands, path)
        return [self._number((key, i, aval)) for i, aval in enumerate(avals)]

    def of(self, atom: Any, numbers: dict[Var, int]) -> int:
        """The number of a variable or a literal."""
        if isinstance(atom, Literal):  # by its bits: NaN is not equal to itself, and -0 is equal to 0
            return self._number((atom.aval, np.asarray(atom.val).tobytes()))
        return numbers[atom] if atom in numbers else self._number(atom)

    def _number(self, key: Hashable) -> int:
        return self._numbers.setdefault(key, len(self._numbers))


def is_marked_varying(eqn: Any) -> bool:
    """Whether its result is its operand, of which `shard_map` then knows that it differs from device to device."""
    return eqn.primitive.name == "pvary"


_COMMUTE = frozenset((lax.add_p, lax.mul_p))


def _is_random(eqn: Any) -> bool:
    """Whether it draws other numbers each time, since no key says which."""
    bodies = jec.jaxprs_in_params(eqn.params)
    return eqn.primitive.name == "rng_uniform" or any(_is_random(e) for body in bodies for e in open_jaxpr(body).eqns)


def library_key(eqn: Any) -> Hashable | None:
    """What tells a function of JAX or of ours with a `custom_jvp` rule from all others; None for any other function.

    These are made once, so file, line and body say which one it is, and which rule it has. A user may give a function
    of JAX another rule: then the rule has another file, or the function of this name in JAX has none, or is inside.
    """
    if "jvp_jaxpr_fun" not in eqn.params:
        return None
    jaxpr = eqn.params["call_jaxpr"]
    info, rule = open_jaxpr(jaxpr).debug_info, eqn.params["jvp_jaxpr_fun"].debug_info
    if not all((each.func_filename or "").startswith(_LIBRARIES) for each in (info, rule)):
        return None
    if not _has_rule(info.func_filename, info.func_name) or _is_inside(info, jaxpr):
        return None
    body = structure_of(jaxpr)
    return None if body is None else (info.func_filename, info.func_lineno, body)


@functools.cache
def _has_rule(filename: str, name: str) -> bool:
    """Whether the function of a name that a module defines has a `custom_jvp` rule."""
    modules = [module for module in list(sys.modules.values()) if getattr(module, "__file__", None) == filename]
    return any(isinstance(getattr(module, name, None), jax.custom_jvp) for module in modules)


def _is_inside(info: Any, jaxpr: Jaxpr) -> bool:
    """Whether a function with a rule that is written in the same place is called in a jaxpr."""
    for eqn in open_jaxpr(jaxpr).eqns:
        for body in jec.jaxprs_in_params(eqn.params):
            inner = open_jaxpr(body).debug_info
            same = (inner.func_filename, inner.func_lineno) == (info.func_filename, info.func_lineno)
            if (same and traits_of(eqn.primitive).own_jvp) or _is_inside(info, body):
                return True
    return False


class _NotPlainError(Exception):
    """Something holds what a cache must not hold."""


_LASTING: weakref.WeakSet[Any] = weakref.WeakSet()


def mark_lasting(jaxpr: Jaxpr) -> None:
    """Say that a jaxpr that `structure_of` refuses may be held by a cache all the same. It is equal to itself alone."""
    _LASTING.add(jaxpr)


def _structure(jaxpr: Jaxpr, known: Memo) -> Structure:
    if jaxpr in _LASTING:
        return Structure(jaxpr, ("the jaxpr", id(jaxpr)))
    return known.get(jaxpr, None, lambda: Structure(jaxpr, _key(jaxpr, known)))


def _key(jaxpr: Jaxpr, known: Memo) -> Hashable:
    body = open_jaxpr(jaxpr)
    if consts_of(jaxpr) or body.effects:
        raise _NotPlainError
    variables = (*body.constvars, *body.invars)
    numbers: dict[Var, int] = {v: i for i, v in enumerate(variables)}

    def read(atom: Any) -> Hashable:
        if not isinstance(atom, Literal):
            return numbers[atom]
        return atom.aval, type(atom.val), np.asarray(atom.val).tobytes()

    key: list[Hashable] = [tuple(v.aval for v in variables)]
    for eqn in body.eqns:
        info, operands = eqn.source_info, tuple(map(read, eqn.invars))
        for v in eqn.outvars:
            numbers[v] = len(numbers)
        results = tuple(v.aval for v in eqn.outvars)
        key.append((eqn.primitive, operands, results, _params(eqn, known), eqn.ctx, info.name_stack, info.traceback))
    return (*key, tuple(map(read, body.outvars)))


def _params(eqn: Any, known: Memo) -> Hashable:
    traits, params = traits_of(eqn.primitive), eqn.params
    if traits.plain_params:
        return tuple(params.items())
    if traits.own_jvp:
        if (key := library_key(eqn)) is None:
            raise _NotPlainError
        return key
    if traits.own_vjp:
        raise _NotPlainError
    if "_prim" in params:
        inside = inside_hi(params["_prim"])
        if inside is None or inside.kind != "checkpoint":
            raise _NotPlainError
        params = params["_prim"].params
    return tuple((name, _param(value, known)) for name, value in params.items())


def _param(value: Any, known: Memo) -> Hashable:
    if hasattr(open_jaxpr(value), "eqns"):
        return _structure(value, known)
    if type(value) is tuple or type(value) is list:
        return tuple(_param(x, known) for x in value)
    if not isinstance(value, Hashable) or (callable(value) and not _is_plain_callable(value)):
        raise _NotPlainError
    return value


def _is_plain_callable(value: Any) -> bool:
    """Whether it is a function that closes over nothing. A mesh can be called too: it is a context manager."""
    is_function = isinstance(value, types.FunctionType) and not value.__closure__
    return is_function or isinstance(value, type | jax.sharding.Mesh | jax.sharding.AbstractMesh)
