"""How to compute the results of a higher-order equation by running its bodies one after the other.

This serves the tools that look at each operation: loops are unrolled in Python, so that they see each round.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Jaxpr, inside_hi, scan_counts
from .._jaxpr import bind
from .._jaxpr import evaluate as run_jaxpr


class RunBody(Protocol):
    """Runs a body for the tools that look at each operation."""

    def __call__(
        self, jaxpr: Jaxpr, operands: Sequence[Any], *, turn: int | None = None, in_loop: bool = False
    ) -> list[Any]:
        """The results of a body. `turn`: the number of a branch, or `in_loop` that of a round."""


# None: it can't be done, and the equation is one operation
Evaluate = Callable[[RunBody, Any, list[Any]], Sequence[Any] | None]


@dataclass(frozen=True)
class Call:
    """Runs the body in a parameter once, on the operands of the equation."""

    param: str

    def __call__(self, run: RunBody, eqn: Any, operands: list[Any]) -> Sequence[Any]:
        return run(eqn.params[self.param], operands)


def evaluate_supposed_call(param: str) -> Evaluate:
    """The body as if it were called once, if that gives the results of the primitive: it may do more with its body."""

    def evaluate(run: RunBody, eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
        if eqn.effects:  # they must happen once
            return None
        expected = bind(eqn, operands)
        try:
            found = run_jaxpr(eqn.params[param], operands)
        except Exception:  # a body that is mapped over the operands, or takes others
            return None
        return run(eqn.params[param], operands) if all(map(_is_same, found, expected)) else None

    return evaluate


def _is_same(x: Any, y: Any) -> bool:
    """Whether two arrays are the same within the rounding of a low dtype."""
    if jnp.shape(x) != jnp.shape(y) or x.dtype != y.dtype or not jnp.issubdtype(x.dtype, jnp.floating):
        return jnp.shape(x) == jnp.shape(y) and x.dtype == y.dtype and bool(jnp.all(x == y))
    a, b = (np.asarray(value).astype(np.float64) for value in (x, y))
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return False
    return bool(np.linalg.norm((a - b)[finite]) <= 1e-2 * np.linalg.norm(b[finite]))


def evaluate_hi(run: RunBody, eqn: Any, operands: list[Any]) -> Sequence[Any] | None:
    inside = inside_hi(eqn.params["_prim"])
    return None if inside is None else run(inside.jaxpr, operands)


def evaluate_cond(run: RunBody, eqn: Any, operands: list[Any]) -> list[Any]:
    branches = eqn.params["branches"]
    taken = min(max(int(operands[0]), 0), len(branches) - 1)
    return run(branches[taken], operands[1:], turn=taken)


def evaluate_while(run: RunBody, eqn: Any, operands: list[Any]) -> list[Any]:
    first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
    of_cond, of_body, carry = operands[:first], operands[first:second], operands[second:]
    turn = 0
    while True:
        (again,) = run(eqn.params["cond_jaxpr"], [*of_cond, *carry], turn=turn, in_loop=True)
        if not bool(jnp.any(again)):
            return carry
        after = run(eqn.params["body_jaxpr"], [*of_body, *carry], turn=turn, in_loop=True)
        carry, turn = [_where(again, new, old) for new, old in zip(after, carry, strict=True)], turn + 1


def _where(again: Any, new: Any, old: Any) -> Any:
    """In a mapped loop, an example that has finished stays as it is while others go on."""
    if not jnp.ndim(again):
        return new
    return jnp.where(jnp.reshape(again, jnp.shape(again) + (1,) * (jnp.ndim(new) - jnp.ndim(again))), new, old)


def evaluate_scan(run: RunBody, eqn: Any, operands: list[Any]) -> list[Any]:
    consts, carries = scan_counts(eqn.params)
    length, reverse, body = eqn.params["length"], eqn.params["reverse"], eqn.params["jaxpr"]
    carry, xs = operands[consts : consts + carries], operands[consts + carries :]
    stacks: list[list[Any]] = []
    for i in reversed(range(length)) if reverse else range(length):
        outs = run(body, [*operands[:consts], *carry, *(x[i] for x in xs)], turn=i, in_loop=True)
        carry = outs[:carries]
        stacks.append(outs[carries:])
    if reverse:
        stacks.reverse()
    stacked = [
        jnp.stack([ys[k] for ys in stacks]) if stacks else lax.full(v.aval.shape, 0, v.aval.dtype)
        for k, v in enumerate(eqn.outvars[carries:])
    ]
    return [*carry, *stacked]
