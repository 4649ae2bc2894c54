"""Derive linear recurrences as a whole.

    later = lambda p, q: (p[0] * q[0], q[0] * p[1] + q[1])
    y = lax.associative_scan(later, (a, x))[1]  # y[t] = a[t] y[t - 1] + x[t]

State spaces run them in parallel, as a tree of products and sums over pairs of neighbours. JAX keeps what all its
levels made, in several arrays of the size of `x`, although the derivative is a recurrence itself
(`_primitives/recurrence.py`) that needs the result and the decays alone.

A recurrence is recognised by its values: JAX's `associative_scan` is traced for operands like the user's, and if it
makes a value that the program makes as well, that is the recurrence. So the order of factors and of summands does not
matter, nor do reversed, mapped or broadcast operands. Only where the sums are held low (`streams.py`). The decays stay
in float32, unless they are exponentials of what can't be positive: then the logarithms are rounded, and those of
neighbours are added. Logarithms that may be positive are not rounded, since errors of large ones, which later ones
undo, would stay.
"""

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from .._compat import Literal, Var, open_jaxpr
from .._formats import Format
from .._jaxpr import bind
from .._plan.bodies import functions_in
from .._plan.plan import Environment, Part, Plan, Readers, Runner, Step, identity
from .._plan.sensitivity import FREE, POSITION, Sensitivity
from .._plan.signs import SignsOf
from .._primitives.barriers import materialize_cotangent
from .._primitives.recurrence import linear_recurrence
from .._structure import Numbering, is_marked_varying
from .._traits import traits_of
from .._traits.matmul_cost import size_of


def derive_recurrences(plan: Plan) -> Plan:
    """Run recurrences whose sums are held low as one operation each."""
    if not plan.touched or plan.setting.keep == "all" or plan.setting.formats.is_narrow:
        return plan
    pairs = list(_pairs(plan))
    if not pairs:
        return plan
    search, inside = _Search(plan), set[int]()
    regions: list[Recurrence] = []
    for pair in pairs:
        for how in _HOW:
            for found, own in search.recurrences(pair, how):
                if inside.isdisjoint(own):
                    regions.append(found)
                    inside |= own
    return plan.with_regions(regions)


class Recurrence(NamedTuple):
    """All operations of an `associative_scan`, except for those whose results something else reads."""

    parts: tuple[Part, ...]
    last: int
    decays: Var
    x: Var
    axis: int
    logarithmic: bool  # whether `decays` are logarithms
    again: tuple[int, ...]  # low operations that make the decays, and are run in float32 for these
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
            decays, x = env.read(self.decays, low) if self.rounds else self._exact(plan, env), env.read(self.x, low)
            for i in self.moves:
                (decays,) = bind(plan.eqns[i], [decays])
            if self.repeats:
                decays = materialize_cotangent(decays, low.dtype, row_major=False)
            decays = lax.expand_dims(decays, range(x.ndim - decays.ndim))
            y = linear_recurrence(decays, x, self.axis, self.logarithmic, self.by_pairs)
        env.write(var, y, value._replace(format=low))

    def _exact(self, plan: Plan, env: Environment) -> Any:
        """The decays or logarithms as they are written, in float32."""
        made: dict[Var, Any] = {}

        def read(atom: Any) -> Any:
            if isinstance(atom, Literal):
                return atom.val
            return made[atom] if atom in made else env.read(atom, Format(atom.aval.dtype))

        for i in self.again:
            eqn = plan.eqns[i]
            made.update(zip(eqn.outvars, bind(eqn, [read(v) for v in eqn.invars]), strict=True))
        return read(self.decays)


# -- where one may be


class _Pair(NamedTuple):
    """Two variables whose entries are read in pairs of neighbours along an axis. `x` may have more axes in front."""

    decays: Any
    x: Any
    axis: int  # of `x`
    mapped: int  # how many axes in front `vmap` has added to `x` alone


