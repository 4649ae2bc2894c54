"""What is kept for the backward pass outside of loops: sections, and the `keep` keyword."""

import contextlib
import math

import jax
import jax.experimental
import jax.export
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import assert_near, both, count, equations, in_float64, kept, matmul_dtypes, normal
from jax import lax
from small_networks import PARAMS, ROWS, WIDTH, X, attention, mlp

import jaxamp
from jaxamp._formats import Formats
from jaxamp._passes import recompute
from jaxamp._plan.plan import Setting


def hand_written_gelu(x):
    return 0.5 * x * (1.0 + jnp.tanh(0.7978845608 * (x + 0.044715 * x**3)))


# -- sections


@both
@pytest.mark.parametrize("act", [jax.nn.gelu, hand_written_gelu, jax.nn.mish, lambda x: jnp.exp(-(x**2))])
def test_an_activation_between_matmuls_keeps_nothing_in_float32(low, act):
    fn = lambda params, x: mlp(params, x, act)
    amp = jaxamp.amp(fn, compute_dtype=low)
    wide = [(shape, dtype) for shape, dtype in kept(amp, PARAMS, X) if dtype == "float32" and shape[0] == ROWS]
    assert wide == []
    assert any(dtype == "float32" and shape == (ROWS, 2 * WIDTH) for shape, dtype in kept(fn, PARAMS, X))
    assert_near(jax.jit(jax.grad(amp))(PARAMS, X), in_float64(jax.grad(fn), PARAMS, X), 2e-2)


def sections_of(jaxpr) -> list[set[str]]:
    """The names of the primitives in each section."""
    found = (eqn.params["jaxpr"] for eqn in equations(jaxpr) if eqn.primitive.name == "remat2")
    return [{eqn.primitive.name for eqn in equations(body)} for body in found]


def test_no_matmul_and_no_random_draw_is_computed_again():
    def fn(params, x, key):
        h = jax.nn.gelu(x @ params["up"] + params["bias"])
        h = jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h / 0.5, 0.0)
        return jnp.sum(jax.nn.gelu(h) @ params["down"])

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    forward, whole = (jax.make_jaxpr(f)(PARAMS, X, jax.random.key(0)) for f in (amp, jax.grad(amp)))
    assert count("random_bits", whole) == count("random_bits", forward) == 1
    assert len(matmul_dtypes(whole)) == 2 + 3  # two forward, two for `down`, one for `up`


def test_linear_work_has_nothing_to_compute_again():
    def fn(params, x):
        return jnp.sum((-(x @ params["up"]) * 2.0 + params["bias"]) @ params["down"])

    assert count("remat2", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)) == 0


DERIVATIVES = {
    "laplacian": lambda f: lambda x: sum(jax.jvp(jax.grad(f), (x,), (e,))[1] @ e for e in jnp.eye(len(x))),
    "hessian": lambda f: lambda x: jnp.trace(jax.hessian(f)(x)),
}


@pytest.mark.parametrize(
    ("derivative", "act"),
    [("laplacian", jnp.tanh), ("laplacian", jax.nn.gelu), ("hessian", jnp.tanh)],
)
def test_nothing_is_cut_inside_of_a_derivative_of_second_order(derivative, act):
    """All that the inner forward pass hands to the inner backward pass would be kept as well."""

    def fn(weights, x):
        def value(x):
            for w in weights[:-1]:
                x = act(x @ w)
            return (x @ weights[-1])[0]

        return jnp.mean(jax.vmap(DERIVATIVES[derivative](value))(x) ** 2)

    weights = [normal(i, *size, scale=0.2) for i, size in enumerate([(2, 32), (32, 32), (32, 32), (32, 1)])]
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert count("remat2", jax.make_jaxpr(amp)(weights, normal(9, 64, 2))) == 0
    found = jax.jit(jax.grad(amp))(weights, normal(9, 64, 2))
    assert_near(found, in_float64(jax.grad(fn), weights, normal(9, 64, 2)), 5e-2)


def test_nor_has_a_program_without_low_values():
    fn = lambda params, x: jnp.sum(jnp.tanh(x**3) * params["up"][0, 0])
    assert count("remat2", jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)) == 0


