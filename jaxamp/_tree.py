"""Casting, finiteness and selection over pytrees.

The law: only floats are cast, only floats and complex numbers can be non-finite. Integers, bools, PRNG keys, float0,
`None` and leaves that are no arrays are left alone. NumPy leaves are arrays like any other.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import EARLY_INLINE
from ._primitives.fused_sum import fused_sum

Tree = TypeVar("Tree")


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_inexact(x: Any) -> bool:
    """Whether a leaf is an array of floats or complex numbers."""
    return _is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def _cast(x: Any, dtype: Any) -> Any:
    """A leaf that is an array of floats in `dtype`, never weakly typed: what was cast to float32 acts as float32."""
    if not (_is_array(x) and jnp.issubdtype(x.dtype, jnp.floating)):
        return x
    return lax.convert_element_type(x, dtype) if isinstance(x, jax.Array) else np.asarray(x).astype(dtype)


def wider(a: Any, b: Any) -> Any:
    """The dtype that holds the values of both, also where a user asked JAX for strict promotion."""
    a, b = (jnp.float32 if jnp.issubdtype(x, jnp.floating) and jnp.dtype(x).itemsize < 2 else x for x in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def cast_floating(tree: Tree, dtype: Any) -> Tree:
    """Cast the floats of a pytree; NumPy arrays stay NumPy arrays.

    >>> import jax.numpy as jnp
    >>> cast_floating({"w": jnp.ones(2), "step": jnp.int32(3), "name": "mlp"}, jnp.bfloat16)
    {'name': 'mlp', 'step': Array(3, dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """
    dtype = jnp.dtype(dtype)
    if not jnp.issubdtype(dtype, jnp.floating):
        raise TypeError(
            f"cast_floating got the dtype {dtype}; expected a float. Write cast_floating(tree, jnp.bfloat16), and "
            "cast to other types with jax.tree.map."
        )
    return jax.tree.map(lambda x: _cast(x, dtype), tree)


def cast_floating_like(tree: Tree, like: Any) -> Tree:
    """Cast each float leaf of `tree` to the dtype of the leaf in its place in `like`, where that is a float too.

    >>> import jax.numpy as jnp
    >>> cast_floating_like({"w": jnp.ones(2)}, {"w": jnp.zeros(2, jnp.float16)})
    {'w': Array([1., 1.], dtype=float16)}
    """

    def leaf(x: Any, y: Any) -> Any:
        dtype = getattr(y, "dtype", None)
        return _cast(x, dtype) if dtype is not None and jnp.issubdtype(dtype, jnp.floating) else x

    return jax.tree.map(leaf, tree, like)


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Whether no float or complex number in a pytree is infinite or NaN, as a scalar bool.

    Args:
        tree: Any pytree. Python floats count; what can't be infinite does not.
        axis_name: In `pmap` and `shard_map`, the axis or axes whose devices must agree: the answer is no on all of them
            if it is no on one. Under `jit` with sharded arrays there is nothing to agree on.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])})), bool(all_finite({"n": 3, "none": None}))
    (False, True)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact(x) or isinstance(x, float | complex)]
    return agreed(_are_finite(leaves), axis_name)


@functools.partial(jax.jit, inline=EARLY_INLINE)
def _are_finite(leaves: list[Any]) -> jax.Array:
    return fused_sum([jnp.logical_not(jnp.isfinite(x)).astype(jnp.float32) for x in leaves]) == 0


def agreed(flag: jax.Array, axis_name: Any) -> jax.Array:
    """A flag that is set only if it is set on each device along an axis, or along several."""
    for axis in axes_of(axis_name):  # one at a time: in `shard_map` the flag may vary along some of them only
        flag = lax.pmin(flag.astype(jnp.int32), axis) > 0
    return flag


def axes_of(axis_name: Any) -> tuple[Any, ...]:
    """The axes that `axis_name=` gives: none, one, or several."""
    return () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


def tree_where(pred: Any, a: Tree, b: Tree) -> Tree:
    """`a` where `pred` holds, else `b`: bit for bit, for a scalar `pred` that may be traced.

    Arrays and numbers are selected, in the wider of two dtypes where they differ. Other leaves must be the same in
    both. float0 is float0.

    >>> import jax.numpy as jnp
    >>> tree_where(jnp.array(False), {"w": jnp.ones(2), "act": "relu"}, {"w": jnp.zeros(2), "act": "relu"})
    {'act': 'relu', 'w': Array([0., 0.], dtype=float32)}
    """
    check_bool("tree_where", pred, "tree_where(jaxamp.all_finite(grads), new, old), or jnp.where for arrays")
    return jax.tree.map(_chooser(pred), a, b)


def check_bool(name: str, pred: Any, instead: str) -> None:
    """Refuse a condition that is not one bool, at the call of `name`."""
    if _is_array(pred):
        given = f"of shape {pred.shape} and dtype {pred.dtype}"
    else:
        given = f"of type {type(pred).__name__}"
    if not (isinstance(pred, bool) or (_is_array(pred) and pred.dtype == jnp.bool_ and pred.shape == ())):
        raise TypeError(f"{name} got a condition {given}; expected one bool. Write {instead}.")


def _chooser(pred: Any) -> Callable[[Any, Any], Any]:
    def choose(x: Any, y: Any) -> Any:
        if x is y:
            return x
        arrays, numbers = (_is_array(x), _is_array(y)), (bool, int, float, complex)
        if not all(is_array or isinstance(leaf, numbers) for is_array, leaf in zip(arrays, (x, y))):
            if any(arrays) or x != y:
                raise TypeError(
                    f"tree_where got {x!r} and {y!r} in the same place; expected two arrays, or two equal leaves. "
                    "Keep what is no array out of the tree, for instance with eqx.partition(tree, eqx.is_array)."
                )
            return x
        if not any(arrays) and type(x) is type(y) and repr(x) == repr(y):
            return x
        if jnp.result_type(x) == jax.dtypes.float0:
            return x
        x, y = jnp.asarray(x), jnp.asarray(y)
        if x.dtype != y.dtype:  # a PRNG key can't be cast, not even to its own dtype
            dtype = wider(x.dtype, y.dtype)
            x, y = x.astype(dtype), y.astype(dtype)
        return lax.select(pred, x, y)

    return choose
