"""Policies to look at: their entries in the words of a table, and what differs between two.

Entries for primitives that this JAX does not have are left out.
"""

import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._compat import Primitive
from .._plan.higher_order import is_higher_order
from .._policy.rules import WORDS, ByTarget, Rule
from .._policy.toml import Header, Key, Policy

_ORDER = ("compute", "infer", "widest", "float32")
_WORD = {WORDS[word]: word for word in _ORDER}
WIDTH = 100


class Words(NamedTuple):
    """The rule of an entry, in the words of a table."""

    rule: str
    by_dtype: Mapping[str, str]  # the compute dtypes that have another

    def __str__(self) -> str:
        others = ", ".join(f"{dtype}: {word}" for dtype, word in self.by_dtype.items())
        return f"{self.rule} ({others})" if others else self.rule


class PolicyEntry(NamedTuple):
    """A key of a policy, and its rule."""

    scope: str | None  # None: everywhere
    primitive: str | None  # None: each
    words: Words

    def to_dict(self) -> dict[str, Any]:
        return {"scope": self.scope, "primitive": self.primitive, **_as_dict(self.words)}


class Difference(NamedTuple):
    """A key that two policies have under unlike rules; None where one does not have it."""

    scope: str | None
    primitive: str | None
    a: Words | None
    b: Words | None

    def to_dict(self) -> dict[str, Any]:
        sides = {name: words and _as_dict(words) for name, words in (("a", self.a), ("b", self.b))}
        return {"scope": self.scope, "primitive": self.primitive, **sides}


def _as_dict(words: Words) -> dict[str, Any]:
    return {"rule": words.rule, "by_dtype": dict(words.by_dtype)}


def entries_of(policy: Policy, dtype: np.dtype | None = None) -> tuple[PolicyEntry, ...]:
    """The entries of a policy, primitives first; with `dtype` as they are for this compute dtype.

    >>> from jaxamp import load_policy
    >>> [str(entry.words) for entry in entries_of(load_policy("default")) if entry.primitive == "psum"]
    ['infer (float16: float32)']
    """
    return tuple(PolicyEntry(*_parts(key), _words(policy[key], dtype)) for key in sorted(policy, key=_rank))


def differences(a: Policy, b: Policy, dtype: np.dtype | None = None) -> tuple[Difference, ...]:
    """What differs between two policies, primitives first.

    A primitive that a policy does not name runs as written, as one under the rule `float32`: this is no difference. For
    one that carries a jaxpr it is, since the inside of one that is named is left alone too.

    >>> from jaxamp import load_policy
    >>> found = differences(load_policy("default"), load_policy("conservative"))
    >>> [(d.primitive, str(d.a), d.b) for d in found][0]
    ('abs', 'infer', None)
    """
    return tuple(_differences(a, b, dtype))


def _differences(a: Policy, b: Policy, dtype: np.dtype | None) -> Iterator[Difference]:
    for key in sorted({*a, *b}, key=_rank):
        first, second = (_words(policy[key], dtype) if key in policy else None for policy in (a, b))
        if (first or _unnamed(a, key, dtype)) != (second or _unnamed(b, key, dtype)):
            yield Difference(*_parts(key), first, second)


def _unnamed(policy: Policy, key: Key, dtype: np.dtype | None) -> Words | None:
    """The rule that a primitive has in a policy that does not name it, if there is one that could be named instead."""
    rule = _words(policy["amp_default"], dtype)
    plain = isinstance(key, Primitive) and not is_higher_order(key)
    return rule if plain and rule == Words("float32", {}) else None


def _rank(key: Key) -> tuple[bool, str, str]:
    scope, primitive = _parts(key)
    return scope is not None, scope or "", primitive or ""


def _parts(key: Key) -> tuple[str | None, str | None]:
    if isinstance(key, Primitive):
        return None, key.name
    return (key, None) if isinstance(key, str) else (key[0], key[1].name)


def _words(rule: Rule, dtype: np.dtype | None) -> Words:
    if not isinstance(rule, ByTarget):
        return Words(_WORD[rule], {})
    if dtype is not None:
        return Words(_WORD[rule.resolve(dtype)], {})
    special = {name: _WORD[other] for name, other in rule.special.items() if other is not rule.default}
    return Words(_WORD[rule.default], special)


# -- as text


def render_presets(presets: Mapping[str, Header]) -> str:
    return _table([(name, header.description) for name, header in presets.items()])


def render_policy(name: str, header: Header, entries: Sequence[PolicyEntry], dtype: np.dtype | None) -> str:
    """Primitives by rule, those that depend on the compute dtype once more, then scopes."""
    title = name if dtype is None else f"{name}, compute dtype {dtype.name}"
    parts = [title, *filter(None, [header.description]), *([f"extends {header.extends}"] if header.extends else [])]
    primitives = [entry for entry in entries if entry.scope is None]
    parts += ["", *_by_word((entry.words.rule, entry.primitive or "") for entry in primitives)]
    for special in sorted({dtype for entry in primitives for dtype in entry.words.by_dtype}):
        parts += ["", f"where the compute dtype is {special}"]
        parts += _by_word(
            (entry.words.by_dtype[special], entry.primitive or "")
            for entry in primitives
            if special in entry.words.by_dtype
        )
    scoped = [entry for entry in entries if entry.scope is not None]
    return "\n".join([*parts, "", "scopes", _table([(_key(entry), str(entry.words)) for entry in scoped])])


def render_differences(a: str, b: str, found: Sequence[Difference]) -> str:
    if not found:
        return f"{a} and {b} are the same."
    rows = [(_key(row), str(row.a or "-"), str(row.b or "-")) for row in found]
    note = "\n- is not named there." if any(row.a is None or row.b is None for row in found) else ""
    return _table([("", a, b), *rows]) + note


def _key(row: PolicyEntry | Difference) -> str:
    return ": ".join(filter(None, (row.scope, row.primitive)))


def _by_word(pairs: Iterable[tuple[str, str]]) -> Iterator[str]:
    pairs = list(pairs)
    for word in _ORDER:
        names = ", ".join(name for other, name in pairs if other == word)
        if names:
            yield textwrap.fill(names, WIDTH, initial_indent=f"{word:<10}", subsequent_indent=" " * 10, **_WRAP)


_WRAP: dict[str, Any] = {"break_on_hyphens": False, "break_long_words": False}


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)) for row in rows)
    return "\n".join(line.rstrip() for line in lines)
