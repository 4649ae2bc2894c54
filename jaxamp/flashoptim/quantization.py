"""Moments in bytes, as flashoptim-jax has them: `QuantizedArray`, with float16 scales in the order of the entries."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..optim._codecs import MOMENTUM, Codec, Variance
from ..optim._layout import Groups
from ..optim._scales import HALF
from ..optim._storage import Storage


class QuantizedArray(NamedTuple):
    """Bytes, and a float16 scale for each group of them."""

    values: jax.Array
    scales: jax.Array


def quantize_momentum(x: Any, group_size: int = 32) -> QuantizedArray:
    """Numbers of both signs as int8."""
    return _quantized(MOMENTUM, jnp.asarray(x, jnp.float32), group_size)


def dequantize_momentum(x: QuantizedArray, group_size: int = 32) -> jax.Array:
    """What `quantize_momentum` was given, but for rounding."""
    return _dequantized(MOMENTUM, x, group_size)


def quantize_variance(x: Any, group_size: int = 32, *, floor: bool = True) -> QuantizedArray:
    """Numbers that are not negative as the uint8 of their root. `floor=False` lets small ones be zero."""
    return _quantized(Variance(floor), jnp.asarray(x, jnp.float32), group_size)


def dequantize_variance(x: QuantizedArray, group_size: int = 32) -> jax.Array:
    """What `quantize_variance` was given, but for rounding."""
    return _dequantized(Variance(), x, group_size)


def _quantized(codec: Codec, x: jax.Array, group_size: int) -> QuantizedArray:
    found = Groups(x.shape, Storage(group_size=group_size).group_size, None)
    view = found.view(x)
    top = codec.top(view, found.view_axis)
    return QuantizedArray(found.unview(codec.encode(view, found.spread(top))), HALF.encode(codec.scale(top)))


def _dequantized(codec: Codec, x: QuantizedArray, group_size: int) -> jax.Array:
    values, scales = (jnp.asarray(part) for part in x)
    found = Groups(values.shape, Storage(group_size=group_size).group_size, None)
    if found.scales_shape != scales.shape:
        raise ValueError(
            f"got {scales.shape} scales for values of shape {values.shape}; expected {found.scales_shape} for groups "
            f"of {group_size}. Pass the group size that the array was made with."
        )
    return found.unview(codec.decode(found.view(values), found.spread(HALF.decode(scales))))
