"""`compare`: how far `amp` is from full precision, operation by operation and gradient by gradient.

The call is run twice, equation by equation: as written, and as `amp` runs it. The n-th exponential of a scope is
compared with the n-th exponential of that scope, round by round of a loop. Operations that only one run has, because a
loop ended early or another branch was taken, are left out.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._compat import Jaxpr
from .._errors import summary
from .._plan.residuals import Keep
from .._policy.rules import Replacement
from .._scaling.state import DynamicScalerState, check_state
from .._table import WIDTH, Column, table
from .._traits import shown_name, traits_of
from .._transform.amp import plan_call
from .._transform.call import split_call
from .._transform.ledger import Ledger
from .._transform.options import Options, PolicyLike, check_function, check_options
from .location import Place, Source
from .program import Program, program_of
from .pullback import Pullback
from .ranges import Range, range_of
from .walk import Walker

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


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. Each list has the largest error first."""

    name: str
    compute_dtype: str
    reference: str  # the dtype of the run that is compared with
    results: tuple[Compared, ...]
    gradients: tuple[Compared, ...]
    operations: tuple[Compared, ...]
    ranges: dict[str, Range]  # by scope, and of GRADIENTS: which powers of two the values of the reference have
    notes: tuple[str, ...]

    @property
    def scopes(self) -> tuple[Compared, ...]:
        """The operation with the largest error of each scope."""
        worst: dict[str, Compared] = {}
        for row in self.operations:
            worst.setdefault(row.scope, row)
        return tuple(worst.values())

    def to_dict(self) -> dict[str, Any]:
        """The whole comparison, ready for JSON; infs and NaNs are None."""

        def plain(row: Compared) -> dict[str, Any]:
            error = row.error._asdict() | {"snr_db": row.error.snr_db}
            error = {name: x if np.isfinite(x) else None for name, x in error.items()}
            return row._asdict() | {"error": error, "source": None if row.source is None else row.source._asdict()}

        lists = {name: [plain(r) for r in getattr(self, name)] for name in ("results", "gradients", "operations")}
        head = {name: getattr(self, name) for name in ("name", "compute_dtype", "reference")}
        ranges = {scope: {"zeros": r.zeros, "powers": dict(r.powers)} for scope, r in self.ranges.items()}
        return head | lists | {"ranges": ranges, "notes": list(self.notes)}

    def __str__(self) -> str:
        lines = [f"{self.name} in {self.compute_dtype} against {self.reference}"]
        parts = {"results": self.results, "gradients": self.gradients, "scopes": self.scopes}
        for title, rows in parts.items():
            if rows:
                cells = [_cells(row, by_scope=title == "scopes") for row in rows[:_SHOWN]]
                lines += ["", *table([(title, *_TITLES), *cells], _COLUMNS, gap=" ", width=WIDTH)]
                lines += [f"... and {len(rows) - _SHOWN} more: .{title}"] if len(rows) > _SHOWN else []
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])

    def plot(self, path: Any = None) -> Any:
        """Draw the ranges of the values by scope, with the limits of low dtypes; save them if there is a path.

        Needs matplotlib. Returns the figure.
        """
        from .plots import draw_ranges

        return draw_ranges(self, path)


_SHOWN = 15  # rows of each list, when a comparison is printed
_TITLES = ("relative", "SNR dB", "cosine", " dtype", "source")
_COLUMNS = (Column(43, cut="left"), Column(10, "right"), Column(7, "right"), Column(9, "right"), Column(9), Column())


def _cells(row: Compared, by_scope: bool) -> tuple[str, ...]:
    name = f"{row.scope or '(no scope)'}: {row.name}" if by_scope else row.name
    error = row.error
    numbers = f"{error.relative:.2e}", f"{error.snr_db:.1f}", f"{error.cosine:.6f}"
    return name, *numbers, f" {row.dtype}", str(row.source or "")


