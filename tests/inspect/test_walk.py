"""Running a jaxpr equation by equation: the same results, each round seen, and no value held after its last use."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W, normal
from jax import lax

from jaxamp._inspect.location import Place
from jaxamp._inspect.walk import Walker
from jaxamp._transform.ledger import Ledger

X = normal(0, 3, 4)


def walk(fn, *args):
    """The results of a function, and what was seen: primitives with their rounds and turns."""
    seen = []
    watch = lambda eqn, place, ins, outs: seen.append((eqn.primitive.name, place.rounds, place.turns))
    return Walker(Ledger(), watch).run(jax.make_jaxpr(fn)(*args), args, Place("forward")), seen


@jax.custom_jvp
def own_jvp(x):
    return jnp.sin(x)


own_jvp.defjvp(lambda p, t: (own_jvp(*p), t[0]))


@jax.custom_vjp
def own_vjp(x):
    return jnp.sin(x)


own_vjp.defvjp(lambda x: (own_vjp(x), x), lambda x, ct: (ct,))

PROGRAMS = {
    "jit": lambda x: jax.jit(jnp.sin)(x),
    "checkpoint": lambda x: jax.checkpoint(jnp.sin)(x),
    "custom_jvp": own_jvp,
    "custom_vjp": own_vjp,
    "cond": lambda x: lax.cond(x[0, 0] > 9, jnp.cos, jnp.sin, x),
    "switch out of range": lambda x: lax.switch(jnp.int32(7), [jnp.cos, jnp.tan, jnp.sin], x),
    "scan": lambda x: lax.scan(lambda c, y: (c + y, jnp.sin(c)), x[0], x),
    "reversed scan": lambda x: lax.scan(lambda c, y: (c + y, jnp.sin(c)), x[0], x, reverse=True),
    "scan of length 0": lambda x: lax.scan(lambda c, y: (c + y, jnp.sin(c)), x[0], x[:0]),
    "while": lambda x: lax.while_loop(lambda c: c.sum() < 20, lambda c: jnp.abs(jnp.sin(c)) + c * 2, jnp.abs(x)),
    "mapped while": jax.vmap(
        lambda x: lax.while_loop(lambda c: c.sum() < 20, lambda c: jnp.abs(jnp.sin(c)) + c * 2, jnp.abs(x))
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_results(name):
    found, seen = walk(PROGRAMS[name], X)
    for x, y in zip(found, jax.tree.leaves(PROGRAMS[name](X)), strict=True):
        np.testing.assert_allclose(x, y, rtol=1e-6)
    assert "sin" in [primitive for primitive, _, _ in seen] or name == "scan of length 0"


def test_rounds_and_turns():
    def fn(x):
        x, _ = lax.scan(lambda c, _: (lax.cond(c[0] > 0, jnp.sin, jnp.cos, c), None), x, length=2)
        return lax.scan(lambda c, _: (jnp.tan(c), None), x, length=1)[0]

    _, seen = walk(fn, jnp.ones(2))
    assert [entry for entry in seen if entry[0] in ("sin", "tan")] == [
        ("sin", (0,), ((0, 0), (0, 1))),
        ("sin", (1,), ((0, 1), (0, 1))),
        ("tan", (0,), ((1, 0),)),
    ]


def test_a_value_is_dropped_after_its_last_use():
    alive, most = [], []

    def watch(eqn, place, ins, outs):
        alive.extend(weakref.ref(out) for out in outs)
        most.append(sum(ref() is not None for ref in alive))

    def fn(x):
        for _ in range(40):
            x = jnp.sin(x)
        return x

    jaxpr = jax.make_jaxpr(fn)(W)
    Walker(Ledger(), watch).run(jaxpr, [W], Place("forward"))
    assert max(most) <= 2  # an operand and a result
