"""What is kept for the backward pass outside of loops: islands, softmaxes, the `keep` keyword, and `bytes_kept`."""

import contextlib
import math

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import assert_near, both, count, dtypes_of, equations, in_float64, kept, matmul_dtypes, normal
from jax import lax

import jaxamp

ROWS, WIDTH = 24, 16


X = normal(0, ROWS, WIDTH)
PARAMS = {
    "up": normal(1, WIDTH, 2 * WIDTH, scale=0.3),
    "bias": normal(2, 2 * WIDTH),
    "down": normal(3, 2 * WIDTH, WIDTH, scale=0.3),
}


def hand_written_gelu(x):
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


def mlp(params, x, act=jax.nn.gelu):
    return jnp.sum((act(x @ params["up"] + params["bias"]) @ params["down"]) * x)


def attention(params, x):
    scores = (x @ params["up"]) @ (x @ params["up"]).T / 4.0
    return jnp.sum(jax.nn.softmax(scores, axis=-1) @ x)


# -- islands


@both
@pytest.mark.parametrize("act", [jax.nn.gelu, hand_written_gelu, jax.nn.mish, lambda x: jnp.exp(-(x**2))])
def test_an_activation_between_matmuls_keeps_nothing_in_float32(low, act):
    fn = lambda params, x: mlp(params, x, act)
    amp = jaxamp.amp(fn, compute_dtype=low)
    wide = [(shape, dtype) for shape, dtype in kept(amp, PARAMS, X) if dtype == "float32" and shape[0] == ROWS]
    assert wide == []
    assert any(dtype == "float32" and shape == (ROWS, 2 * WIDTH) for shape, dtype in kept(fn, PARAMS, X))
    assert_near(jax.jit(jax.grad(amp))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), 2e-2)


def test_an_island_takes_its_bias_and_gives_back_what_the_matmul_reads():
    jaxpr = jax.make_jaxpr(jax.grad(jaxamp.amp(mlp, compute_dtype=jnp.bfloat16)))(PARAMS, X)
    (island,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "remat2"]
    large = [v.aval for v in (*island.invars, *island.outvars) if v.aval.shape == (ROWS, 2 * WIDTH)]
    assert {aval.dtype.name for aval in large} == {"bfloat16"}  # the operand, its cotangent and the one that comes in
    assert len(large) == 3


def test_no_matmul_and_no_random_draw_is_in_an_island():
    def fn(params, x, key):
        h = jax.nn.gelu(x @ params["up"] + params["bias"])
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0.0)
        return jnp.sum(jax.nn.gelu(h) @ params["down"])

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    forward, whole = (jax.make_jaxpr(f)(PARAMS, X, jax.random.key(0)) for f in (amp, jax.grad(amp)))
    assert count("random_bits", whole) == count("random_bits", forward) == 1
    assert len(matmul_dtypes(whole)) == 2 + 3  # two forward, two for `down`, one for `up`
    for eqn in equations(whole):
        if eqn.primitive.name == "remat2":
            assert count("random_bits", eqn.params["jaxpr"]) == 0
            assert matmul_dtypes(eqn.params["jaxpr"]) == []


def test_work_on_wide_operands_is_no_island():
    def fn(params, x):  # a residual in float32: to keep it would cost what the island spares
        h = jnp.sin(x) + x @ params["up"] @ params["down"]
        return jnp.sum(jnp.tanh(h**3) @ params["up"])

    assert count("remat2", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)) == 0


def test_linear_work_and_low_work_are_no_islands():
    def fn(params, x):
        return jnp.sum((-(x @ params["up"]) * 2.0 + params["bias"]) @ params["down"])

    assert count("remat2", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)) == 0
    relu = jaxamp.amp(lambda p, x: mlp(p, x, jax.nn.relu), compute_dtype=jnp.bfloat16)
    assert count("remat2", jax.make_jaxpr(relu)(PARAMS, X)) == 0


def test_a_constant_made_in_an_island_can_be_read_outside():
    def fn(params, x):
        h = x @ params["up"]
        ones = jnp.full(h.shape, 1.5)
        return jnp.sum((hand_written_gelu(h) * ones + ones) @ params["down"]) + jnp.sum(jnp.sin(ones))

    expected = in_float64(jax.grad(fn), PARAMS, X)
    del expected["bias"]
    found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)
    assert not np.any(found.pop("bias"))
    assert_near(found, expected, 2e-2)


