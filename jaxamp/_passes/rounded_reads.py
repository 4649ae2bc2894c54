"""Which values are only read rounded: `send_low` sends them low, and `carry_low` lets loops hand them on low."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jax import lax

from .._compat import Literal, Var
from .._primitives.in_format import is_alias
from .._primitives.matmul import is_mixed
from .._primitives.quantize import LARGEST, QUANTIZE, SCALE
from .._primitives.quantized_matmul import is_quantized
from .._traits import traits_of

Flags = tuple[bool, ...]  # of variables: whether all that reads them rounds them


class RoundedReads:
    """What is known of the variables of a jaxpr, when its equations are read from the last to the first."""

    def __init__(self, results: Sequence[Any], flags: Sequence[bool]):
        self._rounded: dict[Var, bool] = {}
        self.read(results, flags)

    def read(self, atoms: Sequence[Any], flags: Sequence[bool]) -> None:
        """Something reads these, and rounds those that are flagged."""
        for atom, flag in zip(atoms, flags, strict=True):
            if not isinstance(atom, Literal):
                self._rounded[atom] = self._rounded.get(atom, True) and flag

    def of(self, variables: Sequence[Var], unread: bool = False) -> Flags:
        """Whether all that reads them rounds them; `unread`: what is said of those that nothing reads."""
        return tuple(self._rounded.get(v, unread) for v in variables)

    def is_read(self, v: Var) -> bool:
        return v in self._rounded


def rounds(eqn: Any, results: Flags, low: np.dtype) -> Flags:
    """Which operands of an equation without a body it rounds to `low`, if all that reads its results does so."""
    none = (False,) * len(eqn.invars)
    if is_quantized(eqn.primitive) or eqn.primitive in (SCALE, LARGEST, QUANTIZE):
        read = 2 if is_quantized(eqn.primitive) and "derivative" not in eqn.params else 1
        return (True,) * read + none[read:]
    if is_mixed(eqn.primitive):
        both = tuple(eqn.params["compute_dtype"] == low and not each for each in eqn.params["mixing"].exact)
        return both + none[2:]
    if is_alias(eqn):
        return results
    if eqn.primitive is lax.convert_element_type_p:
        return (np.dtype(eqn.params["new_dtype"]) == low,)
    return (traits_of(eqn.primitive).relays and all(results),) * len(eqn.invars)
