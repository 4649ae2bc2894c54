"""Programs over several devices that gather their weights in different ways.

A weight is split over the axis "d" of a mesh, and so is the batch.
"""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec


class Sharded(NamedTuple):
    """A loss, and shapes and shardings of its weights and its batch."""

    loss: Callable[[Any, Any], Any]
    mesh: Mesh
    weights: list[tuple[tuple[int, ...], PartitionSpec]]
    batch: tuple[tuple[int, ...], PartitionSpec]
    inside: Callable[[Callable[..., Any]], Callable[[Any, Any], Any]] | None = None  # transform -> gradient

    def specs(self) -> tuple[list[jax.ShapeDtypeStruct], jax.ShapeDtypeStruct]:
        shaped = lambda shape, spec: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(self.mesh, spec))
        return [shaped(*weight) for weight in self.weights], shaped(*self.batch)

    def gradient(self, transform: Callable[..., Any]) -> Callable[[Any, Any], Any]:
        """Gradients by the weights, split as these; of the transformed loss, or inside of what is transformed."""
        if self.inside is not None:
            return self.inside(transform)
        shardings = [NamedSharding(self.mesh, spec) for _, spec in self.weights]

        def gradient(weights: Any, batch: Any) -> Any:
            grads = jax.grad(transform(self.loss))(weights, batch)
            if self.is_explicit:
                return grads
            return [lax.with_sharding_constraint(g, s) for g, s in zip(grads, shardings, strict=True)]

        return gradient

    @property
    def is_explicit(self) -> bool:
        return AxisType.Explicit in self.mesh.axis_types

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return jax.set_mesh(self.mesh) if self.is_explicit else contextlib.nullcontext()


P = PartitionSpec


