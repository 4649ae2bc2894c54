"""Name the leaves of pytrees by their paths, and match trees against the parameters."""

from typing import Any

import jax
from jax import tree_util as jtu

from .._tree import is_none


def name_of(path: Any) -> str:
    """Name a leaf for errors and checkpoints: `params["layers"][0].weight` is `layers/0/weight`."""
    return jtu.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """Return paths, leaves and structure, with None as a leaf."""
    with_paths, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_none)
    return [path for path, _ in with_paths], [leaf for _, leaf in with_paths], structure


def flatten_like(name: str, what: str, tree: Any, params: Any, structure: Any, instead: str) -> list[Any]:
    """Return the leaves of a tree that must have the structure of the parameters; otherwise the error names a leaf."""
    try:
        return structure.flatten_up_to(tree)
    except (ValueError, TypeError, KeyError):
        given, expected = ({name_of(path) for path in flatten(x)[0]} for x in (tree, params))
    missing, extra = sorted(expected - given), sorted(given - expected)
    if missing:
        problem = f"without a leaf for {missing[0]!r}"
    elif extra:
        problem = f"with a leaf {extra[0]!r} that the parameters don't have"
    else:
        problem = f"of the structure {jax.tree.structure(tree)}"
    raise ValueError(f"{name} got {what} {problem}; expected the structure of the parameters. {instead}")
