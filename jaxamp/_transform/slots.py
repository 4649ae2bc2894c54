"""Give a program an operand for each scale that is made of earlier steps: a slot (`_primitives/delayed.py`).

    s = scale(x)         ->    s = scale(slot), m = largest(x)
    out = matmul(...)    ->    out = watch(matmul(..., slot of ct), slots, maxima)

The slots become operands of `jit`, `checkpoint`, `cond`, `scan` and `shard_map` too. In a scan over layers, each round
has slots of its own: a matmul reads a weight of that round. In a scan over steps in time or over micro-batches, all
rounds share theirs. Where slots can't go, as into a user's derivative rules and the body of a `while_loop`, scales are
made of the present numbers.

A slot is named by the scopes around its matmul, the matmul, and the operand. Names don't depend on shapes, on `keep=`,
or on what was traced before.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from .._compat import (
    Jaxpr,
    Literal,
    Var,
    open_jaxpr,
    scalar_like,
    scan_counts,
    scopes,
    varying_axes,
    with_equations,
    with_operands,
)
from .._jaxpr import Memo
from .._plan.higher_order import describe
from .._plan.more_operands import way_into, with_more_operands
from .._primitives.delayed import SHARE, WATCH
from .._primitives.quantize import LARGEST, QUANTIZE, SCALE
from .._primitives.quantized_matmul import is_quantized
from .._traits import traits_of

COTANGENT = "cotangent"


class Slot(NamedTuple):
    """The place of a scale in a program."""

    matmul: int  # its number in the program
    scopes: tuple[str, ...]
    primitive: str
    of: str  # lhs, rhs or cotangent
    history: int
    rounds: tuple[int, ...] = ()  # of the scans around it whose rounds have slots of their own

    @property
    def is_cotangent(self) -> bool:
        return self.of == COTANGENT


class WithSlots(NamedTuple):
    """A program with an operand for each slot, after its own operands, and the slots by name, in the same order."""

    program: Jaxpr
    slots: dict[str, Slot]


def with_slots(program: Jaxpr) -> WithSlots:
    """The program with slots."""
    new, slots = _Threader().run(program, None)
    named: dict[str, Slot] = {}
    places: dict[int, str] = {}
    count: Counter[str] = Counter()
    for slot in slots:
        if slot.matmul not in places:
            place = "/".join((*slot.scopes, slot.primitive))
            places[slot.matmul] = f"{place}.{count[place]}" if count[place] else place
            count[place] += 1
        named[f"{places[slot.matmul]}/{slot.of}"] = slot
    return WithSlots(new, named)


class _Untracked(NamedTuple):
    """The mesh axes of a `shard_map` whose types don't say which values differ between devices."""

    axes: tuple[Any, ...]
    devices: int


class _Entered(NamedTuple):
    """A slot in one jaxpr: the operand, and the variable that is read."""

    operand: Var
    here: Var


class _Read(NamedTuple):
    """A scale that is made of a slot."""

    slot: _Entered
    largest: Var
    scale: Var


class _Threader:
    def __init__(self) -> None:
        self._memo = Memo()

    def run(self, jaxpr: Jaxpr, untracked: _Untracked | None) -> tuple[Jaxpr, list[Slot]]:
        """The jaxpr with slots, and these. Its matmuls are numbered from 0."""
        return self._memo.get(jaxpr, untracked, lambda: _Body(self, jaxpr, untracked).thread())


