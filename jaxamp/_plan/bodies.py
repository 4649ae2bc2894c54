"""Where the bodies of a higher-order equation are: which operand goes into which variable of which jaxpr, and which
result comes out of it."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax.extend.core as jec

from .._compat import Jaxpr, inside_hi, scan_counts, with_hi_checkpoint
from .._traits import traits_of


class Body(NamedTuple):
    """A jaxpr in an equation's parameters: `params[param]`, or its item `item`.

    Attributes:
        jaxpr: The jaxpr.
        operands: The operand of the equation behind each of its invars.
        results: The result of the equation behind each of its outvars; empty if there is none.
        param: The parameter that it is in; empty if it can't be replaced there.
        item: Its place in the parameter, if that is a sequence.

    >>> import jax, jaxamp
    >>> (eqn,) = jax.make_jaxpr(jax.jit(lambda x: x + 1.0))(1.0).eqns
    >>> body = jaxamp.Body(eqn.params["jaxpr"], operands=[0], results=[0])
    >>> body.param
    'jaxpr'
    """

    jaxpr: Jaxpr
    operands: Sequence[int]
    results: Sequence[int]
    param: str = "jaxpr"
    item: int | None = None


class Entry(NamedTuple):
    """The inside of a higher-order equation.

    Attributes:
        bodies: The jaxprs in it.
        carries: The `(operand, result)` pairs that a loop passes on.
        lazy: Whether a user's derivative rules hang on it, which run only when it is differentiated.
        times: How often the bodies run, where that is known: rounds of a scan, devices of a `shard_map`.

    >>> import jaxamp
    >>> jaxamp.Entry(bodies=()).times
    1
    """

    bodies: tuple[Body, ...]
    carries: tuple[tuple[int, int], ...] = ()
    lazy: bool = False
    times: int = 1


Describe = Callable[[Any], Entry | None]  # None: the equation is not entered


def with_bodies(eqn: Any, entry: Entry, jaxprs: Sequence[Jaxpr]) -> dict[str, Any]:
    """The parameters of an equation with other jaxprs for its bodies."""
    params = dict(eqn.params)
    for body, jaxpr in zip(entry.bodies, jaxprs, strict=True):
        if not body.param:
            continue
        if body.item is None:
            params[body.param] = jaxpr
        else:
            items = enumerate(params[body.param])
            params[body.param] = tuple(jaxpr if i == body.item else old for i, old in items)
    return params


def with_replaced_bodies(eqn: Any, entry: Entry, jaxprs: Sequence[Jaxpr]) -> dict[str, Any]:
    """The same, for an equation of a program: a checkpoint's of JAX 0.11.2 and newer too."""
    hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
    if hi is not None and hi.kind == "checkpoint":
        return {**eqn.params, "_prim": with_hi_checkpoint(eqn.params["_prim"], jaxprs[0], 0)}
    return with_bodies(eqn, entry, jaxprs)


def _one_to_one(eqn: Any, param: str) -> Body:
    if param not in eqn.params:
        raise ValueError(
            f"{eqn.primitive} is registered with its jaxpr in the parameter {param!r}; expected one of its parameters: "
            f"{', '.join(eqn.params)}. Write register_higher_order(primitive, 'the right one')."
        )
    return Body(eqn.params[param], range(len(eqn.invars)), range(len(eqn.outvars)), param)


def call(param: str, lazy: bool = False) -> Describe:
    """A body whose operands and results are those of the equation; a parameter `length` says how often it runs."""
    return lambda eqn: Entry((_one_to_one(eqn, param),), lazy=lazy, times=eqn.params.get("length", 1))


def describe_hi(eqn: Any) -> Entry | None:
    """What a `call_hi_primitive` has inside: a checkpoint, or a function with a user's rules."""
    inside = inside_hi(eqn.params["_prim"])
    if inside is None:
        return None
    body = Body(inside.jaxpr, range(len(eqn.invars)), range(len(eqn.outvars)), "")
    return Entry((body,), lazy=inside.kind == "custom_vjp")


def describe_cond(eqn: Any) -> Entry:
    operands, results = range(1, len(eqn.invars)), range(len(eqn.outvars))
    return Entry(
        tuple(Body(branch, operands, results, "branches", i) for i, branch in enumerate(eqn.params["branches"]))
    )


def describe_scan(eqn: Any) -> Entry:
    consts, carry = scan_counts(eqn.params)
    carries = tuple((consts + i, i) for i in range(carry))
    return Entry((_one_to_one(eqn, "jaxpr"),), carries, times=eqn.params["length"])


def describe_shard_map(eqn: Any) -> Entry:
    devices = math.prod(eqn.params["mesh"].shape[axis] for axis in eqn.params["newly_manual_axes"])
    return Entry((_one_to_one(eqn, "jaxpr"),), times=devices)


def describe_while(eqn: Any) -> Entry:
    cond_consts, body_consts = eqn.params["cond_nconsts"], eqn.params["body_nconsts"]
    first = cond_consts + body_consts
    carry = range(first, len(eqn.invars))
    return Entry(
        (
            Body(eqn.params["cond_jaxpr"], (*range(cond_consts), *carry), (), "cond_jaxpr"),
            Body(eqn.params["body_jaxpr"], (*range(cond_consts, first), *carry), range(len(carry)), "body_jaxpr"),
        ),
        tuple((operand, operand - first) for operand in carry),
    )


def functions_in(eqn: Any) -> list[Jaxpr]:
    """The jaxprs inside of any equation, for whoever only wants to look into them."""
    if traits_of(eqn.primitive).plain_params:
        return []
    hi = inside_hi(eqn.params["_prim"]) if "_prim" in eqn.params else None
    return [hi.jaxpr] if hi is not None else list(jec.jaxprs_in_params(eqn.params))