def _pairs(plan: Plan) -> list[_Pair]:
    """What might be the operands of an `associative_scan`: an operation reads one's first half, and the other's second.

    The halves are every second entry along an axis. They may be moved before, and an exponential of one may be taken.
    """
    halves: dict[Var, tuple[Any, int, int]] = {}  # of which variable, along which axis, from which entry on
    inner: set[tuple[Var, int]] = set()  # made of halves: levels, and no beginnings
    later: dict[Var, int] = {}  # halves of inner ones, along which axis
    pairs: dict[_Pair, None] = {}
    for eqn in plan.eqns:
        found = _half(eqn)
        if found is not None:
            if (eqn.invars[0], found[0]) in inner:
                later[eqn.outvars[0]] = found[0]
            else:
                halves[eqn.outvars[0]] = (eqn.invars[0], *found)
            continue
        variables = [v for v in eqn.invars if not isinstance(v, Literal)]
        read = list(dict.fromkeys(v for v in variables if v in halves))
        axes = {halves[v][1] for v in read} | {later[v] for v in variables if v in later}
        inner.update((v, axis) for axis in axes for v in eqn.outvars)
        if len(read) == 1 and (eqn.primitive in _MOVE or eqn.primitive is lax.exp_p or is_marked_varying(eqn)):
            halves[eqn.outvars[0]] = halves[read[0]]
        for (decays, axis, first), (x, other, second) in itertools.permutations(map(halves.__getitem__, read), 2):
            mapped = x.aval.ndim - decays.aval.ndim
            if (first, second) == (1, 0) and other == axis + mapped and _fits(decays, x, axis):
                pairs[_Pair(decays, x, other, mapped)] = None
    return list(pairs)


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


