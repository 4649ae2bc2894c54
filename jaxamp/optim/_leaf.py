"""One array's step, in two passes.

The law: what reaches memory is the parameter, its correction, the bytes of its moments, and per group one float32 for
each moment. Moments in float32 don't.

    pass 1: decode the moments, advance them, take the largest of each group
    pass 2: decode and advance them again, write parameter, correction and bytes, now that the scales are known
    then:   write the scales in two bytes

Left to itself, XLA would keep the moments of pass 1 in memory for pass 2: 8 bytes written and 8 read for each
parameter, where reading the state a second time is 6. The barrier on the inputs of pass 2 makes them other arrays to
XLA, so that the moments of pass 1 can't be kept. The barrier before the scales are written lets these go where the old
ones were: pass 2 has read them by then.

All steps end in a barrier. XLA drops a cast to bfloat16 and back, and where two steps are compiled as one, there is one
between a parameter and its reader.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from ._codecs import MOMENTUM, Codec, Variance
from ._layout import Groups
from ._rules import Moments, Rule, Scalars
from ._scales import format_of
from ._weights import LOW, change_of, join, split_in_step


class LeafState(NamedTuple):
    """The state of one array; what an optimizer does not have is None.

    Attributes:
        mu: The first moment: int8, or float32 if it is not compressed.
        nu: The second moment: uint8, or float32.
        scales: Those of both, `(moments, *groups)`: uint16, or float16 in the published format.
        correction: What the parameter lacks: int8, int16.
    """

    mu: Any = None
    nu: Any = None
    scales: Any = None
    correction: Any = None


class How(NamedTuple):
    """What the steps of several arrays have in common."""

    rule: Rule
    scalars: Scalars
    decay: Any  # None where there is none
    count: Any  # of this step, from one: how scales are rounded
    floor: bool
    scale: Any = None
    ok: Any = None
    delta: bool = False  # return the change of the parameter in place of the parameter


def largest(
    how: How, param: jax.Array, grad: jax.Array, state: LeafState, found: Groups | None
) -> tuple[jax.Array, ...]:
    """Pass 1: of each moment the largest of each group, as `encode` takes it; nothing if nothing has groups."""
    if found is None or state.scales is None:
        return ()
    codecs = _codecs(how)
    moments, _, _ = _advance(how, *_viewed(found, param, grad, state), codecs, found)
    return tuple(codec.top(m, found.view_axis) for codec, m in zip(codecs, moments))


def is_finite(grad: jax.Array, tops: tuple[jax.Array, ...]) -> jax.Array:
    """Whether a gradient is, read from what pass 1 has found: a moment is not finite where its gradient is not."""
    return jnp.isfinite(tops[0] if tops else grad).all()


def step_leaf(
    how: How,
    param: jax.Array,
    grad: jax.Array,
    state: LeafState,
    found: Groups | None,
    tops: tuple[jax.Array, ...] | None = None,
) -> tuple[jax.Array, LeafState]:
    """The parameter, or its change in float32, and the state after a step; `tops` if pass 1 has been made."""
    codecs = _codecs(how)
    if found is None or state.scales is None:
        moments, x, u = _advance(how, param, grad, state, codecs, None)
        out, correction = _weight(how, param, state.correction, x, u)
        new = state._replace(correction=correction, **dict(zip(("mu", "nu"), moments)))
        return lax.optimization_barrier(_kept(how, param, state, out, new))

    # All of a pass is in the view of the groups: another shape in between would be another kernel.
    tops = largest(how, param, grad, state, found) if tops is None else tops
    (param, grad, state), tops = lax.optimization_barrier(((param, grad, state), tops))
    held = _viewed(found, param, grad, state)
    moments, x, u = _advance(how, *held, codecs, found)
    codes = (codec.encode(m, found.spread(top)) for codec, m, top in zip(codecs, moments, tops))
    out, correction = _weight(how, held[0], held[2].correction, x, u)
    new = held[2]._replace(correction=correction, **dict(zip(("mu", "nu"), codes)))
    out, new = _kept(how, held[0], held[2], out, new)
    out, new = found.unview(out), _each(found.unview, new)
    out, new, tops = lax.optimization_barrier((out, new, tops))
    scales = format_of(state.scales).encode(scales_of(codecs, tops), how.count)
    if how.ok is not None:
        scales = lax.select(how.ok, scales, state.scales)
    return out, new._replace(scales=scales)


def _codecs(how: How) -> tuple[Codec, ...]:
    return MOMENTUM, Variance(how.floor)


def _viewed(
    found: Groups, param: jax.Array, grad: jax.Array, state: LeafState
) -> tuple[jax.Array, jax.Array, LeafState]:
    return found.view(param), found.view(grad), _each(found.view, state)


def _each(fn: Callable[[jax.Array], jax.Array], state: LeafState) -> LeafState:
    """A function of each array of the parameter's shape."""
    arrays = {name: getattr(state, name) for name in ("mu", "nu", "correction")}
    return state._replace(**{name: None if x is None else fn(x) for name, x in arrays.items()})


def scales_of(codecs: tuple[Codec, ...], tops: Sequence[jax.Array]) -> jax.Array:
    """Those of all moments as one array, not yet stored."""
    return jnp.stack([codec.scale(top) for codec, top in zip(codecs, tops)])


def decoded(state: LeafState, codecs: tuple[Codec, ...], found: Groups | None) -> Moments:
    """The moments in float32, of a state in the view of its groups."""
    stored = [m for m in (state.mu, state.nu) if m is not None]
    if found is None or state.scales is None:
        return tuple(stored)
    decode = format_of(state.scales).decode
    return tuple(codec.decode(m, found.spread(decode(s))) for codec, m, s in zip(codecs, stored, state.scales))


def _advance(
    how: How, param: jax.Array, grad: jax.Array, state: LeafState, codecs: Any, found: Groups | None
) -> tuple[Moments, jax.Array, jax.Array]:
    """Moments, the weight before the step and the length of the step."""
    g = grad.astype(jnp.float32)
    if how.scale is not None:
        g = g * how.scale
    x = join(param, state.correction)
    if how.decay is not None and not how.rule.decoupled:
        g = g + how.decay * x
    moments, u = how.rule.advance(g, decoded(state, codecs, found), how.scalars)
    return moments, x, u


def _weight(
    how: How, param: jax.Array, correction: jax.Array | None, x: jax.Array, u: jax.Array
) -> tuple[jax.Array, jax.Array | None]:
    """The new parameter, or its change, and the correction."""
    shrinks = how.decay is not None and how.rule.decoupled
    if how.delta and correction is None:
        return (-(how.decay * x) - u if shrinks else -u), None
    new = (x * (1.0 - how.decay) if shrinks else x) - u
    kind = None if correction is None else correction.dtype
    if how.delta:
        return change_of(param, new, kind)
    return split_in_step(new, param.dtype, kind) if param.dtype in LOW else (new, None)


def _kept(how: How, param: jax.Array, state: LeafState, out: jax.Array, new: LeafState) -> tuple[jax.Array, LeafState]:
    """All of it only if the step is taken."""
    if how.ok is None:
        return out, new
    before = jnp.zeros_like(out) if how.delta else param
    select = lambda a, b: lax.select(how.ok, a, b)
    return select(out, before), jax.tree.map(lambda a, b: a if a is b else select(a, b), new, state)
