"""Why an operation runs as it does, as data. `_inspect/reasons.py` turns it into text."""

import enum
from typing import Any, NamedTuple

from .._compat import Primitive
from .._policy.lookup import Found


class Why(enum.Enum):
    """The kinds of reasons; behind each, what the reason's detail is."""

    # the policy said so
    BY_DEFAULT = enum.auto()
    BY_PRIMITIVE = enum.auto()
    BY_SCOPE = enum.auto()  # the scope's key
    BY_SCOPE_AND_PRIMITIVE = enum.auto()  # the scope's key

    # it follows its neighbours
    FOLLOWS_LOW = enum.auto()
    FOLLOWS_EACH = enum.auto()
    FOLLOWS_BUFFER = enum.auto()
    FOLLOWS_OPERAND = enum.auto()
    FOLLOWS_PROTECTED = enum.auto()
    FOLLOWS_OUT_OF_RANGE = enum.auto()
    NO_LOW_OPERAND = enum.auto()
    READ_ONLY_BY = enum.auto()  # the names of the primitives that read it; none: it is a float32 result
    READ_BY_SOLVE = enum.auto()  # what decided before
    FOLDED = enum.auto()  # into the matmul before it
    NOT_REPLACED = enum.auto()  # why the body that a rule has for it is not used here, in words
    REPLACED = enum.auto()  # (what decided, what its body also does, in words)
    BY_PASS = enum.auto()  # what an optimisation did with it, in words

    # it can't be lowered, or there is nothing to lower
    ALREADY_LOW = enum.auto()
    NOTHING_TO_LOWER = enum.auto()
    CONSTANT = enum.auto()
    NOT_A_FLOAT = enum.auto()
    FROM_POSITIONS = enum.auto()
    FIXED_DTYPE = enum.auto()  # the primitive's name
    MIXED_DTYPES = enum.auto()
    OTHER_RESULT_DTYPE = enum.auto()
    ASKS_FOR_PRECISION = enum.auto()  # what it asks for
    SETTING_ASKS_FOR_PRECISION = enum.auto()  # the value of `jax_default_matmul_precision`
    OUTER_PRODUCT = enum.auto()
    LITERAL_UNDERFLOWS = enum.auto()  # (the number, the compute dtype's name)
    LITERAL_OVERFLOWS = enum.auto()  # (the number, the compute dtype's name)
    USERS_CAST = enum.auto()
    USERS_WIDER_CAST = enum.auto()

    # primitives with bodies
    ENTERED = enum.auto()
    NOT_ENTERED = enum.auto()  # the primitive's name
    INSIDE = enum.auto()  # (the primitive's name, the reason of the equation around)


class Reason(NamedTuple):
    """Why an operation runs as it does."""

    why: Why
    detail: Any = None


def by_policy(found: Found) -> Reason:
    """The key that an operation's rule was found under, as its reason."""
    if found.key is None:
        return Reason(Why.BY_DEFAULT)
    if isinstance(found.key, Primitive):
        return Reason(Why.BY_PRIMITIVE)
    if isinstance(found.key, str):
        return Reason(Why.BY_SCOPE, found.key)
    return Reason(Why.BY_SCOPE_AND_PRIMITIVE, found.key[0])
