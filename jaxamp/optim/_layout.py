"""Which entries of an array share a scale.

The law: a group is `group_size` entries along one axis, and no other axis is touched. So an array that is cut along any
axis into parts that hold whole groups has its state cut in the same way, and nothing is communicated.

- `"last"`: groups along the last axis. If that is not divisible by the group size and the array is large, as `"rows"`.
- `"rows"`: groups along the axis before the last, the leading axis of a matrix: 32 rows of bytes are one tile of a TPU.
  If that is not divisible, along the last axis.
- `"flat"`: entries are counted through the whole array, the published order, with zeros after the last one. Where the
  last axis is divisible, that is `"last"`, and no axes are merged. The others end here where no axis is divisible:
  padding is what XLA makes copies for, 4 bytes per parameter on a GPU.

The scales of all moments of an array are one array, with the moments along its first axis. Its shape tells the layout.
"""

import dataclasses
import math
from typing import Literal

import jax
import jax.numpy as jnp

Layout = Literal["last", "rows", "flat"]
LAYOUTS: tuple[Layout, ...] = ("last", "rows", "flat")
LARGE = 2**16  # smaller arrays are put together with others, which takes groups in the order of the entries


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
    last = bool(shape) and shape[-1] % size == 0
    rows = len(shape) > 1 and shape[-2] % size == 0
    if rows and (layout == "rows" or (layout == "last" and not last and math.prod(shape) >= LARGE)):
        return Groups(shape, size, -2)
    return Groups(shape, size, -1 if last else None)


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
