"""The step of one array, in two passes.

The law: a step writes to memory only the parameter, its correction, the bytes of its moments, and one float32 per group
and moment. Moments in float32 are never written.

    pass 1: decode the moments, advance them, take the maximum of each group
    pass 2: decode and advance them again, write parameter, correction and bytes, now that the scales are known
    then:   write the scales in two bytes

Left to itself, XLA would keep the moments of pass 1 in memory for pass 2: 8 bytes written and 8 read per parameter,
while reading the state a second time costs 6. The barrier on the inputs of pass 2 makes them different arrays to XLA,
so it can't reuse the moments of pass 1. The barrier before the scales are written lets them overwrite the old ones,
which pass 2 has read by then. The dither goes through the first barrier too, or it would be one array that all steps
read, and XLA would make one kernel of the steps of several arrays, which waits for all of their gradients.

Every step ends in a barrier. XLA drops a cast to bfloat16 and back, and if two steps are compiled as one, there is such
a pair between a parameter and its next reader.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._dither import dither
from ._groups import Groups
from ._moment_codecs import Codec
from ._scale_formats import HALF, format_of
from ._state import LeafState
from ._storage import Storage
from ._update_rules import LARGEST, Moments, Scalars, UpdateRule, bounded
from ._weight_codec import LOW_DTYPES, change_and_correction, join, split_without_barrier


class StepContext(NamedTuple):
    """What the steps of several arrays have in common.

    Attributes:
        rule: The update rule.
        scalars: Its scalars for this step.
        decay: The weight decay of this step, or None.
        count: The number of this step, counted from one. Scales and codes are rounded by it.
        storage: How the moments are stored.
        scale: A factor for the gradients, or None.
        ok: Whether to take the step; None always takes it.
        return_change: Whether to return the change of the parameter instead of the parameter.
    """

    rule: UpdateRule
    scalars: Scalars
    decay: Any
    count: Any
    storage: Storage
    scale: Any = None
    ok: Any = None
    return_change: bool = False


class Leaf(NamedTuple):
    """The inputs of one array's step."""

    param: jax.Array
    grad: jax.Array
    state: LeafState
    groups: Groups


def group_tops(context: StepContext, leaf: Leaf) -> tuple[jax.Array, ...]:
    """Pass 1: `codec.top` of each group, for each moment; empty if the moments are not compressed."""
    if leaf.state.scales is None:
        return ()
    moments, _, _ = _advance(context, _view_in_groups(leaf))
    return tuple(codec.top(m, leaf.groups.view_axis) for codec, m in zip(context.storage.codecs, moments))


def is_gradient_finite(context: StepContext, grad: jax.Array, tops: tuple[jax.Array, ...]) -> jax.Array:
    """Whether a gradient is finite, read from pass 1 if possible: a moment is not finite where its gradient is not."""
    return (context.storage.codecs[0].is_finite(tops[0]) if tops else jnp.isfinite(grad)).all()


def step_leaf(
    context: StepContext, leaf: Leaf, tops: tuple[jax.Array, ...] | None = None
) -> tuple[jax.Array, LeafState]:
    """Return the new parameter, or its change in float32, and the new state. `tops` is the result of pass 1, if run."""
    codecs = context.storage.codecs
    if leaf.state.scales is None:
        moments, weight, length = _advance(context, leaf)
        out, correction = _write_weight(context, leaf, weight, length)
        moments = tuple(jnp.minimum(m, LARGEST) for m in context.rule.bound(moments))
        new = leaf.state._replace(correction=correction, **dict(zip(("mu", "nu"), moments)))
        return lax.optimization_barrier(_keep_old_unless_ok(context, leaf, out, new))

    # A whole pass works on the view in groups: a reshape in between would split the kernel.
    groups = leaf.groups
    tops = group_tops(context, leaf) if tops is None else tops
    up = dither(context.count, groups) if context.storage.dither else None
    (param, grad, state), tops, up = lax.optimization_barrier((leaf[:3], tops, up))
    view = _view_in_groups(Leaf(param, grad, state, groups))
    moments, weight, length = _advance(context, view)
    codes = (codec.encode(m, groups.spread(top), up) for codec, m, top in zip(codecs, moments, tops))
    out, correction = _write_weight(context, view, weight, length)
    new = view.state._replace(correction=correction, **dict(zip(("mu", "nu"), codes)))
    out, new = _keep_old_unless_ok(context, view, out, new)
    out, new = groups.unview(out), _map_param_shaped(groups.unview, new)
    out, new, tops = lax.optimization_barrier((out, new, tops))
    scales = format_of(state.scales).encode(stack_scales(codecs, tops), context.count)
    if context.ok is not None:
        scales = lax.select(context.ok, scales, state.scales)
    return out, new._replace(scales=scales)


