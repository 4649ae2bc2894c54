"""What a scan keeps for the backward pass: results of matmuls, and nothing that is cheap to compute again."""

from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import count, equations, in_float64, matmul_dtypes, normal
from jax import lax

import jaxamp

LAYERS, WIDTH, TOKENS = 3, 16, 24
X = normal(0, TOKENS, WIDTH)
WEIGHTS = {
    name: normal(seed, LAYERS, *shape, scale=0.2)
    for seed, (name, shape) in enumerate(
        {"q": (WIDTH, WIDTH), "k": (WIDTH, WIDTH), "up": (WIDTH, 4 * WIDTH), "down": (4 * WIDTH, WIDTH)}.items()
    )
}


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)


def layer(x, p):
    h = norm(x)
    x = x + jax.nn.softmax((h @ p["q"]) @ (h @ p["k"]).T) @ x
    return x + jax.nn.gelu(norm(x) @ p["up"]) @ p["down"], None


def loss(weights, x, body=layer):
    return jnp.sum(lax.scan(body, x, weights)[0] ** 2)


def kept(fn, *args) -> list[jax.ShapeDtypeStruct]:
    """What the pullback holds on to, stacked over layers, without the weights."""
    pullback = jax.eval_shape(lambda w: jax.vjp(lambda w: fn(w, *args[1:]), w)[1], args[0])
    shapes = {w.shape for w in jax.tree.leaves(args[0])}
    return [x for x in jax.tree.leaves(pullback) if x.shape[:1] == (LAYERS,) and x.shape not in shapes]


def size(arrays) -> int:
    return sum(x.size * x.dtype.itemsize for x in arrays)


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_a_scan_keeps_results_of_matmuls_and_its_carry(low):
    amp = jaxamp.amp(loss, compute_dtype=low)
    found = kept(amp, WEIGHTS, X)
    assert size(found) < 0.35 * size(kept(loss, WEIGHTS, X))
    wide = [x for x in found if x.dtype == jnp.float32]
    assert [x.shape for x in wide if x.size > LAYERS * TOKENS] == [(LAYERS, TOKENS, WIDTH)]  # the carry
    assert {x.dtype for x in found} == {jnp.dtype(low), jnp.dtype(jnp.float32)}


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.gelu, jax.nn.softplus, jax.nn.mish, jax.nn.elu])
def test_an_activation_in_a_scan_is_computed_again(act):
    mlp = lambda x, p: (x + act(x @ p["up"]) @ p["down"], None)
    found = kept(jaxamp.amp(lambda w, x: loss(w, x, mlp), compute_dtype=jnp.bfloat16), WEIGHTS, X)
    assert not [x.shape for x in found if x.dtype == jnp.float32]
    low = sorted(x.shape for x in found if x.dtype == jnp.bfloat16)
    assert low == [(LAYERS, TOKENS, WIDTH), (LAYERS, TOKENS, 4 * WIDTH)]  # the carry, and the first matmul's result


def test_no_matmul_is_computed_again():
    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    forward, both = (jax.make_jaxpr(f)(WEIGHTS, X) for f in (amp, jax.grad(amp)))
    # backwards: two for each matmul
    assert len(matmul_dtypes(both)) == 3 * len(matmul_dtypes(forward))


def reductions(fn, *args) -> list[str]:
    """Those that make one entry of many."""
    found = (eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name.startswith("reduce_"))
    return [eqn.primitive.name for eqn in found if eqn.invars[0].aval.size >= WIDTH * eqn.outvars[0].aval.size]


def test_no_sum_of_many_entries_is_computed_again():
    def summed(x, p):
        return jnp.exp(x @ p["q"] - jnp.sum(jnp.sin(x @ p["k"]), -1, keepdims=True)), None

    amp = jaxamp.amp(lambda w, x: loss(w, x, summed), compute_dtype=jnp.bfloat16)
    assert reductions(amp, WEIGHTS, X) == ["reduce_sum", "reduce_sum"]  # the second is the loss
    # the third is the derivative of what is spread over a row
    assert reductions(jax.grad(amp), WEIGHTS, X) == ["reduce_sum", "reduce_sum", "reduce_sum"]

    amp = jaxamp.amp(lambda w, x: jnp.sum(jax.nn.logsumexp(x @ w, -1)), compute_dtype=jnp.bfloat16)
    for fn in (amp, jax.grad(amp)):  # an island
        assert reductions(fn, WEIGHTS["q"][0], X) == ["reduce_max", "reduce_sum", "reduce_sum"]


