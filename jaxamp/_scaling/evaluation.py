"""Unscale the gradients of one evaluation, and check whether they are finite and how many underflowed."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .._compat import EARLY_INLINE, varying_axes
from .._primitives.fused_sum import fused_sum
from .._transform.delayed_scales import DelayedScales
from .._tree import all_along_axes, is_inexact_array, mean_along_axes, wider_dtype
from .cotangent import largest_cotangent
from .scale_tree import unscale_tree
from .state import FLOAT32_MAX

_FLOAT16_SMALLEST_NORMAL = float(jnp.finfo(jnp.float16).smallest_normal)


class Evaluation(NamedTuple):
    """One evaluation of a differentiated function at one scale.

    Attributes:
        results: What the function returned, with its gradients divided by the scale.
        finite: Whether all gradients are finite.
        retryable: Whether a smaller scale might help: not if the loss itself is infinite or NaN.
        underflow: The share of gradient entries that were zero, or subnormal in float16, before the division.
        max_scale: Larger scales act like this one.
    """

    results: Any
    finite: jax.Array
    retryable: jax.Array
    underflow: jax.Array
    max_scale: float


def evaluation_of(
    scaled_grads: Any,
    scale: jax.Array,
    axis_name: Any,
    assemble: Callable[[Any], Any],
    loss: jax.Array | None = None,
) -> Evaluation:
    """Check and unscale gradients.

    Args:
        scaled_grads: The gradients, not yet divided by `scale`.
        scale: The scale that they were made with.
        axis_name: The axes along which devices must agree on `finite`.
        assemble: Puts the unscaled gradients into the results that the user gets.
        loss: The loss, if it is known.
    """
    underflow = mean_along_axes(_underflow(scaled_grads, scale), axis_name)
    finite = jnp.isfinite(underflow)  # one number tells other devices of both
    retryable = jnp.array(True)
    if loss is not None:
        loss_is_finite = all_along_axes(jnp.isfinite(loss), axis_name)
        if varying_axes(loss_is_finite) <= varying_axes(finite):  # otherwise devices that must agree would not
            retryable = loss_is_finite
    max_scale = FLOAT32_MAX if loss is None else largest_cotangent(loss.dtype)
    return Evaluation(assemble(_unscaled(scaled_grads, scale)), finite, retryable, underflow, max_scale)


def _is_no_gradient(x: Any) -> bool:
    """Whether it is what a step with delayed scaling saw: maxima, which the scale is no factor of."""
    return isinstance(x, DelayedScales)


def _unscaled(scaled_grads: Any, scale: jax.Array) -> Any:
    leaves, structure = jax.tree.flatten(scaled_grads, is_leaf=_is_no_gradient)
    grads = iter(unscale_tree([x for x in leaves if not _is_no_gradient(x)], scale))
    return jax.tree.unflatten(structure, [x if _is_no_gradient(x) else next(grads) for x in leaves])


def _underflow(scaled_grads: Any, scale: jax.Array) -> jax.Array:
    """The share of entries that underflowed while scaled; infinite if an entry is not finite after the division.

    So one pass over the gradients gives both.
    """
    found = jax.tree.leaves(scaled_grads, is_leaf=_is_no_gradient)
    leaves = [x for x in found if is_inexact_array(x) and x.size]
    return _count_underflows(leaves, scale) / max(1, sum(x.size for x in leaves))


@functools.partial(jax.jit, inline=EARLY_INLINE)
def _count_underflows(leaves: list[Any], scale: jax.Array) -> jax.Array:
    def underflows(x: Any) -> jax.Array:
        wide = wider_dtype(x.dtype, jnp.float32)
        small = (jnp.abs(x.astype(wide)) < _FLOAT16_SMALLEST_NORMAL).astype(jnp.float32)
        return jnp.where(jnp.isfinite(unscale_tree(x, scale)), small, jnp.inf)

    return fused_sum([underflows(x) for x in leaves])
