"""Which parts of an array that is split over devices have something, and on which devices they are."""

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding


class Shard(NamedTuple):
    """A part of an array."""

    entries: str  # which of the whole array, as "[8:12, :]"; empty inside of a `shard_map`
    devices: tuple[int, ...]  # the ids of those that have it
    coordinates: dict[str, int]  # their place along the axes of the mesh that split the array

    def __str__(self) -> str:
        devices = f"device{'s' * (len(self.devices) > 1)} {', '.join(map(str, self.devices))}"
        where = ", ".join(f"{axis} {i}" for axis, i in self.coordinates.items())
        return (f"{self.entries} on " if self.entries else "") + devices + (f" ({where})" if where else "")


def shards_of(marked: jax.Array, *, is_mapped: bool) -> tuple[tuple[Shard, ...], int]:
    """The parts of an array in which an entry is marked, and how many parts there are; none if it is not split.

    Args:
        marked: A bool for each entry.
        is_mapped: Whether its last axis goes over the devices of a `shard_map`.
    """
    sharding = getattr(marked, "sharding", None)
    if sharding is None or sharding.is_fully_replicated:
        return (), 0
    parts: dict[tuple[tuple[int, int], ...], list[Any]] = {}
    for shard in marked.addressable_shards:
        bounds = tuple(s.indices(size)[:2] for s, size in zip(shard.index, marked.shape, strict=True))
        parts.setdefault(bounds, []).append(shard)
    mesh = sharding.mesh if isinstance(sharding, NamedSharding) else None
    found = []
    for bounds, shards in parts.items():
        if bool(shards[0].data.any()):
            devices = [shard.device for shard in shards]
            entries = "" if is_mapped else _in_words(bounds, marked.shape)
            found.append(Shard(entries, tuple(sorted(d.id for d in devices)), _coordinates(mesh, devices)))
    return tuple(found), len(parts)


def _in_words(bounds: tuple[tuple[int, int], ...], shape: tuple[int, ...]) -> str:
    whole = [(0, size) for size in shape]
    return f"[{', '.join(':' if b == w else f'{b[0]}:{b[1]}' for b, w in zip(bounds, whole, strict=True))}]"


def _coordinates(mesh: Any, devices: list[Any]) -> dict[str, int]:
    """Where on a mesh devices are, along the axes on which they are in one place."""
    if not isinstance(mesh, Mesh):
        return {}
    ids = np.vectorize(lambda device: device.id, otypes=[int])(mesh.devices)
    places = np.argwhere(np.isin(ids, [device.id for device in devices]))
    return {
        str(axis): int(along[0])
        for axis, size, along in zip(mesh.axis_names, ids.shape, places.T, strict=True)
        if size > 1 and len(set(along.tolist())) == 1
    }


def shards_in_words(shards: tuple[Shard, ...], count: int) -> str:
    """A line on the parts that have something."""
    if len(shards) == count:
        return f"In all {count} shards"
    return f"In {len(shards)} of {count} shards: {'; '.join(map(str, shards[:4]))}{'; ...' if len(shards) > 4 else ''}"
