"""Which entries of an array share a scale.

The law: a group is `group_size` entries along one axis, and no other axis is touched. So an array that is cut along any
axis into parts that hold whole groups has its state cut in the same way, and nothing is communicated.

- `"last"`: groups along the last axis, if it is divisible by the group size. If not, entries are counted through the
  whole array, `"flat"`, with zeros after the last one.
- `"rows"`: groups along the axis before the last, the leading axis of a matrix, if that is divisible: 32 rows are one
  tile of a TPU for bytes. If not, as `"last"`.
- `"flat"`: through the whole array, the published order. It is that of `"last"` where the last axis is divisible, in
  other shapes.

The scales of all moments of an array are one array, with the moments along its first axis. Its shape tells the layout.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Layout = Literal["last", "rows", "flat"]
LAYOUTS: tuple[Layout, ...] = ("last", "rows", "flat")


@dataclasses.dataclass(frozen=True)
class Groups:
    """The groups of an array of one shape; `axis` is -1, -2, or None for flat.

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
    def view_axis(self) -> int:
        """The axis of a group in the view, counted from the end."""
        return -1 if self.axis is None else self.axis

    def view(self, x: jax.Array) -> jax.Array:
        """The array with one more axis, that of the groups."""
        shape = self.scales_shape
        if self.axis is None:
            flat = jnp.ravel(x)
            missing = shape[0] * self.size - flat.size
            return (jnp.pad(flat, (0, missing)) if missing else flat).reshape(*shape, self.size)
        at = len(shape) + self.axis + 1
        return x.reshape(*shape[:at], self.size, *shape[at:])

    def unview(self, x: jax.Array) -> jax.Array:
        """What `view` was made of."""
        return jnp.ravel(x)[: math.prod(self.shape)].reshape(self.shape) if self.axis is None else x.reshape(self.shape)

    def spread(self, scales: jax.Array) -> jax.Array:
        """Scales with an axis of one in the place of the groups', to be broadcast."""
        return jnp.expand_dims(scales, self.view_axis)


def groups(shape: tuple[int, ...], size: int, layout: Layout) -> Groups:
    """The groups of an array in a layout."""
    if layout == "rows" and len(shape) > 1 and shape[-2] % size == 0:
        return Groups(shape, size, -2)
    if layout != "flat" and shape and shape[-1] % size == 0:
        return Groups(shape, size, -1)
    return Groups(shape, size, None)


def groups_of(shape: tuple[int, ...], scales_shape: tuple[int, ...], size: int) -> Groups | None:
    """The groups that an array has according to its scales; None if the scales are of another array."""
    for layout in LAYOUTS:
        found = groups(shape, size, layout)
        if found.scales_shape == scales_shape:
            return found
    return None


def whole(found: Groups, shard: tuple[int, ...]) -> bool:
    """Whether parts of the shape `shard` hold whole groups."""
    if shard == found.shape:
        return True
    return found.axis is not None and shard[found.axis] % found.size == 0
