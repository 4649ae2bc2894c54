"""Run a jaxpr one equation after the other, with somebody watching.

Loops are unrolled in Python, so that the watcher sees each round. What can't be entered here (`shard_map`, kernels,
callbacks) is run as one operation.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax

from .._compat import Jaxpr, Literal, consts_of, open_jaxpr, scan_counts
from .._plan.higher_order import bind
from .._transform.interpreter import Ledger
from .location import Place

# (equation, where it is, operands, results)
Watch = Callable[[Any, Place, Sequence[Any], Sequence[Any]], None]


class Walker:
    """Runs jaxprs on concrete arrays."""

    def __init__(self, ledger: Ledger, watch: Watch):
        self._ledger = ledger
        self._watch = watch
        self._entered: Counter[Any] = Counter()

    def run(self, jaxpr: Jaxpr, operands: Sequence[Any], place: Place) -> list[Any]:
        env: dict[Any, Any] = {}
        body = open_jaxpr(jaxpr)
        env.update(zip(body.constvars, consts_of(jaxpr), strict=True))
        env.update(zip(body.invars, operands, strict=True))

        def read(atom: Any) -> Any:
            return atom.val if isinstance(atom, Literal) else env[atom]

        for eqn in body.eqns:
            here, ins = place.of(eqn, self._ledger), [read(v) for v in eqn.invars]
            enter = _ENTERED.get(eqn.primitive.name)
            with eqn.ctx.manager:
                if enter is not None:
                    outs = enter(self, eqn, ins, here)
                else:
                    outs = bind(eqn, ins)
                    self._watch(eqn, here, ins, outs)
            env.update(zip(eqn.outvars, outs, strict=True))
        return [read(v) for v in body.outvars]

    def call(self, param: str, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        return self.run(eqn.params[param], ins, place)

    def _turns(self, place: Place) -> Callable[[int], tuple[tuple[int, int], ...]]:
        """The turns inside of a loop or cond that is here, by its round or branch."""
        number = self._entered[place.turns]
        self._entered[place.turns] += 1
        return lambda turn: (*place.turns, (number, turn))

    def cond(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        branches = eqn.params["branches"]
        taken = min(max(int(ins[0]), 0), len(branches) - 1)
        return self.run(branches[taken], ins[1:], place._replace(turns=self._turns(place)(taken)))

    def loop(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        first, second = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        carry, round_, turns = ins[second:], 0, self._turns(place)
        while True:
            here = place._replace(rounds=(*place.rounds, round_), turns=turns(round_))
            (again,) = self.run(eqn.params["cond_jaxpr"], [*ins[:first], *carry], here)
            if not bool(jnp.any(again)):
                return carry
            after = self.run(eqn.params["body_jaxpr"], [*ins[first:second], *carry], here)
            carry, round_ = [_where(again, new, old) for new, old in zip(after, carry, strict=True)], round_ + 1

    def scan(self, eqn: Any, ins: list[Any], place: Place) -> list[Any]:
        consts, carries = scan_counts(eqn.params)
        length, body = eqn.params["length"], eqn.params["jaxpr"]
        carry, xs = ins[consts : consts + carries], ins[consts + carries :]
        ys: list[list[Any]] = []
        order, turns = range(length), self._turns(place)
        for i in reversed(order) if eqn.params["reverse"] else order:
            here = place._replace(rounds=(*place.rounds, i), turns=turns(i))
            outs = self.run(body, [*ins[:consts], *carry, *(x[i] for x in xs)], here)
            carry = outs[:carries]
            ys.append(outs[carries:])
        if eqn.params["reverse"]:
            ys.reverse()
        shapes = [v.aval for v in eqn.outvars[carries:]]
        stacked = [
            jnp.stack([y[k] for y in ys]) if ys else lax.full(aval.shape, 0, aval.dtype)
            for k, aval in enumerate(shapes)
        ]
        return [*carry, *stacked]


def _where(again: Any, new: Any, old: Any) -> Any:
    """Of a mapped loop, the rounds that an example does not take any more leave it as it is."""
    if not jnp.ndim(again):
        return new
    return jnp.where(jnp.reshape(again, jnp.shape(again) + (1,) * (jnp.ndim(new) - jnp.ndim(again))), new, old)


def _call(param: str) -> Callable[..., list[Any]]:
    return lambda walker, eqn, ins, place: walker.call(param, eqn, ins, place)


_ENTERED: dict[str, Callable[..., list[Any]]] = {
    "jit": _call("jaxpr"),
    "closed_call": _call("call_jaxpr"),
    "call": _call("call_jaxpr"),
    "eval_jaxpr": _call("call_jaxpr"),
    "remat2": _call("jaxpr"),
    "custom_jvp_call": _call("call_jaxpr"),
    "custom_vjp_call": _call("call_jaxpr"),
    "cond": Walker.cond,
    "while": Walker.loop,
    "scan": Walker.scan,
}