def test_what_comes_out_of_an_island_may_be_read_in_two_dtypes():
    def fn(params, x):
        h = hand_written_gelu(x @ params["up"])
        return jnp.sum(h @ params["down"]) + jnp.sum(jnp.exp(-h)), h

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    _, h = amp(PARAMS, X)
    assert h.dtype == jnp.float32
    assert not np.array_equal(h, h.astype(jnp.bfloat16).astype(jnp.float32))  # not rounded
    expected = in_float64(jax.grad(lambda p, x: fn(p, x)[0]), PARAMS, X)
    found = jax.grad(lambda p: amp(p, X)[0])(PARAMS)
    assert_near([found["up"], found["down"]], [expected["up"], expected["down"]], 2e-2)


def test_transforms_go_through_an_island():
    amp = jaxamp.amp(mlp, compute_dtype=jnp.bfloat16)
    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: jnp.asarray(np.asarray(x, np.float64)), (PARAMS, X))
        tangent = np.asarray(jax.jvp(lambda x: mlp(wide[0], x), (wide[1],), (wide[1],))[1])
        curvature = np.asarray(jax.jvp(jax.grad(lambda x: mlp(wide[0], x)), (wide[1],), (wide[1],))[1])
    assert abs(float(jax.jvp(lambda x: amp(PARAMS, x), (X,), (X,))[1]) - tangent) < 2e-2 * abs(tangent)
    found = jax.jvp(jax.grad(lambda x: amp(PARAMS, x)), (X,), (X,))[1]
    assert np.linalg.norm(found - curvature) < 3e-2 * np.linalg.norm(curvature)
    per_row = jax.vmap(jax.grad(amp), (None, 0))(PARAMS, X[:, None])
    assert_near(jax.tree.map(lambda g: g.sum(0), per_row), in_float64(jax.grad(mlp), PARAMS, X), 2e-2)


# -- softmaxes


@both
def test_softmax_between_matmuls_keeps_its_low_result_alone(low):
    amp = jaxamp.amp(attention, compute_dtype=low)
    square = [dtype for shape, dtype in kept(amp, PARAMS, X) if shape == (ROWS, ROWS)]
    assert square == [jnp.dtype(low).name]
    assert_near(
        jax.jit(jax.grad(amp))({"up": PARAMS["up"]}, X),
        in_float64(jax.grad(attention), {"up": PARAMS["up"]}, X),
        4e-2 if low == jnp.bfloat16 else 6e-3,
    )


@pytest.mark.parametrize("axis", [-1, 0, (0, 1)])
def test_softmax_is_found_over_any_axes(axis):
    def fn(x):
        return jnp.sum(jax.nn.softmax(x @ x.T, axis=axis) @ x * x)

    small = 0.2 * X
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(amp)(small)
    assert count("custom_jvp_call", jaxpr) == 1
    assert dtypes_of("exp", jaxpr) == ["float32"]
    assert_near(jax.grad(amp)(small), in_float64(jax.grad(fn), small), 3e-2)


@both
def test_the_gradient_of_a_softmax_ignores_what_all_of_a_row_shares(low):
    """Probabilities that are rounded do not sum to one: taken as they are, they let a common cotangent through."""
    fn = lambda scores: jnp.sum(jax.nn.softmax(scores @ jnp.eye(ROWS)) @ jnp.ones((ROWS, 1)))
    found = jax.grad(jaxamp.amp(fn, compute_dtype=low))(normal(1, ROWS, ROWS))
    assert np.abs(found).max() < 1e-6


def test_softmax_in_float16_survives_scores_beyond_the_range_of_its_exponentials():
    def fn(x):
        return jnp.sum(jax.nn.softmax(x @ x.T * 40.0, axis=-1) @ x)

    found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.float16))(X)
    assert np.all(np.isfinite(found))


