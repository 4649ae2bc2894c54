"""Rules: those of the library by hand, those of a user, and where a rule has no say."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, LOW, WIDE, W, dtypes_of, matmul_dtypes, matmuls, raises
from jax import lax

import jaxamp
from jaxamp import use_compute_precision as compute
from jaxamp import use_inferred_precision as infer
from jaxamp import use_original_precision as original
from jaxamp._compat import primitives
from jaxamp._policy.rules import ByTarget, name_of_rule

BF16 = np.dtype(jnp.bfloat16)


def test_a_users_rule_may_change_bind_params():
    def in_two_halves(compute_dtype, original_dtypes, *invars, **bind_params):
        assert [np.dtype(d) for d in original_dtypes] == [np.dtype("float32")] * 2
        return invars, bind_params | {"preferred_element_type": compute_dtype}

    jaxpr = jax.make_jaxpr(jaxamp.amp(lambda x: x @ x, amp_policy={lax.dot_general_p: in_two_halves}))(W)
    assert dtypes_of("dot_general", jaxpr) == ["float16"]
    assert matmul_dtypes(jaxpr) == [WIDE]


def test_a_users_rule_in_a_scope_sees_each_operation():
    seen = []

    def spy(compute_dtype, original_dtypes, *invars, **bind_params):
        seen.append(compute_dtype)
        return jaxamp.use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params)

    def fn(x):
        with jax.named_scope("low"):
            return jax.jit(lambda x: jnp.exp(x) + 1.0)(x)

    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy={"low": spy}))(W)
    assert dtypes_of("exp", jaxpr) == dtypes_of("add", jaxpr) == ["bfloat16"]
    assert set(seen) == {BF16}


def test_use_precision_runs_in_that_dtype_whatever_the_compute_dtype():
    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_precision(jnp.bfloat16)}
    jaxpr = jax.make_jaxpr(jaxamp.amp(lambda x: x @ x, amp_policy=policy))(W)
    assert matmul_dtypes(jaxpr) == [LOW]


def test_rules_by_hand():
    x, i = jnp.ones(3), jnp.arange(3)
    f32, i32 = x.dtype, i.dtype
    (a, b), params = jaxamp.use_compute_precision(BF16, [f32, i32], x, i, preferred_element_type=f32, axis=0)
    assert (a.dtype, b.dtype) == (BF16, i32)
    assert params == {"preferred_element_type": BF16, "axis": 0}
    (a,), _ = jaxamp.use_original_precision(BF16, [f32], x.astype(BF16))
    assert a.dtype == f32
    (a, b), _ = jaxamp.use_widest_precision(BF16, [f32, f32], x.astype(BF16), x)
    assert (a.dtype, b.dtype) == (f32, f32)
    (a, b), _ = jaxamp.use_inferred_precision(BF16, [f32, f32], x.astype(BF16), x)
    assert (a.dtype, b.dtype) == (BF16, BF16)
    (a,), _ = ByTarget(original, {"bfloat16": compute})(BF16, [f32], x)
    assert a.dtype == BF16


def test_a_primitive_key_for_a_higher_order_primitive_keeps_it_as_written():
    fn = lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=2)[0] @ x
    policy = jaxamp.default_amp_policy | {primitives()["scan"]: original}
    assert matmuls(AMP(fn, amp_policy=policy), W) == [WIDE, LOW]


def test_carries_follow_only_where_the_loop_itself_has_a_key():
    fn = lambda x: jax.named_scope("here")(lambda x: lax.scan(lambda c, _: (c @ c, None), x, length=2)[0])(x)
    for key, carry in [("here", "float32"), (("here", primitives()["scan"]), "bfloat16")]:
        policy = jaxamp.default_amp_policy | {key: infer}
        jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(W)
        assert dtypes_of("scan", jaxpr) == [carry]


@pytest.mark.parametrize("rule", [infer, compute])
def test_a_scope_never_lowers_what_is_not_entered(rule):
    def fn(x):
        y = x @ x
        with jax.named_scope("net"):
            called = jax.pure_callback(lambda y: y, jax.ShapeDtypeStruct(y.shape, y.dtype), y)
            return called, jnp.linalg.solve(y + jnp.eye(4), y)

    policy = jaxamp.default_amp_policy | {"net": rule}
    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(W)
    assert dtypes_of("pure_callback", jaxpr) == ["float32"]
    jax.jit(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy)).lower(W)


def test_a_scope_under_compute_never_makes_an_epsilon_zero():
    def fn(x):
        with jax.named_scope("net"):
            return x @ x + 1e-12

    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, amp_policy=jaxamp.default_amp_policy | {"net": compute}))(W)
    assert dtypes_of("add", jaxpr) == ["float32"]


def test_a_users_rule_is_called_for_casts_too():
    seen = []

    def spy(compute_dtype, original_dtypes, *invars, **bind_params):
        seen.append(bind_params["new_dtype"])
        return invars, bind_params

    jaxamp.amp(lambda i: i.astype(jnp.float32), amp_policy={lax.convert_element_type_p: spy})(jnp.arange(3))
    assert set(seen) == {np.dtype("float32")}


def test_carries_under_fast_are_low_only_if_a_round_makes_them_low():
    amped = lambda fn: jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy="fast")
    assert amped(lambda x: lax.while_loop(lambda c: c < 300.0, lambda c: c + 1.0, x))(jnp.zeros(())) == 300.0
    assert amped(lambda x: lax.fori_loop(0, 300, lambda i, c: c + 1.0, x))(jnp.zeros(())) == 300.0


# -- rules that give an operation another body


def test_a_replacement_that_is_no_function_is_refused():
    with raises(TypeError, "use_replacement got 3, of type int; expected a function", "Write use_replacement"):
        jaxamp.use_replacement(3)


@pytest.mark.parametrize(
    ("made", "given"),
    [
        (lambda x: x[:2], r"float16\[2,4\]"),
        (lambda x: None, "NoneType"),
        (lambda x: (x, x), "tuple"),
        (lambda x: x.astype(jnp.int32), r"int32\[4,4\]"),
    ],
    ids=["another shape", "nothing", "a tuple", "integers"],
)
def test_a_body_that_returns_something_else_is_told(made, given):
    def body(primitive, compute_dtype, x, w, **params):
        return made(primitive.bind(x, w, **params))

    policy = jaxamp.default_amp_policy | {lax.dot_general_p: jaxamp.use_replacement(body, name="mine")}
    returned, expected = (
        f"the replacement 'mine' returned {given} for dot_general",
        r"expected float32\[4,4\], where any float",
    )
    with raises(TypeError, returned, expected, "Return from its body"):
        jaxamp.amp(lambda x: x @ x, amp_policy=policy)(W)


def test_a_body_of_a_primitive_with_several_results():
    def body(primitive, compute_dtype, x, **params):
        assert x.dtype == compute_dtype
        return [-values for values in primitive.bind(-x, **params)]

    top_k = primitives()["top_k"]
    policy = jaxamp.default_amp_policy | {top_k: jaxamp.use_replacement(body)}
    found = jaxamp.amp(lambda x: lax.top_k(x, 2)[0], amp_policy=policy)(W)
    np.testing.assert_allclose(found, jnp.sort(W)[:, :2], rtol=1e-3)


def test_the_name_of_a_replacement_is_that_of_its_body():
    def body(primitive, compute_dtype, *operands, **params):
        return primitive.bind(*operands, **params)

    assert [name_of_rule(jaxamp.use_replacement(body, name=name)) for name in (None, "mine")] == ["body", "mine"]
    assert name_of_rule(jaxamp.use_compute_precision) == "use_compute_precision"
