"""Loops hand on low what is only read low."""

import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_near, assert_same_bits, equations, in_float64, normal
from jax.experimental.xla_metadata import set_xla_metadata
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxamp

WITHOUT = functools.partial(AMP, disable_passes=["carry_low"])
STEPS, BATCH, WIDTH = 12, 4, 8
W, U, B = normal(0, 2 * WIDTH, 4 * WIDTH, scale=0.3), normal(1, WIDTH, WIDTH), normal(2, 4 * WIDTH)
XS = normal(3, STEPS, BATCH, WIDTH)


def zeros(xs):
    return (jnp.zeros((BATCH, WIDTH), xs.dtype),) * 2


def cell(w, b, carry, x):
    h, c = carry
    i, f, g, o = jnp.split(jnp.concatenate([x, h], -1) @ w + b, 4, -1)
    c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
    return (jax.nn.sigmoid(o) * jnp.tanh(c), c), None


def with_states(w, b, carry, x):
    carry, _ = cell(w, b, carry, x)
    return carry, carry[0]


def lstm(w, u, b, xs):
    (h, _), _ = jax.lax.scan(functools.partial(cell, w, b), zeros(xs), xs)
    return jnp.mean((h @ u) ** 2)


def states(w, u, b, xs):
    _, hs = jax.lax.scan(functools.partial(with_states, w, b), zeros(xs), xs)
    return jnp.mean((hs @ u) ** 2)


def masked(w, u, b, xs):
    """Sequences that end earlier hand on their last state."""

    def step(carry, x):
        (h, c), _ = cell(w, b, carry, x)
        ended = x[:, :1] > 1
        return (jnp.where(ended, carry[0], h), jnp.where(ended, carry[1], c)), None

    return jnp.mean((jax.lax.scan(step, zeros(xs), xs)[0][0] @ u) ** 2)


def checkpointed(w, u, b, xs):
    (h, _), _ = jax.lax.scan(jax.checkpoint(functools.partial(cell, w, b)), zeros(xs), xs)
    return jnp.mean((h @ u) ** 2)


