"""Parameters and state as a flat dict of arrays, for formats that know no pytrees.

    {"format": 1, "count": ..., "params/layers/0/weight": ..., "mu/layers/0/weight": ..., "scales/layers/0/weight": ...}

Orbax and Equinox save a `FlashState` as it is; this is for `numpy.savez`, safetensors and other readers. Nothing is
flattened or padded: arrays have the shapes of the parameters, and scales tell their layout by theirs.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from ._optimizer import FlashState
from ._paths import flatten, name_of

FORMAT = 1
_FIELDS = ("mu", "nu", "scales", "correction")


def to_arrays(params: Any, state: FlashState) -> dict[str, Any]:
    """Parameters and state by name. Leaves of the parameters that are no arrays are left out.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> params = {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> sorted(optim.to_arrays(params, optim.flash_lion(1e-3).init(params)))
    ['correction/w', 'count', 'format', 'mu/w', 'params/w', 'scales/w']
    """
    if not isinstance(state, FlashState):
        raise TypeError(
            f"to_arrays got {type(state).__name__} as the state; expected a FlashState. Pass what init or step of an "
            "optimizer of jaxamp.optim returned."
        )
    arrays: dict[str, Any] = {"format": np.int32(FORMAT), "count": state.count}
    trees = {"params": params, **{field: getattr(state, field) for field in _FIELDS}}
    for field, tree in trees.items():
        paths, leaves, _ = flatten(tree)
        for path, leaf in zip(paths, leaves, strict=True):
            name = f"{field}/{name_of(path)}"
            if name in arrays:
                raise ValueError(
                    f"to_arrays got two leaves of the name {name!r}; expected one of each, where the keys of a path "
                    "are joined by '/'. Rename the key that has a '/' in it."
                )
            if hasattr(leaf, "dtype"):
                arrays[name] = leaf
    return arrays


def from_arrays(arrays: Mapping[str, Any], params: Any) -> tuple[Any, FlashState]:
    """Parameters and state of `to_arrays`, in the structure of `params`; the leaves of that are of no importance.

    Leaves that `to_arrays` left out are taken from `params`.
    """
    found = arrays.get("format")
    if found is None or int(found) != FORMAT:
        raise ValueError(
            f"from_arrays got {'no format' if found is None else f'the format {int(found)}'}; expected format "
            f"{FORMAT}. Pass what to_arrays returned, with the same version of jaxamp or a newer one."
        )
    if "count" not in arrays:
        raise ValueError(
            "from_arrays got no array 'count'; expected the number of steps. Pass all of what to_arrays returned."
        )
    paths, leaves, structure = flatten(params)
    names = [name_of(path) for path in paths]
    for name, leaf in zip(names, leaves, strict=True):
        if hasattr(leaf, "dtype") and f"params/{name}" not in arrays:
            raise ValueError(
                f"from_arrays got no array {f'params/{name}'!r}; expected one for each leaf of the parameters. Pass "
                "the parameters that to_arrays was called with, or others of their structure."
            )
    unknown = {key for key in arrays if "/" in key} - {f"{field}/{n}" for field in ("params", *_FIELDS) for n in names}
    if unknown:
        raise ValueError(
            f"from_arrays got an array {min(unknown)!r} that the parameters have no leaf for; expected their names "
            "alone. Pass the parameters that to_arrays was called with, or others of their structure."
        )
    restored = [arrays.get(f"params/{name}", leaf) for name, leaf in zip(names, leaves, strict=True)]
    columns = ([arrays.get(f"{field}/{name}") for name in names] for field in _FIELDS)
    return structure.unflatten(restored), FlashState(arrays["count"], *map(structure.unflatten, columns))
