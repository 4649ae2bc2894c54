"""The part of `send_low` that is about formats of eight bits: quantise first, and send then.

    scale(send(w)), quantize(send(w), scale)    ->    s = scale(w), send(quantize(w, s))

A weight that only quantised matmuls read goes over the wire with a byte for each entry. Where each device has a part of
it, as in a `shard_map`, the devices agree on the largest scale. The matmul is still given the weight as it was sent, to
differentiate by: that is not computed.
"""

from collections.abc import Callable, Sequence
from typing import Any

from .._compat import Literal, Var
from .._formats import float_dtype
from .._policy.communication import Communication
from .._primitives.in_format import is_alias
from .._primitives.quantize import EIGHT_BITS, LARGEST, QUANTIZE, SCALE
from .._primitives.quantized_matmul import is_quantized
from .._primitives.sent_low import sent_low
from .._traits import traits_of


def send_quantized(eqns: Sequence[Any], outs: Sequence[Any], asked: Callable[[Any], Communication]) -> list[Any]:
    """The equations of a jaxpr with these results, rewritten. `asked`: what the policy wants of an equation."""
    readers: dict[Var, list[tuple[Any, int]]] = {}
    source: dict[Var, Var] = {}  # of values that are others
    for eqn in eqns:
        if is_alias(eqn) and not isinstance(eqn.invars[0], Literal):
            source[eqn.outvars[0]] = source.get(eqn.invars[0], eqn.invars[0])
            continue
        for place, atom in enumerate(eqn.invars):
            if not isinstance(atom, Literal):
                readers.setdefault(source.get(atom, atom), []).append((eqn, place))
    returned = {source.get(v, v) for v in outs if not isinstance(v, Literal)}
    sent = {
        eqn.outvars[0]: eqn
        for eqn in eqns
        if _sends(eqn)
        and eqn.outvars[0] not in returned
        and _is_quantized_by_all(readers.get(eqn.outvars[0], ()))
        and asked(eqn).gather == "compute"
    }
    sent |= {v: sent[other] for v, other in source.items() if other in sent}
    return [new for eqn in eqns for new in _rewritten(eqn, sent, asked)] if sent else list(eqns)


def _sends(eqn: Any) -> bool:
    traits = traits_of(eqn.primitive)
    one = len(eqn.invars) == len(eqn.outvars) == 1 and float_dtype(eqn.invars[0].aval) is not None
    return traits.communicates and not traits.fixed_dtype and one and not isinstance(eqn.invars[0], Literal)


def _is_quantized_by_all(readers: Sequence[tuple[Any, int]]) -> bool:
    """Whether all that reads a value quantises it in eight bits with one scale, or is a matmul of the outcome."""
    kinds = {_kind(eqn, place) for eqn, place in readers}
    return None not in kinds and {"scale", "quantize"} <= kinds


def _kind(eqn: Any, place: int) -> str | None:
    if eqn.primitive in (SCALE, LARGEST):  # for this step, or for the next
        return "scale"
    if eqn.primitive is QUANTIZE and place == 0:
        return "quantize" if eqn.params["dtype"] in EIGHT_BITS and len(eqn.invars) == 2 else None
    return "matmul" if is_quantized(eqn.primitive) and place < 2 else None


def _rewritten(eqn: Any, sent: dict[Var, Any], asked: Callable[[Any], Communication]) -> list[Any]:
    is_sent = any(sent.get(v) is eqn for v in eqn.outvars)
    if is_sent and asked(eqn).reduce == "float32":
        params = {**eqn.params, "low": eqn.invars[0].aval.dtype, "reduce": "float32"}
        return [eqn.replace(primitive=sent_low(eqn.primitive, is_quantized=True), params=params)]
    is_rounding = eqn.primitive in (SCALE, LARGEST, QUANTIZE) and not isinstance(eqn.invars[0], Literal)
    if not is_rounding or eqn.invars[0] not in sent:
        return [eqn]
    send = sent[eqn.invars[0]]
    (whole,) = send.invars
    if eqn.primitive is not QUANTIZE:
        return [eqn.replace(invars=[whole], params={**eqn.params, "axes": _axes(send)})]
    low = eqn.params["dtype"]
    bits, scale = eqn.outvars
    part = Var(whole.aval.update(dtype=bits.aval.dtype, weak_type=False))
    quantized = eqn.replace(invars=[whole, *eqn.invars[1:]], outvars=[part, scale])
    params = {**send.params, "low": low, "reduce": "float32"}
    moved = send.replace(
        primitive=sent_low(send.primitive, stays_low=True), invars=[part], outvars=[bits], params=params
    )
    return [quantized, moved]


def _axes(send: Any) -> tuple[Any, ...]:
    """The mesh axes over which devices have different parts."""
    name = send.params.get("axis_name", ())
    return tuple(name) if isinstance(name, tuple | list) else (name,)
