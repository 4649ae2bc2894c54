"""How one array and its state are sharded."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ._groups import Groups


def split_sharding(x: Any) -> NamedSharding | None:
    """The sharding of an array that is known to be split. Under `jit`, only explicit axes are known."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    is_split = isinstance(sharding, NamedSharding) and any(axis is not None for axis in sharding.spec)
    return sharding if is_split else None


def mesh_sharding(x: Any) -> NamedSharding | None:
    """The sharding of a concrete array that is placed on a mesh."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


def scales_sharding(sharding: Any, groups: Groups) -> NamedSharding | None:
    """The sharding of an array's scales, given that of the array."""
    if not isinstance(sharding, NamedSharding):
        return None
    axes = [] if groups.axis is None else [None, *sharding.spec]
    while axes and axes[-1] is None:  # XLA drops trailing None too
        axes.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def check_whole_groups(name: str, leaf_name: str, groups: Groups, sharding: Any) -> None:
    """Raise an error if a sharding splits a group between devices."""
    shard = sharding.shard_shape(groups.shape)
    if not groups.are_whole_in(shard):
        raise ValueError(
            f"{name} got the parameter {leaf_name!r} of shape {groups.shape} in parts of {shard}; expected parts with "
            f"whole groups of {groups.size}. Shard another axis, write Storage(layout='rows') for groups along the "
            f"second-to-last axis, or param_groups=[{{'params': {leaf_name!r}, 'quantize': False}}] for float32 "
            "moments."
        )
