"""Equations with bodies that take more operands after their own, for values that a program is given along the way."""

from collections.abc import Sequence
from typing import Any

from jax.sharding import PartitionSpec

from .._compat import Jaxpr, inside_hi, more_jitted, more_scanned, with_hi_checkpoint, with_more_barriers


def way_into(eqn: Any) -> str:
    """The kind of an equation that can take more operands; empty if it can't."""
    if "_prim" in eqn.params:
        hi = inside_hi(eqn.params["_prim"])
        return "checkpoint" if hi is not None and hi.kind == "checkpoint" else ""
    name = {"remat2": "checkpoint"}.get(eqn.primitive.name, eqn.primitive.name)
    return name if name in ("checkpoint", "jit", "scan", "cond", "shard_map") else ""


def with_more_operands(
    eqn: Any, way: str, jaxprs: Sequence[Jaxpr], count: int, barrier: bool = False
) -> dict[str, Any]:
    """The parameters of an equation with more operands after its own, and with bodies that take them.

    `barrier`: whether a checkpoint has a barrier in front of them, as it has in front of its own.
    """
    params = eqn.params
    if way == "cond":
        return {**params, "branches": tuple(jaxprs)}
    if "_prim" in params:
        return {**params, "_prim": with_hi_checkpoint(params["_prim"], jaxprs[0], 0, count, barrier)}
    changed = {"jaxpr": jaxprs[0]}
    if way == "shard_map":
        changed["in_specs"] = (*params["in_specs"], *[PartitionSpec()] * count)
    if way == "checkpoint":
        changed["prevent_cse"] = with_more_barriers(params["prevent_cse"], len(eqn.invars), 0, count, barrier)
    params = {"jit": more_jitted, "scan": more_scanned}.get(way, lambda params, count: params)(params, count)
    return {**params, **changed}
