"""Calls as flat functions of arrays.

A function, its arguments and its results are pytrees. Their arrays are taken out; the rest, with the structure, is what
a trace depends on. Objects of Flax NNX are taken apart too, and updated after the call (`nnx_state.py`).
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

from .._compat import current_name_stack, name_in_errors, scopes
from .mutation import check_unchanged, watch
from .names import named_arguments, named_leaves, source_of
from .nnx_state import (
    Change,
    Graph,
    Inside,
    Nodes,
    has_modules,
    is_frozen_transform,
    is_node,
    node_test,
    nodes_of,
    open_function,
    split_nodes,
)


class _Place(enum.Enum):
    """Stands among the leaves of a call where something was taken out."""

    ARRAY = enum.auto()
    NODE = enum.auto()  # an object of NNX


_ARRAY, _NODE = _Place.ARRAY, _Place.NODE


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


class _Tree(NamedTuple):
    """A pytree whose NNX objects were taken out."""

    leaves: list[Any]
    structure: Any
    nodes: list[Any]

    @classmethod
    def of(cls, tree: Any) -> "_Tree":
        is_node = node_test()
        leaves, structure = jtu.tree_flatten(tree, is_node)
        nodes = [] if is_node is None else [x for x in leaves if is_node(x)]
        return cls([_NODE if is_node(x) else x for x in leaves] if nodes and is_node else leaves, structure, nodes)


def _with_nodes(structure: Any, leaves: list[Any], nodes: Any) -> Any:
    it = iter(nodes)
    return jtu.tree_unflatten(structure, [next(it) if x is _NODE else x for x in leaves])


@jtu.register_static
class Result(NamedTuple):
    """What a call returned, without its arrays. A pytree without leaves, so that `jit` keeps it with the trace."""

    structure: Any
    parts: Any  # the structure of the leaves, of the new state, and of the values of NNX objects that were returned
    static: tuple[Any, ...]
    change: Change | None
    is_low: bool = False  # something ran in the compute dtype

    def with_arrays(self, arrays: Any, nodes: Nodes | None = None) -> Any:
        """The result. The user's NNX objects, the `nodes` of the call, get their new state."""
        leaves, state, returned = _put_back(self.parts, self.static, arrays)
        objects = (nodes or split_nodes(())).update(self.change, state, returned) if self.change else []
        return _with_nodes(self.structure, leaves, objects)


class Call(NamedTuple):
    """A call without its arrays: the part that a trace depends on, next to the types of the arrays."""

    structure: Any
    parts: Any  # the structure of the leaves, and of the values in NNX objects
    static: tuple[Any, ...]
    kinds: tuple[Any, ...]  # tells 1, 1.0 and True apart, and 0.0 and -0.0
    path: tuple[str, ...]  # the named scopes around the call
    graph: Graph | None  # of the NNX objects
    paths: tuple[tuple[Any, ...], ...] = ()  # of the values in them

    def __call__(self, *arrays: Any) -> tuple[list[Any], Result]:
        """The arrays that the function returns, and the rest of its result. State of NNX objects comes last."""
        leaves, values = _put_back(self.parts, self.static, arrays)
        inside = self.graph.merge(values) if self.graph else None
        fn, args, kwargs = _with_nodes(self.structure, leaves, inside.nodes if inside else ())
        arguments = watch(fn, args, kwargs, node_test())
        out = _Tree.of(fn(*args, **kwargs))
        check_unchanged(arguments, node_test())
        change, state, returned = _changes(inside, out.nodes)
        outs, static, parts = _take_out((out.leaves, state, returned), _is_array)
        return outs, Result(out.structure, parts, static, change)

    def name(self, flat: Callable[..., Any]) -> None:
        """Let JAX's errors about a trace of `flat`, a function of the arrays, speak of the user's function."""
        count = sum(x is _ARRAY for x in self.static)
        leaves, values = _put_back(self.parts, self.static, [_ARRAY] * count)
        try:
            objects = self.graph.merge(values).nodes if self.graph else ()
            fn, args, kwargs = _with_nodes(self.structure, leaves, objects)
            named = [leaf for pair in named_arguments(fn, args, kwargs) for leaf in named_leaves(*pair, node_test())]
        except Exception:  # a class of the user's that takes nothing but arrays
            return
        names = [name for name, x in named if x is _ARRAY]
        nodes = [name for name, x in named if is_node(x)]
        for (node, *path), value in zip(self.paths, values, strict=True):
            name = nodes[node] + "".join(f".{key}" for key in path)
            names += [name + end for end, x in named_leaves("", value) if x is _ARRAY]
        if len(names) == count:
            name_in_errors(flat, source_of(fn), names)

    @property
    def is_cacheable(self) -> bool:
        """Whether a trace of this call may be used for another one that is equal to it."""
        return all(map(_is_frozen, self.static)) and isinstance(self.structure, Hashable) and _is_hashable(self)


