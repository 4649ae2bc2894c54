"""Derive linear recurrences as a whole.

    later = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    y = lax.associative_scan(later, (a, x))[1]  # y[t] = a[t] y[t - 1] + x[t]

State spaces run them in parallel, as a tree of products and sums over pairs of neighbours. JAX keeps what all its
levels made, in several arrays of the size of `x`, although the derivative is a recurrence itself
(`_primitives/recurrence.py`) that needs the result and the decays alone.

A recurrence is recognised by its values: JAX's `associative_scan` is traced for operands like the user's, and if it
makes a value that the program makes as well, that is the recurrence. So the order of factors and of summands does not
matter, nor do reversed, mapped or broadcast operands. Only where the sums are held low (`streams.py`). The decays stay
in float32, unless they are exponentials: then the logarithms are rounded, and those of neighbours are added.
"""

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import Literal, Var, open_jaxpr
from .._jaxpr import bind
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Readers, Runner, Step
from .._plan.sensitivity import FREE, POSITION, Sensitivity
from .._primitives.barriers import materialize_cotangent
from .._primitives.recurrence import linear_recurrence
from .._structure import Numbering
from .._traits import traits_of
from .._traits.matmul_cost import size_of


def derive_recurrences(plan: Plan) -> Plan:
    """Run recurrences whose sums are held low as one operation each."""
    if not plan.touched or plan.setting.keep == "all" or plan.setting.formats.is_narrow:
        return plan
    pairs = list(_pairs(plan))
    if not pairs:
        return plan
    values, readers, taken = _Values(plan), plan.readers(), set[int]()
    regions: list[Recurrence] = []
    for pair in pairs:
        if values.made.get(pair.x) in taken:  # a level of one that was found
            continue
        tried = (_recurrence(plan, pair, values, readers, how) for how in _HOW)
        found = next((region for region in tried if region is not None), None)
        if found is not None:
            regions.append(found)
            taken.update(_steps_of(found.parts))
    return plan.with_regions(regions)


class Recurrence(NamedTuple):
    """All operations of an `associative_scan`, except for those whose results something else reads."""

    parts: tuple[Part, ...]
    last: int
    decays: Var
    x: Var
    axis: int
    logarithmic: bool  # whether `decays` are logarithms
    moves: tuple[int, ...]  # what is done to logarithms before they are those of the decays
    rounds: bool  # whether logarithms may be rounded
    repeats: bool  # and are made of few numbers, so that their cotangent is written, rounded, and summed for these
    by_pairs: bool

    def with_parts(self, parts: tuple[Part, ...]) -> "Recurrence":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        low = plan.setting.formats.low
        ((var, value),) = plan.values_of(self.last)
        with runner.at(plan, self.last):
            decays, x = env.read(self.decays, low if self.rounds else None), env.read(self.x, low)
            for i in self.moves:
                (decays,) = bind(plan.eqns[i], [decays])
            if self.repeats:
                decays = materialize_cotangent(decays, low.dtype, row_major=False)
            decays = lax.expand_dims(decays, range(x.ndim - decays.ndim))
            y = linear_recurrence(decays, x, self.axis, self.logarithmic, self.by_pairs)
        env.write(var, y, value._replace(format=low))


# -- where one may be


class _Pair(NamedTuple):
    """Two variables whose entries are read in pairs of neighbours along an axis. `x` may have more axes in front."""

    decays: Any
    x: Any
    axis: int  # of `x`
    mapped: int  # how many axes in front `vmap` has added to `x` alone


def _pairs(plan: Plan) -> Iterator[_Pair]:
    """What might be the operands of an `associative_scan`."""
    starts: dict[tuple[Any, int], set[int]] = {}
    halves: dict[Var, int] = {}  # every second entry along an axis
    inner: set[tuple[Var, int]] = set()  # made of halves: levels, and no beginnings
    for eqn in plan.eqns:
        found = _half(eqn)
        if found is None:
            axes = {halves[v] for v in eqn.invars if not isinstance(v, Literal) and v in halves}
            inner.update((v, axis) for axis in axes for v in eqn.outvars)
            continue
        axis, start = found
        halves[eqn.outvars[0]] = axis
        if (eqn.invars[0], axis) not in inner:
            starts.setdefault((eqn.invars[0], axis), set()).add(start)
    wholes = [key for key, both in starts.items() if both == {0, 1}]
    for decays, axis in wholes:
        for x, other in wholes:
            mapped = x.aval.ndim - decays.aval.ndim
            if x is not decays and other == axis + mapped and _fits(decays, x, axis):
                yield _Pair(decays, x, other, mapped)


