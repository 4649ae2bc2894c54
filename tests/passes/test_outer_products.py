"""Matmuls that contract nothing."""

import functools

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, assert_near, assert_same_bits, equations, in_float64, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from plans import plan_of

import jaxamp
from jaxamp._passes.outer_products import multiply_outer_products
from jaxamp._traits.matmul_cost import is_outer_product

W, X, DECAYS = normal(0, 8, 8, scale=0.3), normal(1, 2, 3, 4, 8), normal(2, 2, 4, 3)
CASES = {  # with as many numbers as the decays, or as many as the values
    "a factor for each row": "bhl,blhp->bhlp",
    "in another order": "bhl,blhp->blhp",
    "new axes on both sides": "bhl,xlhp->bhlxp",
    "no batch": "bhl,xyzp->bhlxyzp",
    "none of its own on the right": "xlhp,bhl->xlhpb",
}


def operands(form):
    return (X, DECAYS) if form.startswith("x") else (DECAYS, X)


def outer_products(jaxpr):
    return [eqn for eqn in equations(jaxpr) if is_outer_product(eqn)]


def loss(form, w, *args):
    """As in a state space by chunks: what is decayed comes from a matmul and goes to one."""
    first, second = (a @ w if a.shape[-1] == 8 else jnp.exp(-(a**2)) for a in args)
    out = jnp.einsum(form, first, second)
    return jnp.sum(jnp.tensordot(out, w[: out.shape[-1]], 1) ** 2) / out.size


@pytest.mark.parametrize("form", CASES.values(), ids=CASES)
def test_they_are_products(form):
    fn = functools.partial(loss, form)
    assert outer_products(jax.make_jaxpr(fn)(W, *operands(form)))
    jaxpr = jax.make_jaxpr(jax.grad(AMP(fn)))(W, *operands(form))
    assert not outer_products(jaxpr)
    found = jax.grad(AMP(fn), (0, 1, 2))(W, *operands(form))
    assert_near(found, in_float64(jax.grad(fn, (0, 1, 2)), W, *operands(form)), 2e-2)


@pytest.mark.parametrize("form", CASES.values(), ids=CASES)
def test_float32_numbers_are_the_same(form):
    """All that is not a matmul runs as it is written."""
    fn = lambda w, a, b: (jnp.einsum(form, a, b), w @ w)
    out, _ = jax.jit(AMP(fn))(W, *operands(form))
    assert_same_bits(out, jax.jit(fn)(W, *operands(form))[0])


def test_a_plan():
    fn = lambda w, x: jnp.einsum("ij,kl->ijkl", jnp.exp(x), x @ w)
    x = X[0, 0]
    before, after = (plan_of(fn, W, x, passes=passes) for passes in ((), (multiply_outer_products,)))
    (place,) = [i for i, eqn in enumerate(before.eqns) if is_outer_product(eqn)]
    assert before.steps[place].operation is None
    assert after.steps[place].operation is not None
    others = [(a, b) for i, (a, b) in enumerate(zip(before.steps, after.steps, strict=True)) if i != place]
    assert all((a.operation is None) == (b.operation is None) for a, b in others)
    assert after.outs == before.outs


@pytest.mark.parametrize("transform", [jax.jit, lambda f: jax.vmap(f, (None, 0, 0)), jax.checkpoint])
def test_under_transforms(transform):
    fn = functools.partial(loss, "bhl,blhp->blhp")
    args = (jnp.stack([DECAYS, DECAYS / 2]), jnp.stack([X, -X])) if transform not in (jax.jit, jax.checkpoint) else ()
    args = args or (DECAYS, X)
    mean = lambda f: lambda *a: jnp.mean(transform(f)(*a))
    assert_near(jax.grad(mean(AMP(fn)))(W, *args), in_float64(jax.grad(mean(fn)), W, *args), 2e-2)
    second = lambda f: jax.grad(lambda *a: jnp.sum(jax.grad(mean(f))(*a) ** 2))
    assert_near(second(AMP(fn))(W, *args), in_float64(second(fn), W, *args), 5e-2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (x @ w, jnp.einsum("i,j->ij", jnp.arange(3), jnp.arange(4))),
        lambda w, x: (
            x @ w,
            jnp.einsum("i,j->ij", lax.complex(x[0, 0, 0], x[0, 0, 1]), lax.complex(x[0, 0, 1], x[0, 0, 0])),
        ),
    ],
    ids=["integers", "complex"],
)
def test_other_numbers_are_left_alone(fn):
    assert len(outer_products(jax.make_jaxpr(AMP(fn))(W, X))) == len(outer_products(jax.make_jaxpr(fn)(W, X))) == 1


def test_a_rule_of_the_policy_has_the_last_word():
    policy = {**jaxamp.default_amp_policy, ("here", lax.dot_general_p): jaxamp.use_compute_precision}

    def fn(w, x, decays):
        with jax.named_scope("here"):
            return jnp.einsum("bhl,blhp->blhp", decays, x) @ w

    assert_near(AMP(fn, amp_policy=policy)(W, X, DECAYS), in_float64(fn, W, X, DECAYS), 2e-2)


def test_a_result_in_another_dtype():
    dot = lambda x, y: lax.dot_general(x, y, (((), ()), ((), ())), preferred_element_type=jnp.float32)
    fn = lambda w, x: (x @ w, dot(x[0, 0, 0].astype(jnp.bfloat16), x[0, 0, 1].astype(jnp.bfloat16)))
    _, out = AMP(fn)(W, X)
    assert_same_bits(out, fn(W, X)[1])


def test_on_an_explicit_mesh_they_are_left_alone():
    """A product is split as both of its operands are, and a matmul of JAX 0.10 as the left one."""
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Explicit,))
    fn = lambda w, factors, x: jnp.tanh(jnp.einsum("b,bp->bp", factors, x) @ w)
    with jax.set_mesh(mesh):
        split = NamedSharding(mesh, PartitionSpec("d"))
        args = W, jax.device_put(jnp.ones(4), split), jax.device_put(jnp.ones((4, 8)), split)
        assert len(outer_products(jax.make_jaxpr(AMP(fn))(*args))) == 1
        assert jax.typeof(jax.jit(AMP(fn))(*args)) == jax.typeof(jax.jit(fn)(*args))
