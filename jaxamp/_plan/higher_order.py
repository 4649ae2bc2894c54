"""Primitives that carry jaxprs: one table, which everything that walks a jaxpr reads.

An entry of the table has three functions:

- `describe(eqn)` says where the bodies are (`bodies.py`);
- `rewrite(rewriter, eqn, step, operands)` binds the equation with its bodies rewritten (`rewrites.py`);
- `evaluate(run, eqn, operands)` computes the results by running the bodies (`evaluations.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from .._compat import COMPOSITE_BODY, Jaxpr, Primitive, primitives
from .bodies import (
    Describe,
    Entry,
    call,
    describe_cond,
    describe_hi,
    describe_scan,
    describe_shard_map,
    describe_while,
    with_replaced_bodies,
)
from .evaluations import (
    Call,
    Evaluate,
    evaluate_cond,
    evaluate_hi,
    evaluate_scan,
    evaluate_supposed_call,
    evaluate_while,
)
from .rewrites import (
    Rewrite,
    rebind,
    rewrite_checkpoint,
    rewrite_custom_jvp,
    rewrite_custom_vjp,
    rewrite_custom_vmap,
    rewrite_hi,
    rewrite_inline,
    rewrite_scan,
    rewrite_shard_map,
)


class HigherOrder(NamedTuple):
    """What there is to know of a primitive that carries jaxprs."""

    describe: Describe
    rewrite: Rewrite
    evaluate: Evaluate | None = None  # None: for the tools that look at each operation, it is one


_REGISTERED: dict[Primitive, HigherOrder] = {}


@functools.cache
def _builtin() -> dict[Primitive, HigherOrder]:
    inlined = HigherOrder(call("call_jaxpr"), rewrite_inline, Call("call_jaxpr"))
    table = {
        "jit": HigherOrder(call("jaxpr"), rebind, Call("jaxpr")),
        "closed_call": inlined,
        "call": inlined,
        "eval_jaxpr": inlined,  # replaces both since 0.11.2
        "remat2": HigherOrder(call("jaxpr"), rewrite_checkpoint, Call("jaxpr")),
        "scan": HigherOrder(describe_scan, rewrite_scan, evaluate_scan),
        "while": HigherOrder(describe_while, rebind, evaluate_while),
        "cond": HigherOrder(describe_cond, rebind, evaluate_cond),
        "custom_jvp_call": HigherOrder(call("call_jaxpr"), rewrite_custom_jvp, Call("call_jaxpr")),
        "custom_vjp_call": HigherOrder(call("call_jaxpr", lazy=True), rewrite_custom_vjp, Call("call_jaxpr")),
        "custom_vmap_call": HigherOrder(call("call"), rewrite_custom_vmap, Call("call")),
        "composite": HigherOrder(call(COMPOSITE_BODY), rebind, Call(COMPOSITE_BODY)),
        "call_hi_primitive": HigherOrder(describe_hi, rewrite_hi, evaluate_hi),  # since 0.11.2
        "shard_map": HigherOrder(describe_shard_map, rewrite_shard_map),
    }
    known = primitives()
    return {known[name]: rule for name, rule in table.items() if name in known}


def higher_order(primitive: Primitive) -> HigherOrder | None:
    """The table's entry of a primitive; None for a primitive that is not entered."""
    return _REGISTERED.get(primitive) or _builtin().get(primitive)


def describe(eqn: Any) -> Entry | None:
    """The inside of `eqn`; None for a primitive that is not entered."""
    found = higher_order(eqn.primitive)
    return None if found is None else found.describe(eqn)


def with_rewritten_bodies(eqn: Any, rewrite: Callable[[Jaxpr], Jaxpr]) -> Any:
    """`eqn` with its bodies rewritten; itself if they stay the same, or are not entered."""
    entry = describe(eqn)
    if entry is None or entry.lazy:
        return eqn
    new = [rewrite(body.jaxpr) for body in entry.bodies]
    if all(jaxpr is body.jaxpr for jaxpr, body in zip(new, entry.bodies, strict=True)):
        return eqn
    return eqn.replace(params=with_replaced_bodies(eqn, entry, new))


def register_higher_order(
    primitive: Primitive, jaxpr: str | Describe = "jaxpr", *, evaluate: Evaluate | None = None
) -> None:
    """Teach `amp` to enter a primitive that carries a jaxpr; without it the primitive runs as written.

    Reports, `compare` and `find_overflow` enter it too.

    Args:
        primitive: The primitive, which must accept its jaxpr with other dtypes.
        jaxpr: The name of the parameter that holds the jaxpr, if its operands and results are those of the equation,
            one for one. Else a function from an equation to an `Entry` of `Body`s.
        evaluate: How to compute the results operation by operation, for `compare` and `find_overflow`:
            `evaluate(run, eqn, operands)` returns the results, where `run(jaxpr, operands)` runs a body. If None, the
            primitive is one operation for them, unless its jaxpr is given by name and running it once gives the results
            of the primitive.

    Returns:
        Nothing.

    >>> from jax.extend.core import Primitive
    >>> register_higher_order(Primitive("my_call"), "call_jaxpr")
    """
    if not isinstance(primitive, Primitive):
        raise TypeError(
            f"register_higher_order got {primitive!r}, of type {type(primitive).__name__}; expected a primitive. "
            "Write for example register_higher_order(my_call_p)."
        )
    if not (isinstance(jaxpr, str) or callable(jaxpr)) or not (evaluate is None or callable(evaluate)):
        given = f"jaxpr={jaxpr!r}" if evaluate is None or callable(evaluate) else f"evaluate={evaluate!r}"
        raise TypeError(
            f"register_higher_order got {given}; expected the name of a parameter or a function. Write for example "
            "register_higher_order(my_call_p, 'call_jaxpr')."
        )
    if isinstance(jaxpr, str):
        _REGISTERED[primitive] = HigherOrder(call(jaxpr), rebind, evaluate or evaluate_supposed_call(jaxpr))
    else:
        _REGISTERED[primitive] = HigherOrder(jaxpr, rebind, evaluate)
