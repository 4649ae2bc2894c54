"""How many bytes a section saves: what the backward pass reads if it is a checkpoint, and if it is not.

Without a checkpoint, XLA makes some values again by itself: products and sums of what is in memory anyway go into the
kernel that reads them. It keeps the operands of matmuls, and what is expensive to make: exponentials and the like,
sums, and masks. A checkpoint keeps what goes into it, and the results of matmuls inside.

Between two layers of a network little is alive, and a section pays. If a function has its own derivative inside, much
goes from the forward pass to the backward pass of that derivative, which is another section: it may cost more than it
saves.
"""

import math
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import Jaxpr, Literal, Var, inside_hi, open_jaxpr
from .._formats import float_dtype
from .._jaxpr import Kinds, Memo
from .._plan.bodies import functions_in
from .._plan.residuals import is_expensive, is_kept
from .._traits import Traits, traits_of

# A checkpoint costs kernels, because nothing is fused across its ends: what it returns is written to memory, and so are
# the cotangents of that. It must save more than these parts, found with second derivatives of several networks, of
_HANDED_ON = 3  # what it returns,
_AGAIN = 8  # and what the backward pass reads to make the rest again.

_LONG = 1000  # equations: a call of a function that has more is not looked into


class _Operation(NamedTuple):
    """An equation that is not a call."""

    eqn: Any
    traits: Traits
    ins: list[Var]  # without literals
    outs: list[Var]


class _Reads(NamedTuple):
    """What the derivative of an operation reads."""

    stored: Sequence[Var] = ()  # from memory, as it is
    values: Sequence[Var] = ()  # or something to make it from
    other: Any = None  # and a value that nothing else reads, such as a mask, of the shape of the result: its dtype
    made_from: Sequence[Var] = ()  # what that is made from


class Savings:
    """The bytes that sections of a jaxpr save. They are all of its equations, in order."""

    def __init__(self, jaxpr: Jaxpr, sections: Sequence[Sequence[Any]]):
        body, names, inliner = open_jaxpr(jaxpr), dict[Var, Var | None](), _Inliner()
        self._given = {*body.invars, *body.constvars}  # in memory as long as the caller wants
        self._sections = [list(inliner.operations(eqns, names)) for eqns in sections]
        self._made_by = {v: operation for section in self._sections for operation in section for v in operation.outs}
        stored = {self._stored(v) for section in self._sections for op in section for v in _reads(op).stored}
        self._known: dict[Var, frozenset[Var]] = {v: frozenset([v]) for v in stored}
        self._others: dict[Var, Var] = {}
        self._kept = [self._kept_by_jax(section) for section in self._sections]
        results = {self._stored(v) for v in _variables(body.outvars, names)}  # the caller's derivative may read them
        self._readers: dict[Var, int] = {}
        for found in (*self._kept, results):
            for v in found:
                self._readers[v] = self._readers.get(v, 0) + 1

    def pays(self, i: int, outs: Sequence[Var]) -> bool:
        """Whether section `i`, with these results, saves enough to be a checkpoint, if no other is one."""
        with_it, without = self._kept_by_checkpoint(self._sections[i]), self._kept[i]
        elsewhere = {v for v in with_it | without if self._readers.get(v, 0) > (v in without)}
        saved = self._bytes(without - elsewhere) - self._bytes(with_it - elsewhere)
        return saved > max(sum(map(_bytes, outs)) / _HANDED_ON, self._bytes(with_it) / _AGAIN)

    def _bytes(self, variables: Iterable[Var]) -> int:
        return sum(_bytes(v) for v in variables if v not in self._given)

    # -- without a checkpoint

    def _kept_by_jax(self, section: Iterable[_Operation]) -> set[Var]:
        found: set[Var] = set()
        for operation in section:
            reads = _reads(operation)
            found.update(map(self._stored, reads.stored))
            for v in reads.values:
                found |= self._roots(v)
            if reads.other is not None:
                out = operation.outs[0]
                found.add(self._others.setdefault(out, Var(out.aval.update(dtype=np.dtype(reads.other)))))
        return found

    def _stored(self, v: Var) -> Var:
        """The value of which `v` is another view."""
        operation = self._made_by.get(v)
        while operation is not None and _is_view(operation):
            v = operation.ins[0]
            operation = self._made_by.get(v)
        return v

    def _roots(self, v: Var) -> frozenset[Var]:
        """What is in memory, of which XLA makes `v` in the backward pass."""
        found, waiting = self._known, [v]
        while waiting:
            operation = self._made_by.get(waiting[-1])
            if operation is None or not _is_made_again(operation):
                found[waiting[-1]] = frozenset(waiting[-1:])
            elif left := [u for u in operation.ins if u not in found]:
                waiting += left
                continue
            else:
                roots = frozenset().union(*(found[u] for u in operation.ins))
                is_mask = operation.traits.compares and roots
                found[waiting[-1]] = frozenset(waiting[-1:]) if is_mask else roots
            waiting.pop()
        return found[v]

    # -- with one

    def _kept_by_checkpoint(self, section: Sequence[_Operation]) -> set[Var]:
        """What goes in, and what is kept inside, of all that is needed to make again what the derivative reads."""
        made_by, drawn = {v: operation for operation in section for v in operation.outs}, _drawn_masks(section)
        reads = map(_reads, section)
        waiting = [v for found in reads for v in (*found.stored, *found.values, *found.made_from)]
        seen, kept = set(waiting), set()
        while waiting:
            v = waiting.pop()
            operation = made_by.get(v)
            if operation is None or v in drawn or _is_kept(operation):
                kept.add(self._stored(v))
                continue
            waiting += [u for u in operation.ins if u not in seen]
            seen.update(operation.ins)
        return kept


