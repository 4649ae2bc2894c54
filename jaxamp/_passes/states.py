"""Let loops keep rounded copies of their float32 states for the backward pass.

    scan(state, (decay, k, v, q) -> state * decay + outer(k, v); q @ state)

A state that each round adds to is float32, or a rounding in each round would add up. The backward pass needs the state
of each round too: for the derivative by the decay, and for that of the matmul that reads it, rounded. JAX would stack
the float32 states for it. Here it gets them rounded. From round to round the state goes as before, so that no error
adds up. Derivatives in forward mode read the rounded state as well.

That is how a linear attention, a state space or an mLSTM hands its state from chunk to chunk. Left alone is a state
that is read by something that bends, such as the cell of an LSTM: its float32 value would be kept beside the copy. So
is one that is scaled, and to which anything exact is added, such as an average of data: the derivative by its factor
may be the small difference of the state and of what is added. Where that is made of low values, it has the error of a
rounding anyway. And so is float16: a state may be beyond its range.
"""

import collections
import itertools
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

from jax import lax

from .._compat import Jaxpr, Literal, Var, open_jaxpr, scan_counts, with_equations
from .._formats import float_dtype
from .._jaxpr import Memo, cast_equation, equation_at, in_dtype, inlined
from .._plan.bodies import with_replaced_bodies
from .._plan.checkpoints import is_ours
from .._plan.higher_order import describe, with_rewritten_bodies
from .._plan.more_operands import way_into
from .._plan.plan import Setting
from .._primitives.kept import KEPT
from .._primitives.low_copy import WIDENED
from .._primitives.matmul import is_mixed
from .._primitives.scaled_state import SCALED_STATE
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .round_once import reading_copies


