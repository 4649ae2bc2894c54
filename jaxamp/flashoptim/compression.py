"""Weights as low-precision parameters and corrections, in flashoptim-jax's form."""

from typing import Any

import jax
import jax.numpy as jnp

from .._tree import cast_floating
from ..optim._storage import Storage
from ..optim._tree_paths import flatten, flatten_like
from ..optim._weight_codec import LOW_DTYPES, correction_dtype, join, split


def no_ecc_leaf() -> jax.Array:
    """The placeholder for an absent correction: an int32 zero."""
    return jnp.zeros((), jnp.int32)


def check_bits(bits: Any) -> None:
    if isinstance(bits, bool) or bits not in (None, 24, 32):
        raise ValueError(
            f"flashoptim got master_weight_bits={bits!r}; expected None, 24 or 32. Write master_weight_bits=24."
        )


def cast_tree_bf16(tree: Any) -> Any:
    """Cast a pytree's floats to bfloat16.

    Args:
        tree: Any pytree.

    Returns:
        The pytree, in bfloat16.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> flashoptim.cast_tree_bf16({"w": jnp.ones(2)})["w"].dtype.name
    'bfloat16'
    """
    return cast_floating(tree, jnp.bfloat16)


def has_ecc(theta_lp: Any, rho: Any) -> bool:
    """Whether a parameter has a correction."""
    return jnp.asarray(theta_lp).dtype in LOW_DTYPES and jnp.asarray(rho).dtype in (jnp.int8, jnp.int16)


def split_leaf(
    theta: Any, narrow_dtype: Any = jnp.bfloat16, master_weight_bits: int | None = 24
) -> tuple[jax.Array, jax.Array]:
    """Split a float32 array into a parameter and a correction, if the parameter can have one.

    Args:
        theta: The array.
        narrow_dtype: The dtype of the parameter.
        master_weight_bits: 24, 32 or None.

    Returns:
        The parameter, and the correction or a placeholder.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> low, correction = flashoptim.split_leaf(jnp.array([1.0, 1.003]))
    >>> low.dtype.name, correction.dtype.name, f"{flashoptim.reconstruct_leaf(low, correction)[1]:.4f}"
    ('bfloat16', 'int8', '1.0030')
    """
    check_bits(master_weight_bits)
    theta = jnp.asarray(theta, jnp.float32)
    bits = Storage(master_weight_bits=master_weight_bits).bits_for(narrow_dtype)  # type: ignore[arg-type]
    if bits is None:
        return theta.astype(narrow_dtype), no_ecc_leaf()
    return split(theta, narrow_dtype, correction_dtype(bits, jnp.bfloat16))  # signed for float16 too


def reconstruct_leaf(theta_lp: Any, rho: Any) -> jax.Array:
    """Undo `split_leaf`, up to rounding.

    Args:
        theta_lp: The parameter.
        rho: The correction.

    Returns:
        A float32 array.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> low, correction = flashoptim.split_leaf(jnp.array([1.0, 1.003]))
    >>> low.dtype.name, correction.dtype.name, f"{flashoptim.reconstruct_leaf(low, correction)[1]:.4f}"
    ('bfloat16', 'int8', '1.0030')
    """
    theta_lp, rho = jnp.asarray(theta_lp), jnp.asarray(rho)
    return join(theta_lp, rho) if has_ecc(theta_lp, rho) else theta_lp.astype(jnp.float32)


def reconstruct_weights(params_lp: Any, errors: Any) -> Any:
    """The float32 weights of a tree of parameters and a tree of corrections.

    Args:
        params_lp: The parameters.
        errors: The corrections.

    Returns:
        A tree of float32 arrays.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> params, errors = flashoptim.set_fp32_params({"w": jnp.array([1.003])}, {"w": jnp.ones(1, jnp.bfloat16)})
    >>> f"{flashoptim.reconstruct_weights(params, errors)['w'][0]:.4f}"
    '1.0030'
    """
    return jax.tree.map(reconstruct_leaf, params_lp, errors)


def set_fp32_params(fp32_params: Any, param_template: Any, master_weight_bits: int | None = 24) -> tuple[Any, Any]:
    """Split float32 weights into trees of parameters, in the dtypes of a template, and corrections. None stays None.

    Args:
        fp32_params: The weights.
        param_template: Parameters in the dtypes that are wanted.
        master_weight_bits: 24, 32 or None.

    Returns:
        The parameters, and the corrections.

    >>> import jax.numpy as jnp
    >>> from jaxamp import flashoptim
    >>> params, errors = flashoptim.set_fp32_params({"w": jnp.array([1.003])}, {"w": jnp.ones(1, jnp.bfloat16)})
    >>> f"{flashoptim.reconstruct_weights(params, errors)['w'][0]:.4f}"
    '1.0030'
    """
    _, leaves, structure = flatten(param_template)
    instead = "Pass two trees of the same structure."
    weights = flatten_like("set_fp32_params", "fp32_params", fp32_params, param_template, structure, instead)
    pairs = [
        (None, None) if like is None else split_leaf(x, jnp.asarray(like).dtype, master_weight_bits)
        for x, like in zip(weights, leaves, strict=True)
    ]
    params, corrections = ([pair[i] for pair in pairs] for i in (0, 1))
    return structure.unflatten(params), structure.unflatten(corrections)
