"""The checks behind `AmpReport.check` and `assert_mixed`."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from .._policy.scopes import covers
from .compiled import CompiledMatmul, compiled_matmuls
from .report_data import ReportData


def problems_of(
    report: ReportData,
    globs: Sequence[str],
    max_casts: int | None,
    max_cast_bytes: int | None,
    allow_unmatched: bool,
    compiled: Any,
) -> Iterator[str]:
    """The problems of a report, one line each. See `AmpReport.check`."""
    if report.backward_error is not None:
        yield no_gradient(report.backward_error)
    for glob in globs:
        if glob != "*" and not any(_is_in(row.scope, glob) for row in report.matmuls):
            yield f"no matmul is in a scope that matches {glob!r}"
    for row in report.matmuls:
        is_checked = any(_is_in(row.scope, glob) for glob in globs)
        is_float = "float" in row.multiplied  # amp does not touch integers
        if is_checked and is_float and not report.is_low(row):
            what = f"{row.phase} {row.primitive} in {row.multiplied}, not in {report.compute_dtype}"
            yield f"{what}: {row.reason} (scope {row.scope or 'none'}, {row.source or 'source unknown'})"
    if compiled is not None:
        yield from _problems_of_compiled(compiled_matmuls(compiled), globs, report.compute_dtype)
    if max_casts is not None and report.cast_count > max_casts:
        yield f"{report.cast_count} casts; at most {max_casts} are allowed"
    if max_cast_bytes is not None and report.cast_bytes > max_cast_bytes:
        yield f"casts move {report.cast_bytes} bytes; at most {max_cast_bytes} are allowed"
    if not allow_unmatched:
        yield from (f"the policy's key {key!r} matched nothing" for key in report.unmatched)


def check_arguments(name: str, args: Any) -> None:
    """Check that a function's arguments are a list or a tuple, and not a single array."""
    if not isinstance(args, list | tuple):
        raise TypeError(
            f"{name} got arguments of type {type(args).__name__}; expected a tuple of all arguments. Write "
            f"{name}(fn, (x,)) for a function of one."
        )


def checked_globs(low: Any, **limits: Any) -> list[str]:
    """Check what `AmpReport.check` is asked for, and return the globs as a list."""
    globs = [low] if isinstance(low, str) else [*low] if isinstance(low, Iterable) else [low]
    if not all(isinstance(glob, str) for glob in globs):
        raise TypeError(f"check got low={low!r}; expected a glob over scopes, or several. Write low='*'.")
    for name, value in limits.items():
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float)):
            raise TypeError(f"check got {name}={value!r}; expected a number. Write {name}=0.")
    return globs


def no_gradient(error: str) -> str:
    """The text for a backward pass that can't be traced."""
    return f"the backward pass can't be traced, so it was not checked: {error}. If none is wanted, pass backward=False"


def list_problems(name: str, problems: Iterable[str]) -> str:
    """The text for a function that has problems, one line each."""
    return "\n- ".join([f"{name} is not mixed as asked:", *problems])


def _problems_of_compiled(found: list[CompiledMatmul], globs: Sequence[str], dtype: str) -> Iterator[str]:
    for glob in globs:
        if not any(_is_in(row.scope, glob) for row in found):
            yield f"the compiled program has no matmul in a scope that matches {glob!r}"
    for row in found:
        is_checked = any(_is_in(row.scope, glob) for glob in globs)
        if is_checked and any(operand != dtype for operand in row.operands):
            yield f"compiled {row.op} multiplies {' by '.join(row.operands)}, not {dtype} (scope {row.scope or 'none'})"


def _is_in(scope: str, glob: str) -> bool:
    return covers(glob, scope.split("/") if scope else ())
