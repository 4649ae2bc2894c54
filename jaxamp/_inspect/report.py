"""`amp_report`: what `amp` does to a function, and why.

The law: the rows of a report are the equations of the program that runs. Their dtypes are read off it, forwards and
backwards; the plan gives the reasons.
"""

import functools
import os
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from .._plan.residuals import Keep
from .._transform.amp import PolicyLike, check_function, check_options, unmatched
from .check import problems_of
from .html import page_of, summary_of
from .kept import BytesKept
from .location import Place
from .program import program_of
from .rows import Row, rows_of
from .text import is_colourful, render


@dataclass(frozen=True)
class AmpReport:
    """What `amp` does to one call of a function: rows and totals.

    Rows are `Row`s, in the order in which operations run. `print(report)` shows a table, grouped by scope.
    """

    name: str  # of the function
    compute_dtype: str
    rows: tuple[Row, ...]
    kept: BytesKept | None  # bytes kept for the backward pass, in float32 and under amp
    unmatched: tuple[str, ...]  # keys of the policy that no operation was found under
    notes: tuple[str, ...]  # what could not be said, and why

    @functools.cached_property
    def matmuls(self) -> tuple[Row, ...]:
        return tuple(row for row in self.rows if row.kind == "matmul")

    @functools.cached_property
    def matmul_flops(self) -> dict[str, int]:
        """FLOPs of matmuls by the dtype that they multiply in, the largest first."""
        found: Counter[str] = Counter()
        for row in self.matmuls:
            found[row.multiplied] += row.flops
        return dict(found.most_common())

    @functools.cached_property
    def low_share(self) -> float:
        """The share of the FLOPs of matmuls of floats that is in the compute dtype; 1 if there are none."""
        total = sum(flops for dtype, flops in self.matmul_flops.items() if "float" in dtype)
        return self.matmul_flops.get(self.compute_dtype, 0) / total if total else 1.0

    @functools.cached_property
    def casts(self) -> tuple[Row, ...]:
        """Casts between floats that the user did not write."""
        return tuple(row for row in self.rows if row.kind == "cast")

    @property
    def cast_count(self) -> int:
        return sum(row.times for row in self.casts)

    @property
    def cast_bytes(self) -> int:
        """What casts read and write, if none is fused into its neighbours."""
        return sum(row.bytes for row in self.casts)

    @functools.cached_property
    def not_entered(self) -> dict[str, int]:
        """Primitives that `amp` does not know, run as written, with how often."""
        found: Counter[str] = Counter()
        for row in self.rows:
            if row.kind == "not entered":
                found[row.primitive] += row.times
        return dict(found.most_common())

    @functools.cached_property
    def wide_matmuls(self) -> tuple[Row, ...]:
        """Matmuls left in float32, the largest first. Those of integers or float64 are no business of `amp`."""
        wide = (row for row in self.matmuls if row.multiplied == "float32" != self.compute_dtype)
        return tuple(sorted(wide, key=lambda row: -row.flops))

    @functools.cached_property
    def wasteful_matmuls(self) -> tuple[Row, ...]:
        """Low matmuls with a dimension that tensor cores pad: not a multiple of 8, or of 16 for 8-bit operands."""
        low = (row for row in self.matmuls if row.multiplied == self.compute_dtype)
        return tuple(row for row in low if row.dims is not None and any(size % self.multiple for size in row.dims))

    @property
    def multiple(self) -> int:
        """What the dimensions of a matmul should be multiples of, so that tensor cores pad nothing."""
        return 16 if jnp.dtype(self.compute_dtype).itemsize == 1 else 8

    def __str__(self) -> str:
        return self.text(colour=is_colourful())

    def text(self, *, limit: int | None = 40, colour: bool = False) -> str:
        """A table within 100 columns, grouped by scope, worst first; at most `limit` lines of it, or all with None."""
        return render(self, limit=limit, colour=colour)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all of it as one HTML page that needs no network: a map of scopes and a table to sort and filter."""
        Path(path).write_text(page_of(self), encoding="utf-8")

    def _repr_html_(self) -> str:
        return summary_of(self)

    def check(
        self,
        *,
        low: str | Iterable[str] = "*",
        max_casts: int | None = None,
        max_cast_bytes: int | None = None,
        allow_unmatched: bool = False,
        compiled: Any = None,
    ) -> None:
        """Raise an `AssertionError` that lists what is not as it should be.

        Args:
            low: A glob over scopes, or several: matmuls there must run in the compute dtype, forwards and backwards.
            max_casts, max_cast_bytes: Budgets for casts; `cast_count` and `cast_bytes` say what there is.
            allow_unmatched: Whether the policy may have keys that matched nothing.
            compiled: What `jax.jit(step).lower(...).compile()` returned: the matmuls in it that are in these scopes
                must multiply in the compute dtype too. On a CPU they don't.
        """
        found = list(problems_of(self, low, max_casts, max_cast_bytes, allow_unmatched, compiled))
        if found:
            raise AssertionError("\n- ".join([f"{self.name} is not mixed as asked:", *found]))

    def plot(self, path: Any = None) -> Any:
        """Draw the FLOPs of matmuls by scope and dtype; save the picture if there is a path.

        Needs matplotlib. Returns the figure.
        """
        from .plots import draw_flops

        return draw_flops(self, path)

    def to_dict(self) -> dict[str, Any]:
        """All of it as JSON can hold it."""
        return {
            "name": self.name,
            "compute_dtype": self.compute_dtype,
            "totals": {
                "matmul_flops": self.matmul_flops,
                "low_share": self.low_share,
                "casts": self.cast_count,
                "cast_bytes": self.cast_bytes,
                "bytes_kept": None if self.kept is None else self.kept._asdict(),
                "not_entered": self.not_entered,
                "unmatched_keys": list(self.unmatched),
                "wide_matmuls": len(self.wide_matmuls),
                "wasteful_matmuls": len(self.wasteful_matmuls),
            },
            "notes": list(self.notes),
            "rows": [_as_dict(row) for row in self.rows],
        }


def _as_dict(row: Row) -> dict[str, Any]:
    parts = {name: getattr(row, name) for name in ("written", "run", "source", "dims")}
    return row._asdict() | {name: None if part is None else part._asdict() for name, part in parts.items()}


def amp_report(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    backward: bool = True,
) -> Callable[..., AmpReport]:
    """Say what `amp` does to a function, and why, as a function of its arguments.

    Args:
        fn: The function, as it would be given to `amp`.
        compute_dtype, amp_policy, keep: As for `amp`.
        backward: Whether to report the backward pass of the first floating-point result too, by the floating-point
            arrays of the first argument. A result that is no scalar is summed, and a note says so: for a training step
            as a whole, which has a backward pass inside, pass False.

    Returns:
        A function of `fn`'s arguments that returns an `AmpReport`. Nothing is computed; `jax.ShapeDtypeStruct`s do for
        arrays.

    >>> import jax, jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum(jax.nn.softmax(x @ w) ** 2)
    >>> report = amp_report(loss, compute_dtype=jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((16, 8)))
    >>> [(row.phase, str(row.run)) for row in report.matmuls]
    [('forward', 'bf16 bf16 -> bf16'), ('backward', 'bf16 bf16 -> f32')]
    >>> report.matmuls[0].reason
    'policy table'
    >>> report.low_share
    1.0

    **Sharp edges**

    - The rows are JAX's operations. XLA fuses them: most casts and element-wise operations move no bytes of their own.
    - The body of a `while` counts once, and each branch of a `cond`.
    """
    check_function("amp_report", fn)
    options = check_options(compute_dtype, amp_policy, keep)

    def report(*args: Any, **kwargs: Any) -> AmpReport:
        program = program_of(options, fn, args, kwargs)
        rows = list(rows_of(program.mixed, program.ledger, Place("forward", program.path)))
        kept, notes = None, list[str]()
        if backward:
            pullbacks, notes = program.pullbacks(program.written, program.mixed)
            if pullbacks:
                rows += rows_of(pullbacks[1].jaxpr, program.ledger, Place("backward", program.path))
                kept = BytesKept(*(pullback.kept for pullback in pullbacks))
        keys = unmatched(options, [program.plan, *(plan for plan, _ in program.ledger.steps)])
        return AmpReport(
            program.name,
            options.compute_dtype.name,
            tuple(rows),
            kept,
            tuple(map(_written_key, keys)),
            tuple(notes),
        )

    return report


def _written_key(key: Any) -> str:
    """A key as one writes it in a table: a scope, a primitive, or both."""
    if isinstance(key, tuple):
        return f"{key[0]}: {key[1].name}"
    return key if isinstance(key, str) else key.name


def assert_mixed(
    fn: Callable[..., Any],
    args: tuple[Any, ...],
    *,
    low: str | Iterable[str] = "*",
    max_casts: int | None = None,
    max_cast_bytes: int | None = None,
    allow_unmatched: bool = False,
    compiled: Any = None,
    **amp_options: Any,
) -> None:
    """Assert, in a test of your own, that matmuls of `amp(fn)` run low: `amp_report(fn)(*args).check(...)`.

    >>> import jax.numpy as jnp, jaxamp
    >>> assert_mixed(lambda w, x: jnp.sum(x @ w), (jnp.ones((8, 8)), jnp.ones((8, 8))), compute_dtype=jnp.bfloat16)

    A matmul that is pinned says so:

    >>> pinned = jaxamp.amp_stop(lambda x: x @ x)
    >>> try:
    ...     assert_mixed(pinned, (jnp.ones((8, 8)),), backward=False)
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[1].partition(" (")[0])
    - forward dot_general in float32, not in float16: scope 'amp_stop'
    """
    amp_report(fn, **amp_options)(*args).check(
        low=low,
        max_casts=max_casts,
        max_cast_bytes=max_cast_bytes,
        allow_unmatched=allow_unmatched,
        compiled=compiled,
    )