@pytest.mark.parametrize(
    "fn",
    [
        lambda x: (lambda y: (y @ x, y))(jax.nn.softmax(x @ x, -1)),  # the result is returned as well
        lambda x: jnp.sum(jax.nn.softmax(x @ x, -1)),  # it is read wide
        lambda x: (lambda e: (e / e.sum(-1, keepdims=True)) @ x + e)(jnp.exp(x @ x)),  # so are the exponentials
        lambda x: (lambda e: (e / e.sum(0)[:, None]) @ x)(jnp.exp(x @ x)),  # not a softmax: sums of the other axis
        lambda x: (lambda e: (e / jnp.broadcast_to(e.sum(1), e.shape)) @ x)(jnp.exp(x @ x)),  # nor of the other axis
        lambda x: (jnp.exp(x @ x) / jnp.exp(x @ x).sum(-1, keepdims=True)) @ x,  # two exponentials
    ],
)
def test_what_only_looks_like_a_softmax_is_left_alone(fn):
    square = 0.3 * X[:WIDTH]
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert count("held", jax.make_jaxpr(amp)(square)) == 0
    with jax.enable_x64(True):
        expected = jax.tree.map(np.asarray, fn(jnp.asarray(np.asarray(square, np.float64))))
    for a, b in zip(jax.tree.leaves(amp(square)), jax.tree.leaves(expected), strict=True):
        assert np.linalg.norm(a - b) < 2e-2 * np.linalg.norm(b)


@pytest.mark.parametrize("primitive", [lax.exp_p, lax.reduce_sum_p, lax.div_p])
def test_a_softmax_with_a_rule_of_the_user_in_it_is_left_alone(primitive):
    fn = lambda x: jax.nn.softmax(x @ x.T, -1) @ x
    rule = lambda compute_dtype, dtypes, *xs, **params: ([x.astype(jnp.float32) for x in xs], params)
    policy = jaxamp.default_amp_policy | {primitive: rule}
    assert count("held", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy))(X)) == 0
    assert count("held", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(X)) == 1


def test_a_softmax_that_is_pinned_is_left_alone():
    def fn(x):
        scores = x @ x.T
        with jaxamp.amp_stop():
            weights = jax.nn.softmax(scores, -1)
        return weights @ x

    assert count("held", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(X)) == 0


def rounded_cotangents(fn, *args) -> list[str]:
    """The dtypes that cotangents are rounded to and held in."""
    found = (eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == "held")
    return [str(eqn.params["dtype"]) for eqn in found if eqn.params["here"]]


@both
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint, lambda fn: jax.vmap(fn, (None, None, 0))])
def test_a_bias_in_an_island_shares_the_cotangent_that_the_matmul_reads_if_that_is_differentiated(low, wrap):
    def fn(w, bias, x):
        return jnp.sum(jnp.square(x @ w + bias))

    amp = wrap(jaxamp.amp(fn, compute_dtype=low))
    loss = lambda *args: jnp.sum(amp(*args))
    args, low = (PARAMS["up"], PARAMS["bias"], X[None]), jnp.dtype(low).name
    assert rounded_cotangents(jax.grad(loss, 0), *args) == []
    assert rounded_cotangents(jax.grad(loss, 1), *args) == []
    assert rounded_cotangents(jax.grad(loss, (0, 1)), *args) == [low]
    with jax.enable_x64(True):
        expected = jax.tree.map(
            np.asarray, jax.grad(fn, (0, 1))(*(jnp.asarray(np.asarray(a, np.float64)) for a in args))
        )
    for found, exact in zip(jax.grad(loss, (0, 1))(*args), expected, strict=True):
        assert found.dtype == jnp.float32
        assert np.linalg.norm(found - exact) < 1e-2 * np.linalg.norm(exact)


@pytest.mark.parametrize("pinned", [True, False])
def test_a_bias_in_an_island_keeps_the_range_of_float32(pinned):
    def fn(bias, x, scale):
        h = x @ PARAMS["up"]
        with jaxamp.amp_stop() if pinned else contextlib.nullcontext():
            return jnp.sum(jnp.square(h + bias)) * scale

    for scale in (1e-9, 1.0, 1e6):
        expected = jax.grad(fn)(PARAMS["bias"], X, scale)
        found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.float16))(PARAMS["bias"], X, scale)
        assert np.linalg.norm(found - expected) < 2e-3 * np.linalg.norm(expected)


@pytest.mark.parametrize("keep", ["auto", "matmuls"])
def test_sizes_that_are_not_known_yet_are_no_obstacle(keep):
    rows, more = jax.export.symbolic_shape("rows, more")
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), PARAMS)
    x = jax.ShapeDtypeStruct((rows, more, WIDTH), jnp.float32)
    amp = jaxamp.amp(lambda p, x: jnp.sum(jax.nn.gelu(x @ p["up"] + p["bias"]) @ p["down"]), keep=keep)
    exported = jax.export.export(jax.jit(jax.grad(amp)))(shapes, x)
    assert exported.call(PARAMS, X[None])["up"].shape == PARAMS["up"].shape


