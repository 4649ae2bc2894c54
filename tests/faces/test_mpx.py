"""`jaxamp.mpx` beside MPX 0.1.8: the same bits where MPX is right, and one test for each fault of it."""

import importlib.metadata
import re
import types

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import BF16, F16, F32, raises
from side_by_side import FINITE, assert_accepts, assert_same, run

from jaxamp import mpx


@pytest.fixture
def peer():
    module = pytest.importorskip("mpx", reason="MPX is not installed")
    yield module
    module.set_half_precision_datatype(F16)


@pytest.fixture(autouse=True)
def _float16():
    """The half precision is one for the process: each test begins with float16."""
    yield
    mpx.set_half_precision_datatype(F16)


def scaling_of(module, scale=2.0**10, minimum=1.0, **kwargs):
    return module.DynamicLossScaling(jnp.float32(scale), jnp.float32(minimum), **kwargs)


def mixed_tree():
    return {
        "w": jnp.linspace(-2, 2, 5),
        "half": jnp.ones(2, F16),
        "brain": jnp.ones(2, BF16),
        "int": jnp.arange(3),
        "bool": jnp.array(True),
        "key": jax.random.key(0),
        "numpy": np.ones(2, np.float32),
        "none": None,
        "str": "relu",
        "number": 1.5,
    }


# -- the same as MPX


@pytest.mark.parametrize("name", "float16 bfloat16 float32 half_precision full_precision".split())
def test_casts_are_mpxs(peer, name):
    case = lambda m: getattr(m, f"cast_to_{name}")(mixed_tree())
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("dtype", [F16, BF16, F32, "float16", np.dtype("float32")])
def test_cast_tree_is_mpxs(peer, dtype):
    case = lambda m: m.cast_tree(mixed_tree(), dtype)
    assert_same(run(peer, case), run(mpx, case))


def test_cast_tree_leaves_float64_alone_where_the_user_asked_for_it(peer):
    with jax.enable_x64(True):
        case = lambda m: m.cast_to_half_precision([jnp.ones(2, jnp.float64), np.ones(2)])
        assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("half", [F16, BF16])
def test_half_precision_follows_the_setting(peer, half):
    def case(m):
        m.set_half_precision_datatype(half)
        return [m.cast_to_half_precision(mixed_tree()), np.dtype(m.half_precision_datatype()).name]

    assert_same(run(peer, case), run(mpx, case))
    assert mpx.half_precision_datatype() is half


@pytest.mark.parametrize("return_dtype", [None, F32])
def test_cast_function_is_mpxs(peer, return_dtype):
    f = lambda x, n, *, y: (x * 2, y + n, n)
    case = lambda m: m.cast_function(f, F16, return_dtype)(jnp.ones(2), 3, y=jnp.zeros(2))
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("kwargs", [{}, {"return_dtype": F32}, {"return_dtype": BF16}, {"return_dtype": None}])
def test_force_full_precision_is_mpxs(peer, kwargs):
    case = lambda m: m.force_full_precision(jnp.mean, **kwargs)(jnp.full(1000, 300, F16))
    assert_same(run(peer, case), run(mpx, case))


def test_constants_are_mpxs(peer):
    case = lambda m: [m.FLOAT16_MAX, m.BFLOAT16_MAX]
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("tree", [{"a": [1.0, 2], "b": None}, [np.inf], [np.nan], [], jax.random.key(0), jnp.arange(2)])
def test_all_finite_is_mpxs(peer, tree):
    case = lambda m: m.all_finite(tree)
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_is_mpxs(peer, pred):
    a = {"w": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0), "none": None, "act": jax.nn.relu, "s": "a"}
    b = {"w": jnp.full(2, -0.0), "n": jnp.ones(2, int), "key": jax.random.key(1), "none": None, "act": "b", "s": "b"}
    case = lambda m: m.select_tree(jnp.array(pred), a, b)
    assert_same(run(peer, case), run(mpx, case))