def nested(w, u, b, xs):
    def outer(carry, xs):
        return jax.lax.scan(functools.partial(cell, w, b), carry, xs)[0], None

    (h, _), _ = jax.lax.scan(outer, zeros(xs), xs.reshape(3, STEPS // 3, BATCH, WIDTH))
    return jnp.mean((h @ u) ** 2)


def handed_on(rounds, u, x):
    """A weight and an array go through a checkpointed loop as carries."""

    @jax.checkpoint
    def step(carry, x):
        u, v, total = carry
        return (v, u, total + jnp.mean(x @ u)), None

    carry = u, 2 * u, jnp.zeros((), u.dtype)
    return jax.lax.scan(step, carry, jnp.broadcast_to(x, (rounds, *x.shape)))[0][2] / rounds


def held(rounds, u, x):
    """A state that no round changes, of which all rounds are read."""
    step = lambda h, x: (jnp.where(x[0, 0] > 9, jnp.tanh(x @ u), h), h)
    hs = jax.lax.scan(step, x @ u, jnp.broadcast_to(x, (rounds, *x.shape)))[1]
    return jnp.mean(hs @ u)


def read_by_each(rounds, u, x):
    """A state of the outer loop that all rounds of the inner loop read."""
    inner = lambda h: jax.lax.scan(lambda t, x: (t + jnp.mean(h * x[0] @ u), None), jnp.zeros((), x.dtype), many)[0]
    many = jnp.broadcast_to(x, (rounds, *x.shape))
    outer = lambda h, _: (jnp.tanh(h @ u) * inner(h) / rounds, None)
    return jnp.mean(jax.lax.scan(outer, x, length=2)[0] @ u)


@pytest.mark.parametrize("fn", [handed_on, held, read_by_each])
def test_cotangents_over_many_rounds_are_not_lost(fn):
    """Summed in bfloat16, they would be off by half."""
    u, x = U * 0.3, 1 + 0.1 * XS[0]
    found = jax.jit(jax.grad(AMP(functools.partial(fn, 2000))))(u, x)
    expected = in_float64(jax.grad(functools.partial(fn, 2000)), u, x)
    assert np.linalg.norm(found - expected) < 5e-2 * np.linalg.norm(expected)


def mapped(w, u, b, xs):
    return jnp.mean(jax.vmap(lambda xs: states(w, u, b, xs))(jnp.stack([xs, xs + 1])))


FUNCTIONS = [lstm, states, checkpointed, mapped]


def results(fn, amp=AMP):
    """The dtypes of the results of all loops, the outer ones first."""
    found = [eqn for eqn in equations(jax.make_jaxpr(amp(fn))(W, U, B, XS)) if eqn.primitive.name == "scan"]
    return [[v.aval.dtype.name for v in eqn.outvars] for eqn in found]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_states_are_low_and_cells_are_not(fn):
    for loop in results(fn):
        assert loop[:2] == ["bfloat16", "float32"]
        assert set(loop[2:]) <= {"bfloat16"}
    assert "float32" in results(fn, WITHOUT)[0][:1]


@pytest.mark.parametrize("fn", FUNCTIONS)
def test_values_are_the_same(fn):
    one_by_one = lambda amp: jec.jaxpr_as_fun(jax.make_jaxpr(amp(fn, keep="all"))(W, U, B, XS))(W, U, B, XS)
    assert_same_bits(one_by_one(AMP), one_by_one(WITHOUT))


@pytest.mark.parametrize("fn", [*FUNCTIONS, masked, nested])
def test_gradients_are_near_to_float64(fn):
    expected = in_float64(jax.grad(fn, (0, 1, 2)), W, U, B, XS)
    for found, wanted in zip(jax.jit(jax.grad(AMP(fn), (0, 1, 2)))(W, U, B, XS), expected, strict=True):
        assert np.linalg.norm(found - wanted) < 2e-2 * np.linalg.norm(wanted)


@pytest.mark.parametrize("fn", [lstm, states, checkpointed])
def test_less_is_kept(fn):
    """Of each round: the float32 cell, and the state, low."""

    def kept(amp):
        _, pullback = jax.vjp(lambda w: amp(fn)(w, U, B, XS), W)
        return sum(x.nbytes for x in jax.tree.leaves(pullback) if x.shape[:1] == (STEPS,) and x.shape != XS.shape)

    wide = [x for x in jax.tree.leaves(jax.vjp(lambda w: AMP(fn)(w, U, B, XS), W)[1]) if x.dtype == jnp.float32]
    assert sum(x.shape == (STEPS, BATCH, WIDTH) for x in wide) <= 2  # the cells, and what was given
    assert kept(AMP) <= kept(WITHOUT)


def test_forward_derivatives():
    tangents = tuple(jnp.ones_like(x) for x in (W, U, B, XS))
    _, found = jax.jvp(AMP(states), (W, U, B, XS), tangents)
    expected = in_float64(lambda *args: jax.jvp(states, args[:4], args[4:])[1], W, U, B, XS, *tangents)
    assert abs(found - expected) < 3e-2 * abs(expected)


def sums(w, u, b, xs):
    """A state that each round adds to."""
    return jnp.mean(jax.lax.scan(lambda h, x: (h + jnp.tanh(h @ u) * x, None), zeros(xs)[0], xs)[0] @ u)


def returned(w, u, b, xs):
    return jax.lax.scan(functools.partial(cell, w, b), zeros(xs), xs)[0][0]


def read_wide(w, u, b, xs):
    h, hs = jax.lax.scan(lambda h, x: (jnp.tanh(h @ u) * x, jnp.exp(x)), zeros(xs)[0], xs)
    return jnp.sum(jnp.exp(h)) + jnp.sum(hs)


@pytest.mark.parametrize("fn", [sums, returned, read_wide, masked])
def test_what_is_left_alone(fn):
    jaxpr = lambda amp: str(jax.make_jaxpr(amp(fn))(W, U, B, XS))
    assert jaxpr(AMP) == jaxpr(WITHOUT)


@pytest.mark.parametrize("explicit", [False, True])
def test_on_a_mesh(explicit):
    axis = jax.sharding.AxisType.Explicit if explicit else jax.sharding.AxisType.Auto
    mesh = Mesh(np.asarray(jax.devices()[:2]), ("d",), axis_types=(axis,))

    def simple(w, u, b, xs):
        return jnp.mean(jax.lax.scan(lambda h, x: (jnp.tanh(h @ u * 0.3 + x), h), jnp.zeros_like(xs[0]), xs)[1] @ u)

    with jax.set_mesh(mesh):
        put = lambda x, *spec: jax.device_put(x, NamedSharding(mesh, PartitionSpec(*spec)))
        fn = jax.jit(jax.grad(AMP(simple), 1))
        found = fn(put(W), put(U), put(B), put(XS, None, "d"))
    expected = in_float64(jax.grad(simple, 1), W, U, B, XS)
    assert np.linalg.norm(np.asarray(found) - expected) < 2e-2 * np.linalg.norm(expected)


def test_casts_are_not_made_in_the_context_of_the_first_equation():
    def tagged(w, u, b, xs):
        def step(carry, x):
            with set_xla_metadata(tag="first"):
                x = jnp.sin(x)
            return cell(w, b, carry, x)

        (h, _), _ = jax.lax.scan(step, zeros(xs), xs)
        return jnp.mean((h @ u) ** 2)

    jaxpr = jax.make_jaxpr(AMP(tagged))(W, U, B, XS)
    first = [eqn for eqn in equations(jaxpr) if (eqn.ctx.xla_metadata or {}).get("tag") == "first"]
    assert {eqn.primitive.name for eqn in first} == {"sin"}
    carried = [v.aval.dtype for eqn in equations(jaxpr) if eqn.primitive.name == "scan" for v in eqn.outvars]
    assert jnp.bfloat16 in carried


# -- what a loop is given for each round


def activations(w, u, b, xs):
    """Made in float32 from results of matmuls, and read by matmuls alone."""
    given = jnp.exp(-jnp.abs(xs @ u))
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x @ u + h * 0.5), None), zeros(xs)[0], given)
    return jnp.mean(h**2)