def test_float32_leaves_softmaxes_and_activations_as_they_are():
    rule = lambda compute_dtype, dtypes, *xs, **params: (xs, params)
    policy = jaxamp.default_amp_policy | {lax.sin_p: rule}
    fn = lambda params, x: attention(params, jnp.sin(x)) + mlp(params, x)
    names = [e.primitive.name for e in equations(jax.make_jaxpr(fn)(PARAMS, X))]
    amp = jaxamp.amp(fn, compute_dtype=jnp.float32, amp_policy=policy)
    assert [e.primitive.name for e in equations(jax.make_jaxpr(amp)(PARAMS, X))] == names


def test_second_order_and_forward_mode_of_a_softmax():
    fn = lambda x: jnp.sum(jax.nn.softmax(x @ x.T, -1) @ x * x)
    small, amp = 0.2 * X, jaxamp.amp(fn, compute_dtype=jnp.float16)
    with jax.enable_x64(True):
        wide = jnp.asarray(np.asarray(small, np.float64))
        tangent = np.asarray(jax.jvp(fn, (wide,), (wide,))[1])
        curvature = np.asarray(jax.jvp(jax.grad(fn), (wide,), (wide,))[1])
    assert abs(float(jax.jvp(amp, (small,), (small,))[1]) - tangent) < 5e-3 * abs(tangent)
    found = jax.jvp(jax.grad(amp), (small,), (small,))[1]
    assert np.linalg.norm(found - curvature) < 1e-2 * np.linalg.norm(curvature)


# -- the keyword


def two_layers(params, x):
    for _ in range(2):
        x = x + attention(params, x) * 1e-3 + jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.sum(x**2)


def test_keep_matmuls_keeps_results_of_matmuls_of_the_whole_function():
    sizes = {k: jaxamp.bytes_kept(two_layers, compute_dtype=jnp.bfloat16, keep=k)(PARAMS, X) for k in ("auto", "all")}
    least = jaxamp.bytes_kept(two_layers, compute_dtype=jnp.bfloat16, keep="matmuls")(PARAMS, X)
    assert least.before == sizes["auto"].before == sizes["all"].before
    assert least.after < 0.65 * sizes["auto"].after
    assert sizes["auto"].after < 0.7 * sizes["all"].after
    amp = jaxamp.amp(two_layers, compute_dtype=jnp.bfloat16, keep="matmuls")
    float32 = [shape for shape, dtype in kept(amp, PARAMS, X) if dtype == "float32"]
    assert max(map(math.prod, float32)) <= len(X)  # sums over tokens
    forward, whole = (jax.make_jaxpr(f)(PARAMS, X) for f in (amp, jax.grad(amp)))
    assert len(matmul_dtypes(whole)) < 3 * len(matmul_dtypes(forward))  # none again: at most two for each backwards
    assert_near(jax.jit(jax.grad(amp))(PARAMS, X), in_float64(jax.grad(two_layers), PARAMS, X), 2e-2)


def test_keep_all_adds_no_checkpoint():
    def fn(params, x):
        return lax.scan(lambda x, _: (x + jax.nn.gelu(x @ params["up"]) @ params["down"], None), x, None, 3)[0].sum()

    for f in (two_layers, fn):
        assert count("remat2", jax.make_jaxpr(jaxamp.amp(f, compute_dtype=jnp.bfloat16, keep="all"))(PARAMS, X)) == 0
        assert count("remat2", jax.make_jaxpr(jaxamp.amp(f, compute_dtype=jnp.bfloat16))(PARAMS, X)) > 0


@pytest.mark.parametrize("keep", ["auto", "matmuls"])
def test_nothing_is_added_to_a_checkpoint_of_the_user(keep):
    def fn(params, x):
        block = jax.checkpoint(lambda x: jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"])
        return jnp.sum(block(block(x)))

    jaxpr = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16, keep=keep))(PARAMS, X)
    assert count("remat2", jaxpr) == 2


