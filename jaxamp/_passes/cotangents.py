"""Let a bias and the matmul before it share one cotangent.

The cotangent of a sum with something that is repeated, such as a bias, goes two ways: it is summed for the bias, and it
is the cotangent of an operation that runs low. Both read one array, rounded once. And an operand that is repeated along
an axis is repeated before it is rounded: its gradient, a sum along that axis, is then a sum of float32. To scores of
attention, a sum of several repeated arrays may be added as well, `c[:, None] - c`, and masks may follow.

The cotangents of convolutions are left alone: written for both, they would not have the layout that suits these. So
are those that come from a relu, or an activation whose result is kept: XLA writes them, rounded, in the kernel that
sums them for the bias. Not those that come from a gelu, or another float32 activation that is costly: XLA would write
these in float32, or the exponentials of which they are made.
"""

import heapq
from collections.abc import Sequence, Set
from typing import Any, NamedTuple

import numpy as np
from jax import lax

from .._compat import Literal, Var, open_jaxpr
from .._formats import Format, cast, float_dtype
from .._plan.bodies import functions_in
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Readers, Runner, map_steps
from .._plan.sensitivity import FREE
from .._primitives.barriers import materialize_cotangent
from .._traits import traits_of
from .._traits.matmul_cost import size_of
from .activations import Activation
from .norms import is_activated


def share_cotangents(plan: Plan) -> Plan:
    """Run operations that repeat an operand such that the cotangents of both are one array."""
    if not plan.touched:
        return plan
    crossed = _crossed(plan)
    found = {
        i
        for i, (eqn, step) in enumerate(zip(plan.eqns, plan.steps, strict=True))
        if traits_of(eqn.primitive).broadcasts
        and step.mode is not Mode.RULE
        and (any(map(_is_repeated(eqn), eqn.invars)) or _is_any(crossed, eqn.invars))
    }
    if not found:
        return plan
    scaled, readers = _scaled(plan), plan.readers()
    others = _no_biases(plan, _scaled(plan, float32_too=True))
    convolved = _convolved(plan)
    not_convolved = others - convolved
    kept = frozenset(part.last for part in plan.parts if isinstance(part, Activation))

    def shared(i: int) -> Part:
        if i not in found:
            return i
        atoms = plan.eqns[i].invars
        alone = _is_any(not_convolved, atoms) and not _is_any(crossed, atoms)
        alone = alone or _is_chosen(plan, i, readers, kept)
        if not alone and _is_any(convolved, plan.eqns[i].invars):
            alone = not is_activated(plan, i, readers)
        return SharedCotangent((i,), others, scaled, crossed, alone)

    return plan._replace(parts=map_steps(plan.parts, shared))


def _convolved(plan: Plan) -> frozenset[Var]:
    """Results of convolutions, reshaped or not."""
    found: set[Var] = set()
    for eqn in plan.eqns:
        traits = traits_of(eqn.primitive)
        if traits.convolves or (traits.keeps_all_entries and _is_any(found, eqn.invars)):
            found.update(eqn.outvars)
    return frozenset(found)


def _no_biases(plan: Plan, multiplied: Set[Var]) -> frozenset[Var]:
    """Results that have no cotangent in common with a bias or a table of parameters.

    Those of convolutions, reshaped or not; few numbers that were repeated by hand; and what is made of activations,
    such as means, but not by a matmul (`multiplied`), as a bias of attention for each pair is.
    """
    found: set[Var] = set()
    for i, eqn in enumerate(plan.eqns):
        for var, value in plan.values_of(i):
            if eqn.primitive is lax.broadcast_in_dim_p:
                (atom, *_) = eqn.invars
                is_one = size_of(var.aval) > size_of(atom.aval) or _is_any(found, [atom])
            else:
                of_activations = value.sensitivity is not FREE and var not in multiplied
                moved = traits_of(eqn.primitive).keeps_all_entries and _is_any(found, eqn.invars)
                is_one = of_activations or moved or traits_of(eqn.primitive).convolves
            if is_one:
                found.add(var)
    return frozenset(found)


def _scaled(plan: Plan, float32_too: bool = False) -> frozenset[Var]:
    """Low results that were scaled by one number, moved, or had a bias added, perhaps in float32: scores of attention.

    Or, `float32_too`, results of matmuls of any dtype.
    """
    found: set[Var] = set()
    for i, eqn in enumerate(plan.eqns):
        follows = _is_any(found, _followed(eqn))
        is_one = (float32_too and traits_of(eqn.primitive).matrix_unit) or follows
        found.update(var for var, value in plan.values_of(i) if value.is_low or is_one)
    return frozenset(found)


