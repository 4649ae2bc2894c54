"""Compressed optimizers over eight devices: state sharded like its parameters, and nothing communicated."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, raises
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import ADAMW, gradients, slowly, tree

from jaxamp import flashoptim, optim
from jaxamp.optim import Storage

COLLECTIVES = re.compile(r"all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter")
SPECS = {"x": P("x", None), "y": P(None, "y"), "xy": P("x", "y"), "both": P(None, ("x", "y"))}
specs = pytest.mark.parametrize("spec", SPECS.values(), ids=list(SPECS))


def mesh(kind=AxisType.Auto):
    return jax.make_mesh((4, 2), ("x", "y"), axis_types=(kind, kind))


def weights(shape=(64, 256)):
    return {"w": tree(jnp.bfloat16, shape=shape)["w"]}


def sharded(tree, spec, kind=AxisType.Auto):
    return jax.device_put(tree, NamedSharding(mesh(kind), spec))


FACE = flashoptim.flash_adamw(1e-2)
OPTIMIZERS = {"last": ADAMW, "rows": optim.flash_adamw(1e-2, storage=Storage(layout="rows", group_size=16))}
CASES = [(layout, name) for layout in OPTIMIZERS for name in SPECS]
QUICK = [("last", "x"), ("last", "y"), ("last", "xy"), ("rows", "xy")]


@pytest.mark.parametrize(("layout", "name"), slowly(CASES, QUICK))
def test_a_step_communicates_nothing(layout, name):
    optimizer, spec, plain = OPTIMIZERS[layout], SPECS[name], weights()
    params = sharded(plain, spec)
    state, grads = optimizer.init(params), sharded(gradients(plain, 0), spec)
    for like in (state.mu, state.nu, state.correction):
        assert like["w"].sharding.is_equivalent_to(params["w"].sharding, 2)
    assert state.scales["w"].sharding.is_equivalent_to(NamedSharding(mesh(), P(None, *spec)), 3)
    program = jax.jit(optimizer.step, donate_argnums=()).lower(params, state, grads).compile()
    assert not COLLECTIVES.search(program.as_text())
    got = program(params, state, grads)
    assert got[1].scales["w"].sharding.is_equivalent_to(state.scales["w"].sharding, 3)
    expected = jax.jit(optimizer.step)(plain, optimizer.init(plain), gradients(plain, 0))
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


@pytest.mark.parametrize("spec", [P("x", None), P()])
def test_the_second_step_is_the_program_of_the_first(spec):
    """All of a state is from the beginning where the first step leaves it."""
    params = sharded(weights(), spec)
    state = ADAMW.init(params)
    new, after = jax.jit(ADAMW.step)(params, state, params)
    for x, y in zip(jax.tree.leaves((params, state)), jax.tree.leaves((new, after)), strict=True):
        assert (x.sharding, x.committed) == (y.sharding, y.committed)


def test_the_tests_here_would_see_a_collective():
    optimizer, plain = ADAMW, weights((64, 100))
    params, grads = sharded(plain, P(None, "y")), sharded(gradients(plain, 0), P(None, "y"))
    text = jax.jit(optimizer.step).lower(params, jax.jit(optimizer.init)(params), grads).compile().as_text()
    assert COLLECTIVES.search(text)


def test_updates_communicate_nothing():
    optimizer, params = optim.flash_lion(1e-2), sharded(weights(), P("x", "y"))
    grads = sharded(gradients(weights(), 0), P("x", "y"))
    text = jax.jit(optimizer.update).lower(grads, optimizer.init(params), params).compile().as_text()
    assert not COLLECTIVES.search(text)


SMALL = {"a": (8, 64), "b": (4, 32)}


def test_small_sharded_leaves_communicate_nothing_where_axes_are_explicit():
    leaves = {name: np.ones(shape, np.float32) for name, shape in SMALL.items()}
    params, optimizer = sharded(leaves, P("x", None), AxisType.Explicit), ADAMW
    with jax.set_mesh(mesh(AxisType.Explicit)):
        state = jax.jit(optimizer.init)(params)
        assert tuple(state.scales["a"].sharding.spec) == (None, "x", None)
        program = jax.jit(optimizer.step).lower(params, state, params).compile()
    assert not COLLECTIVES.search(program.as_text())


def test_small_leaves_by_themselves_communicate_nothing():
    params = sharded({name: np.ones(shape, np.float32) for name, shape in SMALL.items()}, P("x", None))
    optimizer = optim.flash_adamw(1e-2, storage=Storage(together=0))
    text = jax.jit(optimizer.step).lower(params, optimizer.init(params), params).compile().as_text()
    assert not COLLECTIVES.search(text)


@specs
def test_shardings_of_a_state_are_those_of_its_parameters(spec):
    optimizer, params = ADAMW, sharded(weights(), spec)
    shardings = optim.state_shardings(optimizer, params, jax.tree.map(lambda x: x.sharding, params))
    state = jax.jit(optimizer.init, out_shardings=shardings)(params)
    eager = optimizer.init(params)
    for x, y in zip(jax.tree.leaves(state), jax.tree.leaves(eager), strict=True):
        assert x.sharding.is_equivalent_to(y.sharding, x.ndim) or x.ndim == 0
    structs = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), params)
    again = optim.state_shardings(optimizer, structs, jax.tree.map(lambda x: x.sharding, params))
    assert again == shardings


def test_shardings_of_leaves_of_all_kinds():
    params = {"w": weights()["w"], "act": jax.nn.relu, "none": None}
    host = NamedSharding(mesh(), P("x", None), memory_kind="pinned_host")
    found = optim.state_shardings(ADAMW, params, {"w": host, "act": None, "none": None})
    assert (found.mu["w"], found.mu["act"]) == (host, None)
    assert found.scales["w"] == NamedSharding(mesh(), P(None, "x"), memory_kind="pinned_host")
    for wrong in (None, P("x", None)):
        with raises(TypeError, "state_shardings got", "for 'w'; expected a sharding", "Write jax.tree.map"):
            optim.state_shardings(ADAMW, params, {"w": wrong, "act": None, "none": None})


@pytest.mark.parametrize("name", ["x", "xy"])
def test_the_published_state_is_sharded_like_its_parameters(name):
    """Its scales are flat: where the last axis is sharded, they alone are gathered."""
    spec, plain = SPECS[name], weights()
    params, grads = sharded(plain, spec), sharded(gradients(plain, 0), spec)
    state = FACE.init(params)
    program = jax.jit(FACE.step).lower(params, state, grads).compile()
    moved = [line for line in program.as_text().splitlines() if re.search(rf"({COLLECTIVES.pattern})\(", line)]
    assert all(re.search(r"= f16\[1,16,8\]", line) for line in moved)  # the scales of a quarter of the rows
    assert len(moved) == (2 if name == "xy" else 0)
    got = program(params, state, grads)
    for x in (state, got[1]):
        for like in (x.mu["w"].values, x.nu["w"].values, x.ecc["w"]):
            assert like.sharding.is_equivalent_to(params["w"].sharding, 2)
        assert x.mu["w"].scales.sharding.is_equivalent_to(NamedSharding(mesh(), P("x")), 1)
    expected = jax.jit(FACE.step)(plain, FACE.init(plain), gradients(plain, 0))
    assert_same_bits(jax.device_get(got), jax.device_get(expected))


def test_the_published_state_where_axes_are_explicit():
    params = sharded(weights(), P("x", "y"), AxisType.Explicit)
    with jax.set_mesh(mesh(AxisType.Explicit)):
        new, state = jax.jit(lambda p: FACE.step(p, FACE.init(p), p))(params)
    assert new["w"].sharding == state.ecc["w"].sharding == params["w"].sharding
    assert tuple(state.mu["w"].scales.sharding.spec) == ("x",)


def test_parts_without_whole_groups_are_refused():
    optimizer, params = ADAMW, sharded(weights((64, 96)), P(None, ("x", "y")))
    words = r"flash_adamw got the parameter 'w' of shape \(64, 96\) in parts of \(64, 12\)", "expected", "layout='rows'"
    with raises(ValueError, *words, "'quantize': False"):
        optimizer.init(params)
    with raises(ValueError, *words):
        optim.state_shardings(optimizer, params, jax.tree.map(lambda x: x.sharding, params))
    for other in (
        optim.flash_adamw(1e-2, storage=Storage(layout="rows")),
        optim.flash_adamw(1e-2, param_groups=[{"params": "w", "quantize": False}]),
    ):
        text = jax.jit(other.step).lower(params, other.init(params), params).compile().as_text()
        assert not COLLECTIVES.search(text)


UNEVEN = {(64, 100): P("x", None), (8, 6, 50): P("x", "y"), (64, 33): P(("x", "y"), None), (8,): P("x")}


@pytest.mark.parametrize("shape", UNEVEN, ids=str)
def test_axes_that_are_no_multiples_of_groups_are_refused_and_the_advice_works(shape):
    """Their groups run on from row to row, so a device has parts of groups."""
    plain = {"w": weights(shape)["w"]}
    params, grads = sharded(plain, UNEVEN[shape]), sharded(gradients(plain, 0), UNEVEN[shape])
    with raises(ValueError, r"flash_adamw got the parameter 'w' of shape", "expected parts with whole groups of 32"):
        ADAMW.init(params)
    alone = optim.flash_adamw(1e-2, storage=Storage(together=0), param_groups=[{"params": "w", "quantize": False}])
    state = alone.init(params)
    for like in (state.mu, state.nu, state.correction):
        assert like["w"].sharding.is_equivalent_to(params["w"].sharding, len(shape))
    program = jax.jit(alone.step).lower(params, state, grads).compile()
    assert not COLLECTIVES.search(program.as_text())
    expected = jax.jit(alone.step)(plain, alone.init(plain), gradients(plain, 0))
    assert_same_bits(jax.device_get(program(params, state, grads)), jax.device_get(expected))


def test_a_step_in_shard_map_is_that_of_the_whole():
    optimizer, plain = ADAMW, weights()
    state, grads, spec = optimizer.init(plain), gradients(plain, 0), P("x", "y")
    state_spec = optim.FlashState(P(), *({"w": s} for s in (spec, spec, P(None, "x", "y"), spec)))
    step = jax.shard_map(
        optimizer.step,
        mesh=mesh(),
        in_specs=({"w": spec}, state_spec, {"w": spec}),
        out_specs=({"w": spec}, state_spec),
    )
    expected = jax.jit(optimizer.step)(plain, state, grads)
    assert_same_bits(jax.device_get(jax.jit(step)(plain, state, grads)), jax.device_get(expected))
