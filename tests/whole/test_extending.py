"""A pass, a replacing rule and a higher-order primitive: each is defined here, registered in one line, and reaches the
interpreter, the report, its costs, `find_overflow` and `compare`."""

import functools

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, count, error, in_float64, names, normal
from jax import lax
from jax.interpreters import ad, mlir

import jaxamp
from jaxamp import _passes
from jaxamp._compat import Literal
from jaxamp._plan.reasons import Reason, Why

W, X = normal(0, 8, 8), normal(1, 4, 8)
BF16 = {"compute_dtype": jnp.bfloat16}


# -- a pass: a product with one is its other operand


DROPPED = Reason(Why.BY_PASS, "a product with 1")


def drop_products_with_one(plan):
    """Let products with the literal 1 pass their other operand on."""
    changed = {
        i: plan.steps[i]._replace(operation=_pass_first, reason=DROPPED, touched=True)
        for i, eqn in enumerate(plan.eqns)
        if eqn.primitive is lax.mul_p and isinstance(eqn.invars[1], Literal) and eqn.invars[1].val == 1
    }
    return plan.with_steps(changed)


def _pass_first(eqn, operands, params):
    return operands[:1]


@pytest.fixture
def with_a_pass(monkeypatch):
    monkeypatch.setattr(_passes, "PLAN_PASSES", (*_passes.PLAN_PASSES, drop_products_with_one))


def scaled(w, x):
    return jnp.sum(jnp.tanh((x @ w) * 1.0))


def test_a_pass_reaches_the_interpreter(with_a_pass):
    disabled = AMP(scaled, disable_passes=["drop_products_with_one"])
    assert [count("mul", jax.make_jaxpr(fn)(W, X)) for fn in (AMP(scaled), disabled)] == [0, 1]
    assert error(jax.grad(AMP(scaled))(W, X), in_float64(jax.grad(scaled), W, X)) < 2e-2


def test_a_pass_reaches_the_report_and_its_costs(with_a_pass):
    with_it = jaxamp.amp_report(scaled, **BF16)(W, X)
    without = jaxamp.amp_report(scaled, **BF16, disable_passes=["drop_products_with_one"])(W, X)
    assert [row.primitive for row in with_it.rows if row.phase == "forward"].count("mul") == 0
    # forwards, again in the recomputation, and backwards
    assert sum(row.flops for row in without.rows) - sum(row.flops for row in with_it.rows) == 3 * X.size


def test_a_pass_reaches_the_tools(with_a_pass):
    big = jaxamp.find_overflow(scaled, compute_dtype=jnp.float16)(1e4 * W, 1e4 * X)
    assert (big.first.kind, big.first.primitive) == ("overflow", "dot_general")
    found = jaxamp.compare(scaled, **BF16)(W, X)
    assert "mul" not in [row.name for row in found.operations]
    assert found.gradients[0].error.relative < 2e-2


# -- a rule that gives matmuls another body: operands of four bits of mantissa


def few_bits(primitive, compute_dtype, x, w, **params):
    return primitive.bind(_round(x.astype(compute_dtype)), _round(w.astype(compute_dtype)), **params)


@jax.custom_jvp
def _round(x):
    return lax.reduce_precision(x, 8, 3)


_round.defjvp(lambda primals, tangents: (_round(*primals), tangents[0]))

FEW_BITS = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_replacement(few_bits, format="e8m3")}


def loss(w, x):
    with jax.named_scope("layer"):
        return jnp.sum(jnp.tanh(x @ w) @ w)


def rounded(a):
    return lax.reduce_precision(a.astype(jnp.bfloat16), 8, 3).astype(jnp.float32)


def test_a_replacement_reaches_the_interpreter():
    fn = lambda w, x: x @ w
    found = AMP(fn, amp_policy=FEW_BITS)(W, X)
    assert error(found, in_float64(fn, rounded(W), rounded(X))) < 2**-8  # the result is bfloat16
    assert error(found, in_float64(fn, W, X)) > 1e-2
    grads = jax.grad(AMP(loss, amp_policy=FEW_BITS))(W, X)
    assert 5e-3 < error(grads, in_float64(jax.grad(loss), W, X)) < 0.2


def test_a_replacement_reaches_the_report_and_its_costs():
    report = jaxamp.amp_report(loss, **BF16, amp_policy=FEW_BITS)(W, X)
    forward = [row for row in report.matmuls if row.phase == "forward"]
    assert [(row.multiplied, row.rule, row.reason) for row in forward] == [("e8m3", "few_bits", "policy table")] * 2
    backward = sum(row.flops for row in report.matmuls if row.phase == "backward")
    assert report.matmul_flops == {"bfloat16": backward, "e8m3": 2 * X.size * 8 * 2}
    assert report.low_share == 1.0
    assert report.to_dict()["rows"][0]["format"] in ("", "e8m3")
    added = [row for row in report.rows if row.primitive == "reduce_precision" and row.phase == "forward"]
    assert {row.reason for row in added} == {"added for dot_general: policy table"}
    report.check(low="layer")


