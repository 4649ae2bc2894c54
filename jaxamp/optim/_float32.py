"""Weights and moments in float32, and back: to look at them, to leave for another optimizer or to come from one."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._tree import is_inexact_array
from ._bytes import state_shapes
from ._codecs import MOMENTUM, VARIANCE, Codec, Variance
from ._layout import LAYOUTS, Groups, Layout, groups, groups_of
from ._leaf import LeafState, decoded, scales_of
from ._optimizer import FlashOptimizer, FlashState, as_trees, leaf_states
from ._paths import flatten, flatten_like, name_of
from ._scales import format_of
from ._storage import Storage
from ._weights import LOW, check_correction, join, split

_CODECS: tuple[Codec, ...] = (MOMENTUM, VARIANCE)
_INSTEAD = (
    "Pass the parameters and the state that a step has returned together; of the state of an optax.chain, the part of "
    "this optimizer, such as state[1]."
)


class Float32(NamedTuple):
    """Weights and moments in float32, in trees like that of the parameters.

    Attributes:
        count: The steps taken.
        weights: Parameters with their corrections; leaves that are no floats as they are.
        mu: First moments, None where there are none.
        nu: Second moments, None where there are none.
    """

    count: Any
    weights: Any
    mu: Any
    nu: Any


def float32_weights(params: Any, state: FlashState) -> Any:
    """The weights that the optimizer sees: parameters with their corrections, in float32.

    The state may also be that of `with_master_weights`. Leaves that are no floats come back as they are.
    """
    name = "float32_weights"
    if not hasattr(state, "correction"):
        raise TypeError(
            f"{name} got {type(state).__name__} as its state; expected that of a compressed optimizer or of "
            f"with_master_weights. {_INSTEAD}"
        )
    paths, leaves, structure = flatten(params)
    corrections = flatten_like(name, "corrections", state.correction, params, structure, _INSTEAD)
    for path, p, c in zip(paths, leaves, corrections, strict=True):
        check_correction(name, name_of(path), p, c, _INSTEAD)
    return structure.unflatten(
        [join(jnp.asarray(p), c) if is_inexact_array(p) else p for p, c in zip(leaves, corrections, strict=True)]
    )


def to_float32(optimizer: FlashOptimizer, params: Any, state: FlashState) -> Float32:
    """Weights and moments of a compressed optimizer, in float32.

    `optax.ScaleByAdamState(moments.count, moments.mu, moments.nu)` is the state to go on with in `optax.adamw`.

    >>> import jax, jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer = optim.flash_adamw(1e-3)
    >>> params = {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> float32 = optim.to_float32(optimizer, params, state)
    >>> float32.weights["w"].dtype, f"{float32.mu['w'][0, 0]:.4f}"
    (dtype('float32'), '0.1000')
    """
    paths, leaves, structure = flatten(params)
    states = leaf_states("to_float32", state, params, structure, _INSTEAD)
    columns: tuple[list[Any], list[Any]] = ([], [])
    for path, leaf, old in zip(paths, leaves, states, strict=True):
        moments = iter(_moments(old, optimizer, path, leaf))
        for column, stored in zip(columns, (old.mu, old.nu), strict=True):
            column.append(None if stored is None else next(moments))
    weights = float32_weights(params, state)
    return Float32(state.count, weights, *(structure.unflatten(column) for column in columns))


def from_float32(optimizer: FlashOptimizer, float32: Float32, like: Any) -> tuple[Any, FlashState]:
    """Parameters, in the dtypes of `like`, and a state, from weights and moments in float32.

    What `to_float32` returned comes back as the same moments, and as the same weights within the bound of `Weight`: one
    that lies between two parameters may become the other, with another correction. A moment that is None is zero. The
    leaves of `like` may be `jax.ShapeDtypeStruct`s.
    """
    paths, leaves, structure = flatten(like)
    name, instead = "from_float32", "Pass what to_float32 returned, or trees like the parameters."
    weights = flatten_like(name, "weights", float32.weights, like, structure, instead)
    fresh = leaf_states(name, state_shapes(optimizer, like), like, structure, instead)
    given = [
        [None] * len(leaves) if tree is None else flatten_like(name, f"{field} is", tree, like, structure, instead)
        for field, tree in (("mu", float32.mu), ("nu", float32.nu))
    ]
    params, states = [], []
    for path, leaf, x, mu, nu, old in zip(paths, leaves, weights, *given, fresh, strict=True):
        if not (hasattr(leaf, "dtype") and jnp.issubdtype(leaf.dtype, jnp.floating)):
            params.append(leaf)
            states.append(old)
            continue
        storage = optimizer.storage(path, leaf)
        read = lambda m, path=path, leaf=leaf: _array(m, name_of(path), leaf.shape)
        param, correction = _written(read(x), leaf.dtype, None if old.correction is None else old.correction.dtype)
        moments = [
            jnp.zeros(leaf.shape, jnp.float32) if m is None else read(m)
            for m, stored in ((mu, old.mu), (nu, old.nu))
            if stored is not None
        ]
        found = None if old.scales is None else groups_of(leaf.shape, old.scales.shape[1:], storage.group_size)
        params.append(param)
        states.append(_compressed(moments, old, storage, found)._replace(correction=correction))
    count = jnp.asarray(float32.count, jnp.int32)
    return structure.unflatten(params), as_trees(count, states, structure)


def to_layout(optimizer: FlashOptimizer, params: Any, state: FlashState, layout: Layout) -> FlashState:
    """The state with its groups along other axes.

    An optimizer goes on with state of any layout. Where the groups change, moments are rounded once more; from `"flat"`
    to `"last"` and back they don't, if the last axis is divisible.
    """
    if layout not in LAYOUTS:
        raise ValueError(
            f"to_layout got the layout {layout!r}; expected one of {', '.join(map(repr, LAYOUTS))}. Write "
            "to_layout(optimizer, params, state, 'rows')."
        )
    paths, leaves, structure = flatten(params)
    states = leaf_states("to_layout", state, params, structure, _INSTEAD)
    for i, (path, leaf, old) in enumerate(zip(paths, leaves, states, strict=True)):
        if old.scales is None:
            continue
        storage = optimizer.storage(path, leaf)
        found = groups(leaf.shape, storage.group_size, layout)
        before = groups_of(leaf.shape, old.scales.shape[1:], storage.group_size)
        if before != found:
            states[i] = _compressed(_moments(old, optimizer, path, leaf), old, storage, found)
    return as_trees(state.count, states, structure)


def _moments(state: LeafState, optimizer: FlashOptimizer, path: Any, leaf: Any) -> list[jax.Array]:
    """The moments of a leaf in float32."""
    if state.scales is None:
        return [m for m in (state.mu, state.nu) if m is not None]
    size = optimizer.storage(path, leaf).group_size
    found = groups_of(leaf.shape, state.scales.shape[1:], size)
    if found is None:
        raise ValueError(
            f"{optimizer.name} got scales of shape {state.scales.shape} for {name_of(path)!r}, which is of shape "
            f"{leaf.shape}; expected groups of {size}. Pass the optimizer that made the state."
        )
    view = lambda x: None if x is None else found.view(x)
    viewed = state._replace(mu=view(state.mu), nu=view(state.nu))
    return [found.unview(m) for m in decoded(viewed, _CODECS, found)]


def _compressed(moments: list[jax.Array], like: LeafState, storage: Storage, found: Groups | None) -> LeafState:
    """Moments as a leaf stores them."""
    codecs: tuple[Codec, ...] = (MOMENTUM, Variance(storage.variance_floor))
    names = [name for name in ("mu", "nu") if getattr(like, name) is not None]
    if found is None or like.scales is None:
        return like._replace(**dict(zip(names, moments, strict=True)))
    form = format_of(like.scales)
    views = [found.view(m) for m in moments]
    tops = [codec.top(m, found.view_axis) for codec, m in zip(codecs, views)]
    codes = [found.unview(c.encode(m, found.spread(top))) for c, m, top in zip(codecs, views, tops)]
    return like._replace(scales=form.encode(scales_of(codecs, tops)), **dict(zip(names, codes, strict=True)))


def _array(x: Any, name: str, shape: tuple[int, ...]) -> jax.Array:
    """A weight or a moment that was given."""
    if x is None or np.shape(x) != shape:
        given = "None" if x is None else f"an array of shape {np.shape(x)}"
        raise ValueError(
            f"from_float32 got {given} for {name!r}; expected an array of shape {shape}. Pass what to_float32 "
            "returned, or trees like the parameters."
        )
    return jnp.asarray(x, jnp.float32)


def _written(x: jax.Array, dtype: Any, correction: Any) -> tuple[jax.Array, jax.Array | None]:
    return split(x, dtype, correction) if dtype in LOW else (x.astype(dtype), None)
