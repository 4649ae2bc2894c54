"""Where the bodies of higher-order equations are."""

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from jaxamp._compat import open_jaxpr
from jaxamp._plan.bodies import with_bodies
from jaxamp._plan.higher_order import describe


def own(fn):
    """A function with a derivative rule of its own."""
    made = jax.custom_jvp(fn)
    made.defjvp(lambda primals, tangents: (made(*primals), tangents[0]))
    return made


def sharded(x):
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,))
    return jax.shard_map(jnp.sin, mesh=mesh, in_specs=P("data"), out_specs=P("data"))(x)


PROGRAMS = {
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "checkpoint": jax.checkpoint(jnp.sin),
    "custom_jvp": own(jnp.sin),
    "scan": lambda x: lax.scan(lambda c, y: (c + y * x[0], c), x[0], x),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < x[0, 0], lambda c: c + x, x),
    "cond": lambda x: lax.cond(x[0, 0] > 0, jnp.sin, jnp.cos, x),
    "shard_map": sharded,
}


def equation(name):
    """The last higher-order equation of a program."""
    return [eqn for eqn in open_jaxpr(jax.make_jaxpr(PROGRAMS[name])(W)).eqns if describe(eqn) is not None][-1]


@pytest.mark.parametrize("name", PROGRAMS)
def test_operands_and_results_are_those_of_the_bodies(name):
    eqn = equation(name)
    entry = describe(eqn)
    carried, mapped = {operand for operand, _ in entry.carries}, name in ("scan", "shard_map")
    for body in entry.bodies:
        jaxpr = open_jaxpr(body.jaxpr)
        assert len(body.operands) == len(jaxpr.invars)
        assert len(body.results) in (0, len(jaxpr.outvars))
        for operand, var in zip(body.operands, jaxpr.invars, strict=True):
            if not mapped or operand in carried:
                assert eqn.invars[operand].aval.shape == var.aval.shape
        for result, var in zip(body.results, jaxpr.outvars, strict=bool(body.results)):
            if not mapped:
                assert eqn.outvars[result].aval.shape == var.aval.shape
    for operand, result in entry.carries:
        assert eqn.invars[operand].aval.shape == eqn.outvars[result].aval.shape


@pytest.mark.parametrize(("name", "times"), [("scan", 4), ("shard_map", 4), ("jit", 1), ("while", 1)])
def test_how_often_bodies_run(name, times):
    assert describe(equation(name)).times == times


@pytest.mark.parametrize("name", ["jit", "checkpoint", "scan", "while", "cond"])
def test_bodies_can_be_exchanged(name):
    eqn = equation(name)
    entry = describe(eqn)
    same = with_bodies(eqn, entry, [body.jaxpr for body in entry.bodies])
    assert same.keys() == eqn.params.keys()
    found = list(jec.jaxprs_in_params(same))
    assert all(a is b for a, b in zip(found, jec.jaxprs_in_params(eqn.params), strict=True))


def test_what_has_no_bodies():
    eqns = open_jaxpr(jax.make_jaxpr(lambda x: np.float32(2) * jnp.sin(x))(W)).eqns
    assert [describe(eqn) for eqn in eqns] == [None, None]