def test_a_replacement_reaches_find_overflow():
    def overflows(primitive, compute_dtype, x, w, **params):
        large = lambda a: lax.abs(a.astype(compute_dtype)) * 1e30  # infinities of both signs would make NaNs
        return primitive.bind(large(x), large(w), **params)

    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_replacement(overflows)}
    found = jaxamp.find_overflow(loss, **BF16, amp_policy=policy)(W, X)
    assert (found.first.kind, found.first.scope, found.first.primitive) == ("overflow", "layer", "dot_general")


def test_a_replacement_reaches_compare_as_one_operation():
    found = jaxamp.compare(loss, **BF16, amp_policy=FEW_BITS)(W, X)
    matmuls = [row for row in found.operations if row.name == "dot_general"]
    assert len(matmuls) == 2
    assert all(5e-3 < row.error.relative < 0.2 for row in matmuls)
    assert found.notes == ()


def test_a_replacement_in_a_loop_is_compared_round_by_round():
    fn = lambda w, x: lax.scan(lambda c, _: (c @ w, None), x, length=3)[0].sum()
    found = jaxamp.compare(fn, **BF16, amp_policy=FEW_BITS)(0.3 * W, X)
    assert [row.name for row in found.operations].count("dot_general") == 3
    assert found.notes == ()


def test_a_replacement_in_a_function_that_is_called_often_is_compared_call_by_call():
    inner = jax.jit(lambda w, x: x @ w)
    fn = lambda w, x: inner(w, inner(w, inner(w, x))).sum()
    found = jaxamp.compare(fn, **BF16, amp_policy=FEW_BITS)(0.3 * W, X)
    matmuls = [row.error.relative for row in found.operations if row.name == "dot_general"]
    assert len(matmuls) == 3
    assert max(matmuls) < 0.2
    assert found.notes == ()


def test_a_replacement_with_a_loop_in_it_is_one_operation():
    def twice_half(primitive, compute_dtype, x, w, **params):
        x, w = (a.astype(compute_dtype) for a in (x, w))
        start = jnp.zeros_like(primitive.bind(x, w, **params))
        return lax.scan(lambda c, _: (c + primitive.bind(x, w / 2, **params), None), start, length=2)[0]

    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_replacement(twice_half)}
    found = jaxamp.compare(loss, **BF16, amp_policy=policy)(W, X)
    matmuls = [row.error.relative for row in found.operations if row.name == "dot_general"]
    assert len(matmuls) == 2
    assert max(matmuls) < 2e-2


def test_matmuls_of_a_replacements_derivative_are_reported_as_they_are():
    @jax.custom_vjp
    def wide_back(x, w):
        return x @ w

    wide_back.defvjp(
        lambda x, w: (x @ w, (x, w)),
        lambda kept, ct: tuple(
            d.astype(a.dtype)
            for d, a in zip(
                (ct.astype(jnp.float32) @ kept[1].T, kept[0].astype(jnp.float32).T @ ct.astype(jnp.float32)), kept
            )
        ),
    )

    def body(primitive, compute_dtype, x, w, **params):
        return wide_back(x.astype(jnp.float32), w)

    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_replacement(body, format="int8")}
    report = jaxamp.amp_report(lambda w, x: (x @ w).sum(), **BF16, amp_policy=policy)(W, X)
    assert report.matmul_flops.keys() == {"int8", "float32"}
    assert 0 < report.low_share < 1


@pytest.mark.parametrize(("compute_dtype", "dtype"), [("float32", "float32"), ("bfloat16", "bfloat16")])
def test_a_replacement_takes_operands_that_are_in_the_compute_dtype_already(compute_dtype, dtype):
    w, x = W.astype(dtype), X.astype(dtype)
    options = {"compute_dtype": compute_dtype, "amp_policy": FEW_BITS}
    report = jaxamp.amp_report(loss, **options, backward=False)(w, x)
    assert report.matmul_flops.keys() == {"e8m3"}
    found = jaxamp.amp(lambda w, x: x @ w, **options)(w, x)
    low = [lax.reduce_precision(a, 8, 3).astype(jnp.float32) for a in (w, x)]
    expected = in_float64(lambda w, x: x @ w, *low)
    assert found.dtype == dtype
    assert error(found, expected) < 2**-8


def test_the_backward_pass_of_a_replacement_that_is_returned_is_low():
    report = jaxamp.amp_report(lambda w, x: x @ w, **BF16, amp_policy=FEW_BITS)(W, X)
    assert report.matmul_flops.keys() == {"e8m3", "bfloat16"}


def test_a_replacement_leaves_alone_what_the_compute_rule_leaves_alone():
    fn = lambda w, x: jnp.matmul(x, w, precision="highest").sum()
    assert jaxamp.amp_report(fn, **BF16, amp_policy=FEW_BITS)(W, X).matmul_flops.keys() == {"float32"}