# -- equations of functions that are called, in the place of the call


class _Inliner:
    """Lists operations. XLA makes equal ones once, and so they are one here."""

    def __init__(self) -> None:
        self._kinds, self._sizes = Kinds(), Memo()
        self._known: dict[Hashable, _Operation] = {}

    def operations(self, eqns: Sequence[Any], names: dict[Var, Var | None]) -> Iterator[_Operation]:
        """The operations of equations. `names` says which variables are others here, or literals, and gets results."""
        for eqn in eqns:
            traits = traits_of(eqn.primitive)
            if traits.plain_call and self._size(eqn.params["jaxpr"]) <= _LONG:
                body = open_jaxpr(eqn.params["jaxpr"])
                inside = {v: _variable(atom, names) for v, atom in zip(body.invars, eqn.invars, strict=True)}
                yield from self.operations(body.eqns, inside)
                names |= {v: _variable(atom, inside) for v, atom in zip(eqn.outvars, body.outvars, strict=True)}
                continue
            ins = _variables(eqn.invars, names)
            key = self._kinds.number(eqn), *ins
            operation = self._known.get(key)
            if operation is None:
                operation = self._known[key] = _Operation(eqn, traits, ins, [Var(v.aval) for v in eqn.outvars])
            names |= dict(zip(eqn.outvars, operation.outs, strict=True))
            yield operation

    def _size(self, jaxpr: Jaxpr) -> int:
        """The number of equations, with those of functions that are called in their places."""
        inside = (functions_in(eqn) if traits_of(eqn.primitive).plain_call else () for eqn in open_jaxpr(jaxpr).eqns)
        found = lambda: sum(1 + sum(map(self._size, called)) for called in inside)
        return self._sizes.get(jaxpr, None, found)


def _variable(atom: Any, names: dict[Var, Var | None]) -> Var | None:
    return None if isinstance(atom, Literal) else names.get(atom, atom)


def _variables(atoms: Iterable[Any], names: dict[Var, Var | None]) -> list[Var]:
    return [v for v in (_variable(atom, names) for atom in atoms) if v is not None]


# -- what is true of an operation


def _reads(operation: _Operation) -> _Reads:
    """What the derivative reads. Linear operations need nothing, and choices need the masks."""
    eqn, traits, ins, outs = operation
    if all(float_dtype(v.aval) is None for v in outs):
        return _Reads()
    if traits.matrix_unit:
        return _Reads(stored=ins)
    if traits.nonlinear:
        if traits.derivative_of_result:
            return _Reads(values=outs)
        return _Reads(other=_dtype(outs[0]), made_from=ins) if traits.transcendental else _Reads(values=ins)
    if traits.product:
        is_linear = len(ins) < 2 and (eqn.primitive is lax.mul_p or isinstance(eqn.invars[1], Literal))
        return _Reads(values=() if is_linear else ins)
    if _is_activation(eqn):
        return _Reads(other=_dtype(outs[0]) if is_expensive(eqn) else bool, made_from=ins)
    if eqn.primitive in (lax.abs_p, lax.max_p, lax.min_p, lax.clamp_p):
        return _Reads(other=bool, made_from=ins)
    if traits.reduces and eqn.primitive is not lax.reduce_sum_p:
        return _Reads(values=[*ins, *outs])
    if traits.cheap or traits.moves or traits.keeps_range:
        return _Reads(values=[v for v in ins if float_dtype(v.aval) is None])
    return _Reads(stored=[*ins, *outs])  # not known


def _drawn_masks(section: Iterable[_Operation]) -> set[Var]:
    """Masks made from random draws: our checkpoints keep them, and not the draws."""
    drawn, masks = set[Var](), set[Var]()
    for operation in section:
        if operation.traits.draws or (operation.traits.cheap and not drawn.isdisjoint(operation.ins)):
            for v in operation.outs:
                (masks if _dtype(v) == np.bool_ else drawn).add(v)
    return masks


def _is_view(operation: _Operation) -> bool:
    """Whether the result is the operand, in another shape or layout."""
    _, traits, ins, outs = operation
    return (traits.passes_on or traits.keeps_all_entries) and len(ins) > 0 and _dtype(ins[0]) == _dtype(outs[0])


def _is_made_again(operation: _Operation) -> bool:
    """Whether XLA makes the result again where it is read."""
    traits = operation.traits
    is_cheap = (traits.cheap and not traits.reduces) or _is_activation(operation.eqn)
    return is_cheap and not is_expensive(operation.eqn) and not _is_kept(operation)


def _is_kept(operation: _Operation) -> bool:
    eqn = operation.eqn
    if operation.traits.plain_call:
        return True
    return not _is_activation(eqn) and is_kept(eqn.primitive, *(v.aval for v in eqn.invars), **eqn.params)


def _is_activation(eqn: Any) -> bool:
    """Whether it is a function with a rule for its derivative."""
    hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
    return traits_of(eqn.primitive).own_jvp or (hi is not None and hi.kind == "custom_jvp")


def _bytes(v: Var) -> int:
    """Axes of a size that is not known yet count as one."""
    shape = getattr(v.aval, "shape", ())
    return math.prod(size for size in shape if isinstance(size, int)) * getattr(_dtype(v), "itemsize", 0)


def _dtype(v: Var) -> Any:
    return getattr(v.aval, "dtype", None)
