"""Leave out a sum that is zero from the backward pass of a variance.

    mean((x - mean(x)) ** 2)

The derivative of a variance by its mean is a sum of all `x - mean(x)`, which is zero. JAX does not know, and sums them:
one more time that the backward pass of each norm reads `x`. Here the square has a derivative that leaves it out
(`_primitives/centered.py`).
"""

import functools
import math
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import Literal, Var
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Runner, Step, map_steps
from .._primitives.centered import centered_square
from .._traits import traits_of

_KEEP_ORDER = lax.reshape_p, lax.squeeze_p, lax.broadcast_in_dim_p


def square_centered(plan: Plan) -> Plan:
    """Leave the mean out of the derivatives of squares that are summed for a variance."""
    return _with_squares(plan) if plan.touched else plan


def _with_squares(plan: Plan) -> Plan:
    """The same of a plan whether it is touched or not, as that of `jnp.var` is on a float32 operand."""
    entered = Memo()  # equations of a kind share a step
    both = enumerate(zip(plan.eqns, plan.steps, strict=True))
    steps = {i: entered.get(s, None, functools.partial(_entered, s)) for i, (e, s) in both if _is_untouched_call(e, s)}
    plan = plan.with_steps({i: step for i, step in steps.items() if step is not plan.steps[i]})
    made = {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars}
    squares = [i for i in range(len(plan.eqns)) if _is_square(plan, i)]
    readers = plan.readers() if squares else {}
    found = {}
    for i in squares:
        shifted = plan.eqns[i].invars[0]
        shift = None if isinstance(shifted, Literal) else made.get(shifted)
        axes = None if shift is None else _axes_of_mean(plan, shift, made)
        if shift is not None and axes is not None and _is_summed(plan, readers.get(plan.eqns[i].outvars[0], []), axes):
            found[i] = shift
    if not found:
        return plan
    parts = map_steps(plan.parts, lambda i: Square((i,), i, found[i]) if i in found else i)
    return plan._replace(parts=parts, touched=True)


def _is_untouched_call(eqn: Any, step: Step) -> bool:
    plain = traits_of(eqn.primitive).plain_call and step.mode is Mode.ENTER
    return plain and len(step.bodies) == 1 and not step.bodies[0].touched


def _entered(step: Step) -> Step:
    body = _with_squares(step.bodies[0])
    return step if body is step.bodies[0] else step._replace(bodies=(body,), touched=True)


class Square(NamedTuple):
    """The square of `x - mean(x)`."""

    parts: tuple[Part, ...]
    step: int
    shift: int  # the step that subtracts

    def with_parts(self, parts: tuple[Part, ...]) -> "Square":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        x, mean = (
            env.read(v, f) for v, f in zip(plan.eqns[self.shift].invars, plan.steps[self.shift].reads, strict=True)
        )
        ((var, value),) = plan.values_of(self.step)
        with runner.at(plan, self.step):
            mean = mean if mean.ndim == x.ndim else lax.reshape(mean, (1,) * x.ndim)  # of all entries
            env.write(var, centered_square(x, mean), value)


def _is_square(plan: Plan, i: int) -> bool:
    eqn, step = plan.eqns[i], plan.steps[i]
    is_one = eqn.primitive is lax.square_p or (eqn.primitive is lax.integer_pow_p and eqn.params["y"] == 2)
    is_product = (
        eqn.primitive is lax.mul_p and eqn.invars[0] is eqn.invars[1] and not isinstance(eqn.invars[0], Literal)
    )
    plain = step.is_plain and all(map(_is_wide, step.reads))
    return (is_one or is_product) and plain and not step.outs[0].is_low


def _is_wide(format_: Any) -> bool:
    return format_ is not None and format_.dtype == np.float32


def _axes_of_mean(plan: Plan, i: int, made: dict[Var, int]) -> tuple[int, ...] | None:
    """The axes along which a step subtracts the mean of its first operand from it; None if it does something else."""
    eqn, step = plan.eqns[i], plan.steps[i]
    if eqn.primitive is not lax.sub_p or not all(map(_is_wide, step.reads)) or isinstance(eqn.invars[0], Literal):
        return None
    if not step.is_plain:
        return None
    x, mean = eqn.invars
    size, place = None, None if isinstance(mean, Literal) else made.get(mean)
    while place is not None:
        eqn = plan.eqns[place]
        if eqn.primitive is lax.reduce_sum_p:
            if eqn.invars[0] is not x:
                return None
            axes = eqn.params["axes"]
            sizes = [x.aval.shape[axis] for axis in axes]
            is_mean = all(isinstance(n, int) for n in sizes) and size == math.prod(sizes)
            is_mean = is_mean and plan.steps[place].is_plain
            small = tuple(1 if i in axes else n for i, n in enumerate(x.aval.shape))
            in_place = mean.aval.shape == small or len(axes) == x.aval.ndim
            return tuple(axes) if is_mean and in_place else None
        if eqn.primitive is lax.div_p and size is None and isinstance(eqn.invars[1], Literal):
            size = float(eqn.invars[1].val)
        elif eqn.primitive not in _KEEP_ORDER:
            return None
        place = None if isinstance(eqn.invars[0], Literal) else made.get(eqn.invars[0])
    return None


def _is_summed(plan: Plan, readers: Any, axes: tuple[int, ...]) -> bool:
    """Whether nothing but a sum along these axes reads it."""
    eqns = [plan.eqns[r.place] for r in readers if r.place < len(plan.eqns)]
    sums = [eqn for eqn in eqns if eqn.primitive is lax.reduce_sum_p and set(eqn.params["axes"]) == set(axes)]
    return bool(readers) and len(sums) == len(readers)
