"""Count the bytes of parameters and optimizer state."""

from typing import Any, NamedTuple

import jax

from .._tree import has_float_dtype
from ._state import state_shapes


class Bytes(NamedTuple):
    """Bytes held between steps, without gradients.

    Attributes:
        parameters: How many numbers are trained.
        params: Their bytes.
        state: The bytes of the optimizer's state.

    >>> from jaxamp import optim
    >>> optim.Bytes(parameters=10, params=20, state=30).per_parameter
    5.0
    """

    parameters: int
    params: int
    state: int

    @property
    def per_parameter(self) -> float:
        """Bytes of a parameter and its state."""
        return (self.params + self.state) / max(self.parameters, 1)


def optimizer_bytes(optimizer: Any, params: Any) -> Bytes:
    """Count the bytes of parameters and state, for any Optax optimizer.

    Nothing is computed, so `params` may hold `jax.ShapeDtypeStruct`s.

    Args:
        optimizer: Any Optax optimizer.
        params: The parameters, or their shapes and dtypes.

    Returns:
        A `Bytes`.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> optim.optimizer_bytes(optim.flash_adamw(1e-3), params)
    Bytes(parameters=1048576, params=2097152, state=3276804)
    >>> round(optim.optimizer_bytes(optim.flash_adamw(1e-3), params).per_parameter, 3)
    5.125
    """
    if not callable(getattr(optimizer, "init", None)):
        raise TypeError(
            f"optimizer_bytes got {optimizer!r}, of type {type(optimizer).__name__}; expected an Optax optimizer. "
            "Write optimizer_bytes(optax.adamw(1e-3), params)."
        )
    floats = [x for x in jax.tree.leaves(params) if has_float_dtype(x)]
    state = state_shapes(optimizer, params)
    return Bytes(sum(x.size for x in floats), _total_bytes(floats), _total_bytes(jax.tree.leaves(state)))


def _total_bytes(leaves: list[Any]) -> int:
    return sum(x.size * x.dtype.itemsize for x in leaves if hasattr(x, "dtype"))
