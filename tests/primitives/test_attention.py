"""Attention: its values and derivatives in each dtype and under each transform, and what amp makes of it."""

import functools

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BATCH,
    BIAS,
    CASES,
    FULL,
    HEADS,
    IN_LOW,
    KEYS,
    LENGTHS,
    QKV,
    TOKENS,
    WIDTH,
    K,
    Q,
    V,
    assert_near_float64,
    attend,
    attention_equations,
    booleans,
    bounds,
    dtypes_of,
    largest_error,
    loss_of,
    lowered,
    runs_in,
    value_and_gradients,
    written_out,
    written_out_gradients,
)
from helpers import assert_same_bits, both, count, error, matmul_dtypes, normal
from jax import lax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

import jaxamp
from jaxamp._primitives import attention as module

# -- values and gradients, against softmax and its derivative written out in float64


@pytest.mark.parametrize("name", CASES)
def test_values_and_gradients_are_near_float64(name):
    assert_near_float64(CASES[name], jnp.float32)


@pytest.mark.parametrize(("name", "low"), IN_LOW)
def test_values_and_gradients_under_amp_are_near_float64(name, low):
    assert_near_float64(CASES[name], low)


@pytest.mark.parametrize("shape", [(1, 1, 1, KEYS), (1, HEADS, TOKENS, 1)])
def test_a_bias_repeated_along_many_axes_has_the_sum_of_gradients(shape):
    bias = normal(10, *shape)
    out, gradients = value_and_gradients(attend, [*QKV, bias])
    expected, wanted = written_out(normal(9, *Q.shape), *QKV, bias)
    assert largest_error((out, *gradients[:3]), (expected, *wanted[:3])) < bounds(jnp.float32)
    assert gradients[3].shape == shape
    assert np.allclose(gradients[3], wanted[3], atol=1e-5)  # it is zero where all keys have the same bias


def test_a_token_that_sees_nothing_is_what_jax_makes_of_it():
    mask = booleans(12, *FULL).at[0, 1, 2].set(False)
    found, expected = (jax.jit(fn)(*QKV, mask=mask) for fn in (attend, jax.nn.dot_product_attention))
    assert largest_error(found, expected) < 1e-6


def test_operands_without_a_batch():
    dtype = jnp.bfloat16
    moving = [Q[0], K[0], V[0], BIAS[0]]
    found = value_and_gradients(jaxamp.amp(attend, compute_dtype=dtype), moving)
    out, gradients = written_out(normal(9, *Q.shape[1:])[None], *(x[None] for x in moving))
    assert largest_error(found, (out[0], tuple(g[0] for g in gradients))) < bounds(dtype)


def test_lists_and_numpy_arrays_are_arrays():
    out = attend(np.asarray(Q).tolist(), np.asarray(K), V, mask=np.ones((KEYS,), bool).tolist(), scale=np.float32(0.5))
    assert_same_bits(out, attend(*QKV, mask=jnp.ones(KEYS, bool), scale=0.5))


def test_a_traced_scale_has_a_gradient():
    found = jax.jit(jax.grad(lambda s: jnp.sum(attend(*QKV, scale=s) ** 2)))(0.7)
    expected = jax.jit(jax.grad(lambda s: jnp.sum(jax.nn.dot_product_attention(s * Q, K, V, scale=1.0) ** 2)))(0.7)
    assert error(found, expected) < 1e-5
    out = attend(*QKV, scale=jnp.float32(0.7))
    assert error(out, written_out(Q, *QKV, scale=0.7)[0]) < bounds(jnp.float32)


@pytest.mark.parametrize(
    ("operands", "options"),
    [(QKV, LENGTHS), (tuple(x[0] for x in QKV), {"is_causal": True})],
    ids=["lengths", "no batch, causal"],
)
def test_the_residual_is_that_of_jax(operands, options):
    found, expected = (
        jax.jit(functools.partial(fn, return_residual=True, **options))(*operands)
        for fn in (attend, jax.nn.dot_product_attention)
    )
    assert [x.shape for x in found] == [x.shape for x in expected]
    assert largest_error(found, expected) < 1e-6


