"""`find_overflow`: the operation that made an inf or a NaN, or that lost small numbers.

The call is run equation by equation, forwards and backwards, and each result is looked at:

    overflow    an inf from finite operands
    invalid     a NaN from operands without one: inf - inf, 0 / 0, the root of a negative number
    underflow   zeros in a low result that the same operation in float32 does not have
    clamped     finite numbers beyond the compute dtype, which `amp` clamps to its largest one where it reads them low

The report also says whether it reached the results: a mask may have removed it.
"""

import functools
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Jaxpr, Primitive
from .._formats import is_float
from .._jaxpr import bind
from .._plan.higher_order import higher_order
from .._plan.residuals import Keep
from .._scaling.state import DynamicScalerState, check_state
from .._traits import shown_name, traits_of
from .._transform.options import PolicyLike, check_function, check_options
from .location import Place, Source
from .program import Program, program_of
from .pullback import Pullback
from .walk import Walker


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
            return event._asdict() | {"source": None if event.source is None else event.source._asdict()}

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


def find_overflow(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
    backward: bool = True,
    underflow: float = 0.05,
) -> Callable[..., OverflowReport]:
    """Find the operation of `amp(fn)` that made an inf or a NaN, flushed small numbers to zero, or read clamped ones.

    Args:
        fn: The loss that you would pass to `amp`. Its first result is differentiated with respect to the floating-point
            arrays of the first argument.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.
        backward: Whether to look at the backward pass too. A result that is not a scalar is summed, and a note says
            so.
        underflow: The share of entries that a low operation of the backward pass may flush to zero before it is
            reported. Forwards, where small probabilities are zero in any network, at least half of them may.

    Returns:
        A function of `fn`'s arguments, and of `dynamic_scaler_state`, that returns an `OverflowReport`. With a scaler's
        state the backward pass starts from its scale, and the report says what happens at scale 1 too.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum((x @ w) @ w)
    >>> report = find_overflow(loss)(jnp.full((4, 4), 200.0), jnp.ones((2, 4)))
    >>> report.first.kind, report.first.primitive, report.first.limit
    ('overflow', 'dot_general', 65504.0)

    **Sharp edges**

    - It runs operation by operation, outside of `jit`, and waits for each: a thousand operations take seconds. XLA may
      round in other places than JAX says, so an overflow at the very limit may differ.
    - `shard_map`, kernels and callbacks are one operation each.
    - Values that a derivative needs from the forward pass, such as `0.5 / sqrt(x)`, are computed there: their phase is
      "forward".
    """
    check_function("find_overflow", fn)
    options = check_options(compute_dtype, amp_policy, keep, disable_passes)

    def find(*args: Any, dynamic_scaler_state: DynamicScalerState | None = None, **kwargs: Any) -> OverflowReport:
        if dynamic_scaler_state is not None:
            check_state("find_overflow", dynamic_scaler_state)
        program = program_of(options, fn, args, kwargs)
        program.check_concrete("find_overflow")
        pullbacks, notes = program.pullbacks(program.mixed) if backward else ([], [])
        bad = sum(not bool(_all_finite(x)) for x in program.arrays if is_float(x))
        notes += [f"{bad} of the arguments' arrays are not finite to begin with"] if bad else []
        forward = pullbacks[0].forward if pullbacks else program.mixed
        events, outs = _probed(program, underflow, "forward", forward, program.arrays)
        gradients: list[Any] = []
        scale = None if dynamic_scaler_state is None else float(dynamic_scaler_state.scaler)
        for pullback in pullbacks:
            found, gradients = _probed_backward(program, underflow, pullback, outs, scale)
            events, outs = events + found, outs[: pullback.results]
        clamped = [event for event in events if event.kind == "clamped"]
        before = {_key(event) for event in clamped if event.phase == "forward"}  # a checkpoint clamps it again
        small = sorted((event for event in events if event.kind == "underflow"), key=lambda event: -event.share)
        finite = all(bool(_all_finite(x)) for x in (*outs, *gradients) if is_float(x))
        return OverflowReport(
            program.name,
            options.compute_dtype.name,
            scale,
            finite,
            tuple(event for event in events if event.kind in ("overflow", "invalid")),
            tuple(small),
            tuple(event for event in clamped if event.phase == "forward" or _key(event) not in before),
            tuple(notes),
        )

    return find


