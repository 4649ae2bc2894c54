"""Weights are quantised in front of loops: jaxprs of both passes, values, and what must stay inside."""

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, equations, error, in_float64, normal, raises
from jax import lax

import jaxamp
from jaxamp._compat import open_jaxpr

POLICY = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_formats()}
N = 16
WS = [normal(0, N, N, scale=0.3), normal(1, N, N, scale=0.3)]
XS = normal(2, 3, 8, N)  # three micro-batches, or steps in time
STACKED = normal(3, 4, N, N, scale=0.3)  # the layers of a network


def amp(fn, **options):
    return jaxamp.amp(fn, amp_policy=POLICY, compute_dtype=jnp.bfloat16, **options)


def mlp(ws, x):
    return jnp.mean((jnp.tanh(jnp.sin(x) @ ws[0]) @ ws[1]) ** 2)


def deep(ws, x):
    return jnp.mean(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0] ** 2)


def batches(loss):
    return lambda ws, xs: lax.scan(lambda total, x: (total + loss(ws, x), None), 0.0, xs)[0]


def recurrence(ws, xs):
    return jnp.mean(lax.scan(lambda h, x: (jnp.tanh(x @ ws[0] + h @ ws[1]), None), jnp.zeros((8, N)), xs)[0])


def of_weights(jaxpr, shape=(N, N)):
    """How many equations quantise a weight inside of loops, and how many elsewhere."""

    def count(jaxpr, inside):
        found = [0, 0]
        for eqn in open_jaxpr(jaxpr).eqns:
            is_one = eqn.primitive.name in ("quantize", "scale") and eqn.invars[0].aval.shape == shape
            found[inside] += is_one
            for body in jec.jaxprs_in_params(eqn.params):
                more = count(body, inside or eqn.primitive.name in ("scan", "while"))
                found = [a + b for a, b in zip(found, more, strict=True)]
        return found

    outside, inside = count(jaxpr, False)
    return inside, outside


def accumulated(loss):
    def gradients(ws, xs):
        add = lambda total, x: (jax.tree.map(jnp.add, total, jax.grad(loss)(ws, x)), None)
        return lax.scan(add, jax.tree.map(jnp.zeros_like, ws), xs)[0]

    return gradients


@pytest.mark.parametrize("fn", [batches(mlp), recurrence, batches(jax.jit(mlp)), batches(jax.checkpoint(mlp))])
@pytest.mark.parametrize("keep", ["auto", "all", "matmuls"])
def test_a_weight_is_quantised_in_front_of_the_loop_in_both_passes(fn, keep):
    step = jax.grad(amp(fn, keep=keep))
    assert of_weights(jax.make_jaxpr(step)(WS, XS)) == (0, 4)
    inside, _ = of_weights(jax.make_jaxpr(jax.grad(amp(fn, keep=keep, disable_passes=["hoist_quantized"])))(WS, XS))
    assert inside > 0 or keep == "all"  # JAX moves what is known out of loops, if it is not computed again
    for found, exact in zip(jax.jit(step)(WS, XS), in_float64(jax.grad(fn), WS, XS), strict=True):
        assert error(found, exact) < 0.15


def test_the_values_do_not_change():
    for fn in (batches(mlp), recurrence):
        hoisted, plain = (jax.jit(jax.value_and_grad(amp(fn, disable_passes=p))) for p in ((), ("hoist_quantized",)))
        assert_same_bits(hoisted(WS, XS), plain(WS, XS))


def test_what_changes_from_round_to_round_stays_inside():
    jaxpr = jax.make_jaxpr(amp(deep))(STACKED, XS[0])
    assert of_weights(jaxpr) == (2, 0)  # the layers are slices of each round
    jaxpr = jax.make_jaxpr(amp(lambda w, x: lax.fori_loop(0, 3, lambda i, x: x @ (w * x[0, 0]), x)))(WS[0], XS[0])
    assert of_weights(jaxpr) == (2, 0)


def test_a_while_loop():
    decode = lambda w, x: lax.while_loop(lambda c: c[0] < 4, lambda c: (c[0] + 1, jnp.tanh(c[1] @ w)), (0, x))[1]
    jaxpr = jax.make_jaxpr(amp(decode))(WS[0], XS[0])
    assert of_weights(jaxpr) == (0, 2)
    assert error(amp(decode)(WS[0], XS[0]), in_float64(decode, WS[0], XS[0])) < 0.15


def test_a_cheap_operation_before_it_comes_along():
    fn = lambda ws, xs: batches(mlp)([ws[0].T, 2 * ws[1]], xs)
    inside = lambda ws, xs: lax.scan(lambda t, x: (t + mlp([ws[0].T, 2 * ws[1]], x), None), 0.0, xs)[0]
    for f in (fn, inside):
        assert of_weights(jax.make_jaxpr(jax.grad(amp(f)))(WS, XS)) == (0, 4)