class _Search:
    """Looks for recurrences in a plan whose values are numbered."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._readers, self._signs = plan, plan.readers(), SignsOf(plan.eqns)
        self._numbering, self._numbers = Numbering(only_values=True), dict[Var, int]()
        self._of_number: dict[int, list[Var]] = {}
        self._makers: dict[Var, int] = {}
        self._part_of = {step: part for part in plan.parts for step in _steps_of([part])}
        self._scans: dict[Any, Any] = {}
        for i, eqn in enumerate(plan.eqns):
            for v, number in zip(eqn.outvars, self._numbering.results(eqn, self._numbers), strict=True):
                self._numbers[v], self._makers[v] = number, i
                self._of_number.setdefault(number, []).append(v)

    def recurrences(self, pair: _Pair, how: How) -> Iterator[tuple[Recurrence, set[int]]]:
        """The regions of the recurrences of a pair, with their steps."""
        body = self._scan(pair, how)
        numbers = {v: self._numbering.of(own, self._numbers) for v, own in zip(body.invars, pair[:2], strict=True)}
        inside = set[int]()
        for eqn in body.eqns:
            results = self._numbering.results(eqn, numbers)
            numbers.update(zip(eqn.outvars, results, strict=True))
            inside.update(results)
        result, first = (numbers[v] for v in body.outvars)
        for out in self._of_number.get(result, ()):
            own = self._operations(out, inside)
            totals = [(v, i) for i in own for v in self._plan.eqns[i].outvars if self._numbers[v] == first]
            if totals and all(_is_rounded(self._plan, v, i) for v, i in totals):
                found = self._region(pair, how is _of_logarithms, out, own)
                if found is not None:
                    yield found

    def _scan(self, pair: _Pair, how: How) -> Any:
        """The body of an `associative_scan` of such a pair. It returns the result, and the sums of the first level."""
        n, axis = pair.x.aval.shape[pair.axis], pair.axis - pair.mapped

        def scan(*both: Any) -> Any:
            pairs = [[lax.slice_in_dim(x, i, n - 1 + i, 2, axis) for x in both] for i in (0, 1)]
            return lax.associative_scan(how, both, axis=axis)[1], how(*pairs)[1]

        for _ in range(pair.mapped):
            scan = jax.vmap(scan, (None, 0))
        avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in (pair.decays, pair.x)]
        key = (how, axis, pair.mapped, *((aval.shape, aval.dtype) for aval in avals))
        if key not in self._scans:
            self._scans[key] = open_jaxpr(jax.make_jaxpr(scan)(*avals))
        return self._scans[key]

    def _operations(self, out: Var, inside: Collection[int]) -> set[int]:
        """The operations of a scan that made a result, and those that made of their results what nobody asks for."""
        own, left = set[int](), [self._makers[out]]
        while left:
            i = left.pop()
            eqn = self._plan.eqns[i]
            is_one = eqn.outvars and not eqn.effects and all(self._numbers[v] in inside for v in eqn.outvars)
            if i in own or not is_one:
                continue
            own.add(i)
            left += [self._makers[v] for v in eqn.invars if not isinstance(v, Literal) and v in self._makers]
            places = {reader.place for v in eqn.outvars for reader in self._readers.get(v, ())}
            left += [place for place in places if place < len(self._plan.eqns)]
        return own

    def _region(self, pair: _Pair, logarithmic: bool, out: Var, own: set[int]) -> tuple[Recurrence, set[int]] | None:
        """A recurrence of these operations, and the steps that it takes; None if something else reads its sums."""
        plan, last, decays, moves = self._plan, self._makers[out], pair.decays, list[int]()
        if not logarithmic:
            chain = _exponential(plan, decays, self._makers)
            if chain and self._may_round(plan.eqns[chain[0]].invars[0]):
                decays, logarithmic, moves = plan.eqns[chain[0]].invars[0], True, chain[1:]
                own = own.union(chain)
        needed = _needed(plan, own, last, self._readers)
        if _read_any(plan, needed, _made_of(plan, pair.x, own)):
            return None
        own = own - needed
        parts = list({identity(self._part_of[i]): self._part_of[i] for i in sorted(own)}.values())
        is_plain = own.issuperset(_steps_of(parts)) and all(_is_plain(plan.steps[i]) for i in own)
        if not is_plain or any(reader.place <= max(own) for reader in self._readers.get(out, ())):
            return None
        rounds = logarithmic and self._may_round(decays)
        repeats, by_pairs = (_is_expanded(plan, v, self._makers) for v in (decays, pair.x))
        again = () if rounds else tuple(sorted(_made_low(plan, decays, self._makers)))
        how_decays = logarithmic, again, tuple(moves), rounds, rounds and repeats
        return Recurrence(tuple(parts), last, decays, pair.x, pair.axis, *how_decays, by_pairs), own

    def _may_round(self, logarithms: Any) -> bool:
        """Whether logarithms of decays may be rounded: none is positive, or a position, or asked for in float32."""
        place = self._makers.get(logarithms)
        if self._signs(logarithms).above or (place is not None and self._plan.steps[place].is_pinned):
            return False
        return _sensitivity(self._plan, logarithms, self._makers) is not POSITION


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


def _made_low(plan: Plan, v: Var, made: dict[Var, int]) -> set[int]:
    """The element-wise operations in low precision that made a value: a sigmoid of .999 would be one of 1."""
    found, left = set[int](), [v]
    while left:
        u = left.pop()
        i = made.get(u)
        if i is None or i in found or not _is_rounded(plan, u, i):
            continue
        if _is_plain(plan.steps[i]) and _is_elementwise(plan.eqns[i]):
            found.add(i)
            left += [atom for atom in plan.eqns[i].invars if not isinstance(atom, Literal)]
    return found


def _is_elementwise(eqn: Any) -> bool:
    """Whether it works on each entry, or moves them; and so does all that is in a function such as `jax.nn.sigmoid`."""
    bodies = [open_jaxpr(body) for body in functions_in(eqn)]
    if bodies:
        return all(_is_elementwise(inner) for body in bodies for inner in body.eqns)
    return traits_of(eqn.primitive).elementwise or eqn.primitive in _MOVE or is_marked_varying(eqn)


def _is_rounded(plan: Plan, var: Var, place: int) -> bool:
    """Whether a result is held low."""
    return dict(plan.values_of(place))[var].is_low


def _is_plain(step: Step) -> bool:
    return step.is_plain and not step.is_pinned


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
