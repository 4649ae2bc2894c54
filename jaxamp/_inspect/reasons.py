"""Reasons as text: why an operation of a report runs as it does."""

import enum
from typing import NamedTuple

from .._plan.reasons import Reason, Why

_TEXTS = {
    Why.BY_DEFAULT: "default",
    Why.BY_PRIMITIVE: "policy table",
    Why.BY_SCOPE: "scope {!r}",
    Why.BY_SCOPE_AND_PRIMITIVE: "scope {!r} and primitive",
    Why.FOLLOWS_LOW: "follows a low operand",
    Why.FOLLOWS_EACH: "follows each operand",
    Why.FOLLOWS_BUFFER: "follows the buffer",
    Why.FOLLOWS_OPERAND: "follows its operand",
    Why.FOLLOWS_PROTECTED: "follows a float32 operand",
    Why.FOLLOWS_OUT_OF_RANGE: "follows an operand out of range",
    Why.NO_LOW_OPERAND: "no low operand",
    Why.FOLDED: "folded into the matmul before it",
    Why.NOT_REPLACED: "in the compute dtype: {}",
    Why.BY_PASS: "{}",
    Why.ALREADY_LOW: "low already, by an amp inside",
    Why.NOTHING_TO_LOWER: "nothing to lower",
    Why.CONSTANT: "a constant",
    Why.NOT_A_FLOAT: "not a float",
    Why.FROM_POSITIONS: "made from positions",
    Why.FIXED_DTYPE: "{} has a fixed dtype",
    Why.MIXED_DTYPES: "mixed dtypes as written",
    Why.OTHER_RESULT_DTYPE: "another result dtype as written",
    Why.ASKS_FOR_PRECISION: "asks for precision={}; without that argument it would be lowered",
    Why.SETTING_ASKS_FOR_PRECISION: (
        "jax_default_matmul_precision = {!r} asks for precision; unset it with jax.config.update. "
        "A library that you import may have set it"
    ),
    Why.OUTER_PRODUCT: "an outer product",
    Why.USERS_CAST: "the user's cast",
    Why.USERS_WIDER_CAST: "the user's cast to a wider dtype",
    Why.ENTERED: "entered",
    Why.NOT_ENTERED: "not entered: {}",
}


def text_of(reason: Reason) -> str:
    """A reason in words.

    >>> text_of(Reason(Why.BY_SCOPE, "head")), text_of(Reason(Why.READ_ONLY_BY, ("exp", "reduce_max")))
    ("scope 'head'", 'consumed only by exp, reduce_max')
    """
    match reason.why:
        case Why.READ_ONLY_BY:
            return "consumed only by " + (", ".join(reason.detail) or "float32 results")
        case Why.LITERAL_UNDERFLOWS:
            return "literal {:g} underflows in {}".format(*reason.detail)
        case Why.LITERAL_OVERFLOWS:
            return "literal {:g} is beyond {}".format(*reason.detail)
        case Why.READ_BY_SOLVE:
            return text_of(reason.detail) + "; a decomposition or a solve reads it"
        case Why.REPLACED:
            decided, remark = reason.detail
            return f"{text_of(decided)}; {remark}"
        case Why.INSIDE:
            name, around = reason.detail
            return f"inside of {name}: {text_of(around)}"
        case why:
            return _TEXTS[why].format(reason.detail)


class Role(enum.Enum):
    """What an operation of the program that runs is to the user's program."""

    ITSELF = "one of its operations"
    ADDED = "added for one of its operations"
    DERIVATIVE = "part of the derivative of one of its operations"
    RESULT = "gives one of its results its dtype"


class Explanation(NamedTuple):
    """Why an operation is in the program that runs, and runs as it does."""

    role: Role
    of: str = ""  # the name of the user's operation
    reason: Reason | None = None  # why that runs as it does
    outer: bool = False  # a product without contraction, which is not lowered for its own sake

    def text(self) -> str:
        """In words."""
        return f"derivative of {self.of}: {self.short_text()}" if self.role is Role.DERIVATIVE else self.short_text()

    def short_text(self) -> str:
        """In words, for a place that shows already what is a derivative."""
        if self.reason is None:
            return "a result in its dtype"
        if self.role is Role.DERIVATIVE and self.reason.why is Why.ENTERED:
            return "JAX's own rule"
        prefix = f"added for {self.of}: " if self.role is Role.ADDED else ""
        return prefix + ("an outer product: " if self.outer else "") + text_of(self.reason)
