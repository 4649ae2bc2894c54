"""The rows of a report: one for each equation of the program that `amp` makes, with the step of the plan behind it.

The program is read as it will run. Each of its equations, and of its derivative, carries the number of the step that
made it (`Ledger`), and so its reason.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp

from .._compat import Jaxpr, open_jaxpr
from .._plan.classify import ENTERED, name_of_rule
from .._plan.higher_order import describe
from .._plan.sensitivity import float_dtype
from .._transform.interpreter import Ledger
from .cost import Dims, base_name, bytes_of, dims_of, flops_of, is_matmul
from .location import Place, Source


class Dtypes(NamedTuple):
    """The dtypes of an operation."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' '.join(map(_short, self.operands)) or '()'} -> {' '.join(map(_short, self.results)) or '()'}"


class Row(NamedTuple):
    """One operation of the program that runs. Costs are those of all its rounds."""

    phase: str  # forward, backward
    scope: str  # named scopes, outermost first: "block/attention"
    primitive: str
    kind: str  # matmul, cast, not entered, other
    written: Dtypes | None  # None: no operation of the user's
    run: Dtypes
    rule: str
    reason: str
    source: Source | None
    times: int  # of a scan's body, its length
    flops: int
    bytes: int
    dims: Dims | None

    @property
    def multiplied(self) -> str:
        """The widest dtype among the operands, which is the one that a matmul multiplies in."""
        return max(self.run.operands[:2], key=lambda name: jnp.dtype(name).itemsize)


def rows_of(jaxpr: Jaxpr, ledger: Ledger, place: Place) -> Iterator[Row]:
    """The rows of a jaxpr, bodies included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        here, entry = place.of(eqn, ledger), describe(eqn)
        if entry is None:
            yield _row(eqn, ledger, here)
            continue
        here = here._replace(times=here.times * _times(eqn))
        for body in entry.bodies:
            yield from rows_of(body.jaxpr, ledger, here)


def _times(eqn: Any) -> int:
    """How often the body of an equation is run: in each round of a scan, on each device of a `shard_map`."""
    if eqn.primitive.name == "shard_map":
        return math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return eqn.params.get("length", 1)


def _row(eqn: Any, ledger: Ledger, place: Place) -> Row:
    run, name = _dtypes(eqn), base_name(eqn.primitive)
    written, rule, reason, kind = None, "", "a result in its dtype", "matmul" if is_matmul(eqn) else "other"
    if place.mark is not None:
        origin, step = place.step(ledger)
        of = base_name(origin.primitive)
        rule = name_of_rule(step.rule)
        if place.phase == "backward":
            why = "JAX's own rule" if step.reason == ENTERED else step.reason
            written, reason = _as_if_written(run, origin), f"derivative of {of}: {why}"
            if name == "convert_element_type" == of and _is_way_back(origin, run):
                written = run  # of the user's cast
        elif of == name:
            written, reason = _dtypes(origin), step.reason
            kind = "not entered" if reason.startswith("not entered") else kind
        else:
            reason = f"added for {of}: {step.reason}"
    if name == "convert_element_type" and written != run and _between_floats(eqn):
        kind = "cast"
    return Row(
        place.phase,
        place.scope,
        name,
        kind,
        written,
        run,
        rule,
        reason,
        place.source,
        place.times,
        place.times * flops_of(eqn),
        place.times * bytes_of(eqn),
        dims_of(eqn),
    )


def _dtypes(eqn: Any) -> Dtypes:
    """A mixed matmul rounds its operands first: it multiplies in its compute dtype."""
    operands = [_dtype(v) for v in eqn.invars]
    if "compute_dtype" in eqn.params and base_name(eqn.primitive) != eqn.primitive.name:
        operands[:2] = [eqn.params["compute_dtype"].name] * 2
    return Dtypes(tuple(operands), tuple(_dtype(v) for v in eqn.outvars))


def _dtype(atom: Any) -> str:
    return str(getattr(atom.aval, "dtype", type(atom.aval).__name__))


def _as_if_written(run: Dtypes, origin: Any) -> Dtypes:
    """The dtypes that the derivative has without `amp`: floats have those of what is differentiated."""
    floats = [str(dtype) for v in (*origin.outvars, *origin.invars) if (dtype := float_dtype(v.aval)) is not None]
    wide = max(floats, key=lambda name: jnp.dtype(name).itemsize, default=None)

    def widened(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(wide if wide and name in _LOW else name for name in names)

    return Dtypes(widened(run.operands), widened(run.results))


def _is_way_back(origin: Any, run: Dtypes) -> bool:
    there = _dtypes(origin)
    return (run.operands, run.results) == (there.results, there.operands)


_LOW = frozenset({"float16", "bfloat16"})


def _between_floats(eqn: Any) -> bool:
    return float_dtype(eqn.invars[0].aval) is not None and float_dtype(eqn.outvars[0].aval) is not None


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@functools.cache
def _short(name: str) -> str:
    """As a jaxpr prints it: f32, bf16, i32."""
    kind = name.rstrip("0123456789")
    return _SHORT.get(kind, kind) + name[len(kind) :]
