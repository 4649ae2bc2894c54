"""Objects of Flax NNX in a call: taken apart before it, and updated in place after it.

NNX objects hold their state and share submodules by reference; as pytrees, they would be copied, and what a function
does to a copy is lost. So the objects of a call are flattened as one graph. After the call the graph is flattened
again, and what differs goes back into the user's objects, as with `nnx.jit`: mostly the values of some variables, now
and then the structure too (`sow` adds variables). Flax is never imported here: without it there are no such objects.
"""

import functools
import inspect
import sys
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import tree_util as jtu


def loaded_nnx() -> Any:
    """The module `flax.nnx`, if the user has imported it."""
    return sys.modules.get("flax.nnx")


def is_node(x: Any) -> bool:
    """Whether `x` is a module, an optimizer, a variable, or another object with state of NNX."""
    kind: Any = type(x)
    return loaded_nnx() is not None and _is_node_type(kind)


@functools.lru_cache(1024)
def _is_node_type(kind: type) -> bool:
    graph = loaded_nnx().graph
    return issubclass(kind, loaded_nnx().Variable) or isinstance(
        graph.get_node_impl_for_type(kind), graph.GraphNodeImpl
    )


def node_test() -> Callable[[Any], bool] | None:
    """`is_node`, as the `is_leaf` of functions on pytrees; None as long as there can't be any."""
    return is_node if loaded_nnx() is not None else None


def nodes_of(tree: Any) -> list[Any]:
    """The NNX objects in a pytree."""
    test = node_test()
    return [] if test is None else [x for x in jtu.tree_leaves(tree, is_leaf=test) if test(x)]


def has_modules(tree: Any) -> bool:
    """Whether a pytree has NNX objects other than variables, which an `nnx.State` has too."""
    return any(not isinstance(x, loaded_nnx().Variable) for x in nodes_of(tree))


def open_function(fn: Callable[..., Any]) -> Callable[..., Any]:
    """The method of a module, or a partial application to one, as a pytree with the module in it."""
    if loaded_nnx() is None or isinstance(fn, jtu.Partial):
        return fn
    inner: Any = fn
    args, kwargs = tuple[Any, ...](), dict[str, Any]()
    while True:
        if isinstance(inner, functools.partial):
            inner, args, kwargs = inner.func, (*inner.args, *args), {**inner.keywords, **kwargs}
        elif isinstance(inner, types.MethodType) and is_node(inner.__self__):
            inner, args = inner.__func__, (inner.__self__, *args)
        else:
            return jtu.Partial(inner, *args, **kwargs) if nodes_of((args, kwargs)) else fn


def is_frozen_transform(x: Any) -> bool:
    """Whether `x` is a function under `nnx.jit`, without arguments of its own: it can't change between calls."""
    return type(x).__module__.startswith("flax.nnx.transforms") and not getattr(x, "partial_args", ())


# -- the graph of a call


class Graph(NamedTuple):
    """The structure of the NNX objects of a call: what a trace depends on."""

    definition: Any
    variables: tuple[bool, ...]  # which leaves are values of variables; the others are bare arrays

    def merge(self, values: list[Any]) -> "Inside":
        """New objects with these values, for the function to work on."""
        index = loaded_nnx().graph.IndexMap()
        flat = [jtu.tree_flatten(value) for value in values]
        nodes = loaded_nnx().unflatten(self.definition, list(values), index_ref=index)
        return Inside(self, nodes, flat, index)


@jtu.register_static
class Change(NamedTuple):
    """What a call did to its NNX objects, without the arrays."""

    definition: Any  # the new structure, if there is more than new values of variables
    changed: tuple[int, ...]  # else the leaves of the graph that have new values
    returned: Any  # the structure of the objects that the function returned


