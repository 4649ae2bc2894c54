"""The state of delayed scaling: for each slot of a program, the largest numbers of the last steps.

    largest = max(history), for this step        history = (the largest of this step, all but the last of history)

A step at which a slot saw nothing but zeros, or was not reached, leaves its history alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._compat import Jaxpr
from .slots import Slot, with_slots

_NO_OPERAND = np.float32(448)  # what a slot reads before it has seen anything: operands are rounded as they are,
_NO_COTANGENT = np.float32(2.0**-8)  # and cotangents from about 1e-12 on are numbers of e5m2


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DelayedScales:
    """The state of delayed scaling, from `jaxamp.init_scales`: a pytree of small float32 arrays.

    Attributes:
        histories: By the name of a place in the program: `(..., history)`, the largest numbers of the last steps, the
            newest first, zero where there is none. Leading axes are rounds of scans over layers.

    >>> import jax.numpy as jnp
    >>> scales = DelayedScales({"mlp/dot_general/lhs": jnp.array([2.0, 5.0, 0.0])})
    >>> seen = DelayedScales({"mlp/dot_general/lhs": jnp.array([3.0, 0.0, 0.0])})
    >>> scales.update(seen).histories["mlp/dot_general/lhs"].tolist()
    [3.0, 2.0, 5.0]
    """

    histories: dict[str, Any]

    def update(self, maxima: "DelayedScales") -> "DelayedScales":
        """The state after a step.

        Args:
            maxima: What the step saw: the derivative by this state.

        Returns:
            The next state.
        """
        together = _Together(self.histories)
        seen = together.newest(maxima.histories)
        old = together.joined(self.histories)
        new = [
            jnp.where((s > 0)[:, None], jnp.concatenate([s[:, None], h[:, :-1]], axis=1), h)
            for s, h in zip(seen, old, strict=True)
        ]
        return DelayedScales(together.parted(new))

    def merge(self, other: "DelayedScales") -> "DelayedScales":
        """The larger of two, entry by entry.

        Args:
            other: What another micro-batch saw, say.

        Returns:
            What both saw together.
        """
        return jax.tree.map(jnp.maximum, self, other)

    def __repr__(self) -> str:
        return f"DelayedScales of {len(self.histories)} places"


class _Together:
    """Histories as few large arrays: one for each length."""

    def __init__(self, histories: Mapping[str, Any]):
        self._names: dict[int, list[str]] = {}
        for name, history in histories.items():
            self._names.setdefault(history.shape[-1], []).append(name)
        self._shapes = {name: history.shape for name, history in histories.items()}

    def joined(self, histories: Mapping[str, Any]) -> list[Any]:
        """`(slots, length)` for each length."""
        return [
            jnp.concatenate([jnp.reshape(histories[name], (-1, length)) for name in names])
            for length, names in self._names.items()
        ]

    def newest(self, histories: Mapping[str, Any]) -> list[Any]:
        """The newest entries."""
        return [
            jnp.concatenate([jnp.reshape(histories[name][..., 0], (-1,)) for name in names])
            for names in self._names.values()
        ]

    def parted(self, arrays: Sequence[Any], drop: int = 0) -> dict[str, Any]:
        """Arrays of all slots as one for each; `drop`: how many axes of the histories they don't have."""
        found = {}
        for array, names in zip(arrays, self._names.values(), strict=True):
            start = 0
            for name in names:
                shape = self._shapes[name]
                count = int(np.prod(shape[:-1], dtype=int))
                part = array[start : start + count]
                found[name] = jnp.reshape(part, shape[: len(shape) - drop])
                start += count
        return {name: found[name] for name in self._shapes}


@jax.custom_vjp
def _read(histories: dict[str, Any]) -> dict[str, Any]:
    """The largest number in each history. Its derivative has a cotangent as the newest entry."""
    together = _Together(histories)
    return together.parted([jnp.max(array, axis=1) for array in together.joined(histories)], drop=1)


def _read_forward(histories: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    return _read(histories), histories


def _read_backward(histories: dict[str, Any], cts: dict[str, Any]) -> tuple[dict[str, Any]]:
    return ({name: jnp.zeros_like(h).at[..., 0].set(cts[name]) for name, h in histories.items()},)


_read.defvjp(_read_forward, _read_backward)


def empty_scales(slots: Mapping[str, Slot]) -> DelayedScales:
    """The state of a program that has not run."""
    return DelayedScales({name: jnp.zeros((*slot.rounds, slot.history)) for name, slot in slots.items()})


def taken(scales: DelayedScales, program: Jaxpr) -> tuple[Jaxpr, list[Any]]:
    """A program that reads its scales from slots, and what these read."""
    new, slots = with_slots(program)
    _check_places(scales, slots)
    if not slots:
        return new, []
    largest = _read({name: scales.histories[name] for name in slots})
    before = {name: _NO_COTANGENT if slot.is_cotangent else _NO_OPERAND for name, slot in slots.items()}
    return new, [_unless_zero(largest[name], before[name]) for name in slots]


@jax.custom_jvp
def _unless_zero(largest: Any, otherwise: Any) -> Any:
    return jnp.where(largest > 0, largest, otherwise)


@_unless_zero.defjvp
def _unless_zero_jvp(primals: Any, tangents: Any) -> Any:
    return _unless_zero(*primals), tangents[0]


def _check_places(scales: DelayedScales, slots: Mapping[str, Slot]) -> None:
    wanted = {name: (*slot.rounds, slot.history) for name, slot in slots.items()}
    given = {name: tuple(history.shape) for name, history in scales.histories.items()}
    if wanted == given:
        return
    differs = [name for name in {**wanted, **given} if wanted.get(name) != given.get(name)]
    first = differs[0]
    has, needs = (f"has shape {found[first]}" if first in found else "is missing" for found in (given, wanted))
    raise ValueError(
        f"The scales are of another program: {len(differs)} places differ. The first is {first!r}, which {has} in the "
        f"scales and {needs} in the program. Write jaxamp.init_scales(fn)(*args) for this function, policy and "
        "arguments."
    )
