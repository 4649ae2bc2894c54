"""Take the scores of labels such that their gradient is no scatter (`_primitives/entries.py`).

jnp.take_along_axis(scores, labels[..., None], axis=-1)        scores[jnp.arange(n), labels]
"""

import functools
from collections.abc import Mapping, Sequence
from typing import Any

from jax import lax

from .._compat import Literal, Var
from .._formats import float_dtype
from .._plan.classify import Mode
from .._plan.counts import counts_of
from .._plan.plan import Operation, Plan
from .._primitives.entries import entries_of_rows

_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def pick_labels(plan: Plan) -> Plan:
    """Give gathers of one entry of each row a gradient that is part of any kernel."""
    pairs = enumerate(zip(plan.eqns, plan.steps, strict=True))
    found = [i for i, (eqn, step) in pairs if step.mode is not Mode.RULE and _takes_single_entries(eqn)]
    if not found:
        return plan
    counts, made = counts_of(plan.eqns), {v: eqn for eqn in plan.eqns for v in eqn.outvars}
    ways = {i: _way(plan.eqns[i], counts, made) for i in found}
    return plan.with_steps(
        {i: plan.steps[i]._replace(operation=way, touched=True) for i, way in ways.items() if way is not None}
    )


def _takes_single_entries(eqn: Any) -> bool:
    """Whether it is a lookup of single floats, one for each row along the last axis."""
    if eqn.primitive is not lax.gather_p:
        return False
    x, places = (v.aval for v in eqn.invars)
    return (
        float_dtype(x) is not None
        and x.ndim > 1
        and all(size == 1 for size in eqn.params["slice_sizes"])
        and places.shape[: x.ndim - 1] == x.shape[:-1]
        and eqn.params["mode"] in _MODES
    )


def _way(eqn: Any, counts: Mapping[Var, int], made: Mapping[Var, Any]) -> Operation | None:
    """How to take one entry of each row; None if it is something else that is taken."""
    x, places = (v.aval for v in eqn.invars)
    numbers, last = eqn.params["dimension_numbers"], x.ndim - 1
    batch, indexed = tuple(numbers.operand_batching_dims), tuple(numbers.start_index_map)
    if tuple(numbers.start_indices_batching_dims) != batch or set(batch) | set(indexed) != set(range(x.ndim)):
        return None
    if indexed == (last,):
        return _picked if all(size == 1 for size in places.shape[last:]) else None
    parts = _parts_of_indices(eqn.invars[1], made)
    if places.ndim != x.ndim or len(parts) != len(indexed) or last not in indexed:
        return None
    counted = all(counts.get(part) == axis for axis, part in zip(indexed, parts, strict=True) if axis != last)
    return _picked_by(indexed.index(last)) if counted else None


def _parts_of_indices(places: Any, made: Mapping[Var, Any]) -> list[Var]:
    """The columns that indices are joined from; none if they are not."""
    eqn = None if isinstance(places, Literal) else made.get(places)
    if eqn is None or eqn.primitive is not lax.concatenate_p or eqn.params["dimension"] != places.aval.ndim - 1:
        return []
    is_column = all(not isinstance(v, Literal) and v.aval.shape[-1] == 1 for v in eqn.invars)
    return list(eqn.invars) if is_column else []


def _picked(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    x, places = operands
    out = entries_of_rows(x, lax.reshape(places, x.shape[:-1]), params["mode"], params["fill_value"])
    return [lax.reshape(out, eqn.outvars[0].aval.shape)]


@functools.cache
def _picked_by(column: int) -> Operation:
    """An operation that takes the entries that one column of the indices says."""

    def run(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
        x, places = operands
        return _picked(eqn, (x, lax.index_in_dim(places, column, axis=-1)), params)

    return run
