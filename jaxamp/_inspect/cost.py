"""What an equation costs: floating-point operations, bytes, and for a matmul its dimensions."""

import math
from typing import Any, NamedTuple

from .._primitives.attention import ATTENTION, BACKWARD
from .._traits.table import MATMULS, MOVES, REDUCES


class Dims(NamedTuple):
    """A matmul of (m, k) by (k, n); of a convolution, k is a window with its channels, n the features of a group."""

    m: int
    n: int
    k: int


def base_name(primitive: Any) -> str:
    """The name of a primitive, without what marks its mixed form."""
    name = primitive.name.removeprefix("mixed_")
    return name if name in MATMULS else primitive.name


def is_matmul(eqn: Any) -> bool:
    """Whether a matrix unit does it."""
    return base_name(eqn.primitive) in MATMULS or eqn.primitive in ATTENTION


def flops_of(eqn: Any) -> int:
    """Multiplications and additions of a matmul; else one for each entry that is made, or that a reduction reads."""
    name = base_name(eqn.primitive)
    if eqn.primitive in ATTENTION:
        return _flops_of_attention(eqn)
    if name in MATMULS:
        return _MATMULS[name](eqn)
    if name in MOVES or name in _FREE:
        return 0
    return sum(_size(v.aval) for v in (eqn.invars[:1] if name in REDUCES else eqn.outvars))


def bytes_of(eqn: Any) -> int:
    """What it reads and writes, if nothing is fused."""
    return sum(_size(v.aval) * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))


def dims_of(eqn: Any) -> Dims | None:
    """The dimensions of a matmul; None for what is none, and for what has more than one."""
    name = base_name(eqn.primitive)
    if name == "conv_general_dilated":
        numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
        groups = eqn.params["feature_group_count"] * eqn.params["batch_group_count"]
        out, contracted = eqn.outvars[0].aval, math.prod(kernel[i] for i in numbers.rhs_spec[1:])
        features = kernel[numbers.rhs_spec[0]] // groups
        return Dims(_size(out) // max(1, out.shape[numbers.out_spec[1]]), features, contracted)
    if name not in MATMULS:
        return None
    left, right = (v.aval.shape for v in eqn.invars[:2])
    (contracted, right_contracted), (batch, right_batch), groups_of_right = _dot_dimensions(eqn)
    return Dims(
        math.prod(size for i, size in enumerate(left) if i not in (*contracted, *batch)),
        math.prod(size for i, size in enumerate(right) if i not in (*right_contracted, *right_batch, *groups_of_right)),
        math.prod(left[i] for i in contracted),
    )


def _dot_dimensions(eqn: Any) -> Any:
    if base_name(eqn.primitive) == "dot_general":
        return (*eqn.params["dimension_numbers"], ())
    numbers = eqn.params["ragged_dot_dimension_numbers"]
    return (*numbers.dot_dimension_numbers, tuple(numbers.rhs_group_dimensions))


def _flops_of_dot(eqn: Any) -> int:
    """Each entry of the left operand meets the free axes of the right one; of a ragged one, in one group."""
    dims = dims_of(eqn)
    assert dims is not None
    return 2 * _size(eqn.invars[0].aval) * dims.n


def _flops_of_convolution(eqn: Any) -> int:
    numbers, kernel = eqn.params["dimension_numbers"], eqn.invars[1].aval.shape
    window = math.prod(kernel[i] for i in numbers.rhs_spec[1:])
    return 2 * _size(eqn.outvars[0].aval) * window // math.prod(eqn.params["lhs_dilation"])  # zeros between entries


def _flops_of_attention(eqn: Any) -> int:
    """Queries by keys and weights by values; backwards, the first again and two for each."""
    query, key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    once = 2 * math.prod(query) * key[-3]
    return once * (5 if eqn.primitive is BACKWARD else 2)


_FREE = frozenset({"convert_element_type", "held", "ordered"})
_MATMULS = {
    "dot_general": _flops_of_dot,
    "ragged_dot_general": _flops_of_dot,
    "conv_general_dilated": _flops_of_convolution,
}


def _size(aval: Any) -> int:
    """The number of entries; 0 if it is not known, as when a program is exported for any batch."""
    shape = getattr(aval, "shape", ())
    return math.prod(shape) if all(isinstance(size, int) for size in shape) else 0
