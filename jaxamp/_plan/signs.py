"""Which signs the numbers of a variable may have, as far as its equations say.

An exponential is positive whatever it is of, so `-exp(a) * softplus(b)` is negative. A NaN has any sign.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from .._compat import Literal, Var, open_jaxpr
from .._traits import traits_of
from .higher_order import describe


class Signs(NamedTuple):
    """Whether there may be numbers above, and below, zero."""

    above: bool
    below: bool

    def __or__(self, other: Any) -> "Signs":
        return Signs(self.above or other.above, self.below or other.below)

    def __neg__(self) -> "Signs":
        return Signs(self.below, self.above)

    def __mul__(self, other: Any) -> "Signs":
        alike = (self.above and other.above) or (self.below and other.below)
        return Signs(alike, (self.above and other.below) or (self.below and other.above))


ANY, NOT_BELOW = Signs(True, True), Signs(True, False)


class SignsOf:
    """The signs of variables of one body. Those of its operands are any, unless they are given."""

    def __init__(self, eqns: Sequence[Any], given: Mapping[Var, Signs] | None = None):
        self._makers = {v: eqn for eqn in eqns for v in eqn.outvars}
        self._known = dict(given or {})

    def __call__(self, atom: Any) -> Signs:
        if isinstance(atom, Literal):
            return _of_numbers(atom.val)
        left = [atom]
        while left:  # no recursion, for chains are long
            v = left[-1]
            eqn = self._makers.get(v)
            waits = [] if eqn is None or v in self._known else [u for u in _variables(eqn) if u not in self._known]
            if waits:
                left += waits
                continue
            left.pop()
            if v not in self._known:
                self._known.update({v: ANY} if eqn is None else zip(eqn.outvars, self._results(eqn), strict=True))
        return self._known[atom]

    def _results(self, eqn: Any) -> Sequence[Signs]:
        operands = [_of_numbers(v.val) if isinstance(v, Literal) else self._known[v] for v in eqn.invars]
        name, traits, unknown = eqn.primitive.name, traits_of(eqn.primitive), [ANY] * len(eqn.outvars)
        if traits.plain_call or traits.own_jvp or traits.own_vjp or traits.checkpoints:
            entry = describe(eqn)
            body = None if entry is None or entry.lazy else open_jaxpr(entry.bodies[0].jaxpr)
            if body is None or len(body.invars) != len(operands):
                return unknown
            inside = SignsOf(body.eqns, dict(zip(body.invars, operands, strict=True)))
            return [inside(v) for v in body.outvars]
        if name == "mul" and eqn.invars[0] is eqn.invars[1]:
            return [NOT_BELOW]
        if name in _RULES:
            return [_RULES[name](operands, eqn.params)]
        if name in _OF_FIRST:
            return [operands[0]]
        if name == "select_n":
            which, *cases = eqn.invars
            return [operands[1] if self._asks_for_nan(which) else _any_of(operands[1 : len(cases) + 1])]
        if name in _OF_ALL:
            return [_any_of(operands)]
        return unknown

    def _asks_for_nan(self, which: Any) -> bool:
        """Whether a condition is `x != x`."""
        eqn = None if isinstance(which, Literal) else self._makers.get(which)
        return eqn is not None and eqn.primitive.name == "ne" and eqn.invars[0] is eqn.invars[1]


def _variables(eqn: Any) -> list[Var]:
    return [v for v in eqn.invars if not isinstance(v, Literal)]


def _of_numbers(value: Any) -> Signs:
    numbers = np.asarray(value)
    if not np.issubdtype(numbers.dtype, np.number) or np.iscomplexobj(numbers):
        return ANY
    return Signs(bool(np.any(numbers > 0)), bool(np.any(numbers < 0)))


def _any_of(signs: Sequence[Signs]) -> Signs:
    found = Signs(False, False)
    for each in signs:
        found |= each
    return found


def _power(operands: Sequence[Signs], params: Any) -> Signs:
    return NOT_BELOW if params["y"] % 2 == 0 else operands[0]


def _largest(a: Signs, b: Signs) -> Signs:
    return Signs(a.above or b.above, a.below and b.below)


Rule = Callable[[Sequence[Signs], Any], Signs]
_RULES: dict[str, Rule] = {
    "neg": lambda s, _: -s[0],
    "add": lambda s, _: s[0] | s[1],
    "sub": lambda s, _: s[0] | -s[1],
    "mul": lambda s, _: s[0] * s[1],
    "div": lambda s, _: s[0] * s[1],
    "dot_general": lambda s, _: s[0] * s[1],
    "max": lambda s, _: _largest(s[0], s[1]),
    "min": lambda s, _: -_largest(-s[0], -s[1]),
    "clamp": lambda s, _: -_largest(-_largest(s[0], s[1]), -s[2]),  # operands: smallest, x, largest
    "integer_pow": _power,
    **{
        name: lambda *_: NOT_BELOW
        for name in ("abs", "erfc", "exp", "exp2", "cosh", "iota", "logistic", "rsqrt", "sqrt", "square")
    },
}
_OF_FIRST = frozenset(
    """
    asinh atan atanh broadcast_in_dim convert_element_type copy cummax cummin cumsum dynamic_slice erf expm1 log1p
    pvary reduce_max reduce_min reduce_precision reduce_sum reduce_window_sum reshape rev sign sinh slice squeeze
    stop_gradient tanh transpose
    """.split()
)
_OF_ALL = frozenset(("add_any", "concatenate", "pad"))
