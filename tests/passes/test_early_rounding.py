"""Pools, activations that choose among numbers, and moves, between low operations."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import (
    AMP,
    assert_near,
    assert_same_bits,
    both,
    dtypes_of,
    equations,
    in_float64,
    jaxpr_of,
    kept,
    multiplied,
    names,
    normal,
)
from jax import lax
from plans import plan_of, step

import jaxamp
from jaxamp._inspect.reasons import text_of
from jaxamp._passes.early_rounding import round_early
from jaxamp._passes.streams import hold_streams_low

FILTERS, IMAGE = normal(0, 3, 3, 4, 4, scale=0.2), normal(1, 2, 12, 12, 4)
WITHOUT = functools.partial(AMP, disable_passes=["round_early"])
ENDS = {lax.max: -jnp.inf, lax.min: jnp.inf}


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x, by=lax.max):
    return lax.reduce_window(x, ENDS[by], by, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")


def between(w, x, by=lax.max):
    """As in the stem of a ResNet."""
    x = conv(x, w)
    x = jnp.tanh((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    return jnp.sum(conv(pool(x, by), w) ** 2)


@pytest.mark.parametrize("by", ENDS)
def test_a_pool_between_convolutions_reads_a_low_operand(by):
    fn = lambda w, x: between(w, x, by)
    name = f"reduce_window_{by.__name__}"
    before, after = (step(plan_of(fn, FILTERS, IMAGE, passes=passes), name) for passes in ((), (round_early,)))
    assert not before.outs[0].is_low
    assert [format_.low for format_ in after.reads] == [after.outs[0].is_low] == [True]


@both
def test_its_values_and_gradients(low):
    amp = jaxamp.amp(between, compute_dtype=low)
    assert_near(jax.jit(amp)(FILTERS, IMAGE), in_float64(between, FILTERS, IMAGE), 1e-2)
    assert_near(jax.jit(jax.grad(amp))(FILTERS, IMAGE), in_float64(jax.grad(between), FILTERS, IMAGE), 3e-2)


def test_what_is_pooled_is_the_same_as_without_the_pass():
    """Rounding keeps the order of numbers."""
    without = jaxamp.amp(between, compute_dtype=jnp.bfloat16, disable_passes=["round_early"])
    assert AMP(between)(FILTERS, IMAGE) == without(FILTERS, IMAGE)


READ_IN_FLOAT32 = {
    "returned": lambda w, x: pool(jnp.tanh(conv(x, w))),
    "in a sum": lambda w, x: jnp.sum(jnp.exp(pool(jnp.tanh(conv(x, w))))),
    "no low operation": lambda w, x: pool(x),
}


@pytest.mark.parametrize("fn", READ_IN_FLOAT32.values(), ids=READ_IN_FLOAT32)
def test_a_pool_that_is_read_in_float32_is_left_alone(fn):
    before, after = (plan_of(fn, FILTERS, IMAGE, passes=passes) for passes in ((), (round_early,)))
    assert step(after, "reduce_window_max") == step(before, "reduce_window_max")


def test_nor_is_one_in_a_scope_that_the_policy_keeps_in_float32():
    def fn(w, x):
        with jax.named_scope("pool"):
            x = pool(jnp.exp(conv(x, w)))
        return jnp.sum(conv(x, w))

    plan = plan_of(fn, FILTERS, IMAGE, passes=(round_early,), policy={"*pool": jaxamp.use_original_precision})
    assert not step(plan, "reduce_window_max").outs[0].is_low


def test_the_operand_of_a_pool_is_kept_low():
    wide = [shape for shape, dtype in kept(AMP(between), FILTERS, IMAGE) if dtype == "float32" and shape == IMAGE.shape]
    assert wide == []


# -- activations


def norm(x):
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)


def residual(w, x, activation=jax.nn.relu):
    """As in a ResNet."""
    x = activation(norm(conv(x, w)))
    for _ in range(2):
        x = activation(norm(conv(activation(norm(conv(x, w))), w)) + x)
    return jnp.sum(conv(x, w) ** 2)


ACTIVATIONS = {
    "relu": jax.nn.relu,
    "by jnp": lambda x: jnp.maximum(x, 0),
    "of a function": jax.jit(lambda x: -jnp.minimum(-x, 0.0)),
    "abs": jnp.abs,
}
OTHERS = {"relu6": jax.nn.relu6, "clip": lambda x: jnp.clip(x, -1, 1), "tanh": jnp.tanh, "leaky": jax.nn.leaky_relu}


def wide_masks(jaxpr):
    """The choices of a backward pass that are made in float32."""
    return [
        eqn
        for eqn in equations(jaxpr)
        if eqn.primitive.name in ("select_n", "max", "min", "abs", "sign")
        and eqn.outvars[0].aval.dtype == jnp.float32
        and eqn.outvars[0].aval.shape == IMAGE.shape
    ]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_activations_choose_among_low_numbers(activation):
    fn = functools.partial(residual, activation=activation)
    assert not wide_masks(jax.make_jaxpr(jax.grad(AMP(fn)))(FILTERS, IMAGE))
    assert wide_masks(jax.make_jaxpr(jax.grad(WITHOUT(fn)))(FILTERS, IMAGE))


@pytest.mark.parametrize("activation", OTHERS.values(), ids=OTHERS)
def test_others_are_left_alone(activation):
    fn = functools.partial(residual, activation=activation)
    programs = [str(jax.make_jaxpr(jax.grad(amp(fn)))(FILTERS, IMAGE)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]


@pytest.mark.parametrize("activation", ACTIVATIONS.values(), ids=ACTIVATIONS)
def test_their_values_are_the_same_as_without_the_pass(activation):
    fn = lambda w, x: activation(norm(conv(x, w)))
    read_low = lambda w, x: conv(fn(w, x), w)
    assert_same_bits(AMP(read_low)(FILTERS, IMAGE), WITHOUT(read_low)(FILTERS, IMAGE))


@both
def test_the_gradients_of_a_residual_network(low):
    amp = jaxamp.amp(residual, compute_dtype=low)
    assert_near(jax.jit(jax.grad(amp))(FILTERS, IMAGE), in_float64(jax.grad(residual), FILTERS, IMAGE), 5e-2)


def test_an_activation_that_something_reads_in_float32_is_left_alone():
    def fn(w, x):
        x = jax.nn.relu(norm(conv(x, w)))
        return conv(x, w), x

    programs = [str(jax.make_jaxpr(amp(fn))(FILTERS, IMAGE)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]


def test_the_report_says_so():
    plan = plan_of(residual, FILTERS, IMAGE, passes=(hold_streams_low, round_early))
    (body,) = step(plan, "custom_jvp_call").bodies
    while body.steps[0].bodies:
        (body,) = body.steps[0].bodies
    assert text_of(body.steps[0].reason).startswith("rounded before it")


def test_second_derivatives_and_jvp():
    fn = lambda w, x: residual(w, x) / IMAGE.size
    hvp = lambda w, x: jax.jvp(jax.grad(lambda w: fn(w, x)), (w,), (w,))[1]
    amp_hvp = lambda w, x: jax.jvp(jax.grad(lambda w: AMP(fn)(w, x)), (w,), (w,))[1]
    assert_near(jax.jit(amp_hvp)(FILTERS, IMAGE), in_float64(hvp, FILTERS, IMAGE), 0.2)


def test_the_sum_before_a_relu_is_not_kept():
    """A section ends after the relu: its result is what the next convolution reads."""
    wide = [dtype for shape, dtype in kept(AMP(residual), FILTERS, IMAGE) if shape == IMAGE.shape]
    without = [dtype for shape, dtype in kept(WITHOUT(residual), FILTERS, IMAGE) if shape == IMAGE.shape]
    assert len(wide) <= len(without)
    assert set(wide) == {"bfloat16"}


# -- moves

W = normal(2, 17, 8, scale=0.3)
GRAPH = normal(3, 6, 8), normal(4, 6, 3), np.arange(24, dtype=np.int32) * 5 % 6


def edges(w, rows, points, places, look_up=lambda rows, places: rows[places]):
    """As in message passing: features of both ends, and a distance, which is exact."""
    distance = jnp.exp(-((points[places] - points[places[::-1]]) ** 2).sum(-1, keepdims=True))
    for _ in range(2):
        ends = look_up(rows, places), look_up(rows, places[::-1])
        moved = jax.nn.silu(jnp.concatenate([*ends, distance], -1) @ w)
        rows = rows + jax.ops.segment_sum(moved, places, len(rows)) / 4
    return jnp.mean(rows**2)


LOOK_UPS = {
    "indexed": lambda rows, places: rows[places],
    "taken": lambda rows, places: jnp.take(rows, places, axis=0),
    "taken from the right": lambda rows, places: jnp.take(rows.T, places, axis=1, mode="clip").T,
}
EXACT = lambda x: jnp.exp(-jnp.abs(x))  # a result in float32, which no element-wise operation rounds
MOVES = {
    "transpose": lambda x: x.T,
    "roll": lambda x: jnp.roll(x, 2, axis=0),
    "where": lambda x: jnp.where(jnp.arange(16) < 9, x, 0.0),
    "slice": lambda x: x[:, 3:].T,
    "windows": lambda x: x.reshape(4, 4, 4, 4).swapaxes(1, 2).reshape(16, 16).T,
    "a function": jax.jit(lambda x: jnp.flip(x.reshape(8, 32), 0)),
}


def matmul_after(move):
    def fn(w, x):
        moved = move(EXACT(x))
        return jnp.sum(jnp.sin(moved @ w[: moved.shape[-1]]))

    return fn


@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_features_are_looked_up_low(look_up):
    fn = functools.partial(edges, look_up=look_up)
    jaxpr = jaxpr_of(AMP(fn), W, *GRAPH)
    joined = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "concatenate"]
    assert {str(eqn.outvars[0].aval.dtype) for eqn in joined} == {"bfloat16"}
    assert "with_copy" in names(jaxpr)  # the gradient of a lookup is summed in float32
    assert AMP(fn)(W, *GRAPH) == WITHOUT(fn)(W, *GRAPH)


@both
@pytest.mark.parametrize("look_up", LOOK_UPS.values(), ids=LOOK_UPS)
def test_gradients_of_lookups(low, look_up):
    fn = functools.partial(edges, look_up=look_up)
    found = jax.jit(jax.grad(jaxamp.amp(fn, compute_dtype=low), (0, 1, 2)))
    assert_near(found(W, *GRAPH), in_float64(jax.grad(edges, (0, 1, 2)), W, *GRAPH), 2e-2)


def test_the_gradient_of_a_row_that_many_look_up():
    """In bfloat16, a sum of thousands of equal terms stands still at 256."""

    def fn(w, rows, places):
        far = jnp.exp(-(rows[places, :1] ** 2))
        return jnp.sum(jnp.concatenate([EXACT(rows)[places], far], -1) @ w[:9])

    args = W, GRAPH[0], jnp.zeros(4096, jnp.int32)
    assert_near(jax.jit(jax.grad(AMP(fn), 1))(*args), in_float64(jax.grad(fn, 1), *args), 1e-2)


@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_values_are_rounded_before_they_are_moved(move):
    w, x = normal(4, 32, 8), normal(5, 16, 16)
    fn = matmul_after(move)
    (operand,) = {multiplied(eqn)[0] for eqn in equations(jaxpr_of(AMP(fn), w, x)) if "dot" in eqn.primitive.name}
    assert operand == "bfloat16"
    made = [v.aval for eqn in equations(jaxpr_of(AMP(fn), w, x)) for v in eqn.outvars if eqn.primitive.name in MOVED]
    assert {str(aval.dtype) for aval in made if aval.ndim == 2} == {"bfloat16"}
    assert AMP(fn)(w, x) == WITHOUT(fn)(w, x)
    gradient = jax.jit(jax.grad(AMP(fn), (0, 1)))(w, x)
    assert_near(gradient, jax.jit(jax.grad(WITHOUT(fn), (0, 1)))(w, x), 1e-2)
    assert_near(gradient, in_float64(jax.grad(fn, (0, 1)), w, x), 3e-2)


MOVED = ("concatenate", "transpose", "select_n", "rev")
TABLE = normal(6, 64, 16)
LEFT_ALONE = {
    "a join, as of a rotary embedding": lambda w, x: jnp.sin(jnp.concatenate([EXACT(x), EXACT(x) ** 2]) @ w[:16]),
    "a parameter": lambda w, x: jnp.sin(EXACT(x) @ w[:16].reshape(4, 4, 8).swapaxes(0, 1).reshape(16, 8)),
    "what is read in float32 as well": lambda w, x: jnp.sin((y := EXACT(x).reshape(8, 32)) @ w).sum() + jnp.sum(y**3),
    "a few rows of a table": lambda w, x: jnp.sin(EXACT(TABLE * x[0])[jnp.array([3, 5])] @ w[:16]),
    "a small part": lambda w, x: jnp.sin(jax.lax.dynamic_slice(EXACT(x), (x.shape[0] // 4, 0), (4, 16)) @ w[:16]),
    "many parts of one value": lambda w, x: sum(
        jnp.sin(y[i // 2 :, i:].T @ w[: 16 - i // 2]).sum() for y in [EXACT(x)] for i in range(10)
    ),
}


def test_the_gradient_of_what_a_pad_adds_is_summed_in_float32():
    def fn(value, x, w):
        padded = jnp.pad(EXACT(x), ((20, 30), (0, 0)), constant_values=value)
        return jnp.sum(jnp.sin(padded @ w))

    args = jnp.float32(0.3), normal(5, 16, 16), normal(4, 16, 8)
    found, without, expected = (jax.grad(f, (0, 1))(*args) for f in (AMP(fn), WITHOUT(fn), fn))
    assert abs(found[0] - expected[0]) <= 1.1 * abs(without[0] - expected[0]) + 1e-3 * abs(expected[0])


LOOK_UPS_OUT_OF_RANGE = {"indexed": lambda x: x[PLACES], "taken": lambda x: jnp.take(x, PLACES, axis=0)}
PLACES = GRAPH[-1]


@pytest.mark.parametrize("look_up", LOOK_UPS_OUT_OF_RANGE.values(), ids=LOOK_UPS_OUT_OF_RANGE)
def test_what_is_out_of_range_is_clamped_where_it_is_read(look_up):
    fn = lambda w, x: jnp.mean(look_up(x * x * 3e5) @ w)
    amp, without = (
        jaxamp.amp(fn, compute_dtype=jnp.float16, disable_passes=disabled) for disabled in ([], ["round_early"])
    )
    args = W[:8] / 100, GRAPH[0]
    assert jnp.isfinite(amp(*args))
    assert_same_bits(jax.grad(amp)(*args), jax.grad(without)(*args))


@pytest.mark.parametrize("fn", LEFT_ALONE.values(), ids=LEFT_ALONE)
def test_other_moves_are_left_alone(fn):
    w, x = normal(4, 32, 8), normal(5, 16, 16)
    total = lambda w, x: jnp.sum(fn(w, x))
    programs = [jaxpr_of(amp(total), w, x) for amp in (AMP, WITHOUT)]
    found = [
        [dtypes_of(name, jaxpr) for name in ("slice", "dynamic_slice", "gather", "reshape", "concatenate")]
        for jaxpr in programs
    ]
    assert found[0] == found[1]
    assert any(found[0])


def test_the_gradient_of_a_parameter_that_is_moved_is_float32():
    """The matmul gives it in float32, and it is not rounded on its way."""
    x = normal(5, 16, 16)
    fn = lambda w, x: jnp.sum((jnp.concatenate([EXACT(x), x], -1) @ w.T.reshape(8, 32).T) ** 2)
    backward = jaxpr_of(jax.grad(AMP(fn)), normal(4, 32, 8), x)
    moved = [eqn for eqn in equations(backward) if eqn.primitive.name in ("transpose", "reshape")]
    assert {str(eqn.outvars[0].aval.dtype) for eqn in moved if eqn.outvars[0].aval.size == 256} == {"float32"}


# -- joins and repeats of a U-Net


def u_net(w, x):
    """One level: what the pool reads is joined to what is made of the pool's result, which is made as large again."""
    activation = lambda x: jax.nn.relu((x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5))
    skipped = activation(conv(x, w))
    x = activation(conv(lax.reduce_window(skipped, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID"), w))
    x = jnp.concatenate([jnp.repeat(jnp.repeat(x, 2, 1), 2, 2), skipped], -1)
    return jnp.sum(conv(x, jnp.concatenate([w, w], 2)) ** 2)


def test_what_a_u_net_joins_and_repeats_is_rounded_before():
    jaxpr = jaxpr_of(AMP(u_net), FILTERS, IMAGE)
    (join,) = [
        eqn
        for eqn in equations(jaxpr)
        if eqn.primitive is lax.concatenate_p
        and len(eqn.outvars[0].aval.shape) == 4
        and eqn.outvars[0].aval.shape[0] == 2
    ]
    assert {v.aval.dtype.name for v in join.invars} == {"bfloat16"}
    large = [eqn.outvars[0].aval for eqn in equations(jaxpr) if eqn.primitive is lax.broadcast_in_dim_p]
    assert {x.dtype.name for x in large if x.ndim == 5 and x.size >= IMAGE.size // 2} == {"bfloat16"}
    assert_same_bits(jax.jit(AMP(u_net))(FILTERS, IMAGE), jax.jit(WITHOUT(u_net))(FILTERS, IMAGE))
    assert_near(jax.grad(AMP(u_net))(FILTERS, IMAGE), in_float64(jax.grad(u_net), FILTERS, IMAGE), 5e-2)


def test_what_many_places_share_is_not_rounded_before():
    """The gradient of what is repeated 64 times would be a sum of 64 rounded numbers, rounded again."""
    repeats = lambda n: lambda w, x: jnp.sum(conv(jnp.repeat(jnp.tanh(conv(x, w)) ** 3, n, 1), w) ** 2)
    for n, dtype in ((4, "bfloat16"), (64, "float32")):
        spread = [
            eqn
            for eqn in equations(jaxpr_of(AMP(repeats(n)), FILTERS, IMAGE))
            if eqn.primitive is lax.broadcast_in_dim_p
        ]
        assert {eqn.invars[0].aval.dtype.name for eqn in spread if eqn.outvars[0].aval.ndim == 5} == {dtype}
