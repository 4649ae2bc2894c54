"""Round what is chosen or moved before that is done, where the result is read low.

    conv(relu(norm(conv(x)) + x))    conv(max_pool(relu(norm(x))))    concatenate([h[senders], h[receivers], d]) @ w

Rounding keeps the order of numbers and their signs: a relu of rounded numbers is the rounded relu, and the maximum of
rounded numbers is the rounded maximum. And it does not matter where a number stands. So the forward pass computes the
same.

In the backward pass the cotangent that comes out of a relu is low, as the one that went in. The sums of a norm and the
skip connection read it as it is; in float32, XLA would write the mask as well, and make the cotangent again for each of
its readers. And XLA does not make a pooling, a lookup or a transpose one kernel with the work before it: what it reads
is written, and read again in the backward pass. Rounded, that is half the bytes.

Choices at other numbers than zero are left alone, such as that of a clip: numbers near its ends round to them, which
changes its derivative. A step of a ResNet-50 takes 21.3 ms and not 22.9 (H200, jax 0.11). So are moves of parameters
alone, whose gradients are float32; moves of a value that has many readers, because their cotangents would be added low;
small parts of a large value, all of which would be rounded; pads, whose value has a sum for a gradient; and joins of
what is not in memory anyway, such as that of a rotary embedding: XLA makes them one kernel with the work before. What
is looked up is in memory, and so is what something else reads too, such as the skip connection of a U-Net. A lookup
rounds inside: its gradient is summed in float32, and is not rounded (`lookups.py`).
"""

import functools
from collections.abc import Sequence, Set
from typing import Any

from jax import lax

from .._compat import Literal, open_jaxpr
from .._formats import Format, float_dtype
from .._jaxpr import Memo
from .._plan.classify import Mode
from .._plan.plan import Plan, Reader, Readers, Step
from .._plan.reasons import Reason, Why
from .._plan.sensitivity import FREE, LOW, OUT_OF_RANGE, Value
from .._primitives.pool import POOLS
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .lookups import look_up

_AT_ZERO = lax.max_p, lax.min_p, lax.abs_p, lax.neg_p
_WHY = Reason(Why.BY_PASS, "rounded before it, because its result is read low: that gives the same numbers")
_JOINS = "concatenate", "stack"  # JAX does not export the second
_FEW = 8  # readers of a value that is moved
_COPIES = 8  # of an entry that is repeated
_PART = 2  # a value may be that many times as large as what is taken of it


def round_early(plan: Plan) -> Plan:
    """Let moves, pools and activations like `relu` read their operands low, if their results are only read low."""
    steps = [part.parts[0] if not isinstance(part, int) and len(part.parts) == 1 else part for part in plan.parts]
    found = [i for i in steps if isinstance(i, int) and _may_round(plan, i)] if plan.touched else []
    if not found:
        return plan
    readers, lowered = plan.readers(), Memo()  # equations of a kind share a step
    changed: dict[int, Step] = {}
    looked_up = _looked_up(plan)
    for i in reversed(found):
        eqn, step = plan.eqns[i], plan.steps[i]
        if eqn.primitive.name in _JOINS and not any(_is_there(v, looked_up, readers) for v in _floats(eqn.invars)):
            continue
        is_read_low = all(_is_read_low(plan, v, readers.get(v, []), changed) for v in _floats(eqn.outvars))
        if (is_read_low or step.outs[0].is_low) and not _shares(eqn, step, readers):
            change = functools.partial(_low_step, eqn, step, plan.setting.formats.low)
            changed[i] = lowered.get(step, None, change)
    return plan.with_steps(changed)


def _may_round(plan: Plan, i: int) -> bool:
    """Whether a step chooses or moves, and does so in float32."""
    eqn, step, formats = plan.eqns[i], plan.steps[i], plan.setting.formats
    read, made = _floats(eqn.invars), _floats(eqn.outvars)
    if step.mode is Mode.RULE or step.is_pinned or not (read and made and all(map(formats.may_lower, read + made))):
        return False
    if any(f is not None and f.low for f in step.reads):
        return False
    return eqn.primitive in POOLS or _chooses(eqn, step) or _moves(eqn, step)


def _floats(atoms: Sequence[Any]) -> list[Any]:
    return [v for v in atoms if float_dtype(v.aval) is not None and not isinstance(v, Literal)]


def _is_read_low(plan: Plan, v: Any, readers: list[Reader], changed: dict[int, Step]) -> bool:
    """Whether something reads a variable, and only low."""
    formats = [
        changed[r.place].reads[plan.eqns[r.place].invars.index(v)] if r.place in changed else r.format for r in readers
    ]
    return bool(formats) and all(f is not None and f.low for f in formats)


def _looked_up(plan: Plan) -> set[Any]:
    """What is looked up, perhaps turned or reshaped afterwards."""
    found = set[Any]()
    for eqn, step in zip(plan.eqns, plan.steps, strict=True):
        keeps = traits_of(eqn.primitive).keeps_all_entries and not found.isdisjoint(_floats(eqn.invars))
        if keeps or _looks_up(eqn, step):
            found.update(eqn.outvars)
    return found


def _is_there(v: Any, looked_up: Set[Any], readers: Readers) -> bool:
    """Whether a part of a join is in memory: it was looked up, or something else reads it, as in a U-Net."""
    return v in looked_up or len({reader.place for reader in readers[v]}) > 1


# -- choices


