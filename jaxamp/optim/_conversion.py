"""Convert weights and moments to float32 and back, and state from one layout to another.

For looking at them, and for switching from or to another optimizer.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import has_float_dtype, is_inexact_array
from ._groups import LAYOUTS, Groups, Layout, choose_groups, groups_from_scales
from ._leaf_step import decode_moments, stack_scales
from ._optimizer import FlashOptimizer
from ._scale_formats import format_of
from ._state import FlashState, LeafState, leaves_of_state, state_from_leaves, state_shapes
from ._storage import Storage
from ._tree_paths import flatten, flatten_like, name_of
from ._weight_codec import LOW_DTYPES, check_correction, join, split

_INSTEAD = (
    "Pass the parameters and the state that the same step returned; of the state of an optax.chain, the part of this "
    "optimizer, such as state[1]."
)


class Float32(NamedTuple):
    """Weights and moments in float32, in trees with the structure of the parameters.

    Attributes:
        count: The number of steps taken.
        weights: Parameters with their corrections; leaves that aren't floats are unchanged.
        mu: First moments; None for leaves that have none.
        nu: Second moments; None for leaves that have none.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> float32 = optim.to_float32(optimizer, params, state)
    >>> float32.weights["w"].dtype.name, float32.nu["w"].dtype.name
    ('float32', 'float32')
    """

    count: Any
    weights: Any
    mu: Any
    nu: Any


def float32_weights(params: Any, state: FlashState) -> Any:
    """Return the weights as the optimizer sees them: parameters with their corrections, in float32.

    The state may also be that of `with_master_weights`. Leaves that aren't floats come back unchanged.

    Args:
        params: The parameters.
        state: The state of the optimizer.

    Returns:
        A tree like the parameters.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> optim.float32_weights(params, state)["w"].dtype.name
    'float32'
    """
    name = "float32_weights"
    if not hasattr(state, "correction"):
        raise TypeError(
            f"{name} got {type(state).__name__} as its state; expected the state of a compressed optimizer or of "
            f"with_master_weights. {_INSTEAD}"
        )
    paths, leaves, structure = flatten(params)
    corrections = flatten_like(name, "corrections", state.correction, params, structure, _INSTEAD)
    for path, p, c in zip(paths, leaves, corrections, strict=True):
        check_correction(name, name_of(path), p, c, _INSTEAD, is_published=True)
    return structure.unflatten(
        [join(jnp.asarray(p), c) if is_inexact_array(p) else p for p, c in zip(leaves, corrections, strict=True)]
    )


def to_float32(optimizer: FlashOptimizer, params: Any, state: FlashState) -> Float32:
    """Convert weights and moments of a compressed optimizer to float32.

    To continue with `optax.adamw`, use the state `optax.ScaleByAdamState(float32.count, float32.mu, float32.nu)`.

    Args:
        optimizer: The optimizer of the state.
        params: The parameters.
        state: The state of the optimizer.

    Returns:
        A `Float32`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer = optim.flash_adamw(1e-3)
    >>> params = {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> float32 = optim.to_float32(optimizer, params, state)
    >>> float32.weights["w"].dtype, f"{float32.mu['w'][0, 0]:.3f}"
    (dtype('float32'), '0.100')
    """
    paths, leaves, structure = flatten(params)
    states = leaves_of_state("to_float32", state, params, structure, _INSTEAD)
    columns: tuple[list[Any], list[Any]] = ([], [])
    for path, leaf, old in zip(paths, leaves, states, strict=True):
        moments = iter(_decode_moments(old, optimizer, path, leaf))
        for column, stored in zip(columns, (old.mu, old.nu), strict=True):
            column.append(None if stored is None else next(moments))
    weights = float32_weights(params, state)
    return Float32(state.count, weights, *(structure.unflatten(column) for column in columns))


def from_float32(optimizer: FlashOptimizer, float32: Float32, like: Any) -> tuple[Any, FlashState]:
    """Convert weights and moments from float32 to parameters, in the dtypes of `like`, and a state.

    After `to_float32`, this returns the same moments, and the same weights within the bound of `Weight`: a weight
    halfway between two parameters may be stored as the other one, with another correction. A moment that is None
    becomes zero. The leaves of `like` may be `jax.ShapeDtypeStruct`s.

    Args:
        optimizer: The optimizer that is to continue.
        float32: What `to_float32` returned, or made from the state of another optimizer.
        like: Parameters, or their shapes and dtypes.

    Returns:
        Parameters and state.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> float32 = optim.to_float32(optimizer, params, state)
    >>> params, state = optim.from_float32(optimizer, float32, like=params)
    >>> params["w"].dtype.name
    'bfloat16'
    """
    if not isinstance(float32, Float32):
        raise TypeError(
            f"from_float32 got {type(float32).__name__}; expected a Float32. Pass what to_float32 returned, or write "
            "Float32(count=0, weights=weights, mu=None, nu=None)."
        )
    paths, leaves, structure = flatten(like)
    name, instead = "from_float32", "Pass what to_float32 returned, or trees with the structure of the parameters."
    weights = flatten_like(name, "weights", float32.weights, like, structure, instead)
    fresh = leaves_of_state(name, state_shapes(optimizer, like), like, structure, instead)
    given = [
        [None] * len(leaves) if tree is None else flatten_like(name, f"{field} is", tree, like, structure, instead)
        for field, tree in (("mu", float32.mu), ("nu", float32.nu))
    ]
    params, states = [], []
    for path, leaf, x, mu, nu, old in zip(paths, leaves, weights, *given, fresh, strict=True):
        if not has_float_dtype(leaf):
            params.append(leaf)
            states.append(old)
            continue
        storage = optimizer.storage(path, leaf)
        read = lambda m, path=path, leaf=leaf: _checked_float32(m, name_of(path), leaf.shape)
        param, correction = _encode_weight(
            read(x), leaf.dtype, None if old.correction is None else old.correction.dtype
        )
        moments = [
            jnp.zeros(leaf.shape, jnp.float32) if m is None else read(m)
            for m, stored in ((mu, old.mu), (nu, old.nu))
            if stored is not None
        ]
        groups = (
            None if old.scales is None else groups_from_scales(leaf.shape, old.scales.shape[1:], storage.group_size)
        )
        params.append(param)
        states.append(_encode_moments(moments, old, storage, groups)._replace(correction=correction))
    count = jnp.asarray(float32.count, jnp.int32)
    return structure.unflatten(params), state_from_leaves(count, states, structure)


def to_layout(optimizer: FlashOptimizer, params: Any, state: FlashState, layout: Layout) -> FlashState:
    """Convert a state to another layout, with its groups along other axes.

    An optimizer can continue with a state of any layout. Where the groups change, moments are rounded once more. From
    `"flat"` to `"last"` and back they don't change if the last axis is divisible by the group size.

    Args:
        optimizer: The optimizer of the state.
        params: The parameters.
        state: The state of the optimizer.
        layout: `"last"`, `"rows"` or `"flat"`.

    Returns:
        The state, in that layout.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> state = optim.to_layout(optimizer, params, state, "flat")
    >>> state.scales["w"].shape
    (2, 2, 1)
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"to_layout got the layout {layout!r}; expected one of {', '.join(map(repr, LAYOUTS))}. Write "
            "to_layout(optimizer, params, state, 'rows')."
        )
    paths, leaves, structure = flatten(params)
    states = leaves_of_state("to_layout", state, params, structure, _INSTEAD)
    for i, (path, leaf, old) in enumerate(zip(paths, leaves, states, strict=True)):
        if old.scales is None:
            continue
        storage = optimizer.storage(path, leaf)
        groups = choose_groups(leaf.shape, storage.group_size, layout)
        before = groups_from_scales(leaf.shape, old.scales.shape[1:], storage.group_size)
        if before != groups:
            states[i] = _encode_moments(_decode_moments(old, optimizer, path, leaf), old, storage, groups)
    return state_from_leaves(state.count, states, structure)


