"""Casting, finiteness and selection over pytrees.

The law: only floats are cast, and only floats and complex numbers can be non-finite. Integers, bools, PRNG keys,
float0, `None` and non-array leaves are left alone. NumPy arrays and scalars count as arrays.
"""

import functools
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from ._compat import EARLY_INLINE, tracks_variation, varying_axes
from ._primitives.fused_sum import fused_sum

Tree = TypeVar("Tree")


# -- kinds of leaves


def is_none(x: Any) -> bool:
    return x is None


def is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic)


def is_array_or_number(x: Any) -> bool:
    """Whether a leaf is an array or a Python number."""
    return is_array(x) or isinstance(x, bool | int | float | complex)


def is_inexact_array(x: Any) -> bool:
    """Whether a leaf is an array of floats or complex numbers."""
    return is_array(x) and jnp.issubdtype(x.dtype, jnp.inexact)


def is_inexact_array_like(x: Any) -> bool:
    """Whether a leaf is an array of floats or complex numbers, or a Python float or complex number."""
    return is_inexact_array(x) or isinstance(x, float | complex)


def has_float_dtype(x: Any) -> bool:
    """Whether a leaf has a floating-point dtype: an array, or a `jax.ShapeDtypeStruct`."""
    dtype = getattr(x, "dtype", None)
    return dtype is not None and jnp.issubdtype(dtype, jnp.floating)


# -- casting


def _cast_if_float(x: Any, dtype: Any) -> Any:
    """Cast a leaf if it is an array of floats. The result is never weakly typed, so that it promotes as its dtype."""
    if not (is_array(x) and has_float_dtype(x)):
        return x
    return lax.convert_element_type(x, dtype) if isinstance(x, jax.Array) else np.asarray(x).astype(dtype)


def wider_dtype(a: Any, b: Any) -> Any:
    """The dtype that holds the values of both, even if the user asked JAX for strict promotion."""
    a, b = (jnp.float32 if jnp.issubdtype(x, jnp.floating) and jnp.dtype(x).itemsize < 2 else x for x in (a, b))
    with jax.numpy_dtype_promotion("standard"):
        return jnp.promote_types(a, b)


def cast_floating(tree: Tree, dtype: Any) -> Tree:
    """Cast the floats of a pytree; NumPy arrays stay NumPy arrays.

    Args:
        tree: Any pytree.
        dtype: The float dtype to cast to.

    Returns:
        The pytree; leaves that are not floats are unchanged.

    >>> import jax.numpy as jnp
    >>> cast_floating({"w": jnp.ones(2), "step": jnp.int32(3), "name": "mlp"}, jnp.bfloat16)
    {'name': 'mlp', 'step': Array(3, dtype=int32), 'w': Array([1, 1], dtype=bfloat16)}
    """
    instead = "Write cast_floating(tree, jnp.bfloat16), and cast to other types with jax.tree.map."
    dtype = checked_float_dtype("cast_floating", dtype, instead)
    return jax.tree.map(lambda x: _cast_if_float(x, dtype), tree)


def checked_float_dtype(name: str, dtype: Any, instead: str) -> np.dtype:
    """Return a dtype that the user passed; an error in the name of `name` if it is not a float."""
    try:
        found = None if dtype is None else jnp.dtype(dtype)  # `jnp.dtype(None)` is float64
    except TypeError:
        found = None
    if found is None or not jnp.issubdtype(found, jnp.floating):
        raise TypeError(f"{name} got the dtype {repr(dtype) if found is None else found}; expected a float. {instead}")
    return found


def cast_floating_like(tree: Tree, like: Any) -> Tree:
    """Cast each float leaf of `tree` to the dtype of the matching leaf of `like`, if that is a float too.

    Args:
        tree: Any pytree.
        like: A pytree of the same structure.

    Returns:
        The pytree `tree`, in these dtypes.

    >>> import jax.numpy as jnp
    >>> cast_floating_like({"w": jnp.ones(2)}, {"w": jnp.zeros(2, jnp.float16)})
    {'w': Array([1., 1.], dtype=float16)}
    """

    return jax.tree.map(lambda x, y: _cast_if_float(x, y.dtype) if has_float_dtype(y) else x, tree, like)


# -- finiteness


