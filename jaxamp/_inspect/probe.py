"""Looks at each result of a run: did the operation make infs or NaNs, flush small numbers, or read clamped ones?"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Primitive
from .._formats import is_float
from .._jaxpr import bind
from .._plan.higher_order import higher_order
from .._traits import shown_name, traits_of
from .location import Place
from .overflow_report import Event
from .program import Program
from .shards import shards_of


class Probe:
    """Looks at each result of a run."""

    def __init__(self, program: Program, underflow: float):
        self._ledger, self._low = program.ledger, program.compute_dtype
        self._underflow = underflow
        self._found: dict[tuple[Any, ...], tuple[Event, dict[tuple[int, ...], None]]] = {}
        self.constants: dict[str, None] = {}  # where a constant that is NaN is read, as text

    def look(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        if any(is_constant(x) and has_nan(x.val) for x in eqn.invars):
            self.constants[f"{shown_name(eqn.primitive)} ({place.source or 'source unknown'})"] = None
        reader = self._reader_of_clamped(eqn, place)
        if reader is not None:
            self._add("clamped", reader, place, ins[1:2], self._low, _finite_beyond(ins[1], ins[2]))
        for k, out in enumerate(outs):
            if is_float(out) and out.size:
                run = functools.partial(_again, eqn, k, place.mapped)
                if not bool(all_finite(out)):
                    for kind, entries in _made(eqn, run, ins, out).items():
                        self._add(kind, eqn.primitive, place, ins, out.dtype, entries)
                elif out.dtype.itemsize <= 2 and bool((out == 0).any()):
                    # Forwards, small probabilities and gates are zero in any network.
                    share = self._underflow if place.phase == "backward" else max(self._underflow, 0.5)
                    lost = _flushed(eqn, run, ins, out)
                    if lost is not None:
                        self._add("underflow", eqn.primitive, place, ins, out.dtype, lost, more_than=share)

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
        dtype: np.dtype,
        entries: jax.Array,
        more_than: float = 0.0,
    ) -> None:
        """Note an event if more than a share of the entries are marked."""
        marked = int(entries.sum())
        if marked <= more_than * entries.size:
            return
        key = kind, place.phase, place.mark, primitive.name, place.source
        if key in self._found:
            self._found[key][1][place.rounds] = None
            return
        info = jnp.finfo(dtype)
        limit = float(info.smallest_normal if kind == "underflow" else info.max)
        largest = max((float(_largest(x)) for x in ins if is_float(x) and np.size(x)), default=0.0)
        name, share = shown_name(primitive), marked / entries.size
        where = place.phase, place.scope, name, place.source, place.rounds
        event = Event(kind, *where, str(dtype), largest, limit, share, None, self._made_for(place, name))
        shards, count = shards_of(entries, is_mapped=place.mapped is not None)
        self._found[key] = event._replace(shards=shards, shard_count=count), {place.rounds: None}

    def _made_for(self, place: Place, name: str) -> str:
        origin = None if place.mark is None else self._ledger.records[place.mark].eqn
        if origin is None or higher_order(origin.primitive) is not None or shown_name(origin.primitive) == name:
            return ""
        return shown_name(origin.primitive)

    @property
    def events(self) -> list[Event]:
        return [event._replace(again=tuple(rounds)[1:]) for event, rounds in self._found.values()]


def is_constant(x: Any) -> bool:
    """Whether an operand is written in the program itself."""
    return hasattr(x, "val")


def has_nan(x: Any) -> bool:
    return is_float(x) and bool(np.isnan(np.asarray(x, np.float32)).any())


@jax.jit
def all_finite(x: Any) -> jax.Array:
    return jnp.isfinite(x).all()


@jax.jit
def _finite_beyond(x: Any, largest: Any) -> jax.Array:
    return jnp.isfinite(x) & (jnp.abs(x) > largest)


Run = Callable[..., Any]  # the same operation on other operands, with other parameters; None if it refuses them


def _made(eqn: Any, run: Run, ins: Sequence[Any], out: Any) -> dict[str, jax.Array]:
    """Which entries of a result are NaN without a NaN among their operands, and which are inf without an inf."""
    traits, floats = traits_of(eqn.primitive), [x for x in ins if is_float(x)]
    nans, infs = jnp.isnan(out), jnp.isinf(out)
    if traits.moves and not traits.fixed_dtype:
        return {}
    if all(bool(all_finite(x)) for x in floats):
        return {"invalid": nans, "overflow": infs}
    if traits.elementwise:
        of_nan, of_infinite = (functools.reduce(jnp.logical_or, map(f, floats)) for f in (jnp.isnan, _is_not_finite))
        return {"invalid": nans & ~of_nan, "overflow": infs & ~of_infinite}
    if traits.matmul or traits.reduces or traits.keeps_range:  # what remains without bad operands is made here
        neutral = float(eqn.primitive is lax.reduce_prod_p)
        without_nan = run([_replaced(x, jnp.isnan, 1) for x in ins])
        finite = run([_replaced(x, _is_not_finite, neutral) for x in ins])
        if without_nan is not None and finite is not None:
            overflows = jnp.isinf(finite) & (nans | (out == finite))
            return {"invalid": nans & jnp.isnan(without_nan) & ~overflows, "overflow": overflows}
    # We don't know which operand entries an entry depends on.
    wide = _in_float32(eqn, run, ins) if out.dtype.itemsize <= 2 else None
    overflows = infs & (False if wide is None else jnp.isfinite(wide))
    return {"invalid": nans & (not any(bool(jnp.isnan(x).any()) for x in floats)), "overflow": overflows}


def _is_not_finite(x: Any) -> jax.Array:
    return ~jnp.isfinite(x)


def _replaced(x: Any, bad: Callable[[Any], jax.Array], value: float) -> Any:
    return jnp.where(bad(x), jnp.asarray(value, x.dtype), x) if is_float(x) else x


def _again(eqn: Any, k: int, mapped: Any, ins: Sequence[Any], **changed: Any) -> Any:
    """The k-th result of the same operation on other operands; None if it refuses them, or has side effects."""
    if eqn.effects:
        return None
    try:
        return (bind if mapped is None else mapped.bind)(eqn, ins, **changed)[k]
    except Exception:
        return None


@jax.jit
def _largest(x: Any) -> jax.Array:
    return jnp.max(jnp.where(jnp.isfinite(x), jnp.abs(x), 0)).astype(jnp.float32)


def _flushed(eqn: Any, run: Run, ins: Sequence[Any], out: Any) -> jax.Array | None:
    """Which entries of a low result are zero that are not zero in float32; None if that is not known."""
    if eqn.primitive is lax.convert_element_type_p:
        wide = ins[0] if is_float(ins[0]) else None
    else:
        wide = _in_float32(eqn, run, ins)
    return None if wide is None else (out == 0) & (wide != 0)


def _in_float32(eqn: Any, run: Run, ins: Sequence[Any]) -> Any:
    """The result of the same operation in float32; None if the primitive has no such form."""
    wide = [x.astype(jnp.float32) if is_float(x) else x for x in ins]
    changed = {name: np.dtype(np.float32) for name in _DTYPES if _is_low(eqn.params.get(name))}
    return run(wide, **changed)


_DTYPES = ("preferred_element_type", "compute_dtype", "dtype", "out_dtype")


def _is_low(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize <= 2
