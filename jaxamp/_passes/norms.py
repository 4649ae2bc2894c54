"""Round the cotangent of a norm's result once, where it comes from a low matmul through an activation or a transpose.

    y = silu(norm(x) * scale + offset) @ w

The backward pass of a norm reads the cotangent of its result many times: for the scale, the offset, the mean, the
variance, and last for `x`. With an activation in between, or another axis last, as in an MLP mixer, XLA writes it in
float32, although what comes out of the matmul is rounded: once, or once for each reader. Here it is written once, and
rounded as well. An activation by comparison, as a relu is, XLA repeats for each reader. Writing its cotangent once was
tried, and is slower: 22.0 and 21.5 ms in a ResNet-50 (H200).
"""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from jax import lax

from .._compat import Literal, Var, open_jaxpr
from .._formats import float_dtype, is_complex
from .._plan.bodies import functions_in
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Reader, Readers, Runner, map_steps
from .._primitives.barriers import materialize_cotangent
from .._traits import traits_of
from .._traits.matmul_cost import size_of


def round_norm_cotangents(plan: Plan) -> Plan:
    """Let the cotangents of norms' results be low, where activations or transposes before low operations read these."""
    if not plan.touched or plan.setting.keep == "all":
        return plan
    wide = [i for i in plan.parts if isinstance(i, int) and _may_end_norm(plan, i)]
    readers = plan.readers() if wide else {}
    made = {v: i for i, eqn in enumerate(plan.eqns) for v in eqn.outvars} if wide else {}
    chains = {i: _chain(plan, i, readers, made) for i in wide if is_activated(plan, i, readers)}
    inside = {j for chain in chains.values() for j in chain or ()}
    found = {i for i, chain in chains.items() if chain is not None and i not in inside}
    if not found:
        return plan
    return plan._replace(parts=map_steps(plan.parts, lambda i: RoundedCotangent((i,), i) if i in found else i))


class RoundedCotangent(NamedTuple):
    """An operation, such as the last one of a norm, whose result has a cotangent that is written once, rounded."""

    parts: tuple[Part, ...]
    last: int

    def with_parts(self, parts: tuple[Part, ...]) -> "RoundedCotangent":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        runner.run_parts(plan, self.parts, env)
        ((var, value),) = plan.values_of(self.last)
        with runner.at(plan, self.last):
            held = materialize_cotangent(env.read(var), plan.setting.formats.compute_dtype, row_major=False)
        env.write(var, held, value)


def _may_end_norm(plan: Plan, i: int) -> bool:
    """Whether a step combines one large operand with a repeated one in float32, as the offset of a norm is added."""
    eqn, step = plan.eqns[i], plan.steps[i]
    traits = traits_of(eqn.primitive)
    if not (traits.sum or traits.product) or step.mode is Mode.RULE or step.is_pinned or step.outs[0].is_low:
        return False
    return plan.setting.formats.may_lower(eqn.outvars[0]) and sum(1 for _ in _large(eqn)) == 1


def _large(eqn: Any) -> Iterator[Var]:
    """The operands that have as many entries as the result, other than those that are repeated by hand."""
    size = size_of(eqn.outvars[0].aval)
    return (v for v in eqn.invars if not isinstance(v, Literal) and size_of(v.aval) == size > 1)


def is_activated(plan: Plan, i: int, readers: Readers) -> bool:
    """Whether all that is made of a result is read low after element-wise work that XLA does not repeat.

    Some of it is nonlinear, or a transpose. An activation may be held low instead.
    """
    last, is_costly = len(plan.eqns), False
    waiting, seen = [plan.eqns[i].outvars[0]], set[int]()
    while waiting:
        for reader in readers.get(waiting.pop(), []):
            if reader.format is not None and reader.format.low:
                is_costly = is_costly or _is_turned(plan, reader, readers)
                continue
            if reader.place == last or not _is_free_activation(plan, reader.place):
                return False
            if reader.place not in seen:
                seen.add(reader.place)
                eqn, bends = plan.eqns[reader.place], _bends(plan.eqns[reader.place])
                is_costly = is_costly or bends or _turns(eqn)
                is_held_low = all(out.is_low for out in plan.steps[reader.place].outs)
                waiting += [] if bends and is_held_low else eqn.outvars
    return is_costly


