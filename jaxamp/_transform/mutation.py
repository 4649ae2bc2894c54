"""Arguments that a function changes in place.

The function gets a copy of its arguments, so what it writes into a dict or a list of them would be lost. A changed leaf
is an error. A leaf that was taken out is not (`batch.pop("labels")`): nothing that was computed is lost.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from jax import tree_util as jtu


class Argument(NamedTuple):
    """An argument, and its leaves before the call."""

    name: str
    tree: Any
    leaves: list[Any]
    structure: Any


def watch(fn: Any, args: Any, kwargs: Any, is_leaf: Callable[[Any], bool] | None) -> list[Argument]:
    """The arguments of a call that is about to run, and the function, which may be a pytree too."""
    named = [("the function", fn), *((f"args[{i}]", x) for i, x in enumerate(args)), *kwargs.items()]
    return [Argument(name, tree, *jtu.tree_flatten(tree, is_leaf)) for name, tree in named]


def check_unchanged(arguments: list[Argument], is_leaf: Callable[[Any], bool] | None) -> None:
    """Refuse a call that has replaced or added a leaf of its arguments."""
    for argument in arguments:
        try:
            found = _changed_leaf(argument, is_leaf)
        except Exception:  # a class of the user's: its objects may become invalid on purpose
            continue
        if found is not None:
            raise ValueError(
                f"the function changed its argument in place, at {argument.name}{jtu.keystr(found)}; expected "
                "arguments that stay as they are, because jaxamp runs the function on a copy and the change would be "
                "lost. Return the new value, or work on a copy: `batch = {**batch, ...}` instead of `batch[...] = ...`."
            )


def _changed_leaf(argument: Argument, is_leaf: Callable[[Any], bool] | None) -> tuple[Any, ...] | None:
    """The path of a leaf that was replaced or added."""
    _, tree, given, structure = argument
    leaves, now = jtu.tree_flatten(tree, is_leaf)
    if _are_same(leaves, given) and now == structure:
        return None
    fresh = jtu.tree_unflatten(structure, given)
    before = jtu.tree_flatten_with_path(fresh, is_leaf)[0]
    if not _are_same([x for _, x in before], given):  # a class that makes its leaves when it is flattened
        return None
    after = jtu.tree_flatten_with_path(tree, is_leaf)[0]
    known = dict(before)
    added = next((path for path, _ in after if path not in known), None)
    if added is not None or _is_subsequence([x for _, x in after], given):
        return added
    return next((path for path, x in after if not _is_same(known[path], x)), None)


def _is_same(a: Any, b: Any) -> bool:
    return a is b or (type(a) is type(b) and isinstance(a, str | bytes | int | float | complex) and a == b)


def _are_same(xs: list[Any], ys: list[Any]) -> bool:
    return len(xs) == len(ys) and all(map(_is_same, xs, ys))


def _is_subsequence(some: list[Any], leaves: list[Any]) -> bool:
    rest = iter(leaves)
    return all(any(_is_same(x, y) for y in rest) for x in some)