def _chooses(eqn: Any, step: Step) -> bool:
    """Whether it is a function of one array that only compares its numbers with zero, or changes their signs."""
    if [v for v in eqn.invars if not isinstance(v, Literal)] != [*eqn.invars[:1]] or len(eqn.outvars) != 1:
        return False
    if step.mode is not Mode.ENTER:
        return eqn.primitive in _AT_ZERO and all(v.val == 0 for v in eqn.invars[1:])
    return bool(body := _called(eqn, step)) and all(_chooses(e, s) and not s.is_pinned for e, s in body)


def _called(eqn: Any, step: Step) -> list[tuple[Any, Step]]:
    """The equations and steps of the body of a function that is called; none if passes have changed it."""
    traits = traits_of(eqn.primitive)
    if step.mode is not Mode.ENTER or not (traits.plain_call or traits.own_jvp) or len(step.bodies) != 1:
        return []
    (body,) = step.bodies
    return list(zip(body.eqns, body.steps, strict=True)) if all(isinstance(part, int) for part in body.parts) else []


# -- moves


def _moves(eqn: Any, step: Step) -> bool:
    """Whether its float results hold entries of the operands, and rounding these first gains something."""
    made, read = sum(size_of(v.aval) for v in eqn.outvars), max(size_of(v.aval) for v in _floats(eqn.invars))
    if _looks_up(eqn, step):
        return read <= made
    return read <= _PART * made and _only_moves(eqn, step) and step.outs[0].sensitivity is not FREE


def _only_moves(eqn: Any, step: Step) -> bool:
    if step.mode is Mode.ENTER:
        is_call = traits_of(eqn.primitive).plain_call
        return is_call and bool(body := _called(eqn, step)) and all(map(_only_moves_in, body))
    moves = traits_of(eqn.primitive).rearranges or _repeats(eqn)
    return moves and eqn.primitive is not lax.gather_p and not _is_clamped(step)


def _repeats(eqn: Any) -> bool:
    """Whether it repeats entries a few times, as a U-Net does to have larger images: the sums of so few may be low."""
    if eqn.primitive is not lax.broadcast_in_dim_p or len(eqn.invars) != 1:
        return False
    before, after = size_of(eqn.invars[0].aval), size_of(eqn.outvars[0].aval)
    return before > 1 and after <= _COPIES * before


def _is_clamped(step: Step) -> bool:
    """Whether the result may be out of range, so that what reads it low clamps it."""
    return step.outs[0].sensitivity is OUT_OF_RANGE


def _only_moves_in(inner: tuple[Any, Step]) -> bool:
    """Whether an equation of a body moves floats, or reads none but numbers."""
    eqn, step = inner
    if not _has_many(eqn):
        return True
    return bool(_floats(eqn.outvars)) and not step.is_pinned and (_chooses(eqn, step) or _only_moves(eqn, step))


def _has_many(eqn: Any) -> bool:
    """Whether it reads an array of floats."""
    return any(size_of(v.aval) != 1 for v in _floats(eqn.invars))


def _looks_up(eqn: Any, step: Step) -> bool:
    """Whether it is a lookup, or a function that has one, such as `jnp.take`, and does nothing else with floats."""
    if step.mode is not Mode.ENTER:
        return eqn.primitive is lax.gather_p and step.operation is None and not _is_clamped(step)
    inside = [(e, s) for e, s in _called(eqn, step) if _floats(e.invars) or _floats(e.outvars)]
    return traits_of(eqn.primitive).plain_call and len(inside) == 1 and _looks_up(*inside[0])


def _shares(eqn: Any, step: Step, readers: Readers) -> bool:
    """Whether it moves a value that many others read, too: the cotangents of all of them would be added low."""
    if eqn.primitive in POOLS or _chooses(eqn, step) or _looks_up(eqn, step):
        return False
    return any(len({reader.place for reader in readers[v]}) > _FEW for v in _floats(eqn.invars))


# -- the steps that are changed


def _low_step(eqn: Any, step: Step, low: Format) -> Step:
    """A step on low operands, or a lookup that rounds them. The plans of its bodies are those for low operands."""
    looks_up = _looks_up(eqn, step)
    rounds = lambda v: float_dtype(v.aval) is not None and not (step.bodies and size_of(v.aval) == 1)
    reads = tuple(low if rounds(v) and not looks_up else f for v, f in zip(eqn.invars, step.reads, strict=True))
    outs = tuple(_held_low(value, low) for value in step.outs)
    bodies = tuple(_low_body(body, low, looks_up) for body in step.bodies)
    operation = functools.partial(look_up, low.dtype) if looks_up and not bodies else None
    reason = step.reason if bodies else _WHY
    return step._replace(reads=reads, outs=outs, bodies=bodies, operation=operation, reason=reason, touched=True)


def _low_body(plan: Plan, low: Format, looks_up: bool) -> Plan:
    pairs = enumerate(zip(plan.eqns, plan.steps, strict=True))
    changed = {i: _low_step(eqn, step, low) for i, (eqn, step) in pairs if _has_many(eqn)}
    pairs_in = zip(plan.ins, open_jaxpr(plan.jaxpr).invars, strict=True)
    ins = tuple(value if looks_up or size_of(var.aval) == 1 else _held_low(value, low) for value, var in pairs_in)
    return plan.with_steps(changed)._replace(ins=ins, outs=tuple(_held_low(value, low) for value in plan.outs))


def _held_low(value: Value, low: Format) -> Value:
    return value if value.format is None else Value(LOW, low)
