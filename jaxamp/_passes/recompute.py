"""Compute again in the backward pass what is cheap to make.

JAX keeps for the backward pass what each nonlinear operation needs, in float32. Here a program is cut between matmuls,
where the fewest bytes are alive: between two layers of a network. A section keeps what goes into it and what is
expensive to make (`residuals.py`), results of matmuls above all. The backward pass computes the rest again. Where
sections hand on many values, as inside of a derivative that the function takes itself, each must save enough
(`savings.py`).

A section is a jitted function, which JAX remembers: equal layers of a network are differentiated and lowered once, and
not again in the next trace. Source lines and scopes are those of the equations.

Where a program is cut depends on it alone, not on what was traced before: all processes of a cluster must arrive at the
same program.
"""

import functools
import itertools
import weakref
from collections.abc import Collection, Hashable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import numpy as np
from jax import lax

from .._compat import (
    Jaxpr,
    Literal,
    Var,
    closed_jaxpr,
    inside_hi,
    is_mark,
    open_jaxpr,
    same_context,
    trace_context,
    with_equations,
)
from .._formats import float_dtype
from .._jaxpr import Memo, equation_at
from .._plan.bodies import functions_in, with_bodies
from .._plan.checkpoints import checkpoint_equation, is_ours
from .._plan.higher_order import describe
from .._plan.plan import Setting
from .._plan.residuals import is_cheap_or_activation, is_work, makes_complex
from .._primitives.low_copy import LOW_COPY, WIDENED
from .._structure import Structure, structure_of
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .savings import Savings

_REMEMBERED = 1024  # sections
_FEW = 2  # arrays that a layer hands on: the stream, and perhaps what joins it later. Passes of derivatives have more.
# (jaxpr, how it is cut) -> with sections. An entry lives as long as the jaxpr: JAX remembers what it made of a body.
_CUT: weakref.WeakKeyDictionary[Any, dict[Hashable, Jaxpr]] = weakref.WeakKeyDictionary()


def recompute(program: Jaxpr, setting: Setting) -> Jaxpr:
    """Put the equations of a program, and of functions inside of it, into sections that keep little."""
    if setting.keep == "all" or not setting.formats.narrows:
        return program
    return _Cutter(setting).cut(program)


class _Section(NamedTuple):
    """Neighbouring equations; `inside`: none of them is a boundary."""

    eqns: list[Any]
    inside: bool


class _Inside(NamedTuple):
    """What is inside of a body."""

    has_boundary: bool
    matmuls: int
    has_low: bool