@pytest.mark.parametrize("act", [jax.nn.relu, jax.nn.relu6, lambda x: jnp.where(x > 0, x, 0.1 * x), jnp.abs])
def test_a_comparison_is_made_again_from_the_result_of_the_matmul(act):
    amp = jaxamp.amp(lambda params, x: mlp(params, x, act), compute_dtype=jnp.bfloat16, disable_passes=["round_once"])
    assert kept(amp, PARAMS, X) == [((ROWS, 2 * WIDTH), "bfloat16")]


def with_one_matmul(params, x, heads=2):
    """A transformer's attention, with one matmul for queries, keys and values."""
    x = jnp.tanh(x @ params["up"]) @ params["down"]
    mixed = jnp.tanh(x) @ params["mix"] + params["offset"]
    queries, keys, values = (part.reshape(ROWS, heads, -1).swapaxes(0, 1) for part in jnp.split(mixed, 3, -1))
    shares = jax.nn.softmax(queries @ keys.swapaxes(1, 2))
    return x + (shares @ values).swapaxes(0, 1).reshape(x.shape) @ params["out"]


def gated(params, x):
    x = jnp.tanh(x @ params["up"]) @ params["down"]
    a, b, c = jnp.split(jnp.tanh(x) @ params["mix"] + params["offset"], 3, -1)
    return x + (jnp.sin(a) * jax.nn.sigmoid(b) * c) @ params["out"]


HEADS = 2, ROWS, WIDTH // 2
MIX = {
    "mix": normal(20, WIDTH, 3 * WIDTH, scale=0.1),
    "offset": normal(21, 3 * WIDTH, scale=0.1),
    "out": normal(22, WIDTH, WIDTH),
}


@pytest.mark.parametrize(
    ("layer", "expected"),
    [(with_one_matmul, [HEADS, HEADS[:1] + HEADS[:0:-1], HEADS]), (gated, [])],
    ids=["multiplied", "read one by one"],
)
def test_results_of_matmuls_are_kept_as_other_matmuls_read_them(layer, expected):
    params, loss = PARAMS | MIX, lambda *args: jnp.sum(layer(*args) ** 2)
    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    marked = [eqn for eqn in equations(jax.make_jaxpr(amp)(params, X)) if eqn.primitive.name == "kept"]
    shapes = [eqn.invars[0].aval.shape for eqn in marked]
    assert sorted(s for s in shapes if math.prod(s) == ROWS * WIDTH and len(s) == 3) == sorted(expected)
    assert_near(jax.jit(jax.grad(amp))(params, X), in_float64(jax.grad(loss), params, X), 5e-2)


def residual(params, x):
    x = jnp.tanh(x @ params["up"]) @ params["down"]
    for _ in range(3):
        x = x + jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.sum(x**2)


def test_a_program_is_cut_where_the_fewest_bytes_are_alive():
    jaxpr = jax.make_jaxpr(jaxamp.amp(residual, compute_dtype=jnp.bfloat16))(PARAMS, X)
    calls = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    assert [eqn.params["name"] for eqn in calls] == ["section"] * 4
    assert all([v.aval.shape for v in call.outvars] == [X.shape] for call in calls[:3])
    assert calls[1].params["jaxpr"] is calls[2].params["jaxpr"]  # JAX differentiates it once
    whole = jaxamp.amp(residual, compute_dtype=jnp.bfloat16, keep="matmuls")
    assert len(sections_of(jax.make_jaxpr(whole)(PARAMS, X))) == 1


