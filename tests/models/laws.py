"""The laws, each a function of the figures of a model in one dtype: whether it is kept, and the figures in words."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .measure import Figures, distance

RESPONSES = 3.5  # times the change of float32's gradient when parameters, state and batch are rounded
CHAOS = 0.5  # a response beyond which no gradient means anything
OWN = 1.25  # times the library's own error: two roundings of the same numbers differ by chance
LOW_SHARE = 0.95
KEPT = 0.8  # of float32's bytes
NEVER_KEPT = 1.05  # whatever the reason: a library may keep in float32 what a matmul keeps rounded
DRIFT = 0.05  # of the fall of the loss in float32
STATE = 0.05  # of what a step moves in float32
TRACE = 1.5  # times float32's seconds

Verdict = tuple[bool, str]


def gradient(found: Figures) -> Verdict:
    """The gradient is as near to float32's as rounding alone allows, up to a factor."""
    if found.response > CHAOS:
        return False, f"rounding moves float32's gradient by {found.response:.2f}: the model is too chaotic to judge"
    ratio = found.error / found.response
    return ratio <= RESPONSES, f"the gradient's error is {ratio:.2f} times the response of {found.response:.2e}"


def own(found: Figures) -> Verdict:
    """The gradient is not further from float32's than in the library's own low precision."""
    if found.own is None:
        return True, "the library has no mode of its own"
    return found.error <= OWN * found.own, f"the gradient's error is {found.error:.2e}, the library's {found.own:.2e}"


def share(found: Figures) -> Verdict:
    """Nearly all FLOPs of matmuls run low, in the backward pass too."""
    blind = f"; the report says: {' '.join(found.notes)}" if found.notes else ""
    return found.share >= LOW_SHARE and not blind, f"the share of low FLOPs is {found.share:.3f}{blind}"


def kept(found: Figures) -> Verdict:
    """Fewer bytes are kept for the backward pass."""
    return found.kept <= KEPT, f"kept bytes are {found.kept:.3f} of float32's"


def state(found: Figures) -> Verdict:
    """State moves as in float32: statistics nearly so, counters and keys exactly."""
    before, wide, low = found.states
    if jax.tree.structure(wide) != jax.tree.structure(low):
        return False, "the state has another structure than in float32"
    if not all(map(np.array_equal, *found.counters)):
        return False, "counters or keys differ from float32's after the last step"
    moves = moved(before, wide)
    off = distance(moved(before, low), moves) if any(map(np.any, moves)) else 0.0
    return off <= STATE, f"the first step moves the state {off:.2e} away from float32's"


def moved(before: Any, after: Any) -> list[jax.Array]:
    """What a step added to each array of floats."""
    pairs = zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
    return [b - a for a, b in pairs if jnp.issubdtype(b.dtype, jnp.floating)]


def training(found: Figures) -> Verdict:
    """Training falls to float32's loss."""
    if not found.finite:
        return False, "a loss or a gradient is not finite"
    return found.drift <= DRIFT, f"the last loss is off by {found.drift:.2%} of float32's fall"


LAWS: dict[str, Callable[[Figures], Verdict]] = {
    law.__name__: law for law in (gradient, own, share, kept, state, training)
}
