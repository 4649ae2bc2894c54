"""`compare`: how far `amp` is from full precision, operation by operation and gradient by gradient.

The call is run twice, with a look at each operation: as written, and as `amp` runs it. The n-th exponential of a scope
is compared with the n-th exponential of that scope, round by round of a loop. Operations that only one run has, because
a loop ended early or another branch was taken, are left out.

Some gradients are zero in exact arithmetic, such as that of a bias before a normalization. What float32 has there is
rounding, and amp has more of it, in proportion to its coarser dtype. `noise.py` tells them from small gradients.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from .._compat import Jaxpr
from .._errors import summary
from .._plan.residuals import Keep
from .._policy.quantization import formats_of
from .._scaling.state import DynamicScalerState, check_state
from .._transform.amp import plan_call, without_amp
from .._transform.call import split_call
from .._transform.ledger import Ledger
from .._transform.options import Options, PolicyLike
from .check import check_arguments, no_gradient
from .comparison import GRADIENTS, Compared, Comparison, error_of
from .location import Place
from .magnified import Trails
from .matching import Matcher, Recorder
from .noise import gradient, without_noise
from .numbers import has_nan
from .pieces import Compiled
from .program import Program, Pullbacks, program_of
from .walk import Walker


def compare(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = "auto",
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
    backward: bool = True,
) -> Callable[..., Comparison]:
    """Run a call in full precision and under `amp`, and report how far apart they are, and where that begins.

    Args:
        fn: The function that you would pass to `amp`, or an `amp` of it, whose options count where none are given.
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

    - It holds all intermediate results of the reference.
    - A result or a gradient that is rounding and nothing else in float32 has an error of 0 if amp's is rounding too; a
      note names it.
    - Random draws are the same in both runs as long as they are drawn from the same key and in the same dtype.
    """
    fn, options = without_amp("compare", fn, compute_dtype, amp_policy, keep, disable_passes)

    def compared(*args: Any, dynamic_scaler_state: DynamicScalerState | None = None, **kwargs: Any) -> Comparison:
        if dynamic_scaler_state is not None:
            check_state("compare", dynamic_scaler_state)
        program = program_of(options, fn, args, kwargs)
        program.check_concrete("compare")
        written, wide, notes = _reference(options, program, fn, args, kwargs)
        recorder, compiled = Recorder(), Compiled()
        expected = Walker(Ledger(), recorder.record, compiled=compiled).run(
            written, wide, Place("forward", program.path)
        )
        trails = Trails(options.compute_dtype)
        matcher = Matcher(recorder.seen, program.ledger, trails)
        found = Walker(program.ledger, matcher.look, compiled=compiled).run(
            program.mixed, program.arrays, Place("forward", program.path)
        )
        matcher.finish()
        notes += matcher.notes()
        results = [
            _compared(f"result {i}", x.dtype, x, y)
            for i, (x, y) in enumerate(zip(found, expected, strict=True))
            if jnp.issubdtype(x.dtype, jnp.floating)
        ]
        holding = [f"result {i}" for i, y in enumerate(expected) if has_nan(y)]
        gradients, pullbacks = [], Pullbacks([], [])
        if backward:
            pullbacks = program.pullbacks(written, program.mixed)
            notes += pullbacks.notes
            if pullbacks.found:
                scale = 1.0 if dynamic_scaler_state is None else float(dynamic_scaler_state.scaler)
                _, expected = gradient(program, pullbacks.found[0], wide, 1.0, compiled)
                _, found = gradient(program, pullbacks.found[1], program.arrays, scale, compiled)
                paths = list(program.differentiated.values())
                holding += [f"the gradient of {path}" for path, y in zip(paths, expected, strict=True) if has_nan(y)]
                gradients = [
                    _compared(path, x.dtype, np.asarray(x, np.float64) / scale, y)
                    for path, x, y in zip(paths, found, expected, strict=True)
                ]
                recorder.add_range(GRADIENTS, expected)
        is_float32 = written is program.written
        plain = (pullbacks if is_float32 else program.pullbacks(program.written)).found[:1] if gradients else []
        results, gradients, noisy = without_noise(program, results, gradients, plain[0] if plain else None, compiled)
        notes += noisy
        notes += [f"NaN in the reference, which equals NaN under amp: {', '.join(holding)}"] if holding else []
        return Comparison(
            program.name,
            options.compute_dtype.name,
            "float32" if is_float32 else "float64",
            _worst_first(results),
            _worst_first(gradients),
            _worst_first(matcher.rows),
            recorder.ranges,
            tuple(notes),
            trails.found,
            pullbacks.error,
            formats_of(options.policy),
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

    A backward pass that can't be traced is a failure. Pass `backward=False` if none is wanted.

    Args:
        fn: The function that you would pass to `amp`, or an `amp` of it, whose options count where none are given.
        args: Its arguments.
        rtol: The largest norm of a difference, over the norm of the reference, for each result and gradient. Where the
            reference is only rounding, as in the gradient of a bias before a normalization, rounding is allowed.
        dynamic_scaler_state: A scaler whose scale the backward pass starts with.
        **amp_options: As for `compare`.

    >>> import jax.numpy as jnp
    >>> assert_amp_close(lambda w, x: jnp.sum(x @ w), (jnp.ones((4, 4)), jnp.ones((2, 4))))
    """
    check_arguments("assert_amp_close", args)
    if isinstance(rtol, bool) or not isinstance(rtol, int | float) or not rtol >= 0:
        raise TypeError(f"assert_amp_close got rtol={rtol!r}; expected a number, 0 or more. Write rtol=0.05.")
    found = compare(fn, **amp_options)(*args, dynamic_scaler_state=dynamic_scaler_state)
    rows = [("result", row) for row in found.results] + [("gradient", row) for row in found.gradients]
    far = [
        f"{kind} {row.name}: relative error {row.error.relative:.2e}, at most {rtol:g} is allowed"
        for kind, row in rows
        if not row.error.relative <= rtol
    ]
    if found.backward_error is not None:
        far.append(no_gradient(found.backward_error))
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
    call, arrays, _ = split_call(fn, args, kwargs)
    arrays = [_widened(x) for x in arrays]
    try:
        return plan_call(options, call, arrays).plan.jaxpr, arrays, []
    except Exception as error:  # a function that names float32 may refuse others
        return program.written, program.arrays, [f"no float64 reference: {summary(error)}"]


def _has_64_bits() -> bool:
    return jnp.result_type(float) == np.float64


def _widened(x: Any) -> Any:
    return jnp.asarray(x, jnp.float64) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _compared(name: str, dtype: Any, x: Any, reference: Any) -> Compared:
    with np.errstate(invalid="ignore"):
        distance = float(np.linalg.norm(np.asarray(x, np.float64) - np.asarray(reference, np.float64)))
    return Compared(name, "", None, str(dtype), error_of(x, reference), distance)


def _worst_first(rows: Sequence[Compared]) -> tuple[Compared, ...]:
    return tuple(sorted(rows, key=lambda row: -row.error.relative))  # never NaN
