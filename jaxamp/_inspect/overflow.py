"""`find_overflow`: the operation that made an inf or a NaN, or that lost small numbers.

The call is run equation by equation, forwards and backwards, and each result is looked at:

    overflow    an inf from finite operands
    invalid     a NaN from operands without one: inf - inf, 0 / 0, the root of a negative number
    underflow   zeros in a low result that the same operation in float32 does not have
    clamped     finite numbers beyond the compute dtype, which `amp` clamps to its largest one where it reads them low

The report also says whether it reached the results: a mask may have removed it.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from .._compat import Jaxpr
from .._formats import is_float
from .._plan.residuals import Keep
from .._scaling.state import DynamicScalerState, check_state
from .._transform.options import PolicyLike, check_function, check_options
from .location import Place
from .overflow_report import Event, OverflowReport
from .probe import Probe, all_finite, has_nan
from .program import Program, Pullbacks, program_of
from .pullback import Pullback
from .walk import Walker


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

    - It runs operation by operation, outside of `jit`, and waits for each: a thousand operations take seconds. XLA may
      round in other places than JAX says, so an overflow at the very limit may differ.
    - Kernels and callbacks are one operation each. Inside of a `shard_map`, so are `while` loops, other `shard_map`s,
      and a `cond` of which devices take different branches.
    - Where an array is split over devices, `event.shards` has the parts concerned. Each process sees its own.
    - Values that a derivative needs from the forward pass, such as `0.5 / sqrt(x)`, are computed there: their phase is
      "forward".
    """
    check_function("find_overflow", fn)
    options = check_options(compute_dtype, amp_policy, keep, disable_passes)

    def find(*args: Any, dynamic_scaler_state: DynamicScalerState | None = None, **kwargs: Any) -> OverflowReport:
        if dynamic_scaler_state is not None:
            check_state("find_overflow", dynamic_scaler_state)
        program = program_of(options, fn, args, kwargs)
        program.check_concrete("find_overflow")
        pullbacks, notes, _ = program.pullbacks(program.mixed) if backward else Pullbacks([], [])
        bad = sum(not bool(all_finite(x)) for x in program.arrays if is_float(x))
        notes += [f"{bad} of the arguments' arrays are not finite to begin with"] if bad else []
        forward = pullbacks[0].forward if pullbacks else program.mixed
        events, outs, constants = _probed(program, underflow, "forward", forward, program.arrays)
        closed_over = sum(map(has_nan, _constants(program.written)))
        notes += [f"{closed_over} of the arrays that the function closes over have a NaN"] if closed_over else []
        notes += [f"a constant that is NaN is read by {where}" for where in constants]
        gradients: list[Any] = []
        scale = None if dynamic_scaler_state is None else float(dynamic_scaler_state.scaler)
        for pullback in pullbacks:
            found, gradients = _probed_backward(program, underflow, pullback, outs, scale)
            events, outs = events + found, outs[: pullback.results]
        clamped = [event for event in events if event.kind == "clamped"]
        before = {_key(event) for event in clamped if event.phase == "forward"}  # a checkpoint clamps it again
        small = sorted((event for event in events if event.kind == "underflow"), key=lambda event: -event.share)
        finite = all(bool(all_finite(x)) for x in (*outs, *gradients) if is_float(x))
        return OverflowReport(
            program.name,
            options.compute_dtype.name,
            scale,
            finite,
            tuple(event for event in events if event.kind in ("overflow", "invalid")),
            tuple(small),
            tuple(event for event in clamped if event.phase == "forward" or _key(event) not in before),
            tuple(notes),
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


def _probed(
    program: Program, underflow: float, phase: str, jaxpr: Jaxpr, operands: Sequence[Any]
) -> tuple[list[Event], list[Any], list[str]]:
    """The events of a run, its results, and where constants that are NaN are read."""
    probe = Probe(program, underflow)
    outs = Walker(program.ledger, probe.look, enters_maps=True).run(jaxpr, operands, Place(phase, program.path))
    return probe.events, outs, list(probe.constants)


def _probed_backward(
    program: Program, underflow: float, pullback: Pullback, forward: list[Any], scale: float | None
) -> tuple[list[Event], list[Any]]:
    """The events of the backward pass that belongs to a forward pass, and the gradients times the scale."""
    outs, kept = forward[: pullback.results], forward[pullback.results :]

    def at(scale: float) -> tuple[list[Event], list[Any]]:
        return _probed(program, underflow, "backward", pullback.jaxpr, [*kept, *pullback.seeds(outs, scale)])[:2]

    events, gradients = at(1.0 if scale is None else scale)
    if scale is None:
        return events, gradients
    at_one = events if scale == 1 else at(1.0)[0]
    known, seen = ({_key(event) for event in found} for found in (at_one, events))
    events = [event._replace(at_scale_one=_key(event) in known) for event in events]
    more = [event for event in at_one if _key(event) not in seen and event.kind != "underflow"]
    return [*events, *(event._replace(at_scale_one=True) for event in more)], gradients


def _key(event: Event) -> tuple[Any, ...]:
    return event.kind, event.scope, event.primitive, event.source
