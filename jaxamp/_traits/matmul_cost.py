"""The dimensions and the FLOPs of matmuls and convolutions, read off their equations."""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from jax import lax


class Dims(NamedTuple):
    """A matmul of (m, k) by (k, n); of a convolution, k is a window with its channels, n the features of a group."""

    m: int
    n: int
    k: int


def size_of(aval: Any) -> int:
    """The number of entries; 0 if it is not known, as when a program is exported for any batch."""
    shape = getattr(aval, "shape", ())
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else 0


def is_outer_product(eqn: Any) -> bool:
    """Whether it is a matmul that contracts nothing."""
    return eqn.primitive is lax.dot_general_p and not eqn.params["dimension_numbers"][0][0]


def dims_of_dot(eqn: Any) -> Dims:
    contracting, batches = eqn.params["dimension_numbers"]
    return _dims(eqn, contracting, batches, ())


def dims_of_ragged_dot(eqn: Any) -> Dims:
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    contracting, batches = numbers.dot_dimension_numbers
    return _dims(eqn, contracting, batches, tuple(numbers.rhs_group_dimensions))


def _dims(eqn: Any, contracting: Any, batches: Any, groups_of_right: tuple[int, ...]) -> Dims:
    left, right = (v.aval.shape for v in eqn.invars[:2])
    (contracted, right_contracted), (batch, right_batch) = contracting, batches
    return Dims(
        math.prod(size for i, size in enumerate(left) if i not in (*contracted, *batch)),
        math.prod(size for i, size in enumerate(right) if i not in (*right_contracted, *right_batch, *groups_of_right)),
        math.prod(left[i] for i in contracted),
    )


def flops_of_dot(dims: Callable[[Any], Dims]) -> Callable[[Any], int]:
    """Each entry of the left operand meets the free axes of the right one; in a ragged matmul, those of one group."""
    return lambda eqn: 2 * size_of(eqn.invars[0].aval) * dims(eqn).n


def dims_of_convolution(eqn: Any) -> Dims:
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
    out, contracted = eqn.outvars[0].aval, math.prod(kernel[i] for i in numbers.rhs_spec[1:])
    features = kernel[numbers.rhs_spec[0]] // groups
    return Dims(size_of(out) // max(1, out.shape[numbers.out_spec[1]]), features, contracted)


def flops_of_convolution(eqn: Any) -> int:
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    window = math.prod(kernel[i] for i in numbers.rhs_spec[1:])
    return 2 * size_of(eqn.outvars[0].aval) * window // math.prod(eqn.params["lhs_dilation"])  # zeros between entries
