"""A jaxpr as one list of operations, with the functions that it calls inlined, cut into pieces that repeat.

The layers of a network are the same operations again and again. A piece is cut where one begins that is known already,
so that XLA compiles one layer and not twelve.
"""

from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._compat import Jaxpr, Literal, consts_of, inside_hi, marks_of, open_jaxpr
from .._plan.evaluations import Call
from .._plan.higher_order import higher_order
from .._transform.ledger import Ledger
from .location import Place

_SHORTEST = 8  # operations: a shorter piece is not looked for, it would cut up longer ones
_LONGEST = 48
_BYTES = 2**26  # of the results of a piece, which are alive together


class Operation(NamedTuple):
    """An equation of a jaxpr or of a function that it calls. Values have numbers; literals stay what they are."""

    eqn: Any
    place: Place  # its `run` counts the calls inside of this jaxpr
    operands: tuple[Any, ...]
    results: tuple[int, ...]
    is_entered: bool  # whether a tool may run its bodies, such as those of a loop


class Piece(NamedTuple):
    """Operations that run together, or one that is entered."""

    operations: Sequence[Operation]
    reads: tuple[int, ...]  # the values that are made outside of it
    returns: tuple[int, ...]  # the values that are read outside of it, or wanted
    last: tuple[int, ...]  # the values that nothing reads after it
    key: Hashable  # the same for pieces that do the same

    @property
    def is_alone(self) -> bool:
        """Whether it is one operation that can't be compiled with others."""
        return _is_alone(self.operations[0])


class Flat(NamedTuple):
    """A jaxpr, flattened."""

    constants: dict[int, tuple[Any, Any]]  # by the number of a value: what it is, and its type
    operands: tuple[int, ...]
    results: tuple[Any, ...]
    pieces: tuple[Piece, ...]
    calls: int


Test = Callable[[Any], bool]  # of an equation


def flatten(jaxpr: Jaxpr, place: Place, ledger: Ledger, kinds: "Repeats", wants: Test, is_call: Test) -> Flat:
    """Flatten a jaxpr that is at `place`.

    `wants(eqn)`: whether the results of an equation are returned even if nothing reads them outside of its piece.
    `is_call(eqn)`: whether an equation that calls a function may be inlined.
    """
    flattener = _Flattener(ledger, is_call)
    operands = tuple(flattener.new(v) for v in open_jaxpr(jaxpr).invars)
    results = tuple(flattener.inline(jaxpr, operands, place._replace(run=0, marks_here=False)))
    kept = {x for x in results if isinstance(x, int)}
    pieces = tuple(_pieces(flattener.operations, kept, kinds, wants))
    return Flat(flattener.constants, operands, results, pieces, flattener.calls)


class _Flattener:
    def __init__(self, ledger: Ledger, is_call: Test):
        self.operations: list[Operation] = []
        self.constants: dict[int, tuple[Any, Any]] = {}
        self.calls = 0
        self._ledger = ledger
        self._is_call = is_call
        self._count = 0

    def new(self, _: Any = None) -> int:
        self._count += 1
        return self._count - 1

    def inline(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        body = open_jaxpr(jaxpr)
        env: dict[Any, Any] = dict(zip(body.invars, operands, strict=True))
        for v, x in zip(body.constvars, consts_of(jaxpr), strict=True):
            env[v] = self.new()
            self.constants[env[v]] = x, v.aval

        def read(atom: Any) -> Any:
            return atom if isinstance(atom, Literal) else env[atom]

        for eqn in body.eqns:
            here, ins = place.of(eqn, self._ledger), [read(v) for v in eqn.invars]
            called = self._called(eqn)
            if called is not None:
                if marks_of(eqn.source_info.name_stack):  # the user's; others are parts of the run around
                    self.calls += 1
                    here = here._replace(run=self.calls)
                outs = self.inline(called, ins, here)
            else:
                found = higher_order(eqn.primitive)
                outs = [self.new() for _ in eqn.outvars]
                is_entered = (found is not None and found.evaluate is not None) or eqn.primitive.name == "shard_map"
                self.operations.append(Operation(eqn, here, tuple(ins), tuple(outs), is_entered))
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in body.outvars]

    def _called(self, eqn: Any) -> Jaxpr | None:
        """The body of an equation that runs it once, on its own operands; None for others."""
        found = higher_order(eqn.primitive)
        if found is None or not self._is_call(eqn):
            return None
        if isinstance(found.evaluate, Call):
            return eqn.params[found.evaluate.param]
        hi = inside_hi(eqn.params["_prim"]) if eqn.primitive.name == "call_hi_primitive" else None
        return None if hi is None else hi.jaxpr