# -- a primitive that carries a jaxpr: a call


call_p = jec.Primitive("call_of_the_test")
call_p.multiple_results = True


def _run(*operands, body):
    return jec.jaxpr_as_fun(body)(*operands)


call_p.def_impl(_run)
call_p.def_abstract_eval(lambda *avals, body: body.out_avals)
mlir.register_lowering(call_p, mlir.lower_fun(_run, multiple_results=True))
ad.primitive_jvps[call_p] = lambda primals, tangents, body: jax.jvp(
    functools.partial(_run, body=body), primals, tuple(map(ad.instantiate_zeros, tangents))
)


def _repeat(x, *, body, length):
    for _ in range(length):
        (x,) = jec.jaxpr_as_fun(body)(x)
    return [x]


repeat_p = jec.Primitive("repeat_of_the_test")
repeat_p.multiple_results = True
repeat_p.def_impl(_repeat)
repeat_p.def_abstract_eval(lambda aval, body, length: body.out_avals)
mlir.register_lowering(repeat_p, mlir.lower_fun(_repeat, multiple_results=True))


def calling(w, x):
    body = jax.make_jaxpr(lambda w, x: jnp.exp(x @ w))(w, x)
    return jnp.sum(call_p.bind(w, x, body=body)[0])


@pytest.fixture
def registered(monkeypatch):
    monkeypatch.setattr("jaxamp._plan.higher_order._REGISTERED", {})
    jaxamp.register_higher_order(call_p, "body")


def test_a_registered_primitive_reaches_the_interpreter(registered):
    jaxpr = jax.make_jaxpr(AMP(calling))(W, X)
    assert "mixed_dot_general" in names(jaxpr)
    assert error(jax.grad(AMP(calling))(W, X), in_float64(jax.grad(calling), W, X)) < 2e-2


def test_a_registered_primitive_reaches_the_report_and_its_costs(registered):
    report = jaxamp.amp_report(calling, **BF16)(W, X)
    assert report.not_entered == {}
    (matmul,) = [row for row in report.matmuls if row.phase == "forward"]
    assert (matmul.multiplied, matmul.flops) == ("bfloat16", 2 * X.size * 8)


def test_a_registered_primitive_reaches_find_overflow(registered):
    found = jaxamp.find_overflow(calling, compute_dtype=jnp.float16)(100 * W, 100 * X)
    assert (found.first.kind, found.first.primitive) == ("overflow", "exp")


def test_a_registered_primitive_reaches_compare(registered):
    found = jaxamp.compare(calling, **BF16)(W, X)
    assert sorted(row.name for row in found.operations) == ["dot_general", "exp", "reduce_sum"]


def test_a_registered_primitive_that_repeats_its_body_is_one_operation_for_the_tools(monkeypatch):
    monkeypatch.setattr("jaxamp._plan.higher_order._REGISTERED", {})
    jaxamp.register_higher_order(repeat_p, "body")
    body = jax.make_jaxpr(lambda x: (x @ x,))(W)
    fn = lambda x: jnp.sum(repeat_p.bind(x, body=body, length=3)[0])
    (matmul,) = jaxamp.amp_report(fn, **BF16, backward=False)(W).matmuls
    assert (matmul.times, matmul.flops) == (3, 3 * 2 * 8**3)
    found = jaxamp.compare(fn, **BF16, backward=False)(W)
    assert [row.name for row in found.operations].count("dot_general") == 0
    assert found.results[0].error.relative < 0.1
    overflow = jaxamp.find_overflow(fn, compute_dtype=jnp.float16, backward=False)(10 * W)
    assert overflow.first.primitive == "repeat_of_the_test"


def test_a_primitive_that_is_not_registered_is_one_operation():
    report = jaxamp.amp_report(calling, **BF16)(W, X)
    assert report.not_entered == {"call_of_the_test": 1}
    assert [row.name for row in jaxamp.compare(calling, **BF16)(W, X).operations].count("exp") == 0


def test_how_a_registered_primitive_runs_its_body_can_be_said(monkeypatch):
    monkeypatch.setattr("jaxamp._plan.higher_order._REGISTERED", {})
    runs = []

    def evaluate(run, eqn, operands):
        runs.append(eqn.primitive.name)
        return run(eqn.params["body"], operands, turn=0)

    describe = lambda eqn: jaxamp.Entry((jaxamp.Body(eqn.params["body"], (0, 1), (0,), "body"),))
    jaxamp.register_higher_order(call_p, describe, evaluate=evaluate)
    found = jaxamp.compare(calling, **BF16)(W, X)
    assert runs == ["call_of_the_test"] * 2  # the reference, and amp
    assert [row.name for row in found.operations].count("exp") == 1


def test_the_numbers_of_the_call_are_those_of_its_body():
    np.testing.assert_allclose(calling(W, X), jnp.sum(jnp.exp(X @ W)), rtol=1e-6)
