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
    is_consequence: bool = False  # it made NaNs of infs that another operation has made

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
        return f"{text}\n    {self.remedy}" if self.remedy else text

    @property
    def remedy(self) -> str:
        """What to do about it."""
        if self.is_consequence:
            return ""
        if self.kind == "underflow" and self.phase == "backward":
            if self.at_scale_one is not None:
                return "A larger scale would keep more of it."
            return f"Scale the loss with jaxamp.DynamicScalerState, or {self._in_bfloat16}{self._pin}."
        if self.at_scale_one is False:
            return "It is not there at scale 1: the scaler handles it by lowering the scale."
        why = "It is there at scale 1 too: a smaller scale won't help. " if self.at_scale_one else ""
        if self.dtype in ("float32", "float64"):
            return f"{why}It runs in {self.dtype} already: look at its operands, and where they lose their value."
        either = f"{self._in_bfloat16}{self._pin}"
        return f"{why}{either[0].upper()}{either[1:]}."

    @property
    def _in_bfloat16(self) -> str:
        return "pass compute_dtype=jnp.bfloat16, or " if self.dtype == "float16" else ""

    @property
    def _pin(self) -> str:
        if not self.scope:
            return "put `with jaxamp.amp_stop():` around it"
        return (
            f"pin the scope: amp_policy=jaxamp.default_amp_policy | {{{self.scope!r}: jaxamp.use_original_precision}}"
        )


def _rounds_in_words(rounds: tuple[int, ...]) -> str:
    if len(rounds) < 2:
        return f"round {rounds[0]} of the loop" if rounds else ""
    return f"round {'/'.join(map(str, rounds))} of the loops, the outermost first"


def _spread_in_words(consequences: tuple[Event, ...], passed_on: int) -> str:
    """A line on what followed from the causes."""
    text = f"It spread: {passed_on} later operations passed it on"
    if not consequences:
        return text + "."
    where = ", ".join(f"{event.primitive} ({event.source or 'source unknown'})" for event in consequences[:3])
    return f"{text}, {len(consequences)} made NaNs of it: {where}{', ...' if len(consequences) > 3 else ''}."


@dataclass(frozen=True)
class OverflowReport:
    """What `find_overflow` found, in the order in which operations run. True if it found anything.

    Attributes:
        name: Of the function.
        compute_dtype: The name of the low dtype.
        scale: The scale of the backward pass, if a scaler was given.
        finite: Whether all results and gradients are finite.
        events: Overflows and invalid operations, each a cause.
        underflows: Operations that flush small numbers to zero, the largest share first.
        clamped: Operations that read clamped numbers.
        notes: What else is worth knowing.
        consequences: Operations that made NaNs of infs that an earlier one has made.
        passed_on: How many operations only passed infs and NaNs on that an earlier one has made.

    >>> import jax.numpy as jnp, jaxamp
    >>> report = jaxamp.find_overflow(lambda w: jnp.sum(jnp.exp(w)))(jnp.array([1.0, 100.0]))
    >>> report.finite, report.first.primitive, len(report.to_dict()["events"])
    (False, 'exp', 1)
    """

    name: str
    compute_dtype: str
    scale: float | None
    finite: bool
    events: tuple[Event, ...]
    underflows: tuple[Event, ...]
    clamped: tuple[Event, ...]
    notes: tuple[str, ...]
    consequences: tuple[Event, ...] = ()
    passed_on: int = 0

    def __bool__(self) -> bool:
        return bool(self.events or self.underflows or self.clamped)

    @property
    def first(self) -> Event | None:
        """The first operation that made an inf or a NaN; None if there is none."""
        return self.events[0] if self.events else None

    def to_dict(self) -> dict[str, Any]:
        """Put the whole report in a form that is ready for JSON.

        Returns:
            A dictionary of the attributes.
        """

        def plain(event: Event) -> dict[str, Any]:
            source = None if event.source is None else event.source._asdict()
            shards = [shard._asdict() for shard in event.shards]
            return event._asdict() | {"source": source, "shards": shards, "remedy": event.remedy}

        names = "events", "underflows", "clamped", "consequences"
        lists = {name: [plain(e) for e in getattr(self, name)] for name in names}
        return asdict(self) | lists | {"notes": list(self.notes)}

    def __str__(self) -> str:
        head = f"{self.name} in {self.compute_dtype}" + (f", scale {self.scale:g}" if self.scale is not None else "")
        lines = [f"{head}: {'all finite' if self.finite else 'not finite'}"]
        lines += [f"- {event}" for event in (*self.events[:5], *self.underflows[:5], *self.clamped[:5])]
        if self.consequences or self.passed_on:
            lines.append(_spread_in_words(self.consequences, self.passed_on))
        if not self and self.finite:
            lines.append("nothing found")
        if self.events and self.finite:
            lines.append("All results are finite: a mask, or a bounded function, removed it again.")
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])
