"""Looking up the rule of an operation.

The outermost active scope that has a key wins; at one scope the pair comes before the name, and the name before the
glob; else the primitive; else `"amp_default"`. A rule that is about some primitives only is passed over by others.
"""

from collections.abc import Hashable, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._compat import Primitive
from .._traits import traits_of
from .communication import COMMUNICATION, Communication
from .rules import ByTarget, ReplacingRule, Rule, use_original_precision
from .scopes import is_glob, matches

Key = Any  # Primitive | str | tuple[str, Primitive]
Policy = Mapping[Key, Rule | Communication]  # a `Communication` under `COMMUNICATION`, alone or with a scope

# Scopes that pin full precision by default; the last is also the key of every operation that has no other.
PINS: Policy = dict.fromkeys(("amp_stop", "amp_step", "amp_default"), use_original_precision)


_BY_DEFAULT = Communication()


class Found(NamedTuple):
    """The rule of an operation and the key that it was found under (None: no key, the default)."""

    rule: Rule
    key: Key


def _identity(rules: dict[Key, Rule]) -> Hashable:
    """Equal for lookups that find the same. A rule that can't be hashed is told from all others."""
    try:
        return frozenset(rules.items())
    except TypeError:
        return object()


class Lookup:
    """A policy for one compute dtype, ready to be asked."""

    def __init__(self, policy: Policy, compute_dtype: np.dtype):
        def resolved(rule: Any) -> Any:
            return rule.resolve(compute_dtype) if isinstance(rule, ByTarget) else rule

        self._rules: dict[Key, Any] = {k: resolved(r) for k, r in {**PINS, **policy}.items()}
        scoped = [key for key in self._rules if not isinstance(key, Primitive)]
        self._globs = [key for key in scoped if is_glob(key if isinstance(key, str) else key[0])]
        self._found: dict[tuple[tuple[str, ...], Primitive], Found] = {}
        self._sent: dict[tuple[str, ...], Key] = {}
        self.identity = _identity(self._rules)
        rules = (rule for rule in self._rules.values() if not isinstance(rule, Communication))
        self.inert = all(rule is use_original_precision for rule in rules)

    def __call__(self, path: tuple[str, ...], primitive: Primitive) -> Found:
        """The rule for `primitive` inside the named scopes `path`, outermost first."""
        found = self._found.get((path, primitive))
        if found is None:
            found = self._found[path, primitive] = self._find(path, primitive)
        return found

    def mistaken(self) -> list[str]:
        """Keys that name a scope which no operation was in, and a primitive that some operations had."""
        scopes = {scope for path, _ in self._found for scope in path}
        names = {primitive.name for _, primitive in self._found}
        return sorted(key for key in self._rules if isinstance(key, str) and key in names and key not in scopes)

    def communication(self, path: tuple[str, ...]) -> Communication:
        """What is said of values that are sent inside the named scopes `path`."""
        if path not in self._sent:
            self._sent[path] = self._find_communication(path)
        return self._rules.get(self._sent[path], _BY_DEFAULT)

    def communication_keys(self) -> set[Key]:
        """The keys that `communication` has found something under."""
        return set(self._sent.values())

    def _find_communication(self, path: tuple[str, ...]) -> Key:
        for depth in range(1, len(path) + 1):
            for key in self._keys_at(path[:depth], COMMUNICATION):
                if isinstance(key, tuple):  # else a rule for all operations of a scope
                    return key
        return COMMUNICATION

    def _find(self, path: tuple[str, ...], primitive: Primitive) -> Found:
        primitive = traits_of(primitive).policy_key or primitive
        for depth in range(1, len(path) + 1):
            for key in self._keys_at(path[:depth], primitive):
                rule = self._rules[key]
                if not isinstance(rule, ReplacingRule) or rule.applies_to(primitive):
                    return Found(rule, key)
        if primitive in self._rules:
            return Found(self._rules[primitive], primitive)
        return Found(self._rules["amp_default"], None)

    def _keys_at(self, path: tuple[str, ...], primitive: Primitive) -> Iterable[Key]:
        scope = path[-1]
        yield from (key for key in ((scope, primitive), scope) if key in self._rules)
        globs = [key for key in self._globs if isinstance(key, str) or key[1] is primitive]
        for key in sorted(globs, key=lambda key: isinstance(key, str)):
            if matches(key if isinstance(key, str) else key[0], path):
                yield key
