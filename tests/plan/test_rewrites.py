"""Derivative rules of the user: under `amp` they are told of zeros as JAX tells them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations, names
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_derivatives import SymbolicZero

import jaxamp

W = jax.random.normal(jax.random.key(0), (8, 8))
X = jax.random.normal(jax.random.key(1), (4, 8))


def amp(fn):
    return jaxamp.amp(fn, compute_dtype=jnp.bfloat16)


def is_zero(x):
    return isinstance(x, SymbolicZero)


def dense(x):
    return jnp.zeros(x.shape, x.dtype) if is_zero(x) else x


def by_vjp(symbolic_zeros):
    """A matmul, a sum of its weight and an integer; and what its backward rule is told of each cotangent."""
    told = []

    @jax.custom_vjp
    def f(x, w):
        return x @ w, jnp.sum(w), jnp.argmax(x)

    def forward(x, w):
        x, w = (x.value, w.value) if symbolic_zeros else (x, w)
        return f(x, w), (x, w)

    def backward(residuals, cotangents):
        told.append(tuple(map(is_zero, cotangents)))
        (x, w), (g, h) = residuals, map(dense, cotangents[:2])
        return g @ w.T, jnp.outer(x, g) + h

    f.defvjp(forward, backward, symbolic_zeros=symbolic_zeros)
    return f, told


def by_jvp(symbolic_zeros):
    """The same by a rule for forward mode. The second tangent is zero where the weight's is."""
    told = []

    @jax.custom_jvp
    def f(x, w):
        return x @ w, jnp.sum(w), jnp.argmax(x)

    def rule(primals, tangents):
        told.append(tuple(map(is_zero, tangents)))
        (x, w), (s, t) = primals, map(dense, tangents)
        outs = f(x, w)
        second = tangents[1] if is_zero(tangents[1]) else jnp.sum(t)
        second = SymbolicZero(jax.typeof(outs[1]).to_tangent_aval()) if is_zero(second) else second
        return outs, (s @ w + x @ t, second, np.zeros((), jax.dtypes.float0))

    f.defjvp(rule, symbolic_zeros=symbolic_zeros)
    return f, told


PROGRAMS = {
    "alone": lambda f: lambda w, x: jnp.sum(f(x[0], w)[0] ** 2),
    "all used": lambda f: lambda w, x: jnp.sum(f(x[0], w)[0] ** 2) + f(x[0], w)[1],
    "stopped": lambda f: lambda w, x: jnp.sum(f(lax.stop_gradient(x[0]), w)[0] ** 2),
    "vmap": lambda f: lambda w, x: jnp.sum(jax.vmap(f, (0, None))(x, w)[0] ** 2),
    "vmap of vmap": lambda f: lambda w, x: jnp.sum(jax.vmap(jax.vmap(f, (None, 0)), (0, None))(x, w[None])[0]),
    "vmap of jit": lambda f: lambda w, x: jnp.sum(jax.vmap(jax.jit(f), (0, None))(x, w)[0] ** 2),
    "vmap of checkpoint": lambda f: lambda w, x: jnp.sum(jax.vmap(jax.checkpoint(f), (0, None))(x, w)[0] ** 2),
    "checkpoint of vmap": lambda f: lambda w, x: jnp.sum(jax.checkpoint(jax.vmap(f, (0, None)))(x, w)[0] ** 2),
    "scan of vmap": lambda f: (
        lambda w, x: lax.scan(lambda c, _: (jnp.tanh(jax.vmap(f, (0, None))(c, w)[0]), None), x, length=2)[0].sum()
    ),
    "vmap of scan": lambda f: (
        lambda w, x: jax.vmap(lambda c: lax.scan(lambda c, _: (jnp.tanh(f(c, w)[0]), None), c, length=2)[0])(x).sum()
    ),
}


CASES = [(name, True, by_vjp) for name in PROGRAMS] + [
    (name, symbolic_zeros, rule)
    for name in ("alone", "vmap")
    for symbolic_zeros, rule in ((False, by_vjp), (True, by_jvp), (False, by_jvp))
]


@pytest.mark.parametrize(("program", "symbolic_zeros", "rule"), CASES)
def test_rules_are_told_of_zeros_as_by_jax(program, symbolic_zeros, rule):
    (f, told), (g, told_by_amp) = rule(symbolic_zeros), rule(symbolic_zeros)
    want = jax.grad(PROGRAMS[program](f), (0, 1))(W, X)
    got = jax.grad(amp(PROGRAMS[program](g)), (0, 1))(W, X)
    assert set(told) == set(told_by_amp)
    for x, y in zip(got, want, strict=True):
        assert float(jnp.linalg.norm(x - y)) <= 3e-2 * float(jnp.linalg.norm(y))


def test_the_zero_that_a_backward_rule_returns_reaches_the_rule_before_it():
    told = []

    @jax.custom_vjp
    def first(x):
        return x @ x

    def backward(x, g):
        told.append(is_zero(g))
        return (dense(g) @ x,)

    first.defvjp(lambda x: (x.value @ x.value, x.value), backward, symbolic_zeros=True)

    @jax.custom_vjp
    def second(x, y):
        return x @ y

    second.defvjp(lambda x, y: (x @ y, y), lambda y, g: (g @ y.T, None))
    loss = lambda x: jnp.sum(second(x, first(x)) ** 2)
    want, got = jax.grad(loss)(W), jax.grad(amp(loss))(W)
    assert told == [True]  # by JAX; by us it is not even called
    assert float(jnp.linalg.norm(got - want)) <= 3e-2 * float(jnp.linalg.norm(want))