def test_scale_and_unscale_of_float32_are_mpxs(peer):
    x = {"w": jnp.array([1.1, -2e-3, jnp.inf, jnp.nan]), "n": 1.5}
    case = lambda m: [scaling_of(m).scale(x["w"]), scaling_of(m).unscale(x), scaling_of(m).unscale(jnp.ones(2, F16))]
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize(
    ("scale", "minimum", "factor"), [(2.0**10, 1.0, 2), (2.0**14, 1.0, 4), (4.0, 2.0, 2), (65504.0, 1.0, 2)]
)
def test_the_scale_moves_as_mpxs_does(peer, period, scale, minimum, factor):
    def case(m):
        scaling = scaling_of(m, scale, minimum, period=period, factor=factor)
        return [(scaling := scaling.adjust(jnp.array(finite))) for finite in FINITE]

    assert_same(run(peer, case), run(mpx, case))


def test_the_ceiling_is_reached_and_kept(peer):
    case = lambda m: [s := scaling_of(m, 2.0**14, period=1)] + [s := s.adjust(jnp.array(True)) for _ in range(4)]
    assert_same(run(peer, case), run(mpx, case))
    assert [float(s.loss_scaling) for s in run(mpx, case)] == [2.0**14, 2.0**15, 65504.0, 65504.0, 65504.0]


def test_the_floor_is_reached_and_kept(peer):
    case = lambda m: [s := scaling_of(m, 4.0, 0.5)] + [s := s.adjust(jnp.array(False)) for _ in range(5)]
    assert_same(run(peer, case), run(mpx, case))
    assert [float(s.loss_scaling) for s in run(mpx, case)] == [4.0, 2.0, 1.0, 0.5, 0.5, 0.5]


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("scale", [2.0**20, 0.25])
def test_a_scale_that_began_beyond_a_bound_is_brought_within(peer, scale, finite):
    case = lambda m: scaling_of(m, scale).adjust(jnp.array(finite))
    assert_same(run(peer, case), run(mpx, case))


def loss(model, x, y, *, weight=1.0):
    """In the precision of its arguments; the loss is half precision too."""
    return jnp.mean((x @ model["w"] + model["b"] - y) ** 2) * weight


def loss_and_aux(model, x, y, **kwargs):
    value = loss(model, x, y, **kwargs)
    return value, {"value": value, "name": "mse", "n": len(x)}


def problem():
    x, y = jax.random.normal(jax.random.key(1), (2, 8, 4))
    return {"w": jnp.eye(4) / 3, "b": jnp.linspace(-1, 1, 4), "steps": jnp.int32(3), "act": jax.nn.relu}, x, y


def all_gradients(m, use_mixed_precision):
    """Each form of each transform, in one program."""

    @eqx.filter_jit
    def program(scaling, model, x, y, weight):
        out = {}
        for fun, has_aux in ((loss, False), (loss_and_aux, True)):
            for name in ("filter_grad", "filter_value_and_grad", "calculate_scaled_grad"):
                grad_fn = getattr(m, name)(fun, scaling, has_aux, use_mixed_precision)
                out[name, has_aux] = grad_fn(model, x, y, weight=weight)
        return out

    out = program(scaling_of(m), *problem(), jnp.float32(0.5))
    for has_aux in (False, True):  # our scaled loss is float32, see below
        value, grads = out["calculate_scaled_grad", has_aux]
        out["calculate_scaled_grad", has_aux] = m.cast_to_float32(value), grads
    return out


@pytest.mark.parametrize("half", [F16, BF16])
def test_gradients_are_mpxs(peer, half):
    def case(m):
        m.set_half_precision_datatype(half)
        return all_gradients(m, use_mixed_precision=True)

    ours = run(mpx, case)
    assert_same(run(peer, case), ours)
    value, _, finite, grads = ours["filter_value_and_grad", False]
    assert (value.dtype, finite.dtype, grads["w"].dtype, grads["steps"], grads["act"]) == (F32, bool, F32, None, None)


def test_gradients_without_mixed_precision_are_mpxs(peer):
    case = lambda m: all_gradients(m, use_mixed_precision=False)
    assert_same(run(peer, case), run(mpx, case))


