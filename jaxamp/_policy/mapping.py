"""Policies that can be saved: mappings whose keys, JAX's primitives, are pickled by their names.

A primitive itself can't be: a copy of it would be another primitive.
"""

import pickle
from collections.abc import Iterator, Mapping
from typing import Any

from .._compat import Primitive, primitives
from .._primitives import attention as attention  # its primitive is one that tables may name: `declared` finds it
from .._traits import declared
from .communication import COMMUNICATION


class FrozenPolicy(Mapping[Any, Any]):
    """A policy that came with jaxamp or from a table. `policy | {key: rule}` is a new one, which may be changed."""

    __slots__ = ("_rules", "name")

    def __init__(self, rules: Mapping[Any, Any], name: str = ""):
        self._rules, self.name = dict(rules), name

    def __getitem__(self, key: Any) -> Any:
        return self._rules[key]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._rules)

    def __len__(self) -> int:
        return len(self._rules)

    def __or__(self, other: Any) -> "EditablePolicy":
        return EditablePolicy(self._rules) | other if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> "EditablePolicy":
        return EditablePolicy(other) | self if isinstance(other, Mapping) else NotImplemented

    def __repr__(self) -> str:
        return f"<policy {self.name!r}, {len(self)} keys>" if self.name else f"<policy of {len(self)} keys>"

    def __copy__(self) -> "FrozenPolicy":
        return self

    def __deepcopy__(self, memo: Any) -> "FrozenPolicy":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return _frozen_from, (_by_name(self._rules), self.name)


class EditablePolicy(dict[Any, Any]):
    """A dict from keys to rules. Copies of it share keys and rules."""

    def __or__(self, other: Any) -> "EditablePolicy":
        return type(self)({**self, **other}) if isinstance(other, Mapping) else NotImplemented

    def __ror__(self, other: Any) -> "EditablePolicy":
        return type(self)({**other, **self}) if isinstance(other, Mapping) else NotImplemented

    def __copy__(self) -> "EditablePolicy":
        return type(self)(self)

    copy = __copy__

    def __deepcopy__(self, memo: Any) -> "EditablePolicy":
        return type(self)(self)

    def __reduce__(self) -> tuple[Any, ...]:
        return _editable_from, (_by_name(self),)


class _Named(tuple[str]):
    """A primitive by its name."""


def _by_name(rules: Mapping[Any, Any]) -> list[tuple[Any, Any]]:
    def named(key: Any) -> Any:
        if isinstance(key, tuple):
            return tuple(map(named, key))
        if not isinstance(key, Primitive):
            return key
        if _primitive(key.name) is not key:
            raise pickle.PicklingError(
                f"a policy has the primitive {key.name!r}, which is neither JAX's nor jaxamp's; expected one that can "
                f"be found by its name. Pickle the policy without this key, and add it again after loading."
            )
        return _Named((key.name,))

    return [(named(key), rule) for key, rule in rules.items()]


def _from_names(items: list[tuple[Any, Any]]) -> dict[Any, Any]:
    def found(key: Any) -> Any:
        if isinstance(key, _Named):
            return _primitive(key[0])
        return tuple(map(found, key)) if isinstance(key, tuple) else key

    # A primitive that this JAX doesn't have is in no program either.
    rules = ((found(key), rule) for key, rule in items)
    return {key: rule for key, rule in rules if key is not None and not (isinstance(key, tuple) and None in key)}


def _primitive(name: str) -> Primitive | None:
    return COMMUNICATION if name == COMMUNICATION.name else primitives().get(name) or declared(name)


def _frozen_from(items: list[tuple[Any, Any]], name: str) -> FrozenPolicy:
    return FrozenPolicy(_from_names(items), name)


def _editable_from(items: list[tuple[Any, Any]]) -> EditablePolicy:
    return EditablePolicy(_from_names(items))