def test_the_residual_has_no_gradient():
    residual = jaxamp.amp(lambda q: jnp.sum(attend(q, K, V, return_residual=True)[1]), compute_dtype=jnp.bfloat16)
    assert not np.any(jax.jit(jax.grad(residual))(Q))


# -- derivatives of each order


def written_out_change(*moving, **options):
    """How the gradients of `loss_of` change along the operands themselves, in float64: a central difference."""
    moving, step = [np.asarray(x, np.float64) for x in moving], 1e-5
    ahead, behind = (written_out_gradients(*((1 + s) * x for x in moving), **options) for s in (step, -step))
    return tuple((a - b) / (2 * step) for a, b in zip(ahead, behind, strict=True))


DERIVATIVES = {
    "jvp": lambda f: lambda *a: jax.jvp(f, a, a)[1],
    "jvp of one operand": lambda f: lambda *a: jax.jvp(lambda k: f(a[0], k, *a[2:]), a[1:2], a[1:2])[1],
    "jvp of grad": lambda f: lambda *a: jax.jvp(jax.grad(f, argnums=(0, 1, 2, 3)), a, a)[1],
    "grad of jvp": lambda f: jax.grad(lambda *a: jax.jvp(f, a, tuple(map(lax.stop_gradient, a)))[1], (0, 1, 2, 3)),
}


def expected_derivative(name, **options):
    gradients = written_out_gradients(*QKV, BIAS, **options)
    if name == "jvp of one operand":
        return np.vdot(gradients[1], K)
    if "grad" not in name:
        return sum(np.vdot(g, x) for g, x in zip(gradients, (*QKV, BIAS), strict=True))
    return written_out_change(*QKV, BIAS, **options)


@pytest.mark.parametrize("name", DERIVATIVES)
def test_forward_mode_and_second_order_are_near_float64(name):
    options = {"is_causal": True, **LENGTHS}
    derivative = DERIVATIVES[name](functools.partial(loss_of, attend, **options))
    assert largest_error(jax.jit(derivative)(*QKV, BIAS), expected_derivative(name, **options)) < 1e-5


def test_a_gradient_of_gradients_is_that_of_jax():
    def second(fn):
        grad = jax.grad(functools.partial(loss_of, fn), argnums=(0, 1, 3))
        return jax.grad(lambda *a: sum(jnp.sum(g**2) for g in grad(*a)), argnums=(0, 1, 2, 3))

    found, expected = (jax.jit(second(fn))(*QKV, BIAS) for fn in (attend, jax.nn.dot_product_attention))
    assert largest_error(found, expected) < 1e-5


@pytest.mark.parametrize(
    ("name", "inside", "low"),
    [("jvp", False, jnp.float16), ("jvp of grad", False, jnp.bfloat16), ("jvp of grad", False, jnp.float16)]
    + [("jvp of grad", True, jnp.bfloat16)],
)
def test_forward_mode_and_second_order_under_amp_are_near_float64(name, inside, low):
    amp, derive = functools.partial(jaxamp.amp, compute_dtype=low), DERIVATIVES[name]
    loss = functools.partial(loss_of, attend)
    found = jax.jit(amp(derive(loss)) if inside else derive(amp(loss)))(*QKV, BIAS)
    assert all(x.dtype == jnp.float32 for x in jax.tree.leaves(found))
    assert largest_error(found, expected_derivative(name)) < 2 * bounds(low)


def test_jacobians_are_those_of_jax():
    small = Q[:1, :2, :2, :2], K[:1, :3, :1, :2], V[:1, :3, :1, :2], BIAS[:, :2, :2, :3]
    expected = jax.jit(jax.jacrev(jax.nn.dot_product_attention, argnums=(0, 1, 2, 3)))(*small)
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert largest_error(jax.jit(jacobian(attend, argnums=(0, 1, 2, 3)))(*small), expected) < 1e-5


# -- transforms