def test_an_overflow_is_reported_as_mpx_does(peer):
    def case(m):
        scaling, finite, _ = m.filter_grad(lambda w: jnp.sum(w * 300), scaling_of(m))(jnp.ones(2))
        return scaling, finite

    ours = run(mpx, case)
    assert_same(run(peer, case), ours)
    assert (float(ours[0].loss_scaling), bool(ours[1])) == (2.0**9, False)


def test_scaled_is_mpxs(peer):
    case = lambda m: [
        m.scaled(lambda x: x * 2, scaling_of(m))(jnp.ones(2)),
        m.scaled(lambda x: (x * 2, x), scaling_of(m), has_aux=True)(jnp.ones(2)),
    ]
    assert_same(run(peer, case), run(mpx, case))


@pytest.mark.promotes
@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize("optimizer", [optax.sgd(0.1, momentum=0.9), optax.adamw(0.1)], ids=["sgd", "adamw"])
def test_optimizer_update_is_mpxs(peer, optimizer, finite):
    model, x, y = problem()
    del model["steps"]  # Optax has no moments of integers
    grads = eqx.filter_grad(loss)(model, x, y)
    state = optimizer.init(eqx.filter(model, eqx.is_array))
    case = lambda m: m.optimizer_update(model, optimizer, state, grads, jnp.array(finite))
    assert_same(case(peer), case(mpx))


def test_signatures_are_mpxs(peer):
    changed = {"force_full_precision": ["return_dtype"]}  # float16, whatever the half precision is
    assert set(mpx.__all__) == set(peer.__all__)
    for name in peer.__all__:
        assert_accepts(getattr(peer, name), getattr(mpx, name), changed.get(name, ()))
    for name in "scale unscale adjust".split():
        assert_accepts(getattr(peer.DynamicLossScaling, name), getattr(mpx.DynamicLossScaling, name))


# -- faults of MPX


@pytest.mark.parametrize("transform", ["filter_grad", "filter_value_and_grad"])
def test_the_step_that_raises_the_scale_keeps_gradients_and_loss(peer, transform):
    def case(m):
        scaling, out = scaling_of(m, period=2), []
        for _ in range(4):
            result = getattr(m, transform)(lambda w, x: w * x, scaling)(jnp.float32(2), jnp.float32(3))
            scaling = next(x for x in result if isinstance(x, m.DynamicLossScaling))
            out.append([float(x) for x in result if not isinstance(x, m.DynamicLossScaling) and x.dtype == F32])
        return out

    right, halved = ([3.0], [1.5]) if transform == "filter_grad" else ([6.0, 3.0], [3.0, 1.5])
    assert run(peer, case) == [right, halved, right, halved]
    assert run(mpx, case) == [right, right, right, right]


def test_a_float16_loss_comes_back_as_it_is(peer):
    def case(m):
        value, _, finite, grads = m.filter_value_and_grad(lambda w: w * 3, scaling_of(m, 2.0**14))(jnp.float32(2))
        return float(value), bool(finite), float(grads)

    assert run(peer, case) == (np.inf, True, 3.0)
    assert run(mpx, case) == (6.0, True, 3.0)


def test_a_scale_that_is_no_power_of_two_costs_no_precision(peer):
    case = lambda m: m.filter_grad(lambda w, x: w * x, scaling_of(m, 65504.0))(jnp.ones(()), jnp.float32(0.1))[2]
    right = jnp.float16(0.1).astype(F32)
    assert run(peer, case) != right
    assert run(mpx, case) == right


def test_scale_multiplies_in_float32(peer):
    case = lambda m: [
        scaling_of(m, scale).scale(jnp.ones((), dtype)) for dtype in (F16, F32) for scale in (2**15, 2**16)
    ]
    assert [(float(x), x.dtype) for x in run(peer, case)] == [(2**15, F16), (np.inf, F16), (2**15, F32), (np.inf, F32)]
    assert [(float(x), x.dtype) for x in run(mpx, case)] == [(2**15, F32), (2**16, F32), (2**15, F32), (2**16, F32)]


