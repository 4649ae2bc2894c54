"""The rows of a report: one for each equation of the program that `amp` makes, with the step of the plan behind it.

The program is read as it will run. Each of its equations, and of its derivative, carries the number of the step that
made it (`Ledger`), and so its reason.
"""

import functools
import sysconfig
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax

from ._compat import Jaxpr, first_frame, mark_of, open_jaxpr, scopes
from ._cost import Dims, base_name, bytes_of, dims_of, flops_of, is_matmul
from ._higher_order import describe
from ._interpreter import Ledger
from ._judge import name_of_rule
from ._plan import Plan
from ._standing import float_dtype


class Dtypes(NamedTuple):
    """The dtypes of an operation."""

    operands: tuple[str, ...]
    results: tuple[str, ...]

    def __str__(self) -> str:
        return f"{' '.join(map(_short, self.operands)) or '()'} -> {' '.join(map(_short, self.results)) or '()'}"


class Source(NamedTuple):
    """A line of the user's."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}"


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
        return max(self.run.operands[:2], key=lambda name: jax.numpy.dtype(name).itemsize)


class Place(NamedTuple):
    """Where a jaxpr is run."""

    phase: str
    scopes: tuple[str, ...] = ()
    times: int = 1
    mark: int | None = None  # the number of the step that runs it
    source: Source | None = None
    plan: Plan | None = None  # of a jaxpr that runs as it was written, so that its equations have no numbers


def rows_of(jaxpr: Jaxpr, ledger: Ledger, place: Place) -> Iterator[Row]:
    """The rows of a jaxpr, bodies included."""
    for i, eqn in enumerate(open_jaxpr(jaxpr).eqns):
        stack = eqn.source_info.name_stack
        mark = mark_of(stack) if place.plan is None else ledger.number(place.plan, i)
        here = place._replace(
            scopes=place.scopes + scopes(stack),
            mark=place.mark if mark is None else mark,
            source=source_of(eqn) or place.source,
            plan=None,
        )
        entry = describe(eqn)
        if entry is None:
            yield _row(eqn, ledger, here)
            continue
        times = place.times * eqn.params.get("length", 1)
        plans = [] if here.mark is None else _bodies_of(ledger, here.mark)
        for body in entry.bodies:
            plan = next((plan for plan in plans if _runs_as_written(plan, body.jaxpr)), None)
            yield from rows_of(body.jaxpr, ledger, here._replace(times=times, plan=plan))


def _bodies_of(ledger: Ledger, mark: int) -> Sequence[Plan]:
    plan, i = ledger.steps[mark]
    return plan.steps[i].bodies


def _runs_as_written(plan: Plan, jaxpr: Jaxpr) -> bool:
    """Whether a jaxpr is that of a plan which changes nothing, perhaps traced once more."""
    written, run = open_jaxpr(plan.jaxpr).eqns, open_jaxpr(jaxpr).eqns
    return not plan.touched and [eqn.primitive for eqn in written] == [eqn.primitive for eqn in run]


def _row(eqn: Any, ledger: Ledger, place: Place) -> Row:
    run, name = _dtypes(eqn), base_name(eqn.primitive)
    written, rule, reason, kind = None, "", "added", "matmul" if is_matmul(eqn) else "other"
    if place.mark is not None:
        plan, i = ledger.steps[place.mark]
        origin, step = open_jaxpr(plan.jaxpr).eqns[i], plan.steps[i]
        rule = name_of_rule(step.rule)
        if place.phase == "backward":
            written, reason = _as_if_written(run, origin), f"derivative of {origin.primitive.name}: {step.reason}"
        elif origin.primitive.name == name:
            written, reason = _dtypes(origin), step.reason
            kind = "not entered" if reason.startswith("not entered") else kind
        else:
            reason = f"added for {origin.primitive.name}: {step.reason}"
    if name == "convert_element_type" and (place.phase == "backward" or written != run) and _between_floats(eqn):
        kind = "cast"
    return Row(
        place.phase,
        "/".join(place.scopes),
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
    wide = max(floats, key=lambda name: jax.numpy.dtype(name).itemsize, default=None)

    def widened(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(wide if wide and name in _LOW else name for name in names)

    return Dtypes(widened(run.operands), widened(run.results))


_LOW = frozenset({"float16", "bfloat16"})


def _between_floats(eqn: Any) -> bool:
    return float_dtype(eqn.invars[0].aval) is not None and float_dtype(eqn.outvars[0].aval) is not None


_SHORT = {"float": "f", "bfloat": "bf", "int": "i", "uint": "u", "complex": "c"}


@functools.cache
def _short(name: str) -> str:
    """As a jaxpr prints it: f32, bf16, i32."""
    kind = name.rstrip("0123456789")
    return _SHORT.get(kind, kind) + name[len(kind) :]


# -- source lines


@functools.cache
def _folders() -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Where JAX and we are; and where other libraries are."""
    ours = Path(__file__).parent, Path(jax.__file__).parent
    libraries = [sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")]
    return tuple(map(str, ours)), tuple(libraries)


@functools.cache
def _is_not_ours(file: str) -> bool:
    return not file.startswith((*_folders()[0], "<frozen"))


@functools.cache
def _is_the_users(file: str) -> bool:
    return _is_not_ours(file) and not file.startswith(_folders()[1])


def source_of(eqn: Any) -> Source | None:
    """The line of the user's that an equation comes from: the innermost that is in no library, if there is one."""
    found = first_frame(eqn.source_info, _is_the_users) or first_frame(eqn.source_info, _is_not_ours)
    return None if found is None else Source(*found)