@pytest.mark.parametrize("separate", [True, False])
def test_the_first_layer_after_an_embedding_is_cut_like_the_others(separate):
    def fn(params, ids):
        x = params["table"][ids]
        for w in params["layers"]:
            h = x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)
            q, k, v = [h @ w[i] for i in range(3)] if separate else jnp.split(h @ jnp.concatenate(w, 1), 3, -1)
            x = x + jaxamp.dot_product_attention(*(a.reshape(2, 16, 4, 8) for a in (q, k, v))).reshape(x.shape)
            x = x + jax.nn.gelu(x @ w[0]) @ w[1]
        return jnp.mean(x**2)

    params = {"table": normal(0, 50, 32), "layers": [[normal(3 * n + i, 32, 32) for i in range(3)] for n in range(4)]}
    ids = jnp.arange(32).reshape(2, 16)
    calls = jax.make_jaxpr(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(params, ids).eqns
    calls = [eqn for eqn in calls if eqn.primitive.name != "low_copy"]
    assert {eqn.params.get("name") for eqn in calls} == {"section"}
    assert [len(eqn.outvars) for eqn in calls] == [1] * len(calls)


@pytest.mark.parametrize(
    "wrap",
    [
        jax.jit,
        lambda fn: lambda p, x: lax.cond(x[0, 0] > 9, lambda p, x: 0.0, fn, p, x),
        lambda fn: lambda p, x: lax.scan(lambda c, _: (c + jax.checkpoint(jnp.sin)(c) + fn(p, x), 0), 0.0, length=2)[0],
    ],
)
def test_functions_inside_have_sections_too(wrap):
    amp = jaxamp.amp(wrap(residual), compute_dtype=jnp.bfloat16)
    sections = sections_of(jax.make_jaxpr(amp)(PARAMS, X))
    assert sum(any(name.endswith("tanh") for name in names) for names in sections) == 4
    bare = jaxamp.bytes_kept(residual, compute_dtype=jnp.bfloat16)(PARAMS, X)
    wrapped = jaxamp.bytes_kept(wrap(residual), compute_dtype=jnp.bfloat16)(PARAMS, X)
    assert wrapped.after / wrapped.before < 2 * bare.after / bare.before


def jitted_layers(layer):
    def fn(params, x):
        for _ in range(4):
            x = layer(params, x)
        return x.sum()

    return fn


LAYERS = {
    "one matmul": jax.jit(lambda p, x: jax.nn.gelu(x @ p["up"]) + x @ p["up"]),
    "two matmuls": jax.jit(lambda p, x: jax.nn.gelu(jax.nn.gelu(x @ p["up"]) @ p["up"])),
    "a dense layer": lambda p, x: jax.nn.gelu(jax.jit(lambda p, x: x @ p["up"] + p["bias"])(p, x)),
}


@pytest.mark.parametrize("keep", ["auto", "matmuls"])
@pytest.mark.parametrize("layer", LAYERS.values(), ids=LAYERS)
def test_jitted_layers_keep_little_too(layer, keep):
    params = {"up": normal(0, 32, 32, scale=0.2), "bias": jnp.zeros(32)}
    found = jaxamp.bytes_kept(jitted_layers(layer), compute_dtype=jnp.bfloat16, keep=keep)(params, normal(1, 64, 32))
    assert found.after <= 0.35 * found.before


def test_without_cuts_loops_are_in_the_section():
    def fn(params, x):
        step = lambda h, _: (jax.nn.softmax(jax.nn.gelu(h @ params["up"]) @ params["down"]), None)
        return lax.scan(step, jnp.tanh(x @ params["up"]) @ params["down"], length=3)[0].sum()

    sizes = [
        jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16, keep=keep)(PARAMS, X).after for keep in ("matmuls", "auto")
    ]
    assert sizes[0] < sizes[1]


def test_a_mesh_does_not_split_what_is_mapped():
    """`vmap` repeats a bias under the mesh of the arguments, and leaves the other equations without one."""

    def fn(params, x):
        one = lambda row: jax.nn.silu(row @ params["up"] + params["bias"]) @ params["down"]
        return jnp.sum(jax.vmap(one)(x))

    def sections(sharding):
        shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), (PARAMS, X))
        amp = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))
        return sections_of(jax.jit(amp).trace(*shapes).jaxpr)

    mesh = jax.make_mesh((1,), ("data",), (jax.sharding.AxisType.Auto,))
    assert len(sections(None)) == 1
    assert sections(jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())) == sections(None)


def test_a_forward_rule_with_effects():
    seen = []

    @jax.custom_vjp
    def fn(x):
        return jnp.sin(x)

    def forward(x):
        jax.experimental.io_callback(lambda y: seen.append(1), None, x.sum())
        return jnp.sin(x), x

    fn.defvjp(forward, lambda x, ct: (ct * jnp.cos(x),))
    loss = lambda params, x: jnp.sum(jnp.tanh(fn(jnp.tanh(x @ params["up"])) @ params["down"]))
    jax.block_until_ready(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))(PARAMS, X))
    jax.effects_barrier()
    assert len(seen) == 1


