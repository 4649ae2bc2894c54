"""Ragged matmuls in blocks of rows, for GPUs.

    lax.ragged_dot(x, w, sizes)        # rows of x in groups, each with a matrix of its own: a mixture of experts

XLA multiplies all rows by each matrix and keeps those of its group: eight times the work with eight experts. Here the
rows of each group are filled up to whole blocks. However the rows are spread over the groups, the number of blocks is
the same, and each is multiplied by the matrix of its group.
"""

import math
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

_LEAST = 128  # rows of a block
_GAIN = 2  # how much less there must be to multiply


def suits(x: Any, w: Any, sizes: Any, *, ragged_dot_dimension_numbers: Any, group_offset: Any, **_: Any) -> bool:
    """Whether `by_blocks` knows this matmul, and it is worth the rows that are moved."""
    ((left, right), batch), ragged, groups = _parts(ragged_dot_dimension_numbers)
    if not all(isinstance(size, int) for size in (*x.shape, *w.shape, *sizes.shape)):
        return False
    if group_offset is not None or ragged != (0,) or batch != ((), ()) or (x.ndim, sizes.ndim) != (2, 1):
        return False
    gradient = (left, right, groups, w.ndim) == ((0,), (0,), (), 2)
    if not gradient and (left != (1,) or groups != (0,) or len(right) != 1 or w.ndim != 3):
        return False
    rows, number = x.shape[0], sizes.shape[0]
    block = _block(rows, number)
    return _GAIN * block * _most(rows, number, block) <= rows * number


def _parts(numbers: Any) -> Any:
    contracted, batch = numbers.dot_dimension_numbers
    dot = tuple(map(tuple, contracted)), tuple(map(tuple, batch))
    return dot, tuple(numbers.lhs_ragged_dimensions), tuple(numbers.rhs_group_dimensions)


def _block(rows: int, groups: int) -> int:
    """How many rows a block has. Small ones waste few rows; large ones read the matrices seldom.

    Both take the same time at about the root of 400 rows for each row of a group (H200).
    """
    return max(_LEAST, 2 ** round(math.log2(20 * math.sqrt(max(rows, 1) / groups))))


def _most(rows: int, groups: int, block: int) -> int:
    """How many blocks there can be, if each group has its last one filled up."""
    return (rows + groups * (block - 1)) // block


def by_blocks(
    x: Any,
    w: Any,
    sizes: Any,
    *,
    ragged_dot_dimension_numbers: Any,
    precision: Any,
    preferred_element_type: Any,
    **_: Any,
) -> Any:
    """A ragged matmul, or the gradient of its matrices, as a matmul of blocks."""
    ((_, right), _), _, groups = _parts(ragged_dot_dimension_numbers)
    blocks = _Blocks.of(sizes, x.shape[0])
    options = {"precision": precision, "preferred_element_type": preferred_element_type}
    if groups:
        matrices = w.at[blocks.group].get(mode="clip")
        return blocks.joined(lax.dot_general(blocks.split(x), matrices, (((2,), right), ((0,), (0,))), **options))
    wide = {**options, "preferred_element_type": jnp.float32}
    parts = lax.dot_general(blocks.split(x), blocks.split(w), (((1,), (1,)), ((0,), (0,))), **wide)
    return blocks.summed(parts).astype(preferred_element_type)


class _Blocks(NamedTuple):
    """Which rows are in which block."""

    group: Any  # of each block
    row: Any  # for each place in each block, the row that is there
    is_used: Any  # and whether there is one
    place: Any  # for each row, its place in all blocks
    is_in_group: Any  # and whether it is in a group
    groups: int

    @classmethod
    def of(cls, sizes: Any, rows: int) -> "_Blocks":
        groups, sizes = sizes.shape[0], sizes.astype(np.int32)  # they may be unsigned, or have few bits
        block = _block(rows, groups)
        ends, last = jnp.cumsum(sizes), jnp.cumsum(-(-sizes // block))
        starts, first = ends - sizes, last - (-(-sizes // block))
        numbers = lax.iota(sizes.dtype, _most(rows, groups, block))
        group = _group_of(numbers, last)
        row = (starts[group] + (numbers - first[group]) * block)[:, None] + lax.iota(sizes.dtype, block)
        all_rows = lax.iota(sizes.dtype, rows)
        own = _group_of(all_rows, ends)
        place = first[own] * block + all_rows - starts[own]
        return cls(group, row, row < ends[group][:, None], place, all_rows < ends[-1], groups)

    def split(self, x: Any) -> Any:
        """The rows of each block, and zeros where there are none."""
        return jnp.where(self.is_used[..., None], x.at[self.row].get(mode="clip"), x.dtype.type(0))

    def joined(self, x: Any) -> Any:
        """The rows as they were, of blocks; zeros for those in no group."""
        flat = x.reshape(-1, x.shape[-1]).at[self.place].get(mode="clip")
        return jnp.where(self.is_in_group[:, None], flat, x.dtype.type(0))

    def summed(self, x: Any) -> Any:
        """The sum over the blocks of each group, as a matmul: it adds in a fixed order, and a scatter doesn't.

        A NaN in one group reaches the others. Its gradient goes on to the rows in any case, and to all layers before.
        """
        mine = self.group == lax.iota(self.group.dtype, self.groups)[:, None]
        is_used = jnp.any(self.is_used, axis=1)
        return lax.dot_general(
            (mine & is_used).astype(x.dtype), x, (((1,), (0,)), ((), ())), precision=lax.Precision.HIGHEST
        )


def _group_of(number: Any, ends: Any) -> Any:
    """The group in which each number is, by the ends of the groups; the last one, behind all."""
    return jnp.minimum(jnp.sum(number[:, None] >= ends, axis=1, dtype=ends.dtype), ends.shape[0] - 1)
