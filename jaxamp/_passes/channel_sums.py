"""Sum the cotangent of a norm over the batch once for all that is repeated along it.

    (x - mean) * rsqrt(variance + eps) * scale + offset

In a BatchNorm, all four are repeated along the batch and the pixels, and the gradient of each is a sum along them. XLA
sums four times, in two kernels or more, each of which reads the cotangent and `x`. Two sums are enough
(`_primitives/affine.py`), in one kernel: the numbers of a channel are combined first, and then applied to all entries.

    (x - mean) * a + offset,    a = rsqrt(variance + eps) * scale

So it is in a GroupNorm, whose mean and variance are repeated along the channels of a group, and whose scale along the
batch: two sums along the pixels are enough for all of them. Between the two, libraries reshape the array: what is
combined has the axes into which both shapes can be split.

Of other factors, the product may be beyond float32 where each step of the chain is not. So one of them has to come from
a root or a power, as that of a norm does, which is of the size of 1 / x.
"""

import itertools
import math
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
from .norms import RoundedCotangent

_LINKS = lax.add_p, lax.sub_p, lax.mul_p, lax.div_p
_SUMS = lax.add_p, lax.sub_p
_FACTORS = lax.mul_p, lax.div_p, lax.convert_element_type_p
_ROOTS = lax.rsqrt_p, lax.sqrt_p, lax.pow_p, lax.integer_pow_p
_FEWEST = 3  # arrays that are repeated. Of two, there are no more than two sums.


def sum_channels_once(plan: Plan) -> Plan:
    """Combine the numbers by which a norm shifts and scales each channel."""
    places = {i: part for part in plan.parts if (i := _step_of(part)) is not None} if plan.touched else {}
    eqns = {v: eqn for eqn in plan.eqns for v in eqn.outvars} if places else {}
    links = {i: link for i in places if (link := _link(plan, i, eqns)) is not None}
    if not links:
        return plan
    squares = {part.step for part in plan.parts if isinstance(part, Square)}  # these read what is shifted themselves
    readers = {v: [r for r in found if r.place not in squares] for v, found in plan.readers().items()}
    made = {v: i for i in places for v in plan.eqns[i].outvars}
    chains, taken = list[Chain](), set[int]()
    for i in sorted(places, reverse=True):
        steps = [] if i in taken else _chain(plan, i, links, places, made, readers)
        if steps and _is_in_range(plan, steps, links, eqns):
            taken.update(steps)
            after = places[i]
            inner, own = tuple(steps), tuple((i, links[i]) for i in steps if i in links)
            chains.append(
                Chain((*inner[:-1], after), inner, own, after if isinstance(after, RoundedCotangent) else None)
            )
    return plan.with_regions(chains)


class Link(NamedTuple):
    """An operation of a large operand and one that is repeated, or a number."""

    large: Var
    other: Any
    place: int  # of the large one
    axes: frozenset[int] | None  # along which it is repeated; None for a number


Shape = tuple[Any, ...]


class Chain(NamedTuple):
    """Operations that shift and scale one large operand, perhaps reshaped between two of them."""

    parts: tuple[Part, ...]
    steps: tuple[int, ...]
    links: tuple[tuple[int, Link], ...]  # of those steps that are one
    after: RoundedCotangent | None  # what is done with the cotangent of the result

    def with_parts(self, parts: tuple[Part, ...]) -> "Chain":
        return self._replace(parts=parts)

    def run(self, runner: Runner, plan: Plan, env: Environment) -> None:
        links, fine = self.links, _common_shape(plan, self.steps)
        assert fine is not None
        axes = frozenset.intersection(*(_split(link, fine) for _, link in links if link.axes is not None))
        last: Any
        ((last, value),) = plan.values_of(self.steps[-1])
        with runner.at(plan, self.steps[-1]):
            x = env.read(links[0][1].large, plan.steps[self.steps[0]].reads[links[0][1].place])
            mean, factor, offset = (np.zeros((), x.dtype), np.ones((), x.dtype), np.zeros((), x.dtype))
            for i, link in links:
                primitive, other = plan.eqns[i].primitive, env.read(link.other, plan.steps[i].reads[1 - link.place])
                other = other if link.axes is None else _reshaped(other, _repeated(fine, _split(link, fine)))
                if i == self.steps[0] and primitive in _SUMS:
                    mean = other if primitive is lax.sub_p else -other
                elif primitive in _SUMS:
                    offset = offset + other if primitive is lax.add_p else offset - other
                else:
                    factor = factor * other if primitive is lax.mul_p else factor / other
            shape = _repeated(fine, axes)
            small = [jnp.broadcast_to(jnp.asarray(r, x.dtype), shape) for r in (mean, factor, offset)]
            if (own := _in_shape(last.aval.shape, fine, axes)) is not None:  # reshaped once less
                fine, shape = own
                small = [_reshaped(r, shape) for r in small]
            out = _reshaped(affine(_reshaped(x, fine), *small), last.aval.shape)
            env.write(last, cast(out, value.dtype), value)
        if self.after is not None:
            self.after.with_parts(()).run(runner, plan, env)


def _reshaped(x: Any, shape: Shape) -> Any:
    return x if x.shape == shape else lax.reshape(x, shape)


def _step_of(part: Part) -> int | None:
    if isinstance(part, RoundedCotangent):
        part = part.parts[0] if len(part.parts) == 1 else part
    return part if isinstance(part, int) else None


def _link(plan: Plan, i: int, made: dict[Var, Any]) -> Link | None:
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
    other, kept = _before_broadcasts(other, made)
    axes = frozenset(axis for axis, size in enumerate(out.shape) if size != 1 and axis not in kept)
    return Link(eqn.invars[place], other, place, axes) if axes else None