def test_the_scaled_loss_is_float32(peer):
    case = lambda m: m.calculate_scaled_grad(lambda w: w + 4, scaling_of(m, 2.0**15))(jnp.float32(2))
    assert_same((jnp.float16(np.inf), jnp.float16(2.0**15)), run(peer, case))
    assert_same((jnp.float32(6 * 2.0**15), jnp.float16(2.0**15)), run(mpx, case))


@pytest.mark.parametrize("method", ["scale", "unscale"])
def test_scale_leaves_what_is_no_float_alone(peer, method):
    leaves = [jnp.arange(2), 3, jax.random.key(0), "relu", None]
    case = lambda m: getattr(scaling_of(m), method)(leaves[:2])
    assert all(jnp.issubdtype(x.dtype, jnp.floating) for x in run(peer, case))
    for leaf in leaves[2:4]:
        with pytest.raises(TypeError):
            run(peer, lambda m, leaf=leaf: getattr(scaling_of(m), method)(leaf))
    assert_same(leaves, getattr(scaling_of(mpx), method)(leaves))


def test_all_finite_passes_over_what_is_no_number(peer):
    tree = [jnp.ones(2), "relu", jnp.tanh]
    with pytest.raises(TypeError):
        peer.all_finite(tree)
    assert mpx.all_finite(tree)


def test_the_floor_is_positive(peer):
    case = lambda m: [s := scaling_of(m, 2.0**-125, 0.0)] + [s := s.adjust(jnp.array(False)) for _ in range(30)]
    assert float(run(peer, case)[-1].loss_scaling) == 0
    assert float(run(mpx, case)[-1].loss_scaling) == np.finfo(np.float32).tiny


def test_the_scale_is_held_in_float32(peer):
    case = lambda m: m.DynamicLossScaling(jnp.float16(2**15), jnp.float32(1), period=1).adjust(jnp.array(True))
    with pytest.raises(TypeError):
        run(peer, case)
    assert_same(jnp.float32(65504), run(mpx, case).loss_scaling)
    with pytest.raises(AttributeError):
        peer.DynamicLossScaling(2.0**15, 1.0)
    assert_same(np.float32(2**15), mpx.DynamicLossScaling(2**15, 1.0).loss_scaling)


def test_the_half_precision_is_set_by_name(peer):
    def case(m):
        m.set_half_precision_datatype("bfloat16")
        return np.dtype(m.half_precision_datatype()).name

    assert (run(peer, case), run(mpx, case)) == ("float16", "bfloat16")


def test_the_half_precision_is_no_copy(peer):
    def case(m):
        m.set_half_precision_datatype(BF16)
        return np.dtype(m.HALF_PRECISION_DATATYPE).name

    assert (run(peer, case), run(mpx, case)) == ("float16", "bfloat16")


def test_force_full_precision_returns_the_half_precision_in_use(peer):
    def case(m):
        mean = m.force_full_precision(jnp.mean)
        m.set_half_precision_datatype(BF16)
        return mean(jnp.ones(2, BF16)).dtype

    assert (run(peer, case), run(mpx, case)) == (F16, BF16)


@pytest.mark.parametrize("form", [lambda x: {"y": x}, lambda x: [x], jax.tree_util.Partial(jax.tree_util.Partial, min)])
def test_cast_function_casts_results_of_any_structure(peer, form):
    case = lambda m: [x.dtype.name for x in jax.tree.leaves(m.cast_function(form, F32, F16)(jnp.ones(2)))]
    assert (run(peer, case), run(mpx, case)) == (["float32"], ["float16"])


def test_cast_function_casts_a_module(peer):
    case = lambda m: str(jax.make_jaxpr(m.cast_function(eqx.nn.Linear(2, 2, key=jax.random.key(0)), F16))(jnp.ones(2)))
    dot = re.compile(r":(\w+)\[2\] = dot_general")
    assert dot.search(run(peer, case)).group(1) == "f32"
    assert dot.search(run(mpx, case)).group(1) == "f16"


def test_numpys_float64_is_cast(peer):
    case = lambda m: (m.cast_to_half_precision(np.ones(2)) * jnp.ones(2, F16)).dtype
    with jax.numpy_dtype_promotion("standard"):
        assert (case(peer), case(mpx)) == (F32, F16)