def _is_free_activation(plan: Plan, i: int) -> bool:
    eqn, step = plan.eqns[i], plan.steps[i]
    same_size = all(size_of(out.aval) == size_of(v.aval) for out in eqn.outvars for v in _large(eqn))
    return is_elementwise(eqn) and same_size and step.mode is not Mode.RULE and not step.is_pinned


def is_elementwise(eqn: Any) -> bool:
    """Whether it is, or calls a function that is, element by element, or moves all entries. Or makes only integers."""
    if eqn.outvars and all(float_dtype(v.aval) is None and not is_complex(v.aval) for v in eqn.outvars):
        return True
    traits = traits_of(eqn.primitive)
    if traits.plain_call or traits.own_jvp:
        return all(is_elementwise(inner) for inner in _equations_in(eqn))
    return traits.elementwise or traits.compares or traits.keeps_all_entries


def _bends(eqn: Any) -> bool:
    """Whether an equation is nonlinear, or has a nonlinear one inside."""
    return has(eqn, lambda inner: traits_of(inner.primitive).nonlinear)


def _turns(eqn: Any) -> bool:
    """Whether it moves the last axis. XLA turns others where they are read."""
    if eqn.primitive is not lax.transpose_p:
        return False
    permutation = eqn.params["permutation"]
    return len(permutation) > 0 and permutation[-1] != len(permutation) - 1


def _is_turned(plan: Plan, reader: Reader, readers: Readers) -> bool:
    """Whether what reads a value turns it, perhaps after moving it."""
    while reader.place < len(plan.eqns):
        eqn = plan.eqns[reader.place]
        if _turns(eqn):
            return True
        following = [r for v in eqn.outvars for r in readers.get(v, [])]
        if not traits_of(eqn.primitive).moves or len(following) != 1:
            return False
        (reader,) = following
    return False


def _reduces(eqn: Any) -> bool:
    return has(eqn, lambda inner: traits_of(inner.primitive).reduces)


def has(eqn: Any, is_one: Callable[[Any], bool]) -> bool:
    """Whether an equation is one of a kind, or calls a function that has one."""
    return is_one(eqn) or any(has(inner, is_one) for inner in _equations_in(eqn))


def _equations_in(eqn: Any) -> list[Any]:
    return [inner for body in functions_in(eqn) for inner in open_jaxpr(body).eqns]


def _chain(plan: Plan, i: int, readers: Readers, made: dict[Var, int]) -> set[int] | None:
    """The steps of a norm before its last one, `i`; None if it is not the last step of a norm.

    Those that shift and scale a large value, which is reduced as well: for its mean or its square.
    """
    var, chain = plan.eqns[i].outvars[0], set[int]()
    while var in made:
        place = made[var]
        eqn = plan.eqns[place]
        traits, large = traits_of(eqn.primitive), list(_large(eqn))
        if not (traits.sum or traits.product or traits.keeps_all_entries or traits.passes_on) or len(large) != 1:
            return None
        chain |= {place} - {i}
        (var,) = large
        if _is_reduced(plan, var, readers):
            return chain
    return None


def _is_reduced(plan: Plan, var: Var, readers: Readers) -> bool:
    """Whether a value, or its square, is reduced."""
    for reader in readers[var]:
        eqn = plan.eqns[reader.place] if reader.place < len(plan.eqns) else None
        if eqn is None:
            continue
        is_square = is_elementwise(eqn) and all(v is var for v in eqn.invars) and len(eqn.invars) + _bends(eqn) > 1
        if _reduces(eqn) or (is_square and any(_reduces(plan.eqns[r.place]) for r in _in_plan(plan, readers, eqn))):
            return True
    return False


def _in_plan(plan: Plan, readers: Readers, eqn: Any) -> Iterator[Reader]:
    return (r for v in eqn.outvars for r in readers.get(v, []) if r.place < len(plan.eqns))
