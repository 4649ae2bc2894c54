"""Scaled gradients in `shard_map`, `pmap` and `vmap`: who has a scaler of its own, and who agrees with whom."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import error as relative
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from least_squares import LOSS, W, batch_of, oracle

import jaxamp
from jaxamp import DynamicScalerState


@pytest.mark.parametrize("redo_on_nan", [0, 12])
def test_in_shard_map_and_pmap_the_devices_agree(redo_on_nan):
    mesh = jax.make_mesh((8,), ("data",))
    batch = batch_of()[0].at[9].set(1e2), batch_of()[1]  # the fifth device overflows
    grad_fn = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan, axis_name="data")

    def step(w, batch, state):
        state, grads = grad_fn(w, batch, dynamic_scaler_state=state)
        return state, lax.pmean(grads, "data")

    def own_step(w, batch, state):  # parameters that vary: no gradient is summed behind our back
        return jax.tree.map(lambda x: x[None], step(w[0], batch, state))

    placed = jax.device_put(batch, NamedSharding(mesh, P("data")))
    each = jax.device_put(jnp.stack([W] * 8), NamedSharding(mesh, P("data")))
    whole, expected = jax.jit(jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan))(
        W, batch, dynamic_scaler_state=DynamicScalerState()
    )
    by_map = jax.jit(
        jax.shard_map(own_step, mesh=mesh, in_specs=(P("data"), P("data"), P()), out_specs=P("data"), check_vma=False)
    )(each, placed, DynamicScalerState())
    by_pmap = jax.pmap(step, axis_name="data", in_axes=(None, 0, None))(
        W, jax.tree.map(lambda x: x.reshape(8, 2, *x.shape[1:]), batch), DynamicScalerState()
    )
    for state, grads in (by_map, by_pmap):
        assert len(set(np.asarray(state.scaler).tolist())) == 1
        assert len(set(np.asarray(state.total_redos).tolist())) == 1
        assert (int(np.asarray(state.skipped)[0]) == 0) == (redo_on_nan > 0) == np.isfinite(grads).all()
        if redo_on_nan:
            assert relative(np.asarray(grads)[0], oracle(W, batch)) < 2**-8
            assert len({row.tobytes() for row in np.asarray(grads)}) == 1
    assert bool(whole.finite) == (redo_on_nan > 0) == np.isfinite(expected).all()


@pytest.mark.parametrize("redo_on_nan", [0, 12])
def test_without_an_axis_each_device_of_a_shard_map_has_a_scaler_of_its_own(redo_on_nan):
    mesh = jax.make_mesh((8,), ("model",))
    batch = batch_of()[0].at[9].set(1e2), batch_of()[1]
    placed = jax.device_put((jnp.stack([W] * 8), batch), NamedSharding(mesh, P("model")))
    states = jax.device_put(
        jax.tree.map(lambda x: jnp.stack([x] * 8), DynamicScalerState()), NamedSharding(mesh, P("model"))
    )

    def step(w, batch, state):
        w, state = jax.tree.map(lambda x: x[0], (w, state))
        state, _ = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=redo_on_nan)(w, batch, dynamic_scaler_state=state)
        return jax.tree.map(lambda x: x[None], state)

    state = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("model"), out_specs=P("model")))(*placed, states)
    fell = np.asarray(state.scaler) < 2**15
    assert fell.tolist() == [i == 4 for i in range(8)]
    assert (np.asarray(state.total_redos) > 0).tolist() == [redo_on_nan > 0 and i == 4 for i in range(8)]


def tensor_parallel_loss(params, x):
    return jnp.mean((lax.psum(x @ params["w"], "model") + params["b"]) ** 2)


@pytest.mark.parametrize("redo_on_nan", [0, 3])
def test_devices_agree_along_two_axes_where_gradients_vary_along_one(redo_on_nan):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    params, specs = {"w": jnp.ones(8), "b": jnp.ones(())}, {"w": P("model"), "b": P()}

    def step(params, x, state):
        grad_fn = jaxamp.dynamic_scale_grad(
            jaxamp.amp(tensor_parallel_loss), axis_name=("data", "model"), redo_on_nan=redo_on_nan
        )
        return grad_fn(params, x, dynamic_scaler_state=state)

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(specs, P("data", "model"), P()), out_specs=(P(), specs)))
    for x, finite in (
        (jnp.full((16, 8), 2.0**-6), True),
        (jnp.full((16, 8), 2.0**-6).at[9, 3].set(4.0), redo_on_nan > 0),
    ):
        state, grads = run(params, x, DynamicScalerState())
        assert bool(state.finite) == finite == bool(jaxamp.all_finite(grads))


def test_a_scale_that_varies_where_the_loss_does_not_is_refused():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)

    def step(params, x, state):
        grad_fn = jaxamp.dynamic_scale_grad(tensor_parallel_loss, axis_name="data", redo_on_nan=3)
        return grad_fn(params, x, dynamic_scaler_state=state)[0].scaler[None]

    with pytest.raises(
        ValueError, match=r"differs along \['model'\] .*; expected devices .* Add these axes to axis_name"
    ):
        jax.shard_map(
            step,
            mesh=mesh,
            in_specs=({"w": P("model"), "b": P()}, P("data", "model"), P()),
            out_specs=P("model"),
        )({"w": jnp.ones(8), "b": jnp.ones(())}, jnp.ones((16, 8)), DynamicScalerState())


@pytest.mark.parametrize("axis_name", ["data", None])
def test_states_stacked_as_pmap_leaves_them_work_in_shard_map(axis_name):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))
    states = jax.tree.map(lambda x: jnp.stack([x] * 8), DynamicScalerState().as_arrays())
    scale = jnp.arange(1.0, 5.0)  # the same on all devices, and closed over

    def step(w, x, state):
        w, state = jax.tree.map(lambda a: a[0], (w, state))
        grad_fn = jaxamp.dynamic_scale_grad(
            lambda w, x: jnp.mean((x @ (w * scale)) ** 2), redo_on_nan=3, axis_name=axis_name
        )
        return jax.tree.map(lambda a: a[None], grad_fn(w, x, dynamic_scaler_state=state))

    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    state, grads = run(jnp.stack([W] * 8), batch_of()[0], states)
    assert np.isfinite(grads).all()
    assert np.asarray(state.count).tolist() == [1] * 8


def test_under_vmap_each_example_has_a_scaler_of_its_own():
    x, y = batch_of()
    batches = jnp.stack([x, 300 * x]), jnp.stack([y, y])
    grad_fn = jaxamp.dynamic_scale_grad(LOSS, redo_on_nan=20)
    states, grads = jax.vmap(lambda b: grad_fn(W, b, dynamic_scaler_state=DynamicScalerState()))(batches)
    assert int(states.total_redos[0]) < int(states.total_redos[1])
    assert relative(grads[1], oracle(W, (300 * x, y))) < 2**-9


# -- what it costs between devices


OPTIMIZER = optax.adam(1e-3)
MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
SHAPES = {"up": (16, 32), "bias": (32,), "down": (32, 16)}


def two_layers(params, x):
    return jnp.mean((jnp.tanh(x @ params["up"] + params["bias"]) @ params["down"]) ** 2)


def steps(loss, axis_name=None, agree=lambda tree: tree):
    """A training step without a scaler, and the same with one."""

    def without(params, opt_state, state, x):
        value, grads = agree(jax.value_and_grad(loss)(params, x))
        updates, opt_state = OPTIMIZER.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, state, value

    def scaled(params, opt_state, state, x):
        grad_fn = jaxamp.dynamic_scale_value_and_grad(loss, axis_name=axis_name)
        state, (value, grads) = grad_fn(params, x, dynamic_scaler_state=state)
        value, grads = agree((value, grads))
        params, opt_state = jaxamp.update_if_finite(params, OPTIMIZER, opt_state, grads, state.finite)
        return params, opt_state, state, value

    return without, scaled


def arguments(specs):
    """Shapes of parameters and states, and of a batch that is split over the devices."""
    shaped = lambda x, spec: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(MESH, spec))
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in SHAPES.items()}
    (count, mu, nu), empty = jax.eval_shape(OPTIMIZER.init, params)
    moments = [{name: shaped(x, specs[name]) for name, x in like.items()} for like in (params, mu, nu)]
    opt_state = (optax.ScaleByAdamState(shaped(count, P()), *moments[1:]), empty)
    state = jax.tree.map(lambda x: shaped(x, P()), DynamicScalerState().as_arrays())
    return moments[0], opt_state, state, shaped(jax.ShapeDtypeStruct((16, 16), jnp.float32), P("data"))


def sent(step, args):
    """Bytes by kind and dtype. XLA joins collectives, so their number says little."""
    shardings = jax.tree.map(lambda x: x.sharding, (*args[:3], args[2].scaler))
    total = collections.Counter()
    for row in jaxamp.compiled_collectives(jax.jit(step, out_shardings=shardings).lower(*args).compile()):
        total[row.kind, row.dtype] += row.total
    return total


KINDS = {  # how the loss or the gradients are summed, options of shard_map, bytes that the scaler adds
    "the loss": (lambda x: lax.pmean(x, ("data", "model")), lambda tree: tree, {}, 0),
    "gradients": (lambda x: x, lambda tree: lax.pmean(tree, ("data", "model")), {"check_vma": False}, 4),
}


@pytest.mark.promotes
@pytest.mark.parametrize("kind", KINDS)
def test_in_shard_map_devices_agree_by_one_number_or_none(kind):
    mean, agree, options, more = KINDS[kind]
    loss = lambda params, x: mean(jaxamp.amp(two_layers)(params, x))
    specs = P(), P(), P(), P(("data", "model"))
    without, scaled = (
        sent(
            jax.shard_map(step, mesh=MESH, in_specs=specs, out_specs=P(), **options),
            arguments(dict.fromkeys(SHAPES, P())),
        )
        for step in steps(loss, ("data", "model"), agree)
    )
    assert set(scaled) == set(without) == {("all-reduce", "float32")}
    assert scaled.total() - without.total() == more


PLACED = {
    "everywhere": dict.fromkeys(SHAPES, P()),
    "FSDP": {"up": P("data"), "bias": P(), "down": P("data")},
    "FSDP and tensor parallel": {"up": P("data", "model"), "bias": P("model"), "down": P("model", "data")},
}


@pytest.mark.promotes
@pytest.mark.parametrize("name", PLACED)
def test_under_jit_devices_agree_by_a_number_for_each_gradient_and_axis(name):
    """Each gradient is summed to a number where it lies. XLA adds these up over one axis after the other."""
    args = arguments(PLACED[name])
    without, scaled = (sent(step, args) for step in steps(jaxamp.amp(two_layers)))
    more = scaled - without
    assert without - scaled == {}
    assert {kind for kind, _ in more} <= {"all-reduce"}
    assert more.total() <= 4 * len(SHAPES) * len(MESH.shape)


def test_the_tests_here_would_see_what_a_scaler_sends():
    gathers = lambda x: jnp.sum(lax.with_sharding_constraint(x, NamedSharding(MESH, P())) ** 2)
    args = arguments(PLACED["FSDP"])
    found = sent(lambda params, *rest: (params, *rest[:2], gathers(params["up"]) + rest[1].scaler), args)
    assert found["all-gather", "float32"] == 16 * 32 * 4