class _Body:
    """One jaxpr on its way to slots."""

    def __init__(self, threader: _Threader, jaxpr: Jaxpr, untracked: _Untracked | None):
        self._threader, self._jaxpr, self._untracked = threader, jaxpr, untracked
        self._eqns: list[Any] = []
        self._slots: list[tuple[Slot, Var]] = []
        self._matmuls = 0
        self._instead: dict[Var, Var] = {}
        self._reads: dict[Any, _Read] = {}
        self._made = {v: eqn for eqn in open_jaxpr(jaxpr).eqns for v in eqn.outvars}
        self._claims = self._first_readers()

    def thread(self) -> tuple[Jaxpr, list[Slot]]:
        body = open_jaxpr(self._jaxpr)
        for old in body.eqns:
            eqn = old.replace(invars=self._renamed(old.invars)) if self._instead else old
            if eqn.primitive is SCALE and _key(old) in self._claims:
                self._scale(eqn, _key(old))
            elif _is_delayed(eqn):
                self._matmul(eqn, id(old))
            else:
                self._other(eqn)
        if not self._slots:
            return self._jaxpr, []
        slots, operands = zip(*self._slots, strict=True)
        threaded = with_equations(self._jaxpr, self._eqns, self._renamed(body.outvars))
        return with_operands(threaded, [*body.invars, *operands]), list(slots)

    def _renamed(self, atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else self._instead.get(atom, atom) for atom in atoms]

    def _first_readers(self) -> dict[Any, tuple[int, str]]:
        """For each scale that matmuls with a history read: the first of these matmuls, and which operand it is of."""
        claims: dict[Any, tuple[int, str]] = {}
        for eqn in open_jaxpr(self._jaxpr).eqns:
            if _is_delayed(eqn):
                for of, atom in (("lhs", eqn.invars[3]), ("rhs", eqn.invars[5])):
                    scale = self._scale_behind(atom)
                    if scale is not None:
                        claims.setdefault(_key(scale), (id(eqn), of))
        return claims

    def _scale_behind(self, atom: Any) -> Any:
        """The equation that makes the scale of a quantised operand, if it is in this jaxpr."""
        rounding = self._made.get(atom)
        if rounding is None or rounding.primitive is not QUANTIZE:
            return None
        scale = None if isinstance(rounding.invars[1], Literal) else self._made.get(rounding.invars[1])
        is_ours = scale is not None and scale.primitive is SCALE and not isinstance(scale.invars[0], Literal)
        return scale if is_ours else None

    def _enter(self, eqn: Any, aval: Any) -> _Entered:
        """A new slot, which is read as a value of a type."""
        axes, added = tuple(varying_axes(aval)), 1
        if self._untracked is not None:
            axes, added = self._untracked
        operand = _scalars(())
        if not axes:
            return _Entered(operand, operand)
        here = Var(aval)
        params = {"rounds": 0, "axes": axes, "added": added}
        self._eqns.append(eqn.replace(primitive=SHARE, invars=[operand], outvars=[here], params=params))
        return _Entered(operand, here)

    def _scale(self, eqn: Any, key: Any) -> None:
        if key in self._reads:
            self._instead[eqn.outvars[0]] = self._reads[key].scale
            return
        slot = self._enter(eqn, eqn.outvars[0].aval)
        largest = Var(eqn.outvars[0].aval)
        self._eqns.append(eqn.replace(invars=[slot.here], params={**eqn.params, "axes": ()}))
        axes = {"axes": eqn.params["axes"]}
        self._eqns.append(eqn.replace(primitive=LARGEST, outvars=[largest], params=axes))
        self._reads[key] = _Read(slot, largest, eqn.outvars[0])

    def _matmul(self, eqn: Any, number: int) -> None:
        quantizing, (out,) = eqn.params["quantizing"], eqn.outvars
        name = traits_of(eqn.primitive).shown_as or eqn.primitive.name
        slot = Slot(self._matmuls, scopes(eqn.source_info.name_stack), name, "", quantizing.recipe.history)
        self._matmuls += 1
        of_cotangent: list[Var] = []
        if quantizing.scales_gradients:
            entered = self._enter(eqn, scalar_like(out.aval, np.dtype(np.float32)))
            of_cotangent.append(entered.here)
            self._slots.append((slot._replace(of=COTANGENT), entered.operand))
        mine = [(of, self._reads[key]) for key, (first, of) in self._claims.items() if first == number]
        self._slots += [(slot._replace(of=of), read.slot.operand) for of, read in mine]
        watched = [*of_cotangent, *(read.slot.here for _, read in mine)]
        unwatched = Var(out.aval)
        changed = {**eqn.params, "quantizing": quantizing._replace(is_delayed=bool(of_cotangent))}
        ins = [*eqn.invars[:6], *of_cotangent, *eqn.invars[6:]]
        self._eqns.append(eqn.replace(invars=ins, outvars=[unwatched], params=changed))
        ins = [unwatched, *watched, *(read.largest for _, read in mine)]
        self._eqns.append(eqn.replace(primitive=WATCH, invars=ins, outvars=[out], params={"slots": len(watched)}))

    def _other(self, eqn: Any) -> None:
        way = way_into(eqn)
        entry = describe(eqn) if way else None
        if entry is None:
            self._eqns.append(eqn)
            return
        untracked = _untracked_by(eqn) if way == "shard_map" else self._untracked
        found = [self._threader.run(body.jaxpr, untracked) for body in entry.bodies]
        slots = [slot for _, inner in found for slot in inner]
        if not slots:
            self._eqns.append(eqn)
            return
        around = scopes(eqn.source_info.name_stack)
        operands: list[Var] = []
        for i, (_, inner) in enumerate(found):
            here = around if len(found) == 1 else (*around, f"branch{i}")
            for slot in inner:
                outer = slot._replace(matmul=self._matmuls + slot.matmul, scopes=here + slot.scopes)
                operands.append(self._pass_on(eqn, way, outer))
            self._matmuls += 1 + max((slot.matmul for slot in inner), default=-1)
        jaxprs = _with_all_operands(found) if way == "cond" else [found[0][0]]
        params = with_more_operands(eqn, way, jaxprs, len(operands))
        self._eqns.append(eqn.replace(invars=[*eqn.invars, *operands], params=params))

    def _pass_on(self, eqn: Any, way: str, slot: Slot) -> Var:
        """The operand of an equation for a slot inside of it."""
        rounds = eqn.params["length"] if way == "scan" else 0
        own = rounds and _is_over_layers(eqn)
        slot = slot._replace(rounds=(rounds, *slot.rounds)) if own else slot
        operand = _scalars(slot.rounds)
        self._slots.append((slot, operand))
        if not rounds or own:
            return operand
        shared = _scalars((rounds, *slot.rounds))
        params = {"rounds": rounds, "axes": (), "added": 1}
        self._eqns.append(eqn.replace(primitive=SHARE, invars=[operand], outvars=[shared], params=params))
        return shared


