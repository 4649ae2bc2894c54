"""Decisions on equations: by the policy, by the operands, by what is around."""

import jax
import jax.numpy as jnp
import pytest
from helpers import W, matmul_dtypes
from jax import lax
from plans import planner_of

import jaxamp
from jaxamp._compat import open_jaxpr
from jaxamp._plan.classify import Mode
from jaxamp._plan.reasons import Reason, Why
from jaxamp._plan.sensitivity import FREE, LOW, OUT_OF_RANGE, POSITION, PROTECTED, sensitivity_of_argument

N = jnp.arange(4)


def decisions(fn, *args, ins=None, **options):
    """The decision on each equation by the name of its primitive, and the sensitivities of the results."""
    jaxpr = jax.make_jaxpr(fn)(*args)
    ins = ins or tuple(sensitivity_of_argument(v.aval) for v in open_jaxpr(jaxpr).invars)
    found, outs = planner_of(**options).classifier.read(jaxpr, ins, ())
    return {eqn.primitive.name: d for eqn, d in zip(open_jaxpr(jaxpr).eqns, found, strict=True)}, outs


CASES = {
    "a matmul of parameters": (lambda x: x @ x, "dot_general", Mode.LOW, Reason(Why.BY_PRIMITIVE), LOW),
    "an add after it": (lambda x: x @ x + x, "add", Mode.FOLLOW, Reason(Why.FOLLOWS_LOW), LOW),
    "an add of parameters": (lambda x: x + x, "add", Mode.AS_WRITTEN, Reason(Why.NO_LOW_OPERAND), FREE),
    "an exp": (lambda x: jnp.exp(x @ x), "exp", Mode.AS_WRITTEN, Reason(Why.BY_PRIMITIVE), PROTECTED),
    "an add after it, too": (
        lambda x: jnp.exp(x) + x @ x,
        "add",
        Mode.AS_WRITTEN,
        Reason(Why.FOLLOWS_PROTECTED),
        PROTECTED,
    ),
    "a comparison": (lambda x: x @ x > x, "gt", Mode.WIDEST, Reason(Why.BY_PRIMITIVE), FREE),
    "positions": (lambda x: jnp.arange(4.0) @ x, "iota", Mode.AS_WRITTEN, Reason(Why.FROM_POSITIONS), POSITION),
    "a matmul of positions": (
        lambda x: jnp.arange(4.0) @ x,
        "dot_general",
        Mode.AS_WRITTEN,
        Reason(Why.FROM_POSITIONS),
        PROTECTED,
    ),
    "an outer product": (
        lambda x: jnp.outer(x[0], x[1]),
        "mul",
        Mode.AS_WRITTEN,
        Reason(Why.NO_LOW_OPERAND),
        FREE,
    ),
    "a request for precision": (
        lambda x: jnp.matmul(x, x, precision="highest"),
        "dot_general",
        Mode.AS_WRITTEN,
        Reason(Why.ASKS_FOR_PRECISION, "HIGHEST"),
        PROTECTED,
    ),
    "a cholesky": (
        lambda x: lax.linalg.cholesky(x, symmetrize_input=False),
        "cholesky",
        Mode.AS_WRITTEN,
        Reason(Why.BY_DEFAULT),
        PROTECTED,
    ),
    "a jit": (lambda x: jax.jit(lambda x: x @ x)(x), "jit", Mode.ENTER, Reason(Why.ENTERED), LOW),
    "a write into a buffer": (
        lambda x: (x @ x).at[0].set(x[0]),
        "scatter",
        Mode.BUFFER,
        Reason(Why.FOLLOWS_BUFFER),
        LOW,
    ),
    "a sort of two": (
        lambda x: lax.sort((x @ x, x), num_keys=1)[1],
        "sort",
        Mode.EACH,
        Reason(Why.FOLLOWS_EACH),
        FREE,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_decisions(name):
    fn, primitive, mode, reason, sensitivity = CASES[name]
    found, (out, *_) = decisions(fn, W)
    assert (found[primitive].mode, found[primitive].reason) == (mode, reason)
    if open_jaxpr(jax.make_jaxpr(fn)(W)).eqns[-1].primitive.name == primitive:
        assert out is sensitivity


@pytest.mark.parametrize(
    ("literal", "reason", "sensitivity"),
    [
        (-1e9, Reason(Why.LITERAL_OVERFLOWS, (-1e9, "float16")), OUT_OF_RANGE),
        (1e-12, Reason(Why.LITERAL_UNDERFLOWS, (pytest.approx(1e-12), "float16")), PROTECTED),
    ],
)
def test_literals_that_float16_can_not_hold(literal, reason, sensitivity):
    found, (out,) = decisions(lambda x: x @ x + literal, W, compute_dtype=jnp.float16)
    assert (found["add"].mode, found["add"].reason, out) == (Mode.AS_WRITTEN, reason, sensitivity)


def resized(x, method="bilinear"):
    return jax.image.resize(x, (8, 12), method)


def with_weights_of_its_own(x):
    near = jnp.maximum(0, 1 - jnp.abs(jnp.arange(8.0)[:, None] - 2 * jnp.arange(4.0)))
    return jnp.matmul(near / jnp.sum(near, 1, keepdims=True), x, precision="highest")


@pytest.mark.parametrize("wrapped", [lambda f: f, jax.jit, jax.checkpoint, lambda f: lambda x: jax.vmap(f)(x[None])[0]])
@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda x: resized(x @ x), "bfloat16"),
        (lambda x: resized(x @ x, "cubic"), "bfloat16"),
        (lambda x: resized(jnp.exp(x @ x)), "bfloat16"),  # protected, but a matmul may round it
        (lambda x: resized(x), "float32"),
        (lambda x: resized(jnp.cos(x @ x)) @ jnp.ones((12, 2)), "bfloat16"),
        (lambda x: with_weights_of_its_own(x @ x), "float32"),
        (lambda x: jnp.matmul(resized(x @ x), jnp.ones((12, 2)), precision="highest"), "float32"),
    ],
)
def test_resizing_is_low_where_its_operand_may_be_rounded(fn, dtype, wrapped):
    jaxpr = jax.make_jaxpr(jaxamp.amp(wrapped(fn), compute_dtype=jnp.bfloat16))(W)
    assert set(matmul_dtypes(jaxpr)[-1]) == {dtype}