def stack_scales(codecs: tuple[Codec, ...], tops: Sequence[jax.Array]) -> jax.Array:
    """The scales of all moments as one float32 array, not yet in their stored format.

    Where a second moment overflows, the first moments of its group become zero, as `UpdateRule.bound` says.
    """
    scales = [codec.scale(top) for codec, top in zip(codecs, tops)]
    if len(scales) == 2:
        scales[0] = jnp.where(tops[1] > 0.0, scales[0], 0.0)
    return jnp.stack(scales)


def decode_moments(state: LeafState, codecs: tuple[Codec, ...], groups: Groups) -> Moments:
    """The moments in float32. If they are compressed, the state must be viewed in groups."""
    stored = [m for m in (state.mu, state.nu) if m is not None]
    if state.scales is None:
        return tuple(stored)
    decode = format_of(state.scales).decode
    return tuple(codec.decode(m, groups.spread(decode(s))) for codec, m, s in zip(codecs, stored, state.scales))


def _view_in_groups(leaf: Leaf) -> Leaf:
    view = leaf.groups.view
    return Leaf(view(leaf.param), view(leaf.grad), _map_param_shaped(view, leaf.state), leaf.groups)


def _map_param_shaped(fn: Callable[[jax.Array], jax.Array], state: LeafState) -> LeafState:
    """Apply a function to each array of the state that has the parameter's shape."""
    arrays = {name: getattr(state, name) for name in ("mu", "nu", "correction")}
    return state._replace(**{name: None if x is None else fn(x) for name, x in arrays.items()})


def _advance(context: StepContext, leaf: Leaf) -> tuple[Moments, jax.Array, jax.Array]:
    """The next moments, the weight before the step and the length of the step."""
    g = leaf.grad.astype(jnp.float32)
    if context.scale is not None:
        g = g * context.scale
    weight = join(leaf.param, leaf.state.correction)
    if context.decay is not None and not context.rule.decoupled:
        g = bounded(g + context.decay * weight, LARGEST, unless=g)
    if leaf.state.scales is not None and format_of(leaf.state.scales) is HALF:
        g = bounded(g, HALF.largest, unless=g)
    moments = decode_moments(leaf.state, context.storage.codecs, leaf.groups)
    moments, length = context.rule.advance(g, moments, context.scalars)
    return moments, weight, length


def _write_weight(
    context: StepContext, leaf: Leaf, weight: jax.Array, length: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The new parameter, or its change, and the new correction."""
    dtype, correction = leaf.param.dtype, leaf.state.correction
    shrinks = context.decay is not None and context.rule.decoupled
    if context.return_change and correction is None:
        return (-(context.decay * weight) - length if shrinks else -length), None
    new = (weight * (1.0 - context.decay) if shrinks else weight) - length
    correction_dtype = None if correction is None else correction.dtype
    if context.return_change:
        return change_and_correction(leaf.param, new, correction_dtype)
    return split_without_barrier(new, dtype, correction_dtype) if dtype in LOW_DTYPES else (new, None)


def _keep_old_unless_ok(
    context: StepContext, leaf: Leaf, out: jax.Array, new: LeafState
) -> tuple[jax.Array, LeafState]:
    """The results of the step if `ok` allows it, otherwise the old ones."""
    if context.ok is None:
        return out, new
    before = jnp.zeros_like(out) if context.return_change else leaf.param
    select = lambda a, b: lax.select(context.ok, a, b)
    return select(out, before), jax.tree.map(lambda a, b: a if a is b else select(a, b), new, leaf.state)