def stacked(x: jax.Array, axis: int, size: int = 3) -> jax.Array:
    """`size` arrays like `x`, no two the same."""
    if jnp.issubdtype(x.dtype, jnp.integer):
        return jnp.stack([jnp.maximum(x - i, 1) for i in range(size)], axis)
    if x.dtype == bool:
        return jnp.stack([jnp.roll(x, i, -1).at[..., 0].set(True) for i in range(size)], axis)
    return jnp.stack([x * (1.0 + i) for i in range(size)], axis)


OPERANDS = {
    "q": Q,
    "k": K,
    "v": V,
    "bias": BIAS,
    "mask": booleans(13, BATCH, 1, 1, KEYS),
    **LENGTHS,
}


def gradients_of(q, k, v, bias, mask, *lengths):
    def loss(q, k, v, bias):
        return loss_of(attend, q, k, v, bias, mask, **dict(zip(LENGTHS, lengths, strict=True)))

    return jax.grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)


def expected_gradients(q, k, v, bias, mask, *lengths, of=written_out_gradients):
    return of(q, k, v, bias, mask=mask, **dict(zip(LENGTHS, lengths, strict=True)))


def assert_mapped_is_looped(fn, expected, axes, bound=1e-5, size=3):
    """`vmap` over axes, where they are not None, gives what a loop over them gives."""
    args = [x if a is None else stacked(x, a, size) for x, a in zip(OPERANDS.values(), axes, strict=True)]
    mapped = jax.jit(jax.vmap(fn, axes))(*args)
    for i in range(size):
        one = [x if a is None else np.take(np.asarray(x), i, a) for x, a in zip(args, axes, strict=True)]
        assert largest_error(jax.tree.map(lambda x, i=i: x[i], mapped), expected(*one)) < bound


@pytest.mark.parametrize("name", OPERANDS)
def test_vmap_over_one_operand_is_a_loop(name):
    """The others, the bias among them, are not mapped: their gradients are each example's own."""
    place = -1 if name in LENGTHS else 1
    axes = [place if other == name else None for other in OPERANDS]
    assert_mapped_is_looped(gradients_of, expected_gradients, axes)


def test_vmap_over_all_operands_is_a_loop():
    assert_mapped_is_looped(gradients_of, expected_gradients, (3, 1, 2, 4, 0, 1, 0))


def test_vmap_of_vmap_is_two_loops():
    pair = lambda q, v: [(q, v), (-q, v + np.float32(1))]

    def inner(q, k, v, bias, mask, *lengths):
        qs, vs = (jnp.stack(xs, axis) for xs, axis in zip(zip(*pair(q, v), strict=True), (1, 0), strict=True))
        return jax.vmap(gradients_of, (1, None, 0, None, None, None, None))(qs, k, vs, bias, mask, *lengths)

    def expected(q, k, v, *rest):
        found = [expected_gradients(q, k, v, *rest) for q, v in pair(q, v)]
        return tuple(map(np.stack, zip(*found, strict=True)))

    assert_mapped_is_looped(inner, expected, (None, 2, None, 1, 0, None, 0), size=2)


def test_vmap_of_second_order_is_a_loop():
    def second(q, k, v, bias, *rest):
        moving = q, k, v, bias
        return jax.jvp(lambda *moving: gradients_of(*moving, *rest), moving, moving)[1]

    expected = functools.partial(expected_gradients, of=written_out_change)
    assert_mapped_is_looped(second, expected, (0, None, 1, None, None, None, 0), size=2)


@pytest.mark.parametrize(("shape", "axis"), [((BATCH, 1, 1, KEYS), None), ((1, 1, TOKENS, KEYS), None), (FULL, 3)])
def test_gradients_per_example_of_a_bias(shape, axis):
    """Of a bias that all examples share, of a batch or not, and of one that each example has for itself."""
    bias, q = normal(14, *shape), stacked(Q, 0, 2)
    bias = bias if axis is None else stacked(bias, axis, 2)
    mapped = jax.jit(jax.vmap(jax.grad(lambda b, q: loss_of(attend, q, K, V, b)), (axis, 0)))(bias, q)
    assert mapped.shape == (2, *shape)
    for i in range(2):
        expected = written_out_gradients(q[i], K, V, bias if axis is None else np.take(np.asarray(bias), i, axis))[3]
        assert error(mapped[i], expected) < 1e-5


