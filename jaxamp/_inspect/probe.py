"""Looks at each result of a run: did the operation make infs or NaNs, flush small numbers, or read clamped ones?

What an operation makes of infs and NaNs that another one has made is a consequence, and not told as a fault of its own.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Primitive
from .._formats import float_dtype, is_float
from .._jaxpr import bind
from .._plan.higher_order import higher_order
from .._traits import shown_name, traits_of
from .location import Place
from .numbers import all_finite, has_nan, largest, near, zeros_in
from .overflow_report import Event
from .pieces import Compiled
from .program import Program
from .shards import shards_of


class Probe:
    """Looks at each result of a run. `compiled`: where to keep what it compiles."""

    def __init__(self, program: Program, underflow: float, compiled: Compiled):
        self._ledger, self._low = program.ledger, program.compute_dtype
        self._underflow = underflow
        self._compiled = compiled
        self._found: dict[tuple[Any, ...], tuple[Event, dict[tuple[int, ...], None]]] = {}
        self.constants: dict[str, None] = {}  # where a constant that is NaN is read, as text
        self.passed_on = 0  # operations that only passed on what others had made

    def look(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> bool:
        """Look at an operation. Returns whether its results have infs or NaNs that an operation has made."""
        if any(is_constant(x) and has_nan(x.val) for x in eqn.invars):
            self.constants[f"{shown_name(eqn.primitive)} ({place.source or 'source unknown'})"] = None
        reader = self._reader_of_clamped(eqn, place)
        if reader is not None:
            beyond = _finite_beyond(near(ins[1]), near(ins[2]))
            self._add("clamped", reader, place, ins[1:2], self._low, beyond)
        if not is_watched(eqn):
            return bool(place.touched)
        spoiled = False
        for k, v in enumerate(eqn.outvars):
            if float_dtype(v.aval) is not None and v.aval.size:
                out = near(outs[k])
                if not all_finite(out):
                    spoiled |= self._look_at_infinite(eqn, k, place, [near(x) for x in ins], out)
                    continue
                # Forwards, small probabilities and gates are zero in any network.
                share = self._underflow if place.phase == "backward" else max(self._underflow, 0.5)
                if out.dtype.itemsize <= 2 and zeros_in(out) > share * out.size:
                    lost = self._flushed(eqn, k, place, [near(x) for x in ins], out)
                    if lost is not None:
                        self._add("underflow", eqn.primitive, place, ins, out.dtype, lost, more_than=share)
        return spoiled

    def _look_at_infinite(self, eqn: Any, k: int, place: Place, ins: Sequence[Any], out: Any) -> bool:
        """Note what an operation has made. Returns whether the result has infs or NaNs that an operation has made."""
        follows = any(is_float(ins[i]) and not all_finite(ins[i]) for i in place.touched)
        made = _made(eqn, functools.partial(_again, eqn, k, place.mapped), ins, out)
        is_new = False
        for kind, entries in made.items():
            is_consequence = follows and kind == "invalid"
            is_new |= self._add(kind, eqn.primitive, place, ins, out.dtype, entries, is_consequence=is_consequence)
        self.passed_on += follows and not is_new
        return follows or is_new

    def _flushed(self, eqn: Any, k: int, place: Place, ins: Sequence[Any], out: Any) -> Any:
        """Which entries of a low result are zero that are not zero in float32; None if that is not known."""
        if eqn.primitive is lax.convert_element_type_p:
            wide = ins[0] if is_float(ins[0]) else None
        elif place.mapped is not None or eqn.effects:
            wide = _in_float32(eqn, functools.partial(_again, eqn, k, place.mapped), ins)
        else:
            run = functools.partial(_again, eqn, k, None)
            wide = self._compiled.alone(eqn, f"float32 {k}", lambda *xs: _in_float32(eqn, run, xs))(*ins)
        return None if wide is None else (out == 0) & (near(wide) != 0)

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
        entries: Any,
        more_than: float = 0.0,
        is_consequence: bool = False,
    ) -> bool:
        """Note an event if more than a share of the entries are marked. Returns whether they are."""
        marked = int(entries.sum())
        if marked <= more_than * entries.size:
            return False
        key = kind, place.phase, place.mark, primitive.name, place.source, is_consequence
        if key in self._found:
            self._found[key][1][place.rounds] = None
            return True
        info = jnp.finfo(dtype)
        limit = float(info.smallest_normal if kind == "underflow" else info.max)
        most = max((largest(x) for x in ins if is_float(x) and np.size(x)), default=0.0)
        name, share = shown_name(primitive), marked / entries.size
        where = place.phase, place.scope, name, place.source, place.rounds
        event = Event(kind, *where, str(dtype), most, limit, share, None, self._made_for(place, name))
        shards, count = shards_of(entries, is_mapped=place.mapped is not None)
        event = event._replace(shards=shards, shard_count=count, is_consequence=is_consequence)
        self._found[key] = event, {place.rounds: None}
        return True

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


def is_watched(eqn: Any) -> bool:
    """Whether an equation may make an inf, a NaN or a zero: one that moves numbers has those of its operands."""
    traits = traits_of(eqn.primitive)
    if eqn.primitive is lax.reduce_precision_p:
        info = jnp.finfo(eqn.outvars[0].aval.dtype)
        return eqn.params["exponent_bits"] < info.nexp or eqn.params["mantissa_bits"] < info.nmant
    return not ((traits.moves and not traits.fixed_dtype) or traits.compares)


def _finite_beyond(x: Any, most: Any) -> Any:
    return _numpy_for(x).isfinite(x) & (abs(x) > most)


def _numpy_for(*arrays: Any) -> Any:
    """NumPy, or JAX' if an array is elsewhere."""
    return jnp if any(isinstance(x, jax.Array) for x in arrays) else np


