"""The values of variables while a plan runs."""

import jax
import jax.numpy as jnp
import numpy as np
from helpers import W

from jaxamp._formats import Format, Formats
from jaxamp._plan.sensitivity import FREE, OUT_OF_RANGE, Value
from jaxamp._transform.environment import Env

FORMATS = Formats(np.dtype(jnp.float16))
LOW, WIDE = FORMATS.low, Format(np.dtype(np.float32))
JAXPR = jax.make_jaxpr(lambda x, y: (x + y, jnp.full(3, 1e9), 2.0))(W, W).jaxpr
X, Y = JAXPR.invars


def test_a_value_is_cast_once_per_format():
    env = Env()
    env.write(X, W, Value(FREE, WIDE))
    assert env.read(X) is W
    assert env.read(X, WIDE) is W
    assert env.read(X, LOW).dtype == jnp.float16
    assert env.read(X, LOW) is env.read(X, LOW)
    assert env.format_of(X) == WIDE


def test_numbers_out_of_range_are_clamped():
    env = Env()
    env.write(X, 1e9 * W, Value(OUT_OF_RANGE, WIDE))
    env.write(Y, 1e9 * W, Value(FREE, WIDE))
    assert float(jnp.max(env.read(X, LOW))) == 65504
    assert np.isinf(jnp.max(env.read(Y, LOW)))


def test_a_constant_is_made_when_it_is_read_in_the_format_of_its_reader():
    env, (constant,) = Env(), [eqn for eqn in JAXPR.eqns if eqn.primitive.name == "broadcast_in_dim"]
    env.postpone(constant)
    var = constant.outvars[0]
    assert env.format_of(var) is None
    assert env.read(var).dtype == jnp.float32
    assert env.read(var, LOW).tolist() == [65504] * 3
    assert env.read(var, LOW) is env.read(var, LOW)


def test_literals_are_cast_without_an_equation():
    literal = next(v for v in JAXPR.outvars if hasattr(v, "val"))
    assert Env().read(literal) == 2
    assert Env().read(literal, LOW).dtype == jnp.float16


def test_an_environment_of_other_values_has_the_same_constants():
    env, (constant,) = Env(), [eqn for eqn in JAXPR.eqns if eqn.primitive.name == "broadcast_in_dim"]
    env.postpone(constant)
    env.write(X, W, Value(FREE, WIDE))
    env.write(Y, W, Value(FREE, WIDE))
    inside = env.with_values([X], [2 * W])
    np.testing.assert_array_equal(inside.read(X), 2 * W)
    assert inside.read(constant.outvars[0]).shape == (3,)
    assert inside.format_of(Y) is None
