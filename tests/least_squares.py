"""A problem whose gradient is known, and the ways to run it: eagerly, under `jit`, and sharded over eight devices."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import normal
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp


def eagerly(fn):
    return fn


def jitted(fn):
    return eqx.filter_jit(fn)


def sharded(axis_type):
    """Parameters on each of eight devices, the batch divided between them."""

    def run(fn):
        mesh = jax.make_mesh((8,), ("data",), axis_types=(axis_type,))

        def placed(w, batch, **kwargs):
            w = jax.device_put(w, NamedSharding(mesh, P()))
            batch = jax.device_put(batch, NamedSharding(mesh, P("data")))
            return eqx.filter_jit(fn)(w, batch, **kwargs)

        return placed

    return run


WAYS = pytest.mark.parametrize(
    "way",
    [eagerly, jitted, sharded(AxisType.Auto), sharded(AxisType.Explicit)],
    ids=["eager", "jit", "sharded", "explicitly sharded"],
)


def batch_of(size=16, features=4, magnitude=0.25):
    """Small enough that gradients times 2**15 are float16 numbers."""
    random = np.random.default_rng(0)
    x = magnitude * random.standard_normal((size, features)).astype(np.float32)
    return jax.device_put(x), jax.device_put(magnitude * random.standard_normal(size).astype(np.float32))


W = normal(1, 4)


def error(w, batch):
    x, y = batch
    return jnp.mean((x @ w[:, None] - y[:, None]) ** 2)


def oracle(w, batch):
    x, y, w = (np.asarray(a, np.float64) for a in (*batch, w))
    return 2 / len(x) * x.T @ (x @ w - y)


LOSS = jaxamp.amp(error)


def nan_gradients(w, batch):
    """A finite loss with gradients that are NaN at every scale."""
    return LOSS(w, batch) + jnp.sum(jnp.sqrt(0.0 * w))