def _probed(
    program: Program, underflow: float, phase: str, jaxpr: Jaxpr, operands: Sequence[Any]
) -> tuple[list[Event], list[Any]]:
    """The events of a run, and its results."""
    probe = _Probe(program, underflow)
    outs = Walker(program.ledger, probe.look).run(jaxpr, operands, Place(phase, program.path))
    return probe.events, outs


def _probed_backward(
    program: Program, underflow: float, pullback: Pullback, forward: list[Any], scale: float | None
) -> tuple[list[Event], list[Any]]:
    """The events of the backward pass that belongs to a forward pass, and the gradients times the scale."""
    outs, kept = forward[: pullback.results], forward[pullback.results :]

    def at(scale: float) -> tuple[list[Event], list[Any]]:
        return _probed(program, underflow, "backward", pullback.jaxpr, [*kept, *pullback.seeds(outs, scale)])

    events, gradients = at(1.0 if scale is None else scale)
    if scale is None:
        return events, gradients
    at_one = events if scale == 1 else at(1.0)[0]
    known, seen = ({_key(event) for event in found} for found in (at_one, events))
    events = [event._replace(at_scale_one=_key(event) in known) for event in events]
    more = [event for event in at_one if _key(event) not in seen and event.kind != "underflow"]
    return [*events, *(event._replace(at_scale_one=True) for event in more)], gradients


def _key(event: Event) -> tuple[Any, ...]:
    return event.kind, event.scope, event.primitive, event.source


