"""Pools, and a gradient of theirs that is made place by place."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_same_bits, count, equations, slow
from jax import lax

from jaxamp._primitives.pool import PUT_BACK, pool, pooled_by_places, put_back_by_places, windows_of

CASES = {  # shape, window, strides, padding
    "3 x 3, overlapping": ((2, 11, 12, 3), (1, 3, 3, 1), (1, 2, 2, 1), "SAME"),
    "2 x 2": ((2, 8, 8, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "2 x 2 of odd sizes": ((2, 9, 7, 3), (1, 2, 2, 1), (1, 2, 2, 1), "VALID"),
    "2 x 2 x 2, padded": ((2, 5, 4, 6, 2), (1, 2, 2, 2, 1), (1, 2, 2, 2, 1), "SAME"),
    "each pixel": ((2, 9, 9, 3), (1, 5, 5, 1), (1, 1, 1, 1), "SAME"),
    "channels first, with gaps": ((2, 3, 9, 10), (1, 1, 3, 2), (1, 1, 3, 4), "VALID"),
    "padded by hand": ((5, 17), (1, 4), (1, 3), ((0, 0), (2, 1))),
    "more padding than a window": ((1, 6), (1, 2), (1, 2), ((0, 0), (3, 4))),
}
BY = {lax.max: -jnp.inf, lax.min: jnp.inf}


def integers(seed, shape, dtype=jnp.float32):
    """Small ones, so that many are equal, and sums are exact."""
    return jnp.asarray(np.random.default_rng(seed).integers(-4, 5, shape), dtype)


@pytest.fixture(params=CASES.values(), ids=CASES)
def case(request):
    shape, size, strides, padding = request.param
    return integers(0, shape), lambda x, by: lax.reduce_window(x, BY[by], by, size, strides, padding)


def ours(fun, x):
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    return functools.partial(pool, windows=windows_of(eqn))


@pytest.mark.parametrize("by", [lax.max, slow(lax.min)], ids=["max", "min"])
def test_derivatives_are_those_of_jax(case, by):
    x, of_jax = case
    fun = functools.partial(of_jax, by=by)
    mine = ours(fun, x)
    t, ct = integers(1, x.shape), integers(2, fun(x).shape)

    def all_of_them(fun):
        grad = jax.grad(lambda x: jnp.sum(fun(x) ** 2 * ct))
        mapped = jax.vmap(jax.grad(lambda x, ct: jnp.sum(fun(x) * ct)), (0, None))
        return (
            fun(x),
            *jax.jvp(fun, (x,), (t,)),
            jax.vjp(fun, x)[1](ct),
            jax.jvp(grad, (x,), (t,)),
            jax.grad(lambda x: jnp.sum(grad(x) * t))(x),
            mapped(jnp.stack([x, -x]), ct),
        )

    jax.tree.map(np.testing.assert_array_equal, all_of_them(mine), all_of_them(fun))


@pytest.mark.parametrize("by", BY, ids=["max", "min"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_place_by_place_gives_the_same(case, by, dtype):
    x, of_jax = case
    x, fun = x.astype(dtype), functools.partial(of_jax, by=by)
    ct = integers(2, fun(x).shape, dtype)
    (eqn,) = jax.make_jaxpr(fun)(x).eqns
    got = jax.jit(functools.partial(put_back_by_places, windows=windows_of(eqn)))(ct, x)
    assert got.dtype == dtype
    assert_same_bits(jax.jit(functools.partial(pooled_by_places, windows=windows_of(eqn)))(x), fun(x))
    assert_same_bits(got, jax.vjp(fun, x)[1](ct)[0])


def network(w, x):
    x = lax.reduce_window(jax.nn.relu(x @ w), -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    return jnp.sum(jnp.tanh(x @ w))


W, X = integers(0, (4, 4)) / 4, integers(1, (2, 8, 8, 4))


def test_amp_uses_it():
    jaxpr = jax.make_jaxpr(jax.grad(AMP(network)))(W, X)
    assert count(PUT_BACK.name, jaxpr) == 1
    assert count("select_and_scatter_add", jaxpr) == 0
    without = jax.make_jaxpr(jax.grad(AMP(network, disable_passes=["pool_by_places"])))(W, X)
    assert count("select_and_scatter_add", without) == 1


def lowered(platform):
    return jax.jit(jax.grad(AMP(network))).trace(W, X).lower(lowering_platforms=(platform,)).as_text()


def test_the_platform_says_what_it_is_made_of():
    assert "select_and_scatter" in lowered("cpu")
    assert "select_and_scatter" in lowered("tpu")
    assert "select_and_scatter" not in lowered("cuda")


def test_large_and_dilated_windows_are_left_alone():
    def fun(x, **options):
        return jnp.sum(jnp.sin(lax.reduce_window(x @ W, -jnp.inf, lax.max, padding="VALID", **options) @ W))

    large = {"window_dimensions": (1, 9, 9, 1), "window_strides": (1, 1, 1, 1)}
    dilated = {"window_dimensions": (1, 2, 2, 1), "window_strides": (1, 1, 1, 1), "window_dilation": (1, 2, 2, 1)}
    for options, x in ((large, jnp.ones((1, 12, 12, 4))), (dilated, X)):
        jaxpr = jax.make_jaxpr(AMP(functools.partial(fun, **options)))(x)
        assert "reduce_window_max" in {eqn.primitive.name for eqn in equations(jaxpr)}
