"""The program that `amp` makes of one call, which all tools start from."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._compat import Jaxpr
from .._errors import summary
from .._formats import float_dtype
from .._plan.classify import Path
from .._plan.plan import Plan
from .._transform.amp import plan_call, run_plan
from .._transform.call import floats_of_first, split_call
from .._transform.ledger import Ledger
from .._transform.options import Options
from .pullback import Pullback, pullback_of


class Pullbacks(NamedTuple):
    """Derivatives of the jaxprs of a call, or why there are none."""

    found: list[Pullback]
    notes: list[str]
    error: str | None = None  # what was raised on the way, if there is something to differentiate


class Program(NamedTuple):
    """A call, as it was written and as it runs. Both take all arrays of the call."""

    name: str
    compute_dtype: np.dtype
    plan: Plan  # its jaxpr is the program as written
    mixed: Jaxpr
    ledger: Ledger
    arrays: list[Any]
    differentiated: dict[int, str]  # where the floats of the first argument are among the arrays, and their paths
    path: Path

    @property
    def written(self) -> Jaxpr:
        return self.plan.jaxpr

    def pullbacks(self, *jaxprs: Jaxpr) -> Pullbacks:
        """Derivatives of jaxprs of this call by the floats of the first argument."""
        results = [aval for aval in self.written.out_avals if float_dtype(aval) is not None]
        if not self.differentiated or not results:
            where = "the results have" if self.differentiated else "the first argument has"
            return Pullbacks([], [f"no backward pass: {where} no floating-point array"])
        try:
            found = [pullback_of(jaxpr, list(self.differentiated)) for jaxpr in jaxprs]
        except Exception as error:  # JAX's own, of many types: a loop of unknown length, a callback
            what = summary(error) + ("" if self._fails_as_written() else " (under amp alone: please report it)")
            return Pullbacks([], [f"no backward pass: {what}"], what)
        return Pullbacks(found, _note_on_sum(results[0]))

    def _fails_as_written(self) -> bool:
        try:
            pullback_of(self.written, list(self.differentiated))
        except Exception:
            return True
        return False

    def check_concrete(self, name: str) -> None:
        """Refuse shapes and traced values, for a tool that computes."""
        if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in self.arrays):
            raise TypeError(
                f"{name} got a shape or a traced value; expected arrays with numbers in them. Call it outside of jit, "
                "on the arrays of one step."
            )


def _note_on_sum(aval: Any) -> list[str]:
    """A note for a result that is not a loss, such as the parameters that a whole training step returns first."""
    if not aval.shape:
        return []
    what = f"the first floating-point result is {aval.str_short()}, not a scalar"
    return [f"{what}: the backward pass is that of its sum. If it is not a loss, pass backward=False."]


def program_of(options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Trace a call and what `amp` makes of it. Nothing is computed."""
    call, arrays, _ = split_call(fn, args, kwargs)
    planned, ledger = plan_call(options, call, arrays), Ledger()
    run = functools.partial(run_plan, planned, ledger=ledger)
    mixed = jax.make_jaxpr(lambda *xs: run(xs))(*arrays)
    name = getattr(fn, "__name__", type(fn).__name__)
    floats = floats_of_first(fn, args, kwargs)
    return Program(name, options.compute_dtype, planned.plan, mixed, ledger, arrays, floats, call.path)