def keep_states_low(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with loops that keep rounded copies of their states."""
    if setting.keep == "all" or not setting.formats.narrows or setting.formats.is_narrow:
        return program
    return _Loops(setting).rewritten(program)


class _Reads(NamedTuple):
    """What reads a state in a round: places of equations."""

    scaled: dict[int, int]  # products, and which factor the state is
    rounded: frozenset[int]  # matmuls that round it, and casts
    moved: frozenset[int]  # what moves its entries


class _Rounded:
    """Values with the error of a rounding: low ones, and what products, sums and moves make of them. And numbers."""

    def __init__(self, eqns: Sequence[Any], low: Any):
        self._low, self._made, self._numbers = low, set[Var](), set[Var]()
        for eqn in eqns:
            traits, atoms = traits_of(eqn.primitive), eqn.invars
            is_sum = traits.sum or traits.moves or traits.passes_on or eqn.primitive in (lax.neg_p, lax.select_n_p)
            has_low = any(map(self._has_error, atoms))
            if is_mixed(eqn.primitive) or (has_low and (traits.product or (is_sum and all(v in self for v in atoms)))):
                self._made.update(eqn.outvars)
            elif is_sum and all(map(self._is_number, atoms)):
                self._numbers.update(eqn.outvars)

    def _has_error(self, atom: Any) -> bool:
        return not isinstance(atom, Literal) and (float_dtype(atom.aval) == self._low or atom in self._made)

    def _is_number(self, atom: Any) -> bool:
        return isinstance(atom, Literal) or atom in self._numbers

    def __contains__(self, atom: Any) -> bool:
        return self._is_number(atom) or float_dtype(atom.aval) is None or self._has_error(atom)


class _Loops:
    def __init__(self, setting: Setting):
        self._formats, self._low, self._known = setting.formats, setting.formats.compute_dtype, Memo()

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        return self._known.get(jaxpr, None, lambda: self._rewrite(jaxpr))

    def _rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        body = open_jaxpr(jaxpr)
        eqns = [self._loop(with_rewritten_bodies(eqn, self.rewritten)) for eqn in body.eqns]
        return jaxpr if all(map(operator.is_, eqns, body.eqns)) else with_equations(jaxpr, eqns)

    def _loop(self, eqn: Any) -> Any:
        """An equation; if it is a loop, with rounds that keep their states low."""
        if eqn.primitive.name != "scan":
            return eqn
        jaxpr, (constants, carries) = eqn.params["jaxpr"], scan_counts(eqn.params)
        body = open_jaxpr(jaxpr)
        states = {v for v in body.invars[constants : constants + carries] if self._may_round(v)}
        if not states:
            return eqn
        rounded = self._rounded_alone(body)
        both = [(old, self._round(old, states, rounded)) for old in body.eqns]
        given = {v for old, new in both if new is not old for v in new.outvars}
        if not given:
            return eqn
        eqns = [new for old, new in both if new is not old or given.isdisjoint(new.outvars)]
        return eqn.replace(params={**eqn.params, "jaxpr": with_equations(jaxpr, eqns)})

    def _rounded_alone(self, body: Any) -> dict[Var, Var]:
        """The variables of an open jaxpr that nothing reads but a cast, and what that gives."""
        read = [*(v for eqn in body.eqns for v in eqn.invars), *body.outvars]
        times = collections.Counter(v for v in read if not isinstance(v, Literal))
        casts = (eqn for eqn in body.eqns if self._is_cast(eqn) and not isinstance(eqn.invars[0], Literal))
        return {eqn.invars[0]: eqn.outvars[0] for eqn in casts if times[eqn.invars[0]] == 1}

    def _may_round(self, v: Var) -> bool:
        return float_dtype(v.aval) == "float32" and size_of(v.aval) > 1 and self._formats.may_lower(v)

    def _round(self, eqn: Any, states: set[Var], rounded: dict[Var, Var]) -> Any:
        """A checkpoint of ours around a round, with states that it keeps low.

        What it returns of these and is rounded after it, it returns rounded: XLA sees that it is what is kept.
        """
        places = [i for i, v in enumerate(eqn.invars) if not isinstance(v, Literal) and v in states]
        if not places or way_into(eqn) != "checkpoint" or not is_ours(eqn):
            return eqn
        entry = describe(eqn)
        assert entry is not None
        jaxpr = entry.bodies[0].jaxpr
        body = open_jaxpr(jaxpr)
        eqns, copies = self._keeping(eqn, body, [body.invars[i] for i in places])
        if not copies:
            return eqn
        low = [i for i, v in enumerate(body.outvars) if not isinstance(v, Literal) and v in copies]
        low = [i for i in low if eqn.outvars[i] in rounded]
        inside, outside = list(body.outvars), list(eqn.outvars)
        for i in low:
            inside[i], outside[i] = copies[inside[i]], rounded[outside[i]]
        new = with_equations(jaxpr, eqns, inside)
        return eqn.replace(outvars=outside, params=with_replaced_bodies(eqn, entry, [new]))

    def _keeping(self, like: Any, body: Any, states: Sequence[Var]) -> tuple[list[Any], dict[Var, Var]]:
        """A round that keeps copies of those of its operands for which copies are enough, and these copies."""
        eqns = list(itertools.chain.from_iterable(map(_with_inlined, body.eqns)))
        known = _Rounded(eqns, self._low)
        found = {state: reads for state in states if (reads := self._reads(eqns, known, state)) is not None}
        times = collections.Counter(i for reads in found.values() for i in reads.scaled)  # twice: one state by another
        found = {state: reads for state, reads in found.items() if all(times[i] == 1 for i in reads.scaled)}
        return self._reading_copies(like, eqns, found)

    def _reads(self, eqns: Sequence[Any], known: _Rounded, state: Var) -> _Reads | None:
        """What reads a state; None if a copy is not enough, because something needs its float32 value to be derived."""
        same, linear = {state}, set[Var]()  # what holds its entries; what is made of these by sums and products
        is_added_to = False  # by something exact
        scaled, rounded, moved = dict[int, int](), set[int](), set[int]()
        for i, eqn in enumerate(eqns):
            places = [k for k, v in enumerate(eqn.invars) if not isinstance(v, Literal) and (v in same or v in linear)]
            if not places:
                continue
            is_same = all(eqn.invars[k] in same for k in places)
            if is_same and _moves(eqn):
                same.update(eqn.outvars)
                moved.add(i)
            elif is_same and self._rounds(eqn, places):
                rounded.add(i)
            elif _is_linear(eqn, places):
                others = (v for k, v in enumerate(eqn.invars) if k not in places)
                is_added_to = is_added_to or not all(v in known for v in others)
                linear.update(eqn.outvars)
            elif is_same and _scales(eqn, places):
                scaled[i] = places[0]
                linear.update(eqn.outvars)
            else:
                return None
        if not (scaled or rounded) or (scaled and is_added_to):
            return None
        return _Reads(scaled, frozenset(rounded), frozenset(moved))

    def _rounds(self, eqn: Any, places: Sequence[int]) -> bool:
        if self._is_cast(eqn):
            return True
        if not is_mixed(eqn.primitive):
            return False
        return eqn.params["compute_dtype"] == self._low and all(
            k < 2 and not eqn.params["mixing"].exact[k] for k in places
        )

    def _is_cast(self, eqn: Any) -> bool:
        return eqn.primitive is lax.convert_element_type_p and eqn.params["new_dtype"] == self._low

    def _reading_copies(
        self, like: Any, eqns: Sequence[Any], found: dict[Var, _Reads]
    ) -> tuple[list[Any], dict[Var, Var]]:
        """Equations that read rounded copies of states where that is enough, and these copies."""
        copies, made = dict[Var, Var](), list[Any]()
        for state in found:
            rounded, copies[state] = (in_dtype(state, self._low) for _ in range(2))
            made.append(cast_equation(like, state, rounded))
            made.append(equation_at(like, KEPT, [rounded], copies[state]))
        scaled = {i: k for reads in found.values() for i, k in reads.scaled.items()}
        rounds = frozenset[int]().union(*(reads.rounded for reads in found.values()))
        moved = frozenset[int]().union(*(reads.moved for reads in found.values()))
        instead = dict[Var, Var]()  # states with the values of their copies
        for i, eqn in enumerate(eqns):
            if i in moved:
                (v,), (out,) = eqn.invars, eqn.outvars
                copies[out] = in_dtype(out, self._low)
                made.append(eqn.replace(invars=[copies[v]], outvars=[copies[out]]))
            elif i in scaled:
                v, factor = eqn.invars[scaled[i]], eqn.invars[1 - scaled[i]]
                eqn = equation_at(eqn, SCALED_STATE, [factor, v, copies[v]], eqn.outvars[0])
            elif i in rounds and is_mixed(eqn.primitive):
                eqn = reading_copies(eqn, copies.get, instead, made, WIDENED)
            elif i in rounds:
                (v,) = eqn.invars
                both = Var(v.aval)
                made.append(equation_at(eqn, WIDENED, [v, copies[v]], both))
                eqn = eqn.replace(invars=[both])
            made.append(eqn)
        return made, copies


def _moves(eqn: Any) -> bool:
    """Whether it moves or repeats the entries of one array."""
    traits = traits_of(eqn.primitive)
    is_move = traits.keeps_all_entries or eqn.primitive is lax.broadcast_in_dim_p
    return is_move and len(eqn.invars) == len(eqn.outvars) == 1


def _is_linear(eqn: Any, places: Sequence[int]) -> bool:
    """Whether its derivative by these operands needs no value."""
    traits = traits_of(eqn.primitive)
    if eqn.primitive is lax.select_n_p:
        return 0 not in places
    if traits.product:
        (place, *more) = places
        is_number = not more and isinstance(eqn.invars[1 - place], Literal)
        return is_number and (place == 0 or eqn.primitive is lax.mul_p)
    return traits.sum or _moves(eqn) or eqn.primitive in (lax.neg_p, lax.reduce_sum_p)


def _scales(eqn: Any, places: Sequence[int]) -> bool:
    """Whether it multiplies an array by something else."""
    is_product = eqn.primitive is lax.mul_p and len(places) == 1
    return is_product and size_of(eqn.invars[places[0]].aval) == size_of(eqn.outvars[0].aval)


def _with_inlined(eqn: Any) -> list[Any]:
    """The equations of a jitted function, with variables of their own; of another equation, itself.

    One that says more than its body, such as how arrays are split over devices, stays as it is.
    """
    if eqn.primitive.name != "jit" or not _is_plain_call(eqn):
        return [eqn]
    scope, found = eqn.source_info.name_stack, list[Any]()
    for inner in inlined(eqn.params["jaxpr"], eqn.invars, eqn.outvars):
        info = inner.source_info
        found += _with_inlined(inner.replace(source_info=info.replace(name_stack=scope + info.name_stack)))
    return found


def _is_plain_call(eqn: Any) -> bool:
    """Whether a jitted function is its body: each result is made in it, and nothing is said of devices or compilers."""
    body, params = open_jaxpr(eqn.params["jaxpr"]), eqn.params
    said = [*params.get("in_shardings", ()), *params.get("out_shardings", ())]
    if any(type(each).__name__ != "UnspecifiedValue" for each in said) or params.get("compiler_options_kvs"):
        return False
    made = {v for inner in body.eqns for v in inner.outvars}
    outs = [v for v in body.outvars if not isinstance(v, Literal)]
    return not body.constvars and len(body.outvars) == len({*outs} & made)
