"""Islands: element-wise work and reductions in float32 on low values, such as a gelu or a logsumexp after a matmul.

JAX keeps for the backward pass what each nonlinear operation of an island needs, in float32. An island is computed
again instead, from its low operands, which are kept for the matmuls' sake or are half as large. What a reduction has
made of many entries is kept.
"""

import math
from collections.abc import Collection, Iterator
from typing import Any, NamedTuple

import numpy as np

from .._compat import Literal, Var, open_jaxpr
from .._plan.classify import How
from .._plan.plan import Plan, Reader, Step
from .._plan.sensitivity import Value, float_dtype
from .._traits.table import BENDS, COMPARES, ELEMENTWISE, PRODUCTS, REDUCES


class Island(NamedTuple):
    """Equations of a plan, one after the other, with the variables that go in and come out."""

    steps: range
    ins: tuple[Any, ...]
    outs: tuple[Var, ...]
    dtypes: tuple[np.dtype | None, ...]  # that the outs are read in; None: as they are


def find_islands(plan: Plan, compute_dtype: np.dtype, taken: Collection[int]) -> list[Island]:
    """The islands of a plan, in order: runs of cheap equations, but for those taken, that are worth computing again."""
    jaxpr = open_jaxpr(plan.jaxpr)
    sized = [(run, _largest_in_float32(plan, run)) for run in _runs(plan, taken)] if plan.touched else []
    if not any(size > 1 for _, size in sized):
        return []
    values: dict[Var, Value] = dict(zip(jaxpr.invars, plan.ins, strict=True))
    for i in range(len(plan.steps)):
        values.update(plan.values_of(i))
    readers = plan.readers()
    steps = zip(jaxpr.eqns, plan.steps, strict=True)
    constants = {v for eqn, step in steps if step.how is How.CONSTANT for v in eqn.outvars}
    islands = [(_island(plan, run, readers, constants), size) for run, size in sized if size > 1]
    return [island for island, size in islands if _pays(island, size, values, compute_dtype)]


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


def _island(plan: Plan, steps: range, readers: dict[Var, list[Reader]], constants: Collection[Var]) -> Island:
    eqns = [open_jaxpr(plan.jaxpr).eqns[i] for i in steps]
    made = {v: None for eqn in eqns for v in eqn.outvars if v not in constants}
    read = [v for eqn in eqns for v in eqn.invars if not isinstance(v, Literal)]
    outside = {v: {r.dtype for r in readers.get(v, ()) if r.place not in steps} for v in made}
    outs = {v: dtypes for v, dtypes in outside.items() if dtypes}
    return Island(
        steps,
        tuple(dict.fromkeys(v for v in read if v not in made and v not in constants)),
        tuple(outs),
        tuple(dtypes.pop() if len(dtypes) == 1 else None for dtypes in outs.values()),
    )


def _pays(island: Island, size: int, values: dict[Var, Value], compute_dtype: np.dtype) -> bool:
    """Whether every operand as large as what bends in float32 is low; `values` lacks closed-over arrays."""
    large = [v for v in island.ins if float_dtype(v.aval) is not None and _size(v.aval) >= size]
    return bool(large) and all(v in values and values[v].dtype == compute_dtype for v in large)


def _largest_in_float32(plan: Plan, steps: range) -> int:
    eqns = open_jaxpr(plan.jaxpr).eqns
    return max(_size_in_float32(eqns[i], plan.steps[i]) for i in steps)


def _size_in_float32(eqn: Any, step: Step) -> int:
    """The number of entries that a nonlinear operation of an equation makes in float32; 0: it is linear, or low."""
    if step.how is How.ENTER:
        body = step.bodies[0]
        return max(map(_size_in_float32, open_jaxpr(body.jaxpr).eqns, body.steps), default=0)
    of_two = eqn.primitive.name in PRODUCTS and not any(isinstance(v, Literal) for v in eqn.invars)
    if not (of_two or eqn.primitive.name in BENDS) or step.outs[0].dtype != np.float32:
        return 0
    return _size(eqn.outvars[0].aval)


def _size(aval: Any) -> int:
    """The number of entries; 0 if it is not known, as when a program is exported for any batch."""
    return math.prod(aval.shape) if all(isinstance(size, int) for size in aval.shape) else 0