class _Probe:
    """Looks at each result of a run."""

    def __init__(self, program: Program, underflow: float):
        self._ledger, self._low = program.ledger, program.compute_dtype
        self._underflow = underflow
        self._found: dict[tuple[Any, ...], tuple[Event, dict[tuple[int, ...], None]]] = {}

    def look(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        reader = self._reader_of_clamped(eqn, place)
        if reader is not None and (beyond := int(_finite_beyond(ins[1], ins[2]))):
            self._add("clamped", reader, place, ins[1:2], outs[0].size, self._low, beyond)
        for k, out in enumerate(outs):
            if is_float(out) and out.size:
                if not bool(_all_finite(out)):
                    for kind, entries in zip(("invalid", "overflow"), _made(eqn, k, ins, out), strict=True):
                        if entries:
                            self._add(kind, eqn.primitive, place, ins, out.size, out.dtype, entries)
                elif out.dtype.itemsize <= 2:
                    lost = _flushed(eqn, k, ins, out)
                    # Forwards, small probabilities and gates are zero in any network.
                    share = self._underflow if place.phase == "backward" else max(self._underflow, 0.5)
                    if lost > share * out.size:
                        self._add("underflow", eqn.primitive, place, ins, out.size, out.dtype, lost)

    def _reader_of_clamped(self, eqn: Any, place: Place) -> Primitive | None:
        """The primitive that reads the result of a clamp of ours (`_formats.saturate`); None for other equations."""
        if eqn.primitive is not lax.clamp_p or place.mark is None:
            return None
        reader = self._ledger.records[place.mark].eqn.primitive
        ours = reader is not eqn.primitive and getattr(eqn.invars[2], "val", None) == jnp.finfo(self._low).max
        return reader if ours else None

    def _add(
        self,
        kind: str,
        primitive: Primitive,
        place: Place,
        ins: Sequence[Any],
        size: int,
        dtype: np.dtype,
        entries: int,
    ) -> None:
        key = kind, place.phase, place.mark, primitive.name, place.source
        if key in self._found:
            self._found[key][1][place.rounds] = None
            return
        info = jnp.finfo(dtype)
        limit = float(info.smallest_normal if kind == "underflow" else info.max)
        largest = max((float(_largest(x)) for x in ins if is_float(x) and np.size(x)), default=0.0)
        name, share = shown_name(primitive), entries / size
        where = place.phase, place.scope, name, place.source, place.rounds
        event = Event(kind, *where, str(dtype), largest, limit, share, None, self._made_for(place, name))
        self._found[key] = event, {place.rounds: None}

    def _made_for(self, place: Place, name: str) -> str:
        origin = None if place.mark is None else self._ledger.records[place.mark].eqn
        if origin is None or higher_order(origin.primitive) is not None or shown_name(origin.primitive) == name:
            return ""
        return shown_name(origin.primitive)

    @property
    def events(self) -> list[Event]:
        return [event._replace(again=tuple(rounds)[1:]) for event, rounds in self._found.values()]


@jax.jit
def _all_finite(x: Any) -> jax.Array:
    return jnp.isfinite(x).all()


@jax.jit
def _finite_beyond(x: Any, largest: Any) -> jax.Array:
    return (jnp.isfinite(x) & (jnp.abs(x) > largest)).sum()


def _made(eqn: Any, k: int, ins: Sequence[Any], out: Any) -> tuple[int, int]:
    """How many entries of a result are NaN without a NaN among their operands, and how many are inf without an inf."""
    traits, floats = traits_of(eqn.primitive), [x for x in ins if is_float(x)]
    nans, infs = jnp.isnan(out), jnp.isinf(out)
    if traits.moves and not traits.fixed_dtype:
        return 0, 0
    if all(bool(_all_finite(x)) for x in floats):
        return int(nans.sum()), int(infs.sum())
    if traits.elementwise:
        of_nan, of_infinite = (functools.reduce(jnp.logical_or, map(f, floats)) for f in (jnp.isnan, _is_not_finite))
        return int((nans & ~of_nan).sum()), int((infs & ~of_infinite).sum())
    if traits.matmul or traits.reduces or traits.keeps_range:  # what remains without bad operands is made here
        neutral = float(eqn.primitive is lax.reduce_prod_p)
        without_nan = _again(eqn, k, [_replaced(x, jnp.isnan, 1) for x in ins])
        finite = _again(eqn, k, [_replaced(x, _is_not_finite, neutral) for x in ins])
        if without_nan is not None and finite is not None:
            overflows = jnp.isinf(finite) & (nans | (out == finite))
            return int((nans & jnp.isnan(without_nan) & ~overflows).sum()), int(overflows.sum())
    # We don't know which operand entries an entry depends on.
    wide = _in_float32(eqn, k, ins) if out.dtype.itemsize <= 2 else None
    overflows = infs & (False if wide is None else jnp.isfinite(wide))
    return 0 if any(bool(jnp.isnan(x).any()) for x in floats) else int(nans.sum()), int(overflows.sum())


def _is_not_finite(x: Any) -> jax.Array:
    return ~jnp.isfinite(x)


def _replaced(x: Any, bad: Callable[[Any], jax.Array], value: float) -> Any:
    return jnp.where(bad(x), jnp.asarray(value, x.dtype), x) if is_float(x) else x


def _again(eqn: Any, k: int, ins: Sequence[Any], **changed: Any) -> Any:
    """The result of the same operation on other operands; None if it refuses them, or has side effects."""
    if eqn.effects:
        return None
    try:
        return bind(eqn, ins, **changed)[k]
    except Exception:
        return None


@jax.jit
def _largest(x: Any) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)


@jax.jit
def _zeros_of_more(low: Any, wide: Any) -> jax.Array:
    return ((low == 0) & (wide != 0)).sum()


def _flushed(eqn: Any, k: int, ins: Sequence[Any], out: Any) -> int:
    """How many entries of a low result are zero that are not zero in float32."""
    if not bool((out == 0).any()):
        return 0
    if eqn.primitive is lax.convert_element_type_p:
        return int(_zeros_of_more(out, ins[0])) if is_float(ins[0]) else 0
    wide = _in_float32(eqn, k, ins)
    return 0 if wide is None else int(_zeros_of_more(out, wide))


def _in_float32(eqn: Any, k: int, ins: Sequence[Any]) -> Any:
    """The result of the same operation in float32; None if the primitive has no such form."""
    wide = [x.astype(jnp.float32) if is_float(x) else x for x in ins]
    changed = {name: np.dtype(np.float32) for name in _DTYPES if _is_low(eqn.params.get(name))}
    return _again(eqn, k, wide, **changed)


_DTYPES = ("preferred_element_type", "compute_dtype", "dtype", "out_dtype")


def _is_low(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize <= 2
