"""Repeat an evaluation at smaller and smaller scales until its gradients are finite, inside the compiled step."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad

from .._compat import as_varying, consts_of, open_jaxpr, varying_axes
from .._tree import is_inexact_array
from .evaluation import Evaluation
from .state import DynamicScalerState


def retry_until_finite(
    evaluate: Callable[[jax.Array], Evaluation], state: DynamicScalerState, redo_on_nan: int
) -> tuple[Evaluation, jax.Array, jax.Array]:
    """Evaluate up to `1 + redo_on_nan` times. Return the last evaluation, the number of retries, and its scale.

    The evaluation appears once in the program, as the body of a loop. Each round overwrites the results of the one
    before, so the loop needs the memory of one evaluation.
    """
    outside_loop: list[tuple[_WithoutArrays, float]] = []

    def evaluate_flat(scale: jax.Array) -> list[Any]:
        out = evaluate(scale)
        arrays, without_arrays = _take_arrays(out.results)
        outside_loop.append((without_arrays, out.max_scale))
        return [out.finite, out.retryable, out.underflow, *arrays]

    # In shard_map, if devices have scalers of their own, the scale will vary along the same axes as `finite` does.
    jaxpr = jax.make_jaxpr(evaluate_flat)(state.scaler)
    finite_aval = open_jaxpr(jaxpr).outvars[0].aval
    axes = frozenset[Any]().union(*map(varying_axes, (finite_aval, state.lowered(state.scaler))))
    start = [as_varying(x, axes) for x in (jnp.array(True), jnp.int32(0), state.scaler)]
    if axes != varying_axes(state.scaler):
        jaxpr = jax.make_jaxpr(evaluate_flat)(start[-1])
    without_arrays, max_scale = outside_loop[-1]

    def should_run(carry: Any) -> jax.Array:
        return carry[0]

    def run_once(carry: Any) -> Any:
        _, retries, scale, _ = carry
        # Only the backward pass depends on the scale. XLA would move the forward pass out of the loop and keep all of
        # its residuals until the last round. A barrier that depends on the scale keeps it inside.
        consts = [
            lax.optimization_barrier((x, scale))[0] if is_inexact_array(x) and varying_axes(x) >= axes else x
            for x in consts_of(jaxpr)
        ]
        finite, retryable, *others = jax.core.eval_jaxpr(open_jaxpr(jaxpr), consts, scale)
        smaller = state.lowered(jnp.minimum(scale, max_scale))
        retry = ~finite & retryable & (retries < min(redo_on_nan, 2**31 - 1)) & (smaller < scale)
        return retry, retries + retry.astype(jnp.int32), jnp.where(retry, smaller, scale), [finite, retryable, *others]

    first: Any = (*start, [ad.zeros_like_aval(v.aval) for v in open_jaxpr(jaxpr).outvars])
    _, retries, scale, (finite, retryable, underflow, *arrays) = lax.while_loop(should_run, run_once, first)
    return Evaluation(without_arrays.put_back(arrays), finite, retryable, underflow, max_scale), retries, scale


class _WithoutArrays(NamedTuple):
    """A pytree with its arrays taken out, and for each array the PRNG implementation if it was a key, else None."""

    structure: Any
    leaves: list[Any]
    key_impls: list[Any]

    def put_back(self, arrays: list[Any]) -> Any:
        wrapped = (
            x if impl is None else jax.random.wrap_key_data(x, impl=impl)
            for x, impl in zip(arrays, self.key_impls, strict=True)
        )
        return jax.tree.unflatten(self.structure, [next(wrapped) if x is _ARRAY else x for x in self.leaves])


_ARRAY = object()  # stands where an array was


def _take_arrays(results: Any) -> tuple[list[Any], _WithoutArrays]:
    """Take out what a loop can carry: JAX arrays, keys as their bits. float0, strings and NumPy constants stay."""
    leaves, structure = jax.tree.flatten(results)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    key_impls = [jax.random.key_impl(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else None for x in arrays]
    bits = [x if impl is None else jax.random.key_data(x) for x, impl in zip(arrays, key_impls, strict=True)]
    leaves = [_ARRAY if isinstance(x, jax.Array) else x for x in leaves]
    return bits, _WithoutArrays(structure, leaves, key_impls)
