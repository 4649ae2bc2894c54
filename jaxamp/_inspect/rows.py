"""The rows of a report: one for each equation of the program that `amp` makes, with the step of the plan behind it.

The program is read as it will run. Each of its equations, and of its derivative, carries the number of the step that
made it (`Ledger`), and so its reason.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax.numpy as jnp
from jax import lax

from .._compat import Jaxpr, open_jaxpr
from .._formats import float_dtype
from .._plan.higher_order import describe
from .._plan.reasons import Why
from .._policy.rules import name_of_rule
from .._primitives.quantize import EIGHT_BITS
from .._traits import shown_name, traits_of
from .._traits.matmul_cost import Dims, is_outer_product
from .._transform.ledger import Ledger
from .cost import bytes_of, dims_of, flops_of
from .location import Place, Source
from .reasons import Explanation, Role


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
    kind: str  # matmul (one with a contraction, or a low one), cast, not entered, other
    written: Dtypes | None  # None: the user wrote no such operation
    run: Dtypes
    rule: str
    why: Explanation
    source: Source | None
    times: int  # of a scan's body, its length
    flops: int
    bytes: int
    dims: Dims | None
    format: str = ""  # the number format that a rule of the policy gives the forward pass

    @property
    def reason(self) -> str:
        """Why it runs as it does, in words."""
        return self.why.text()

    @property
    def multiplied(self) -> str:
        """The number format that a matmul multiplies in: if no rule says so, the widest float dtype of its operands."""
        return self.format or max(self.run.operands[:2], key=_width)


def _width(name: str) -> Any:
    """By which dtypes are compared: floats are wider than integers, and those than formats of a byte or less."""
    bytes_ = 0 if name in _FORMATS else jnp.dtype(name).itemsize
    return "float" in name, bytes_, name


_FORMATS = frozenset(map(str, EIGHT_BITS.values()))


def rows_of(jaxpr: Jaxpr, ledger: Ledger, place: Place) -> Iterator[Row]:
    """The rows of a jaxpr, bodies included."""
    for eqn in open_jaxpr(jaxpr).eqns:
        here, entry = place.of(eqn, ledger), describe(eqn)
        if entry is None:
            yield _row(eqn, ledger, here)
            continue
        here = here._replace(times=here.times * entry.times)
        for body in entry.bodies:
            yield from rows_of(body.jaxpr, ledger, here)


def _row(eqn: Any, ledger: Ledger, place: Place) -> Row:
    run, name = _dtypes(eqn), shown_name(eqn.primitive)
    written, rule, why, format_ = None, "", Explanation(Role.RESULT), ""
    kind = "matmul" if traits_of(eqn.primitive).matrix_unit else "other"
    if place.mark is not None:
        origin, step = ledger.records[place.mark]
        of, rule = shown_name(origin.primitive), name_of_rule(step.found.rule)
        format_ = step.format if kind == "matmul" and place.phase == "forward" else ""
        if place.phase == "backward":
            written, why = _as_if_written(run, origin), Explanation(Role.DERIVATIVE, of, step.reason)
            if eqn.primitive is origin.primitive is lax.convert_element_type_p and _reverses_cast(origin, run):
                written = run  # it undoes the user's cast
        elif of == name:
            written, why = _dtypes(origin), Explanation(Role.ITSELF, of, step.reason)
            kind = "not entered" if step.reason.why is Why.NOT_ENTERED else kind
        else:
            why = Explanation(Role.ADDED, of, step.reason)
        why = why._replace(outer=is_outer_product(origin) and traits_of(eqn.primitive).product)
    if eqn.primitive is lax.convert_element_type_p and written != run and _between_floats(eqn):
        kind = "cast"
    if kind == "matmul" and _is_wide_outer_product(eqn):
        kind, why = "other", why._replace(outer=True)
    return Row(
        place.phase,
        place.scope,
        name,
        kind,
        written,
        run,
        rule,
        why,
        place.source,
        place.times,
        place.times * flops_of(eqn),
        place.times * bytes_of(eqn),
        dims_of(eqn),
        format_,
    )


def _dtypes(eqn: Any) -> Dtypes:
    """The dtypes of an equation. A mixed matmul rounds its operands first: it multiplies in its compute dtype."""
    operands = [_dtype(v) for v in eqn.invars]
    multiplies_in = traits_of(eqn.primitive).multiplies_in
    if multiplies_in is not None:
        operands[:2] = [str(multiplies_in(eqn.params))] * 2
    return Dtypes(tuple(operands), tuple(_dtype(v) for v in eqn.outvars))


def _is_wide_outer_product(eqn: Any) -> bool:
    """Whether it is a product without contraction in float32: no matrix unit would gain from low precision."""
    return is_outer_product(eqn) and not any(_dtype(v) in _LOW for v in eqn.invars)


def _dtype(atom: Any) -> str:
    dtype = getattr(atom.aval, "dtype", type(atom.aval).__name__)
    if dtype in EIGHT_BITS:
        return str(EIGHT_BITS[dtype])
    return str(dtype)


def _as_if_written(run: Dtypes, origin: Any) -> Dtypes:
    """The dtypes that the derivative has without `amp`: floats have those of what is differentiated."""
    floats = [str(dtype) for v in (*origin.outvars, *origin.invars) if (dtype := float_dtype(v.aval)) is not None]
    wide = max(floats, key=lambda name: jnp.dtype(name).itemsize, default=None)

    def widened(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(wide if wide and name in _LOW else name for name in names)

    return Dtypes(widened(run.operands), widened(run.results))


def _reverses_cast(origin: Any, run: Dtypes) -> bool:
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
