"""The body of a `shard_map` run equation by equation: the same results as the whole, with each operation seen."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp._inspect.location import Place
from jaxamp._inspect.walk import Walker
from jaxamp._transform.ledger import Ledger

MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
W, X = normal(0, 8, 8), normal(1, 16, 8)
BOTH = ("data", "model")


def walk(fn, *args):
    """The results of a function, and the primitives that were seen with their rounds."""
    seen = []
    watch = lambda eqn, place, ins, outs: seen.append((eqn.primitive.name, place.rounds))
    walker = Walker(Ledger(), watch, enters_maps=True)
    return walker.run(jax.make_jaxpr(fn)(*args), args, Place("forward")), seen


def layers(w, x):
    layer = jax.checkpoint(lambda h, w: (jnp.tanh(h @ w) + 1.0, jnp.sum(h)))
    h, sums = lax.scan(layer, x, jnp.stack([w, 0.5 * w, w.T]))
    return lax.psum(jnp.sum(h) + jnp.sum(sums), "data")


def collectives(w, x):
    whole = lax.all_gather(x, "data", tiled=True)
    part = lax.psum_scatter(jnp.sum(whole) * jnp.ones((4, 4)), "data", tiled=True)
    return lax.pmean(jnp.sum(part @ w[:4]) + jnp.sum(lax.ppermute(x, "data", [(0, 1), (1, 0)])), "data")


def branches(w, x):
    same = lax.cond(w[0, 0] > 1e6, jnp.sin, jnp.cos, x)  # all devices take the second one
    other = lax.cond(lax.axis_index("data") > 1, jnp.sin, lambda x: x * 3.0, x)
    return lax.pmean(jnp.sum(same + other), "data")


def loops(w, x):
    halved = lax.while_loop(lambda c: jnp.max(jnp.abs(c)) > 0.5, lambda c: c / 2, x)
    return lax.pmean(jnp.sum(halved @ w), "data")


def random_numbers(w, x):
    key = jax.random.fold_in(jax.random.key(0), lax.axis_index("data"))
    return lax.pmean(jnp.sum(jax.random.normal(key, x.shape) * x), "data")


@jax.custom_vjp
def own(x):
    return jnp.sin(x)


own.defvjp(lambda x: (own(x), x), lambda x, ct: (ct * jnp.cos(x),))


def constants(w, x):
    table = np.linspace(0.0, 1.0, 8, dtype=np.float32)  # closed over
    return lax.pmean(jnp.sum(jax.jit(lambda x: own(x) * table)(x)), "data")


PROGRAMS = {
    "layers": (layers, {"dot_general", "tanh"}),
    "collectives": (collectives, {"all_gather", "dot_general", "ppermute"}),
    "branches": (branches, {"cos", "cond"}),
    "loops": (loops, {"while", "dot_general"}),
    "random": (random_numbers, {"mul"}),
    "constants": (constants, {"sin", "mul"}),
}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", PROGRAMS)
def test_the_results_are_those_of_the_whole(name, check_vma):
    body, expected = PROGRAMS[name]
    options = {"mesh": MESH, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    fn = jax.shard_map(body, **options)
    found, seen = walk(fn, W, X)
    np.testing.assert_allclose(found[0], jax.jit(fn)(W, X), rtol=1e-5)
    assert expected <= {primitive for primitive, _ in seen}
    assert "shard_map" not in {primitive for primitive, _ in seen}


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("name", ["layers", "constants", "collectives"])
def test_gradients_are_entered_too(name, check_vma):
    body, _ = PROGRAMS[name]
    options = {"mesh": MESH, "in_specs": (P(), P("data")), "out_specs": P(), "check_vma": check_vma}
    fn = jax.grad(jax.shard_map(body, **options), argnums=1)
    found, seen = walk(fn, W, X)
    np.testing.assert_allclose(found[0], jax.jit(fn)(W, X), rtol=1e-5, atol=1e-5)
    assert "shard_map" not in {primitive for primitive, _ in seen}


def test_each_round_of_a_loop_is_seen():
    fn = jax.shard_map(layers, mesh=MESH, in_specs=(P(), P("data")), out_specs=P())
    _, seen = walk(fn, W, X)
    assert [rounds for primitive, rounds in seen if primitive == "dot_general"] == [(0,), (1,), (2,)]


def test_split_results_and_operands():
    fn = jax.shard_map(lambda w, x: x @ w, mesh=MESH, in_specs=(P(None, "model"), P("data")), out_specs=P(*BOTH))
    placed = jax.device_put(W, NamedSharding(MESH, P(None, "model"))), jax.device_put(X, NamedSharding(MESH, P("data")))
    (found,), seen = walk(fn, *placed)
    np.testing.assert_allclose(found, X @ W, rtol=1e-5)
    assert found.sharding.is_equivalent_to(NamedSharding(MESH, P(*BOTH)), 2)
    assert {primitive for primitive, _ in seen} - {"pvary"} == {"dot_general"}


def test_a_map_over_some_axes_of_the_mesh():
    body = lambda w, x: lax.psum(jnp.sum(x @ w), "data")
    fn = jax.shard_map(body, mesh=MESH, in_specs=(P(), P("data")), out_specs=P(), axis_names={"data"})
    placed = jax.device_put(W, NamedSharding(MESH, P(None, "model"))), jax.device_put(X, NamedSharding(MESH, P("data")))
    (found,), seen = walk(fn, *placed)
    np.testing.assert_allclose(found, jnp.sum(X @ W), rtol=1e-4)
    assert "dot_general" in {primitive for primitive, _ in seen}


def test_a_map_in_a_map_and_one_whose_devices_are_not_known_are_one_operation():
    inner = functools.partial(jax.shard_map, in_specs=P("model"), out_specs=P("model"), axis_names={"model"})
    outer = functools.partial(jax.shard_map, mesh=MESH, in_specs=P("data"), out_specs=P("data"), axis_names={"data"})
    (found,), seen = walk(outer(lambda x: inner(jnp.sin)(x) * 2.0), X)
    np.testing.assert_allclose(found, 2 * jnp.sin(X), rtol=1e-5)
    assert {primitive for primitive, _ in seen} >= {"shard_map", "mul"}
    with jax.set_mesh(MESH):
        fn = jax.shard_map(lambda x: jnp.sin(x) * 2.0, in_specs=P("data"), out_specs=P("data"))
        (found,), seen = walk(fn, X)
    np.testing.assert_allclose(found, 2 * jnp.sin(X), rtol=1e-5)


def test_without_asking_a_map_is_one_operation():
    seen = []
    watch = lambda eqn, place, ins, outs: seen.append(eqn.primitive.name)
    fn = jax.shard_map(jnp.sin, mesh=MESH, in_specs=P("data"), out_specs=P("data"))
    Walker(Ledger(), watch).run(jax.make_jaxpr(fn)(X), [X], Place("forward"))
    assert seen == ["shard_map"]