def _changes(inside: Inside | None, returned: list[Any]) -> tuple[Change | None, list[Any], list[Any]]:
    if inside is None and not returned:
        return None, [], []
    return (inside or split_nodes(()).graph.merge([])).change(returned)


class Split(NamedTuple):
    """A call, its arrays, and the NNX objects in it, which `Result.with_arrays` updates."""

    call: Call
    arrays: list[Any]
    nodes: Nodes | None


def split_call(fn: Callable[..., Any], args: Any, kwargs: Any) -> Split:
    """A call and its arrays. `fn` may have some too: an Equinox module, a `jax.tree_util.Partial`, a method of NNX."""
    tree = _Tree.of((open_function(fn), args, kwargs))
    try:
        nodes = split_nodes(tree.nodes) if tree.nodes else None
    except TypeError:  # NNX can't take the object of a method apart, say a compiled Keras model: it stays as it is
        tree = _Tree.of((fn, args, kwargs))
        nodes = split_nodes(tree.nodes) if tree.nodes else None
    arrays, static, parts = _take_out((tree.leaves, nodes.values if nodes else []), _is_argument)
    path = scopes(current_name_stack())
    graph, paths = (nodes.graph, tuple(map(tuple, nodes.paths))) if nodes else (None, ())
    call = Call(tree.structure, parts, static, tuple(map(_kind, static)), path, graph, paths)
    return Split(call, arrays, nodes)


def floats_of_first(fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int, str]:
    """Where the floats of the first argument are among the arrays of a call, and their paths.

    Of NNX modules, where the parameters are. The arrays of `fn` come first; the state of NNX objects comes last.
    """
    fn, first = open_function(fn), args[:1]
    leaves = jtu.tree_leaves_with_path(first, is_leaf=node_test())
    arrays = [(path, x) for path, x in leaves if _is_argument(x)]
    before = sum(map(_is_argument, _Tree.of(fn).leaves))
    found = {before + i: jtu.keystr(path[1:]) for i, (path, x) in enumerate(arrays) if _is_float(x)}
    if nodes_of(first):
        at = sum(map(_is_argument, _Tree.of((fn, args, kwargs)).leaves))
        nodes, all_floats = [path for path, x in leaves if is_node(x)], not has_modules(first)
        shared = split_nodes(nodes_of(fn))
        for i, (path, value, trained) in enumerate(split_nodes(nodes_of((fn, first))).items()):
            values = [x for x in jtu.tree_leaves(value) if _is_argument(x)]
            if (trained or all_floats) and i >= len(shared.leaves):
                name = jtu.keystr(nodes[path[0] - len(nodes_of(fn))][1:]) + "".join(f".{key}" for key in path[1:])
                found |= {at + k: name for k, x in enumerate(values) if _is_float(x)}
            at += len(values)
    return {i: path or "the argument" for i, path in found.items()}


def _is_float(x: Any) -> bool:
    return bool(jnp.issubdtype(x.dtype, jnp.floating))


def _kind(x: Any) -> Any:
    return repr(x) if isinstance(x, float | complex) else type(x)


# Leaves that can't change behind our back. An object of a user's class may hold arrays that are replaced between calls.
_FROZEN = (str, bytes, bool, int, float, complex, type, np.dtype, enum.Enum, types.BuiltinFunctionType)


def _is_frozen(x: Any) -> bool:
    if isinstance(x, types.MethodType):
        return _is_frozen(x.__self__)
    if isinstance(x, functools.partial):
        return all(map(_is_frozen, jtu.tree_leaves((x.func, *x.args, *x.keywords.values()))))
    if isinstance(x, (*_FROZEN, types.FunctionType)) or type(x).__module__.partition(".")[0] in ("jax", "jaxlib"):
        return True
    return is_frozen_transform(x)


def _is_hashable(x: Any) -> bool:
    try:
        hash(x)
    except TypeError:
        return False
    return True