def test_vmap_under_amp_is_a_loop():
    low = jnp.float16
    fn = jaxamp.amp(gradients_of, compute_dtype=low)
    assert_mapped_is_looped(fn, expected_gradients, (0, None, 1, None, 0, None, 0), 4 * bounds(low), size=2)
    mapped = jaxamp.amp(jax.vmap(attend), compute_dtype=low)
    assert runs_in(mapped, *(stacked(x, 0) for x in QKV)) == {jnp.dtype(low).name}


def layers(ws, x, fn=attend):
    """A scan over layers of attention."""

    def layer(x, w):
        q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], HEADS, -1), 3, -1)
        return x + fn(q, k, v, is_causal=True).reshape(x.shape), None

    return jnp.sum(lax.scan(layer, x, ws)[0] ** 2)


WEIGHTS, X = normal(15, 2, HEADS * WIDTH, 3 * HEADS * WIDTH, scale=0.2), normal(16, BATCH, TOKENS, HEADS * WIDTH)


def test_a_scan_over_layers_has_the_gradients_of_jax():
    expected = jax.jit(jax.grad(lambda w: layers(w, X, jax.nn.dot_product_attention)))(WEIGHTS)
    found = jax.jit(jax.grad(jaxamp.amp(lambda w: layers(w, X), compute_dtype=jnp.bfloat16)))(WEIGHTS)
    assert error(found, expected) < 2e-2


def test_a_scan_under_amp_computes_no_attention_again():
    amp = jaxamp.amp(lambda w: layers(w, X), compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(jax.grad(amp))(WEIGHTS)
    assert (count(module.FORWARD.name, jaxpr), count(module.BACKWARD.name, jaxpr)) == (1, 1)
    assert runs_in(jax.grad(amp), WEIGHTS) == {"bfloat16"}


@pytest.mark.parametrize(
    ("policy", "again"), [("nothing_saveable", 1), ("dots_saveable", 1), ("everything_saveable", 0)]
)
def test_a_checkpoint_computes_the_forward_half_again_or_keeps_it(policy, again):
    amp = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)
    checkpoint = functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    loss = functools.partial(loss_of, attend)
    for fn in (checkpoint(amp(loss)), amp(checkpoint(loss))):
        jaxpr = jax.make_jaxpr(jax.grad(fn))(*QKV, BIAS)
        assert (count(module.FORWARD.name, jaxpr), count(module.BACKWARD.name, jaxpr)) == (1 + again, 1)
        assert runs_in(jax.grad(fn), *QKV, BIAS) == {"bfloat16"}


@pytest.mark.parametrize(("policy", "inside"), [("nothing_saveable", True), ("dots_saveable", False)])
def test_gradients_through_a_checkpoint_are_near_float64(policy, inside):
    amp = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)
    checkpoint = functools.partial(jax.checkpoint, policy=getattr(jax.checkpoint_policies, policy))
    loss = functools.partial(loss_of, attend)
    fn = amp(checkpoint(loss)) if inside else checkpoint(amp(loss))
    found = jax.jit(jax.grad(fn, argnums=(0, 1, 2, 3)))(*QKV, BIAS)
    assert largest_error(found, written_out_gradients(*QKV, BIAS)) < bounds(jnp.bfloat16)


