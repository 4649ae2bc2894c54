"""States as dicts of arrays and tree structures, in flashoptim-jax's format."""

from typing import Any

import jax
import jax.numpy as jnp

from .quantization import QuantizedArray, is_quantized


def state_to_dict(state: Any) -> dict[str, Any]:
    trees = {field: _tree_to_dict(tree) for field, tree in state._asdict().items() if field != "count"}
    return {"count": jnp.asarray(state.count), **trees}


def state_from_dict(state_class: Any, state_dict: dict[str, Any]) -> Any:
    missing = [field for field in state_class._fields if field not in state_dict]
    if missing:
        raise ValueError(
            f"got a state dict without {missing[0]!r}; expected {', '.join(state_class._fields)}. Pass what the "
            "state-dict function of the same optimizer returned."
        )
    trees = {field: _tree_from_dict(state_dict[field]) for field in state_class._fields if field != "count"}
    return state_class(count=jnp.asarray(state_dict["count"], jnp.int32), **trees)


def _tree_to_dict(tree: Any) -> dict[str, Any]:
    leaves, structure = jax.tree.flatten(tree, is_leaf=is_quantized)
    entries = [
        {"kind": "quantized", **leaf._asdict()} if is_quantized(leaf) else {"kind": "array", "value": jnp.asarray(leaf)}
        for leaf in leaves
    ]
    return {"treedef": structure, "leaves": entries}


def _tree_from_dict(entries: dict[str, Any]) -> Any:
    leaves = [
        QuantizedArray(jnp.asarray(entry["values"]), jnp.asarray(entry["scales"]))
        if entry["kind"] == "quantized"
        else jnp.asarray(entry["value"])
        for entry in entries["leaves"]
    ]
    return entries["treedef"].unflatten(leaves)
