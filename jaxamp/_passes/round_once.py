"""Round each parameter once for the forward and the backward pass.

A matmul rounds its float32 weight, and its backward pass rounds it again: a kernel for each, and six bytes a parameter.
On a mesh, XLA's partitioner gathers what is split over devices, and it gathers each rounded copy. So here there is one
copy, made in front, which all matmuls read (`_primitives/low_copy.py`). It is kept for the backward pass, and gathered
once, as in the float32 program. It goes into checkpoints of ours beside the parameter, on a mesh without a barrier:
XLA gathers again behind one. What is quantised is quantised in front as well, and its bits are the copy
(`hoist_quantized.py`); XLA of JAX 0.12 gathers these again for the backward pass.

What a loop or a user's own checkpoint reads is left alone: it gathers in each round, or again, as it is told to. So is
the first layer, a matmul of two operands of the program: the batch needs no gradient, so the weight is read once. With
`keep="matmuls"`, for which less memory is worth some time, there are copies on meshes alone. There are none inside of a
`jax.checkpoint` of the user, which says what is kept.
"""

import operator
import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax
from jax.sharding import AxisType

from .._compat import (
    Jaxpr,
    Literal,
    Primitive,
    Var,
    current_context,
    open_jaxpr,
    under_checkpoint,
    with_equations,
    with_operands,
)
from .._jaxpr import in_dtype, is_on_mesh
from .._plan.higher_order import describe
from .._plan.more_operands import way_into, with_more_operands
from .._plan.plan import Setting
from .._primitives.low_copy import LOW_COPY, WITH_COPY, Moves
from .._primitives.matmul import is_mixed
from .._traits import traits_of
from .hoist_quantized import in_front, takes_copies

# (body, which operands, dtype, with barriers) -> rewritten; None: it stays as it is. An entry lives as long as the
# body, which it must not hold: JAX remembers what it made of it.
_WITH_COPIES: weakref.WeakKeyDictionary[Any, dict[Hashable, "_Body | None"]] = weakref.WeakKeyDictionary()


