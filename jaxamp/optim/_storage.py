"""`Storage`: how weights and moments are stored."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from ._layout import LAYOUTS, Layout
from ._scales import FORMATS
from ._weights import LOW

Bits = Literal["auto", 24, 32] | None
SERVED = (*LOW, jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Storage:
    """How weights and moments are stored. One object, so that `optax.inject_hyperparams` takes none of it for a number.

    Attributes:
        quantize: Whether moments are bytes with a scale per group; else they are float32.
        master_weight_bits: 24 or 32: bfloat16 and float16 parameters have a correction of one byte or of two, and the
            optimizer sees weights of that many bits. None: they have none, and small updates are lost in rounding.
            `"auto"` is 24 where there is a parameter that can have it. float32 parameters never have one.
        group_size: How many entries share a scale.
        variance_floor: Whether a second moment that is not zero is kept from being stored as zero.
        scales: The format of scales: `"wide"`, or `"float16"`, which is the published one.
        layout: Which entries share a scale: `"last"`, `"rows"` or `"flat"`.
        together: Arrays with fewer entries than this are put together and stepped as one, for each would take as long
            to launch as a large one; 0 to step each by itself. How state is stored does not depend on it.

    >>> Storage(group_size=64, master_weight_bits=32).replace(quantize=False)
    Storage(quantize=False, master_weight_bits=32, group_size=64, variance_floor=True, scales='wide', layout='last', \
together=65536)
    """

    quantize: bool = True
    master_weight_bits: Bits = "auto"
    group_size: int = 32
    variance_floor: bool = True
    scales: Literal["wide", "float16"] = "wide"
    layout: Layout = "last"
    together: int = 65536

    def __post_init__(self) -> None:
        if isinstance(self.group_size, bool) or not isinstance(self.group_size, int) or self.group_size < 1:
            raise ValueError(
                f"Storage got group_size={self.group_size!r}; expected a positive integer. Write "
                "Storage(group_size=32)."
            )
        if isinstance(self.together, bool) or not isinstance(self.together, int) or self.together < 0:
            raise ValueError(
                f"Storage got together={self.together!r}; expected a number of entries. Write Storage(together=0) to "
                "step each array by itself."
            )
        _one_of("master_weight_bits", self.master_weight_bits, ("auto", None, 24, 32))
        _one_of("scales", self.scales, tuple(FORMATS))
        _one_of("layout", self.layout, LAYOUTS)

    def replace(self, **changes: Any) -> "Storage":
        """The same storage, but for `changes`."""
        return dataclasses.replace(self, **changes)

    def bits_for(self, dtype: Any) -> int | None:
        """The bits of a weight whose parameter is of `dtype`, if it has a correction."""
        bits = 24 if self.master_weight_bits == "auto" else self.master_weight_bits
        return bits if jnp.dtype(dtype) in LOW else None


def _one_of(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in known:
        raise ValueError(
            f"Storage got {name}={value!r}; expected one of {', '.join(map(repr, known))}. Leave it out for "
            f"{name}={known[0]!r}."
        )


FIELDS = frozenset(field.name for field in dataclasses.fields(Storage))