def test_a_scope_of_the_policy_is_the_reason():
    def fn(x):
        with jax.named_scope("head"):
            return x @ x

    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
    assert decisions(fn, W, policy=policy)[0]["dot_general"].reason == Reason(Why.BY_SCOPE, "head")
    policy = jaxamp.default_amp_policy | {("head", lax.dot_general_p): jaxamp.use_original_precision}
    assert decisions(fn, W, policy=policy)[0]["dot_general"].reason == Reason(Why.BY_SCOPE_AND_PRIMITIVE, "head")


def test_a_users_rule_has_the_last_word():
    def rule(compute_dtype, original_dtypes, *invars, **params):
        return invars, params

    found, outs = decisions(lambda x: jnp.exp(x @ x), W, policy=jaxamp.default_amp_policy | {lax.exp_p: rule})
    assert (found["exp"].mode, found["exp"].found.rule) == (Mode.RULE, rule)
    assert outs == (LOW,)  # what the rule gave: the operand as it was


def test_a_carry_is_protected_unless_the_policy_lets_it_follow():
    fn = lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=2)[0]
    assert decisions(fn, W)[0]["scan"].bodies == ((PROTECTED,),)
    assert decisions(fn, W, policy="fast")[0]["scan"].bodies == ((LOW,),)


def test_a_body_is_read_once_for_each_sensitivity():
    inner = jax.jit(lambda x: jnp.tanh(x))
    planner = planner_of()
    jaxpr = jax.make_jaxpr(lambda x: inner(inner(x @ x)) + inner(x))(W)
    reads = []
    read = planner.classifier._read
    planner.classifier._read = lambda *args: (reads.append(args[1]), read(*args))[1]
    planner.classifier.read(jaxpr, (FREE,), ())
    assert sorted(reads[1:]) == [(FREE,), (LOW,)]


def test_integers_that_count_places():
    _, outs = decisions(lambda n: (n + 1, n.astype(jnp.float32), n > 2), N)
    assert outs == (POSITION, POSITION, FREE)