class _Cutter:
    def __init__(self, setting: Setting):
        self._low = setting.formats.compute_dtype
        self._whole = setting.keep == "matmuls"  # no cuts, and loops in sections
        self._known = Memo()

    def cut(self, jaxpr: Jaxpr) -> Jaxpr:
        """A jaxpr, open or closed, with sections."""
        found, key = _CUT.setdefault(jaxpr, {}), (self._low, self._whole, trace_context())
        if key not in found:
            found[key] = self._cut(jaxpr)
        return found[key]

    def _cut(self, jaxpr: Jaxpr) -> Jaxpr:
        body = open_jaxpr(jaxpr)
        runs = list(self._runs(body.eqns))
        sections = [section for run, outs in _with_results(body, runs) for section in self._sections(run, outs)]
        widened = _widened(body, self._low)
        sections = [_reading_low(section, widened) if section.inside else section for section in sections]
        found = list(_with_results(body, sections))
        handed = ([v for v in outs if v not in widened] for section, outs in found if section.inside)
        is_sure = self._whole or all(len(outs) <= _FEW for outs in handed)
        savings = None if is_sure else Savings(jaxpr, [section.eqns for section in sections])
        eqns: list[Any] = []
        for i, (section, outs) in enumerate(found):
            if not section.inside:
                eqns += map(self._with_sections_inside, section.eqns)
            elif self._pays(section.eqns) and (savings is None or savings.pays(i, outs)):
                eqns.append(_equation(body, section.eqns, outs, self._whole))
            else:
                eqns += section.eqns
        return with_equations(jaxpr, eqns)

    def _runs(self, eqns: Sequence[Any]) -> Iterator[_Section]:
        """Neighbouring equations under one context, and the boundaries between them."""
        run: list[Any] = []
        for eqn in eqns:
            inside = not self._is_boundary(eqn)
            if run and not (inside and same_context(eqn.ctx, run[-1].ctx)):
                yield _Section(run, True)
                run = []
            if inside:
                run.append(eqn)
            else:
                yield _Section([eqn], False)
        if run:
            yield _Section(run, True)

    def _is_boundary(self, eqn: Any) -> bool:
        """Whether it is not part of a section: it has effects, loops or a checkpoint, or sections of its own.

        Or a user's backward rule, which decides what it keeps, and may have effects. Or complex results, which
        `jax.checkpoint` can't keep (0.10 to 0.12). Or the low copy of a parameter, which an `amp` inside has made to be
        kept.
        """
        traits = traits_of(eqn.primitive)
        if eqn.effects or makes_complex(eqn) or traits.own_vjp or eqn.primitive is LOW_COPY:
            return True
        hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
        if hi is not None and hi.kind == "custom_vjp":
            return True
        is_checkpoint = traits.checkpoints or (hi is not None and hi.kind == "checkpoint")
        inside = [self._inside(body) for body in functions_in(eqn)]
        if self._whole:
            return (is_checkpoint and not is_ours(eqn)) or any(found.has_boundary for found in inside)
        is_call = traits.plain_call or traits.own_jvp or (hi is not None and not is_checkpoint)
        if not is_call:
            return bool(inside)
        is_large = traits.plain_call and sum(found.matmuls for found in inside) > 1
        return is_large or any(found.has_boundary for found in inside)

    def _inside(self, body: Jaxpr) -> "_Inside":
        def found() -> _Inside:
            eqns = open_jaxpr(body).eqns
            has_low = any(map(self._has_low, eqns))
            return _Inside(any(map(self._is_boundary, eqns)), sum(map(self._matmuls, eqns)), has_low)

        return self._known.get(body, None, found)

    def _matmuls(self, eqn: Any) -> int:
        """How many matmuls there are in an equation."""
        traits = traits_of(eqn.primitive)
        return (
            sum(self._inside(body).matmuls for body in functions_in(eqn))
            if traits.plain_call
            else int(traits.matrix_unit)
        )

    def _has_low(self, eqn: Any) -> bool:
        """Whether it reads or makes a low value, or does so inside."""
        dtypes = (float_dtype(v.aval) for v in (*eqn.invars, *eqn.outvars))
        return self._low in dtypes or any(self._inside(body).has_low for body in functions_in(eqn))

    def _with_sections_inside(self, eqn: Any) -> Any:
        """A boundary, with sections in its bodies if it may have them."""
        if not traits_of(eqn.primitive).transparent:
            return eqn
        entry = describe(eqn)
        assert entry is not None
        return eqn.replace(params=with_bodies(eqn, entry, [self.cut(body.jaxpr) for body in entry.bodies]))

    def _sections(self, run: _Section, outs: Collection[Var]) -> Iterator[_Section]:
        is_cut = run.inside and not self._whole and any(map(is_work, run.eqns))
        ends = self._cuts(run.eqns, outs) if is_cut else []
        for begin, end in itertools.pairwise([0, *ends, len(run.eqns)]):
            yield _Section(run.eqns[begin:end], run.inside)

    def _pays(self, eqns: Sequence[Any]) -> bool:
        """Whether there is something to compute again, and a low value to compute it from."""
        return any(map(self._has_low, eqns)) and any(map(is_work, eqns))

    def _cuts(self, eqns: Sequence[Any], outs: Collection[Var]) -> list[int]:
        """Where sections end: between two matmuls, after the equation with the fewest bytes alive, if there are fewer
        than between the matmuls before or after, and not more. What is alive past the first matmul, such as an
        embedding that the first layer is added to, counts as bytes before it."""
        alive = list(_bytes_alive(eqns, outs))
        matmuls = [i for i, eqn in enumerate(eqns) if self._matmuls(eqn)]
        places = []
        for a, b in itertools.pairwise(matmuls):
            place = min(range(a, b), key=alive.__getitem__)
            # A cast belongs to the matmul before it, and an activation to a sum: only its result is read twice.
            # So does an activation whose result is kept: the backward pass does not read the matmul's.
            may_follow = _passes_on if place == a else is_cheap_or_activation
            kept = next((i for i in range(a + 1, b) if _keeps_activation(eqns[i])), None)
            if place == a and kept is not None and alive[kept] == alive[a]:
                place = kept
            while alive[place + 1] == alive[place] and may_follow(eqns[place + 1]):
                place += 1
            places.append(place)
        past_first = _bytes_past(eqns, outs, matmuls[0], places[0]) if places else 0
        fewest = [*([past_first] if past_first else []), *(alive[place] for place in places)]
        ends = []
        for k, place in enumerate(places, len(fewest) - len(places)):
            around = [fewest[j] for j in (k - 1, k + 1) if 0 <= j < len(fewest)]
            if around and alive[place] <= min(around) and alive[place] < max(around):
                ends.append(place + 1)
        return ends