def all_finite(tree: Any, *, axis_name: Any = None) -> jax.Array:
    """Whether no float or complex number in a pytree is infinite or NaN, as a scalar bool.

    Args:
        tree: Any pytree. Python floats count; leaves that can't be infinite don't.
        axis_name: In `pmap` and `shard_map`, the axis or axes whose devices must agree: if the answer is no on one
            device, it is no on all. Not needed under `jit`, where sharded arrays are seen as a whole.

    Returns:
        A scalar bool, as an array.

    >>> import jax.numpy as jnp
    >>> bool(all_finite({"w": jnp.array([1.0, jnp.inf])})), bool(all_finite({"n": 3, "none": None}))
    (False, True)
    """
    leaves = [x for x in jax.tree.leaves(tree) if is_inexact_array_like(x)]
    return all_along_axes(_are_finite(leaves), axis_name)


@functools.partial(jax.jit, inline=EARLY_INLINE)
def _are_finite(leaves: list[Any]) -> jax.Array:
    return fused_sum([jnp.logical_not(jnp.isfinite(x)).astype(jnp.float32) for x in leaves]) == 0


def all_along_axes(flag: jax.Array, axis_name: Any) -> jax.Array:
    """Whether `flag` is set on every device along the axes of `axis_name`. Devices that agree send nothing."""
    for axes in _differing_axes(flag, axis_name):
        flag = lax.pmin(flag.astype(jnp.int32), axes) > 0
    return flag


def mean_along_axes(x: jax.Array, axis_name: Any) -> jax.Array:
    """The mean over the devices along the axes of `axis_name`. Devices that agree send nothing."""
    for axes in _differing_axes(x, axis_name):
        x = lax.pmean(x, axes)
    return x


def _differing_axes(x: jax.Array, axis_name: Any) -> list[tuple[Any, ...]]:
    """The axes of `axis_name` along which a value may differ, in groups for one collective each.

    Types may say along which axes it does; not those of `vmap`, nor in `shard_map` with `check_vma=False`.
    """
    axes = as_axes(axis_name)
    tracked = [axis for axis in axes if tracks_variation(axis)]
    groups = tuple(a for a in tracked if a in varying_axes(x)), tuple(a for a in axes if a not in tracked)
    return [group for group in groups if group]


def as_axes(axis_name: Any) -> tuple[Any, ...]:
    """The axes in an `axis_name=` argument: none, one, or several."""
    return () if axis_name is None else tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)


# -- selection


def tree_where(pred: Any, a: Tree, b: Tree) -> Tree:
    """Return `a` if `pred` holds, else `b`, bit for bit. `pred` is a scalar bool and may be traced.

    Arrays and numbers are selected; if their dtypes differ, the result has the wider one. Other leaves must be equal in
    both trees. float0 leaves stay float0.

    Args:
        pred: A scalar bool.
        a: A pytree.
        b: A pytree of the same structure.

    Returns:
        A pytree like both.

    >>> import jax.numpy as jnp
    >>> tree_where(jnp.array(False), {"w": jnp.ones(2), "act": "relu"}, {"w": jnp.zeros(2), "act": "relu"})
    {'act': 'relu', 'w': Array([0., 0.], dtype=float32)}
    """
    check_bool("tree_where", pred, "tree_where(jaxamp.all_finite(grads), new, old), or jnp.where for arrays")
    return jax.tree.map(lambda x, y: _select_leaf(pred, x, y), a, b)


def check_bool(name: str, pred: Any, instead: str, expected: str = "one bool", error: type = TypeError) -> None:
    """Raise an error in the name of `name` unless a condition is a single bool."""
    if is_array(pred):
        given = f"of shape {pred.shape} and dtype {pred.dtype}"
    else:
        given = f"of type {type(pred).__name__}"
    if not (isinstance(pred, bool) or (is_array(pred) and pred.dtype == jnp.bool_ and pred.shape == ())):
        raise error(f"{name} got a condition {given}; expected {expected}. Write {instead}.")


def _select_leaf(pred: Any, x: Any, y: Any) -> Any:
    if x is y:
        return x
    any_array = is_array(x) or is_array(y)
    if not (is_array_or_number(x) and is_array_or_number(y)):
        if any_array or x != y:
            raise TypeError(
                f"tree_where got {x!r} and {y!r} in the same place; expected two arrays, or two equal leaves. "
                "Keep only arrays in the tree, for instance with eqx.partition(tree, eqx.is_array)."
            )
        return x
    if not any_array and type(x) is type(y) and repr(x) == repr(y):
        return x
    if jnp.result_type(x) == jax.dtypes.float0:
        return x
    x, y = jnp.asarray(x), jnp.asarray(y)
    if x.dtype != y.dtype:  # only then: a PRNG key can't be cast, not even to its own dtype
        dtype = wider_dtype(x.dtype, y.dtype)
        x, y = x.astype(dtype), y.astype(dtype)
    return lax.select(pred, x, y)
