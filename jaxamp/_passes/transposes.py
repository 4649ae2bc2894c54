"""Let low matmuls make their results in the order of axes that a transpose, their only reader, puts them in.

A layer that is mapped over tokens, `vmap(lambda x: weight @ x)`, is a matmul with the weight first and the tokens last,
and a transpose of its result. With the operands swapped, the transpose has nothing to do. A matrix times a vector has
no axes to order; its operands are swapped too, so that `vmap` from outside puts the mapped axis first, where
activations have it.

Of scores, `einsum("btghd,bsgd->bghts", q, k)`, JAX makes columns, and turns them. A softmax over columns is slow. With
the operands swapped, and `q` turned in place of the scores, they are rows.
"""

import functools
import itertools
from collections.abc import Sequence
from typing import Any

from jax import lax

from .._compat import Var
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Operation, Plan, Step
from .._plan.planner import pass_operands
from .._plan.reasons import Reason, Why
from .._policy.rules import Replacement
from .._primitives.matmul import order_when_swapped
from .._traits.matmul_cost import size_of


def fold_transposes(plan: Plan) -> Plan:
    """Swap the operands of low matmuls, or turn a small one, where that makes a transpose superfluous."""
    matmuls = [i for i, step in enumerate(plan.steps) if step.mode is Mode.LOW and _is_swappable(plan.eqns[i], step)]
    readers = plan.readers() if matmuls and any(eqn.primitive is lax.transpose_p for eqn in plan.eqns) else {}
    changed: dict[int, Step] = {}
    made = Memo()  # equations of a kind share a step
    for i in matmuls:
        eqn, step, order = plan.eqns[i], plan.steps[i], order_when_swapped(plan.eqns[i])
        if order == tuple(range(len(order))):
            if eqn.invars[0].aval.ndim > eqn.invars[1].aval.ndim:
                changed[i] = made.get(step, None, functools.partial(_swapped, eqn, step, order))
            continue
        found = readers.get(eqn.outvars[0], [])
        if len(found) != 1 or found[0].place == len(plan.steps):
            continue
        place = found[0].place
        reader, after = plan.eqns[place], plan.steps[place]
        if reader.primitive is not lax.transpose_p or after.reads[0] != step.outs[0].format:
            continue
        permutation = tuple(reader.params["permutation"])
        new, left = made.get(step, permutation, functools.partial(_turned, eqn, step, order, permutation))
        if new is not step:
            changed[i] = new
            changed[place] = made.get(after, left, functools.partial(_less_turned, after, left))
    return plan.with_steps(changed)


def _turned(eqn: Any, step: Step, order: tuple[int, ...], permutation: tuple[int, ...]) -> tuple[Step, tuple[int, ...]]:
    """The step of a matmul before a transpose, and what is left of the transpose.

    Nothing is left if operands that are smaller than the result can be put in order in its place. Else the operands are
    swapped if that leaves the last axis where it is.
    """
    for swaps in (False, True):
        left = tuple(order.index(axis) for axis in permutation) if swaps else permutation
        free = _free_axes(eqn, swaps)
        turns = _turns(left, [len(axes) for axes in free])
        operands = eqn.invars[::-1] if swaps else eqn.invars
        if turns is not None and _is_cheap(operands, turns, eqn.outvars[0], may_turn=not step.replaced):
            new = _swapped(eqn, step, order) if swaps else step
            return _on_turned_operands(new, free, turns, permutation), tuple(range(len(left)))
    if permutation[-1] == order[-1]:
        return _swapped(eqn, step, order), left
    return step, permutation


def _turns(permutation: tuple[int, ...], free: Sequence[int]) -> list[tuple[int, ...]] | None:
    """How to order the free axes of each operand, so many as `free` says; None if axes of several are mixed."""
    ends = list(itertools.accumulate(free, initial=len(permutation) - sum(free)))
    if permutation[: ends[0]] != tuple(range(ends[0])):
        return None
    groups = [(begin, permutation[begin:end]) for begin, end in itertools.pairwise(ends)]
    if any(sorted(axes) != list(range(begin, begin + len(axes))) for begin, axes in groups):
        return None
    return [tuple(axis - begin for axis in axes) for begin, axes in groups]


def _is_cheap(operands: Sequence[Any], turns: Sequence[tuple[int, ...]], out: Var, may_turn: bool) -> bool:
    """Whether few entries are moved to turn the operands, next to those of the result, if any may be.

    A body that a rule gives a matmul is told the shape of its result, so its operands are not turned.
    """
    turned = [v for v, turn in zip(operands, turns, strict=True) if turn != tuple(range(len(turn)))]
    return not turned or (may_turn and 2 * sum(size_of(v.aval) for v in turned) < size_of(out.aval))


def _free_axes(eqn: Any, swaps: bool) -> list[list[int]]:
    """The axes of each operand that are neither contracted nor a batch, in the order in which they are multiplied."""
    contracted, batch = eqn.params["dimension_numbers"]
    free = [
        [axis for axis in range(v.aval.ndim) if axis not in (*c, *b)]
        for v, c, b in zip(eqn.invars, contracted, batch, strict=True)
    ]
    return free[::-1] if swaps else free


def _on_turned_operands(
    step: Step, free: Sequence[Sequence[int]], turns: Sequence[tuple[int, ...]], order: tuple[int, ...]
) -> Step:
    inner = step.operation
    assert inner is not None

    def operation(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        pair = operands[::-1] if step.swapped else operands
        turned = [_with_turned(x, axes, turn) for x, axes, turn in zip(pair, free, turns, strict=True)]
        return inner(eqn, turned[::-1] if step.swapped else turned, params)

    return step._replace(operation=operation, order=order)


def _with_turned(x: Any, axes: Sequence[int], turn: tuple[int, ...]) -> Any:
    if turn == tuple(range(len(turn))):
        return x
    places = list(range(x.ndim))
    for axis, other in zip(axes, turn, strict=True):
        places[axis] = axes[other]
    return lax.transpose(x, places)


def _less_turned(step: Step, permutation: tuple[int, ...]) -> Step:
    """What is left of a transpose."""
    if permutation == tuple(range(len(permutation))):
        return _folded(step)

    def operation(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        return [lax.transpose(operands[0], permutation)]

    return step._replace(operation=operation, touched=True)


def _folded(step: Step) -> Step:
    return step._replace(operation=pass_operands, reason=Reason(Why.FOLDED), touched=True)


def _is_swappable(eqn: Any, step: Step) -> bool:
    """A rule that gives the matmul another body may tell activations from weights by their places."""
    is_plain = eqn.primitive is lax.dot_general_p and eqn.params.get("out_sharding") is None
    return is_plain and not isinstance(step.found.rule, Replacement)


def _swapped(eqn: Any, step: Step, order: tuple[int, ...]) -> Step:
    params = step.params or eqn.params
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    params = {**params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    assert step.operation is not None
    return step._replace(params=params, operation=_on_swapped(step.operation, order), order=order, swapped=True)


def _on_swapped(operation: Operation, order: tuple[int, ...]) -> Operation:
    def swapped(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> Sequence[Any]:
        (out,) = (v.aval for v in eqn.outvars)
        made = Var(out.update(shape=tuple(out.shape[i] for i in order)))
        return operation(eqn.replace(invars=eqn.invars[::-1], outvars=[made]), operands[::-1], params)

    return swapped
