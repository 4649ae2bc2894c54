"""Equality of pytrees on bits: dtypes, shapes, and bytes, so that NaN equals NaN and -0 is not 0."""

import jax
import jax.numpy as jnp
import numpy as np


def bits(leaf):
    """What must be equal of a leaf: an array's dtype, shape and bytes, or the leaf itself."""
    if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return str(leaf.dtype), bits(jax.random.key_data(leaf))
    if isinstance(leaf, jax.Array | np.ndarray | np.generic):
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()
    return leaf


def assert_same_bits(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(actual), jax.tree.leaves(expected), strict=True):
        assert bits(x) == bits(y), f"{jax.tree_util.keystr(path)}: {x} is not {y}"


def dtypes(tree):
    return [str(x.dtype) for x in jax.tree.leaves(tree)]
