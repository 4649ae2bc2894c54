"""Groups: which entries of an array share a scale.

The law: a group is `group_size` entries along one axis, and no other axis is touched. So if an array is split along any
axis into parts that hold whole groups, its state is split in the same way, and nothing is communicated.

- `"last"`: groups along the last axis. If its length is not divisible by the group size and the array is large, the
  same as `"rows"`.
- `"rows"`: groups along the second-to-last axis, the leading axis of a matrix: 32 rows of bytes are one tile of a TPU.
  If its length is not divisible, along the last axis.
- `"flat"`: entries are counted through the whole array, in the published order, with zeros after the last one. If the
  last axis is divisible, this equals `"last"`, and no axes are merged. The other layouts fall back to this one only if
  no axis is divisible, because padding makes XLA copy: 4 bytes per parameter on a GPU.

The scales of all moments of an array are one array, with the moments along its first axis. Its shape tells the layout.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Layout = Literal["last", "rows", "flat"]
LAYOUTS: tuple[Layout, ...] = ("last", "rows", "flat")
LARGE = 2**16  # smaller arrays are packed together with others, which needs groups in the order of the entries


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of arrays of one shape. `axis` is -1, -2, or None for flat.

    >>> Groups((4, 64), 32, -1).scales_shape, Groups((64, 4), 32, -2).scales_shape
    ((4, 2), (2, 4))
    >>> Groups((5, 7), 32, None).scales_shape
    (2,)
    """

    shape: tuple[int, ...]
    size: int
    axis: int | None

    @property
    def scales_shape(self) -> tuple[int, ...]:
        """The shape of one moment's scales."""
        if self.axis is None:
            return (-(-math.prod(self.shape) // self.size),)
        *before, n = self.shape[: len(self.shape) + self.axis + 1]
        return (*before, n // self.size, *self.shape[len(self.shape) + self.axis + 1 :])

    @property
    def view_shape(self) -> tuple[int, ...]:
        """The shape of `view`."""
        shape = self.scales_shape
        at = len(shape) + self.view_axis + 1
        return (*shape[:at], self.size, *shape[at:])

    @property
    def view_axis(self) -> int:
        """The axis of `view` that runs along a group, counted from the end."""
        return -1 if self.axis is None else self.axis

    def view(self, x: jax.Array) -> jax.Array:
        """Reshape an array to have one more axis, along the groups."""
        shape = self.view_shape
        if self.axis is None:
            flat = jnp.ravel(x)
            missing = math.prod(shape) - flat.size
            x = jnp.pad(flat, (0, missing)) if missing else flat
        return x.reshape(shape)

    def unview(self, x: jax.Array) -> jax.Array:
        """Undo `view`."""
        return jnp.ravel(x)[: math.prod(self.shape)].reshape(self.shape) if self.axis is None else x.reshape(self.shape)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Give scales an axis of length one along the groups, so that they broadcast against the view."""
        return jnp.expand_dims(scales, self.view_axis)

    def are_whole_in(self, shard: tuple[int, ...]) -> bool:
        """Whether parts of the shape `shard` hold whole groups."""
        return shard == self.shape or (self.axis is not None and shard[self.axis] % self.size == 0)


def choose_groups(shape: tuple[int, ...], size: int, layout: Layout) -> Groups:
    """The groups of an array in a layout."""
    last = bool(shape) and shape[-1] % size == 0
    rows = len(shape) > 1 and shape[-2] % size == 0
    if rows and (layout == "rows" or (layout == "last" and not last and math.prod(shape) >= LARGE)):
        return Groups(shape, size, -2)
    return Groups(shape, size, -1 if last else None)


def groups_from_scales(shape: tuple[int, ...], scales_shape: tuple[int, ...], size: int) -> Groups | None:
    """The groups of an array whose scales have the given shape; None if such scales can't belong to it."""
    for layout in LAYOUTS:
        groups = choose_groups(shape, size, layout)
        if groups.scales_shape == scales_shape:
            return groups
    return None
