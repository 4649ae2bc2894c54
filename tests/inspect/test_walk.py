"""Running a jaxpr with each operation seen: the same results, each round, and few values held at a time."""

import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import W, normal
from jax import lax

from jaxamp._inspect import flat, pieces
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


def test_few_values_are_held_at_a_time():
    alive, most = [], []

    def watch(eqn, place, ins, outs):
        alive.extend(weakref.ref(out) for out in outs)
        most.append(sum(ref() is not None for ref in alive))

    def fn(x):
        for _ in range(200):
            x = jnp.sin(x)
        return x

    jaxpr = jax.make_jaxpr(fn)(W)
    Walker(Ledger(), watch).run(jaxpr, [W], Place("forward"))
    assert max(most) <= flat._LONGEST + 1  # the results of a piece, and its operand


def test_large_results_are_not_held_together():
    jaxpr = jax.make_jaxpr(lambda x: jnp.sin(jnp.sin(jnp.sin(x))))(jax.ShapeDtypeStruct((3 * 2**22,), jnp.float32))
    found = flat.flatten(jaxpr, Place("forward"), Ledger(), flat.Repeats(), lambda eqn: True, lambda eqn: True)
    assert [len(piece.operations) for piece in found.pieces] == [1, 1, 1]


def test_layers_that_are_alike_are_compiled_once(monkeypatch):
    compiled = []
    fast = pieces.compiled_fast
    monkeypatch.setattr(pieces, "compiled_fast", lambda fun: compiled.append(fun) or fast(fun))

    def fn(x):
        for _ in range(12):
            x = jax.jit(lambda x: jnp.tanh(x @ W))(x)
            for f in (jnp.sin, jnp.cos, jnp.tanh, jnp.exp, jnp.tan, jnp.sqrt, jnp.abs, jnp.log1p):
                x = f(jnp.abs(x)) / 3.0
        return x

    found, seen = walk(fn, X)
    assert [name for name, _, _ in seen].count("tan") == 12
    assert len(compiled) <= 4
    np.testing.assert_allclose(found[0], fn(X), rtol=1e-4)


@pytest.mark.parametrize(("device", "are_prepared"), [(0, True), (1, False)])
def test_pieces_are_compiled_before_the_first_one_runs(monkeypatch, device, are_prepared):
    prepared, later = [], pieces._Later
    monkeypatch.setattr(pieces, "_Later", lambda future: prepared.append(future) or later(future))

    def fn(x):
        for i in range(100):
            x = jnp.sin(x) * (1 + i / 100)
        return x

    x = jax.device_put(X, jax.devices()[device])
    found, seen = walk(fn, x)
    assert len(seen) == 200
    assert bool(prepared) == are_prepared
    assert found[0].devices() == {jax.devices()[device]}
    np.testing.assert_allclose(found[0], fn(X), rtol=1e-5)


def test_a_value_that_is_not_wanted_is_made_again_when_it_is_asked_for():
    asked = []

    def watch(eqn, place, ins, outs):
        if eqn.primitive is lax.sin_p:
            asked.extend([np.asarray(ins[0]), np.asarray(outs[0])])

    jaxpr = jax.make_jaxpr(lambda x: jnp.exp(jnp.sin(x.T)))(X)
    Walker(Ledger(), watch, wants=lambda eqn: eqn.primitive is lax.exp_p).run(jaxpr, [X], Place("forward"))
    np.testing.assert_array_equal(asked[0], X.T)
    np.testing.assert_allclose(asked[1], np.sin(X.T), rtol=1e-6)


def test_marks_go_through_loops_and_calls():
    touched = []

    def watch(eqn, place, ins, outs):
        touched.extend([eqn.primitive.name] if place.touched else [])
        return eqn.primitive is lax.tan_p or (bool(place.touched) and eqn.primitive is not lax.sign_p)

    def fn(x, y):
        c, ys = lax.scan(lambda c, x: (jnp.sin(c), jnp.tan(x)), y, x)
        exact = jnp.sign(jax.jit(jnp.cos)(jnp.sum(ys)))
        return lax.scan(lambda c, x: (jnp.exp(x), None), c, ys)[0], jnp.sqrt(exact), jnp.log(y)

    Walker(Ledger(), watch).run(jax.make_jaxpr(fn)(X, X[0]), [X, X[0]], Place("forward"))
    assert {"reduce_sum", "cos", "sign", "exp"} <= set(touched)
    assert not {"sqrt", "log", "tan", "sin"} & set(touched)
