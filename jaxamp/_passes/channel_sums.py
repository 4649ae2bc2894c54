"""Sum the cotangent of a norm over the batch once for all that is repeated along it.

    (x - mean) * rsqrt(variance + eps) * scale + offset

In a BatchNorm, all four are repeated along the batch and the pixels, and the gradient of each is a sum along them. XLA
sums four times, in two kernels or more, each of which reads the cotangent and `x`. Two sums are enough
(`_primitives/affine.py`), in one kernel: the numbers of a channel are combined first, and then applied to all entries.

    (x - mean) * a + offset,    a = rsqrt(variance + eps) * scale

Of other factors, the product may be beyond float32 where each step of the chain is not. So one of them has to come from
a root or a power, as that of a norm does, which is of the size of 1 / x.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import lax

from .._compat import Literal, Var
from .._formats import Format, cast
from .._plan.classify import Mode
from .._plan.plan import Environment, Part, Plan, Runner
from .._primitives.affine import affine
from .._traits import traits_of
from .centered import Square
from .norms import NormResult

_LINKS = lax.add_p, lax.sub_p, lax.mul_p, lax.div_p
_SUMS = lax.add_p, lax.sub_p
_FACTORS = lax.mul_p, lax.div_p, lax.convert_element_type_p
_ROOTS = lax.rsqrt_p, lax.sqrt_p, lax.pow_p, lax.integer_pow_p
_FEWEST = 3  # arrays that are repeated. Of two, there are no more than two sums.


def sum_channels_once(plan: Plan) -> Plan:
    """Combine the numbers by which a norm shifts and scales each channel."""
    places = {i: part for part in plan.parts if (i := _step_of(part)) is not None} if plan.touched else {}
    if not any(_link(plan, i) for i in places):
        return plan
    squares = {part.step for part in plan.parts if isinstance(part, Square)}  # these read what is shifted themselves
    readers = {v: [r for r in found if r.place not in squares] for v, found in plan.readers().items()}
    made = {v: i for i in places for v in plan.eqns[i].outvars}
    eqns = {v: eqn for eqn in plan.eqns for v in eqn.outvars}
    chains, taken = list[Chain](), set[int]()
    for i in sorted(places, reverse=True):
        steps = [] if i in taken else _chain(plan, i, places, made, readers)
        if steps and _is_in_range(plan, steps, eqns):
            taken.update(steps)
            after = places[i]
            inner = tuple(steps)
            chains.append(Chain((*inner[:-1], after), inner, after if isinstance(after, NormResult) else None))
    return plan.with_regions(chains)


class Link(NamedTuple):
    """An operation of a large operand and one that is repeated, or a number."""

    large: Var
    other: Any
    place: int  # of the large one
    axes: frozenset[int] | None  # along which it is repeated; None for a number


class Chain(NamedTuple):
    """Operations that shift and scale one large operand."""

    parts: tuple[Part, ...]
    steps: tuple[int, ...]
    after: NormResult | None  # what is done with the cotangent of the result

    def with_parts(self, parts: tuple[Part, ...]) -> "Chain":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        links = [link for i in self.steps if (link := _link(plan, i)) is not None]
        shape = _small_shape(links)
        with runner.at(plan, self.steps[-1]):
            x = env.read(links[0].large, plan.steps[self.steps[0]].reads[links[0].place])
            mean, factor, offset = (np.zeros((), x.dtype), np.ones((), x.dtype), np.zeros((), x.dtype))
            for i, link in zip(self.steps, links, strict=True):
                primitive, other = plan.eqns[i].primitive, env.read(link.other, plan.steps[i].reads[1 - link.place])
                if i == self.steps[0] and primitive in _SUMS:
                    mean = other if primitive is lax.sub_p else -other
                elif primitive in _SUMS:
                    offset = offset + other if primitive is lax.add_p else offset - other
                else:
                    factor = factor * other if primitive is lax.mul_p else factor / other
            small = [jnp.broadcast_to(jnp.asarray(r, x.dtype), shape) for r in (mean, factor, offset)]
            ((var, value),) = plan.values_of(self.steps[-1])
            env.write(var, cast(affine(x, *small), value.dtype), value)
        if self.after is not None:
            self.after.with_parts(()).run(runner, plan, env)


def _step_of(part: Part) -> int | None:
    if isinstance(part, NormResult):
        part = part.parts[0] if len(part.parts) == 1 else part
    return part if isinstance(part, int) else None


def _link(plan: Plan, i: int) -> Link | None:
    """The operation of a step, if it shifts or scales one operand in float32."""
    eqn, step = plan.eqns[i], plan.steps[i]
    if eqn.primitive not in _LINKS or step.mode is Mode.RULE or step.operation is not None or step.is_pinned:
        return None
    out = eqn.outvars[0].aval
    places = (0, 1) if eqn.primitive in (lax.add_p, lax.mul_p) else (0,)
    place = next(
        (k for k in places if _is_wide(eqn.invars[k], step.reads[k]) and eqn.invars[k].aval.shape == out.shape), None
    )
    if place is None:
        return None
    other = eqn.invars[1 - place]
    if isinstance(other, Literal) or not other.aval.shape:
        return Link(eqn.invars[place], other, place, None)
    if not _is_wide(other, step.reads[1 - place]) or other.aval.ndim != out.ndim:
        return None
    pairs = enumerate(zip(other.aval.shape, out.shape, strict=True))
    axes = frozenset(axis for axis, (own, whole) in pairs if own == 1 and whole != 1)
    return Link(eqn.invars[place], other, place, axes) if axes else None


def _is_wide(atom: Any, format_: Format | None) -> bool:
    """Whether it is a float32 array that is read as it is, or a low one that is widened."""
    return not isinstance(atom, Literal) and format_ is not None and atom.aval.dtype == format_.dtype == np.float32


def _chain(plan: Plan, i: int, places: dict[int, Part], made: dict[Var, int], readers: Any) -> list[int]:
    """The steps up to `i` that shift one operand, scale it, and shift it again; empty if that saves no sum."""
    steps, axes, arrays, scaled, shifted = list[int](), None, 0, False, False
    while True:
        link = _link(plan, i)
        if link is None:
            break
        is_sum = plan.eqns[i].primitive in _SUMS
        common = axes if link.axes is None else link.axes if axes is None else axes & link.axes
        if common is not None and not common:
            break
        steps.insert(0, i)
        axes, arrays, scaled = common, arrays + (link.axes is not None), scaled or not is_sum
        shifted = shifted or (is_sum and link.axes is not None)
        before = made.get(link.large)
        alone = before is not None and len(readers[link.large]) == 1 and isinstance(places[before], int)
        if (is_sum and scaled) or not alone or before is None or plan.steps[before].outs[0].is_low:
            break
        i = before
    return steps if arrays >= _FEWEST and axes and shifted else []


def _is_in_range(plan: Plan, steps: Sequence[int], made: dict[Var, Any]) -> bool:
    """Whether the factors of a chain can be multiplied: there is only one, or they are those of a norm."""
    factors = [link.other for i in steps if plan.eqns[i].primitive not in _SUMS and (link := _link(plan, i))]
    if len(factors) < 2:
        return True
    pending = [v for v in factors if not isinstance(v, Literal)]
    while pending:
        eqn = made.get(pending.pop())
        if eqn is None:
            continue
        if eqn.primitive in _ROOTS:
            return True
        if traits_of(eqn.primitive).moves or eqn.primitive in _FACTORS:
            pending.extend(v for v in eqn.invars if not isinstance(v, Literal))
    return False


def _small_shape(links: Sequence[Link]) -> tuple[Any, ...]:
    """The shape of the combined numbers: one along all axes along which each of them is repeated."""
    axes = frozenset.intersection(*(link.axes for link in links if link.axes is not None))
    aval: Any = links[0].large.aval
    return tuple(1 if axis in axes else size for axis, size in enumerate(aval.shape))