def _followed(eqn: Any) -> Sequence[Any]:
    """The one operand that an equation moves, scales by a number, or adds few numbers to; nothing if it does not."""
    traits, arrays = traits_of(eqn.primitive), [v for v in eqn.invars if not isinstance(v, Literal)]
    if traits.keeps_all_entries:
        return arrays if arrays == [*eqn.invars[:1]] else []
    if not (traits.sum or traits.product):
        return []
    large = [v for v in arrays if v.aval.shape == eqn.outvars[0].aval.shape]
    if len(large) != 1 or (traits.product and any(size_of(v.aval) > 1 for v in arrays if v not in large)):
        return []
    return [] if eqn.primitive is lax.div_p and eqn.invars[0] is not large[0] else large


def _crossed(plan: Plan) -> frozenset[Var]:
    """Float32 sums of several arrays, each of which is repeated along some axis, such as `c[:, None] - c`.

    The gradient of each is a sum along its own axes: none of them is part of the kernel that makes the cotangent.
    """
    found: set[Var] = set()
    for i, eqn in enumerate(plan.eqns):
        traits = traits_of(eqn.primitive)
        arrays = [v for v in eqn.invars if not isinstance(v, Literal) and size_of(v.aval) > 1]
        if traits.sum and len(arrays) == 2 and not plan.steps[i].outs[0].is_low:
            is_repeated = list(map(_is_repeated(eqn), arrays))
            is_one = all(is_repeated) or (any(is_repeated) and _is_any(found, arrays))
        else:
            is_one = traits.keeps_all_entries and _is_any(found, arrays)
        found.update(eqn.outvars if is_one else [])
    return frozenset(found)


def _is_any(variables: Set[Var], atoms: Sequence[Any]) -> bool:
    # A constant in an equation can't be looked up: it may hold an array.
    return any(not isinstance(atom, Literal) and atom in variables for atom in atoms)


def _is_repeated(eqn: Any) -> Any:
    shape = eqn.outvars[0].aval.shape
    return lambda v: not isinstance(v, Literal) and v.aval.shape != shape and float_dtype(v.aval) is not None


_CHOICES = lax.max_p, lax.min_p, lax.clamp_p, lax.select_n_p


def _is_chosen(plan: Plan, i: int, readers: Readers, kept: Set[int]) -> bool:
    """Whether all that is made of a result goes through an activation, after cheap work or none.

    One by comparison, or one of the steps `kept`, whose derivative is cheap as well. A choice by a mask that something
    else has made is no activation.
    """
    places = {reader.place for v in plan.eqns[i].outvars for reader in readers.get(v, [])}
    waiting, seen, chosen, compared = sorted(places), places, False, set[Var]()
    while waiting:  # in the order of the program: comparisons come before the choices that they are for
        place = heapq.heappop(waiting)
        if place == len(plan.eqns):
            return False
        eqn = plan.eqns[place]
        if traits_of(eqn.primitive).compares:
            compared.update(eqn.outvars)
        elif place in kept or _chooses_by_value(eqn, compared):
            chosen = True
        elif _is_cheap(eqn) or _is_choice(eqn):
            new = {reader.place for v in eqn.outvars for reader in readers.get(v, [])} - seen
            seen |= new
            for follower in new:
                heapq.heappush(waiting, follower)
        else:
            return False
    return chosen


def _is_choice(eqn: Any) -> bool:
    """Whether it chooses between numbers, after cheap work or none, in a function or not."""
    if inside := _inside(eqn):
        return all(_is_choice(inner) or _is_cheap(inner) for inner in inside) and any(map(_is_choice, inside))
    return eqn.primitive in _CHOICES


def _chooses_by_value(eqn: Any, compared: Set[Var]) -> bool:
    """Whether it is an activation by comparison, such as a relu: XLA makes it again for each reader.

    `compared`: bools that say how the value compares with others. A function may also make some itself.
    """
    if inside := _inside(eqn):
        own = {v for inner in inside if traits_of(inner.primitive).compares for v in inner.outvars}
        is_given = _is_any(compared, eqn.invars)
        return _is_choice(eqn) and any(_is_choice(e) and (is_given or _chooses_by_value(e, own)) for e in inside)
    if eqn.primitive is lax.select_n_p:
        return _is_any(compared, eqn.invars[:1])
    return eqn.primitive in _CHOICES


