"""State through files and back: Orbax, Equinox, plain arrays; float32 in and out; layouts; bytes."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import BF16, F16, F32, assert_same_bits, raises
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from optimizers import ADAMW, PAIRS, distance, gradients, tree

import jaxamp
from jaxamp import optim
from jaxamp.optim import Storage


def trained(optimizer, params, steps=3):
    state, step = optimizer.init(params), jax.jit(optimizer.step)
    for i in range(steps):
        params, state = step(params, state, gradients(params, i))
    return params, state


def mixed():
    return {"low": tree(BF16), "half": {"w": tree(F16)["w"]}, "full": {"w": tree(F32)["w"]}}


@pytest.fixture(scope="module")
def run():
    with jax.numpy_dtype_promotion("strict"):
        return ADAMW, *trained(ADAMW, mixed())


# -- files


def test_orbax_restores_every_bit(run, tmp_path):
    optimizer, params, state = run
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", (params, state))
        checkpointer.wait_until_finished()
        target = jax.eval_shape(lambda: (params, optimizer.init(params)))
        target = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=state.count.sharding), target)
        assert_same_bits(checkpointer.restore(tmp_path / "state", target), (params, state))


def test_equinox_restores_every_bit(run, tmp_path):
    optimizer, params, state = run
    path = tmp_path / "state.eqx"
    eqx.tree_serialise_leaves(path, (params, state))
    target = jax.eval_shape(lambda: (params, optimizer.init(params)))
    assert_same_bits(eqx.tree_deserialise_leaves(path, target), (params, state))


def test_plain_arrays_restore_every_bit(run, tmp_path):
    _, params, state = run
    arrays = optim.to_arrays(params, state)
    assert int(arrays["format"]) == 2
    assert {"params/low/w", "mu/low/w", "nu/low/w", "scales/low/w", "correction/low/w"} <= set(arrays)
    assert "correction/full/w" not in arrays
    # NumPy's files know no bfloat16: its bits.
    np.savez(tmp_path / "a.npz", **{k: np.asarray(x).view(f"V{x.dtype.itemsize}") for k, x in arrays.items()})
    with np.load(tmp_path / "a.npz") as loaded:
        again = {k: jnp.asarray(loaded[k].view(arrays[k].dtype)).reshape(arrays[k].shape) for k in loaded}
    assert_same_bits(optim.from_arrays(again, params), (params, state))


def test_arrays_of_another_tree_or_format_are_refused(run):
    _, params, state = run
    arrays = optim.to_arrays(params, state)
    with raises(ValueError, "from_arrays got format 1; expected format 2", "Pass what to_arrays"):
        optim.from_arrays({**arrays, "format": 1}, params)
    with raises(ValueError, "from_arrays got no format; expected format 2"):
        optim.from_arrays({}, params)
    with raises(ValueError, "from_arrays got no array 'params/other'; expected one for each leaf", "Pass the"):
        optim.from_arrays(arrays, {**params, "other": jnp.ones(3)})
    with raises(
        ValueError, "from_arrays got an array 'correction/low/odd', for which the parameters have no leaf", "Pass"
    ):
        optim.from_arrays(arrays, {"low": {"w": 0}, "half": {"w": 0}, "full": {"w": 0}})


def test_arrays_without_a_count_and_names_that_two_leaves_have_are_refused():
    params = {"a/b": jnp.ones(32), "a": {"b": jnp.ones(32)}}
    with raises(ValueError, "to_arrays got two leaves named 'params/a/b'; expected unique names", "Rename"):
        optim.to_arrays(params, ADAMW.init(params))
    with raises(TypeError, "to_arrays got tuple as the state; expected a FlashState", "Pass what"):
        optim.to_arrays(params, ())
    with raises(ValueError, "from_arrays got no array 'count'; expected the number of steps", "Pass everything"):
        optim.from_arrays({"format": 2}, {})


def test_a_run_that_is_resumed_is_the_run_that_was_not_interrupted(tmp_path):
    optimizer, params = ADAMW, {"w": tree(BF16)["w"]}
    whole = trained(optimizer, params, 4)
    half = trained(optimizer, params, 2)
    eqx.tree_serialise_leaves(tmp_path / "half.eqx", half)
    params, state = eqx.tree_deserialise_leaves(tmp_path / "half.eqx", half)
    for i in (2, 3):
        params, state = jax.jit(optimizer.step)(params, state, gradients(params, i))
    assert_same_bits((params, state), whole)


# -- onto other devices


HOPS = [((8,), ("x",), P("x", None)), ((4,), ("x",), P(None, "x")), ((2, 2), ("x", "y"), P("x", "y"))]


def through_orbax(tree, shardings, folder):
    shape = lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder, tree)
        checkpointer.wait_until_finished()
        return checkpointer.restore(folder, jax.tree.map(shape, tree, shardings))


def through_numpy(tree, shardings, folder):
    params, state, scaler = tree
    arrays = optim.to_arrays(params, state) | {f"scaler/{i}": x for i, x in enumerate(jax.tree.leaves(scaler))}
    folder.mkdir()
    np.savez(folder / "a.npz", **{k: np.asarray(x).view(f"V{x.dtype.itemsize}") for k, x in arrays.items()})
    with np.load(folder / "a.npz") as loaded:
        again = {k: loaded[k].view(x.dtype).reshape(x.shape) for k, x in arrays.items()}
    leaves, structure = jax.tree.flatten(scaler)
    scaler = jax.tree.unflatten(structure, [again.pop(f"scaler/{i}") for i in range(len(leaves))])
    return jax.device_put((*optim.from_arrays(again, params), scaler), shardings)


@pytest.mark.slow
@pytest.mark.parametrize("through", [through_orbax, through_numpy])
def test_a_run_goes_on_from_mesh_to_mesh_bit_for_bit(through, tmp_path):
    """Eight devices, four, two by two: parameters, compressed state and scaler, with a step on each mesh."""
    grad_fn = jaxamp.dynamic_scale_grad(lambda params, g: jnp.sum(params["w"].astype(F32) * g))

    @jax.jit
    def step(params, state, scaler, g):
        scaler, grads = grad_fn(params, g, dynamic_scaler_state=scaler)
        return *ADAMW.step(params, state, grads, ok=scaler.finite), scaler

    plain = {"w": tree(BF16, shape=(64, 256))["w"]}
    scaler = jaxamp.DynamicScalerState(patience=1).as_arrays()
    expected = step(plain, ADAMW.init(plain), scaler, gradients(plain, 0)["w"])
    run = expected
    for i, (sizes, names, spec) in enumerate(HOPS, 1):
        devices = np.asarray(jax.devices()[: np.prod(sizes)]).reshape(sizes)
        mesh = Mesh(devices, names)
        placed, everywhere = NamedSharding(mesh, spec), NamedSharding(mesh, P())
        of_state = optim.state_shardings(ADAMW, plain, {"w": placed})._replace(count=everywhere)
        of_scaler = jax.tree.unflatten(jax.tree.structure(scaler), [everywhere] * len(jax.tree.leaves(scaler)))
        run = through(run, ({"w": placed}, of_state, of_scaler), tmp_path / str(i))
        assert_same_bits(jax.device_get(run), jax.device_get(expected))
        assert run[0]["w"].sharding == run[1].mu["w"].sharding == placed
        assert run[1].scales["w"].sharding.shard_shape(run[1].scales["w"].shape) != run[1].scales["w"].shape
        g = gradients(plain, i)["w"].at[0, 0].set(np.inf if i == 2 else 1.0)  # a step that is skipped
        run = step(*run, jax.device_put(g, placed))
        expected = step(*expected, g)
        assert_same_bits(jax.device_get(run), jax.device_get(expected))
        assert bool(run[2].finite) == (i != 2)


# -- float32


@pytest.mark.parametrize(
    "storage",
    [
        Storage(),
        Storage(scales="float16"),
        Storage(codes="published"),
        Storage(quantize=False),
        Storage(layout="rows"),
    ],
)
def test_float32_and_back_is_the_same_state(storage):
    optimizer = optim.flash_adamw(1e-2, storage=storage)
    params, state = trained(optimizer, {"w": tree(BF16, shape=(32, 64))["w"]})
    float32 = jax.jit(lambda p, s: optim.to_float32(optimizer, p, s))(params, state)
    assert {x.dtype for x in jax.tree.leaves(float32[1:])} == {jnp.dtype(F32)}
    again, restored = jax.jit(lambda f: optim.from_float32(optimizer, f, params))(float32)
    assert_same_bits((restored.count, restored.mu, restored.nu, restored.scales), (state.count, *state[1:4]))
    weights = jax.jit(optim.float32_weights)
    assert distance(weights(again, restored), float32.weights) < 1e-5


@pytest.mark.promotes
def test_moments_of_optax_come_in_and_go_out():
    """A float32 run goes on compressed, and a compressed one in float32."""
    params = {"w": tree(F32)["w"]}
    tx, ours = optax.adamw(1e-2), ADAMW
    compress = jax.jit(lambda float32: optim.from_float32(ours, float32, params))
    theirs, state, update = params, tx.init(params), jax.jit(tx.update)
    for i in range(5):
        updates, state = update(gradients(params, i), state, theirs)
        theirs = optax.apply_updates(theirs, updates)
    adam = state[0]
    low, compressed = compress(optim.Float32(adam.count, theirs, adam.mu, adam.nu))
    got, _ = jax.jit(ours.step)(low, compressed, gradients(params, 5))
    updates, _ = update(gradients(params, 5), state, theirs)
    expected = optax.apply_updates(theirs, updates)
    assert distance(got, expected) <= 0.02 * distance(expected, theirs)
    out = jax.jit(lambda p, s: optim.to_float32(ours, p, s))(low, compressed)
    assert distance(out.mu, adam.mu) <= 0.02 * distance(adam.mu, jax.tree.map(jnp.zeros_like, adam.mu))
    fresh, state = compress(optim.Float32(0, theirs, None, None))
    assert_same_bits((fresh, state), (theirs, ours.init(params)))


def test_float32_of_another_tree_is_refused():
    optimizer, params = ADAMW, {"w": jnp.ones(32)}
    with raises(ValueError, "from_float32 got weights without a leaf for 'w'", "expected", "Pass what"):
        optim.from_float32(optimizer, optim.Float32(0, {}, None, None), params)
    for trees, given in (
        (({"w": jnp.ones(3)}, None), r"an array of shape \(3,\)"),
        (({"w": None}, None), "None"),
        ((params, {"w": jnp.ones(3)}), r"an array of shape \(3,\)"),
    ):
        with raises(ValueError, f"from_float32 got {given} for 'w'; expected an array of shape", "Pass what"):
            optim.from_float32(optimizer, optim.Float32(0, *trees, None), params)
    with raises(ValueError, "to_layout got the layout 'first'; expected one of 'last'", "Write to_layout"):
        optim.to_layout(optimizer, params, optimizer.init(params), "first")
    with raises(ValueError, "float32_weights got corrections without a leaf for 'w'", "expected", "Pass the"):
        optim.float32_weights(params, optimizer.init({}))
    with raises(
        ValueError, r"float32_weights got a correction of shape \(32,\) for 'w'", "expected the correction", "Pass the"
    ):
        optim.float32_weights({"w": jnp.ones(64, BF16)}, optimizer.init({"w": jnp.ones(32, BF16)}))
    state = optim.flash_adamw(1e-2, storage=Storage(group_size=16)).init(params)
    with raises(
        ValueError, r"got scales of shape \(2, 2\) for 'w', which is of shape \(32,\); expected groups of 32", "Pass"
    ):
        optim.to_float32(optimizer, params, state)


def test_float32_is_stored_as_the_optimizer_stores_it():
    """Floor or not; an empty leaf has no correction; shapes will do for what the parameters are to be like."""
    like = {"w": jax.ShapeDtypeStruct((32,), BF16), "empty": jax.ShapeDtypeStruct((0, 3), BF16), "none": None}
    weights = {"w": np.ones(32, np.float32), "empty": np.zeros((0, 3), np.float32), "none": None}
    moments = {**weights, "w": np.float32([1.0] + [1e-12] * 31)}
    for floor in (True, False):
        optimizer = optim.flash_adamw(1e-3, storage=Storage(variance_floor=floor, codes="published"))
        restore = jax.jit(lambda f, optimizer=optimizer: optim.from_float32(optimizer, f, like))
        params, state = restore(optim.Float32(0, weights, moments, moments))
        assert params["w"].dtype == BF16
        assert state.nu["w"].tolist() == [255] + [int(floor)] * 31
        assert jax.tree.structure(state) == jax.tree.structure(optimizer.init(params))


# -- layouts


def test_layouts_convert_and_any_is_stepped():
    """Once more rounded where groups change; else the same bits."""
    optimizer = ADAMW
    params, state = trained(optimizer, {"w": tree(F32, shape=(64, 64))["w"]})
    to = lambda layout, state: jax.jit(lambda p, s: optim.to_layout(optimizer, p, s, layout))(params, state)
    flat, rows = to("flat", state), to("rows", state)
    assert [x.scales["w"].shape for x in (state, flat, rows)] == [(2, 64, 2), (2, 64, 2), (2, 2, 64)]
    assert_same_bits(flat, state)
    assert_same_bits(to("rows", rows), rows)
    read = jax.jit(lambda s: optim.to_float32(optimizer, params, s))
    moments = [read(x) for x in (state, rows)]
    zeros = jax.tree.map(np.zeros_like, moments[0].mu)
    assert distance(moments[1].mu, moments[0].mu) < 0.02 * distance(moments[0].mu, zeros)
    assert distance(moments[1].nu, moments[0].nu) < 0.02 * distance(moments[0].nu, zeros)
    step = jax.jit(optimizer.step)
    results = [step(params, x, gradients(params, 3)) for x in (state, rows)]
    assert distance(results[0][0], results[1][0]) < 0.02 * distance(results[0][0], params)
    assert results[1][1].scales["w"].shape == (2, 2, 64)


# -- bytes


TABLE = {  # bytes per parameter: AdamW, then Lion; as in the README
    (BF16, 24): (5.125, 4.0625),
    (BF16, 32): (6.125, 5.0625),
    (BF16, None): (4.125, 3.0625),
    (F32, None): (6.125, 5.0625),
}


@pytest.mark.parametrize(("dtype", "bits"), list(TABLE))
def test_bytes_per_parameter(dtype, bits):
    params = {"w": jax.ShapeDtypeStruct((1024, 1024), dtype), "step": jax.ShapeDtypeStruct((), jnp.int32)}
    for make, expected in zip((optim.flash_adamw, optim.flash_lion), TABLE[dtype, bits], strict=True):
        found = optim.optimizer_bytes(make(1e-3, storage=Storage(master_weight_bits=bits)), params)
        assert found.parameters == 1024 * 1024
        assert found.per_parameter == pytest.approx(expected, abs=1e-5)
    assert optim.optimizer_bytes(optax.adamw(1e-3), {"w": params["w"]}).per_parameter == pytest.approx(
        3 * jnp.dtype(dtype).itemsize, abs=1e-5
    )


@pytest.mark.parametrize("name", PAIRS)
def test_bytes_are_those_of_the_arrays(name):
    make, _, options = PAIRS[name]
    params = mixed()
    optimizer = make(1e-3, **options)
    held = sum(x.nbytes for x in jax.tree.leaves((params, optimizer.init(params))))
    found = optim.optimizer_bytes(optimizer, params)
    assert found.params + found.state == held