def test_functions_that_call_one_another_twice():
    fn = lambda x: jnp.tanh(x @ PARAMS["up"] @ PARAMS["down"])
    for _ in range(40):
        fn = jax.jit(lambda x, inner=fn: inner(inner(x)))
    jaxpr = jax.make_jaxpr(fn)(X)
    setting = Setting(Formats(jnp.dtype(jnp.bfloat16)))
    assert recompute(jaxpr, setting).eqns  # in time


def test_complex_values_are_in_no_section():
    def fn(params, x):
        h = jnp.fft.rfft(jnp.tanh(x @ params["up"]))
        return jnp.sum(jnp.abs(h) ** 2) + jnp.sum(jnp.tanh(h.real[:, :WIDTH] @ params["up"]))

    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert not any("fft" in names for names in sections_of(jax.make_jaxpr(amp)(PARAMS, X)))
    looped = lambda params, x: lax.scan(lambda c, _: (c + fn(params, x), None), 0.0, length=2)[0]
    for f in (fn, looped):
        found = jax.jit(jax.grad(jaxamp.amp(f, compute_dtype=jnp.bfloat16)))(PARAMS, X)
        assert_near(found["up"], in_float64(jax.grad(f), PARAMS, X)["up"], 2e-2)


def test_a_constant_made_in_a_section_can_be_read_outside():
    def fn(params, x):
        h = x @ params["up"]
        ones = jnp.full(h.shape, 1.5)
        return jnp.sum((hand_written_gelu(h) * ones + ones) @ params["down"]) + jnp.sum(jnp.sin(ones))

    expected = in_float64(jax.grad(fn), PARAMS, X)
    del expected["bias"]
    found = jax.grad(jaxamp.amp(fn, compute_dtype=jnp.bfloat16))(PARAMS, X)
    assert not np.any(found.pop("bias"))
    assert_near(found, expected, 2e-2)


def test_what_comes_out_of_a_section_may_be_read_in_two_dtypes():
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


def test_transforms_go_through_a_section():
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


def rounded_cotangents(fn, *args) -> list[str]:
    """The dtypes that cotangents are rounded to and held in."""
    found = (eqn for eqn in equations(jax.make_jaxpr(fn)(*args)) if eqn.primitive.name == "materialized")
    return [str(eqn.params["dtype"]) for eqn in found if eqn.params["of_value"]]


@both
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit, jax.checkpoint, lambda fn: jax.vmap(fn, (None, None, 0))])
def test_a_bias_in_a_section_shares_the_cotangent_that_the_matmul_reads_if_that_is_differentiated(low, wrap):
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
def test_a_bias_in_a_section_keeps_the_range_of_float32(pinned):
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


# -- the keyword


def two_layers(params, x):
    for _ in range(2):
        x = x + attention(params, x) * 1e-3 + jax.nn.gelu(x @ params["up"] + params["bias"]) @ params["down"]
    return jnp.sum(x**2)


def test_keep_matmuls_keeps_results_of_matmuls_of_the_whole_function():
    sizes = {k: jaxamp.bytes_kept(two_layers, compute_dtype=jnp.bfloat16, keep=k)(PARAMS, X) for k in ("auto", "all")}
    least = jaxamp.bytes_kept(two_layers, compute_dtype=jnp.bfloat16, keep="matmuls")(PARAMS, X)
    assert least.before == sizes["auto"].before == sizes["all"].before
    assert least.after < sizes["auto"].after
    assert sizes["auto"].after < 0.5 * sizes["all"].after
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


def test_a_checkpoint_or_an_effect_elsewhere_leaves_the_sections():
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


@pytest.mark.slow
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


# -- what lies between element-wise work: random draws, gathers, labels

DROPOUTS = {
    "where": lambda p, keep: jnp.where(keep, p / 0.9, 0.0),
    "where, then scaled": lambda p, keep: jnp.where(keep, p, 0.0) / 0.9,
    "a product": lambda p, keep: p * keep.astype(p.dtype) / 0.9,
    "a scaled mask": lambda p, keep: p * (keep.astype(p.dtype) / 0.9),
    "select": lambda p, keep: lax.select(keep, p / 0.9, jnp.zeros_like(p)),
}


