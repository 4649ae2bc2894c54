"""Moments in bytes, in flashoptim-jax's form: `QuantizedArray`, with float16 scales in the order of the entries."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from ..optim._groups import Groups
from ..optim._moment_codecs import Codec
from ..optim._published_codecs import PublishedMomentum, PublishedVariance
from ..optim._scale_formats import HALF
from ..optim._storage import Storage


class QuantizedArray(NamedTuple):
    """Bytes, and a float16 scale for each group of them.

    Attributes:
        values: Bytes, of the shape of the array.
        scales: One for each group.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> flashoptim.quantize_momentum(jnp.ones(64)).scales.shape
    (2,)
    """

    values: jax.Array
    scales: jax.Array


def is_quantized(x: Any) -> bool:
    """Whether `x` is a `QuantizedArray`: ours, or flashoptim-jax's."""
    return type(x).__name__ == "QuantizedArray" and isinstance(x, tuple)


def quantize_momentum(x: Any, group_size: int = 32) -> QuantizedArray:
    """Quantize numbers of both signs to int8.

    Args:
        x: An array.
        group_size: How many entries share a scale.

    Returns:
        A `QuantizedArray`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> x = flashoptim.quantize_momentum(jnp.linspace(0.0, 1.0, 32))
    >>> x.values.dtype.name, float(flashoptim.dequantize_momentum(x)[-1])
    ('int8', 1.0)
    """
    return _quantize(PublishedMomentum(), jnp.asarray(x, jnp.float32), group_size)


def dequantize_momentum(x: QuantizedArray, group_size: int = 32) -> jax.Array:
    """Undo `quantize_momentum`, up to rounding.

    Args:
        x: What `quantize_momentum` returned.
        group_size: How many entries share a scale.

    Returns:
        A float32 array.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> x = flashoptim.quantize_momentum(jnp.linspace(0.0, 1.0, 32))
    >>> x.values.dtype.name, float(flashoptim.dequantize_momentum(x)[-1])
    ('int8', 1.0)
    """
    return _dequantize(PublishedMomentum(), x, group_size)


def quantize_variance(x: Any, group_size: int = 32, *, floor: bool = True) -> QuantizedArray:
    """Quantize non-negative numbers to the uint8 of their root. With `floor=False`, small ones may become zero.

    Args:
        x: An array.
        group_size: How many entries share a scale.
        floor: Whether to keep a nonzero number from being stored as zero.

    Returns:
        A `QuantizedArray`.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> x = flashoptim.quantize_variance(jnp.linspace(0.0, 1.0, 32))
    >>> x.values.dtype.name, f"{flashoptim.dequantize_variance(x)[-1]:.3f}"
    ('uint8', '1.000')
    """
    return _quantize(PublishedVariance(floor), jnp.asarray(x, jnp.float32), group_size)


def dequantize_variance(x: QuantizedArray, group_size: int = 32) -> jax.Array:
    """Undo `quantize_variance`, up to rounding.

    Args:
        x: What `quantize_variance` returned.
        group_size: How many entries share a scale.

    Returns:
        A float32 array.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> x = flashoptim.quantize_variance(jnp.linspace(0.0, 1.0, 32))
    >>> x.values.dtype.name, f"{flashoptim.dequantize_variance(x)[-1]:.3f}"
    ('uint8', '1.000')
    """
    return _dequantize(PublishedVariance(), x, group_size)


def _round_to_nearest(x: Any) -> jax.Array:
    """Round as codes are rounded, ties to even. flashoptim-jax rounds them up, so that signs are not treated alike."""
    return jnp.round(x)


def _quantize(codec: Codec, x: jax.Array, group_size: int) -> QuantizedArray:
    groups = Groups(x.shape, Storage(group_size=group_size).group_size, None)
    view = groups.view(x)
    top = codec.top(view, groups.view_axis)
    return QuantizedArray(groups.unview(codec.encode(view, groups.spread(top))), HALF.encode(codec.scale(top)))


def _dequantize(codec: Codec, x: QuantizedArray, group_size: int) -> jax.Array:
    values, scales = (jnp.asarray(part) for part in x)
    groups = Groups(values.shape, Storage(group_size=group_size).group_size, None)
    if groups.scales_shape != scales.shape:
        raise ValueError(
            f"got {scales.shape} scales for values of shape {values.shape}; expected {groups.scales_shape} for groups "
            f"of {group_size}. Pass the group size that the array was made with."
        )
    return groups.unview(codec.decode(groups.view(values), groups.spread(HALF.decode(scales))))
