"""Rules: how the operands of one operation are cast before it is bound.

    rule(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)

`compute_dtype` is what `amp` was given, `original_dtypes` are the dtypes of the operands as the user's program was
written, `invars` the operands in the dtypes that they have now. A user's rule is any function of this form. Ours are
functions of this form too, and the planner knows them by identity: it can do better than the function alone, because it
sees the operation's surroundings.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from .._jaxpr import bind_primitive
from .._plan.sensitivity import may_lower

Rule = Callable[..., tuple[Sequence[Any], dict[str, Any]]]


def _is_float(x: Any) -> bool:
    return hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jnp.floating)


def cast(x: Any, dtype: np.dtype | None) -> Any:
    """`x` in `dtype` if it is an array of floats, else `x` as it is. Constants are cast without an equation."""
    if dtype is None or not _is_float(x) or x.dtype == dtype:
        return x
    if isinstance(x, jax.Array):
        return bind_primitive(lax.convert_element_type_p, x, new_dtype=dtype, weak_type=False, sharding=None)
    return np.asarray(x).astype(dtype)


def saturate(x: Any, dtype: np.dtype) -> Any:
    """`x` in `dtype`, finite where it was finite. `find_overflow` knows it by the `clamp`."""
    largest = np.asarray(jnp.finfo(dtype).max, x.dtype)
    return lax.convert_element_type(lax.select(lax.is_finite(x), lax.clamp(-largest, x, largest), x), dtype)


def use_original_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation as it was written."""
    return [cast(x, dtype) for x, dtype in zip(invars, original_dtypes, strict=True)], bind_params


def use_compute_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation on operands in the compute dtype, and let its result have that dtype.

    Integers, complex numbers and float64 are left alone, and so is an operation that has no float32 operand. In a
    policy the planner refuses more, see `jaxamp.amp`: positions, matmuls that ask for `Precision.HIGHEST`, outer
    products.
    """
    compute_dtype = np.dtype(compute_dtype)
    if not any(
        may_lower(np.dtype(d), compute_dtype) for d, x in zip(original_dtypes, invars, strict=True) if _is_float(x)
    ):
        return list(invars), bind_params
    cast_invars = [
        cast(x, compute_dtype) if _is_float(x) and may_lower(np.dtype(d), compute_dtype) else x
        for x, d in zip(invars, original_dtypes, strict=True)
    ]
    return cast_invars, lowered_params(bind_params, compute_dtype)


def lowered_params(params: dict[str, Any], compute_dtype: np.dtype) -> dict[str, Any]:
    """Bind parameters of an operation whose float32 operands are now in the compute dtype."""
    new: dict[str, Any] = {}
    if params.get("preferred_element_type") is not None:
        new["preferred_element_type"] = compute_dtype
    if "precision" in params:  # what remains here asks for less than the compute dtype gives
        new["precision"] = None
    if "mantissa_bits" in params:  # of a `reduce_precision` that keeps all bits
        info = jnp.finfo(compute_dtype)
        new |= {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    return {**params, **new}


def use_widest_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation in the widest dtype that one of its operands has now."""
    dtypes = {x.dtype for x in invars if _is_float(x) and isinstance(x, jax.Array)}
    widest = [d for d in dtypes if d.itemsize == max(e.itemsize for e in dtypes)]
    if len(widest) != 1:  # float16 beside bfloat16, or nothing but constants
        return use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params)
    return [cast(x, widest[0]) for x in invars], bind_params


def use_inferred_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Follow the neighbours: low beside a low operand, unless an operand must not be rounded.

    The planner decides from the standing of each operand and from what consumes the result. Called by hand, without
    that knowledge, it runs low when an operand is in the compute dtype.
    """
    if any(_is_float(x) and x.dtype == compute_dtype for x in invars):
        return use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params)
    return use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params)


def use_precision(dtype: Any) -> Rule:
    """A rule that runs the operation in `dtype`, whatever the compute dtype is."""
    try:
        target = jnp.dtype(dtype)
    except TypeError:
        raise TypeError(
            f"use_precision got {dtype!r}; expected a float dtype. Write for example use_precision(jnp.float32)."
        ) from None

    def use_given_precision(
        compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        invars = tuple(cast(x, target) if _is_float(x) else x for x in invars)
        if bind_params.get("preferred_element_type") is not None and any(map(_is_float, invars)):
            bind_params = {**bind_params, "preferred_element_type": target}
        return invars, bind_params

    return use_given_precision


class ByTarget(NamedTuple):
    """A rule that depends on the compute dtype: `special` by dtype name, else `default`."""

    default: Rule
    special: Mapping[str, Rule]

    def __call__(
        self, compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.resolve(compute_dtype)(compute_dtype, original_dtypes, *invars, **bind_params)

    def resolve(self, compute_dtype: Any) -> Rule:
        return self.special.get(np.dtype(compute_dtype).name, self.default)


# The words of a policy table.
WORDS: dict[str, Rule] = {
    "compute": use_compute_precision,
    "float32": use_original_precision,
    "original": use_original_precision,
    "infer": use_inferred_precision,
    "widest": use_widest_precision,
}
