"""Let loops read low copies of the weights that stay the same in all rounds.

    scan(h -> tanh(h @ w))

A matmul rounds its float32 weight itself, so that the gradient of the weight is not rounded. In a loop it would do so
in each round, forward and backward: in an LSTM of width 1024, that is a fifth of the time (H200, jax 0.11). Here the
matmuls of a loop read copies (`_primitives/low_copy.py`), which are then made in front of it (`hoist_quantized.py`).

Loops that gather their weights in each round, on a mesh of several devices or by their own collectives, go on to do so.
"""

import functools
import operator
from collections.abc import Sequence
from typing import Any

from jax.sharding import AxisType

from .._compat import Jaxpr, Literal, Var, open_jaxpr, scan_counts, with_equations
from .._jaxpr import Memo, in_dtype, is_on_mesh
from .._plan.bodies import Body, with_replaced_bodies
from .._plan.higher_order import describe
from .._plan.more_operands import way_into
from .._plan.plan import Setting
from .._primitives.low_copy import LOW_COPY
from .._primitives.matmul import is_mixed
from .hoist_quantized import hoisted, may_leave
from .round_once import reading_copies


def round_in_loops(program: Jaxpr, setting: Setting) -> Jaxpr:
    """The program with low copies in front of its loops."""
    if not setting.formats.narrows:
        return program
    new = _Loops(setting).rewritten(program, (False,) * len(open_jaxpr(program).invars))
    return program if new is program else hoisted(new, [LOW_COPY])


class _Loops:
    def __init__(self, setting: Setting):
        self._formats, self._known = setting.formats, Memo()

    def rewritten(self, jaxpr: Jaxpr, fixed: tuple[bool, ...]) -> Jaxpr:
        """A jaxpr that copies what it multiplies, and loops inside of it do. `fixed`: which operands stay the same."""
        return self._known.get(jaxpr, fixed, lambda: self._rewrite(jaxpr, fixed))

    def _rewrite(self, jaxpr: Jaxpr, fixed: Sequence[bool]) -> Jaxpr:
        body, eqns = open_jaxpr(jaxpr), list[Any]()
        same = {v for v, is_fixed in zip(body.invars, fixed, strict=True) if is_fixed}
        copied: dict[Var, Var] = {}  # what is read in place of a float32 value
        for old in body.eqns:
            eqn = self._with_copies_inside(old, same)
            if is_mixed(eqn.primitive):
                eqn = reading_copies(eqn, functools.partial(self._copy, eqn, same, eqns), copied, eqns)
            elif may_leave(eqn, same):
                same.update(eqn.outvars)
            eqns.append(eqn)
        is_old = len(eqns) == len(body.eqns) and all(map(operator.is_, eqns, body.eqns))
        return jaxpr if is_old else with_equations(jaxpr, eqns)

    def _with_copies_inside(self, eqn: Any, same: set[Var]) -> Any:
        entry = describe(eqn)
        if entry is None or entry.lazy:
            return eqn
        bodies = [self.rewritten(inside.jaxpr, _fixed_inside(eqn, inside, same)) for inside in entry.bodies]
        if all(new is inside.jaxpr for new, inside in zip(bodies, entry.bodies, strict=True)):
            return eqn
        return eqn.replace(params=with_replaced_bodies(eqn, entry, bodies))

    def _copy(self, reader: Any, same: set[Var], eqns: list[Any], v: Var) -> Var | None:
        """The low copy of a value that stays the same. It is made in front of its first reader."""
        if v not in same or not self._formats.may_lower(v) or is_on_mesh(v.aval, AxisType.Auto, AxisType.Explicit):
            return None
        copy, params = in_dtype(v, self._formats.compute_dtype), {"low": self._formats.compute_dtype, "moves": ()}
        eqns.append(reader.replace(primitive=LOW_COPY, invars=[v], outvars=[copy], params=params))
        return copy


def _fixed_inside(eqn: Any, inside: Body, same: set[Var]) -> tuple[bool, ...]:
    """Which operands of a body stay the same: constants of a loop, and what a function in a loop is given of them."""
    count = len(open_jaxpr(inside.jaxpr).invars)
    if eqn.primitive.name == "scan":
        return tuple(i < scan_counts(eqn.params)[0] for i in range(count))
    if eqn.primitive.name == "while":
        constants = eqn.params["body_nconsts"] if inside.param == "body_jaxpr" else 0
        return tuple(i < constants for i in range(count))
    if way_into(eqn) not in ("jit", "checkpoint"):
        return (False,) * count
    atoms = (eqn.invars[i] for i in inside.operands)
    return tuple(not isinstance(atom, Literal) and atom in same for atom in atoms)
