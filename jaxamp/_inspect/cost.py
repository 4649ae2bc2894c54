"""What an equation costs: floating-point operations and bytes."""

from typing import Any

from .._traits import traits_of
from .._traits.matmul_cost import Dims, size_of


def flops_of(eqn: Any) -> int:
    """Multiplications and additions of a matmul; else one for each entry that is made, or that a reduction reads."""
    traits = traits_of(eqn.primitive)
    if traits.flops is not None:
        return traits.flops(eqn)
    if traits.moves or traits.passes_on:
        return 0
    return sum(size_of(v.aval) for v in (eqn.invars[:1] if traits.reduces else eqn.outvars))


def bytes_of(eqn: Any) -> int:
    """The bytes that it reads and writes, if nothing is fused."""
    return sum(size_of(v.aval) * v.aval.dtype.itemsize for v in (*eqn.invars, *eqn.outvars) if hasattr(v.aval, "dtype"))


def dims_of(eqn: Any) -> Dims | None:
    """The dimensions of a matmul; None for any other operation, and for one of several matmuls."""
    dims = traits_of(eqn.primitive).dims
    return None if dims is None else dims(eqn)
