"""One step of a dynamic loss scaler: evaluate, judge, and evaluate again at a smaller scale where that may help.

scale = state.scaler
repeat:
    (loss, aux), grads = value_and_grad(loss_fn, cotangent=scale)
    grads /= scale
    finite = all_finite(grads)                      # agreed along axis_name
    stop if finite, or after redo_on_nan repeats, or if the scale can't fall
    stop if the loss is not finite                  # it does not depend on the scale
    scale = lowered(scale)
if finite:
    state.scaler = scale
next_state = state.adjust(finite)                   # a step given up lowers the scale once, not once per repeat
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .._compat import EARLY_INLINE, as_varying, consts_of, open_jaxpr, varying_axes
from .._primitives.fused_sum import fused_sum
from .._tree import agreed, axes_of, is_inexact, wider
from .cotangent import largest_cotangent, unscaled
from .state import FLOAT32_MAX, DynamicScalerState

_SMALLEST_NORMAL = float(jnp.finfo(jnp.float16).smallest_normal)


class Evaluated(NamedTuple):
    """One evaluation of a transformed function, its gradients divided by their scale."""

    results: Any
    finite: jax.Array
    curable: jax.Array  # whether a smaller scale might help
    underflow: jax.Array
    limit: float  # larger scales act as this


def _judged(grads: Any, scale: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Whether gradients divided by `scale` are finite, and the share of entries lost before: float16 subnormals, zeros.

    In one pass over them: the sum that counts what is lost is infinite if an entry is not finite.
    """
    leaves = [x for x in jax.tree.leaves(grads) if is_inexact(x) and x.size]
    share = _lost(leaves, scale) / max(1, sum(x.size for x in leaves))
    return jnp.isfinite(share), share


@functools.partial(jax.jit, inline=EARLY_INLINE)
def _lost(leaves: list[Any], scale: jax.Array) -> jax.Array:
    def lost(x: Any) -> jax.Array:
        small = (jnp.abs(x.astype(wider(x.dtype, jnp.float32))) < _SMALLEST_NORMAL).astype(jnp.float32)
        return jnp.where(jnp.isfinite(unscaled(x, scale)), small, jnp.inf)

    return fused_sum([lost(x) for x in leaves])


def evaluated(
    grads: Any,
    scale: jax.Array,
    axis_name: Any,
    assemble: Callable[[Any], Any],
    value: jax.Array | None = None,
) -> Evaluated:
    finite, underflow = _judged(grads, scale)
    finite = agreed(finite, axis_name)
    for axis in axes_of(axis_name):
        underflow = lax.pmean(underflow, axis)
    curable = jnp.array(True)
    if value is not None:
        loss_is_finite = agreed(jnp.isfinite(value), axis_name)
        if varying_axes(loss_is_finite) <= varying_axes(finite):  # else devices that must agree would not
            curable = loss_is_finite
    limit = FLOAT32_MAX if value is None else largest_cotangent(value.dtype)
    return Evaluated(assemble(unscaled(grads, scale)), finite, curable, underflow, limit)


def step(
    evaluate: Callable[[jax.Array], Evaluated], state: DynamicScalerState, redo_on_nan: int
) -> tuple[DynamicScalerState, Any]:
    state = state.as_arrays()
    if redo_on_nan:
        out, redos, scale = _until_finite(evaluate, state, redo_on_nan)
        state = state._replace(
            scaler=jnp.where(out.finite, scale, state.scaler),
            count=jnp.where(redos > 0, 0, state.count),
            total_resets=state.total_resets + redos,
            total_redos=state.total_redos + redos,
        )
    else:
        out = evaluate(state.scaler)
    state = state._replace(
        scaler=jnp.minimum(state.scaler, out.limit),
        underflow=jnp.where(out.finite, out.underflow, state.underflow),
    )
    state = state.adjust(out.finite)
    return state._replace(scaler=jnp.minimum(state.scaler, out.limit)), out.results


def _until_finite(
    evaluate: Callable[[jax.Array], Evaluated], state: DynamicScalerState, redo_on_nan: int
) -> tuple[Evaluated, jax.Array, jax.Array]:
    """Evaluate until the gradients are finite: at most `1 + redo_on_nan` times, at ever smaller scales.

    One loop, and the evaluation once in the program: the results of the round before are overwritten, so the loop needs
    the memory of one evaluation.
    """
    rest: list[tuple[_Static, float]] = []

    def flat(scale: jax.Array) -> list[Any]:
        out = evaluate(scale)
        arrays, static = _take_arrays(out.results)
        rest.append((static, out.limit))
        return [out.finite, out.curable, out.underflow, *arrays]

    # In shard_map: where devices have scalers of their own, the scale will vary as the answer does.
    jaxpr = jax.make_jaxpr(flat)(state.scaler)
    fates = (open_jaxpr(jaxpr).outvars[0].aval, state.lowered(state.scaler))
    axes = frozenset[Any]().union(*map(varying_axes, fates))
    start = [as_varying(x, axes) for x in (jnp.array(True), jnp.int32(0), state.scaler)]
    if axes != varying_axes(state.scaler):
        jaxpr = jax.make_jaxpr(flat)(start[-1])
    static, limit = rest[-1]

    def again(carry: Any) -> jax.Array:
        return carry[0]

    def round_(carry: Any) -> Any:
        _, redos, scale, _ = carry
        # Only the backward pass depends on the scale. XLA would take the forward pass out of the loop, and keep all
        # that it saves until the last round. A barrier that has seen the scale holds it inside.
        consts = [
            lax.optimization_barrier((x, scale))[0] if is_inexact(x) and varying_axes(x) >= axes else x
            for x in consts_of(jaxpr)
        ]
        finite, curable, *others = jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts, scale)
        smaller = state.lowered(jnp.minimum(scale, limit))
        redo = ~finite & curable & (redos < min(redo_on_nan, 2**31 - 1)) & (smaller < scale)
        return redo, redos + redo.astype(jnp.int32), jnp.where(redo, smaller, scale), [finite, curable, *others]

    first: Any = (*start, [ad.zeros_like_aval(v.aval) for v in open_jaxpr(jaxpr).outvars])
    _, redos, scale, (finite, curable, underflow, *arrays) = lax.while_loop(again, round_, first)
    return Evaluated(static.put_back(arrays), finite, curable, underflow, limit), redos, scale


class _Static(NamedTuple):
    """Results with their arrays taken out, and for a PRNG key among these how to make it of its bits."""

    tree: Any
    leaves: list[Any]
    keys: list[Any]

    def put_back(self, arrays: list[Any]) -> Any:
        wrapped = (
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arrays, self.keys, strict=True)
        )
        return jax.tree.unflatten(self.tree, [next(wrapped) if x is _ARRAY else x for x in self.leaves])


_ARRAY = object()


def _take_arrays(results: Any) -> tuple[list[Any], _Static]:
    """A loop carries arrays alone: float0, strings and constants of NumPy stay outside, keys go as their bits."""
    leaves, tree = jax.tree.flatten(results)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    keys = [jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in arrays]
    bits = [x if impl is None else jax.random.key_data(x) for x, impl in zip(arrays, keys, strict=True)]
    return bits, _Static(tree, [_ARRAY if isinstance(x, jax.Array) else x for x in leaves], keys)