def _widened(body: Jaxpr, low: Any) -> dict[Var, Any]:
    """Variables that are low values in float32, with the equations that widen these."""
    casts = (eqn for eqn in body.eqns if eqn.primitive is lax.convert_element_type_p)
    return {
        eqn.outvars[0]: eqn
        for eqn in casts
        if not isinstance(eqn.invars[0], Literal)
        and (eqn.invars[0].aval.dtype, eqn.outvars[0].aval.dtype) == (low, np.float32)
    }


def _reading_low(section: _Section, widened: dict[Var, Any]) -> _Section:
    """A section that widens low values itself, where another one has widened them.

    So the low ones are kept for it. Their gradients are still added in float32, where they were widened first.
    """
    made = {v for eqn in section.eqns for v in eqn.outvars}
    read = dict.fromkeys(v for eqn in section.eqns for v in eqn.invars if not isinstance(v, Literal))
    again = {v: Var(v.aval) for v in read if v in widened and v not in made}
    if not again:
        return section
    casts = [equation_at(section.eqns[0], WIDENED, [v, *widened[v].invars], new) for v, new in again.items()]
    instead = lambda v: v if isinstance(v, Literal) else again.get(v, v)
    eqns = [eqn.replace(invars=list(map(instead, eqn.invars))) for eqn in section.eqns]
    return section._replace(eqns=casts + eqns)


def _keeps_activation(eqn: Any) -> bool:
    traits = traits_of(eqn.primitive)
    return traits.nonlinear and traits.kept is not None and traits.derivative_of_result


def _passes_on(eqn: Any) -> bool:
    return traits_of(eqn.primitive).passes_on


def _with_results(body: Jaxpr, sections: Sequence[_Section]) -> Iterator[tuple[_Section, list[Var]]]:
    """Each section with the variables that are read after it."""
    reads = ((v, i) for i, section in enumerate(sections) for eqn in section.eqns for v in eqn.invars)
    last = {v: i for v, i in reads if not isinstance(v, Literal)}
    last |= {v: len(sections) for v in body.outvars if not isinstance(v, Literal)}
    for i, section in enumerate(sections):
        yield section, [v for eqn in section.eqns for v in eqn.outvars if last.get(v, -1) > i]