def _inside(eqn: Any) -> list[Any]:
    """The equations of a function that is called, perhaps with a derivative of its own."""
    traits = traits_of(eqn.primitive)
    bodies = functions_in(eqn) if traits.plain_call or traits.own_jvp else []
    return [inner for body in bodies for inner in open_jaxpr(body).eqns]


def _is_cheap(eqn: Any) -> bool:
    traits = traits_of(eqn.primitive)
    return (traits.elementwise or traits.compares) and not traits.transcendental


class SharedCotangent(NamedTuple):
    """One operation that repeats an operand along an axis."""

    parts: tuple[Part, ...]
    others: frozenset[Var]  # see `_no_biases`
    scaled: frozenset[Var]  # see `_scaled`
    crossed: frozenset[Var]  # see `_crossed`
    alone: bool  # whether the cotangent of a sum is left as it is

    def with_parts(self, parts: tuple[Part, ...]) -> "SharedCotangent":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        (i,) = self.parts
        if not isinstance(i, int):  # a later pass has put a region there
            return runner.run_parts(plan, self.parts, env)
        eqn, step, low = plan.eqns[i], plan.steps[i], plan.setting.formats.low
        with runner.at(plan, i):
            operands = [
                _operand(env, eqn, v, format_, low, not isinstance(v, Literal) and v not in self.others)
                for v, format_ in zip(eqn.invars, step.reads, strict=True)
            ]
            outs = runner.operate(plan, i, operands)
            if traits_of(eqn.primitive).sum and not self.alone:
                free = plan.setting.keep != "all" and not step.is_pinned
                nothing = frozenset[Var]()
                scaled, crossed = (self.scaled, self.crossed) if free else (nothing, nothing)
                outs = _with_one_cotangent(env, eqn, step.reads, outs, low, scaled, crossed)
            for (var, value), x in zip(plan.values_of(i), outs, strict=True):
                env.write(var, cast(x, value.dtype), value)


def _operand(env: Environment, eqn: Any, atom: Any, format_: Format | None, low: Format, may_be_table: bool) -> Any:
    """An operand in the format in which it is read, repeated before it is rounded."""
    if not _is_repeated(eqn)(atom):
        return env.read(atom, format_)
    x, shape = env.read(atom), eqn.outvars[0].aval.shape
    first = _first_kept_axis(x.shape, shape)
    assert format_ is not None
    rounded = x.dtype == np.float32 and format_.low
    is_table = may_be_table and first is not None and first < x.ndim - 1  # such as one of positions
    if x.dtype == format_.dtype and not is_table:
        return x
    x = lax.broadcast_in_dim(x, shape, range(x.ndim))
    if is_table:
        x = materialize_cotangent(x, low.dtype if rounded else x.dtype, row_major=first is not None)
    return cast(x, format_.dtype)


def _with_one_cotangent(
    env: Environment,
    eqn: Any,
    reads: Sequence[Format | None],
    outs: Sequence[Any],
    low: Format,
    scaled: Set[Var],
    crossed: Set[Var],
) -> Sequence[Any]:
    """The results of a sum. If one operand is repeated and the other is low, both get the same rounded cotangent.

    `scaled`: operands with which the sum may be in float32, because it is computed again from low values. `crossed`:
    those that count as repeated.
    """
    shape = eqn.outvars[0].aval.shape
    for atom, other, format_ in zip(eqn.invars, eqn.invars[::-1], reads, strict=True):
        if isinstance(atom, Literal) or isinstance(other, Literal):
            continue
        mine = env.format_of(atom)
        if mine is None or env.format_of(other) is None:
            continue
        is_crossed = atom in crossed and other.aval.shape == shape
        repeated = mine.dtype == np.float32 and (atom.aval.shape != shape or is_crossed)
        if repeated and ((format_ is not None and format_.low) or _is_any(scaled, [other])):
            row_major = _first_kept_axis(atom.aval.shape, shape) is not None
            readers = (env.read(atom), env.read(other))
            return [materialize_cotangent(out, low.dtype, row_major, readers) for out in outs]
    return outs


def _first_kept_axis(shape: Sequence[int], result: Sequence[int]) -> int | None:
    """The axis from which on an operand has the shape of the result, if it is repeated along all axes before."""
    first = next((i for i, size in enumerate(shape) if size != 1), len(shape))
    return first if 0 < first < len(shape) and tuple(shape[first:]) == tuple(result[first:]) else None
