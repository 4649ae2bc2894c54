"""Pairs the operations of two runs of a program: the n-th of its primitive in its scope, round by round of a loop."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from .._traits import shown_name, traits_of
from .._transform.ledger import Ledger
from .comparison import Compared, Error, error_of
from .location import Place
from .magnified import Trails
from .ranges import Range, range_of

Key = tuple[str, str, Any, int]


class _Numbers:
    """Numbers operations that compute: the n-th of its primitive in its scope, in this round and branch."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str, Any]] = Counter()

    def key(self, primitive: Any, place: Place, outs: Sequence[Any]) -> Key | None:
        """The key of an operation; None for one that computes nothing of its own."""
        traits = traits_of(primitive)
        if traits.moves or traits.compares or traits.passes_on:
            return None
        if not outs or not jnp.issubdtype(outs[0].dtype, jnp.floating):
            return None
        which = place.scope, shown_name(primitive), place.turns
        self._counts[which] += 1
        return *which, self._counts[which]


class Recorder:
    """Records the results of the reference, and their ranges."""

    def __init__(self) -> None:
        self.seen: dict[Key, Any] = {}
        self.ranges: dict[str, Range] = {}
        self._numbers = _Numbers()

    def record(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        key = self._numbers.key(eqn.primitive, place, outs)
        if key is not None:
            self.seen[key] = outs[0]
            self.add_range(place.scope, outs[:1])

    def add_range(self, name: str, arrays: Sequence[Any]) -> None:
        for x in arrays:
            self.ranges[name] = self.ranges.get(name, Range(Counter(), 0)) + range_of(x)


class Matcher:
    """Compares the results of another run with those of the reference, which it uses up.

    An operation that a rule of the policy has replaced may be many equations: its last result is compared with the
    result of the operation as written.
    """

    def __init__(self, seen: dict[Key, Any], ledger: Ledger, trails: Trails):
        self.rows: list[Compared] = []
        self._trails = trails
        self._alone = 0
        self._ledger = ledger
        self._seen = seen
        self._numbers = _Numbers()
        self._replaced: tuple[Place, Sequence[Any]] | None = None  # the last equation of one that was replaced

    def look(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        record = None if place.mark is None else self._ledger.records[place.mark]
        if self._replaced is not None and not _is_same_run(place, self._replaced[0]):
            self.finish()
        if record is not None and record.step.replaced:
            self._replaced = place, outs
        else:
            error = self._compare(eqn.primitive, place, outs)
            self._trails.follow(eqn, place, ins, outs, error)

    def finish(self) -> None:
        """Compare the operation that was replaced last."""
        if self._replaced is not None:
            (place, outs), self._replaced = self._replaced, None
            assert place.mark is not None
            self._compare(self._ledger.records[place.mark].eqn.primitive, place, outs)

    def _compare(self, primitive: Any, place: Place, outs: Sequence[Any]) -> Error | None:
        key = self._numbers.key(primitive, place, outs)
        if key is None:
            return None
        reference = self._seen.pop(key, None)
        if reference is not None and place.mark is not None:
            order = self._ledger.records[place.mark].step.order
            reference = reference if order is None else jnp.transpose(reference, order)
        if reference is None or reference.shape != outs[0].shape:
            self._alone += 1
            return None
        name, dtype = shown_name(primitive), str(outs[0].dtype)
        error = error_of(outs[0], reference)
        self.rows.append(Compared(name, place.scope, place.source, dtype, error))
        return error

    def notes(self) -> list[str]:
        """How many operations were not compared."""
        if not (self._alone or self._seen):
            return []
        return [
            f"left out, because the other run has no partner for them: {self._alone} operations of amp, "
            f"{len(self._seen)} of the reference. This happens if loops take other numbers of rounds, or conds other "
            "branches."
        ]


def _is_same_run(a: Place, b: Place) -> bool:
    """Whether two equations belong to one run of one step."""
    return (a.mark, a.mark_run) == (b.mark, b.mark_run)