def test_no_softmax_is_computed_again():
    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    for fn in (amp, jax.grad(amp)):
        assert count("exp", jax.make_jaxpr(fn)(WEIGHTS, X)) == 1
    found = kept(amp, WEIGHTS, X)
    assert [x.dtype.name for x in found if x.shape == (LAYERS, TOKENS, TOKENS)] == ["bfloat16"]
    assert len([x for x in found if x.shape == (LAYERS, TOKENS)]) == 6  # of two norms, and none of the softmax


def test_no_random_number_is_drawn_again():
    def noisy(x, inputs):
        p, key = inputs
        mask = jax.random.bernoulli(key, 0.5, x.shape)
        x, _ = layer(jnp.where(mask, x, 0.0), p)
        return x + jax.random.normal(key, x.shape) * x, None

    def noisy_loss(weights, keys):
        return jnp.sum(lax.scan(noisy, X, (weights, keys))[0])

    keys = jax.random.split(jax.random.key(0), LAYERS)
    amp = jaxamp.amp(noisy_loss, compute_dtype=jnp.bfloat16)
    draws = [count("random_bits", jax.make_jaxpr(f)(WEIGHTS, keys)) for f in (amp, jax.grad(amp))]
    assert draws == [2, 2]


def checkpoints(jaxpr: Any) -> int:
    return sum(
        (eqn.primitive.name == "remat2") + sum(map(checkpoints, jec.jaxprs_in_params(eqn.params)))
        for eqn in getattr(jaxpr, "jaxpr", jaxpr).eqns
    )


def test_a_checkpoint_of_the_user_is_left_alone():
    everything = jax.checkpoint(layer, prevent_cse=False)
    inside = lambda x, p: jax.jit(lambda x, p: (jax.checkpoint(layer)(x, p)[0] + x, None))(x, p)
    for body in (everything, inside):
        amp = jaxamp.amp(lambda w, x, body=body: loss(w, x, body), compute_dtype=jnp.bfloat16)
        assert checkpoints(jax.make_jaxpr(amp)(WEIGHTS, X)) == 1


def test_a_scan_that_amp_does_not_change_has_no_checkpoint():
    def total(xs):
        return lax.scan(lambda c, x: (c + jnp.sin(x), None), jnp.zeros(()), xs)[0]

    assert checkpoints(jax.make_jaxpr(jaxamp.amp(total, compute_dtype=jnp.bfloat16))(jnp.ones(4))) == 0
    policy = jaxamp.default_amp_policy | {"amp_default": jaxamp.use_original_precision}
    assert checkpoints(jax.make_jaxpr(jaxamp.amp(loss, compute_dtype=jnp.bfloat16, amp_policy=policy))(WEIGHTS, X)) == 1


def test_a_body_with_effects_is_no_checkpoint_and_has_sections():
    def told(x, p):
        jax.debug.callback(lambda _: None, x.sum())
        return layer(x, p)

    amp = jaxamp.amp(lambda w, x: loss(w, x, told), compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(amp)(WEIGHTS, X)
    sections = [eqn.params["jaxpr"] for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"]
    inside = {eqn.primitive.name for section in sections for eqn in equations(section)}
    assert "tanh" in inside  # the gelu
    assert "debug_callback" not in inside
    jax.jit(jax.grad(amp))(WEIGHTS, X)


def test_gradients_through_the_checkpoint_are_near_float64():
    expected = in_float64(jax.grad(loss), WEIGHTS, X)
    found = jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))(WEIGHTS, X)
    for name, want in expected.items():
        assert found[name].dtype == jnp.float32
        assert np.linalg.norm(np.asarray(found[name], np.float64) - want) < 3e-2 * np.linalg.norm(want)
