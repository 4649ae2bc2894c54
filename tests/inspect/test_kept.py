"""`bytes_kept`: how much a function keeps for its backward pass, without computing anything."""

import jax
import jax.export
import jax.numpy as jnp
import pytest
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
