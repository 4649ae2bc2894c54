"""Quantise or round what stays the same in all rounds of a loop once, in front of the loop: weights, above all.

    scan(x -> matmul(x, quantize(w)))    ->    q = quantize(w), scan(x -> matmul(x, q))

XLA for GPUs moves nothing out of loops (0.10 to 0.12). The rule is general: an equation that reads nothing but operands
of a body that don't change from round to round can run in front of the loop. Quantising equations do, and low copies
(`round_in_loops.py`), with the cheap ones that they read. They leave the bodies of functions and checkpoints on their
way out. Where a loop over layers is inside of another loop, its layers are quantised in a loop of their own, in front
of both; not so in a `shard_map`.

Backward passes of loops profit by themselves: what is quantised is an operand of the loop.

`in_front` does the same for a whole program without loops: its parameters are quantised before anything else.
"""

import functools
from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import (
    Jaxpr,
    Literal,
    Primitive,
    Var,
    closed_jaxpr,
    has_bound_axes,
    more_constants,
    open_jaxpr,
    scan_counts,
    with_equations,
    with_operands,
)
from .._jaxpr import Memo, evaluate
from .._plan.checkpoints import is_ours
from .._plan.higher_order import describe, with_rewritten_bodies
from .._plan.more_operands import way_into, with_more_operands
from .._plan.plan import Setting
from .._primitives.quantize import CHECKSUM, LARGEST, QUANTIZE, SCALE
from .._primitives.quantized_matmul import is_quantized, keeping_rounded
from .._traits import traits_of

_QUANTIZING = (SCALE, LARGEST, CHECKSUM, QUANTIZE)


