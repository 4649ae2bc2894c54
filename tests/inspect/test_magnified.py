"""`compare` names the low matmul whose rounding a later operation magnifies, and is silent about healthy networks."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxamp
from jaxamp import compare

RNG = np.random.default_rng(0)
BF16, F16 = jnp.bfloat16, jnp.float16


def normal(*shape):
    return jnp.asarray(RNG.standard_normal(shape), jnp.float32)


def distances(x):
    squares = jnp.sum(x**2, -1)
    with jax.named_scope("gram"):
        products = x @ x.T
    return squares[:, None] + squares[None] - 2 * products


def coupling(x, eps):
    """A step of Sinkhorn's algorithm for a cost that a matmul makes."""
    cost = jnp.sum((x[:, None] - x[None]) ** 2, -1)
    with jax.named_scope("cost"):
        cost = cost @ cost / cost.size
    return jax.nn.logsumexp(-cost / eps, axis=1) * eps


OFF_CENTRE = normal(16, 8) + 30.0


def test_squared_distances_of_off_centre_data():
    found = compare(distances, compute_dtype=BF16)(OFF_CENTRE)
    (case,) = found.magnified
    assert (case.name, case.matmul, case.matmul_scope) == ("sub", "dot_general", "gram")
    assert case.source.function == case.matmul_source.function == "distances"
    assert case.error_before < 1e-2 < 0.5 < case.error
    assert case.largest < 1e-2 * case.largest_before
    text = str(found)
    assert "magnified: sub at test_magnified.py:" in text
    assert "give the policy the key 'gram' with jaxamp.use_original_precision" in text
    assert json.loads(json.dumps(found.to_dict()))["magnified"][0]["matmul_scope"] == "gram"


def test_what_it_says_to_pin_helps():
    policy = jaxamp.default_amp_policy | {"gram": jaxamp.use_original_precision}
    found = compare(distances, compute_dtype=BF16, amp_policy=policy)(OFF_CENTRE)
    assert found.magnified == ()
    assert found.results[0].error.relative < 1e-3


def test_a_matmul_without_a_scope():
    bare = lambda x: (n := jnp.sum(x**2, -1))[:, None] + n[None] - 2 * x @ x.T
    (case,) = compare(bare, compute_dtype=BF16, backward=False)(OFF_CENTRE).magnified
    assert "put `with jaxamp.amp_stop():` around it" in str(case)


def test_a_sum_that_cancels():
    def fn(w, x):
        h = x @ w
        return jnp.sum(h * jnp.asarray([1.0, -1.0] * 8), -1)

    x = normal(4, 8) + 30.0
    w = jnp.repeat(normal(8, 8), 2, axis=1) + 1e-3 * normal(8, 16)
    assert [case.name for case in compare(fn, compute_dtype=BF16)(w, x).magnified] == ["reduce_sum"]


def test_an_exponential_of_a_cost_over_a_small_number():
    x = normal(12, 3)
    cases = compare(coupling, compute_dtype=BF16)(x, 3e-3).magnified
    assert cases
    assert {case.matmul_scope for case in cases} == {"cost"}
    assert {case.name for case in cases} <= {"exp", "log"}
    assert compare(coupling, compute_dtype=BF16)(x, 1.0).magnified == ()


def test_through_a_loop_and_a_jit():
    looped = lambda x: lax.fori_loop(0, 2, lambda _, y: jax.jit(distances)(x) + 0 * y, distances(x))
    names = [case.name for case in compare(looped, compute_dtype=BF16, backward=False)(OFF_CENTRE).magnified]
    assert set(names) == {"sub"}


def normed(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def transformer(params, ids):
    x = params["embedding"][ids]
    for layer in params["layers"]:
        q, k, v = jnp.split(normed(x) @ layer["qkv"], 3, -1)
        x = x + jax.nn.softmax(q @ jnp.swapaxes(k, -1, -2) / 4.0) @ v @ layer["out"]
        x = x + jax.nn.gelu(normed(x) @ layer["up"]) @ layer["down"]
    return -jnp.mean(jax.nn.log_softmax(normed(x) @ params["embedding"].T)[..., 0])


def batch_norm(w, x):
    h = x @ w
    return jnp.sum(jax.nn.relu((h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)) @ w)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [BF16, F16])
def test_healthy_networks_raise_no_alarm(dtype):
    layer = lambda: {
        "qkv": normal(16, 48) / 4,
        "out": normal(16, 16) / 4,
        "up": normal(16, 64) / 4,
        "down": normal(64, 16) / 8,
    }
    params = {"embedding": normal(32, 16), "layers": [layer(), layer()]}
    ids = jnp.asarray(RNG.integers(0, 32, (2, 8)))
    assert compare(transformer, compute_dtype=dtype)(params, ids).magnified == ()
    assert compare(batch_norm, compute_dtype=dtype)(normal(8, 8), normal(32, 8) + 1).magnified == ()
    error = lambda w, x: jnp.mean((jnp.tanh(x @ w) @ w - x) ** 2)
    assert compare(error, compute_dtype=dtype)(normal(8, 8), normal(32, 8)).magnified == ()