@pytest.mark.parametrize(("inside", "check_vma"), [(False, True), (True, False)])
def test_in_shard_map_it_has_the_gradients_of_one_device(inside, check_vma):
    mesh = jax.make_mesh((2,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    amp = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)

    def loss(*operands):
        return lax.psum(loss_of(attend, *operands), "data")

    specs = P("data"), P("data"), P("data"), P()
    shard = functools.partial(jax.shard_map, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=check_vma)
    gradients = jax.grad(shard(amp(loss)) if inside else amp(shard(loss)), argnums=(0, 1, 2, 3))
    assert runs_in(gradients, *QKV, BIAS) == {"bfloat16"}
    found = jax.device_get(jax.jit(gradients)(*QKV, BIAS))
    assert largest_error(found, written_out_gradients(*QKV, BIAS)) < bounds(jnp.bfloat16)


# -- what amp makes of it


@both
def test_amp_rounds_what_is_multiplied_and_nothing_else(low):
    name, wide = jnp.dtype(low).name, "float32"

    def loss(q, k, v, bias):
        return loss_of(attend, q, k, v, bias, key_value_seq_lengths=LENGTHS["key_value_seq_lengths"])

    for fn in (
        jax.grad(jaxamp.amp(loss, compute_dtype=low), (0, 3)),
        jaxamp.amp(jax.grad(loss, (0, 3)), compute_dtype=low),
    ):
        forward, backward = attention_equations(jax.make_jaxpr(fn)(*QKV, BIAS))
        assert (forward.primitive, backward.primitive) == (module.FORWARD, module.BACKWARD)
        assert dtypes_of(forward) == ([name, name, name, wide, "int32"], [name, wide])
        # the operands, the result and its sums, and the cotangent; then the gradients, the bias's in its dtype
        assert dtypes_of(backward) == ([name, name, name, wide, "int32", name, wide, name], [name, name, name, wide])


def test_a_tangent_runs_low_with_a_wide_bias():
    tangent = jaxamp.amp(lambda *a: jax.jvp(attend, a, a)[1], compute_dtype=jnp.bfloat16)
    _, eqn = attention_equations(jax.make_jaxpr(tangent)(*QKV, BIAS))
    low, wide = ["bfloat16"], ["float32"]
    assert eqn.primitive is module.TANGENT
    assert dtypes_of(eqn) == (3 * low + wide + low + wide + 3 * low + wide, low)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("keep", ["auto", "matmuls", "all"])
def test_no_scores_are_kept_for_the_backward_pass(keep, dtype):
    tokens = 32  # against a width of 8: scores would be the largest arrays
    q, k, v = (normal(i, BATCH, tokens, HEADS, WIDTH) for i in range(3))
    bias = normal(3, HEADS, 1, tokens)
    fn = jaxamp.amp(lambda q, k, v: attend(q, k, v, bias, is_causal=True) ** 2, compute_dtype=dtype, keep=keep)
    kept = jax.tree.leaves(jax.eval_shape(lambda *qkv: jax.vjp(fn, *qkv)[1], q, k, v))
    assert any(x.shape == (BATCH, tokens, HEADS) for x in kept)  # the sums
    assert all(x.shape.count(tokens) < 2 and x.size <= q.size for x in kept)


def test_a_low_bias_is_taken_as_it_is():
    """It comes from a matmul, and nothing would be gained by making it wide."""
    low = jnp.float16
    w = normal(17, KEYS, KEYS)
    fn = jaxamp.amp(lambda b, w: attend(*QKV, b @ w), compute_dtype=low)
    (eqn,) = attention_equations(jax.make_jaxpr(fn)(BIAS, w))
    assert dtypes_of(eqn)[0] == [jnp.dtype(low).name] * 4
    assert error(jax.jit(fn)(BIAS, w), written_out(Q, *QKV, BIAS @ w)[0]) < 2 * bounds(low)


def projected(x, w, fn=attend):
    return fn(*jnp.split((x @ w).reshape(*x.shape[:2], HEADS, -1), 3, -1))


def test_low_operands_need_no_promotion_of_the_user():
    q = jnp.ones((1, 4, 2, 8), jnp.bfloat16)
    assert jaxamp.dot_product_attention(q, q, q).dtype == jnp.bfloat16  # promotion is strict in these tests


def test_standard_and_strict_promotion_give_the_same_program():
    fn = jax.grad(jaxamp.amp(functools.partial(loss_of, attend), compute_dtype=jnp.bfloat16), argnums=(0, 3))
    strict = str(jax.make_jaxpr(fn)(*QKV, BIAS))
    with jax.numpy_dtype_promotion("standard"):
        assert str(jax.make_jaxpr(fn)(*QKV, BIAS)) == strict


def test_amp_of_amp_is_amp():
    once = jaxamp.amp(lambda x, w: loss_of(projected, x, w), compute_dtype=jnp.bfloat16)
    twice = jaxamp.amp(once, compute_dtype=jnp.bfloat16)
    for fn, gn in ((once, twice), (jax.grad(once), jax.grad(twice))):
        assert str(jax.make_jaxpr(fn)(X, WEIGHTS[0])) == str(jax.make_jaxpr(gn)(X, WEIGHTS[0]))


def test_amp_stop_keeps_it_in_float32():
    def loss(*qkv):
        with jaxamp.amp_stop():
            return loss_of(attend, *qkv)

    for fn in (jaxamp.amp(loss), jax.grad(jaxamp.amp(loss)), jaxamp.amp(jax.grad(loss))):
        assert runs_in(fn, *QKV) == {"float32"}


def scoped(x, w):
    q, k, v = jnp.split((x @ w).reshape(*x.shape[:2], HEADS, -1), 3, -1)
    with jax.named_scope("here"):
        return loss_of(attend, q, k, v)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        ({"here": jaxamp.use_original_precision}, "float32"),
        ({"here": jaxamp.use_inferred_precision}, "bfloat16"),  # its operands are low
        ({"here": jaxamp.use_compute_precision}, "bfloat16"),
        ({("here", module.FORWARD): jaxamp.use_original_precision}, "float32"),
        ({module.FORWARD: jaxamp.use_original_precision}, "float32"),
    ],
)
def test_a_policy_decides_on_both_passes(policy, expected):
    amp = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16, amp_policy=jaxamp.default_amp_policy | policy)
    for fn in (jax.grad(amp(scoped)), amp(jax.grad(scoped))):
        assert runs_in(fn, X, WEIGHTS[0]) == {expected}


