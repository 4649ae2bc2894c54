"""Runs the body of a `shard_map` equation by equation, on all devices at once.

A value of the body is held as one array for all devices, with these along its last axis. It is last because loops take
slices along the first one. Where JAX knows that a value is the same along an axis of the mesh, it is held once.
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from .._compat import Literal, open_jaxpr, varying_axes
from .._jaxpr import bind

# Higher-order primitives that treat the last axis of an operand as any other. The rest are one operation.
_CALLS = {"jit", "closed_call", "call", "eval_jaxpr", "checkpoint", "remat2", "custom_jvp_call", "custom_vjp_call"}
_ENTERED = {*_CALLS, "custom_vmap_call", "composite"}


class Mapped:
    """The devices that run a `shard_map`, and how values of its body are held."""

    def __init__(self, eqn: Any):
        self._params = params = eqn.params
        self._axes = tuple(axis for axis in params["mesh"].axis_names if axis in params["newly_manual_axes"])
        self._body = open_jaxpr(params["jaxpr"])
        self._outside = jax.sharding.get_abstract_mesh()
        self._known: dict[Any, tuple[Any, Callable[..., Any]]] = {}  # compiled equations; they stay alive with them

    @classmethod
    def of(cls, eqn: Any) -> "Mapped | None":
        """For a `shard_map` whose devices are known; None for another equation."""
        is_map = eqn.primitive.name == "shard_map" and isinstance(eqn.params["mesh"], Mesh)
        return cls(eqn) if is_map else None

    def outside(self) -> AbstractContextManager[Any]:
        """The context of the whole, in which arrays for all devices can be computed with."""
        return jax.sharding.use_abstract_mesh(self._outside)

    def enter(self, operands: Sequence[Any]) -> list[Any]:
        """The operands of the body, held for all devices."""
        specs = tuple(self._spec(v.aval) for v in self._body.invars)
        add = self._run(lambda *xs: [x[..., None] for x in xs], self._params["in_specs"], list(specs))
        return list(add(*operands))

    def leave(self, results: Sequence[Any]) -> list[Any]:
        """The results of the whole, from those of the body."""
        specs = tuple(self._spec(v.aval) for v in self._body.outvars)
        return list(self._run(lambda *xs: tuple(x[..., 0] for x in xs), specs, self._params["out_specs"])(*results))

    def held(self, atoms: Sequence[Any], values: Sequence[Any]) -> list[Any]:
        """Values with the numbers that are written in the program held as the others are."""
        pairs = zip(atoms, values, strict=True)
        return [self.hold(x, atom.aval) if isinstance(atom, Literal) else x for atom, x in pairs]

    def hold(self, x: Any, aval: Any) -> jax.Array:
        """An array that all devices have."""
        x = jnp.asarray(x, getattr(x, "dtype", aval.dtype))[..., None]
        sizes = [self._params["mesh"].shape[axis] for axis in self._axes_of(aval)]
        return jnp.broadcast_to(x, (*x.shape[:-1], math.prod(sizes)))

    def operands(self, eqn: Any, operands: list[Any]) -> list[Any] | None:
        """What to enter a higher-order equation of the body with; None if it can't be entered here."""
        name = eqn.primitive.name
        if name == "cond":  # entered if all devices take the same branch
            first = operands[0].ravel()[0]
            return [first, *operands[1:]] if bool((operands[0] == first).all()) else None
        return operands if name in _ENTERED or (name == "scan" and eqn.params["length"]) else None

    def inlines(self, eqn: Any) -> bool:
        """Whether the body of an equation of the body can be taken for a part of it."""
        return eqn.primitive.name in _ENTERED

    def compiled(self, piece: Any, run: Callable[..., list[Any]]) -> Callable[..., Any]:
        """Operations of the body, which `run` runs on one device, for all devices."""
        types = {
            x: v.aval
            for operation in piece.operations
            for values, atoms in (
                (operation.operands, operation.eqn.invars),
                (operation.results, operation.eqn.outvars),
            )
            for x, v in zip(values, atoms, strict=True)
            if isinstance(x, int)
        }
        ins, outs = ([self._spec(types[x]) for x in some] for some in (piece.reads, piece.returns))
        return self._run(lambda *xs: [x[..., None] for x in run(*(x[..., 0] for x in xs))], tuple(ins), outs)

    def bind(self, eqn: Any, operands: Sequence[Any], **changed: Any) -> list[Any]:
        """Run an equation of the body on all devices."""
        key = id(eqn), tuple(x.dtype for x in operands), tuple(changed.items())
        if key not in self._known:
            ins, outs = ([self._spec(v.aval) for v in some] for some in (eqn.invars, eqn.outvars))

            def run(*xs: Any) -> list[Any]:
                return [x[..., None] for x in bind(eqn, [x[..., 0] for x in xs], **changed)]

            self._known[key] = eqn, self._run(run, tuple(ins), outs)
        return list(self._known[key][1](*operands))

    def _run(self, fn: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        params = self._params
        return jax.jit(
            jax.shard_map(
                fn,
                mesh=params["mesh"],
                in_specs=in_specs,
                out_specs=out_specs,
                check_vma=params["check_vma"],
                axis_names=params["newly_manual_axes"],
            )
        )

    def _axes_of(self, aval: Any) -> tuple[Any, ...]:
        """The axes of the mesh along which a value may differ."""
        if not self._params["check_vma"]:
            return self._axes
        return tuple(axis for axis in self._axes if axis in varying_axes(aval))

    def _spec(self, aval: Any) -> PartitionSpec:
        return PartitionSpec(*[None] * aval.ndim, self._axes_of(aval) or None)