@both
@pytest.mark.parametrize("drop", DROPOUTS.values(), ids=DROPOUTS)
def test_a_softmax_with_dropout_keeps_one_low_map_and_the_bits_of_the_mask(low, drop):
    tokens, width = 24, 8

    def fn(w, x, key):
        q, k, v = x @ w["q"], x @ w["k"], x @ w["v"]
        p = jax.nn.softmax(q @ k.T / math.sqrt(width))
        p = drop(p, jax.random.bernoulli(key, np.float32(0.9), p.shape))
        return jnp.sum(jnp.tanh(jnp.einsum("qk,kd->qd", p, v) @ w["o"]) ** 2)

    w = {name: normal(i, width, width, scale=0.3) for i, name in enumerate("qkvo")}
    x, key = normal(9, tokens, width), jax.random.key(0)
    amp = jaxamp.amp(fn, compute_dtype=low)
    maps = [dtype for shape, dtype in kept(amp, w, x, key) if shape == (tokens, tokens)]
    assert sorted(maps) == sorted([jnp.dtype(low).name, "bool"])
    assert_near(jax.jit(jax.grad(amp))(w, x, key), in_float64(jax.grad(fn), w, x, key), 5e-2)


def smooth(labels, classes):
    return optax.smooth_labels(jax.nn.one_hot(labels, classes), 0.1)


LOSSES = {
    "integer labels": lambda logits, y: optax.softmax_cross_entropy_with_integer_labels(logits, y),
    "one-hot labels": lambda logits, y: optax.softmax_cross_entropy(logits, jax.nn.one_hot(y, logits.shape[-1])),
    "smooth labels": lambda logits, y: optax.softmax_cross_entropy(logits, smooth(y, logits.shape[-1])),
    "a gathered log-softmax": lambda logits, y: -jnp.take_along_axis(jax.nn.log_softmax(logits), y[:, None], -1),
}


@both
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_a_cross_entropy_keeps_low_logits(low, loss, bias):
    rows, width, classes = 32, 16, 128

    def fn(w, x, y):
        logits = x @ w["w"] + w["b"] if bias else x @ w["w"]
        return jnp.mean(loss(logits, y))

    w = {"w": normal(0, width, classes, scale=0.3), "b": jnp.zeros(classes)}
    x, y = normal(1, rows, width), jnp.arange(rows)
    amp = jaxamp.amp(fn, compute_dtype=low)
    large = [dtype for shape, dtype in kept(amp, w, x, y) if math.prod(shape) >= rows * classes]
    assert "float32" not in large
    assert large.count(jnp.dtype(low).name) == 1
    found, expected = jax.jit(jax.grad(amp))(w, x, y), in_float64(jax.grad(fn), w, x, y)
    assert_near(found if bias else found["w"], expected if bias else expected["w"], 2e-2)


def test_chains_of_many_sums_between_matmuls_are_differentiated():
    def loss(w):
        h = w @ w
        for _ in range(300):
            h = h + w[0]
        return jnp.sum(jax.nn.gelu(h @ w))

    assert jax.eval_shape(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)), normal(0, 8, 8)).shape == (8, 8)


# -- activations between convolutions, and low values that several sections read


def convolutions(params, x, act):
    conv = lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
    for _ in range(3):
        x = act(conv(x, params["filters"]) + params["bias"])
    return jnp.sum(x**2)


FILTERS = {"filters": normal(30, 3, 3, 4, 4, scale=0.2), "bias": normal(31, 4)}
IMAGE = normal(32, 2, 8, 8, 4)


@pytest.mark.parametrize(
    ("act", "results"),
    [(jax.nn.gelu, 2), (jax.nn.elu, 2), (jnp.tanh, 2), (jax.nn.silu, 0), (jax.nn.relu, 2)],
    ids=["gelu", "elu", "tanh", "silu", "relu"],
)
def test_costly_activations_between_convolutions_are_kept(act, results):
    """Those that are computed in float32. A tanh and a relu are kept in place of what they read."""
    amp = jaxamp.amp(lambda *args: convolutions(*args, act), compute_dtype=jnp.bfloat16)
    jaxpr = jax.make_jaxpr(amp)(FILTERS, IMAGE)
    marked = [eqn.invars[0].aval for eqn in equations(jaxpr) if eqn.primitive.name == "kept"]
    by_themselves = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in ("kept_tanh", "kept_relu")]
    assert {x.dtype.name for x in marked} <= {"bfloat16"}
    assert len(marked) + len(by_themselves) >= results
    assert bool(results) or not marked
    found = jax.jit(jax.grad(amp))(FILTERS, IMAGE)
    assert_near(found, in_float64(jax.grad(lambda *args: convolutions(*args, act)), FILTERS, IMAGE), 5e-2)


