"""Sum the gradients of what all rounds of a loop read in float32.

    h = x @ w;  scan over steps of (h * step) @ w

The gradient of `h` is a sum over all rounds. JAX adds it up in the dtype of `h`: if that is low, the sum stands still
after some hundred rounds. Here the loop takes `h` in float32 as well, for the gradient alone: each round reads the low
values, and its part of the gradient is added in float32 (`_primitives/low_copy.py`).

A loop of few rounds is left alone.
"""

import itertools
import operator
from typing import Any

import numpy as np

from .._compat import (
    Jaxpr,
    Literal,
    Var,
    more_constants,
    open_jaxpr,
    scan_counts,
    with_equations,
    with_operands,
)
from .._jaxpr import Memo, cast_equation, equation_at, in_dtype
from .._plan.higher_order import with_rewritten_bodies
from .._plan.plan import Setting
from .._primitives.low_copy import WITH_COPY

_FEW = 4  # rounds
_WIDE = np.dtype(np.float32)


def sum_in_loops(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with loops that add up gradients of low constants in float32."""
    return _Loops(setting.formats.compute_dtype).rewritten(program) if setting.formats.narrows else program


class _Loops:
    def __init__(self, low: np.dtype):
        self._low, self._known = low, Memo()

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        return self._known.get(jaxpr, None, lambda: self._rewrite(jaxpr))

    def _rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        body = open_jaxpr(jaxpr)
        eqns = list(itertools.chain.from_iterable(map(self._equations, body.eqns)))
        is_old = len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns))
        return jaxpr if is_old else with_equations(jaxpr, eqns)

    def _equations(self, eqn: Any) -> list[Any]:
        """An equation, with loops inside of it rewritten. If it is a loop, with what is widened in front of it."""
        eqn = with_rewritten_bodies(eqn, self.rewritten)
        if eqn.primitive.name != "scan" or eqn.params["length"] in range(_FEW + 1):  # one that is not known is not
            return [eqn]
        count, _ = scan_counts(eqn.params)
        low = [i for i, v in enumerate(eqn.invars[:count]) if self._is_low(v)]
        return self._widened(eqn, count, low) if low else [eqn]

    def _is_low(self, v: Any) -> bool:
        return not isinstance(v, Literal) and getattr(v.aval, "dtype", None) == self._low

    def _widened(self, loop: Any, count: int, low: list[int]) -> list[Any]:
        """A loop that takes some of its `count` constants in float32 too, for their gradients."""
        jaxpr = loop.params["jaxpr"]
        operands, own = list(loop.invars), list(open_jaxpr(jaxpr).invars)
        in_front, first, wide, wide_inside = list[Any](), list[Any](), list[Var](), list[Var]()
        for i in low:
            wide.append(in_dtype(operands[i], _WIDE))
            in_front.append(cast_equation(loop, operands[i], wide[-1]))
            given, both, read = Var(own[i].aval), in_dtype(own[i], _WIDE), own[i]
            wide_inside.append(in_dtype(read, _WIDE))
            first.append(equation_at(loop, WITH_COPY, [wide_inside[-1], given], both))
            first.append(cast_equation(loop, both, read))
            own[i] = given
        body = with_equations(jaxpr, [*first, *open_jaxpr(jaxpr).eqns])
        body = with_operands(body, [*own[:count], *wide_inside, *own[count:]])
        params = {**more_constants(loop.params, len(low)), "jaxpr": body}
        return [*in_front, loop.replace(invars=[*operands[:count], *wide, *operands[count:]], params=params)]
