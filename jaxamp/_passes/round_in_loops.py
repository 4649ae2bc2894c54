"""Let loops read one low copy of each weight that stays the same in all rounds.

    scan(h -> tanh(h @ w))

A matmul rounds its float32 weight itself, so that the gradient of the weight is not rounded. In a loop it would do so in
each round, forward and backward: in an LSTM of width 1024, that is a fifth of the time (H200, jax 0.11). Here the
matmuls of a body read a copy that is made in front of them, and `hoist_quantized` takes it out of the loop.

On a mesh of several devices, loops gather their weights in each round, as they are told to, and are left alone.
"""

import operator
from typing import Any

from jax.sharding import AxisType

from .._compat import Jaxpr, open_jaxpr, scan_counts, with_equations
from .._jaxpr import Memo, is_on_mesh
from .._plan.bodies import with_replaced_bodies
from .._plan.higher_order import describe
from .._plan.plan import Setting
from .round_once import with_copies_in_front


def round_in_loops(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with low copies in the bodies of its loops."""
    return _Loops(setting).rewritten(program) if setting.formats.narrows else program


class _Loops:
    def __init__(self, setting: Setting):
        self._formats, self._known = setting.formats, Memo()

    def rewritten(self, jaxpr: Jaxpr) -> Jaxpr:
        return self._known.get(jaxpr, None, lambda: self._rewrite(jaxpr))

    def _rewrite(self, jaxpr: Jaxpr) -> Jaxpr:
        old = open_jaxpr(jaxpr).eqns
        eqns = list(map(self._equation, old))
        return jaxpr if all(map(operator.is_, eqns, old)) else with_equations(jaxpr, eqns)

    def _equation(self, eqn: Any) -> Any:
        entry = describe(eqn)
        if entry is None or entry.lazy:
            return eqn
        bodies = [self.rewritten(inside.jaxpr) for inside in entry.bodies]
        if any(new is not inside.jaxpr for new, inside in zip(bodies, entry.bodies, strict=True)):
            eqn = eqn.replace(params=with_replaced_bodies(eqn, entry, bodies))
        return self._with_copies(eqn) if eqn.primitive.name in ("scan", "while") else eqn

    def _with_copies(self, loop: Any) -> Any:
        is_scan = loop.primitive.name == "scan"
        name = "jaxpr" if is_scan else "body_jaxpr"
        constants = scan_counts(loop.params)[0] if is_scan else loop.params["body_nconsts"]
        ins = open_jaxpr(loop.params[name]).invars
        shared = tuple(i < constants and self._may_copy(v) for i, v in enumerate(ins))
        body = with_copies_in_front(loop.params[name], shared, self._formats.compute_dtype)
        return loop if body is loop.params[name] else loop.replace(params={**loop.params, name: body})

    def _may_copy(self, v: Any) -> bool:
        return self._formats.may_lower(v) and not is_on_mesh(v.aval, AxisType.Auto, AxisType.Explicit)