# -- pieces


class Repeats:
    """Numbers for operations, equal for those that do the same; and the pieces that were cut so far."""

    def __init__(self) -> None:
        self._numbers: dict[Hashable, int] = {}
        self._held: list[Any] = []  # so that no other equation gets the id of one that was numbered
        self._known: dict[int, list[tuple[int, ...]]] = {}  # by their first operation, the longest first

    def of(self, eqn: Any) -> int:
        ins = tuple((v.aval, np.asarray(v.val).tobytes()) if isinstance(v, Literal) else v.aval for v in eqn.invars)
        key: Hashable = (eqn.primitive, ins, tuple(v.aval for v in eqn.outvars), eqn.ctx, tuple(eqn.params.items()))
        try:
            return self._numbers.setdefault(key, len(self._numbers))
        except TypeError:  # a parameter that can't be hashed
            self._held.append(eqn)
            return self._numbers.setdefault(id(eqn), len(self._numbers))

    def known(self, kinds: list[int], start: int) -> int:
        """The length of the longest known piece that begins here; 0 if there is none."""
        for piece in self._known.get(kinds[start], ()):
            if tuple(kinds[start : start + len(piece)]) == piece:
                return len(piece)
        return 0

    def add(self, piece: tuple[int, ...]) -> None:
        known = self._known.setdefault(piece[0], [])
        if len(piece) >= _SHORTEST and piece not in known:
            known.append(piece)
            known.sort(key=len, reverse=True)


def _pieces(operations: list[Operation], kept: set[int], kinds: Repeats, wants: Test) -> list[Piece]:
    last = {x: i for i, op in enumerate(operations) for x in op.operands if isinstance(x, int)}
    found: list[Piece] = []
    for start, stop, numbers in _cuts(operations, kinds):
        some = operations[start:stop]
        made = {x: wants(op.eqn) for op in some for x in op.results}
        reads = dict.fromkeys(x for op in some for x in op.operands if isinstance(x, int) and x not in made)
        dead = {x: None for x in (*reads, *made) if x not in kept and last.get(x, -1) < stop}
        returns = tuple(x for x, is_wanted in made.items() if is_wanted or x not in dead)
        key = numbers, _wiring(some, list(reads)), tuple(x in returns for x in made)
        found.append(Piece(some, tuple(reads), returns, tuple(dead), key))
    return found


def _wiring(operations: Sequence[Operation], reads: list[int]) -> tuple[Any, ...]:
    """Which operand is which result, with numbers of their own."""
    numbers = {x: i for i, x in enumerate(reads)}
    wiring = []
    for operation in operations:
        wiring.append(tuple(numbers[x] if isinstance(x, int) else None for x in operation.operands))
        for x in operation.results:
            numbers[x] = len(numbers)
    return tuple(wiring)


def _cuts(operations: list[Operation], kinds: Repeats) -> list[tuple[int, int, tuple[int, ...]]]:
    """The bounds of the pieces, and the kinds of their operations."""
    numbers = [kinds.of(operation.eqn) for operation in operations]
    alone = list(map(_is_alone, operations))
    sizes = [sum(_bytes(v.aval) for v in operation.eqn.outvars) for operation in operations]
    found, start = [], 0
    while start < len(operations):
        stop, size = start + 1, sizes[start]
        if not alone[start]:
            known = kinds.known(numbers, start)
            if known:
                stop = start + known
            else:
                while stop < len(operations) and stop - start < _LONGEST and not alone[stop]:
                    size += sizes[stop]
                    if size > _BYTES or kinds.known(numbers, stop):
                        break
                    stop += 1
        piece = tuple(numbers[start:stop])
        kinds.add(piece)
        found.append((start, stop, piece))
        start = stop
    return found


def _is_alone(operation: Operation) -> bool:
    return operation.is_entered or bool(operation.eqn.effects)


def _bytes(aval: Any) -> int:
    return getattr(aval, "size", 0) * getattr(getattr(aval, "dtype", None), "itemsize", 0)
