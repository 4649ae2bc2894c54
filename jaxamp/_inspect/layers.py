"""Layers of a network as one: scopes that differ only in the number of a layer."""

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"\d+(?=\]?(/|$))")  # at the end of a name: the 3 of block_3, not the 2 of Conv2d


def without_numbers(scope: str) -> str:
    """A scope with an asterisk for the number of each layer.

    >>> without_numbers("block_3/Conv2d/heads[1]")
    'block_*/Conv2d/heads[*]'
    """
    return _NUMBER.sub("*", scope)


def merge_layers(scopes: Sequence[str]) -> list[str]:
    """Scopes in which those of several layers are the same; one that is alone keeps its number.

    >>> merge_layers(["block_0/up", "block_1/up", "stage_2"])
    ['block_*/up', 'block_*/up', 'stage_2']
    """
    members: dict[str, set[str]] = {}
    for scope in scopes:
        members.setdefault(without_numbers(scope), set()).add(scope)
    return [one if len(members[one]) > 1 else scope for scope in scopes for one in [without_numbers(scope)]]
