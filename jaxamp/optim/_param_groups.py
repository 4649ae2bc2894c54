"""`param_groups=`: which leaves get settings of their own."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

Path = tuple[Any, ...]


def path_entries(path: Any) -> Path:
    """A JAX path as a tuple of keys, indices and attribute names."""
    return tuple(
        next((getattr(entry, kind) for kind in ("key", "idx", "name") if hasattr(entry, kind)), str(entry))
        for entry in path
    )


def matches(selector: Any, path: Path, leaf: Any) -> bool:
    """Whether a selector selects a leaf: a function of path and leaf, a whole path, part of one, or a list of these."""
    if callable(selector):
        return bool(selector(path, leaf))
    if isinstance(selector, tuple):
        return path == selector
    if isinstance(selector, str):
        names = [str(entry) for entry in path]
        return "/".join(names) == selector if "/" in selector else selector in names
    return isinstance(selector, Iterable) and any(matches(one, path, leaf) for one in selector)


def only_names(selector: Any) -> bool:
    """Whether a selector has names and paths, which should be there, and no functions, which may select nothing."""
    if isinstance(selector, str | tuple):
        return True
    return not callable(selector) and all(map(only_names, selector))


def first_match(param_groups: Sequence[Mapping[str, Any]], path: Path, leaf: Any) -> int | None:
    """The index of the first group that selects a leaf."""
    matching = (i for i, group in enumerate(param_groups) if matches(group["params"], path, leaf))
    return next(matching, None)


def check_param_groups(name: str, param_groups: Any, known: Callable[[str], bool]) -> tuple[Mapping[str, Any], ...]:
    """Return the groups, after checking that each has a selector and only settings that are `known`."""
    if param_groups is not None and (isinstance(param_groups, Mapping | str) or not isinstance(param_groups, Iterable)):
        raise TypeError(
            f"{name} got param_groups={param_groups!r}, of type {type(param_groups).__name__}; expected a list of "
            "dicts. Write param_groups=[{'params': 'bias', 'weight_decay': 0.0}]."
        )
    param_groups = tuple(param_groups or ())
    for i, group in enumerate(param_groups):
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
    return param_groups
