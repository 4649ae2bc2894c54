"""`Storage`: how weights and moments are stored."""

import dataclasses
from typing import Any, Literal

import jax.numpy as jnp

from ._groups import LAYOUTS, Layout
from ._moment_codecs import Momentum, Variance
from ._published_codecs import PublishedMomentum, PublishedVariance
from ._scale_formats import FORMATS
from ._weight_codec import LOW_DTYPES, correction_dtype

Bits = Literal["auto", 24, 32] | None
SUPPORTED_DTYPES = (*LOW_DTYPES, jnp.dtype(jnp.float32))


@dataclasses.dataclass(frozen=True)
class Storage:
    """How weights and moments are stored. A single object, so that `optax.inject_hyperparams` leaves it alone.

    Attributes:
        quantize: Whether moments are bytes with a scale per group; otherwise they are float32.
        master_weight_bits: With 24 or 32, bfloat16 and float16 parameters have a correction of one or two bytes, and
            the optimizer sees weights of that many bits. With None they have no correction, and small updates are lost
            in rounding. `"auto"` is 24 for parameters that can have a correction. float32 parameters never have one.
        group_size: How many entries share a scale.
        variance_floor: Whether to keep a nonzero second moment from being stored as zero; only for published codes,
            the others always do.
        scales: The format of scales: `"wide"`, or `"float16"`, the published one. With it, gradients beyond 65504 count
            as 65504.
        layout: Which entries share a scale: `"last"`, `"rows"` or `"flat"`.
        together: Arrays with fewer entries than this are packed and stepped as one, because the kernel of a small array
            takes as long to launch as that of a large one. With 0, each array is stepped by itself. The stored state is
            the same either way.
        codes: The bytes of moments: `"minifloat"`, or `"published"`, those of flashoptim-jax.
        dither: Whether codes are rounded by the number of the step, so that a slow average is right in the mean. With
            False they are rounded to nearest, and a second moment with b2 = 0.999 stands still. No random numbers: the
            same run gives the same bits, on any number of devices.

    >>> Storage(group_size=64, master_weight_bits=32).replace(quantize=False)
    Storage(quantize=False, master_weight_bits=32, group_size=64, variance_floor=True, scales='wide', layout='last', \
together=65536, codes='minifloat', dither=True)
    """

    quantize: bool = True
    master_weight_bits: Bits = "auto"
    group_size: int = 32
    variance_floor: bool = True
    scales: Literal["wide", "float16"] = "wide"
    layout: Layout = "last"
    together: int = 65536
    codes: Literal["minifloat", "published"] = "minifloat"
    dither: bool = True

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
        _check_choice("master_weight_bits", self.master_weight_bits, ("auto", None, 24, 32))
        _check_choice("scales", self.scales, tuple(FORMATS))
        _check_choice("codes", self.codes, ("minifloat", "published"))
        for name in ("quantize", "variance_floor", "dither"):
            value = getattr(self, name)
            if not isinstance(value, bool):
                raise TypeError(
                    f"Storage got {name}={value!r}, of type {type(value).__name__}; expected True or False. Write "
                    f"Storage({name}=False)."
                )
        _check_choice("layout", self.layout, LAYOUTS)

    def replace(self, **changes: Any) -> "Storage":
        """Return the same storage with some fields changed.

        Args:
            **changes: Fields and their new values.

        Returns:
            A `Storage`.
        """
        return dataclasses.replace(self, **changes)

    @property
    def codecs(self) -> tuple[Momentum | PublishedMomentum, Variance | PublishedVariance]:
        """The codes of first and second moments."""
        if self.codes == "published":
            return PublishedMomentum(), PublishedVariance(self.variance_floor)
        half = self.scales == "float16"
        return Momentum(half), Variance(half)

    def correction_dtype(self, dtype: Any) -> jnp.dtype | None:
        """The dtype of the correction of a parameter of this dtype; None if it has none.

        Args:
            dtype: The dtype of a parameter.

        Returns:
            A dtype, or None.
        """
        bits = self.bits_for(dtype)
        if bits is None:
            return None
        return correction_dtype(bits, jnp.bfloat16 if self.codes == "published" else dtype)

    def bits_for(self, dtype: Any) -> int | None:
        """The bits of a weight whose parameter has this dtype; None if it has no correction.

        Args:
            dtype: The dtype of a parameter.

        Returns:
            24, 32 or None.
        """
        bits = 24 if self.master_weight_bits == "auto" else self.master_weight_bits
        return bits if jnp.dtype(dtype) in LOW_DTYPES else None


def _check_choice(name: str, value: Any, known: tuple[Any, ...]) -> None:
    if isinstance(value, bool) or value not in known:
        raise ValueError(
            f"Storage got {name}={value!r}; expected one of {', '.join(map(repr, known))}. Leave it out for "
            f"{name}={known[0]!r}."
        )


STORAGE_FIELDS = frozenset(field.name for field in dataclasses.fields(Storage))
