"""Stochastic rounding: the mean is kept, values of the format stay, and numbers repeat everywhere."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_same_bits, normal, raises
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P
from rounding_points import F32, assert_same, points

import jaxamp
from jaxamp._number_formats.quantize import quantize

KEYS = {"key": lambda: jax.random.key(3), "raw key": lambda: jax.random.PRNGKey(3), "count": lambda: 3}
EACH_KEY = pytest.mark.parametrize("key", list(KEYS))
E4M3 = jaxamp.format("e4m3", rounding="stochastic")


@EACH_KEY
@pytest.mark.parametrize("x", [1.01, -3.3, 0.0003, 2.0**-20, 17.9, -1e-3, 447.9])
def test_the_mean_is_kept(x, key):
    count = 2**16
    found = np.asarray(quantize(jnp.full(count, x, F32), E4M3, key=KEYS[key]()), np.float64)
    low, high = found.min(), found.max()
    values = E4M3.values()
    assert low in values
    assert high in values
    assert not ((values > low) & (values < high)).any()  # the two neighbours
    spread = np.sqrt(max((high - x) * (x - low), 0) / count) + 1e-12
    assert abs(found.mean() - F32(x)) < 5 * spread + 1e-6 * abs(x) or x == 2.0**-20
    if x == 2.0**-20:  # 32 of 65536 are expected
        assert 8 <= (found > 0).sum() <= 80


@EACH_KEY
def test_the_mean_over_steps_is_kept(key):
    """Of single entries, each of which has its own numbers."""
    fold = {"key": jax.random.key, "raw key": jax.random.PRNGKey, "count": lambda step: step}[key]
    x = normal(0, 50)
    steps = jax.vmap(lambda step: quantize(x, E4M3, key=fold(step)))(jnp.arange(2000))
    found = np.asarray(steps, np.float64).mean(axis=0)
    step = np.exp2(np.floor(np.log2(np.abs(x))) - 3)
    assert (np.abs(found - x) < 5 * step / np.sqrt(2000) / 2 + 1e-6).all()


@pytest.mark.parametrize("name", ["e4m3", "e5m2fnuz", "e2m1", "int8"])
def test_values_of_the_format_stay(name):
    format = jaxamp.format(name, rounding="stochastic", scale="none")
    values = format.values()
    assert_same(quantize(values, format, key=7), values, values)


def test_results_are_neighbours_of_any_number():
    x = points(jaxamp.format("e4m3"))
    x = x[np.abs(x) <= 448]
    found, values = np.asarray(quantize(x, E4M3, key=11)), E4M3.values()
    below = values[np.searchsorted(values, x, side="right") - 1]
    above = values[np.searchsorted(values, x)]
    assert ((found == below) | (found == above)).all()


def test_overflow():
    x = F32([448, 1e9, -1e9, np.inf, np.nan])
    assert_same(quantize(x, E4M3, key=1), F32([448, 448, -448, 448, np.nan]), x)
    plain = jaxamp.format(E4M3, saturate=False)
    assert_same(quantize(x, plain, key=1), F32([448, np.nan, np.nan, np.nan, np.nan]), x)
    beyond = np.isnan(quantize(jnp.full(4096, 456.0), plain, key=1))  # a quarter of the way to the next
    assert 900 < beyond.sum() < 1150


@pytest.mark.parametrize("key", ["key", "count"])
def test_the_same_under_every_sharding(key):
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    format = jaxamp.format("mxfp8", rounding="stochastic", block=4)
    x = normal(0, 16, 24)
    fn = jax.jit(lambda x, key: quantize(x, format, key=key))
    expected = fn(x, KEYS[key]())
    assert_same_bits(quantize(x, format, key=KEYS[key]()), expected)
    for spec in (P("x", "y"), P(("x", "y"), None), P(None, "x")):
        placed = jax.device_put(x, NamedSharding(mesh, spec))
        assert_same_bits(jax.device_get(fn(placed, KEYS[key]())), jax.device_get(expected))


def test_other_counts_and_positions_give_other_numbers():
    x = jnp.full((8, 64), 1.06)
    one, two = (np.asarray(quantize(x, E4M3, key=count)) for count in (1, jnp.int32(2)))
    assert 0.3 < np.mean(one != two) < 0.7
    assert all(0.2 < np.mean(one[i] != one[i + 1]) < 0.8 for i in range(7))
    assert_same_bits(quantize(x, E4M3, key=2**40 + 1), jnp.asarray(one))
    assert_same_bits(quantize(x, E4M3, key=-1), quantize(x, E4M3, key=jnp.int32(-1)))


def test_numbers_are_asked_for():
    for key, words in ((None, "key= is None"), (1.5, "key= is 1.5"), (jnp.ones(3), r"an array of float32\[3\]")):
        with raises(TypeError, "needs random numbers", words, "Write key=jax.random.key"):
            quantize(jnp.ones(3), E4M3, key=key)
