"""Islands: element-wise work and reductions in float32 between low values, such as a gelu or a softmax between matmuls.

JAX keeps for the backward pass what each nonlinear operation of an island needs, in float32. An island is computed
again instead, from its low operands, which are kept for the matmuls' sake or are half as large.
"""

from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from ._compat import Literal, Var, open_jaxpr
from ._facts import BENDS, COMPARES, ELEMENTWISE, REDUCES
from ._judge import How
from ._plan import Plan, Step
from ._standing import Value, float_dtype


class Island(NamedTuple):
    """Equations of a plan, one after the other, with the variables that go in and come out."""

    steps: range
    ins: tuple[Any, ...]
    outs: tuple[Var, ...]
    dtypes: tuple[np.dtype | None, ...]  # that the outs are read in; None: as they are


def find_islands(plan: Plan, compute_dtype: np.dtype, taken: Collection[int]) -> list[Island]:
    """The islands of a plan, in order: runs of cheap equations, but for those taken, that are worth computing again."""
    if not plan.touched:
        return []
    jaxpr = open_jaxpr(plan.jaxpr)
    values: dict[Var, Value] = dict(zip(jaxpr.invars, plan.ins, strict=True))
    for i in range(len(plan.steps)):
        values.update(plan.values_of(i))
    islands = [_island(plan, run) for run in _runs(plan, taken)]
    return [island for island in islands if _pays(plan, island, values, compute_dtype)]


def _runs(plan: Plan, taken: Collection[int]) -> Iterator[range]:
    start = 0
    for i, (eqn, step) in enumerate(zip(open_jaxpr(plan.jaxpr).eqns, plan.steps, strict=True)):
        if i in taken or not _is_cheap(eqn, step):
            if i > start:
                yield range(start, i)
            start = i + 1
    if start < len(plan.steps):
        yield range(start, len(plan.steps))


def _is_cheap(eqn: Any, step: Step, allowed: frozenset[str] = ELEMENTWISE | COMPARES | REDUCES) -> bool:
    if eqn.effects or step.how is How.RULE:
        return False
    if step.how is not How.ENTER:
        return eqn.primitive.name in allowed
    if eqn.primitive.name == "custom_jvp_call":
        allowed -= REDUCES  # a softmax of the user's knows better what it needs
    elif eqn.primitive.name != "jit":
        return False
    body = step.bodies[0]
    return all(_is_cheap(e, s, allowed) for e, s in zip(open_jaxpr(body.jaxpr).eqns, body.steps, strict=True))


def _island(plan: Plan, steps: range) -> Island:
    jaxpr = open_jaxpr(plan.jaxpr)
    constants = {
        v for eqn, step in zip(jaxpr.eqns, plan.steps, strict=True) if step.how is How.CONSTANT for v in eqn.outvars
    }
    made = {v for i in steps for v in jaxpr.eqns[i].outvars} - constants
    ins = [v for i in steps for v in jaxpr.eqns[i].invars if not isinstance(v, Literal)]
    read: dict[Var, set[np.dtype | None]] = {}
    after = zip(jaxpr.eqns[steps.stop :], plan.steps[steps.stop :], strict=True)
    for atoms, dtypes in [(e.invars, s.reads) for e, s in after] + [(jaxpr.outvars, [o.dtype for o in plan.outs])]:
        for atom, dtype in zip(atoms, dtypes, strict=True):
            if not isinstance(atom, Literal) and atom in made:
                read.setdefault(atom, set()).add(dtype)
    return Island(
        steps,
        tuple(dict.fromkeys(v for v in ins if v not in made | constants)),
        tuple(read),
        tuple(dtypes.pop() if len(dtypes) == 1 else None for dtypes in read.values()),
    )


def _pays(plan: Plan, island: Island, values: dict[Var, Value], compute_dtype: np.dtype) -> bool:
    """Whether something bends in float32, and every operand of that size is low."""
    size = max(map(_size_in_float32, (open_jaxpr(plan.jaxpr).eqns[i] for i in island.steps), _steps(plan, island)))
    floats = [v for v in island.ins if float_dtype(v.aval) is not None and np.prod(v.aval.shape) >= size]
    known = [v in values for v in floats]  # a closed-over array is not
    return size > 1 and bool(floats) and all(known) and all(values[v].dtype == compute_dtype for v in floats)


def _steps(plan: Plan, island: Island) -> list[Step]:
    return [plan.steps[i] for i in island.steps]


def _size_in_float32(eqn: Any, step: Step) -> int:
    """The number of entries that a nonlinear operation of an equation makes in float32; 0: it is linear, or low."""
    if step.how is How.ENTER:
        body = step.bodies[0]
        return max(map(_size_in_float32, open_jaxpr(body.jaxpr).eqns, body.steps), default=0)
    products = eqn.primitive.name in ("mul", "div") and not any(isinstance(v, Literal) for v in eqn.invars)
    if not (products or eqn.primitive.name in BENDS) or step.outs[0].dtype != np.float32:
        return 0
    return eqn.outvars[0].aval.size
