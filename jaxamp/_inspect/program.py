"""The program that `amp` makes of one call: what the tools that look at it start from."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from .._compat import Jaxpr
from .._plan.classify import Path
from .._plan.plan import Plan
from .._plan.sensitivity import float_dtype
from .._transform.amp import Options, floats_of_first, plan_call, run_plan, split_call
from .._transform.interpreter import Ledger
from .pullback import Pullback, pullback_of


class Program(NamedTuple):
    """A call, as it was written and as it runs. Both take all arrays of the call."""

    name: str
    compute_dtype: np.dtype
    plan: Plan  # its jaxpr is the program as written
    mixed: Jaxpr
    ledger: Ledger
    arrays: list[Any]
    moving: list[int]  # where the floats of the first argument are among the arrays
    path: Path

    @property
    def written(self) -> Jaxpr:
        return self.plan.jaxpr

    def pullbacks(self, *jaxprs: Jaxpr) -> tuple[list[Pullback], list[str]]:
        """Programs of this call by the floats of the first argument; none, and a note why, if that can't be done."""
        results = [aval for aval in self.written.out_avals if float_dtype(aval) is not None]
        if not self.moving or not results:
            where = "the results have" if self.moving else "the first argument has"
            return [], [f"no backward pass: {where} no floating-point array"]
        try:
            return [pullback_of(jaxpr, self.moving) for jaxpr in jaxprs], _note_on_sum(results[0])
        except Exception as error:  # JAX's own, of many types: a loop of unknown length, a callback
            return [], [f"no backward pass: {type(error).__name__}: {str(error).splitlines()[0]}"]

    def check_concrete(self, name: str) -> None:
        """Refuse a call that has no numbers to run on."""
        if any(isinstance(x, jax.core.Tracer | jax.ShapeDtypeStruct) for x in self.arrays):
            raise TypeError(
                f"{name} got a shape or a traced value; expected arrays with numbers in them. Call it outside of jit, "
                "on the arrays of one step."
            )


def _note_on_sum(aval: Any) -> list[str]:
    """A step as a whole has parameters for its first result: that their sum is differentiated has to be said."""
    if not aval.shape:
        return []
    what = f"the first floating-point result is {aval.str_short()} and no scalar"
    return [f"{what}: the backward pass is that of its sum. If it is no loss, pass backward=False."]


def program_of(options: Options, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Program:
    """Trace a call and what `amp` makes of it. Nothing is computed."""
    call, arrays = split_call(fn, args, kwargs)
    plan, planner, _ = plan_call(options, call, arrays)
    ledger = Ledger()
    run = functools.partial(run_plan, options.keep, planner, plan, ledger=ledger)
    mixed = jax.make_jaxpr(lambda *xs: run(xs))(*arrays)
    name = getattr(fn, "__name__", type(fn).__name__)
    return Program(name, options.compute_dtype, plan, mixed, ledger, arrays, floats_of_first(fn, args), call.path)