def hoist_quantized(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with quantising equations in front of the loops in which they don't change."""
    return hoisted(program)


def hoisted(program: Jaxpr, kinds: Collection[Primitive] = _QUANTIZING) -> Jaxpr:
    """The same of any jaxpr, such as one that was differentiated, and for equations of other kinds."""
    return _rewritten(program, Memo(), _How(kinds, has_bound_axes(), Memo()))


def in_front(program: Jaxpr, fixed: Sequence[bool]) -> Jaxpr:
    """A program that quantises some of its operands first, outside of functions and of our checkpoints.

    Loops and the user's checkpoints are left alone.
    """
    how = _How(_QUANTIZING, has_bound_axes(), Memo(), of_program=True)
    found = _lift(program, fixed, how)
    if not found.lifted:
        return program
    own, body = open_jaxpr(program).invars, open_jaxpr(found.body)
    moved = dict(zip(body.invars[len(own) :], found.lifted, strict=True))
    name = lambda atom: atom if isinstance(atom, Literal) else moved.get(atom, atom)
    rest = [eqn.replace(invars=list(map(name, eqn.invars))) for eqn in body.eqns]
    eqns = [*_needed(found.eqns, found.lifted), *rest]
    return with_operands(with_equations(found.body, eqns, list(map(name, body.outvars))), own)


class _How(NamedTuple):
    """What is moved, and where."""

    kinds: Collection[Primitive]
    in_map: bool  # in a `shard_map`
    known: Memo  # bodies taken apart: those of equal layers stay equal
    of_program: bool = False  # in front of the whole program, whose matmuls then keep what was moved

    def way_out(self, eqn: Any) -> str:
        """The kind of an equation out of whose body something may be moved; empty for others."""
        way = way_into(eqn)
        if self.of_program:
            return way if takes_copies(eqn) else ""
        # In a `shard_map`, values have axes along which devices differ, and a loop of our own would not have them.
        return way if way in ("jit", "checkpoint") or (way == "scan" and not self.in_map) else ""


def takes_copies(eqn: Any) -> bool:
    """Whether copies of a program's operands go into the body of an equation: not of a loop or a user's checkpoint."""
    way = way_into(eqn)
    return way == "jit" or (way == "checkpoint" and is_ours(eqn))


def _rewritten(jaxpr: Jaxpr, known: Memo, how: _How) -> Jaxpr:
    return known.get(jaxpr, how.in_map, lambda: _rewrite(jaxpr, known, how))


def _rewrite(jaxpr: Jaxpr, known: Memo, how: _How) -> Jaxpr:
    """Bodies first: what has left a loop inside may leave this one too."""
    eqns: list[Any] = []
    for old in open_jaxpr(jaxpr).eqns:
        inner = how._replace(in_map=how.in_map or way_into(old) == "shard_map")
        eqn = with_rewritten_bodies(old, functools.partial(_rewritten, known=known, how=inner))
        eqns += _in_front_of_loop(eqn, how) if eqn.primitive.name in ("scan", "while") else [eqn]
    if all(new is old for new, old in zip(eqns, open_jaxpr(jaxpr).eqns, strict=False)):
        return jaxpr
    return with_equations(jaxpr, eqns)


def _in_front_of_loop(loop: Any, how: _How) -> list[Any]:
    """A loop, and in front of it what it would quantise in each round."""
    params, is_scan = loop.params, loop.primitive.name == "scan"
    before = 0 if is_scan else params["cond_nconsts"]
    constants = scan_counts(params)[0] if is_scan else params["body_nconsts"]
    name = "jaxpr" if is_scan else "body_jaxpr"
    count = len(open_jaxpr(params[name]).invars)
    found = _lift(params[name], [i < constants for i in range(count)], how)
    if not found.lifted:
        return [loop]
    moved = _Clones(loop, open_jaxpr(params[name]).invars, loop.invars[before:])
    eqns = moved.add(_needed(found.eqns, found.lifted))
    own = open_jaxpr(found.body).invars
    ins = [*own[:constants], *own[count:], *own[constants:count]]
    end = before + constants
    operands = [*loop.invars[:end], *moved.read(found.lifted), *loop.invars[end:]]
    changed = {**more_constants(params, len(found.lifted)), name: with_operands(found.body, ins)}
    return [*eqns, loop.replace(invars=operands, params=changed)]


def may_leave(eqn: Any, fixed: Collection[Var]) -> bool:
    """Whether an equation may run in front of a loop: it is cheap, and reads nothing but what stays the same."""
    traits = traits_of(eqn.primitive)
    if eqn.effects or describe(eqn) is not None or not (traits.cheap or traits.moves or traits.passes_on):
        return False
    return all(isinstance(v, Literal) or v in fixed for v in eqn.invars)


class _Lifted(NamedTuple):
    """A body without its quantising equations that don't change, and these."""

    body: Jaxpr  # it takes the results of these equations after its own operands
    eqns: list[Any]  # all equations that don't change, of the body's operands
    lifted: list[Any]  # the results that the body takes
    outs: list[Any]  # the results of the body as results of `eqns`; None: they change


def _lift(jaxpr: Jaxpr, fixed: Sequence[bool], how: _How) -> _Lifted:
    """Take apart a body whose operands are fixed or change from round to round."""
    return how.known.get(jaxpr, (tuple(fixed), how.in_map), lambda: _take_apart(jaxpr, fixed, how))


def _take_apart(jaxpr: Jaxpr, fixed: Sequence[bool], how: _How) -> _Lifted:
    body = open_jaxpr(jaxpr)
    parts = _Parts([v for v, same in zip(body.invars, fixed, strict=True) if same], how)
    for eqn in body.eqns:
        parts.take(eqn)
    outs = [v if isinstance(v, Literal) else parts.fixed.get(v) for v in body.outvars]
    if not parts.taken:
        return _Lifted(jaxpr, parts.eqns, [], outs)
    new = with_operands(with_equations(jaxpr, parts.left), [*body.invars, *parts.taken])
    return _Lifted(new, parts.eqns, parts.lifted, outs)


class _Parts:
    """The equations of a body on their way out of it."""

    def __init__(self, fixed: Sequence[Var], how: _How):
        self._how = how
        self.fixed: dict[Var, Any] = {v: v for v in fixed}  # variables of the body, and what they are outside
        self.eqns: list[Any] = []  # outside
        self.left: list[Any] = []  # inside
        self.taken: dict[Var, None] = {}  # new operands of the body
        self.lifted: list[Any] = []  # and what they are outside
        self._made: dict[Any, Any] = {}  # quantising equations outside, to quantise a value once
        self._same: dict[Any, Any] = {}  # variables outside that have the value of another

    def take(self, eqn: Any) -> None:
        if way := self._how.way_out(eqn):
            self._through(eqn, way)
            return
        if self._how.of_program and is_quantized(eqn.primitive):
            eqn = keeping_rounded(eqn, self.taken)
        if not may_leave(eqn, self.fixed):
            self.left.append(eqn)
            return
        names = {v: self.fixed[v] for v in eqn.invars if not isinstance(v, Literal)}
        outs = self._add(None, [eqn], names, eqn.outvars)
        self.fixed.update(zip(eqn.outvars, outs, strict=True))
        if eqn.primitive in self._how.kinds:
            self.taken |= dict.fromkeys(eqn.outvars)
            self.lifted += outs
        else:
            self.left.append(eqn)

    def _is_fixed(self, atom: Any) -> bool:
        return isinstance(atom, Literal) or atom in self.fixed

    def _add(self, around: Any, eqns: Sequence[Any], names: dict[Var, Any], outs: Sequence[Any]) -> list[Any]:
        clones = _Clones(around, list(names), list(names.values()))
        for eqn in eqns:
            (clone,) = clones.add([eqn])
            first = self._first(clone)
            if first is clone:
                self.eqns.append(clone)
            else:
                clones.rename(eqn.outvars, first.outvars)
        return clones.read(outs)

    def _first(self, eqn: Any) -> Any:
        """The equation, or one that was there already and gives the same."""
        known = [None if isinstance(v, Literal) else self._same.get(v, v) for v in eqn.invars]
        if _is_identity(eqn):  # `jax.checkpoint` does so with all floats that it keeps
            self._same[eqn.outvars[0]] = known[0]
        if eqn.primitive not in self._how.kinds or None in known:
            return eqn
        if eqn.primitive is QUANTIZE:  # it returns the scale too
            self._same[eqn.outvars[1]] = known[1]
        return self._made.setdefault((eqn.primitive, *known, tuple(eqn.params.items()), eqn.ctx), eqn)

    def _through(self, eqn: Any, way: str) -> None:
        """Out of a function or a checkpoint, or out of a loop whose rounds have operands of their own."""
        ((inside,), fixed) = describe(eqn).bodies, list(map(self._is_fixed, eqn.invars))  # type: ignore[union-attr]
        if way == "scan":
            constants, carries = scan_counts(eqn.params)
            fixed[constants : constants + carries] = [False] * carries
        found = _lift(inside.jaxpr, fixed, self._how)
        ins = open_jaxpr(inside.jaxpr).invars
        names = {v: self._outside(atom) for v, atom, same in zip(ins, eqn.invars, fixed, strict=True) if same}
        if way == "scan":
            lifted, outs = self._mapped(eqn, found, names)
        else:
            results = [v for v in found.outs if v is not None]
            made = self._add(eqn, found.eqns, names, [*found.lifted, *results])
            lifted, rest = made[: len(found.lifted)], iter(made[len(found.lifted) :])
            outs = [None if v is None else next(rest) for v in found.outs]
        self.fixed.update({v: out for v, out in zip(eqn.outvars, outs, strict=True) if out is not None})
        here = [Var(v.aval) for v in lifted]
        self.taken |= dict.fromkeys(here)
        self.lifted += lifted
        if here:
            params = with_more_operands(eqn, way, [found.body], len(here))
            eqn = eqn.replace(invars=[*eqn.invars, *here], params=params)
        self.left.append(eqn)

    def _outside(self, atom: Any) -> Any:
        return atom if isinstance(atom, Literal) else self.fixed[atom]

    def _mapped(self, eqn: Any, found: _Lifted, names: dict[Var, Any]) -> tuple[list[Any], list[Any]]:
        """What is quantised in each round of a loop, by a loop of its own; and stacked results that don't change."""
        (inside,) = describe(eqn).bodies  # type: ignore[union-attr]
        body, (constants, carries) = open_jaxpr(inside.jaxpr), scan_counts(eqn.params)
        whole = set(body.invars[:constants])
        lifted = self._each_round(eqn, body, found.eqns, found.lifted, names, whole)
        names = names | dict(zip(found.lifted, lifted, strict=True))
        outs: list[Any] = [None] * carries
        for out in found.outs[carries:]:
            is_stacked = out is not None and not isinstance(out, Literal) and out not in whole
            outs.append(self._each_round(eqn, body, found.eqns, [out], names, whole)[0] if is_stacked else None)
        return lifted, outs

    def _each_round(
        self, eqn: Any, body: Jaxpr, eqns: Sequence[Any], outs: Sequence[Any], names: dict[Var, Any], whole: set[Var]
    ) -> list[Any]:
        """Stacked results of equations of each round. `names`: what is known; `whole`: the same in all rounds."""
        if all(out in names for out in outs):
            return [names[out] for out in outs]
        needed = _needed(eqns, outs, names)
        read = {v: None for e in needed for v in e.invars if not isinstance(v, Literal) and v in names}
        same, each = ([v for v in read if (v in whole) == is_whole] for is_whole in (True, False))
        inner = closed_jaxpr(body, [*same, *each], outs, needed)

        def run(*operands: Any) -> Any:
            fixed = operands[: len(same)]
            rounds = lambda _, slices: (None, evaluate(inner, [*fixed, *slices]))
            return lax.scan(rounds, None, operands[len(same) :], length=eqn.params["length"])[1]

        traced = jax.make_jaxpr(run)(*(names[v].aval for v in (*same, *each)))
        ins = dict(zip(open_jaxpr(traced).invars, [names[v] for v in (*same, *each)], strict=True))
        return self._add(eqn, open_jaxpr(traced).eqns, ins, open_jaxpr(traced).outvars)


class _Clones:
    """Copies of equations, with variables of their own, outside of the equation whose body had them."""

    def __init__(self, around: Any, variables: Sequence[Var], atoms: Sequence[Any]):
        self._stack = None if around is None else around.source_info.name_stack
        self._names: dict[Var, Any] = dict(zip(variables, atoms, strict=True))

    def add(self, eqns: Sequence[Any]) -> list[Any]:
        return [self._clone(eqn) for eqn in eqns]

    def rename(self, variables: Sequence[Var], atoms: Sequence[Any]) -> None:
        self._names.update(zip(variables, atoms, strict=True))

    def read(self, atoms: Sequence[Any]) -> list[Any]:
        return [atom if isinstance(atom, Literal) else self._names[atom] for atom in atoms]

    def _clone(self, eqn: Any) -> Any:
        ins, outs = self.read(eqn.invars), [Var(v.aval) for v in eqn.outvars]
        self.rename(eqn.outvars, outs)
        info = eqn.source_info
        if self._stack is not None:
            info = info.replace(name_stack=self._stack + info.name_stack)
        return eqn.replace(invars=ins, outvars=outs, source_info=info)


def _is_identity(eqn: Any) -> bool:
    """Whether it rounds to the bits that its operand has."""
    if eqn.primitive is not lax.reduce_precision_p:
        return False
    info = jnp.finfo(eqn.invars[0].aval.dtype)
    return (eqn.params["exponent_bits"], eqn.params["mantissa_bits"]) == (info.nexp, info.nmant)


def _needed(eqns: Sequence[Any], outs: Sequence[Any], known: Collection[Any] = ()) -> list[Any]:
    """The equations that some of their results need, where some variables are known."""
    wanted = {v for v in outs if not isinstance(v, Literal)} - set(known)
    found: list[Any] = []
    for eqn in reversed(eqns):
        if wanted.intersection(eqn.outvars):
            wanted.update(v for v in eqn.invars if not isinstance(v, Literal) and v not in known)
            found.append(eqn)
    return found[::-1]
