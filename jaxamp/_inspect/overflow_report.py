"""What `find_overflow` found: its data, and its text."""

from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from .location import Source
from .shards import Shard, shards_in_words


class Event(NamedTuple):
    """An operation that made infs or NaNs from finite numbers, flushed small ones to zero, or read clamped ones."""

    kind: str  # overflow, invalid, underflow, clamped
    phase: str  # forward, backward
    scope: str  # named scopes, outermost first: "block/attention"
    primitive: str
    source: Source | None
    rounds: tuple[int, ...]  # the round of each loop around it, counted from 0
    dtype: str  # of the result; for a clamped operand, the dtype that it was clamped to
    largest: float  # magnitude among the operands
    limit: float  # the largest number that the dtype holds; for an underflow the smallest normal one
    share: float  # of the entries of the result, or of the clamped operand
    at_scale_one: bool | None  # whether it happens without loss scaling; None: forwards, or without a scaler
    of: str = ""  # the user's primitive, if this is a cast for it or part of its derivative
    again: tuple[tuple[int, ...], ...] = ()  # other rounds in which it happens: a mask may hide one and not another
    shards: tuple[Shard, ...] = ()  # the parts that have it, of an array that is split over devices
    shard_count: int = 0  # of all its parts

    def __str__(self) -> str:
        where = ", ".join(
            part
            for part in (
                f"scope {self.scope}" if self.scope else "",
                _rounds_in_words(self.rounds),
                str(self.source or ""),
            )
            if part
        )
        what = f"an operand of {self.primitive}" if self.kind == "clamped" else self.primitive
        what += f", made for {self.of}" if self.of else ""
        text = f"{self.kind} in the {self.phase} pass: {what} ({where})"
        word = "smallest normal" if self.kind == "underflow" else "largest"
        text += f"\n    {100 * self.share:.3g} % of the entries; largest operand {self.largest:.4g}, "
        text += f"the {word} {self.dtype} is {self.limit:.4g}"
        if self.shards:
            text += f"\n    {shards_in_words(self.shards, self.shard_count)}"
        if self.again:
            some = ", ".join("/".join(map(str, rounds)) for rounds in self.again[:5])
            text += f"\n    Again in {len(self.again)} other rounds: {some}{', ...' if len(self.again) > 5 else ''}"
        if self.kind == "underflow":
            return text + ("" if self.at_scale_one is None else "\n    A larger scale would keep more of it.")
        if self.at_scale_one is True:
            text += "\n    It is there at scale 1 too: a smaller scale won't help."
        if self.at_scale_one is False:
            text += "\n    It is not there at scale 1: the scaler handles it by lowering the scale."
        return text


def _rounds_in_words(rounds: tuple[int, ...]) -> str:
    if len(rounds) < 2:
        return f"round {rounds[0]} of the loop" if rounds else ""
    return f"round {'/'.join(map(str, rounds))} of the loops, the outermost first"


@dataclass(frozen=True)
class OverflowReport:
    """What `find_overflow` found, in the order in which operations run. True if it found anything."""

    name: str
    compute_dtype: str
    scale: float | None  # of the backward pass, if a scaler was given
    finite: bool  # whether all results and gradients are finite
    events: tuple[Event, ...]  # overflows and invalid operations
    underflows: tuple[Event, ...]  # the largest share first
    clamped: tuple[Event, ...]
    notes: tuple[str, ...]

    def __bool__(self) -> bool:
        return bool(self.events or self.underflows or self.clamped)

    @property
    def first(self) -> Event | None:
        """The first operation that made an inf or a NaN."""
        return self.events[0] if self.events else None

    def to_dict(self) -> dict[str, Any]:
        """The whole report, ready for JSON."""

        def plain(event: Event) -> dict[str, Any]:
            source = None if event.source is None else event.source._asdict()
            return event._asdict() | {"source": source, "shards": [shard._asdict() for shard in event.shards]}

        lists = {name: [plain(e) for e in getattr(self, name)] for name in ("events", "underflows", "clamped")}
        return asdict(self) | lists | {"notes": list(self.notes)}

    def __str__(self) -> str:
        head = f"{self.name} in {self.compute_dtype}" + (f", scale {self.scale:g}" if self.scale is not None else "")
        lines = [f"{head}: {'all finite' if self.finite else 'not finite'}"]
        lines += [f"- {event}" for event in (*self.events[:5], *self.underflows[:5], *self.clamped[:5])]
        if not self and self.finite:
            lines.append("nothing found")
        if self.events and self.finite:
            lines.append("All results are finite: a mask, or a bounded function, removed it again.")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
