"""Take the scores of labels such that their gradient is no scatter (`_primitives/entries.py`)."""

from collections.abc import Sequence
from typing import Any

from jax import lax

from .._formats import float_dtype
from .._plan.classify import Mode
from .._plan.plan import Plan
from .._primitives.entries import entries_of_rows

_MODES = (
    lax.GatherScatterMode.CLIP,
    lax.GatherScatterMode.FILL_OR_DROP,
    lax.GatherScatterMode.PROMISE_IN_BOUNDS,
)


def pick_labels(plan: Plan) -> Plan:
    """Give gathers of one entry of each row a gradient that is part of any kernel."""
    found = {
        i
        for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True))
        if eqn.primitive is lax.gather_p and step.mode is not Mode.RULE and _takes_one_of_each_row(eqn)
    }
    return plan.with_steps({i: plan.steps[i]._replace(operation=_picked, touched=True) for i in found})


def _takes_one_of_each_row(eqn: Any) -> bool:
    """Whether all axes but the last are a batch, and one index is given for each row."""
    x, places = (v.aval for v in eqn.invars)
    numbers, batch = eqn.params["dimension_numbers"], tuple(range(x.ndim - 1))
    return (
        float_dtype(x) is not None
        and x.ndim > 1
        and tuple(numbers.operand_batching_dims) == tuple(numbers.start_indices_batching_dims) == batch
        and tuple(numbers.start_index_map) == (x.ndim - 1,)
        and places.shape[: x.ndim - 1] == x.shape[:-1]
        and all(size == 1 for size in (*places.shape[x.ndim - 1 :], *eqn.params["slice_sizes"]))
        and eqn.params["mode"] in _MODES
    )


def _picked(eqn: Any, operands: Sequence[Any], params: dict[str, Any]) -> list[Any]:
    x, places = operands
    out = entries_of_rows(x, lax.reshape(places, x.shape[:-1]), params["mode"], params["fill_value"])
    return [lax.reshape(out, eqn.outvars[0].aval.shape)]
