"""Delayed scaling: scales of earlier steps, through every transform; the state, its names and its errors."""

import equinox as eqx
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same_bits, equations, error, in_float64, normal, raises, shape
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxamp
from jaxamp._compat import primitives

MATMULS = (lax.dot_general_p, lax.conv_general_dilated_p, primitives()["ragged_dot_general"])


def amp(fn, scaling="delayed", history=1, **options):
    rule = jaxamp.use_formats(scaling=scaling, history=history)
    return jaxamp.amp(fn, amp_policy=dict(jaxamp.load_policy("default")) | dict.fromkeys(MATMULS, rule), **options)


WS = {"up": normal(0, 3, 8, 16, scale=0.3), "down": normal(1, 3, 16, 8, scale=0.3)}
X = normal(2, 8, 8)


def block(ws, x, i=0):
    return jnp.tanh(x @ ws["up"][i]) @ ws["down"][i]


def layers(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (x + jnp.tanh(x @ w["up"]) @ w["down"], None), x, ws)[0] ** 2)


def branches(ws, x):
    return jnp.mean(lax.cond(x[0, 0] < 9, lambda x: block(ws, x), lambda x: block(ws, x, 1), x) ** 2)


def one_of_each(ws, x):
    x = jax.jit(lambda x: jnp.tanh(x @ ws["up"][0]))(x)
    x = jax.checkpoint(lambda x: jnp.sin(x @ ws["down"][0]))(x)
    return jnp.mean(x**2)


def shared(ws, x):
    return jnp.mean((x @ ws["up"][0]) * jnp.sin(x @ ws["up"][1]) + x @ ws["up"][0])


def in_shards(check_vma):
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))

    def mean(ws, x):
        return lax.pmean(jnp.mean(block(ws, x)), "d")

    return jax.shard_map(mean, mesh=mesh, in_specs=(P(), P("d")), out_specs=P(), check_vma=check_vma)


def trained(fn, *args, steps=8, **options):
    """The state, the value and the gradients after some steps on the same numbers: they have settled by then."""
    delayed = amp(fn, **options)
    scales, step = jaxamp.init_scales(delayed)(*args), jax.jit(jaxamp.delayed_scale_value_and_grad(delayed))
    for _ in range(steps):
        scales, results = step(*args, delayed_scales=scales)
    return scales, results


