"""`bytes_kept`: how much a function keeps for its backward pass, without computing anything."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises
from jax import lax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec
from small_networks import PARAMS, ROWS, WIDTH, X, mlp

import jaxamp


def test_bytes_kept_leaves_arguments_out_and_computes_nothing():
    def fn(params, x):
        return jnp.sum(jnp.sin(x @ params["up"]))

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))
    found = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(*shapes)
    results = ROWS * 2 * WIDTH
    # float32: the cosine. bfloat16: the result of the matmul or the cosine of it
    assert found.before == 4 * results
    assert found.after == 2 * results
    assert isinstance(found, jaxamp.BytesKept)


def test_bytes_kept_of_integers_keys_none_and_modules():
    def fn(params, batch, scale=1.0):
        x, labels, key = batch
        drawn = jax.random.normal(key, x.shape)
        return jnp.sum(jnp.tanh((x + drawn) @ params["w"]) * scale) + labels.sum().astype(jnp.float32)

    params = {"w": PARAMS["up"], "steps": jnp.int32(3), "none": None, "name": "a"}
    found = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(params, (X, jnp.arange(3), jax.random.key(0)), scale=2.0)
    assert 0 < found.after < found.before


def test_bytes_kept_of_results_that_are_no_arrays():
    found = jaxamp.bytes_kept(lambda w, x: (jnp.sin(x @ w), "name", 3), compute_dtype=jnp.bfloat16)(PARAMS["up"], X)
    assert found.after < found.before


def test_bytes_kept_says_what_is_missing():
    with pytest.raises(TypeError, match=r"without arguments; expected those of fn"):
        jaxamp.bytes_kept(mlp)()
    with pytest.raises(TypeError, match=r"bytes_kept got 3"):
        jaxamp.bytes_kept(3)


# -- on one of eight devices

P = PartitionSpec
BATCH, IN, OUT = 1024, 64, 128
DEVICES = np.asarray(jax.devices())
MESH, BOTH = Mesh(DEVICES, ("d",)), Mesh(DEVICES.reshape(4, 2), ("d", "t"))
WEIGHT, HIDDEN = IN * OUT, BATCH * OUT  # entries


def split(*shape, spec=("d",), mesh=MESH):
    return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))


def on_one_device(fn, *args):
    return jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16, per_device=True)(*args)


def whole(fn, *args):
    return jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(*args)


def layer(w, x):
    """It keeps a cosine in float32, and under amp the result of the matmul."""
    return jnp.sum(jnp.sin(x @ w))


FSDP = split(IN, OUT), split(BATCH, IN)


def test_activations_are_split_as_the_batch():
    assert whole(layer, *FSDP) == (4 * HIDDEN, 2 * HIDDEN)
    assert on_one_device(layer, *FSDP) == (4 * HIDDEN // 8, 2 * HIDDEN // 8)


def test_arrays_say_themselves_where_they_are():
    w, x = (jax.device_put(jnp.zeros(a.shape), a.sharding) for a in FSDP)
    assert on_one_device(layer, w, x) == on_one_device(layer, *FSDP)
    replicated = jax.device_put(jnp.zeros(w.shape), NamedSharding(MESH, P()))
    assert on_one_device(layer, replicated, x) == on_one_device(layer, *FSDP)
    assert on_one_device(layer, w, jnp.zeros(x.shape)) == whole(layer, w, x)  # each device has the whole batch


def test_a_device_on_its_own_keeps_everything():
    args = jnp.zeros((IN, OUT)), jnp.zeros((BATCH, IN))
    assert on_one_device(layer, *args) == whole(layer, *args)


def test_weights_that_are_gathered_are_kept_on_each_device():
    def fn(weights, x):
        gathered = [lax.with_sharding_constraint(w, NamedSharding(MESH, P())) for w in weights]
        return jnp.sum(jnp.sin(jnp.sin(x @ gathered[0]) @ gathered[1]))

    args = [split(IN, OUT), split(OUT, IN)], split(BATCH, IN)
    second = BATCH * IN
    # float32: the sine and the cosine of the first layer, the cosine of the second, and the second weight. Under amp:
    # results of two matmuls, and the weight.
    assert whole(fn, *args) == (4 * (2 * HIDDEN + second + WEIGHT), 2 * (HIDDEN + second + WEIGHT))
    before, after = on_one_device(fn, *args)
    assert before == 4 * ((2 * HIDDEN + second) // 8 + WEIGHT)
    assert after == 2 * ((HIDDEN + second) // 8 + WEIGHT)


def test_what_is_made_of_a_weight_is_split_as_the_weight():
    def fn(w, x):
        return jnp.sum(x @ jnp.sin(w))

    args = split(IN, OUT), split(BATCH, IN)
    kept = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16, keep="all", per_device=True)(*args)
    assert kept == (4 * WEIGHT // 8, (4 * WEIGHT + 2 * BATCH * IN) // 8)  # the cosine; under amp, the rounded batch too


def test_tensor_parallelism_splits_the_hidden_layer():
    def fn(weights, x):
        return jnp.sum(jnp.sin(x @ weights[0]) @ weights[1])

    weights = [split(IN, OUT, spec=(None, "t"), mesh=BOTH), split(OUT, IN, spec=("t",), mesh=BOTH)]
    # float32: sine and cosine. Under amp: the result of the first matmul, and the second weight, rounded
    kept = on_one_device(fn, weights, split(BATCH, IN, mesh=BOTH))
    assert kept == (2 * 4 * HIDDEN // 8, 2 * HIDDEN // 8 + 2 * WEIGHT // 2)


def test_a_constraint_inside_of_the_function_splits_too():
    def fn(w, x):
        return jnp.sum(jnp.sin(lax.with_sharding_constraint(x @ w, NamedSharding(MESH, P("d")))))

    args = jnp.zeros((IN, OUT)), jnp.zeros((BATCH, IN))
    assert on_one_device(fn, *args) == (4 * HIDDEN // 8, 2 * HIDDEN // 8)


def test_a_scan_stacks_the_parts_of_a_device():
    def fn(weights, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.sin(x @ w), None), x, weights)[0])

    args = split(3, IN, IN, spec=(None, "d")), split(BATCH, IN)
    carried = 3 * BATCH * IN
    # float32: carry and cosine. Under amp: the carry, rounded as matmuls read it, and their results
    assert on_one_device(fn, *args) == (8 * carried // 8, (2 + 2) * carried // 8)


@pytest.mark.parametrize("check_vma", [True, False])
def test_in_a_shard_map_a_device_keeps_what_it_makes(check_vma):
    @functools.partial(jax.shard_map, mesh=MESH, in_specs=(P("d"), P("d")), out_specs=P(), check_vma=check_vma)
    def fn(w, x):
        return lax.psum(jnp.sum(jnp.sin(x @ lax.all_gather(w, "d", tiled=True))), "d")

    assert on_one_device(fn, *FSDP) == (4 * HIDDEN // 8, 2 * HIDDEN // 8)


def test_a_shard_map_over_some_axes_leaves_the_others_to_xla():
    @functools.partial(jax.shard_map, mesh=BOTH, in_specs=(P(), P("d")), out_specs=P(), axis_names={"d"})
    def fn(w, x):
        return lax.psum(jnp.sum(jnp.sin(x @ w)), "d")

    args = split(IN, OUT, spec=(None, "t"), mesh=BOTH), split(BATCH, IN, mesh=BOTH)
    assert on_one_device(fn, *args) == (4 * HIDDEN // 8, 2 * HIDDEN // 8)


def test_in_explicit_mode_types_say_how_values_are_split():
    mesh = Mesh(DEVICES, ("d",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        fn = lambda w, x: layer(jax.sharding.reshard(w, P()), x)
        args = split(IN, OUT, mesh=mesh), split(BATCH, IN, mesh=mesh)
        assert on_one_device(fn, *args) == (4 * HIDDEN // 8, 2 * HIDDEN // 8)


def test_a_device_must_be_known():
    abstract = AbstractMesh((8,), ("d",))
    with raises(TypeError, "AbstractMesh", "expected a mesh of devices", "Write jax.make_mesh"):
        on_one_device(layer, split(IN, OUT, mesh=abstract), split(BATCH, IN, mesh=abstract))
    with raises(TypeError, "traced value", "expected arrays or shapes", "outside of jit"):
        jax.jit(functools.partial(on_one_device, layer))(jnp.zeros((IN, OUT)), jnp.zeros((BATCH, IN)))
