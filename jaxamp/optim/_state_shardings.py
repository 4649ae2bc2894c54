"""`state_shardings`: the state of sharded parameters is sharded as they are."""

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from ._groups import choose_groups
from ._optimizer import FlashOptimizer
from ._sharding import check_whole_groups, scales_sharding
from ._state import FlashState, state_shapes
from ._tree_paths import flatten, flatten_like, name_of


def state_shardings(optimizer: FlashOptimizer, params: Any, shardings: Any) -> FlashState:
    """Return the shardings of a state, given those of the parameters. With them, a step communicates nothing.

    `optimizer.init` follows the shardings of the arrays it gets. Under `jit` it can't see them: pass the result of this
    function as `out_shardings`. It is also for restoring checkpoints.

    Args:
        optimizer: The optimizer.
        params: The parameters, or `jax.ShapeDtypeStruct`s.
        shardings: A `NamedSharding` for each of them, in a tree of their structure.

    Returns:
        A `FlashState` of shardings.

    >>> import jax, jax.numpy as jnp
    >>> from jax.sharding import NamedSharding, PartitionSpec
    >>> from jaxamp import optim
    >>> mesh = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    >>> params = {"w": jnp.ones((64, 32), jnp.bfloat16)}
    >>> optimizer, rows = optim.flash_adamw(1e-3), {"w": NamedSharding(mesh, PartitionSpec("x", None))}
    >>> shardings = optim.state_shardings(optimizer, params, rows)
    >>> tuple(shardings.mu["w"].spec), tuple(shardings.scales["w"].spec)
    (('x', None), (None, 'x'))
    >>> state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    """
    paths, leaves, structure = flatten(params)
    instead = "Write jax.tree.map(lambda x: x.sharding, params)."
    given = flatten_like("state_shardings", "shardings", shardings, params, structure, instead)
    state = state_shapes(optimizer, params)

    def of_field(field: str) -> Any:
        stored = structure.flatten_up_to(getattr(state, field))
        return structure.unflatten(
            [
                None if x is None else _sharding_of(optimizer, field, path, leaf, sharding)
                for x, path, leaf, sharding in zip(stored, paths, leaves, given, strict=True)
            ]
        )

    mesh = next((sharding.mesh for sharding in given if isinstance(sharding, NamedSharding)), None)
    count = None if mesh is None else NamedSharding(mesh, PartitionSpec())
    return FlashState(count, *map(of_field, FlashState._fields[1:]))


def _sharding_of(optimizer: FlashOptimizer, field: str, path: Any, leaf: Any, sharding: Any) -> Any:
    if not isinstance(sharding, jax.sharding.Sharding):
        raise TypeError(
            f"state_shardings got {sharding!r} for {name_of(path)!r}; expected a sharding. Write "
            "jax.tree.map(lambda x: x.sharding, params), or NamedSharding(mesh, PartitionSpec('x', None))."
        )
    if field != "scales":
        return sharding
    storage = optimizer.storage(path, leaf)
    groups = choose_groups(leaf.shape, storage.group_size, storage.layout)
    check_whole_groups(optimizer.name, name_of(path), groups, sharding)
    return scales_sharding(sharding, groups)
