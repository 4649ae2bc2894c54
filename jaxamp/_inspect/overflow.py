"""`find_overflow`: the operation that made an inf or a NaN, or that lost small numbers.

The call is run forwards and backwards, some dozens of operations at a time, and each result is looked at:

    overflow    an inf from finite operands
    invalid     a NaN from operands without one: inf - inf, 0 / 0, the root of a negative number
    underflow   zeros in a low result that the same operation in float32 does not have
    clamped     finite numbers beyond the compute dtype, which `amp` clamps to its largest one where it reads them low

NaNs that an operation makes of infs from an earlier one are consequences, and told apart. The report also says whether
it reached the results: a mask may have removed it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._compat import Jaxpr
from .._formats import is_float
from .._plan.residuals import Keep
from .._scaling.state import DynamicScalerState, check_state
from .._transform.amp import without_amp
from .._transform.options import PolicyLike
from .location import Place
from .numbers import all_finite, has_nan
from .overflow_report import Event, OverflowReport
from .pieces import Compiled
from .probe import Probe, is_watched
from .program import Program, Pullbacks, program_of
from .progress import Progress, Silent, progress_of
from .pullback import Pullback
from .walk import Marked, Walker


def find_overflow(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = "auto",
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
    backward: bool = True,
    underflow: float = 0.05,
) -> Callable[..., OverflowReport]:
    """Find the operation of `amp(fn)` that made an inf or a NaN, flushed small numbers to zero, or read clamped ones.

    Args:
        fn: The loss that you would pass to `amp`. Its first result is differentiated with respect to the floating-point
            arrays of the first argument.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.
        backward: Whether to look at the backward pass too. A result that is not a scalar is summed, and a note says
            so.
        underflow: The share of entries that a low operation of the backward pass may flush to zero before it is
            reported. Forwards, where small probabilities are zero in any network, at least half of them may.

    Returns:
        A function of `fn`'s arguments, and of `dynamic_scaler_state`, that returns an `OverflowReport`. With a scaler's
        state the backward pass starts from its scale, and the report says what happens at scale 1 too.

    >>> import jax.numpy as jnp
    >>> def loss(w, x):
    ...     return jnp.sum((x @ w) @ w)
    >>> report = find_overflow(loss)(jnp.full((4, 4), 200.0), jnp.ones((2, 4)))
    >>> report.first.kind, report.first.primitive, report.first.limit
    ('overflow', 'dot_general', 65504.0)

    **Sharp edges**

    - Most of its time goes to compiling, once for layers that are alike. Each result is rounded to its dtype; in your
      own program XLA may keep more digits, so an overflow at the very limit may differ.
    - Each round of a loop is run from Python: ten thousand rounds take a minute.
    - Kernels and callbacks are one operation each. Inside of a `shard_map`, so are `while` loops, other `shard_map`s,
      and a `cond` of which devices take different branches.
    - Where an array is split over devices, `event.shards` has the parts concerned. Each process sees its own.
    - Values that a derivative needs from the forward pass, such as `0.5 / sqrt(x)`, are computed there: their phase is
      "forward".
    """
    fn, options = without_amp("find_overflow", fn, compute_dtype, amp_policy, keep, disable_passes)

    def find(*args: Any, dynamic_scaler_state: DynamicScalerState | None = None, **kwargs: Any) -> OverflowReport:
        if dynamic_scaler_state is not None:
            check_state("find_overflow", dynamic_scaler_state)
        program = program_of(options, fn, args, kwargs)
        program.check_concrete("find_overflow")
        pullbacks, notes, _ = program.pullbacks(program.mixed) if backward else Pullbacks([], [])
        bad = sum(not all_finite(x) for x in program.arrays if is_float(x))
        notes += [f"{bad} of the arguments' arrays are not finite to begin with"] if bad else []
        forward = pullbacks[0].forward if pullbacks else program.mixed
        scale = None if dynamic_scaler_state is None else float(dynamic_scaler_state.scaler)
        times = 1 if scale in (None, 1.0) else 2
        with progress_of("find_overflow", forward, *[pullback.jaxpr for pullback in pullbacks] * times) as progress:
            search = _Search(program, underflow, progress)
            seen, outs = search.run("forward", forward, program.arrays)
            events, constants, passed_on = seen.events, list(seen.constants), seen.passed_on
            gradients: list[Any] = []
            for pullback in pullbacks:
                seen, found, gradients = search.run_backward(pullback, outs, scale)
                events, outs, passed_on = events + found, outs[: pullback.results], passed_on + seen.passed_on
        closed_over = sum(map(has_nan, _constants(program.written)))
        notes += [f"{closed_over} of the arrays that the function closes over have a NaN"] if closed_over else []
        notes += [f"a constant that is NaN is read by {where}" for where in constants]
        clamped = [event for event in events if event.kind == "clamped"]
        before = {_key(event) for event in clamped if event.phase == "forward"}  # a checkpoint clamps it again
        small = sorted((event for event in events if event.kind == "underflow"), key=lambda event: -event.share)
        made = [event for event in events if event.kind in ("overflow", "invalid")]
        finite = all(all_finite(x) for x in (*outs, *gradients) if is_float(x))
        return OverflowReport(
            program.name,
            options.compute_dtype.name,
            scale,
            finite,
            tuple(event for event in made if not event.is_consequence),
            tuple(small),
            tuple(event for event in clamped if event.phase == "forward" or _key(event) not in before),
            tuple(notes),
            tuple(event for event in made if event.is_consequence),
            passed_on,
        )

    return find


def _constants(jaxpr: Jaxpr) -> Iterator[Any]:
    """The arrays that a program closes over, also inside of jitted functions and loops."""
    yield from getattr(jaxpr, "consts", ())
    for eqn in jaxpr.eqns:
        for value in eqn.params.values():
            for inner in value if isinstance(value, list | tuple) else (value,):
                if hasattr(inner, "eqns"):
                    yield from _constants(inner)


class _Search:
    """Runs the parts of a program, and looks at each operation."""

    def __init__(self, program: Program, underflow: float, progress: Progress | Silent):
        self._program, self._underflow = program, underflow
        self._compiled = Compiled()
        self._progress = progress
        self._marked = Marked()  # values of the forward pass may reach the backward pass

    def run(self, phase: str, jaxpr: Jaxpr, operands: Sequence[Any]) -> tuple[Probe, list[Any]]:
        """What was seen, and the results."""
        probe = Probe(self._program, self._underflow, self._compiled)
        walker = Walker(
            self._program.ledger, probe.look, is_watched, True, self._compiled, self._marked, self._progress
        )
        return probe, walker.run(jaxpr, operands, Place(phase, self._program.path))

    def run_backward(
        self, pullback: Pullback, forward: list[Any], scale: float | None
    ) -> tuple[Probe, list[Event], list[Any]]:
        """What was seen in the backward pass of a forward pass, the events, and the gradients times the scale."""
        outs, kept = forward[: pullback.results], forward[pullback.results :]

        def at(scale: float) -> tuple[Probe, list[Any]]:
            return self.run("backward", pullback.jaxpr, [*kept, *pullback.seeds(outs, scale)])

        probe, gradients = at(1.0 if scale is None else scale)
        events = probe.events
        if scale is None:
            return probe, events, gradients
        at_one = events if scale == 1 else at(1.0)[0].events
        known, seen = ({_key(event) for event in found} for found in (at_one, events))
        events = [event._replace(at_scale_one=_key(event) in known) for event in events]
        more = [event for event in at_one if _key(event) not in seen and event.kind != "underflow"]
        return probe, [*events, *(event._replace(at_scale_one=True) for event in more)], gradients


def _key(event: Event) -> tuple[Any, ...]:
    return event.kind, event.scope, event.primitive, event.source