def _half(eqn: Any) -> tuple[int, int] | None:
    """The axis along which an operation takes every second entry, and the first of these."""
    if eqn.primitive is not lax.slice_p or isinstance(eqn.invars[0], Literal):
        return None
    start, limit, strides = (eqn.params[name] for name in ("start_indices", "limit_indices", "strides"))
    shape, axes = eqn.invars[0].aval.shape, [i for i, stride in enumerate(strides or ()) if stride == 2]
    if len(axes) != 1 or start[axes[0]] not in (0, 1):
        return None
    (axis,) = axes
    return (axis, start[axis]) if limit[axis] == shape[axis] - 1 + start[axis] else None


def _fits(decays: Any, x: Any, axis: int) -> bool:
    """Whether decays have the last axes of `x`, some of them of size one, but not this one."""
    own = decays.aval.shape
    shape = x.aval.shape[x.aval.ndim - len(own) :]
    return (
        len(shape) == len(own)
        and own[axis] == shape[axis]
        and all(a in (b, 1) for a, b in zip(own, shape, strict=True))
    )


# -- whether it is one

Pair = Sequence[Any]


def _of_decays(earlier: Pair, later: Pair) -> tuple[Any, Any]:
    return earlier[0] * later[0], later[0] * earlier[1] + later[1]


def _of_logarithms(earlier: Pair, later: Pair) -> tuple[Any, Any]:
    return earlier[0] + later[0], jnp.exp(later[0]) * earlier[1] + later[1]


How = Callable[[Pair, Pair], tuple[Any, Any]]
_HOW: Sequence[How] = (_of_decays, _of_logarithms)


class _Values:
    """The values of a plan, by number."""

    def __init__(self, plan: Plan) -> None:
        self.numbering, self.numbers = Numbering(only_values=True), dict[Var, int]()
        self.first: dict[int, Var] = {}  # that has a number
        self.made: dict[Var, int] = {}  # by which operation
        for i, eqn in enumerate(plan.eqns):
            for v, number in zip(eqn.outvars, self.numbering.results(eqn, self.numbers), strict=True):
                self.numbers[v], self.made[v] = number, i
                self.first.setdefault(number, v)

    def of_scan(self, pair: _Pair, how: How) -> tuple[list[int], set[int]]:
        """The numbers of an `associative_scan` of a pair: its result and the sums of its first level; and all of it."""
        n, axis = pair.x.aval.shape[pair.axis], pair.axis - pair.mapped

        def scan(*both: Any) -> Any:
            pairs = [[lax.slice_in_dim(x, i, n - 1 + i, 2, axis) for x in both] for i in (0, 1)]
            return lax.associative_scan(how, both, axis=axis)[1], how(*pairs)[1]

        for _ in range(pair.mapped):
            scan = jax.vmap(scan, (None, 0))
        operands: list[Any] = [v.aval for v in (pair.decays, pair.x)]
        avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in operands]
        body = open_jaxpr(jax.make_jaxpr(scan)(*avals))
        numbers = {v: self.numbering.of(own, self.numbers) for v, own in zip(body.invars, pair[:2], strict=True)}
        for eqn in body.eqns:
            numbers.update(zip(eqn.outvars, self.numbering.results(eqn, numbers), strict=True))
        return [numbers[v] for v in body.outvars], {numbers[v] for v in numbers if v not in body.invars}


