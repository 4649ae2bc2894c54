"""What mixed precision is held against where it goes wrong elsewhere: values and gradients in float64."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import in_float64

import jaxamp


def amped(fn: Callable[..., Any], low: Any, **options: Any) -> Callable[..., Any]:
    return jaxamp.amp(fn, compute_dtype=low, **options)


def assert_near(got: Any, want: Any, rtol: float) -> None:
    """Within `rtol` of the largest magnitude of each array, and finite."""
    for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        assert np.isfinite(x).all()
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * np.abs(y).max(initial=1e-30))


def with_gradients(fn: Callable[..., jax.Array], argnums: tuple[int, ...]) -> Callable[..., Any]:
    """The results of `fn`, and the gradients of a weighted sum of them."""

    def both_ways(*args: Any) -> Any:
        out, pullback = jax.vjp(lambda *xs: fn(*_with(args, argnums, xs)), *(args[i] for i in argnums))
        return out, pullback(jnp.cos(jnp.arange(out.size, dtype=out.dtype)).reshape(out.shape))

    return both_ways


def _with(args: tuple[Any, ...], places: tuple[int, ...], values: tuple[Any, ...]) -> list[Any]:
    new = list(args)
    for i, x in zip(places, values, strict=True):
        new[i] = x
    return new


def assert_right(
    fn: Callable[..., jax.Array], low: Any, *args: Any, wrt: tuple[int, ...] = (), rtol: float = 1e-2
) -> None:
    """`amp(fn)` and its gradients are those of float64, and so is `amp` of the gradient."""
    if not wrt:
        assert_near(amped(fn, low)(*args), in_float64(fn, *args), rtol)
        return
    want = in_float64(with_gradients(fn, wrt), *args)
    assert_near(jax.jit(with_gradients(amped(fn, low), wrt))(*args), want, rtol)
    assert_near(amped(with_gradients(fn, wrt), low)(*args), want, rtol)
