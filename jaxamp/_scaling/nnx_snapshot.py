"""The state of Flax NNX objects before a step, to go back to."""

from typing import Any, NamedTuple

import jax

from .._transform.nnx_state import nodes_of, split_nodes
from .._tree import cast_floating_like, tree_where


class Snapshot(NamedTuple):
    """The values of variables at one time."""

    paths: list[tuple[Any, ...]]
    variables: list[Any]
    values: list[Any]

    def changed(self) -> list[tuple[tuple[Any, ...], Any, Any, Any]]:
        """The path of each variable that has changed, the variable, and its value then and now."""
        rows = zip(self.paths, self.variables, self.values, strict=True)
        return [(path, v, old, v.get_raw_value()) for path, v, old in rows if v.get_raw_value() is not old]

    def restore_unless(self, finite: Any) -> None:
        """Give variables their values back unless `finite`. Variables and shapes that are new stay."""
        for _, variable, old, new in self.changed():
            if jax.tree.map(jax.numpy.shape, old) == jax.tree.map(jax.numpy.shape, new):
                variable.set_raw_value(tree_where(finite, cast_floating_like(new, old), old))


def snapshot_of(tree: Any) -> Snapshot:
    """The values of all variables in a pytree with NNX objects."""
    nodes = split_nodes(nodes_of(tree))
    found = [(path, x) for path, x, is_variable in zip(nodes.paths, nodes.leaves, nodes.graph.variables) if is_variable]
    return Snapshot([path for path, _ in found], [x for _, x in found], [x.get_raw_value() for _, x in found])
