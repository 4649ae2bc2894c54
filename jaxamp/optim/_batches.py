"""Which leaves are stepped together: small ones that are alike are packed, the others are stepped alone."""

from typing import Any, NamedTuple

import jax

from .._compat import varying_axes
from ._leaf_step import Leaf, StepContext, step_leaf
from ._packing import pack, unpack
from ._settings import Settings
from ._sharding import split_sharding
from ._state import LeafState


class Task(NamedTuple):
    """A leaf to be stepped, and its position among the parameters."""

    position: int
    settings: Settings
    leaf: Leaf


class Batch:
    """Leaves that are stepped as one array."""

    def __init__(self, context: StepContext, tasks: list[Task]):
        self.context, self.tasks = context, tasks
        self.leaf = tasks[0].leaf if len(tasks) == 1 else pack([task.leaf for task in tasks])

    def step(self, ok: Any, tops: Any) -> list[tuple[int, jax.Array, LeafState]]:
        """Return position, parameter or change, and state of each leaf."""
        stepped = step_leaf(self.context._replace(ok=ok), self.leaf, tops)
        results = [stepped] if len(self.tasks) == 1 else unpack([task.leaf for task in self.tasks], *stepped)
        return [(task.position, *result) for task, result in zip(self.tasks, results, strict=True)]


def batch_tasks(tasks: list[Task]) -> list[list[Task]]:
    """Put small leaves with equal settings and dtypes into one list, and each other leaf into its own."""
    lists: dict[Any, list[Task]] = {}
    for task in tasks:
        settings, (param, grad, state, groups) = task.settings, task.leaf
        small = param.size < settings.storage.together and groups.axis != -2 and split_sharding(param) is None
        dtypes = tuple(None if x is None else x.dtype for x in (param, grad, *state))
        axes = frozenset().union(*(varying_axes(x) for x in (param, grad, *state) if x is not None))
        lists.setdefault((settings.group, dtypes, axes) if small else task.position, []).append(task)
    return list(lists.values())