def test_with_matmuls_alone_no_activation_is_kept():
    for keep, marked in (("auto", 2), ("matmuls", 0)):
        amp = jaxamp.amp(lambda *a: convolutions(*a, jax.nn.gelu), compute_dtype=jnp.bfloat16, keep=keep)
        assert count("kept", jax.make_jaxpr(amp)(FILTERS, IMAGE)) == marked


def test_sections_hand_on_low_values_and_not_wide_copies_of_them():
    """As in a DenseNet: each layer normalises what all layers before it have made."""

    def fn(params, x):
        parts = [x @ params["first"]]
        for w in params["layers"]:
            joined = jnp.concatenate(parts, -1)
            joined = jax.nn.relu(joined * lax.rsqrt(jnp.mean(joined**2, 0) + 1e-5))
            parts.append(jnp.tanh(joined @ w[: joined.shape[-1]]) @ w[:WIDTH])
        return jnp.sum(jnp.sin(jnp.concatenate(parts, -1)) ** 2)

    params = {
        "first": normal(40, WIDTH, WIDTH),
        "layers": [normal(41 + i, 4 * WIDTH, WIDTH, scale=0.2) for i in range(3)],
    }
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16)
    assert ((ROWS, WIDTH), "float32") not in kept(amp, params, X)
    assert_near(jax.jit(jax.grad(amp))(params, X), in_float64(jax.grad(fn), params, X), 5e-2)


def test_what_is_repeated_is_repeated_again_and_not_kept():
    def fn(w, x):
        few = jnp.exp(x @ w)
        return jnp.sum(jnp.sin(jnp.tile(few, (1, 4)) * jnp.repeat(few, 4, axis=-1)))

    amp, w = jaxamp.amp(fn, compute_dtype=jnp.bfloat16), normal(49, WIDTH, WIDTH, scale=0.05)
    assert all(shape != (ROWS, 4 * WIDTH) for shape, _ in kept(amp, w, X))
    assert_near(jax.jit(jax.grad(amp))(w, X), in_float64(jax.grad(fn), w, X), 2e-2)


def skipped(params, x):
    """A low value that two sections read in float32, as the state space of a Mamba reads what it adds in the end."""
    first, second, narrow, back, last, gates = params
    h = x[:, :3] @ first
    few = jnp.tanh(jnp.tanh((h * jnp.exp(gates)) @ second) @ narrow) @ back
    return jnp.sum(jnp.sin((few + jnp.tile(h * jax.nn.softplus(gates), (1, 4))) @ last) ** 2)


SKIPPED = (
    normal(50, 3, WIDTH, scale=0.5),
    normal(55, WIDTH, WIDTH, scale=0.3),
    normal(51, WIDTH, 2, scale=0.3),
    normal(52, 2, 4 * WIDTH, scale=0.3),
    normal(53, 4 * WIDTH, 5, scale=0.2),
    normal(54, WIDTH, scale=0.3),
)


def test_of_a_value_that_two_sections_widen_only_the_low_one_is_kept():
    amp = jaxamp.amp(skipped, compute_dtype=jnp.bfloat16)
    assert count("widened", jax.make_jaxpr(amp)(SKIPPED, X)) == 1
    held = kept(amp, SKIPPED, X)
    assert ((ROWS, WIDTH), "bfloat16") in held
    assert ((ROWS, WIDTH), "float32") not in held
    assert_near(jax.jit(jax.grad(amp))(SKIPPED, X), in_float64(jax.grad(skipped), SKIPPED, X), 5e-2)


def test_second_derivatives_go_through_values_that_two_sections_widen():
    hessian = lambda fn: lambda params, x: jax.jvp(lambda p: jax.grad(fn)(p, x), (params,), (params,))[1]
    amp = jaxamp.amp(skipped, compute_dtype=jnp.bfloat16)
    assert_near(jax.jit(hessian(amp))(SKIPPED, X), in_float64(hessian(skipped), SKIPPED, X), 1e-1)