def test_select_tree_selects_numbers(peer):
    case = lambda m: float(m.select_tree(jnp.array(False), 1.0, 2.0))
    assert (run(peer, case), run(mpx, case)) == (1.0, 2.0)


def test_select_tree_selects_between_two_dtypes(peer):
    case = lambda m: m.select_tree(jnp.array(False), jnp.ones(2), jnp.zeros(2, F16))
    with pytest.raises(TypeError):
        run(peer, case)
    assert_same(jnp.zeros(2), run(mpx, case))


def test_gradients_without_mixed_precision_are_float32(peer):
    case = lambda m: m.filter_value_and_grad(lambda w: w * 2, scaling_of(m), use_mixed_precision=False)(F16(2))[3].dtype
    assert (run(peer, case), run(mpx, case)) == (F16, F32)


# -- errors


def test_an_unknown_half_precision_is_refused():
    with raises(ValueError, "got 'float17'", "expected float16 or bfloat16", "Write"):
        mpx.set_half_precision_datatype("float17")
    for dtype in (jnp.float32, 3, None, object()):
        with raises(TypeError, "expected float16 or bfloat16", r"Write set_half_precision_datatype\(jnp.bfloat16\)"):
            mpx.set_half_precision_datatype(dtype)


@pytest.mark.parametrize("pred", [jnp.ones(2, bool), jnp.float32(1), 1])
def test_a_condition_that_is_no_bool_is_refused(peer, pred):
    with pytest.raises((AssertionError, AttributeError)):
        peer.select_tree(pred, jnp.ones(2), jnp.ones(2))
    for kind in (TypeError, AssertionError):  # MPX asserts
        with raises(kind, "select_tree got a condition of", "expected boolean scalar", r"Write select_tree\(mpx"):
            mpx.select_tree(pred, jnp.ones(2), jnp.ones(2))
        with raises(kind, "adjust got a condition of", "expected boolean scalar", r"Write loss_scaling.adjust\(mpx"):
            scaling_of(mpx).adjust(pred)
        with raises(kind, "optimizer_update got a condition", "expected boolean scalar", "Write the grads_finite"):
            mpx.optimizer_update({}, optax.sgd(0.1), (), {}, pred)


def test_a_loss_scaling_of_another_type_is_refused():
    for name in "scaled filter_grad filter_value_and_grad calculate_scaled_grad".split():
        with raises(TypeError, f"{name} got 8.0, of type float", "expected a jaxamp.mpx", f"Write mpx.{name}"):
            getattr(mpx, name)(jnp.sin, 8.0)


@pytest.mark.parametrize("name", ["filter_grad", "filter_value_and_grad", "calculate_scaled_grad"])
def test_an_infinite_scale_is_accepted_where_nothing_is_scaled(peer, name):
    case = lambda m: getattr(m, name)(jnp.square, scaling_of(m, np.inf), use_mixed_precision=False)(jnp.float32(3))
    assert_same(run(peer, case), run(mpx, case))
    with raises(ValueError, f"{name} got a loss scaling of inf", "expected a finite one, unless", "Write mpx"):
        getattr(mpx, name)(jnp.square, scaling_of(mpx, np.inf))


def test_an_infinite_scale_moves_as_mpxs_does(peer):
    case = lambda m: [scaling_of(m, np.inf).adjust(jnp.array(finite)) for finite in (True, False)]
    assert_same(run(peer, case), run(mpx, case))


def test_bad_numbers_of_a_loss_scaling_are_refused():
    with raises(TypeError, "loss_scaling='8', of type str", "expected a number", r"Write loss_scaling=2.0\*\*15"):
        mpx.DynamicLossScaling("8", 1.0)
    with raises(TypeError, r"loss_scaling of shape \(2,\)", "expected a scalar", r"Write loss_scaling=2.0\*\*15"):
        mpx.DynamicLossScaling(jnp.ones(2), 1.0)
    for scale in (0.0, jnp.nan):
        with raises(ValueError, "loss_scaling=", "expected a positive number", r"Write loss_scaling=2.0\*\*15"):
            mpx.DynamicLossScaling(jnp.float32(scale), 1.0)
    with raises(
        ValueError, "min_loss_scaling=-1", "expected a non-negative, finite number", "Write min_loss_scaling=1.0"
    ):
        mpx.DynamicLossScaling(8.0, -1)
    with raises(ValueError, "period=0", "expected a positive, finite number", "Write period=2000"):
        mpx.DynamicLossScaling(8.0, 1.0, period=0)


