"""`amp_report`: what `amp` does to a function, and why.

The law: the rows of a report are the equations of the program that runs. Their dtypes come from that program, forward
and backward; their reasons come from the plan.
"""

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .._plan.residuals import Keep
from .._transform.amp import without_amp
from .._transform.options import PolicyLike
from .check import check_arguments, checked_globs, list_problems, problems_of
from .collectives import compiled_collectives
from .html import page_of
from .kept import BytesKept
from .location import Place
from .notebook import summary_of
from .program import Pullbacks, program_of
from .report_data import ReportData
from .rows import rows_of
from .text import is_colourful, render
from .unmatched import steps_of, unmatched


@dataclass(frozen=True)
class AmpReport(ReportData):
    """What `amp` does to one call of a function: rows, totals, and ways to show and check them.

    `print(report)` shows a table, grouped by scope.

    Attributes:
        name: Of the function.
        compute_dtype: The name of the low dtype.
        rows: The operations, in the order in which they run.
        kept: Bytes kept for the backward pass, in float32 and under amp; None without a backward pass.
        unmatched: Keys of the policy that matched no operation.
        notes: What could not be reported, and why.
        backward_error: What was raised when the backward pass was traced.
        collectives: Those of a compiled program, if one was given.

    >>> import jax.numpy as jnp
    >>> report = amp_report(lambda w, x: jnp.sum(x @ w), compute_dtype=jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((4, 8)))
    >>> report.check(max_casts=10)
    >>> print(report.text(limit=10).splitlines()[0])
    amp report of <lambda>, compute dtype bfloat16
    >>> report.cast_count, report.kept.after
    (3, 0)
    >>> report.save("report.html")  # doctest: +SKIP
    """

    def __str__(self) -> str:
        return self.text(colour=is_colourful())

    def text(self, *, limit: int | None = 40, colour: bool = False) -> str:
        """Make a table, grouped by scope, the worst scope first, within 100 columns.

        Args:
            limit: The most lines to show; None shows all.
            colour: Whether to colour it, for a terminal.

        Returns:
            The text.
        """
        return render(self, limit=limit, colour=colour)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one HTML page that works offline: a map of scopes, and a table to sort and filter.

        Args:
            path: Where to write it, with a name that ends in `.html`.
        """
        if Path(path).suffix.lower() not in (".html", ".htm"):
            raise ValueError(
                f"save got the path {os.fspath(path)!r}; expected one that ends in .html. Write for example "
                "report.save('report.html'), or report.plot() for a picture."
            )
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
        """Raise an `AssertionError` that lists the problems, if there are any.

        A backward pass that can't be traced is one. Pass `backward=False` to `amp_report` if none is wanted.

        Args:
            low: One or more globs over scopes. Matmuls in these scopes must run in the compute dtype, forward and
                backward.
            max_casts, max_cast_bytes: The largest `cast_count` and `cast_bytes` to accept.
            allow_unmatched: Whether to accept keys of the policy that matched nothing.
            compiled: A compiled program, from `jax.jit(step).lower(...).compile()`. Its matmuls in these scopes must
                multiply in the compute dtype too. On a CPU they don't.
        """
        globs = checked_globs(low, max_casts=max_casts, max_cast_bytes=max_cast_bytes)
        found = list(problems_of(self, globs, max_casts, max_cast_bytes, allow_unmatched, compiled))
        if found:
            raise AssertionError(list_problems(self.name, found))

    def plot(self, path: Any = None) -> Any:
        """Draw the FLOPs of matmuls by scope and dtype. Needs matplotlib.

        Args:
            path: Where to save the picture. Its ending says how: `.png`, `.pdf`, `.svg`. By default it isn't saved.

        Returns:
            The figure.
        """
        from .plots import draw_flops

        return draw_flops(self, path)


def amp_report(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = "auto",
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
    backward: bool = True,
    compiled: Any = None,
) -> Callable[..., AmpReport]:
    """Report what `amp` does to a function, and why.

    Args:
        fn: The function that you would pass to `amp`, or an `amp` of it, whose options count where none are given.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.
        backward: Whether to include the backward pass: the gradient of the first floating-point result with respect
            to the floating-point arrays of the first argument. A result that is not a scalar is summed, and a note
            says so. Pass False for a whole training step, which already contains its backward pass.
        compiled: The compiled program of this function, or of the step around it, from
            `jax.jit(step).lower(...).compile()`, or its text. The report then tells what it sends between devices.

    Returns:
        A function of `fn`'s arguments that returns an `AmpReport`. It only traces, so `jax.ShapeDtypeStruct`s can stand
        in for arrays.

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

    - The rows are JAX's operations. XLA fuses most casts and element-wise operations, which then move no bytes of
      their own.
    - The body of a `while` counts once, and so does each branch of a `cond`.
    """
    fn, options = without_amp("amp_report", fn, compute_dtype, amp_policy, keep, disable_passes)
    collectives = () if compiled is None else tuple(compiled_collectives(compiled))

    def report(*args: Any, **kwargs: Any) -> AmpReport:
        program = program_of(options, fn, args, kwargs)
        rows = list(rows_of(program.mixed, program.ledger, Place("forward", program.path)))
        kept, pullbacks = None, Pullbacks([], [])
        if backward:
            pullbacks = program.pullbacks(program.written, program.mixed)
            if pullbacks.found:
                rows += rows_of(pullbacks.found[1].jaxpr, program.ledger, Place("backward", program.path))
                kept = BytesKept(*(pullback.kept for pullback in pullbacks.found))
        keys = unmatched(options, steps_of([program.plan.steps, *program.ledger.plans]))
        return AmpReport(
            program.name,
            options.compute_dtype.name,
            tuple(rows),
            kept,
            tuple(map(_key_text, keys)),
            tuple(pullbacks.notes),
            pullbacks.error,
            collectives,
        )

    return report


def _key_text(key: Any) -> str:
    """A key of a policy as a table has it: a scope, a primitive, or both."""
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
    """Assert in your tests that the matmuls of `amp(fn)` run in low precision.

    Short for `amp_report(fn, **amp_options)(*args).check(...)`.

    Args:
        fn: The function that you would pass to `amp`, or an `amp` of it, whose options count where none are given.
        args: A tuple of its arguments, or of `jax.ShapeDtypeStruct`s in their place.
        low, max_casts, max_cast_bytes, allow_unmatched, compiled: As for `AmpReport.check`.
        **amp_options: As for `amp_report`.

    >>> import jax.numpy as jnp, jaxamp
    >>> assert_mixed(lambda w, x: jnp.sum(x @ w), (jnp.ones((8, 8)), jnp.ones((8, 8))), compute_dtype=jnp.bfloat16)

    A matmul that a scope keeps in float32 is listed with its reason:

    >>> pinned = jaxamp.amp_stop(lambda x: x @ x)
    >>> try:
    ...     assert_mixed(pinned, (jnp.ones((8, 8)),), backward=False)
    ... except AssertionError as error:
    ...     print(str(error).splitlines()[1].partition(" (")[0])
    - forward dot_general in float32, not in float16: scope 'amp_stop'
    """
    check_arguments("assert_mixed", args)
    amp_report(fn, **amp_options)(*args).check(
        low=low,
        max_casts=max_casts,
        max_cast_bytes=max_cast_bytes,
        allow_unmatched=allow_unmatched,
        compiled=compiled,
    )