def _before_broadcasts(v: Any, made: dict[Var, Any]) -> tuple[Any, set[int]]:
    """What a variable repeats along some axes, perhaps itself, and the others of its axes."""
    axes: Sequence[int] = range(v.aval.ndim)
    while (eqn := made.get(v)) is not None and eqn.primitive is lax.broadcast_in_dim_p:
        (before, *rest) = eqn.invars
        if isinstance(before, Literal) or rest or before.aval.dtype != np.float32:
            break
        v, axes = before, [axes[axis] for axis in eqn.params["broadcast_dimensions"]]
    return v, {axis for axis, size in zip(axes, v.aval.shape, strict=True) if size != 1}


def _is_wide(atom: Any, format_: Format | None) -> bool:
    """Whether it is a float32 array that is read as it is, or a low one that is widened."""
    return not isinstance(atom, Literal) and format_ is not None and atom.aval.dtype == format_.dtype == np.float32


def _chain(
    plan: Plan, i: int, links: dict[int, Link], places: dict[int, Part], made: dict[Var, int], readers: Any
) -> list[int]:
    """The steps up to `i` that shift one operand, scale it, and shift it again; empty if that saves no sum."""
    found = _walk(plan, i, links, places, made, readers) if i in links else []
    while (fine := _common_shape(plan, found)) is None:
        found = found[1:]
    steps, axes, arrays, scaled, shifted = list[int](), None, 0, False, False
    for i in reversed(found):
        link = links.get(i)
        if link is None:
            steps.insert(0, i)
            continue
        is_sum, own = plan.eqns[i].primitive in _SUMS, None if link.axes is None else _split(link, fine)
        common = axes if own is None else own if axes is None else axes & own
        if common is not None and not common:
            break
        steps.insert(0, i)
        axes, arrays, scaled = common, arrays + (own is not None), scaled or not is_sum
        shifted = shifted or (is_sum and own is not None)
        if is_sum and scaled:
            break
    while steps and steps[0] not in links:
        steps = steps[1:]
    return steps if arrays >= _FEWEST and axes and shifted else []


def _walk(
    plan: Plan, i: int, links: dict[int, Link], places: dict[int, Part], made: dict[Var, int], readers: Any
) -> list[int]:
    """The steps up to `i` that shift, scale or reshape one operand that nothing else reads."""
    steps = [i]
    while True:
        read = links[steps[0]].large if steps[0] in links else plan.eqns[steps[0]].invars[0]
        before = made.get(read)
        if before is None or not isinstance(places[before], int) or plan.steps[before].outs[0].is_low:
            return steps
        if len(readers[read]) != 1 or not (before in links or _reshapes(plan, before)):
            return steps
        steps.insert(0, before)


def _reshapes(plan: Plan, i: int) -> bool:
    """Whether a step reshapes an array that is not split over devices, in float32."""
    eqn, step = plan.eqns[i], plan.steps[i]
    is_plain = eqn.primitive is lax.reshape_p and eqn.params["dimensions"] is None
    if not is_plain and eqn.primitive is not lax.squeeze_p:
        return False
    plain = step.is_plain and not step.is_pinned
    whole = all(axes is None for axes in eqn.invars[0].aval.sharding.spec)
    return plain and whole and _is_wide(eqn.invars[0], step.reads[0])


def _is_in_range(plan: Plan, steps: Sequence[int], links: dict[int, Link], made: dict[Var, Any]) -> bool:
    """Whether the factors of a chain can be multiplied: there is only one, or they are those of a norm."""
    factors = [links[i].other for i in steps if i in links and plan.eqns[i].primitive not in _SUMS]
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


# -- shapes


def _common_shape(plan: Plan, steps: Sequence[int]) -> Shape | None:
    """The axes into which the shapes of all results can be split; None if there are none."""
    shapes = {plan.eqns[i].outvars[0].aval.shape for i in steps}
    if len(shapes) < 2:
        return next(iter(shapes), ())
    if not all(isinstance(size, int) and size for shape in shapes for size in shape):
        return None
    strides = sorted({math.prod(shape[k:]) for shape in shapes for k in range(len(shape) + 1)}, reverse=True)
    pairs = list(itertools.pairwise(strides))
    return tuple(a // b for a, b in pairs) if all(a % b == 0 for a, b in pairs) else None


def _split(link: Link, fine: Shape) -> frozenset[int]:
    """The axes of the common shape along which the small operand is repeated."""
    aval: Any = link.large.aval
    shape, axes = aval.shape, link.axes or frozenset()
    if shape == fine:
        return axes
    strides = [math.prod(fine[k:]) for k in range(len(fine) + 1)]
    ends = [math.prod(shape[k:]) for k in range(len(shape) + 1)]
    inside = lambda k, axis: ends[axis] >= strides[k] and strides[k + 1] >= ends[axis + 1]
    return frozenset(k for axis in axes for k in range(len(fine)) if inside(k, axis))


def _in_shape(shape: Shape, fine: Shape, axes: frozenset[int]) -> tuple[Shape, Shape] | None:
    """A shape and that of what is repeated along some axes of the common shape; None if it has no such axes."""
    if shape == fine or math.prod(shape) == 0:
        return None
    kept = _repeated(fine, axes)
    ends, k = list[int](), 0
    for size in shape:
        first = k
        while math.prod(fine[first:k]) < size:
            k += 1
        if math.prod(fine[first:k]) != size or math.prod(kept[first:k]) not in (1, size):
            return None
        ends.append(math.prod(kept[first:k]))
    return shape, tuple(ends)


def _repeated(shape: Shape, axes: frozenset[int]) -> Shape:
    """The shape of what is repeated along these axes."""
    return tuple(1 if axis in axes else size for axis, size in enumerate(shape))