Run = Callable[..., Any]  # the same operation on other operands, with other parameters; None if it refuses them


def _made(eqn: Any, run: Run, ins: Sequence[Any], out: Any) -> dict[str, Any]:
    """Which entries of a result are NaN without a NaN among their operands, and which are inf without an inf."""
    traits, floats = traits_of(eqn.primitive), [x for x in ins if is_float(x)]
    xp = _numpy_for(out, *floats)
    nans, infs = xp.isnan(out), xp.isinf(out)
    if all(map(all_finite, floats)):
        return {"invalid": nans, "overflow": infs}
    if traits.elementwise:
        of_nan, of_infinite = (functools.reduce(xp.logical_or, map(f, floats)) for f in (xp.isnan, _is_not_finite))
        return {"invalid": nans & ~of_nan, "overflow": infs & ~of_infinite}
    if traits.matmul or traits.reduces or traits.keeps_range:  # what remains without bad operands is made here
        neutral = float(eqn.primitive is lax.reduce_prod_p)
        without_nan = run([_replaced(x, xp.isnan, 1) for x in ins])
        finite = run([_replaced(x, _is_not_finite, neutral) for x in ins])
        if without_nan is not None and finite is not None:
            finite, without_nan = near(finite), near(without_nan)
            overflows = xp.isinf(finite) & (nans | (out == finite))
            return {"invalid": nans & xp.isnan(without_nan) & ~overflows, "overflow": overflows}
    # We don't know which operand entries an entry depends on.
    wide = _in_float32(eqn, run, ins) if out.dtype.itemsize <= 2 else None
    overflows = infs & (False if wide is None else xp.isfinite(near(wide)))
    return {"invalid": nans & (not any(bool(xp.isnan(x).any()) for x in floats)), "overflow": overflows}


def _is_not_finite(x: Any) -> Any:
    return ~_numpy_for(x).isfinite(x)


def _replaced(x: Any, bad: Callable[[Any], Any], value: float) -> Any:
    xp = _numpy_for(x)
    return xp.where(bad(x), xp.asarray(value, x.dtype), x) if is_float(x) else x


def _again(eqn: Any, k: int, mapped: Any, ins: Sequence[Any], **changed: Any) -> Any:
    """The k-th result of the same operation on other operands; None if it refuses them, or has side effects."""
    if eqn.effects:
        return None
    try:
        return (bind if mapped is None else mapped.bind)(eqn, ins, **changed)[k]
    except Exception:
        return None


def _in_float32(eqn: Any, run: Run, ins: Sequence[Any]) -> Any:
    """The result of the same operation in float32; None if the primitive has no such form."""
    wide = [x.astype(jnp.float32) if is_float(x) else x for x in ins]
    changed = {name: np.dtype(np.float32) for name in _DTYPES if _is_low(eqn.params.get(name))}
    return run(wide, **changed)


_DTYPES = ("preferred_element_type", "compute_dtype", "dtype", "out_dtype")


def _is_low(dtype: Any) -> bool:
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating) and np.dtype(dtype).itemsize <= 2
