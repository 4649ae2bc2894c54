"""The entries of a policy and the differences between two, as data.

Entries for primitives that this version of JAX does not have are left out.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from .._compat import Primitive
from .._plan.higher_order import higher_order
from .._policy.communication import Communication
from .._policy.lookup import Key, Policy
from .._policy.quantization import Quantization
from .._policy.rules import WORDS, ByTarget, Rule

RULE_ORDER = ("compute", "quantized", "infer", "widest", "float32")  # as rules are listed
_NAMES = {rule: name for name, rule in WORDS.items() if name in RULE_ORDER}


class RuleName(NamedTuple):
    """The rule of an entry, by the name it has in a table."""

    name: str
    by_dtype: Mapping[str, str]  # compute dtypes with another rule

    def __str__(self) -> str:
        others = ", ".join(f"{dtype}: {name}" for dtype, name in self.by_dtype.items())
        return f"{self.name} ({others})" if others else self.name

    def to_dict(self) -> dict[str, Any]:
        return {"rule": self.name, "by_dtype": dict(self.by_dtype)}


class PolicyEntry(NamedTuple):
    """A key of a policy and its rule."""

    scope: str | None  # None: everywhere
    primitive: str | None  # None: every primitive
    rule: RuleName

    def to_dict(self) -> dict[str, Any]:
        return {"scope": self.scope, "primitive": self.primitive, **self.rule.to_dict()}


class Difference(NamedTuple):
    """A key with different rules in two policies; None where a policy does not have the key."""

    scope: str | None
    primitive: str | None
    a: RuleName | None
    b: RuleName | None

    def to_dict(self) -> dict[str, Any]:
        sides = {name: rule and rule.to_dict() for name, rule in (("a", self.a), ("b", self.b))}
        return {"scope": self.scope, "primitive": self.primitive, **sides}


def entries_of(policy: Policy, dtype: np.dtype | None = None) -> tuple[PolicyEntry, ...]:
    """The entries of a policy, primitives first; with `dtype`, the rules for this compute dtype.

    >>> from jaxamp import load_policy
    >>> [str(entry.rule) for entry in entries_of(load_policy("default")) if entry.primitive == "psum"]
    ['infer (float16: float32)']
    """
    return tuple(
        PolicyEntry(*_scope_and_primitive(key), _rule_name(policy[key], dtype)) for key in sorted(policy, key=_sort_key)
    )


def differences(a: Policy, b: Policy, dtype: np.dtype | None = None) -> tuple[Difference, ...]:
    """The differences between two policies, primitives first.

    A primitive that a policy does not name runs as written, just as under the rule `float32`, so that is not a
    difference. For a primitive with a body it is: naming the primitive keeps `amp` out of its body.

    >>> from jaxamp import load_policy
    >>> found = differences(load_policy("default"), load_policy("conservative"))
    >>> [(d.primitive, str(d.a), d.b) for d in found][0]
    ('abs', 'infer', None)
    """
    return tuple(_differences(a, b, dtype))


def _differences(a: Policy, b: Policy, dtype: np.dtype | None) -> Iterator[Difference]:
    for key in sorted({*a, *b}, key=_sort_key):
        first, second = (_rule_name(policy[key], dtype) if key in policy else None for policy in (a, b))
        if (first or _rule_if_unnamed(a, key, dtype)) != (second or _rule_if_unnamed(b, key, dtype)):
            yield Difference(*_scope_and_primitive(key), first, second)


def _rule_if_unnamed(policy: Policy, key: Key, dtype: np.dtype | None) -> RuleName | None:
    """The rule that acts like leaving this key out of a policy, if there is one."""
    default = _rule_name(policy["amp_default"], dtype)
    has_no_body = isinstance(key, Primitive) and higher_order(key) is None
    return default if has_no_body and default == RuleName("float32", {}) else None


def _sort_key(key: Key) -> tuple[bool, str, str]:
    scope, primitive = _scope_and_primitive(key)
    return scope is not None, scope or "", primitive or ""


def _scope_and_primitive(key: Key) -> tuple[str | None, str | None]:
    if isinstance(key, Primitive):
        return None, key.name
    return (key, None) if isinstance(key, str) else (key[0], key[1].name)


def _rule_name(rule: Rule | Communication, dtype: np.dtype | None) -> RuleName:
    if isinstance(rule, Communication):
        return RuleName(f"gather {rule.gather}, reduce {rule.reduce}", {})
    if not isinstance(rule, ByTarget):
        return RuleName(_word(rule), {})
    if dtype is not None:
        return RuleName(_word(rule.resolve(dtype)), {})
    special = {name: _word(other) for name, other in rule.special.items() if other is not rule.default}
    return RuleName(_word(rule.default), special)


def _word(rule: Rule) -> str:
    """What a table calls a rule."""
    return "quantized" if isinstance(rule, Quantization) else _NAMES[rule]
