"""Run a jaxpr with somebody watching each operation.

Some dozens of operations at a time are compiled, and their results returned. Loops are unrolled in Python, so that the
watcher sees each round. Primitives whose bodies can't be run here (kernels, callbacks, and `shard_map` unless it is
asked for) are one operation.
"""

import contextlib
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from .._compat import Jaxpr, Literal, user_context
from .._jaxpr import Memo, bind
from .._plan.higher_order import higher_order
from .._transform.ledger import Ledger
from .flat import Flat, Operation, Piece, flatten
from .location import Place
from .mapped import Mapped
from .pieces import Compiled
from .progress import Progress, Silent

# (equation, where it is, operands, results). If it returns True, the results are marked, and for operations that read
# them `place.touched` says which operands those are.
Watch = Callable[[Any, Place, Sequence[Any], Sequence[Any]], bool | None]


class Walker:
    """Runs jaxprs on concrete arrays. If it enters maps, `place.mapped` says how values inside of them are held.

    Args:
        ledger: Of the program.
        watch: Called for each operation; None: the results of the jaxpr are all that is wanted.
        wants: Whether the results of an equation are sure to be looked at. Those of others are made again if they are
            asked for. None: all are looked at.
        enters_maps: Whether to run the bodies of `shard_map`s.
        compiled: Where to keep what is compiled, for other walkers.
        marked: The arrays that are marked, also those of other walkers.
        progress: Told how many operations have run.
    """

    def __init__(
        self,
        ledger: Ledger,
        watch: Watch | None,
        wants: Callable[[Any], bool] | None = None,
        enters_maps: bool = False,
        compiled: Compiled | None = None,
        marked: "Marked | None" = None,
        progress: Progress | Silent | None = None,
    ):
        self._ledger = ledger
        self._watch = watch
        self._wants = wants or (lambda eqn: watch is not None)
        self._enters_maps = enters_maps
        self._compiled = Compiled() if compiled is None else compiled
        self._progress = Silent() if progress is None else progress
        self._flat = Memo()
        self._marked = Marked() if marked is None else marked
        self._entered: Counter[Any] = Counter()  # loops and branches, by the turns around them
        self._runs = 0  # of jaxprs

    def run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        """The results of a jaxpr that is at `place`."""
        static = place.phase, place.scopes, place.source, place.mark, id(place.mapped)
        flat = self._flat.get(jaxpr, static, lambda: self._flatten(jaxpr, place))
        first, self._runs = self._runs + 1, self._runs + 1 + flat.calls
        run = _Run(flat, operands, place, first, self._marked)
        if place.mapped is None:
            self._compiled.prepare(flat.pieces, run.env.values())
        for piece in flat.pieces:
            with _outside(place.mapped):
                self._run_piece(piece, run)
            self._progress.advance(len(piece.operations))
            run.forget(piece)
        return run.results(self._marked)

    def _run_piece(self, piece: Piece, run: "_Run") -> None:
        if piece.is_alone:
            self._run_alone(piece.operations[0], run)
            return
        results = self._compiled.run(piece, run.place.mapped, run.read(piece))
        run.env.update(zip(piece.returns, results, strict=True))
        if self._watch is not None:
            self._watch_piece(piece, run)

    def _flatten(self, jaxpr: Jaxpr, place: Place) -> Flat:
        is_call = (lambda eqn: True) if place.mapped is None else place.mapped.inlines
        return flatten(jaxpr, place, self._ledger, self._compiled.kinds, self._wants, is_call)

    def _watch_piece(self, piece: Piece, run: "_Run") -> None:
        assert self._watch is not None
        values = _Values(piece, run.env, run.place.mapped)
        for operation in piece.operations:
            ins, outs = _Some(values, operation.operands), _Some(values, operation.results)
            if self._watch(operation.eqn, run.here(operation), ins, outs):
                run.marked.update(operation.results)

    def _run_alone(self, operation: Operation, run: "_Run") -> None:
        eqn, mapped, here = operation.eqn, run.place.mapped, run.here(operation)
        ins, outs, is_marked = run.operands(operation), None, False
        with user_context(eqn.source_info.traceback), eqn.ctx.manager, _outside(mapped):
            found, before = higher_order(eqn.primitive), self._marked.count
            if found is not None and found.evaluate is not None:
                inside = ins if mapped is None else mapped.operands(eqn, ins)
                outs = None if inside is None else found.evaluate(self._body_runner(here), eqn, inside)
            elif self._enters_maps and mapped is None:
                outs = self._in_map(eqn, here, ins)
            if outs is None:
                outs = bind(eqn, ins) if mapped is None else mapped.bind(eqn, ins)
                if self._watch is not None:
                    is_marked = bool(self._watch(eqn, here, ins, outs))
            else:
                is_marked = self._marked.count > before
        run.env.update(zip(operation.results, outs, strict=True))
        if is_marked:
            run.marked.update(operation.results)

    def _in_map(self, eqn: Any, place: Place, ins: list[Any]) -> list[Any] | None:
        """The results of a `shard_map` whose body is run here; None for another equation."""
        mapped = Mapped.of(eqn)
        if mapped is None:
            return None
        inside = place._replace(mapped=mapped)
        return mapped.leave(self.run(eqn.params["jaxpr"], mapped.enter(ins), inside))

    def _body_runner(self, place: Place) -> Any:
        """Runs the bodies of one equation. Loops and branches are numbered, so that two runs can be compared."""
        number: int | None = None

        def run(jaxpr: Jaxpr, operands: Sequence[Any], *, turn: int | None = None, in_loop: bool = False) -> list[Any]:
            nonlocal number
            if turn is None:
                return self.run(jaxpr, operands, place)
            if number is None:
                number = self._entered[place.turns]
                self._entered[place.turns] += 1
            rounds = (*place.rounds, turn) if in_loop else place.rounds
            return self.run(jaxpr, operands, place._replace(rounds=rounds, turns=(*place.turns, (number, turn))))

        return run


