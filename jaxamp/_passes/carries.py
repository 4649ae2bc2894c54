"""Let a loop hand on low what is only read low.

    scan((h, c), x -> gates = concatenate([x, h]) @ w; ...)

The state `h` of an LSTM goes from round to round in float32, and each round rounds it for its matmul; so do those who
read the states of all rounds, after the loop. Rounded before it is handed on, it has the same value, and a float32 copy
of each round is neither written nor kept for the backward pass. A state that a round adds to, as the cell `c`, stays in
float32: a rounding in each round would add up. So does one that a round may hand on as it is: its cotangent is a sum
over rounds.

What a loop is given for each round, and rounds only read rounded, is rounded in front of the loop, if low values are
among what it is made of. Parameters are given as they are: their gradients would be rounded.
"""

import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from .._compat import Jaxpr, Literal, Var, open_jaxpr, scan_counts, with_equations, with_operands
from .._jaxpr import Memo, cast_equation, in_dtype
from .._plan.bodies import Entry, with_replaced_bodies
from .._plan.higher_order import describe
from .._plan.more_operands import way_into
from .._plan.plan import Setting
from .._traits import traits_of
from .rounded_reads import Flags, RoundedReads, rounds


def carry_low(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with loops that hand on low values, where only rounded copies of them are read."""
    if not setting.formats.narrows:
        return program
    return _Loops(setting).run(program, (False,) * len(open_jaxpr(program).outvars)).jaxpr


class _Written(NamedTuple):
    """A jaxpr, and which of its operands are only read rounded."""

    jaxpr: Jaxpr
    ins: Flags


class _Loops:
    """Rewrites jaxprs, each once for what is done with its results."""

    def __init__(self, setting: Setting):
        self._formats, self._low, self._known = setting.formats, setting.formats.compute_dtype, Memo()

    def run(self, jaxpr: Jaxpr, outs: Flags) -> _Written:
        """The jaxpr rewritten, if all that reads its results rounds those in `outs`."""
        return self._known.get(jaxpr, outs, lambda: self._run(jaxpr, outs))

    def _run(self, jaxpr: Jaxpr, outs: Flags) -> _Written:
        body, written = open_jaxpr(jaxpr), list[list[Any]]()
        reads, is_made = RoundedReads(body.outvars, outs), _MadeLow(body.eqns, self._low)
        for eqn in reversed(body.eqns):
            new, flags = self._equation(eqn, reads, is_made)
            reads.read(eqn.invars, flags)
            written.append(new)
        eqns = list(itertools.chain.from_iterable(reversed(written)))
        is_old = len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns))
        return _Written(jaxpr if is_old else with_equations(jaxpr, eqns), reads.of(body.invars, unread=True))

    def _equation(self, eqn: Any, reads: RoundedReads, is_made: "_MadeLow") -> tuple[list[Any], Flags]:
        """An equation rewritten, with casts around it, and which of its operands it rounds."""
        entry = describe(eqn)
        results = reads.of(eqn.outvars, unread=True)
        if entry is None:
            return [eqn], rounds(eqn, results, self._low)
        if entry.lazy or traits_of(eqn.primitive).own_jvp:
            return [eqn], (False,) * len(eqn.invars)
        if eqn.primitive.name == "scan":
            return self._loop(eqn, results, reads, is_made)
        return self._entered(eqn, entry, results)

    def _entered(self, eqn: Any, entry: Entry, results: Flags) -> tuple[list[Any], Flags]:
        flags, bodies = [True] * len(eqn.invars), []
        carried_out = {result for _, result in entry.carries}
        for body in entry.bodies:
            count = len(open_jaxpr(body.jaxpr).outvars)
            outs = tuple(results[r] and r not in carried_out for r in body.results) or (False,) * count
            written = self.run(body.jaxpr, outs)
            bodies.append(written.jaxpr)
            for operand, flag in zip(body.operands, written.ins, strict=True):
                flags[operand] = flags[operand] and flag
        for operand, _ in entry.carries:
            flags[operand] = False
        if any(new is not body.jaxpr for new, body in zip(bodies, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_replaced_bodies(eqn, entry, bodies))
        return [eqn], tuple(flags)

    def _loop(self, eqn: Any, results: Flags, reads: RoundedReads, is_made: "_MadeLow") -> tuple[list[Any], Flags]:
        jaxpr, (constants, carries) = eqn.params["jaxpr"], scan_counts(eqn.params)
        own = open_jaxpr(jaxpr).outvars
        low = [flag and self._formats.may_lower(v) for flag, v in zip(results, own, strict=True)]
        read = self.run(jaxpr, (*(False for _ in range(carries)), *low[carries:])).ins[constants:]
        low[:carries] = map(operator.and_, low[:carries], read)
        written = self.run(jaxpr, tuple(low))
        handed_on = [i for i, flag in enumerate(low) if flag]
        of_rounds = range(constants + carries, len(eqn.invars))
        given = [i for i in of_rounds if written.ins[i] and self._is_wide(eqn.invars[i]) and is_made(eqn.invars[i])]
        same = (False,) * constants  # their cotangents are summed over all rounds
        flags = [*same, *low[:carries], *written.ins[constants + carries :]]
        if written.jaxpr is not jaxpr:
            eqn = eqn.replace(params={**eqn.params, "jaxpr": written.jaxpr})
        return (self._lowered(eqn, handed_on, given, reads) if handed_on or given else [eqn]), tuple(flags)

    def _is_wide(self, atom: Any) -> bool:
        is_one = not isinstance(atom, Literal) and self._formats.may_lower(atom) and not self._formats.is_narrow
        return is_one and atom.aval.dtype != self._low

    def _lowered(self, loop: Any, places: Sequence[int], given: Sequence[int], reads: RoundedReads) -> list[Any]:
        """A loop that hands on some of its results low, and is given some operands low, with casts around it."""
        jaxpr, (constants, carries) = loop.params["jaxpr"], scan_counts(loop.params)
        body, low = open_jaxpr(jaxpr), self._low
        ins, outs, operands, results = list(body.invars), list(body.outvars), list(loop.invars), list(loop.outvars)
        in_front, last, after = list[Any](), list[Any](), list[Any]()
        for at in [*(constants + i for i in places if i < carries), *given]:
            ins[at], operands[at] = in_dtype(ins[at], low), in_dtype(operands[at], low)
            in_front.append(cast_equation(loop, loop.invars[at], operands[at]))
        for i in places:
            outs[i], results[i] = in_dtype(body.outvars[i], low), in_dtype(loop.outvars[i], low)
            last.append(cast_equation(loop, body.outvars[i], outs[i]))
            if reads.is_read(loop.outvars[i]):
                after.append(cast_equation(loop, results[i], loop.outvars[i]))
        instead = {wide: new for wide, new in zip(body.invars, ins, strict=True) if wide is not new}
        eqns = [*_reading(body.eqns, instead, loop), *last]
        new = with_operands(with_equations(jaxpr, eqns, outs), ins)
        return [*in_front, loop.replace(invars=operands, outvars=results, params={**loop.params, "jaxpr": new}), *after]


class _MadeLow:
    """Whether low values are among what variables of some equations are made of."""

    def __init__(self, eqns: Sequence[Any], low: Any):
        self._makers, self._low = {v: eqn for eqn in eqns for v in eqn.outvars}, low

    def __call__(self, v: Var) -> bool:
        waiting, seen = [v], {v}
        while waiting:
            v = waiting.pop()
            if getattr(v.aval, "dtype", None) == self._low:
                return True
            made_of = self._makers[v].invars if v in self._makers else ()
            new = {u for u in made_of if not isinstance(u, Literal) and u not in seen}
            waiting += new
            seen |= new
        return False


def _reading(eqns: Sequence[Any], given: dict[Var, Var], like: Any) -> list[Any]:
    """Equations that read low variables in place of others, which they widen first.

    A checkpoint widens them inside, so that it keeps the low ones.
    """
    found: list[Any] = []
    for eqn in eqns:
        entry = describe(eqn) if way_into(eqn) == "checkpoint" else None
        if entry is not None and any(_low_of(atom, given) is not None for atom in eqn.invars):
            (body,) = entry.bodies
            ins = [_low_of(eqn.invars[k], given) for k in body.operands]
            own = open_jaxpr(body.jaxpr)
            inside = {v: Var(new.aval) for v, new in zip(own.invars, ins, strict=True) if new is not None}
            jaxpr = with_equations(body.jaxpr, _reading(own.eqns, inside, eqn))
            jaxpr = with_operands(jaxpr, [inside.get(v, v) for v in own.invars])
            atoms = [atom if new is None else new for atom, new in zip(eqn.invars, ins, strict=True)]
            eqn = eqn.replace(invars=atoms, params=with_replaced_bodies(eqn, entry, [jaxpr]))
        found.append(eqn)
    return [*(cast_equation(like, new, wide) for wide, new in given.items()), *found]


def _low_of(atom: Any, given: dict[Var, Var]) -> Var | None:
    return None if isinstance(atom, Literal) else given.get(atom)