def test_a_scope_that_infers_leaves_parameters_alone():
    def loss(*qkv):
        with jax.named_scope("here"):
            return loss_of(attend, *qkv)

    policy = jaxamp.default_amp_policy | {"here": jaxamp.use_inferred_precision}
    assert runs_in(jaxamp.amp(loss, amp_policy=policy), *QKV) == {"float32"}


def test_a_mapping_without_its_name_leaves_it_in_float32():
    policy = {lax.dot_general_p: jaxamp.use_compute_precision}
    amp = jaxamp.amp(scoped, compute_dtype=jnp.bfloat16, amp_policy=policy)
    jaxpr = jax.make_jaxpr(amp)(X, WEIGHTS[0])
    assert runs_in(amp, X, WEIGHTS[0]) == {"float32"}
    assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")]


@pytest.mark.parametrize(
    ("table", "expected"),
    [
        ('[rules]\ncompute = ["dot_product_attention"]', "bfloat16"),
        ('[rules]\ncompute = ["dot_general"]', "float32"),
        ('extends = "default"\n[rules]\nfloat32 = ["dot_product_attention"]', "float32"),
        ('extends = "default"\n[scopes]\nhere = { dot_product_attention = "float32" }', "float32"),
        ('extends = "default"\n[rules.float16]\nfloat32 = ["dot_product_attention"]', "bfloat16"),
    ],
)
def test_a_table_names_it(table, expected, tmp_path):
    path = tmp_path / "policy.toml"
    path.write_text(table)
    amp = jaxamp.amp(scoped, compute_dtype=jnp.bfloat16, amp_policy=path)
    assert runs_in(jax.grad(amp), X, WEIGHTS[0]) == {expected}


@pytest.mark.parametrize("preset", jaxamp.presets())
def test_each_preset_runs_it_low(preset):
    assert runs_in(jaxamp.amp(projected, compute_dtype=jnp.bfloat16, amp_policy=preset), X, WEIGHTS[0]) == {"bfloat16"}