def compare(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
    backward: bool = True,
) -> Callable[..., Comparison]:
    """Run a call in full precision and under `amp`, and report how far apart they are, and where that begins.

    Args:
        fn: The function that you would pass to `amp`.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.
        backward: Whether to compare the gradients of the first result, by the floating-point arrays of the first
            argument. A result that is not a scalar is summed, and a note says so.

    Returns:
        A function of `fn`'s arguments, and of `dynamic_scaler_state`, that returns a `Comparison`. The reference is
        `fn` in float32; where 64 bits are enabled (`jax.enable_x64`), `fn` on float64 arguments. With a scaler's state
        the backward pass starts with its scale.

    >>> import jax.numpy as jnp
    >>> comparison = compare(lambda w, x: jnp.sum(jnp.tanh(x @ w)), compute_dtype=jnp.bfloat16)(
    ...     jnp.linspace(-1, 1, 16).reshape(4, 4), jnp.linspace(0, 1, 8).reshape(2, 4)
    ... )
    >>> [row.name for row in comparison.operations]
    ['dot_general', 'tanh', 'reduce_sum']
    >>> comparison.gradients[0].error.relative < 1e-2
    True

    **Sharp edges**

    - It runs operation by operation, outside of `jit`, and holds all intermediate results of the reference.
    - Random draws are the same in both runs as long as they are drawn from the same key and in the same dtype.
    """
    check_function("compare", fn)
    options = check_options(compute_dtype, amp_policy, keep, disable_passes)

    def compared(*args: Any, dynamic_scaler_state: DynamicScalerState | None = None, **kwargs: Any) -> Comparison:
        if dynamic_scaler_state is not None:
            check_state("compare", dynamic_scaler_state)
        program = program_of(options, fn, args, kwargs)
        program.check_concrete("compare")
        written, wide, notes = _reference(options, program, fn, args, kwargs)
        recorder = _Recorder()
        expected = Walker(Ledger(), recorder.record).run(written, wide, Place("forward", program.path))
        matcher = _Matcher(recorder.seen, program.ledger)
        found = Walker(program.ledger, matcher.look).run(program.mixed, program.arrays, Place("forward", program.path))
        matcher.finish()
        notes += matcher.notes()
        results = [
            Compared(f"result {i}", "", None, str(x.dtype), error_of(x, y))
            for i, (x, y) in enumerate(zip(found, expected, strict=True))
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        holding = [f"result {i}" for i, y in enumerate(expected) if _has_nan(y)]
        gradients = []
        if backward:
            pullbacks, more = program.pullbacks(written, program.mixed)
            notes += more
            if pullbacks:
                scale = 1.0 if dynamic_scaler_state is None else float(dynamic_scaler_state.scaler)
                expected = _gradient(pullbacks[0], wide, 1.0)
                found = _gradient(pullbacks[1], program.arrays, scale)
                paths = _paths(args[0])
                holding += [f"the gradient of {path}" for path, y in zip(paths, expected, strict=True) if _has_nan(y)]
                gradients = [
                    Compared(path, "", None, str(x.dtype), error_of(np.asarray(x, np.float64) / scale, y))
                    for path, x, y in zip(paths, found, expected, strict=True)
                ]
                recorder.add_range(GRADIENTS, expected)
        notes += [f"NaN in the reference, which equals NaN under amp: {', '.join(holding)}"] if holding else []
        return Comparison(
            program.name,
            options.compute_dtype.name,
            "float32" if written is program.written else "float64",
            _worst_first(results),
            _worst_first(gradients),
            _worst_first(matcher.rows),
            recorder.ranges,
            tuple(notes),
        )

    return compared


def assert_amp_close(
    fn: Callable[..., Any],
    args: Sequence[Any],
    *,
    rtol: float = 5e-2,
    dynamic_scaler_state: DynamicScalerState | None = None,
    **amp_options: Any,
) -> None:
    """Assert, in a test of your own, that results and gradients of `amp(fn)` are near those of `fn`.

    Args:
        fn: The function that you would pass to `amp`.
        args: Its arguments.
        rtol: The largest norm of a difference, over the norm of the reference, for each result and gradient.
        dynamic_scaler_state: A scaler whose scale the backward pass starts with.
        **amp_options: As for `compare`.

    >>> import jax.numpy as jnp
    >>> assert_amp_close(lambda w, x: jnp.sum(x @ w), (jnp.ones((4, 4)), jnp.ones((2, 4))))
    """
    found = compare(fn, **amp_options)(*args, dynamic_scaler_state=dynamic_scaler_state)
    rows = [("result", row) for row in found.results] + [("gradient", row) for row in found.gradients]
    far = [
        f"{kind} {row.name}: relative error {row.error.relative:.2e}, at most {rtol:g} is allowed"
        for kind, row in rows
        if not row.error.relative <= rtol
    ]
    if far:
        raise AssertionError(
            "\n- ".join([f"{found.name} in {found.compute_dtype} is not near {found.reference}:", *far])
        )


def _reference(
    options: Options, program: Program, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Jaxpr, list[Any], list[str]]:
    """The reference program, its operands, and notes."""
    if not _has_64_bits():
        return program.written, program.arrays, []
    args, kwargs, fn = jax.tree.map(_widened, (args, kwargs, fn))
    call, arrays = split_call(fn, args, kwargs)
    try:
        return plan_call(options, call, arrays).plan.jaxpr, arrays, []
    except Exception as error:  # a function that names float32 may refuse others
        return program.written, program.arrays, [f"no float64 reference: {summary(error)}"]


def _has_64_bits() -> bool:
    return jnp.result_type(float) == np.float64


def _widened(x: Any) -> Any:
    is_array = hasattr(x, "dtype") and hasattr(x, "shape")
    return jnp.asarray(x, jnp.float64) if is_array and jnp.issubdtype(x.dtype, jnp.floating) else x


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


class _Recorder:
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


class _Matcher:
    """Compares the results of another run with those of the reference, which it uses up.

    An operation that a rule of the policy has replaced may be many equations: its last result is compared with the
    result of the operation as written.
    """

    def __init__(self, seen: dict[Key, Any], ledger: Ledger):
        self.rows: list[Compared] = []
        self._alone = 0
        self._ledger = ledger
        self._seen = seen
        self._numbers = _Numbers()
        self._replaced: tuple[Place, Sequence[Any]] | None = None  # the last equation of one that was replaced

    def look(self, eqn: Any, place: Place, ins: Sequence[Any], outs: Sequence[Any]) -> None:
        record = None if place.mark is None else self._ledger.records[place.mark]
        if self._replaced is not None and not _is_same_run(place, self._replaced[0]):
            self.finish()
        if record is not None and isinstance(record.step.found.rule, Replacement) and record.step.operation is not None:
            self._replaced = place, outs
        else:
            self._compare(eqn.primitive, place, outs)

    def finish(self) -> None:
        """Compare the operation that was replaced last."""
        if self._replaced is not None:
            (place, outs), self._replaced = self._replaced, None
            assert place.mark is not None
            self._compare(self._ledger.records[place.mark].eqn.primitive, place, outs)

    def _compare(self, primitive: Any, place: Place, outs: Sequence[Any]) -> None:
        key = self._numbers.key(primitive, place, outs)
        if key is None:
            return
        reference = self._seen.pop(key, None)
        if reference is not None and place.mark is not None:
            order = self._ledger.records[place.mark].step.order
            reference = reference if order is None else jnp.transpose(reference, order)
        if reference is None or reference.shape != outs[0].shape:
            self._alone += 1
            return
        name, dtype = shown_name(primitive), str(outs[0].dtype)
        self.rows.append(Compared(name, place.scope, place.source, dtype, error_of(outs[0], reference)))

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


def _gradient(pullback: Pullback, arrays: list[Any], scale: float) -> list[Any]:
    """The gradients of the first result, times `scale`."""
    results = jax.jit(jec.jaxpr_as_fun(pullback.forward))(*arrays)
    outs, kept = results[: pullback.results], results[pullback.results :]
    return jax.jit(jec.jaxpr_as_fun(pullback.jaxpr))(*kept, *pullback.seeds(outs, scale))


def _has_nan(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating) and bool(jnp.isnan(x).any())


def _paths(tree: Any) -> list[str]:
    leaves = jtu.tree_leaves_with_path(tree)
    floats = [path for path, x in leaves if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    return [jtu.keystr(path) or "the argument" for path in floats]


def _worst_first(rows: Sequence[Compared]) -> tuple[Compared, ...]:
    return tuple(sorted(rows, key=lambda row: -row.error.relative))  # never NaN
