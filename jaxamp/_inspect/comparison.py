"""What `compare` found: its data, and its text."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from .._number_formats.number_format import NumberFormat
from .._table import WIDTH, Column, table
from .location import Source
from .ranges import Range

GRADIENTS = "(gradients)"


class Error(NamedTuple):
    """How far an array is from another one, in float64."""

    relative: float  # the norm of the difference over the norm of the reference
    cosine: float
    largest: float  # magnitude in the reference

    @property
    def snr_db(self) -> float:
        """Signal-to-noise ratio in decibels."""
        return float("inf") if self.relative == 0 else -20 * float(np.log10(self.relative))


def error_of(x: Any, reference: Any) -> Error:
    x, reference = (np.asarray(a).astype(np.float64).ravel() for a in (x, reference))
    finite = np.isfinite(x) & np.isfinite(reference)
    if not finite.all():
        if not np.array_equal(x[~finite], reference[~finite], equal_nan=True):
            return Error(float("inf"), float("nan"), float("inf"))
        x, reference = x[finite], reference[finite]  # what is not finite is the same in both
    norm, other = float(np.linalg.norm(reference)), float(np.linalg.norm(x))
    distance = float(np.linalg.norm(x - reference))
    relative = distance / norm if norm else 0.0 if distance == 0 else float("inf")
    cosine = float(x @ reference) / (norm * other) if norm and other else float(norm == other)
    return Error(relative, cosine, float(np.abs(reference).max(initial=0)))


class Compared(NamedTuple):
    """An operation, a result or a gradient, and its error."""

    name: str  # of the primitive, or the path of the leaf
    scope: str
    source: Source | None
    dtype: str  # under amp
    error: Error
    distance: float = 0.0  # the norm of the difference; of results and gradients
    noise: float = 0.0  # of it, as much as rounding explains where the reference is rounding and nothing else


class Magnified(NamedTuple):
    """An operation whose result has many times the error of an operand, which comes from a low matmul."""

    name: str  # of the operation
    scope: str
    source: Source | None
    matmul: str
    matmul_scope: str
    matmul_source: Source | None
    error_before: float  # relative, of the operand
    error: float  # relative, of the result
    largest_before: float  # magnitude of the operand
    largest: float  # magnitude of the result

    def __str__(self) -> str:
        here = f"{self.name} at {self.source or 'an unknown line'}"
        there = f"{self.matmul} at {self.matmul_source or 'an unknown line'}"
        how = f"({self.largest_before:.3g} -> {self.largest:.3g} at most)"
        if self.matmul_scope:
            remedy = f"give the policy the key {self.matmul_scope!r} with jaxamp.use_original_precision"
        else:
            remedy = "put `with jaxamp.amp_stop():` around it"
        return (
            f"{here} turns a relative error of {self.error_before:.1e} into {self.error:.1e} {how}. "
            f"It comes from the low {there}; to keep that in float32, {remedy}."
        )


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. Each list has the largest error first.

    Attributes:
        name: Of the function.
        compute_dtype: The name of the low dtype.
        reference: The dtype of the run that it is compared with.
        results: Errors of the function's results.
        gradients: Errors of the gradients.
        operations: Errors of single operations.
        ranges: By scope, and of the gradients together: which powers of two the values of the reference have.
        notes: What could not be compared, and why.
        magnified: Where the rounding of a low matmul grows.
        backward_error: What was raised when the backward pass was traced.
        formats: The number formats that the policy's rules round to.

    >>> import jax.numpy as jnp, jaxamp
    >>> w, x = jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 8).reshape(2, 4)
    >>> comparison = jaxamp.compare(lambda w, x: jnp.sum(jnp.tanh(x @ w)))(w, x)
    >>> comparison.scopes[0].name, comparison.to_dict()["reference"]
    ('dot_general', 'float32')
    >>> comparison.plot("ranges.pdf")  # doctest: +SKIP
    """

    name: str
    compute_dtype: str
    reference: str
    results: tuple[Compared, ...]
    gradients: tuple[Compared, ...]
    operations: tuple[Compared, ...]
    ranges: dict[str, Range]
    notes: tuple[str, ...]
    magnified: tuple[Magnified, ...] = ()
    backward_error: str | None = None
    formats: tuple[NumberFormat, ...] = ()

    @property
    def scopes(self) -> tuple[Compared, ...]:
        """The operation with the largest error of each scope."""
        worst: dict[str, Compared] = {}
        for row in self.operations:
            worst.setdefault(row.scope, row)
        return tuple(worst.values())

    def to_dict(self) -> dict[str, Any]:
        """Put the whole comparison in a form that is ready for JSON.

        Returns:
            A dictionary of the attributes, with None for infs and NaNs.
        """

        def plain(row: Compared) -> dict[str, Any]:
            error = row.error._asdict() | {"snr_db": row.error.snr_db}
            error = {name: x if np.isfinite(x) else None for name, x in error.items()}
            return row._asdict() | {"error": error, "source": _plain(row.source)}

        lists = {name: [plain(r) for r in getattr(self, name)] for name in ("results", "gradients", "operations")}
        head = {name: getattr(self, name) for name in ("name", "compute_dtype", "reference", "backward_error")}
        ranges = {scope: {"zeros": r.zeros, "powers": dict(r.powers)} for scope, r in self.ranges.items()}
        magnified = [
            case._asdict() | {"source": _plain(case.source), "matmul_source": _plain(case.matmul_source)}
            for case in self.magnified
        ]
        formats = list(map(str, self.formats))
        return head | lists | {"magnified": magnified, "ranges": ranges, "formats": formats, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{self.name} in {self.compute_dtype} against {self.reference}"]
        parts = {"results": self.results, "gradients": self.gradients, "scopes": self.scopes}
        for title, rows in parts.items():
            if rows:
                cells = [_cells(row, by_scope=title == "scopes") for row in rows[:_SHOWN]]
                lines += ["", *table([(title, *_TITLES), *cells], _COLUMNS, gap=" ", width=WIDTH)]
                lines += [f"... and {len(rows) - _SHOWN} more: .{title}"] if len(rows) > _SHOWN else []
        lines += ["", *(f"magnified: {case}" for case in self.magnified)] if self.magnified else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def plot(self, path: Any = None, *, formats: Any = ()) -> Any:
        """Draw the ranges of the values by scope, below those of number formats.

        These are float16, bfloat16, both float8 formats, and those of the policy.

        Needs matplotlib.

        Args:
            path: Where to save the picture. Its ending says how: `.png`, `.pdf`, `.svg`. By default it isn't saved.
            formats: Other number formats to draw: what `jaxamp.format` makes or takes, one or several.

        Returns:
            The figure.
        """
        from .plots import draw_ranges

        return draw_ranges(self, path, formats)


def _plain(source: Source | None) -> dict[str, Any] | None:
    return None if source is None else source._asdict()


_SHOWN = 15  # rows of each list, when a comparison is printed
_TITLES = ("relative", "SNR dB", "cosine", " dtype", "source")
_COLUMNS = (
    Column(43, cut="left"),
    Column(10, "right"),
    Column(7, "right"),
    Column(9, "right"),
    Column(9),
    Column(17, cut="left"),
)


def _cells(row: Compared, by_scope: bool) -> tuple[str, ...]:
    name = f"{row.scope or '(no scope)'}: {row.name}" if by_scope else row.name
    error = row.error
    numbers = f"{error.relative:.2e}", f"{error.snr_db:.1f}", f"{error.cosine:.6f}"
    return name, *numbers, f" {row.dtype}", "" if row.source is None else row.source.short
