"""How many bytes parameters and state take."""

from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp


class Bytes(NamedTuple):
    """Bytes that are held between steps; gradients are not among them.

    Attributes:
        parameters: How many numbers are trained.
        params: The bytes of them.
        state: The bytes of the optimizer's state.
    """

    parameters: int
    params: int
    state: int

    @property
    def per_parameter(self) -> float:
        return (self.params + self.state) / max(self.parameters, 1)


def optimizer_bytes(optimizer: Any, params: Any) -> Bytes:
    """The bytes of parameters and state, for any Optax optimizer. Nothing is computed; `jax.ShapeDtypeStruct`s do.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> params = {"w": jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16)}
    >>> optim.optimizer_bytes(optim.flash_adamw(1e-3), params)
    Bytes(parameters=1048576, params=2097152, state=3276804)
    >>> round(optim.optimizer_bytes(optim.flash_adamw(1e-3), params).per_parameter, 3)
    5.125
    """
    floats = [x for x in jax.tree.leaves(params) if hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)]
    state = state_shapes(optimizer, params)
    return Bytes(sum(x.size for x in floats), _bytes(floats), _bytes(jax.tree.leaves(state)))


def state_shapes(optimizer: Any, params: Any) -> Any:
    """What `init` returns, as shapes and dtypes; leaves that are no arrays may be among the parameters."""
    return eqx.filter_eval_shape(optimizer.init, params)


def _bytes(leaves: list[Any]) -> int:
    return sum(x.size * x.dtype.itemsize for x in leaves if hasattr(x, "dtype"))