def test_a_checkpoint_or_an_effect_elsewhere_leaves_the_islands():
    def with_checkpoint(params, x):
        return two_layers(params, x) + jax.checkpoint(jnp.tanh)(x[0, 0])

    def with_effect(params, x):
        jax.debug.callback(lambda _: None, x[0, 0])
        return two_layers(params, x)

    plain = jaxamp.bytes_kept(two_layers, compute_dtype=jnp.bfloat16)(PARAMS, X)
    for fn in (with_checkpoint, with_effect):
        for keep in ("auto", "matmuls"):
            found = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16, keep=keep)(PARAMS, X)
            assert found.after <= plain.after + 8


def test_a_softmax_in_a_scan_is_kept_once():
    def fn(weights, x):
        layer = lambda x, w: (x + jax.nn.softmax((x @ w) @ x.T / 4.0) @ x, None)
        return jnp.sum(lax.scan(layer, x, weights)[0])

    weights = normal(4, 3, WIDTH, WIDTH, scale=0.1)
    stacked = [
        dtype
        for shape, dtype in kept(jaxamp.amp(fn, compute_dtype=jnp.bfloat16), weights, X)
        if shape == (3, ROWS, ROWS)
    ]
    assert stacked == ["bfloat16"]
    assert_near(
        jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(weights, X), in_float64(jax.grad(fn), weights, X), 4e-2
    )


def test_scans_inside_of_scans_keep_little_too():
    def fn(params, x):
        inner = lambda x, _: (x + jax.nn.gelu(x @ params["up"]) @ params["down"], None)
        outer = lambda x, _: (jax.nn.gelu(lax.scan(inner, x, None, 2)[0] @ params["up"]) @ params["down"], None)
        return jnp.sum(lax.scan(outer, x, None, 2)[0])

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    # of the inner scan's body the carry and two results, of the outer one's the carry and one
    wide = [shape for shape, dtype in kept(amp, PARAMS, X) if dtype == "float32" and shape[-1] == 2 * WIDTH]
    assert wide == []
    forward, whole = (jax.make_jaxpr(f)(PARAMS, X) for f in (amp, jax.grad(amp)))
    assert len(matmul_dtypes(whole)) <= 3 * len(matmul_dtypes(forward))
    expected = in_float64(jax.grad(fn), PARAMS, X)
    found = jax.jit(jax.grad(amp))(PARAMS, X)
    assert_near([found["up"], found["down"]], [expected["up"], expected["down"]], 3e-2)


def test_a_wrong_word_for_keep_is_refused_where_it_is_given():
    for word in ("little", None, np.array(["auto", "all"])):
        with pytest.raises(ValueError, match=r"expected one of 'auto', 'matmuls', 'all'. Write keep="):
            jaxamp.amp(mlp, keep=word)


def test_bytes_kept_leaves_arguments_out_and_computes_nothing():
    def fn(params, x):
        return jnp.sum(jnp.sin(x @ params["up"]))

    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (PARAMS, X))
    found = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(*shapes)
    results = ROWS * 2 * WIDTH
    # float32: the cosine. bfloat16: the input, and the result of the matmul or the cosine of it
    assert found.before == 4 * results
    assert found.after == 2 * ROWS * WIDTH + 2 * results
    assert isinstance(found, jaxamp.BytesKept)


def test_bytes_kept_of_integers_keys_none_and_modules():
    def fn(params, batch, scale=1.0):
        x, labels, key = batch
        drawn = jax.random.normal(key, x.shape)
        return jnp.sum(jnp.tanh((x + drawn) @ params["w"]) * scale) + labels.sum().astype(jnp.float32)

    params = {"w": PARAMS["up"], "steps": jnp.int32(3), "none": None, "name": "a"}
    found = jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(params, (X, jnp.arange(3), jax.random.key(0)), scale=2.0)
    assert 0 < found.after < found.before


def test_bytes_kept_of_results_that_are_no_arrays():
    found = jaxamp.bytes_kept(lambda w, x: (jnp.sin(x @ w), "name", 3), compute_dtype=jnp.bfloat16)(PARAMS["up"], X)
    assert found.after < found.before


def test_bytes_kept_says_what_is_missing():
    with pytest.raises(TypeError, match=r"without an argument; expected those of fn"):
        jaxamp.bytes_kept(mlp)()
    with pytest.raises(TypeError, match=r"bytes_kept got 3"):
        jaxamp.bytes_kept(3)