def _bytes_alive(eqns: Sequence[Any], outs: Collection[Var]) -> Iterator[int]:
    """After each equation, the bytes of results that are read later; `outs` are read after all of them."""
    last = _last_reads(eqns, outs)
    total, freed = 0, [0] * (len(eqns) + 1)
    for i, eqn in enumerate(eqns):
        for v in eqn.outvars:
            if v in last:
                total += _bytes(v)
                freed[last[v]] += _bytes(v)
        total -= freed[i]
        yield total


def _bytes_past(eqns: Sequence[Any], outs: Collection[Var], first: int, place: int) -> int:
    """The bytes of arrays that are made before the equation `first` and read after the one at `place`."""
    last = _last_reads(eqns, outs)
    made = (v for eqn in eqns[:first] for v in eqn.outvars if last.get(v, -1) > place)
    return sum(_bytes(v) for v in made if size_of(v.aval) > 1)


def _last_reads(eqns: Sequence[Any], outs: Collection[Var]) -> dict[Var, int]:
    last = {v: i for i, eqn in enumerate(eqns) for v in eqn.invars if not isinstance(v, Literal)}
    return last | dict.fromkeys(outs, len(eqns))


def _bytes(v: Var) -> int:
    return size_of(v.aval) * getattr(getattr(v.aval, "dtype", None), "itemsize", 0)


# -- the equation of a section


def _equation(body: Jaxpr, eqns: Sequence[Any], outs: list[Var], matmuls_alone: bool) -> Any:
    """One equation in place of several. It is a jitted checkpoint, or a checkpoint, if JAX must not remember it."""
    made = {v for eqn in eqns for v in eqn.outvars}
    ins = list(dict.fromkeys(v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal) and v not in made))
    scope, inside = _without_scope(eqns)
    structure = structure_of(closed_jaxpr(body, ins, outs, inside))
    if structure is not None:
        eqn = _remembered(structure, trace_context(), matmuls_alone)
    else:
        whole = closed_jaxpr(body, ins, outs, eqns)
        eqn, scope = checkpoint_equation(whole, matmuls_alone=matmuls_alone), scope[:0]
    info = eqns[0].source_info.replace(name_stack=scope)
    return eqn.replace(invars=ins, outvars=outs, source_info=info, ctx=eqns[0].ctx)


@functools.lru_cache(_REMEMBERED)
def _remembered(structure: Structure, context: Any, matmuls_alone: bool) -> Any:
    """An equation of a jitted checkpoint, traced under a context."""
    body = open_jaxpr(structure.jaxpr)
    eqn = checkpoint_equation(structure.jaxpr, matmuls_alone=matmuls_alone).replace(
        invars=body.invars, outvars=body.outvars
    )
    checkpointed = with_equations(structure.jaxpr, [eqn])

    def section(*operands: Any) -> list[Any]:
        return jec.jaxpr_as_fun(checkpointed)(*operands)

    (eqn,) = open_jaxpr(jax.make_jaxpr(jax.jit(section))(*(v.aval for v in body.invars))).eqns
    return eqn


def _without_scope(eqns: Sequence[Any]) -> tuple[Any, list[Any]]:
    """The named scopes that equations have in common, and the equations as they are inside of these.

    Casts between two equations have no scope.
    """
    all_stacks = [(eqn.source_info.name_stack, traits_of(eqn.primitive).passes_on) for eqn in eqns]
    stacks = [stack for stack, passes_on in all_stacks if stack.stack or not passes_on] or [all_stacks[0][0]]
    columns = zip(*(stack.stack for stack in stacks), strict=False)
    alike = (len(set(entries)) == 1 and not is_mark(entries[0]) for entries in columns)
    common = sum(itertools.takewhile(bool, alike))
    return stacks[0][:common], [_inside_of_scopes(eqn, common) for eqn in eqns] if common else list(eqns)


def _inside_of_scopes(eqn: Any, common: int) -> Any:
    """An equation without the outermost of its scopes."""
    info = eqn.source_info
    return eqn.replace(source_info=info.replace(name_stack=info.name_stack[common:]))
