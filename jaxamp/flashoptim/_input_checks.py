"""Refuse what flashoptim-jax refuses."""

from typing import Any

import jax.numpy as jnp

from ..optim._tree_paths import flatten, name_of

BLOCK_SIZE = 1024  # entries that a kernel of flashoptim-jax steps at once, in whole groups


def check_group_size(name: str, *, fused: bool, quantize: bool, group_size: int, **other: Any) -> None:
    """Check that flashoptim-jax's kernels could go on from the state, if that is asked for."""
    if fused and quantize and BLOCK_SIZE % group_size:
        raise ValueError(
            f"{name} got group_size={group_size} with fused=True; group_size must divide BLOCK_SIZE, which is "
            f"{BLOCK_SIZE} in the kernels of flashoptim-jax. Write fused=False, which takes any size, or group_size=32."
        )


def check_some_float(name: str, params: Any) -> None:
    """Refuse parameters without a float among them. A tree without arrays is fine."""
    paths, leaves, _ = flatten(params)
    dtypes = {name_of(path): leaf.dtype for path, leaf in zip(paths, leaves, strict=True) if hasattr(leaf, "dtype")}
    if dtypes and not any(jnp.issubdtype(dtype, jnp.inexact) for dtype in dtypes.values()):
        leaf_name, dtype = next(iter(dtypes.items()))
        raise ValueError(
            f"{name} got no parameter that it can step: {leaf_name!r} is in {dtype}, and fused=True only supports "
            "parameter dtypes bfloat16, float16 and float32, as fused=False does. Pass parameters of these dtypes, for "
            "instance eqx.filter(model, eqx.is_inexact_array)."
        )