def _scalars(shape: tuple[int, ...]) -> Var:
    return Var(jax.core.ShapedArray(shape, np.dtype(np.float32)))


def _is_delayed(eqn: Any) -> bool:
    """Whether it is a matmul whose scales are to be made of earlier steps."""
    return is_quantized(eqn.primitive) and "quantizing" in eqn.params and eqn.params["quantizing"].recipe.history > 0


def _key(scale: Any) -> Any:
    """Equal for equations that make the same scale."""
    return scale.invars[0], tuple(scale.params.items())


# -- equations with bodies


def _untracked_by(eqn: Any) -> _Untracked | None:
    if eqn.params["check_vma"]:
        return None
    axes = tuple(eqn.params["newly_manual_axes"])
    return _Untracked(axes, math.prod(eqn.params["mesh"].shape[axis] for axis in axes))


def _with_all_operands(found: Sequence[tuple[Jaxpr, list[Slot]]]) -> list[Jaxpr]:
    """Branches that take the slots of all of them."""
    new: list[Jaxpr] = []
    for i, (branch, slots) in enumerate(found):
        body = open_jaxpr(branch)
        count = len(body.invars) - len(slots)
        before, after = (
            [_scalars(s.rounds) for _, inner in some for s in inner] for some in (found[:i], found[i + 1 :])
        )
        ins = [*body.invars[:count], *before, *body.invars[count:], *after]
        new.append(with_operands(branch, ins))
    return new


def _is_over_layers(eqn: Any) -> bool:
    """Whether a matmul in a scan multiplies an array of each round with something that is computed there."""
    consts, carry = scan_counts(eqn.params)
    scanned = len(eqn.invars) - consts - carry
    return _has_own_weight(eqn.params["jaxpr"], ["const"] * consts + [""] * carry + ["slice"] * scanned)


def _has_own_weight(jaxpr: Jaxpr, ins: Sequence[str]) -> bool:
    body = open_jaxpr(jaxpr)
    kinds = dict(zip(body.invars, ins, strict=True)) | dict.fromkeys(body.constvars, "const")

    def kind(atom: Any) -> str:
        return "const" if isinstance(atom, Literal) else kinds.get(atom, "")

    for eqn in body.eqns:
        if _is_delayed(eqn) and sorted(map(kind, eqn.invars[:2])) == ["", "slice"]:
            return True
        traits, entry = traits_of(eqn.primitive), describe(eqn)
        if traits.relays or traits.passes_on or traits.communicates:
            found = {kind(atom) for atom in eqn.invars}
            kinds.update(dict.fromkeys(eqn.outvars, found.pop() if len(found) == 1 else ""))
        for inner in entry.bodies if entry is not None else ():
            if _has_own_weight(inner.jaxpr, [kind(eqn.invars[i]) for i in inner.operands]):
                return True
    return False