@pytest.mark.parametrize("symbolic_zeros", [True, False])
def test_zero_tangents_stay_zero_in_forward_mode(symbolic_zeros):
    f, _ = by_jvp(symbolic_zeros)
    told = []

    @jax.custom_jvp
    def after(x, y):
        return x * y

    @lambda rule: after.defjvp(rule, symbolic_zeros=True)
    def rule(primals, tangents):
        told.append(tuple(map(is_zero, tangents)))
        (x, y), (s, t) = primals, map(dense, tangents)
        return x * y, s * y + x * t

    fn = lambda x: after(*f(x, W)[:2])
    want = jax.jvp(fn, (X[0],), (X[1],))
    got = jax.jvp(amp(fn), (X[0],), (X[1],))
    assert told == [(False, symbolic_zeros)] * 2
    for x, y in zip(got, want, strict=True):
        assert float(jnp.linalg.norm(x - y)) <= 3e-2 * float(jnp.linalg.norm(y))


def test_a_vmapped_backward_rule_is_low():
    f, _ = by_vjp(True)
    report = jaxamp.amp_report(PROGRAMS["vmap"](f), compute_dtype=jnp.bfloat16)(W, X)
    assert [row.phase for row in report.matmuls] == ["forward", "backward"]
    assert report.low_share == 1.0


# -- the high-level primitives of jax 0.12

FLAGS = ("jax_remat3", "jax_custom_jvp3", "jax_custom_vjp3")
has_flags = all(hasattr(jax.config, flag) for flag in FLAGS)
needs_flags = pytest.mark.skipif(not has_flags, reason="this JAX lacks some of the high-level primitives")


@pytest.fixture
def high_level():
    for flag in FLAGS:
        jax.config.update(flag, True)
    yield
    for flag in FLAGS:
        jax.config.update(flag, False)


def layers(w, x):
    names = jax.checkpoint_policies.save_only_these_names("hidden")
    layer = jax.checkpoint(lambda x, w: (checkpoint_name(jax.nn.silu(x @ w), "hidden") @ w, None), policy=names)
    return jnp.sum(lax.scan(layer, x, jnp.stack([w, 0.5 * w]))[0])


HIGH_LEVEL = {
    "checkpoints in a scan": layers,
    "custom_jvp": lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w),
    "custom_vjp": lambda w, x: PROGRAMS["all used"](by_vjp(True)[0])(w, x),
    "vmapped custom_vjp": lambda w, x: PROGRAMS["vmap"](by_vjp(True)[0])(w, x),
    "custom_vjp in a checkpoint": lambda w, x: PROGRAMS["checkpoint of vmap"](by_vjp(False)[0])(w, x),
}


@needs_flags
@pytest.mark.parametrize("program", HIGH_LEVEL)
def test_high_level_primitives_are_entered(program, high_level):
    fn = HIGH_LEVEL[program]
    assert "call_hi_primitive" in names(jax.make_jaxpr(fn)(W, X))
    report = jaxamp.amp_report(fn, compute_dtype=jnp.bfloat16)(W, X)
    assert report.low_share == 1.0
    assert report.not_entered == {}
    assert {row.phase for row in report.matmuls} == {"forward", "backward"}
    want = jax.grad(fn, (0, 1))(W, X)
    for got in (jax.grad(amp(fn), (0, 1))(W, X), amp(jax.grad(fn, (0, 1)))(W, X)):
        for x, y in zip(got, want, strict=True):
            assert float(jnp.linalg.norm(x - y)) <= 3e-2 * float(jnp.linalg.norm(y))


@needs_flags
def test_the_users_checkpoint_is_kept_in_its_high_level_form(high_level):
    jaxpr = jax.make_jaxpr(amp(layers))(W, X)
    kinds = [type(eqn.params["_prim"]).__name__ for eqn in equations(jaxpr) if "_prim" in eqn.params]
    assert "RematTraced" in kinds
    assert "remat2" not in names(jaxpr)  # none of ours around it


@needs_flags
def test_shared_results_are_batched_as_the_user_says():
    @jax.custom_vjp
    def f(x, w):
        return x @ w, jnp.sum(w)

    backward = lambda r, g: (g[0] @ r[1].T, jnp.outer(r[0], g[0]) + g[1])
    f.defvjp(lambda x, w: (f(x, w), (x, w)), backward, generic_batching=True)
    loss = lambda w, x: (lambda y, s: jnp.sum(y**2) + s)(*jax.vmap(f, (0, None), (0, None))(x, w))
    mapped = lambda g: lambda w, x: (lambda y, s: jnp.sum(y**2) + s)(*jax.vmap(g, (0, None), (0, None))(x, w))
    want = jax.grad(loss)(W, X)
    for got in (jax.grad(amp(loss))(W, X), jax.grad(mapped(amp(lambda x, w: f(x, w))))(W, X)):
        assert float(jnp.linalg.norm(got - want)) <= 3e-2 * float(jnp.linalg.norm(want))