def _recurrence(plan: Plan, pair: _Pair, values: _Values, readers: Readers, how: How) -> Recurrence | None:
    """The region of a recurrence of this kind, if there is one, and nothing else reads its sums."""
    (number, first), inside = values.of_scan(pair, how)
    if number not in values.first or first not in values.first:
        return None
    out, total = values.first[number], values.first[first]
    last = values.made[out]
    if not _is_rounded(plan, total, values.made[total]):
        return None
    own = {i for i, eqn in enumerate(plan.eqns) if all(values.numbers[v] in inside for v in eqn.outvars)}
    decays, logarithmic, moves = pair.decays, how is _of_logarithms, list[int]()
    if not logarithmic and (chain := _exponential(plan, decays, values.made)):
        decays, logarithmic, moves = plan.eqns[chain[0]].invars[0], True, chain[1:]
        own.update(chain)
    needed = _needed(plan, own, last, readers)
    if _read_any(plan, needed, _made_of(plan, pair.x, own)):
        return None
    own -= needed
    parts = [part for part in plan.parts if not own.isdisjoint(_steps_of([part]))]
    plain = own.issuperset(_steps_of(parts)) and all(_is_plain(plan.steps[i]) for i in own)
    if not plain or any(reader.place <= max(own) for reader in readers.get(out, ())):
        return None
    rounds = logarithmic and _sensitivity(plan, decays, values.made) is not POSITION
    repeats, by_pairs = (_is_expanded(plan, v, values.made) for v in (decays, pair.x))
    how_decays = logarithmic, tuple(moves), rounds, rounds and repeats
    return Recurrence(tuple(parts), last, decays, pair.x, pair.axis, *how_decays, by_pairs)


def _exponential(plan: Plan, v: Var, made: dict[Var, int]) -> list[int]:
    """The exponential that a value holds the entries of, and the operations that move or repeat them after it."""
    chain: list[int] = []
    while v in made and _is_plain(plan.steps[made[v]]):
        chain.insert(0, made[v])
        eqn = plan.eqns[made[v]]
        if isinstance(eqn.invars[0], Literal):
            return []
        if eqn.primitive is lax.exp_p:
            return chain if eqn.params.get("accuracy") is None else []
        if len(eqn.invars) != 1 or not (traits_of(eqn.primitive).keeps_all_entries or eqn.primitive in _MOVE):
            return []
        v = eqn.invars[0]
    return []


def _is_expanded(plan: Plan, x: Var, made: dict[Var, int]) -> bool:
    """Whether a float32 value is made of far smaller ones, repeated: it is made again where it is read again."""
    if x in made and _is_rounded(plan, x, made[x]):
        return False
    sources, seen, left = 0, {x}, [x]
    while left:
        v = left.pop()
        eqn = plan.eqns[made[v]] if v in made else None
        if eqn is None or not (traits_of(eqn.primitive).elementwise or eqn.primitive in _REPEAT):
            sources += size_of(v.aval)
            continue
        new = {u for u in eqn.invars if not isinstance(u, Literal)} - seen
        seen |= new
        left += new
    return 2 * sources < size_of(x.aval)


_REPEAT = lax.broadcast_in_dim_p, lax.reshape_p
_MOVE = *_REPEAT, lax.rev_p, lax.slice_p


def _is_rounded(plan: Plan, var: Var, place: int) -> bool:
    """Whether a result is held low."""
    return dict(plan.values_of(place))[var].is_low


def _is_plain(step: Step) -> bool:
    return step.mode is not Mode.RULE and step.operation is None and not step.is_pinned


def _needed(plan: Plan, own: Collection[int], last: int, readers: Readers) -> set[int]:
    """Of these operations, the last one aside, those whose results something else reads, or one that is needed."""
    needed = set[int]()
    for i in sorted(own, reverse=True):
        places = (reader.place for v in plan.eqns[i].outvars for reader in readers.get(v, ()))
        if i != last and any(place not in own or place in needed for place in places):
            needed.add(i)
    return needed


def _made_of(plan: Plan, x: Var, own: Collection[int]) -> set[Var]:
    """A variable, and what these operations make of it."""
    found = {x}
    for i in sorted(own):
        if _read_any(plan, [i], found):
            found.update(plan.eqns[i].outvars)
    return found


def _read_any(plan: Plan, places: Iterable[int], variables: Collection[Var]) -> bool:
    return any(not isinstance(v, Literal) and v in variables for i in places for v in plan.eqns[i].invars)


def _sensitivity(plan: Plan, var: Var, made: dict[Var, int]) -> Sensitivity:
    body = open_jaxpr(plan.jaxpr)
    known = plan.values_of(made[var]) if var in made else zip(body.invars, plan.ins, strict=True)
    return dict(known)[var].sensitivity if var in made or var in body.invars else FREE  # a constant


def _steps_of(parts: Iterable[Part]) -> set[int]:
    """The steps that are in parts, and in regions inside."""
    found = set[int]()
    for part in parts:
        found |= {part} if isinstance(part, int) else _steps_of(part.parts)
    return found
