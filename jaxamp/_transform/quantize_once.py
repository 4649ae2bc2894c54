"""Quantise weights once in a function that differentiates inside of a loop."""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax

from .._jaxpr import evaluate
from .._passes.hoist_quantized import hoisted
from .call import Result, split_call

F = TypeVar("F", bound=Callable[..., Any])


def quantize_once(fn: F) -> F:
    """Quantise what stays the same in all rounds of a loop once, in front of the loop.

    A loop inside of a function from `jaxamp.amp` needs nothing: `amp` does so by itself. This is for the loop around
    it, as in gradient accumulation: each round differentiates, and would quantise the same weights again.

    Args:
        fn: A function with a loop (`lax.scan`, `lax.fori_loop`, `lax.while_loop`) that runs functions from
            `jaxamp.amp`, or their derivatives, in number formats.

    Returns:
        A function like `fn`, with the same results.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> loss = jaxamp.amp(lambda w, x: jnp.sum(jnp.tanh(x @ w)), compute_dtype="e4m3")
    >>> def accumulated(w, micro_batches):
    ...     add = lambda total, x: (total + jax.grad(loss)(w, x), None)
    ...     return jax.lax.scan(add, jnp.zeros_like(w), micro_batches)[0]
    >>> jax.jit(jaxamp.quantize_once(accumulated))(jnp.ones((4, 2)), jnp.ones((8, 3, 4))).shape
    (4, 2)
    """
    if not callable(fn):
        raise TypeError(
            f"quantize_once got {fn!r}, of type {type(fn).__name__}; expected a function. Write "
            "jaxamp.quantize_once(step)."
        )

    @functools.wraps(fn)
    def once(*args: Any, **kwargs: Any) -> Any:
        call, arrays, nodes = split_call(fn, args, kwargs)
        results: list[Result] = []

        def flat(*xs: Any) -> list[Any]:
            outs, result = call(*xs)
            results.append(result)
            return outs

        program = hoisted(jax.make_jaxpr(flat)(*arrays))
        return results[-1].with_arrays(evaluate(program, arrays), nodes)

    return once  # type: ignore[return-value]