def round_once(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with one low copy of each parameter, unless the program itself says how it is split over devices."""
    body, low = open_jaxpr(program), setting.formats.compute_dtype
    if not setting.formats.narrows or setting.communication(()).gather != "compute" or under_checkpoint():
        return program
    split = tuple(is_on_mesh(v.aval, AxisType.Auto) and setting.formats.may_lower(v) for v in body.invars)
    program = in_front(program, split) if any(split) else program
    shared = tuple(map(operator.or_, split, _on_one_device(body, setting)))
    new = _rewritten(program, shared, low, not any(split))
    if not new.wanted:
        return program
    body, inside, around = open_jaxpr(program), open_jaxpr(new.jaxpr), current_context()
    like, made = body.eqns[0], inside.invars[len(body.invars) :]
    copies = [
        like.replace(
            primitive=LOW_COPY,
            invars=[body.invars[operand]],
            outvars=[copy],
            params={"low": low, "moves": moves},
            effects=frozenset(),
            source_info=like.source_info.replace(name_stack=_scope_of_reader(inside, copy)),
            ctx=around,
        )
        for (operand, moves), copy in zip(new.wanted, made, strict=True)
    ]
    return with_operands(with_equations(new.jaxpr, [*copies, *inside.eqns]), body.invars)


def _scope_of_reader(body: Any, v: Var) -> Any:
    """The name stack of the first equation that reads a variable, in a function or not."""
    eqn = next(eqn for eqn in body.eqns if any(u is v for u in eqn.invars))
    scope = eqn.source_info.name_stack
    if not takes_copies(eqn):
        return scope
    entry = describe(eqn)
    assert entry is not None
    inside = open_jaxpr(entry.bodies[0].jaxpr)
    own = next(own for own, u in zip(inside.invars, eqn.invars, strict=True) if u is v)
    return scope + _scope_of_reader(inside, own)


def _on_one_device(body: Any, setting: Setting) -> list[bool]:
    """Which operands are on one device, as far as a trace knows, and may have a copy there."""
    if setting.keep == "matmuls":
        return [False] * len(body.invars)
    return [not is_on_mesh(v.aval, *AxisType) and setting.formats.may_lower(v) for v in body.invars]


class _Origin(NamedTuple):
    """A value that holds the entries of an operand, moved."""

    operand: int
    moves: Moves


class _Body(NamedTuple):
    """A jaxpr that takes low copies after its own operands, and which it takes."""

    jaxpr: Jaxpr
    wanted: tuple[_Origin, ...]


def _rewritten(jaxpr: Jaxpr, shared: tuple[bool, ...], low: np.dtype, barrier: bool) -> _Body:
    if not any(shared):
        return _Body(jaxpr, ())
    found, key = _WITH_COPIES.setdefault(jaxpr, {}), (shared, low, barrier)
    if key not in found:
        new = _Rewriter(jaxpr, shared, low, barrier).body()
        found[key] = new if new.wanted else None
    return found[key] or _Body(jaxpr, ())


class _Rewriter:
    def __init__(self, jaxpr: Jaxpr, shared: Sequence[bool], low: np.dtype, barrier: bool):
        self._jaxpr, self._low, self._barrier = jaxpr, low, barrier
        body = open_jaxpr(jaxpr)
        operands = enumerate(zip(body.invars, shared, strict=True))
        self._origins = {v: _Origin(i, ()) for i, (v, is_shared) in operands if is_shared}
        self._sent = set[Var]()  # operands that are sent or rounded
        for eqn in body.eqns:
            self._follow(eqn)
        self._read_again = {
            origin.operand for eqn in body.eqns for origin in map(self._origin, self._wants(eqn)) if origin is not None
        }
        self._copies: dict[_Origin, Var] = {}  # low copies that the body takes
        self._instead: dict[Var, Var] = {}  # what is read in place of a float32 value
        self._eqns: list[Any] = []

    def body(self) -> _Body:
        body = open_jaxpr(self._jaxpr)
        for eqn in body.eqns:
            self._eqns.append(self._equation(eqn))
        if not self._copies:
            return _Body(self._jaxpr, ())
        new = with_operands(with_equations(self._jaxpr, self._eqns), [*body.invars, *self._copies.values()])
        return _Body(new, tuple(self._copies))

    def _equation(self, eqn: Any) -> Any:
        if takes_copies(eqn):
            return self._through(eqn)
        return reading_copies(eqn, self._shared_copy, self._instead, self._eqns) if is_mixed(eqn.primitive) else eqn

    def _follow(self, eqn: Any) -> None:
        """Note where the result of an equation comes from, if it only moves entries, or sends or rounds them."""
        traits = traits_of(eqn.primitive)
        is_same = eqn.primitive is lax.convert_element_type_p or (traits.relays and traits.communicates)
        if is_same and self._is_of_operand(eqn.invars[0]):
            self._sent.add(eqn.outvars[0])
        if len(eqn.invars) == len(eqn.outvars) == 1 and traits.relays and not traits.communicates and not eqn.effects:
            origin = self._origin(eqn.invars[0])
            if origin is not None and describe(eqn) is None and _is_hashable(eqn.params):
                move = (eqn.primitive, tuple(eqn.params.items()))
                self._origins[eqn.outvars[0]] = _Origin(origin.operand, (*origin.moves, move))

    def _wants(self, eqn: Any) -> list[Any]:
        """What a matmul reads, or one in the body of an equation, if it does not multiply two operands of the jaxpr."""
        if takes_copies(eqn):
            return [eqn.invars[origin.operand] for origin in self._inside(eqn).wanted]
        is_one = is_mixed(eqn.primitive) and not all(map(self._is_of_operand, eqn.invars[:2]))
        return eqn.invars[:2] if is_one else []

    def _is_of_operand(self, atom: Any) -> bool:
        return self._origin(atom) is not None or (not isinstance(atom, Literal) and atom in self._sent)

    def _origin(self, atom: Any) -> _Origin | None:
        return None if isinstance(atom, Literal) else self._origins.get(atom)

    def _shared_copy(self, v: Var) -> Var | None:
        """The low copy of a value that has one."""
        origin = self._origin(v)
        if origin is None or origin.operand not in self._read_again:
            return None
        return self._copies.setdefault(origin, in_dtype(v, self._low))

    def _through(self, eqn: Any) -> Any:
        """A function or a checkpoint that takes copies too."""
        new = self._inside(eqn)
        if not new.wanted:
            return eqn
        copies: list[Var] = []
        for operand, moves in new.wanted:
            origin = self._origins[eqn.invars[operand]]
            of = _Origin(origin.operand, (*origin.moves, *moves))
            aval = open_jaxpr(new.jaxpr).invars[len(eqn.invars) + len(copies)].aval
            copies.append(self._copies.setdefault(of, Var(aval)))
        params = with_more_operands(eqn, way_into(eqn), [new.jaxpr], len(copies), self._barrier)
        return eqn.replace(invars=[*eqn.invars, *copies], params=params)

    def _inside(self, eqn: Any) -> _Body:
        entry = describe(eqn)
        assert entry is not None
        (inside,) = entry.bodies
        shared = tuple(self._origin(v) is not None for v in eqn.invars)
        return _rewritten(inside.jaxpr, shared, self._low, self._barrier)


def reading_copies(
    eqn: Any,
    copy_of: Callable[[Var], Var | None],
    instead: dict[Var, Var],
    eqns: list[Any],
    widened: Primitive = WITH_COPY,
) -> Any:
    """A matmul of low copies, which it keeps for its backward pass.

    `instead` says what is read in place of a value. It gets what is made here, by `widened`, and `eqns` the equations
    that make it.
    """
    mixing, ins = eqn.params["mixing"], list(eqn.invars)
    given = list(mixing.given)
    for i, is_exact in enumerate(mixing.exact):
        v = ins[i]
        if is_exact or isinstance(v, Literal):
            continue
        if v not in instead:
            copy = copy_of(v)
            if copy is None:
                continue
            instead[v] = Var(v.aval)
            eqns.append(eqn.replace(primitive=widened, invars=[v, copy], outvars=[instead[v]], params={}))
        ins[i], given[i] = instead[v], False
    if ins == list(eqn.invars):
        return eqn
    return eqn.replace(invars=ins, params={**eqn.params, "mixing": mixing._replace(given=(given[0], given[1]))})


def _is_hashable(params: dict[str, Any]) -> bool:
    try:
        hash(tuple(params.items()))
    except TypeError:
        return False
    return True