def distances():
    """How far each key is from each token, as ALiBi has it."""
    return -jnp.abs(jnp.arange(TOKENS)[:, None] - jnp.arange(KEYS)).astype(jnp.float32)


def test_a_bias_made_from_positions_is_exact_and_keeps_nothing_wide():
    low = jnp.bfloat16
    slopes = 2.0 ** -jnp.arange(1.0, HEADS + 1)

    def fn(q, k, v, slopes):
        return attend(q, k, v, slopes[:, None, None] * distances() * 100.0)

    amp = jaxamp.amp(fn, compute_dtype=low)
    (eqn,) = attention_equations(jax.make_jaxpr(amp)(*QKV, slopes))
    assert dtypes_of(eqn)[0] == [jnp.dtype(low).name] * 3 + ["float32"]
    expected = written_out(Q, *QKV, slopes[None, :, None, None] * distances() * 100.0)[0]
    assert error(jax.jit(amp)(*QKV, slopes), expected) < bounds(low)


def test_a_query_made_from_positions_keeps_it_in_float32():
    def fn(k, v):
        q = jnp.arange(TOKENS * HEADS * WIDTH, dtype=jnp.float32).reshape(1, TOKENS, HEADS, WIDTH)
        return attend(jnp.broadcast_to(q, Q.shape), k, v)

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert runs_in(amp, K, V) == {"float32"}
    assert_same_bits(jax.jit(amp)(K, V), jax.jit(fn)(K, V))


@pytest.mark.parametrize(
    ("precision", "expected"),
    [("highest", "float32"), ("float32", "float32"), ("BF16_BF16_F32_X6", "float32"), ("high", "bfloat16")]
    + [("tensorfloat32", "bfloat16"), ("default", "bfloat16"), (None, "bfloat16")],
)
def test_a_precision_that_is_asked_for_is_kept(precision, expected):
    with jax.default_matmul_precision(precision):
        amp = jaxamp.amp(functools.partial(loss_of, attend), compute_dtype=jnp.bfloat16)
        assert runs_in(jax.grad(amp), *QKV) == {expected}


def test_a_precision_reaches_each_matmul_on_the_platform():
    with jax.default_matmul_precision("highest"):
        traced = jax.jit(jax.grad(functools.partial(loss_of, attend))).trace(*QKV)
    for platform in ("cpu", "cuda"):
        text = traced.lower(lowering_platforms=(platform,)).as_text()
        matmuls = [line for line in text.splitlines() if "stablehlo.dot_general" in line]
        assert len(matmuls) >= 4
        assert all("precision = [HIGHEST, HIGHEST]" in line for line in matmuls)


@pytest.mark.promotes  # jax.nn.dot_product_attention does
def test_float64_is_left_alone():
    with jax.enable_x64(True):
        q, k, v, bias = (jnp.asarray(np.asarray(x, np.float64)) for x in (*QKV, BIAS))
        fn = jaxamp.amp(functools.partial(loss_of, attend), compute_dtype=jnp.bfloat16)
        assert runs_in(jax.grad(fn), q, k, v, bias) == {"float64"}
        found = value_and_gradients(attend, [q, k, v, bias])
    # the softmax is jax.nn's, in float32
    assert largest_error(found, written_out(normal(9, *Q.shape), q, k, v, bias)) < 1e-6
    assert all(x.dtype == jnp.float64 for x in jax.tree.leaves(found))


def test_a_compute_dtype_of_float32_leaves_the_jaxpr_as_it_is():
    loss = functools.partial(loss_of, attend)
    expected = jax.make_jaxpr(loss)(*QKV, BIAS)
    assert str(jax.make_jaxpr(jaxamp.amp(loss, compute_dtype=jnp.float32))(*QKV, BIAS)) == str(expected)


# -- which implementation, and what is wrong with the arguments


def test_a_word_that_names_no_implementation_is_refused():
    message = r"implementation is 'flash'; expected None, 'xla' or 'cudnn'. Leave it out."
    with pytest.raises(ValueError, match=message):
        attend(*QKV, implementation="flash")