def test_an_unknown_name_is_refused():
    with pytest.raises(AttributeError, match=r"module 'jaxamp.mpx' has no attribute 'FLOAT8_MAX'"):
        mpx.FLOAT8_MAX  # noqa: B018


# -- ours


def test_use_amp_decides_for_each_operation():
    def sum_of_squares(w, x):
        return jnp.sum((x @ w) ** 2)

    w, x = jnp.ones((4, 1024)), jnp.full((2, 4), 2.0)
    value, _, finite, grads = mpx.filter_value_and_grad(sum_of_squares, scaling_of(mpx, 1.0), use_amp=True)(w, x)
    assert (float(value), bool(finite), grads.dtype) == (131_072.0, True, F32)
    assert not np.isfinite(mpx.filter_value_and_grad(sum_of_squares, scaling_of(mpx, 1.0))(w, x)[0])
    grad_fn = mpx.filter_grad(sum_of_squares, scaling_of(mpx), use_amp=True)
    assert re.search(r":f16\[2,1024\] = dot_general", str(jax.make_jaxpr(lambda w, x: grad_fn(w, x)[2])(w, x)))


@pytest.mark.parametrize("has_aux", [False, True])
def test_use_amp_returns_the_same_forms(has_aux):
    fun = loss_and_aux if has_aux else loss
    for transform in (mpx.filter_grad, mpx.filter_value_and_grad):
        casts = eqx.filter_eval_shape(transform(fun, scaling_of(mpx), has_aux), *problem())
        amps = eqx.filter_eval_shape(transform(fun, scaling_of(mpx), has_aux, use_amp=True), *problem())
        assert jax.tree.structure(casts) == jax.tree.structure(amps)


def test_force_full_precision_holds_inside_of_amp():
    w = jnp.ones((2, 2))
    f = lambda w: jnp.sum(mpx.force_full_precision(jnp.matmul, F32)(w, w))
    grad_fn = mpx.filter_value_and_grad(f, scaling_of(mpx), use_amp=True)
    assert "f16" not in str(jax.make_jaxpr(lambda w: grad_fn(w)[0])(w))


def test_the_loss_scaling_survives_transforms():
    scaling = scaling_of(mpx, 8.0, 0.5, period=3)
    for same in (
        jax.jit(lambda s: s)(scaling),
        jax.tree.map(lambda x: x, scaling),
        eqx.filter_jit(lambda s: s)(scaling),
    ):
        assert [float(x) for x in jax.tree.leaves(same)] == [8.0, 0.5, 0.0, 2.0, 3.0]
    jitted = [s := scaling] + [s := jax.jit(lambda s: s.adjust(jnp.array(True)))(s) for _ in range(4)]
    filtered = [s := scaling] + [s := eqx.filter_jit(lambda s: s.adjust(jnp.array(True)))(s) for _ in range(4)]
    for states in (jitted, filtered):
        assert [float(s.loss_scaling) for s in states] == [8.0, 8.0, 8.0, 16.0, 16.0]
    finite = jnp.array([True, True, False])
    last, scales = jax.lax.scan(lambda s, f: (s.adjust(f), s.loss_scaling), eqx.filter(jitted[1], eqx.is_array), finite)
    assert (scales.tolist(), float(last.loss_scaling)) == ([8.0, 8.0, 16.0], 8.0)
    assert repr(jax.tree.map(lambda x: None, scaling)).startswith("DynamicLossScaling")


