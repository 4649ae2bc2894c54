"""The state of a compressed optimizer: as one object for users, and leaf by leaf for the step."""

from typing import Any, NamedTuple

import equinox as eqx
import jax

from ._tree_paths import flatten_like


class FlashState(NamedTuple):
    """The state of a compressed optimizer: trees of arrays with the structure of the parameters.

    Attributes:
        count: The number of steps taken.
        mu: First moments, of the parameters' shapes: uint8, or float32 if they are not compressed.
        nu: Second moments: int8, or float32.
        scales: The scales of both, of shape `(moments, *groups)`.
        correction: The part of the weight that the parameter can't hold: int8 or int16 for bfloat16, uint8 or uint16
            for float16.

    In the published format, first moments are int8, second moments uint8, and corrections int8 or int16.

    Absent parts are None: Lion's second moment, the correction of a float32 parameter, and everything for leaves that
    are not arrays of floats.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> [x["w"].dtype.name for x in (state.mu, state.nu, state.correction)]
    ['uint8', 'int8', 'int8']
    """

    count: Any
    mu: Any
    nu: Any
    scales: Any
    correction: Any


class LeafState(NamedTuple):
    """The state of one array; absent parts are None.

    Attributes:
        mu: The first moment, as in `FlashState`.
        nu: The second moment.
        scales: The scales of both, of shape `(moments, *groups)`: uint16, or float16 in the published format.
        correction: The part of the weight that the parameter can't hold.
    """

    mu: Any = None
    nu: Any = None
    scales: Any = None
    correction: Any = None


def state_from_leaves(count: jax.Array, states: list[LeafState], structure: Any) -> FlashState:
    """Collect the states of all leaves into trees."""
    columns = ([getattr(state, field) for state in states] for field in LeafState._fields)
    return FlashState(count, *map(structure.unflatten, columns))


def leaves_of_state(name: str, state: Any, params: Any, structure: Any, instead: str) -> list[LeafState]:
    """Split a state into those of its leaves; an error in the name of `name` if it doesn't fit the parameters."""
    if not isinstance(state, FlashState):
        raise TypeError(f"{name} got {type(state).__name__} as its state; expected a FlashState. {instead}")
    columns = [
        flatten_like(name, f"a state whose {field} is", getattr(state, field), params, structure, instead)
        for field in LeafState._fields
    ]
    return [LeafState(*row) for row in zip(*columns, strict=True)]


def state_shapes(optimizer: Any, params: Any) -> Any:
    """The shapes and dtypes of what `optimizer.init` returns. Non-array leaves are allowed among the parameters."""
    return eqx.filter_eval_shape(optimizer.init, params)