def test_cudnn_on_a_gpu_that_runs_low_says_why_it_can_not():
    """The shapes are known before a GPU is: it has no window on both sides."""
    fn = functools.partial(attend, implementation="cudnn", local_window_size=2)
    message = (
        r"implementation='cudnn' of jaxamp.dot_product_attention: it has no window without a causal mask. Expected "
        r"operands that cuDNN's fused attention takes; leave `implementation` out to get the plain one where it "
        r"doesn't."
    )
    with pytest.raises(NotImplementedError, match=message):
        lowered(jaxamp.amp(fn), *QKV)
    lowered(fn, *QKV)  # in float32, no GPU has it
    assert jaxamp.amp(fn)(*QKV).shape == Q.shape  # this is no GPU
    lowered(jaxamp.amp(functools.partial(attend, local_window_size=2)), *QKV)


@pytest.mark.parametrize("error_type", [NotImplementedError, RuntimeError, ValueError])
def test_what_jax_says_of_cudnn_is_passed_on_if_it_was_asked_for(error_type, monkeypatch):
    def refuses(*args, implementation=None, **options):
        if implementation == "cudnn":
            raise error_type("no such kernel")
        return real(*args, implementation=implementation, **options)

    real = jax.nn.dot_product_attention
    monkeypatch.setattr(jax.nn, "dot_product_attention", refuses)
    assert "dot_general" in lowered(jaxamp.amp(attend), *QKV)
    with pytest.raises(NotImplementedError, match=r"jaxamp.dot_product_attention: no such kernel. Expected"):
        lowered(jaxamp.amp(functools.partial(attend, implementation="cudnn")), *QKV)


def test_xla_is_the_plain_one_on_each_platform(monkeypatch):
    real, asked = jax.nn.dot_product_attention, []

    def told(*args, implementation=None, **options):
        asked.append(implementation)
        return real(*args, implementation=implementation, **options)

    monkeypatch.setattr(jax.nn, "dot_product_attention", told)
    lowered(jaxamp.amp(functools.partial(attend, implementation="xla", is_causal=True, scale=0.3)), *QKV)
    assert "cudnn" not in asked
    assert_same_bits(attend(*QKV, implementation="xla"), attend(*QKV))


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ((Q, K[:, :-1], V), {}),
        ((Q, K[..., :4], V[..., :4]), {}),
        ((Q, K[:, :, :3], V[:, :, :3]), {}),
        ((Q, K, V.astype(jnp.bfloat16)), {}),
        (QKV, {"mask": jnp.ones(FULL)}),
        (QKV, {"query_seq_lengths": jnp.ones(BATCH + 1, jnp.int32)}),
        (QKV, {"key_value_seq_lengths": jnp.ones(BATCH)}),
    ],
    ids=["keys", "width", "heads", "dtypes", "mask", "lengths", "dtype of lengths"],
)
def test_wrong_arguments_get_the_message_of_jax(arguments, options):
    with pytest.raises(ValueError) as expected:
        jax.nn.dot_product_attention(*arguments, **options)
    with pytest.raises(ValueError) as found:
        attend(*arguments, **options)
    assert str(found.value) == str(expected.value)


@pytest.mark.parametrize("platform", ["cpu", "cuda"])
def test_export_works_for_each_platform(platform):
    """No device is known then: it is the plain one."""
    grad = jax.jit(jax.grad(jaxamp.amp(functools.partial(loss_of, attend), compute_dtype=jnp.bfloat16), argnums=(0, 3)))
    exported = jax.export.export(grad, platforms=[platform])(*QKV, BIAS)
    assert exported.platforms == (platform,)
    assert [x.shape for x in exported.out_avals] == [Q.shape, BIAS.shape]
    if platform == "cpu":
        expected = written_out_gradients(*QKV, BIAS)
        assert largest_error(exported.call(*QKV, BIAS), (expected[0], expected[3])) < bounds(jnp.bfloat16)
