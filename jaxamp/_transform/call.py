"""Calls as flat functions of arrays.

A function, its arguments and its results are pytrees. Their arrays are taken out; the rest, with the structure, is what
a trace depends on.
"""

import enum
import functools
import types
from collections.abc import Callable, Hashable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import tree_util as jtu

from .._compat import current_name_stack, scopes


class _Array:
    """Stands where an array was among the leaves of a call."""


_ARRAY = _Array()


def _is_array(x: Any) -> bool:
    return isinstance(x, jax.Array | np.ndarray | np.generic | jax.Ref)


def _is_argument(x: Any) -> bool:
    return _is_array(x) or isinstance(x, jax.ShapeDtypeStruct)  # enough to plan a call


def _take_out(tree: Any, is_array: Callable[[Any], bool]) -> tuple[list[Any], tuple[Any, ...], Any]:
    leaves, structure = jtu.tree_flatten(tree)
    arrays = [x for x in leaves if is_array(x)]
    return arrays, tuple(_ARRAY if is_array(x) else x for x in leaves), structure


def _put_back(structure: Any, static: tuple[Any, ...], arrays: Any) -> Any:
    it = iter(arrays)
    return jtu.tree_unflatten(structure, [next(it) if x is _ARRAY else x for x in static])


@jtu.register_static
class Result(NamedTuple):
    """What a call returned, without its arrays. A pytree without leaves, so that `jit` keeps it with the trace."""

    structure: Any
    static: tuple[Any, ...]

    def with_arrays(self, arrays: Any) -> Any:
        return _put_back(self.structure, self.static, arrays)


class Call(NamedTuple):
    """A call without its arrays: the part that a trace depends on, next to the types of the arrays."""

    structure: Any
    static: tuple[Any, ...]
    kinds: tuple[Any, ...]  # tells 1, 1.0 and True apart, and 0.0 and -0.0
    path: tuple[str, ...]  # the named scopes around the call

    def __call__(self, *arrays: Any) -> tuple[list[Any], Result]:
        """The arrays that the function returns, and the rest of its result."""
        fn, args, kwargs = _put_back(self.structure, self.static, arrays)
        out, static, structure = _take_out(fn(*args, **kwargs), _is_array)
        return out, Result(structure, static)

    @property
    def is_cacheable(self) -> bool:
        """Whether a trace of this call may be used for another one that is equal to it."""
        return all(map(_is_frozen, self.static)) and isinstance(self.structure, Hashable) and _is_hashable(self)


def split_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> tuple[Call, list[Any]]:
    """A call and its arrays. `fn` may have some too: an Equinox module, a `jax.tree_util.Partial`."""
    arrays, static, structure = _take_out((fn, args, kwargs), _is_argument)
    return Call(structure, static, tuple(map(_kind, static)), scopes(current_name_stack())), arrays


def floats_of_first(fn: Callable[..., Any], args: tuple[Any, ...]) -> list[int]:
    """Where the floats of the first argument are among the arrays of a call; those of `fn` come first."""
    before = sum(map(_is_argument, jtu.tree_leaves(fn)))
    first = [x for x in jtu.tree_leaves(args[:1]) if _is_argument(x)]
    return [before + i for i, x in enumerate(first) if jnp.issubdtype(x.dtype, jnp.floating)]


def _kind(x: Any) -> Any:
    return repr(x) if isinstance(x, float | complex) else type(x)


# Leaves that can't change behind our back. An object of a user's class may hold arrays that are replaced between calls.
_FROZEN = (str, bytes, bool, int, float, complex, type, np.dtype, enum.Enum, types.BuiltinFunctionType, _Array)


def _is_frozen(x: Any) -> bool:
    if isinstance(x, types.MethodType):
        return _is_frozen(x.__self__)
    if isinstance(x, functools.partial):
        return all(map(_is_frozen, (x.func, *x.args, *x.keywords.values())))
    return isinstance(x, (*_FROZEN, types.FunctionType)) or type(x).__module__.partition(".")[0] in ("jax", "jaxlib")


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