class Inside(NamedTuple):
    """The NNX objects that a function works on while it is traced."""

    graph: Graph
    nodes: tuple[Any, ...]
    given: list[Any]  # the leaves and the structure of each value, before the call
    index: Any

    def change(self, returned: Sequence[Any]) -> tuple[Change, list[Any], list[Any]]:
        """What happened to the objects: the values that change, and those of the objects that were returned."""
        ref_map = loaded_nnx().graph.RefMap
        outer, known = ref_map((node, i) for i, node in self.index.items()), ref_map()
        definition, values = _flatten(self.nodes, known)
        in_place = all(self.index.get(i) is node for node, i in known.items())  # none was replaced or moved
        if in_place and definition == self.graph.definition:
            changed = tuple(i for i, value in enumerate(values) if not _is_same(self.given[i], jtu.tree_flatten(value)))
            if all(self.graph.variables[i] for i in changed):
                out, out_values = _flatten(returned, known, outer)
                return Change(None, changed, out), [values[i] for i in changed], out_values
        known = ref_map()
        definition, values = _flatten(self.nodes, known, outer)
        out, out_values = _flatten(returned, known, outer)
        return Change(definition, (), out), values, out_values


class Nodes(NamedTuple):
    """The user's NNX objects in a call, to be updated in place."""

    graph: Graph
    paths: list[tuple[Any, ...]]
    leaves: list[Any]  # variables, and bare arrays
    known: Any  # the numbers of the objects in the graph

    @property
    def values(self) -> list[Any]:
        return [_as_arrays(_raw(leaf)) for leaf in self.leaves]

    def items(self) -> Iterator[tuple[tuple[Any, ...], Any, bool]]:
        """The path of each leaf, its value, and whether it is trained."""
        trained = (isinstance(leaf, loaded_nnx().Param) for leaf in self.leaves)
        return zip(self.paths, self.values, trained, strict=True)

    def update(self, change: Change, values: list[Any], returned: list[Any]) -> list[Any]:
        """Give the user's objects their new state. Returns the objects that the function returned."""
        nnx = loaded_nnx()
        outer = nnx.graph.IndexMap((i, node) for node, i in self.known.items())
        index = outer
        if change.definition is None:
            for i, value in zip(change.changed, values, strict=True):
                self.leaves[i].set_raw_value(value)
        else:
            for variable in self.variables:  # NNX refuses those of another trace, and does so before they are cleared
                variable.set_raw_value(variable.get_raw_value())
            index = nnx.graph.IndexMap()
            nnx.unflatten(change.definition, list(values), index_ref=index, outer_index_outer_ref=outer)
        return list(nnx.unflatten(change.returned, list(returned), index_ref=index, outer_index_outer_ref=outer))

    @property
    def variables(self) -> list[Any]:
        return [leaf for leaf, is_variable in zip(self.leaves, self.graph.variables, strict=True) if is_variable]


def split_nodes(nodes: Sequence[Any]) -> Nodes:
    """The structure and the state of NNX objects, which may share parts."""
    nnx = loaded_nnx()
    known = nnx.graph.RefMap()
    definition, flat = _flatten(nodes, known, with_paths=True)
    leaves = list(flat.leaves)
    graph = Graph(definition, tuple(isinstance(x, nnx.Variable) for x in leaves))
    return Nodes(graph, list(flat.paths), leaves, known)


def _flatten(nodes: Sequence[Any], known: Any, outer: Any = None, with_paths: bool = False) -> tuple[Any, Any]:
    """The definition of a graph, and its leaves. `known` numbers the objects that were seen, and gets the new ones."""
    flatten = loaded_nnx().flatten
    options = {"graph": True} if _has_modes(flatten) else {}
    return flatten(tuple(nodes), with_paths=with_paths, ref_index=known, ref_outer_index=outer, **options)


@functools.lru_cache
def _has_modes(flatten: Callable[..., Any]) -> bool:
    """Whether this Flax can treat objects as trees too. As graphs, nothing is lost in either mode."""
    return "graph" in inspect.signature(flatten).parameters


def _raw(leaf: Any) -> Any:
    return leaf.get_raw_value() if isinstance(leaf, loaded_nnx().Variable) else leaf


def _as_arrays(value: Any) -> Any:
    """A Python number in a variable is traced, as by `nnx.jit`: it may count steps."""
    return jax.tree.map(lambda x: jnp.asarray(x) if isinstance(x, bool | int | float | complex) else x, value)


def _is_same(a: Any, b: Any) -> bool:
    return a[1] == b[1] and all(x is y for x, y in zip(a[0], b[0], strict=True))