FUNCTIONS = {
    "scan over layers": (layers, WS, X),
    "jit and checkpoint": (one_of_each, WS, X),
    "cond": (branches, WS, X),
    "operands that matmuls share": (shared, WS, X),
    "vmap": (lambda ws, x: jnp.mean(jax.vmap(lambda x: block(ws, x[None]))(x)), WS, X),
    "ragged": (lambda ws, x: jnp.mean(jnp.tanh(lax.ragged_dot(x, ws["up"], jnp.array([3, 3, 2])))), WS, X),
    "convolution": (
        lambda k, x: jnp.mean(lax.conv(x, k, (1, 1), "SAME") ** 2),
        normal(3, 4, 3, 3, 3),
        normal(4, 2, 3, 8, 8),
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_on_the_same_numbers_delayed_scales_settle_at_the_current_ones(name):
    fn, *args = FUNCTIONS[name]
    scales, found = trained(fn, *args)
    assert_same_bits(found, jax.jit(jax.value_and_grad(amp(fn, "current")))(*args))
    assert all(jnp.all(history > 0) for name, history in scales.histories.items() if "branch0" not in name)


@pytest.mark.parametrize("check_vma", [True, False])
def test_devices_agree_on_the_largest(check_vma):
    on_two, _ = trained(in_shards(check_vma), WS, X)
    on_one, _ = trained(lambda ws, x: jnp.mean(block(ws, x)), WS, X)
    assert_same_bits(on_two, on_one)


def test_rounds_of_a_scan_over_layers_have_scales_of_their_own_and_micro_batches_share():
    def micro_batches(ws, x):
        return lax.scan(lambda total, x: (total + layers(ws, x), None), 0.0, x)[0]

    batches = jnp.stack([X[:4], 5 * X[4:]])
    scales, (_, grads) = trained(micro_batches, WS, batches)
    assert {history.shape for history in scales.histories.values()} == {(3, 1)}
    apart = [trained(layers, WS, x)[0].histories["dot_general/lhs"] for x in batches]
    np.testing.assert_allclose(scales.histories["dot_general/lhs"][0], jnp.maximum(*apart)[0])
    expected = in_float64(jax.grad(micro_batches), WS, batches)
    assert error(grads["down"], expected["down"]) < 0.1


def test_a_recurrence_has_one_scale_for_all_steps():
    def recurrence(w, x):
        return jnp.mean(lax.scan(lambda h, x: (jnp.tanh(x @ w["in"] + h @ w["own"]), None), jnp.zeros((2, 8)), x)[0])

    w, x = {"in": normal(5, 8, 8), "own": normal(6, 8, 8)}, normal(7, 5, 2, 8)
    scales, _ = trained(recurrence, w, x)
    assert {history.shape for history in scales.histories.values()} == {(1,)}
    assert scales.histories["dot_general/lhs"][0] == jnp.max(jnp.abs(x))


def test_no_pass_over_an_operand_comes_before_it_is_rounded():
    """The scales of a step are there before its numbers."""
    delayed = amp(block)
    scales = jaxamp.init_scales(delayed)(WS, X)
    program = jax.make_jaxpr(lambda scales: jaxamp.with_scales(delayed, scales)(WS, X))(scales)
    found = [eqn for eqn in equations(program) if eqn.primitive.name == "scale"]
    assert len(found) == 4
    assert all(eqn.invars[0].aval.shape == () for eqn in found)


def test_names_do_not_depend_on_shapes_or_on_what_is_kept():
    def named(ws, x):
        with jax.named_scope("mlp"):
            return layers(ws, x) + jnp.mean(block(ws, x))

    places = list(jaxamp.init_scales(amp(named))(WS, X).histories)
    assert places[0] == "mlp/dot_general/cotangent"
    assert "mlp/dot_general.3/rhs" in places
    for keep in ("all", "matmuls"):
        assert list(jaxamp.init_scales(amp(named, keep=keep))(WS, shape(2, 8)).histories) == places


def test_the_largest_of_the_history_counts_and_zeros_are_passed_over():
    delayed = amp(lambda w, x: jnp.sum(x @ w), history=2)
    w, step = jnp.ones((8, 2)), jax.jit(jaxamp.delayed_scale_value_and_grad(delayed))
    scales = jaxamp.init_scales(delayed)(w, X)
    for size in (4.0, 2.0, 0.0, 1.0, jnp.inf, jnp.nan):
        scales, _ = step(w, jnp.full((3, 8), size), delayed_scales=scales)
    assert scales.histories["dot_general/lhs"].tolist() == [1.0, 2.0]
    scales, (value, _) = step(w, jnp.full((3, 8), 100.0), delayed_scales=scales)
    assert 2 <= float(value) / (3 * 2 * 8) < 2.3  # saturated at the largest of earlier steps, rounded up
    assert scales.histories["dot_general/lhs"].tolist() == [100.0, 1.0]


def test_maxima_of_two_micro_batches_merge():
    seen = [jaxamp.DelayedScales({"a": jnp.array([x, 0.0])}) for x in (3.0, 5.0)]
    assert seen[0].merge(seen[1]).histories["a"].tolist() == [5.0, 0.0]


@pytest.mark.parametrize("filter", [True, False])
def test_gradients_of_an_equinox_module_and_by_argnums(filter):
    model, loss = eqx.nn.MLP(8, 1, 16, 1, key=jax.random.key(0)), lambda model, x: jnp.mean(jax.vmap(model)(x) ** 2)
    if filter:
        delayed, args, options = amp(loss), (model, X), {}
    else:
        delayed, args, options = amp(layers), (WS, X), {"filter": False, "argnums": (0, -1)}
    scales = jaxamp.init_scales(delayed)(*args)
    grad_fn = eqx.filter_jit(jaxamp.delayed_scale_value_and_grad(delayed, **options))
    scales, (value, grads) = grad_fn(*args, delayed_scales=scales)
    assert jnp.isfinite(value)
    kind = tuple if options else eqx.nn.MLP
    assert type(grads) is kind
    assert len(scales.histories) == 6


def test_an_nnx_model_is_updated_in_place():
    class Model(nnx.Module):
        def __init__(self, rngs):
            self.up, self.norm = nnx.Linear(8, 16, rngs=rngs), nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.up(x))

    model, delayed = Model(nnx.Rngs(0)), amp(lambda model, x: jnp.mean(model(x) ** 4))
    scales = jaxamp.init_scales(delayed)(model, X)
    before = model.norm.mean[...]
    scales, (_, grads) = jaxamp.delayed_scale_value_and_grad(delayed)(model, X, delayed_scales=scales)
    assert not jnp.array_equal(before, model.norm.mean[...])
    assert {path[-1] for path, _ in nnx.to_flat_state(grads)} == {"kernel", "bias", "scale"}
    assert all(jnp.all(history[0] > 0) for history in scales.histories.values())


def test_a_loss_scaler_leaves_the_maxima_alone():
    delayed = amp(layers)
    scales, scaler = jaxamp.init_scales(delayed)(WS, X), jaxamp.DynamicScalerState.static(2.0**10)

    def loss(both, x):
        return jaxamp.with_scales(delayed, both[1])(both[0], x)

    step = jax.jit(jaxamp.dynamic_scale_grad(loss))
    for _ in range(8):
        scaler, (grads, seen) = step((WS, scales), X, dynamic_scaler_state=scaler)
        scales = scales.update(seen)
    settled, (_, expected) = trained(layers, WS, X)
    ratio = jax.tree.map(jnp.divide, scales, settled).histories
    assert all(jnp.all(x == (2.0**10 if name.endswith("cotangent") else 1)) for name, x in ratio.items())
    assert_same_bits(grads, expected)


def test_orbax_and_pickle_keep_the_state(tmp_path):
    scales, _ = trained(layers, WS, X, steps=1)
    with ocp.StandardCheckpointer() as files:
        files.save(tmp_path / "scales", scales)
        files.wait_until_finished()
        assert_same_bits(files.restore(tmp_path / "scales", jax.tree.map(jnp.zeros_like, scales)), scales)


def test_without_a_state_scales_are_current():
    assert_same_bits(jax.grad(amp(layers))(WS, X), jax.grad(amp(layers, "current"))(WS, X))


def test_a_users_derivative_rules_have_current_scales():
    @jax.custom_vjp
    def own(w, x):
        return x @ w

    own.defvjp(lambda w, x: (x @ w, (w, x)), lambda saved, ct: (saved[1].T @ ct, ct @ saved[0].T))
    delayed = amp(lambda w, x: jnp.sum(own(w, jnp.tanh(x @ w))))
    w = normal(8, 8, 8)
    scales = jaxamp.init_scales(delayed)(w, X)
    assert list(scales.histories) == ["dot_general/cotangent", "dot_general/lhs", "dot_general/rhs"]
    scales, (value, _) = jaxamp.delayed_scale_value_and_grad(delayed)(w, X, delayed_scales=scales)
    assert jnp.isfinite(value)


@pytest.mark.promotes
def test_training_follows_float32():
    def loss(ws, x, y):
        return jnp.mean((block(ws, x) - y) ** 2)

    target, tx = {name: normal(9, *w.shape) for name, w in WS.items()}, optax.adam(3e-2)
    x = normal(10, 64, 8)
    y, final = block(target, x), {}
    for side in ("float32", "delayed"):
        fn = loss if side == "float32" else amp(loss, history=16)
        ws, state = WS, tx.init(WS)
        scales = None if side == "float32" else jaxamp.init_scales(fn)(ws, x, y)

        @jax.jit
        def step(ws, state, scales, fn=fn):
            if scales is None:
                value, grads = jax.value_and_grad(fn)(ws, x, y)
            else:
                scales, (value, grads) = jaxamp.delayed_scale_value_and_grad(fn)(ws, x, y, delayed_scales=scales)
            updates, state = tx.update(grads, state)
            return optax.apply_updates(ws, updates), state, scales, value

        for _ in range(150):
            ws, state, scales, _ = step(ws, state, scales)
        final[side] = float(loss(ws, x, y))
    assert final["delayed"] < 1.1 * final["float32"] + 0.05 * float(jnp.mean(y**2))


# -- errors


def test_scales_of_another_program_are_refused_with_the_place():
    delayed = amp(layers)
    scales = jaxamp.init_scales(amp(one_of_each))(WS, X)
    with raises(ValueError, "another program", "'dot_general/cotangent'", r"shape \(1,\)", r"\(3, 1\)", "init_scales"):
        jaxamp.with_scales(delayed, scales)(WS, X)
    longer = jaxamp.init_scales(amp(layers, history=4))(WS, X)
    with raises(ValueError, "6 places differ", r"\(3, 4\)"):
        jaxamp.with_scales(delayed, longer)(WS, X)


def test_other_errors_say_what_to_write():
    delayed = amp(layers)
    for wrapper in (jaxamp.init_scales, jaxamp.delayed_scale_value_and_grad):
        with raises(TypeError, "expected a function from jaxamp.amp", r"Write jaxamp.amp\(fn"):
            wrapper(layers)
    with raises(TypeError, "with_scales got {}", "expected a DelayedScales", "init_scales"):
        jaxamp.with_scales(delayed, {})
    with raises(TypeError, "without delayed_scales", r"Write grad_fn\(..., delayed_scales=scales\)"):
        jaxamp.delayed_scale_value_and_grad(delayed)(WS, X)
    with raises(TypeError, "argnums with filter=True", "filter=False"):
        jaxamp.delayed_scale_value_and_grad(delayed, argnums=1)
    with raises(TypeError, "got the option 'has_axu'; expected some of has_aux, filter, argnums", "mean 'has_aux'"):
        jaxamp.delayed_scale_value_and_grad(delayed, has_axu=True)
    for history in (0, -1, 2.5, True):
        with raises(ValueError, f"history={history!r}", "1 or more", "Write history=16"):
            jaxamp.use_formats(scaling="delayed", history=history)
    with raises(ValueError, "scaling='delaid'", "Did you mean 'delayed'"):
        jaxamp.use_formats(scaling="delaid")
    scales = jax.tree.map(lambda x: jnp.stack([x, x]), jaxamp.init_scales(delayed)(WS, X))
    with raises(NotImplementedError, "a batch of scales; expected one", "Leave scales out of the vmap"):
        jax.vmap(lambda scales: jaxamp.with_scales(delayed, scales)(WS, X))(scales)