def _decode_moments(state: LeafState, optimizer: FlashOptimizer, path: Any, leaf: Any) -> list[jax.Array]:
    """The moments of a leaf in float32."""
    if state.scales is None:
        return [m for m in (state.mu, state.nu) if m is not None]
    size = optimizer.storage(path, leaf).group_size
    groups = groups_from_scales(leaf.shape, state.scales.shape[1:], size)
    if groups is None:
        raise ValueError(
            f"{optimizer.name} got scales of shape {state.scales.shape} for {name_of(path)!r}, which is of shape "
            f"{leaf.shape}; expected groups of {size}. Pass the optimizer that made the state."
        )
    view = lambda x: None if x is None else groups.view(x)
    viewed = state._replace(mu=view(state.mu), nu=view(state.nu))
    return [groups.unview(m) for m in decode_moments(viewed, optimizer.storage(path, leaf).codecs, groups)]


def _encode_moments(moments: list[jax.Array], like: LeafState, storage: Storage, groups: Groups | None) -> LeafState:
    """The state `like`, with other moments in place of its own."""
    codecs = storage.codecs
    names = [name for name in ("mu", "nu") if getattr(like, name) is not None]
    if groups is None or like.scales is None:
        return like._replace(**dict(zip(names, moments, strict=True)))
    views = [groups.view(m) for m in moments]
    tops = [codec.top(m, groups.view_axis) for codec, m in zip(codecs, views)]
    codes = [groups.unview(c.encode(m, groups.spread(top))) for c, m, top in zip(codecs, views, tops)]
    scales = format_of(like.scales).encode(stack_scales(codecs, tops))
    return like._replace(scales=scales, **dict(zip(names, codes, strict=True)))


def _checked_float32(x: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    """A weight or a moment that the user passed, as a float32 array of the right shape."""
    if x is None or np.shape(x) != shape:
        given = "None" if x is None else f"an array of shape {np.shape(x)}"
        raise ValueError(
            f"from_float32 got {given} for {name!r}; expected an array of shape {shape}. Pass what to_float32 "
            "returned, or trees with the structure of the parameters."
        )
    return jnp.asarray(x, jnp.float32)


def _encode_weight(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, jax.Array | None]:
    return split(x, dtype, correction) if dtype in LOW_DTYPES else (x.astype(dtype), None)
