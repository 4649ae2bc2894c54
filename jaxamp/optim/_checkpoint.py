"""Parameters and state as a flat dict of arrays, for formats without pytrees.

    {"format": 2, "count": ..., "params/layers/0/weight": ..., "mu/layers/0/weight": ..., "scales/layers/0/weight": ...}

Orbax and Equinox save a `FlashState` as it is; this is for `numpy.savez`, safetensors and other programs. Nothing is
flattened or padded: arrays have the shapes of the parameters, and the shapes of scales tell their layout.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._state import FlashState
from ._tree_paths import flatten, name_of

FORMAT = 2
_FIELDS = ("mu", "nu", "scales", "correction")


def to_arrays(params: Any, state: FlashState) -> dict[str, Any]:
    """Return the arrays of parameters and state by name. Leaves of the parameters that aren't arrays are left out.

    Args:
        params: The parameters.
        state: The state of the optimizer.

    Returns:
        A flat dict of arrays.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> params = {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> sorted(optim.to_arrays(params, optim.flash_lion(1e-3).init(params)))
    ['correction/w', 'count', 'format', 'mu/w', 'params/w', 'scales/w']
    """
    if not isinstance(state, FlashState):
        raise TypeError(
            f"to_arrays got {type(state).__name__} as the state; expected a FlashState. Pass what init or step of a "
            "jaxamp.optim optimizer returned."
        )
    arrays: dict[str, Any] = {"format": np.int32(FORMAT), "count": state.count}
    trees = {"params": params, **{field: getattr(state, field) for field in _FIELDS}}
    for field, tree in trees.items():
        paths, leaves, _ = flatten(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            name = f"{field}/{name_of(path)}"
            if name in arrays:
                raise ValueError(
                    f"to_arrays got two leaves named {name!r}; expected unique names, made of the keys of a path "
                    "joined by '/'. Rename the key that contains a '/'."
                )
            if hasattr(leaf, "dtype"):
                arrays[name] = leaf
    return arrays


def from_arrays(arrays: Mapping[str, Any], params: Any) -> tuple[Any, FlashState]:
    """Rebuild parameters and state from `to_arrays`, in the structure of `params`.

    Only leaves that `to_arrays` left out are taken from `params`; the values of the others don't matter.

    Args:
        arrays: What `to_arrays` returned.
        params: Parameters of the same structure.

    Returns:
        Parameters and state.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_lion(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> state = optimizer.init(params)
    >>> params, state = optim.from_arrays(optim.to_arrays(params, state), params)
    >>> state.mu["w"].dtype.name
    'uint8'
    """
    given = arrays.get("format")
    if given is None or int(given) != FORMAT:
        raise ValueError(
            f"from_arrays got {'no format' if given is None else f'format {int(given)}'}; expected format "
            f"{FORMAT}. Pass what to_arrays returned, with the same version of jaxamp or a newer one."
        )
    if "count" not in arrays:
        raise ValueError(
            "from_arrays got no array 'count'; expected the number of steps. Pass everything that to_arrays returned."
        )
    paths, leaves, structure = flatten(params)
    names = [name_of(path) for path in paths]
    for name, leaf in zip(names, leaves, strict=True):
        if hasattr(leaf, "dtype") and f"params/{name}" not in arrays:
            raise ValueError(
                f"from_arrays got no array {f'params/{name}'!r}; expected one for each leaf of the parameters. Pass "
                "the parameters that to_arrays was called with, or others with the same structure."
            )
    unknown = {key for key in arrays if "/" in key} - {f"{field}/{n}" for field in ("params", *_FIELDS) for n in names}
    if unknown:
        raise ValueError(
            f"from_arrays got an array {min(unknown)!r}, for which the parameters have no leaf; expected only names of "
            "their leaves. Pass the parameters that to_arrays was called with, or others with the same structure."
        )
    restored = [arrays.get(f"params/{name}", leaf) for name, leaf in zip(names, leaves, strict=True)]
    columns = ([arrays.get(f"{field}/{name}") for name in names] for field in _FIELDS)
    return structure.unflatten(restored), FlashState(arrays["count"], *map(structure.unflatten, columns))
