"""What the attention primitives compute: JAX's plain attention, its tangent and its backward pass."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._formats import saturate
from .._jaxpr import along

BROADCAST = ("bias", "mask")  # operands that are repeated along axes of size one


def differentiable(given: Sequence[str], bias_differentiated: bool) -> list[int]:
    """The places of the operands that derivatives are taken by."""
    return [0, 1, 2, *([3 + given.index("bias")] if bias_differentiated else [])]


def attend_by(implementation: Any, given: Sequence[str], static: dict[str, Any]) -> Callable[..., Any]:
    precision, asked = static["precision"], {k: v for k, v in static.items() if k != "precision"}

    def attend(q: Any, k: Any, v: Any, *rest: Any, **more: Any) -> Any:
        options = dict(zip(given, rest, strict=True))
        if implementation == "cudnn":  # it wants them in full, and a bias in the dtype of the queries
            whole = {name: options[name] for name in BROADCAST if name in options}
            options |= {n: jnp.broadcast_to(x, (*x.shape[:2], q.shape[1], k.shape[1])) for n, x in whole.items()}
            # a row of only -1e9 must stay finite: as -inf it would be a row without any key
            options |= {"bias": saturate(options["bias"], q.dtype)} if "bias" in options else {}
        with jax.default_matmul_precision(None if precision is None else precision.name.lower()):
            return jax.nn.dot_product_attention(q, k, v, **options, **asked, **more, implementation=implementation)

    return attend


def promoting(fun: Callable[..., Any]) -> Callable[..., Any]:
    """JAX's attention of low operands promotes dtypes, which must work even under a user's strict promotion."""

    @functools.wraps(fun)
    def promoting(*operands: Any, **params: Any) -> Any:
        with jax.numpy_dtype_promotion("standard"):
            return fun(*operands, **params)

    return promoting


@promoting
def plain_forward(*operands: Any, given: Sequence[str], implementation: Any, **static: Any) -> tuple[Any, Any]:
    out, lse = attend_by("xla", given, static)(*operands, return_residual=True)
    return out, lse.astype(np.promote_types(lse.dtype, np.float32))


@promoting
def plain_tangent(
    *operands: Any, given: Sequence[str], implementation: Any, bias_differentiated: bool, **static: Any
) -> tuple[Any, ...]:
    differentiated, count = differentiable(given, bias_differentiated), 3 + len(given)
    primals, tangents = operands[:count], operands[count + 2 :]
    moved = along(attend_by("xla", given, static), primals, differentiated)
    return jax.jvp(moved, [primals[i] for i in differentiated], list(tangents))[1:]


@promoting
def plain_backward(
    *operands: Any, given: Sequence[str], implementation: Any, bias_differentiated: bool, **static: Any
) -> tuple[Any, ...]:
    differentiated, count = differentiable(given, bias_differentiated), 3 + len(given)
    moved = along(attend_by("xla", given, static), operands[:count], differentiated)
    return jax.vjp(moved, *(operands[i] for i in differentiated))[1](operands[-1])