def programs(devices: Any, width: int, rows: int) -> dict[str, Callable[[], Sharded]]:
    """Programs by name, for so many devices; `rows` of the batch for each of them."""
    devices = np.asarray(devices)
    mesh = Mesh(devices, ("d",))
    square, stacked = (width, width), (3, width, width)
    batch = (rows * devices.size, width), P("d")
    split, everywhere = P("d"), NamedSharding(mesh, P())
    gathered = lambda w: lax.with_sharding_constraint(w, everywhere)

    def layers(gather: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = jnp.tanh(x @ gather(w))
            return jnp.mean(x**2)

        return loss

    def on_mesh(loss: Any, *, shape: Any = square, spec: Any = split, count: int = 1, on: Mesh = mesh) -> Sharded:
        return Sharded(loss, on, [(shape, spec)] * count, batch)

    def mapped(local: Callable[[Any, Any], Any], spec: Any = split, **options: Any) -> Callable[[Any, Any], Any]:
        """A loss of what each device has, and its mean."""
        inside = functools.partial(jax.shard_map, mesh=mesh, in_specs=(spec, P("d")), out_specs=P(), **options)
        return inside(lambda weights, x: lax.pmean(local(weights, x), "d"))

    all_gathered = lambda w: lax.all_gather(w, "d", tiled=True)

    def constraint() -> Sharded:
        return on_mesh(layers(gathered), count=3)

    def shard_map() -> Sharded:
        return on_mesh(mapped(layers(all_gathered)), count=3)

    def reshard() -> Sharded:
        explicit = Mesh(devices, ("d",), axis_types=(AxisType.Explicit,))
        return on_mesh(layers(lambda w: jax.sharding.reshard(w, P())), count=3, on=explicit)

    def used_twice() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            w = gathered(weights[0])
            return jnp.mean((jnp.tanh(x @ w) @ w.T @ gathered(weights[0])) ** 2)

        return on_mesh(loss)

    def scan(inside: bool) -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            layer = lambda h, w: (jnp.tanh(h @ (gathered(w) if inside else w)), None)
            return jnp.mean(lax.scan(layer, x, weights[0] if inside else gathered(weights[0]))[0] ** 2)

        return on_mesh(loss, shape=stacked, spec=P(None, "d"))

    def remat() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = jax.checkpoint(lambda w, x: jnp.tanh(x @ gathered(w)))(w, x)
            return jnp.mean(x**2)

        return on_mesh(loss, count=3)

    def scan_and_remat_in_shard_map() -> Sharded:
        def local(weights: Any, x: Any) -> Any:
            layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ all_gathered(w)), None))
            return jnp.mean(lax.scan(layer, x, weights[0])[0] ** 2)

        return on_mesh(mapped(local, [P(None, "d")]), shape=stacked, spec=P(None, "d"))

    def micro_batches() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            w = gathered(weights[0])
            return jnp.mean(lax.map(lambda x: jnp.mean(jnp.tanh(x @ w) ** 2), jnp.stack([x, 2.0 * x])))

        return on_mesh(loss)

    def two_axes() -> Sharded:
        both = Mesh(devices.reshape(-1, 2), ("d", "t"))

        def loss(weights: Any, x: Any) -> Any:
            up, down = (NamedSharding(both, spec) for spec in (P(None, "t"), P("t", None)))
            h = jnp.tanh(x @ lax.with_sharding_constraint(weights[0], up))
            return jnp.mean((h @ lax.with_sharding_constraint(weights[1], down)) ** 2)

        return Sharded(loss, both, [(square, P("d", "t")), (square, P("t", "d"))], batch)

    def heads() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            w = gathered(weights[0]).reshape(width, 4, -1)
            return jnp.mean(jnp.einsum("bhk,dhk->bd", jnp.tanh(jnp.einsum("bd,dhk->bhk", x, w)), w) ** 2)

        return on_mesh(loss)

    def gathered_by_a_function() -> Sharded:
        gather = jax.jit(gathered)
        return on_mesh(layers(gather), count=2)

    def with_rules(gather: Any, scatter: Any, saves: bool) -> Callable[[Any, Any], Any]:
        """Layers with a user's rules; `saves`: whether the whole weight is saved for the backward rule."""

        @jax.custom_vjp
        def dense(x: Any, w: Any) -> Any:
            return x @ gather(w)

        def forward(x: Any, w: Any) -> Any:
            whole = gather(w)
            return x @ whole, (x, whole if saves else w)

        def backward(saved: Any, ct: Any) -> Any:
            x, w = saved
            return ct @ (w if saves else gather(w)).T, scatter(x.T @ ct)

        dense.defvjp(forward, backward)

        def loss(weights: Any, x: Any) -> Any:
            for w in weights:
                x = jnp.tanh(dense(x, w))
            return jnp.mean(x**2)

        return loss

    scattered = lambda dw: lax.psum_scatter(dw, "d", tiled=True)

    def rules(saves: bool) -> Sharded:
        return on_mesh(mapped(with_rules(all_gathered, scattered, saves)), count=3)

    def rules_with_constraints() -> Sharded:
        scatter = lambda dw: lax.with_sharding_constraint(dw, NamedSharding(mesh, split))
        return on_mesh(with_rules(gathered, scatter, True), count=3)

    def averaged(is_outside: bool) -> Sharded:
        """Weights are everywhere. `is_outside`: the shard_map is part of what is transformed."""
        local = lambda weights, x: lax.pmean(jax.grad(layers(lambda w: w))(weights, x), "d")
        over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=False)
        inside = (
            (lambda transform: transform(over(local))) if is_outside else (lambda transform: over(transform(local)))
        )
        return Sharded(layers(lambda w: w), mesh, [(square, P())] * 3, batch, inside)

    def averaged_and_gathered() -> Sharded:
        """Weights are split over "t" and gathered; gradients are averaged over both axes."""
        both = Mesh(devices.reshape(-1, 2), ("d", "t"))

        def local(weights: Any, x: Any) -> Any:
            grads = jax.grad(layers(lambda w: lax.all_gather(w, "t", tiled=True)))(weights, x)
            return [lax.pmean(g, "d") / 2.0 for g in grads]

        specs = P("t"), P(("d", "t"))
        over = functools.partial(jax.shard_map, mesh=both, in_specs=specs, out_specs=P("t"), check_vma=False)
        size, _ = batch
        return Sharded(layers(lambda w: w), both, [(square, P("t"))] * 3, (size, specs[1]), lambda t: over(t(local)))

    def replicated() -> Sharded:
        """Weights are everywhere; the derivative of `shard_map` sums their gradients."""
        return on_mesh(mapped(layers(lambda w: w), P()), spec=P(), count=2)

    def scattered_gradients() -> Sharded:
        """Weights are everywhere; gradients are summed into parts. Each weight is read twice."""
        twice = lambda weights, x: layers(lambda w: w)([*weights, *weights], x)

        def local(weights: Any, x: Any) -> Any:
            return [scattered(g) / devices.size for g in jax.grad(twice)(weights, x)]

        over = functools.partial(jax.shard_map, mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=False)
        return Sharded(twice, mesh, [(square, P())] * 2, batch, lambda transform: over(transform(local)))

    def tensor_parallel() -> Sharded:
        """Activations are summed over devices, which have parts of the hidden layer; the batch is everywhere."""

        def local(weights: Any, x: Any) -> Any:
            up, down = weights
            return jnp.mean(jnp.tanh(lax.psum(jnp.tanh(x @ up) @ down, "d")) ** 2)

        specs = P(None, "d"), P("d", None)
        loss = jax.shard_map(local, mesh=mesh, in_specs=(list(specs), P()), out_specs=P())
        size, _ = batch
        return Sharded(loss, mesh, [(square, spec) for spec in specs], (size, P()))

    def left_to_xla() -> Sharded:
        return on_mesh(layers(lambda w: w), count=3)

    def left_in_functions() -> Sharded:
        block = jax.jit(lambda x, up, down: x + jax.nn.gelu(x @ up) @ down)

        def loss(weights: Any, x: Any) -> Any:
            return jnp.mean(block(block(x, *weights[:2]), *weights[2:]) ** 2)

        return on_mesh(loss, count=4)

    def left_with_heads() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            up, down = weights[0].reshape(width, 4, -1), weights[1].reshape(4, -1, width)
            x = jnp.einsum("bhk,hkd->bd", jnp.tanh(jnp.einsum("bd,dhk->bhk", x, up)), down)
            return jnp.mean(jnp.tanh(x @ weights[2]) ** 2) + 1e-3 * sum(jnp.sum(w**2) for w in weights)

        return on_mesh(loss, count=3)

    def left_and_tied() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            return jnp.mean((x + jnp.tanh(x @ weights[0]) @ weights[0].T) ** 2)

        return on_mesh(loss)

    def wide_reader() -> Sharded:
        def loss(weights: Any, x: Any) -> Any:
            w = gathered(weights[0])
            return jnp.mean(jnp.tanh(x @ w) ** 2) + 1e-3 * jnp.mean(jnp.exp(w))

        return on_mesh(loss)

    return {
        "constraint": constraint,
        "shard_map": shard_map,
        "reshard": reshard,
        "used twice": used_twice,
        "in a scan": functools.partial(scan, True),
        "before a scan": functools.partial(scan, False),
        "remat": remat,
        "scan and remat in a shard_map": scan_and_remat_in_shard_map,
        "micro-batches": micro_batches,
        "two axes": two_axes,
        "heads": heads,
        "gathered by a function": gathered_by_a_function,
        "wide reader": wide_reader,
        "rules": functools.partial(rules, True),
        "rules that both gather": functools.partial(rules, False),
        "rules with constraints": rules_with_constraints,
        "averaged": functools.partial(averaged, False),
        "averaged in all": functools.partial(averaged, True),
        "averaged and gathered": averaged_and_gathered,
        "replicated": replicated,
        "scattered gradients": scattered_gradients,
        "tensor parallel": tensor_parallel,
        "left to XLA": left_to_xla,
        "left, in functions": left_in_functions,
        "left, with heads": left_with_heads,
        "left, and tied": left_and_tied,
    }


NAMES = (
    "constraint",
    "shard_map",
    "reshard",
    "used twice",
    "in a scan",
    "before a scan",
    "remat",
    "scan and remat in a shard_map",
    "micro-batches",
    "two axes",
    "heads",
    "gathered by a function",
    "wide reader",
)
RULES = ("rules", "rules that both gather", "rules with constraints")  # they gather in a `custom_vjp`
AVERAGED = ("averaged", "averaged in all", "averaged and gathered")  # `pmean` of gradients, in what is transformed
SUMMED = ("replicated", "scattered gradients", "tensor parallel")  # sums over devices in a `shard_map`
LEFT = ("left to XLA", "left, in functions", "left, with heads", "left, and tied")  # XLA's partitioner gathers
