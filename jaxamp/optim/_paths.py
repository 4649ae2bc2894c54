"""Leaves of pytrees by their paths: names for errors and checkpoints, and which group of settings a leaf belongs to."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax import tree_util as jtu

Path = tuple[Any, ...]


def is_none(x: Any) -> bool:
    return x is None


def name_of(path: Any) -> str:
    """`params["layers"][0].weight` is `layers/0/weight`."""
    return jtu.keystr(path, simple=True, separator="/")


def flatten(tree: Any) -> tuple[list[Any], list[Any], Any]:
    """Paths, leaves and structure; None is a leaf."""
    with_paths, structure = jtu.tree_flatten_with_path(tree, is_leaf=is_none)
    return [path for path, _ in with_paths], [leaf for _, leaf in with_paths], structure


def flatten_like(name: str, what: str, tree: Any, params: Any, structure: Any, instead: str) -> list[Any]:
    """The leaves of a tree that has the structure of the parameters; an error that names a leaf if it has not."""
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


# -- groups of parameters


def segments(path: Any) -> Path:
    """A path as keys, indices and attribute names."""
    return tuple(
        next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), str(entry))
        for entry in path
    )


def matches(selector: Any, path: Path, leaf: Any) -> bool:
    """Whether a leaf is meant: by a function of path and leaf, a whole path, a part of one, or any of several."""
    if callable(selector):
        return bool(selector(path, leaf))
    if isinstance(selector, tuple):
        return path == selector
    if isinstance(selector, str):
        names = [str(entry) for entry in path]
        return "/".join(names) == selector if "/" in selector else selector in names
    return isinstance(selector, Iterable) and any(matches(one, path, leaf) for one in selector)


def group_of(groups: Sequence[Mapping[str, Any]], path: Path, leaf: Any) -> int | None:
    """The first group that a leaf is in."""
    found = (i for i, group in enumerate(groups) if matches(group["params"], path, leaf))
    return next(found, None)


def check_groups(name: str, groups: Any, known: Callable[[str], bool]) -> tuple[Mapping[str, Any], ...]:
    """The groups, refused if one selects nothing or sets what there is not."""
    for i, group in enumerate(groups or ()):
        if not isinstance(group, Mapping) or "params" not in group:
            raise ValueError(
                f"{name} got param_groups[{i}]={group!r}; expected a dict with 'params', which selects leaves. Write "
                "param_groups=[{'params': 'bias', 'weight_decay': 0.0}]."
            )
        if not (callable(group["params"]) or isinstance(group["params"], Iterable)):
            raise TypeError(
                f"{name} got param_groups[{i}] with 'params' {group['params']!r}; expected a name, a path, a function "
                "of path and leaf, or a list of these. Write param_groups=[{'params': 'bias', 'weight_decay': 0.0}]."
            )
        for key in group:
            if key != "params" and not known(key):
                raise ValueError(
                    f"{name} got param_groups[{i}] with {key!r}; expected arguments of {name}. Write "
                    "param_groups=[{'params': 'bias', 'weight_decay': 0.0}]."
                )
    return tuple(groups or ())