def parameters(w, u, b, xs):
    """Layers of weights, made of parameters: their gradients are not rounded."""
    layers = jnp.stack([u, jnp.exp(u), u.T]) * jnp.mean(b)
    return jnp.mean(jax.lax.scan(lambda h, u: (jnp.tanh(h @ u), None), xs[0], layers)[0] ** 2)


def read_in_float32_too(w, u, b, xs):
    given = jnp.exp(-jnp.abs(xs @ u))
    h, _ = jax.lax.scan(lambda h, x: (jnp.tanh(x @ u + h * 0.5) * x, None), zeros(xs)[0], given)
    return jnp.mean(h**2)


def given_to_loops(fn, amp=AMP):
    jaxpr = jax.make_jaxpr(amp(fn))(W, U, B, XS)
    loops = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "scan"]
    return [v.aval.dtype.name for eqn in loops for v in eqn.invars if v.aval.shape == XS.shape]


def test_what_is_given_and_only_read_rounded_is_low():
    assert given_to_loops(activations) == ["bfloat16"]
    assert given_to_loops(activations, WITHOUT) == ["float32"]
    assert given_to_loops(activations, functools.partial(jaxamp.amp, compute_dtype=jnp.float16)) == ["float32"]
    assert_same_bits(*(jax.jit(amp(activations))(W, U, B, XS) for amp in (AMP, WITHOUT)))
    expected = in_float64(jax.grad(activations, (1, 3)), W, U, B, XS)
    assert_near(jax.jit(jax.grad(AMP(activations), (1, 3)))(W, U, B, XS), expected, 2e-2)


@pytest.mark.parametrize("fn", [parameters, read_in_float32_too])
def test_what_is_given_in_float32(fn):
    programs = [str(jax.make_jaxpr(jax.grad(amp(fn), 1))(W, U, B, XS)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]