def test_the_second_step_is_not_traced_anew():
    traces = []

    @eqx.filter_jit
    def step(scaling, w):
        traces.append(w)
        return mpx.filter_grad(jnp.square, scaling)(w)

    scaling = scaling_of(mpx)
    for _ in range(3):
        scaling, _, _ = step(scaling, jnp.float32(2))
    assert len(traces) == 1


# -- MPX's documents


@pytest.mark.promotes
def test_the_papers_first_example_runs(peer):
    """With only the import changed."""

    def train(mpx):
        model, x, y = eqx.nn.Linear(4, 4, key=jax.random.key(0)), *problem()[1:]
        batch = {"x": x, "y": y}
        loss = lambda model, batch: jnp.mean((jax.vmap(model)(batch["x"]) - batch["y"]) ** 2)
        optimizer = optax.adam(0.1)
        optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
        loss_scaling = scaling_of(mpx)

        @eqx.filter_jit
        def step(model, optimizer_state, loss_scaling):
            loss_scaling, grads_finite, grads = mpx.filter_grad(loss, loss_scaling)(model, batch)
            model, optimizer_state = mpx.optimizer_update(model, optimizer, optimizer_state, grads, grads_finite)
            return model, optimizer_state, loss_scaling

        for _ in range(3):
            model, optimizer_state, loss_scaling = step(model, optimizer_state, loss_scaling)
        return model, optimizer_state, loss_scaling

    assert_same(train(peer), train(mpx))


class Dense(eqx.Module):
    linear: eqx.nn.Linear

    def __call__(self, x):
        return self.linear(x)


def einshape(equation, x, h=None):
    """What the README uses of einshape."""
    if equation == "n(hf)->hnf":
        return x.reshape(x.shape[0], h, -1).transpose(1, 0, 2)
    assert equation == "hnf->n(hf)"
    return x.transpose(1, 0, 2).reshape(x.shape[1], -1)


def readme(module):
    """The README's code, run as it is with `mpx` another module."""
    text = importlib.metadata.metadata("mixed-precision-for-jax").get_payload()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 4
    namespace = {
        "mpx": module,
        "eqx": eqx,
        "jax": jax,
        "jnp": jnp,
        "es": types.SimpleNamespace(jax_einshape=einshape),
        "DenseLayer": Dense,
        **dict.fromkeys(("Array", "Float", "PRNGKeyArray", "PyTree"), jax.Array),
        "predict_batch": lambda model, batch, inference, key: jax.vmap(model, (0, None, None))(batch["x"], True, key),
    }
    for block in blocks:
        exec(compile(block, "README.md", "exec"), namespace)
    return types.SimpleNamespace(**namespace)


@pytest.mark.slow
@pytest.mark.promotes
def test_the_readmes_training_step_runs(peer):
    keys = jax.random.split(jax.random.key(0), 4)
    x = jax.random.normal(jax.random.key(1), (8, 3, 4))
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    optimizer = optax.sgd(0.1)

    def train(doc, scaling):
        class Model(doc.MultiHeadAttentionBlock):
            def loss(self, pred, target):
                return jnp.mean((pred - target) ** 2)

            def acc(self, pred, target):
                return jnp.mean(jnp.abs(pred - target) < 1).astype(pred.dtype)

        dense = [Dense(eqx.nn.Linear(4, 4, key=key)) for key in keys]
        model = Model(*dense, 2, eqx.nn.Dropout(0.0), eqx.nn.LayerNorm(4))
        state, losses = optimizer.init(eqx.filter(model, eqx.is_array)), []
        for _ in range(3):
            model, state, scaling, loss = doc.make_step(
                model, optimizer, state, {"x": x, "target": -x}, sharding, sharding, scaling, True, 0.1, keys[0]
            )
            losses.append(loss)
        return losses, jax.tree.leaves(eqx.filter(model, eqx.is_array)), scaling

    doc = readme(mpx)
    assert_same(train(readme(peer), scaling_of(peer)), train(doc, scaling_of(mpx)))
    losses, _, scaling = train(doc, doc.loss_scaling)  # the README's own scale is no power of two
    assert losses[-1] < losses[0]
    assert float(scaling.loss_scaling) == 65504