def test_layers_inside_of_micro_batches_are_quantised_in_a_loop_of_their_own():
    step = jax.grad(amp(batches(deep)))
    jaxpr = jax.make_jaxpr(step)(STACKED, XS)
    (of_layers, *others) = [eqn for eqn in open_jaxpr(jaxpr).eqns if eqn.primitive.name == "scan"]
    assert of_weights(of_layers.params["jaxpr"]) == (0, 2)
    assert all(of_weights(eqn.params["jaxpr"]) == (0, 0) for eqn in others)
    plain = jax.grad(amp(batches(deep), disable_passes=["hoist_quantized"]))
    assert_same_bits(jax.jit(step)(STACKED, XS), jax.jit(plain)(STACKED, XS))


@pytest.mark.parametrize("keep", ["auto", "all"])
def test_gradient_accumulation(keep):
    """The loop is the user's, around a derivative."""
    step = accumulated(amp(mlp, keep=keep))
    assert of_weights(jax.make_jaxpr(step)(WS, XS))[0] > 0
    once = jaxamp.quantize_once(step)
    assert of_weights(jax.make_jaxpr(once)(WS, XS)) == (0, 4)
    assert_same_bits(jax.jit(once)(WS, XS), jax.jit(step)(WS, XS))


def test_gradient_accumulation_over_layers_in_a_scan():
    step = accumulated(amp(deep))
    once = jaxamp.quantize_once(step)
    loops = [eqn for eqn in open_jaxpr(jax.make_jaxpr(once)(STACKED, XS)).eqns if eqn.primitive.name == "scan"]
    assert of_weights(loops[-1].params["jaxpr"]) == (0, 0)
    assert_same_bits(jax.jit(once)(STACKED, XS), jax.jit(step)(STACKED, XS))


def test_quantize_once_takes_any_arguments():
    step = lambda ws, xs, *, name, scale=1.0: {name: jax.tree.map(lambda g: scale * g, accumulated(amp(mlp))(ws, xs))}
    found = jaxamp.quantize_once(step)(WS, XS, name="grads", scale=2.0)
    np.testing.assert_array_equal(found["grads"][0], step(WS, XS, name="grads", scale=2.0)["grads"][0])
    with raises(TypeError, "quantize_once got 3"):
        jaxamp.quantize_once(3)


@pytest.mark.slow
def test_vmap_and_second_derivatives():
    step = jax.grad(amp(batches(mlp)))
    mapped = jax.vmap(step, (None, 0))(WS, jnp.stack([XS, XS]))
    assert error(mapped[0][0], step(WS, XS)[0]) < 1e-2
    with raises(TypeError, "differentiated twice; its second derivative is not defined"):
        jax.jvp(lambda ws: step(ws, XS), (WS,), (WS,))


def test_other_rounding_of_a_weight_is_hoisted_too():
    rule = jaxamp.use_formats(jaxamp.format("e2m1", rounding="stochastic"))
    f = jaxamp.amp(batches(mlp), amp_policy=jaxamp.default_amp_policy | {lax.dot_general_p: rule})
    jaxpr = jax.make_jaxpr(jax.grad(f))(WS, XS)
    assert of_weights(jaxpr)[0] == 0
    assert [eqn.invars[0].aval.shape for eqn in equations(jaxpr) if eqn.primitive.name == "checksum"].count((N, N)) == 2


@pytest.mark.parametrize("gathered", [False, True])
def test_layers_inside_of_micro_batches_in_a_shard_map(gathered):
    mesh = jax.make_mesh((4,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec

    def local(ws, xs):
        whole = (lambda w: lax.all_gather(w, "d", tiled=True)) if gathered else lambda w: w
        layer = lambda x, w: (jnp.tanh(x @ whole(w)), None)
        total = lax.scan(lambda total, x: (total + lax.scan(layer, x, ws)[0].sum(), None), xs.sum() * 0, xs)[0]
        return lax.psum(total, "d")

    specs = spec(None, "d") if gathered else spec(), spec(None, "d")
    loss = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=spec())
    found = jax.jit(jax.grad(amp(loss)))(STACKED, XS)
    assert error(found, in_float64(jax.grad(batches(lambda ws, x: _last(ws, x).sum())), STACKED, XS)) < 0.2


def _last(ws, x):
    return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]


def test_quantize_once_of_something_that_is_no_function():
    with raises(
        TypeError, "quantize_once got 3, of type int; expected a function", r"Write jaxamp.quantize_once\(step\)."
    ):
        jaxamp.quantize_once(3)