def _outside(mapped: Any) -> contextlib.AbstractContextManager[Any]:
    return contextlib.nullcontext() if mapped is None else mapped.outside()


class _Run:
    """The values of one run of a jaxpr, by their numbers, and which of them are marked."""

    def __init__(self, flat: Flat, operands: Sequence[Any], place: Place, first: int, marked: "Marked"):
        self.place = place
        self._flat, self._first = flat, first
        self.env = dict(zip(flat.operands, operands, strict=True))
        # A loop slices its operands: what it reads is marked if anything was that it reads.
        self.marked = {number for number, x in self.env.items() if place.touched or marked.has(x)}
        for number, (x, aval) in flat.constants.items():
            self.env[number] = x if place.mapped is None else place.mapped.hold(x, aval)

    def read(self, piece: Piece) -> list[Any]:
        return [self.env[x] for x in piece.reads]

    def operands(self, operation: Operation) -> list[Any]:
        ins = [x.val if isinstance(x, Literal) else self.env[x] for x in operation.operands]
        return ins if self.place.mapped is None else self.place.mapped.held(operation.operands, ins)

    def here(self, operation: Operation) -> Place:
        """The place of an operation in this run."""
        place, around = operation.place, self.place
        return place._replace(
            rounds=around.rounds,
            turns=around.turns,
            run=self._first + place.run,
            mark_run=self._first + place.mark_run if place.marks_here else around.mark_run,
            touched=tuple(i for i, x in enumerate(operation.operands) if isinstance(x, int) and x in self.marked),
            mapped=around.mapped,
        )

    def forget(self, piece: Piece) -> None:
        for number in piece.last:
            self.env.pop(number, None)

    def results(self, marked: "Marked") -> list[Any]:
        atoms = self._flat.results
        outs = [x.val if isinstance(x, Literal) else self.env[x] for x in atoms]
        outs = outs if self.place.mapped is None else self.place.mapped.held(atoms, outs)
        for atom, x in zip(atoms, outs, strict=True):
            if isinstance(atom, int) and atom in self.marked:
                marked.add(x)
        return outs


class Marked:
    """Arrays that leave a jaxpr marked, by identity."""

    def __init__(self) -> None:
        self.count = 0
        self._arrays: dict[int, weakref.ref[Any]] = {}

    def add(self, x: Any) -> None:
        self.count += 1
        self._arrays[id(x)] = weakref.ref(x)

    def has(self, x: Any) -> bool:
        found = self._arrays.get(id(x))
        return found is not None and found() is x


class _Values:
    """The values of a piece. Those that it did not return are made again when they are asked for."""

    def __init__(self, piece: Piece, env: dict[int, Any], mapped: Any):
        self._env, self._mapped = env, mapped
        self._made_by = {x: operation for operation in piece.operations for x in operation.results}

    def __getitem__(self, x: Any) -> Any:
        if isinstance(x, Literal):
            return x.val if self._mapped is None else self._mapped.hold(x.val, x.aval)
        if x not in self._env:
            operation, bind_here = self._made_by[x], bind if self._mapped is None else self._mapped.bind
            with operation.eqn.ctx.manager, _outside(self._mapped):
                outs = bind_here(operation.eqn, [self[operand] for operand in operation.operands])
            self._env.update(zip(operation.results, outs, strict=True))
        return self._env[x]


class _Some(Sequence[Any]):
    """Some values of a piece."""

    def __init__(self, values: _Values, which: Sequence[Any]):
        self._values, self._which = values, which

    def __len__(self) -> int:
        return len(self._which)

    def __getitem__(self, i: Any) -> Any:
        if isinstance(i, slice):
            return _Some(self._values, self._which[i])
        return self._values[self._which[i]]
