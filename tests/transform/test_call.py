"""Calls as flat functions of arrays."""

import functools

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W

from jaxamp._transform.call import floats_of_first, split_call


def fn(params, x, *, scale=1.0, name=None):
    return {"y": params["w"] * x * scale, "name": name, "n": 3}


def test_arrays_are_taken_out_and_put_back():
    call, arrays, _ = split_call(fn, ({"w": W}, 2.0), {"scale": np.float32(3), "name": "a"})
    assert [x.shape for x in arrays] == [(4, 4), ()]
    outs, result = call(*arrays)
    assert len(outs) == 1
    assert result.with_arrays(["the array"]) == {"y": "the array", "name": "a", "n": 3}


def test_calls_that_differ_in_more_than_arrays_are_not_equal():
    def call(*args, **kwargs):
        return split_call(fn, args, kwargs)[0]

    assert call({"w": W}, 1) == call({"w": 2 * W}, 1)
    different = [call({"w": W}, x) for x in (1, 1.0, True, 0.0, -0.0, W)]
    assert len(set(different)) == len(different)
    with jax.named_scope("scope"):
        assert call({"w": W}, 1) != different[0]


class Mutable:
    def __call__(self, x):
        return x


@pytest.mark.parametrize(
    ("function", "cacheable"),
    [
        (fn, True),
        (functools.partial(fn, name="a"), True),
        (jnp.sin, True),
        (Mutable(), False),
        (Mutable().__call__, False),
        (functools.partial(fn, name=[Mutable()]), False),
    ],
    ids=["a function", "a partial", "of jnp", "an object", "its method", "a partial of an object"],
)
def test_what_may_be_cached(function, cacheable):
    assert split_call(function, (W,), {})[0].is_cacheable == cacheable


def test_where_the_floats_of_the_first_argument_are():
    module = eqx.nn.Linear(4, 4, key=jax.random.key(0))
    params = {"n": jnp.arange(3), "w": W, "name": "a"}
    assert floats_of_first(fn, (params, W), {}) == {1: "['w']"}
    assert floats_of_first(module, (params, W), {}) == {3: "['w']"}
    assert floats_of_first(fn, (W,), {}) == {0: "the argument"}
    assert floats_of_first(fn, (), {}) == {}
