"""How many bytes a function keeps for its backward pass, before and after `amp`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
from jax import tree_util as jtu

from ._amp import PolicyLike, amp, check_function
from ._compat import Literal, open_jaxpr
from ._residuals import Keep


class BytesKept(NamedTuple):
    """Bytes that are made in the forward pass and read in the backward pass; arguments are not among them."""

    before: int
    after: int


def bytes_kept(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = jnp.float16,
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
) -> Callable[..., BytesKept]:
    """The bytes that `fn` keeps for the backward pass and those that `amp(fn)` keeps, as a function of its arguments.

    Derivatives are taken by the floating-point arrays of the first argument. The figure is JAX's: XLA computes some of
    what is kept outside of loops again, and holds other things besides. Nothing is computed; `jax.ShapeDtypeStruct`s do
    for arrays.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> loss = lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w)
    >>> kept = bytes_kept(loss, compute_dtype=jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((64, 8)))
    >>> kept.after  # the input, two results of matmuls and a weight, in bfloat16
    3200
    >>> kept.before > 3 * kept.after
    True
    """
    check_function("bytes_kept", fn)
    mixed = amp(fn, compute_dtype=compute_dtype, amp_policy=amp_policy, keep=keep)

    def kept(*args: Any, **kwargs: Any) -> BytesKept:
        if not args:
            raise TypeError(
                "bytes_kept(fn) was called without an argument; expected those of fn, the parameters first. Write "
                "jaxamp.bytes_kept(loss_fn)(params, batch)."
            )
        return BytesKept(_bytes_kept(fn, args, kwargs), _bytes_kept(mixed, args, kwargs))

    return kept


def _bytes_kept(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    moving, fixed = eqx.partition(args[0], _is_float)
    arrays, static = eqx.partition((fixed, args[1:], kwargs), _is_array)

    def pullback(moving: Any, arrays: Any) -> list[Any]:
        fixed, rest, kwargs = eqx.combine(arrays, static)

        def results(moving: Any) -> Any:
            return eqx.filter(fn(eqx.combine(moving, fixed), *rest, **kwargs), _is_float)

        return jtu.tree_leaves(jax.vjp(results, moving)[1])

    closed = jax.make_jaxpr(pullback)(moving, arrays)
    jaxpr = open_jaxpr(closed)
    given = {*jaxpr.invars, *jaxpr.constvars}
    made = {v for v in jaxpr.outvars if not isinstance(v, Literal) and v not in given}
    return sum(v.aval.size * v.aval.dtype.itemsize for v in made)


def _is_array(x: Any) -> bool:
    return eqx.is_array(x) or isinstance(x, jax.ShapeDtypeStruct)


def _is_float(x: Any) -> bool:
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)
