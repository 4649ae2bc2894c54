"""`amp` as a user meets it: forms of the call, arguments, caching, tracing, errors."""

import functools
import gc
import inspect
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LOW, WIDE, dtypes_of, equations, matmul_dtypes, matmuls, starts_no_backend
from jax import lax
from jax.experimental import io_callback
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive
from jax.interpreters import mlir

import jaxamp
from jaxamp._plan.classify import Judge
from jaxamp._plan.plan import Planner
from jaxamp._plan.sensitivity import FREE, Value
from jaxamp._transform.amp import check_options

BF16 = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)
W = jnp.linspace(-1.0, 1.0, 16).reshape(4, 4)


class Counted:
    """A function that counts how often it is traced."""

    def __init__(self, fn):
        self.traces = 0

        def counted(*args, **kwargs):
            self.traces += 1
            return fn(*args, **kwargs)

        self.fn = counted


# -- forms


def test_float16_is_the_default():
    assert matmuls(jaxamp.amp(lambda x: x @ x), W) == [("float16", "float16")]


def test_decorator_with_and_without_arguments():
    @jaxamp.amp
    def plain(x):
        """Doc."""
        return x @ x

    @jaxamp.amp(compute_dtype=jnp.bfloat16)
    def with_arguments(x, *, y=None):
        return x @ x

    assert matmuls(plain, W) == [("float16", "float16")]
    assert matmuls(with_arguments, W) == [LOW]
    assert (plain.__name__, plain.__doc__) == ("plain", "Doc.")
    assert list(inspect.signature(with_arguments).parameters) == ["x", "y"]


def test_on_methods():
    class Model(eqx.Module):
        weight: jax.Array

        @jaxamp.amp(compute_dtype=jnp.bfloat16)
        def __call__(self, x):
            return x @ self.weight

    assert matmuls(Model(W), W) == [LOW]
    assert eqx.filter_grad(lambda m, x: m(x).sum())(Model(W), W).weight.dtype == jnp.float32


def test_a_module_is_a_function_with_arrays_in_it():
    model = eqx.nn.MLP(4, 4, 8, 2, key=jax.random.key(0))
    assert matmuls(BF16(model), W[0]) == [LOW] * 3
    grads = eqx.filter_grad(lambda m, x: BF16(m)(x).sum())(model, W[0])
    assert grads.layers[0].weight.dtype == jnp.float32
    assert float(jnp.abs(grads.layers[0].weight).max()) > 0


def test_amp_stop_in_all_its_forms():
    @jaxamp.amp_stop
    def bare(x):
        return x @ x

    @jaxamp.amp_stop()
    def called(x):
        return x @ x

    def context(x):
        with jaxamp.amp_stop():
            return x @ x

    for fn in (bare, called, context, jax.jit(context), jaxamp.amp_stop(jax.jit(lambda x: x @ x))):
        assert matmuls(BF16(lambda x, fn=fn: fn(x) @ x), W) == [WIDE, LOW]


def test_stopped_results_are_not_rounded_by_their_neighbours():
    def fn(x):
        y = x @ x
        with jaxamp.amp_stop():
            z = y * 3.0
        return (y + z) @ x

    jaxpr = jax.make_jaxpr(BF16(fn))(W)
    assert dtypes_of("mul", jaxpr) == dtypes_of("add", jaxpr) == ["float32"]


# -- arguments and results


def test_arguments_and_results_of_any_pytree():
    def fn(params, name, act, *, scale, shape=None):
        assert isinstance(scale, float)
        assert name == "layer"
        y = act(params["w"] @ params["x"]) * scale
        return {"y": y, "name": name, "n": 3, "shape": y.shape, "none": shape, "act": act}

    params = {"w": W, "x": np.ones((4, 2), np.float32), "step": np.int32(3), "none": None}
    out = BF16(fn)(params, "layer", jnp.tanh, scale=2.0)
    assert out["y"].dtype == jnp.float32
    assert {k: v for k, v in out.items() if k != "y"} == {
        "name": "layer",
        "n": 3,
        "shape": (4, 2),
        "none": None,
        "act": jnp.tanh,
    }


def test_results_that_are_no_arrays_go_with_the_shapes_of_the_call():
    fn = BF16(lambda x: (x.shape[0], [x] * x.shape[0]))
    for n in (2, 3, 2):
        count, parts = fn(jnp.ones((n, 2)))
        assert count == len(parts) == n


def test_equal_python_numbers_of_other_types_are_other_calls():
    fn = BF16(lambda x, k: (x, type(k)))
    assert [fn(W, k)[1] for k in (1, 1.0, True, 1)] == [int, float, bool, int]
    sign = BF16(lambda x, k: jnp.signbit(x * k))
    assert [bool(sign(jnp.ones(()), k)) for k in (0.0, -0.0, 0.0)] == [False, True, False]


def test_integers_keys_and_float64_are_never_touched():
    def fn(i, key, x):
        return i @ i, jax.random.fold_in(key, 1), x @ x

    i, key = jnp.arange(4).reshape(2, 2), jax.random.key(0)
    with jax.enable_x64(True):
        args = i, key, jnp.ones((2, 2), jnp.float64)
        assert str(jax.make_jaxpr(BF16(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def test_shapes_among_the_results_are_results():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert BF16(lambda x: (x, shape))(W)[1] is shape


def test_weak_types_survive():
    fn = BF16(lambda x, w: (x * 2, (w @ w).sum() * x))
    out = jax.eval_shape(fn, 3.0, W)
    plain = jax.eval_shape(lambda x, w: (x * 2, (w @ w).sum() * x), 3.0, W)
    assert [o.weak_type for o in out] == [o.weak_type for o in plain] == [True, False]


def test_float0_tangents():
    fn = lambda i, x: x[i] @ x
    primals, tangents = (jnp.arange(2), W), (np.zeros(2, jax.dtypes.float0), W)
    out, tangent = jax.jvp(BF16(fn), primals, tangents)
    assert tangent.dtype == out.dtype == jnp.float32
    grads = jax.grad(lambda i, x: BF16(fn)(i, x).sum(), (0, 1), allow_int=True)(*primals)
    assert (grads[0].dtype, grads[1].dtype) == (jax.dtypes.float0, jnp.float32)


def test_a_closed_over_tracer_is_differentiated():
    grad = jax.jit(jax.grad(lambda w: BF16(lambda x: (x @ w).sum())(W)))(W)
    np.testing.assert_allclose(grad, jnp.broadcast_to(W.sum(0)[:, None], (4, 4)), rtol=1e-2, atol=1e-2)


# -- caching


def test_a_second_call_is_not_traced():
    counted = Counted(lambda w, x, name, scale: jnp.tanh(x @ w) * scale)
    fn = BF16(counted.fn)
    for _ in range(3):
        fn(W, W, "a", 2.0)
        fn(W, W, name="a", scale=2.0)
    assert counted.traces == 2
    fn(W, W, "b", 2.0)
    fn(W, W[:2], "a", 2.0)
    assert counted.traces == 4


def test_a_second_grad_or_vmap_is_not_traced():
    counted = Counted(lambda w, x: (x @ w).sum())
    fn = BF16(counted.fn)
    for _ in range(3):
        jax.grad(fn)(W, W)
    assert counted.traces == 1
    for _ in range(3):
        jax.vmap(fn, (None, 0))(W, W[:, None])
    assert counted.traces == 2


def test_what_changes_a_trace_traces_again():
    counted = Counted(lambda w: w @ w)
    fn = BF16(counted.fn)
    fn(W)
    with jax.default_matmul_precision("float32"):
        assert matmul_dtypes(jax.make_jaxpr(fn)(W)) == [WIDE]
        exact = fn(W)
    assert counted.traces == 3
    np.testing.assert_allclose(exact, W @ W, rtol=1e-6)
    with jax.enable_x64(True):
        fn(W)
    assert counted.traces == 4
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        fn(W)
    assert counted.traces == 5
    fn(W)
    assert counted.traces == 5


def test_a_module_with_new_weights_is_not_traced():
    counted = Counted(lambda m, x: m(x))
    fn = BF16(counted.fn)
    out = [fn(eqx.nn.Linear(4, 4, key=jax.random.key(i)), W[0]) for i in range(3)]
    assert counted.traces == 1
    assert not np.array_equal(out[0], out[1])


def test_an_object_that_changes_between_calls_is_seen():
    class Model:
        def __init__(self):
            self.weight = W

        def __call__(self, x):
            return x @ self.weight

    model = Model()
    through_argument, through_method = BF16(lambda m, x: m(x)), BF16(model.__call__)
    for fn in (lambda: through_argument(model, W), lambda: through_method(W), lambda: BF16(model)(W)):
        before = fn()
        model.weight = model.weight + 1.0
        assert not np.array_equal(before, fn())


def test_an_argument_that_cannot_be_hashed_is_allowed():
    class Unhashable:
        scale = 2.0
        __hash__ = None

    fn = BF16(lambda x, options: x * options.scale)
    np.testing.assert_array_equal(fn(W, Unhashable()), W * 2.0)


def test_under_jit_nothing_is_kept_alive():
    class Token:
        """A static leaf whose life is watched."""

    fn = BF16(lambda x, token: x @ x)

    def watched_call():
        token = Token()
        jax.jit(lambda x: fn(x, token))(W)
        return weakref.ref(token)

    alive = watched_call()
    jax.clear_caches()
    gc.collect()
    assert alive() is None


def test_a_backward_rule_may_use_a_collective_of_a_vmapped_axis():
    @jax.custom_vjp
    def summed(x):
        return lax.psum(x @ x, "i")

    summed.defvjp(lambda x: (summed(x), x), lambda x, g: (lax.psum(g @ x, "i"),))
    loss = lambda f: lambda x: jax.vmap(f, axis_name="i")(x).sum()
    fn, x = (lambda x: summed(x @ x)), jnp.stack([W, W])
    got, want = jax.grad(loss(BF16(fn)))(x), jax.grad(loss(fn))(x)
    np.testing.assert_allclose(got, want, rtol=5e-2, atol=5e-2 * float(jnp.abs(want).max()))


@pytest.mark.slow
def test_no_tracer_leaks():
    @jax.custom_vjp
    def cubed(x):
        return x**3

    cubed.defvjp(lambda x: (x**3, x), lambda x, g: (3.0 * x**2 * g,))

    def loss(w, x):
        y = lax.scan(lambda c, _: (jax.nn.relu(cubed(c @ w)), None), x, length=2)[0]
        return lax.cond(y.sum() > 0, jnp.sum, jnp.mean, y)

    with jax.checking_leaks():
        jax.jit(jax.grad(BF16(loss)))(W, W)
        jax.jit(lambda w, x: BF16(lambda y: loss(w, y))(x))(W, W)
        BF16(loss)(W, W)
        jax.grad(BF16(loss))(W, W)


def test_importing_starts_no_backend():
    assert starts_no_backend("import jaxamp; jaxamp.amp(lambda x: x); jaxamp.default_amp_policy")


def test_planning_shared_bodies_costs_no_more_than_their_number():
    reads = []
    fn = lambda x: jnp.tanh(x @ x)
    for _ in range(12):
        fn = jax.jit(lambda x, fn=fn: fn(fn(x)))

    class Counting(Planner):
        def _wants(self, *args):
            reads.append(1)
            return super()._wants(*args)

    options = check_options(jnp.bfloat16, "default")
    jaxpr = jax.make_jaxpr(fn)(W)
    Counting(Judge(options.lookup, options.compute_dtype)).plan(jaxpr, [Value(FREE, W.dtype)], [True], ())
    assert len(reads) < 100


# -- what survives the rewriting


def test_name_stacks_survive_and_casts_carry_them():
    def fn(x):
        with jax.named_scope("block"):
            return jax.jit(lambda x: x @ x)(x)

    jaxpr = jax.make_jaxpr(BF16(fn))(W)
    (call,) = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "jit"]
    assert str(call.source_info.name_stack) == "block"
    text = jax.jit(BF16(fn)).lower(W).as_text(debug_info=True)
    assert "block" in text


def test_source_lines_survive():
    def fn(x):
        return x @ x  # the line

    line = inspect.getsourcelines(fn)[1] + 1
    frames = jax.make_jaxpr(BF16(fn))(W).eqns[0].source_info.traceback.frames
    assert any(f.file_name == __file__ and f.line_num == line for f in frames)


def test_equation_contexts_survive():
    def fn(x):
        with set_xla_metadata(key="value"):
            return x @ x

    assert 'key = "value"' in jax.jit(BF16(fn)).lower(W).as_text()


def test_effects_happen_once_and_in_order(capfd):
    seen = []

    def fn(x):
        def body(c, i):
            io_callback(lambda i: seen.append(int(i)), None, i, ordered=True)
            return c @ x, None

        return lax.scan(body, x, jnp.arange(4))[0]

    for run in (BF16(fn), jax.jit(BF16(fn))):
        seen.clear()
        jax.block_until_ready(run(W))
        jax.effects_barrier()
        assert seen == [0, 1, 2, 3]
    jax.block_until_ready(BF16(lambda x: (jax.debug.print("sum {}", (x @ x).sum()), x)[1])(jnp.eye(2)))
    jax.effects_barrier()
    assert capfd.readouterr().out == "sum 2.0\n"


def test_shardings_in_types_survive():
    mesh = jax.make_mesh((8,), ("d",), axis_types=(jax.sharding.AxisType.Explicit,))
    with jax.set_mesh(mesh):
        x = jax.device_put(jnp.ones((8, 4)), jax.P("d"))
        out = jax.jit(BF16(lambda x, w: jnp.tanh(x @ w) @ w))(x, W)
        assert out.sharding.spec == jax.P("d", None)
        assert matmuls(BF16(lambda x, w: x @ w), x, W) == [LOW]


def test_jit_parameters_survive():
    inner = jax.jit(lambda x: x @ x, donate_argnums=0, keep_unused=True)
    (eqn,) = [e for e in jax.make_jaxpr(BF16(lambda x: inner(x)))(W).eqns if e.primitive.name == "jit"]
    assert eqn.params["donated_invars"] == (True,)
    assert eqn.params["keep_unused"]


def test_a_jitted_function_called_twice_is_rewritten_once():
    layer = jax.jit(lambda x: jnp.tanh(x @ x))
    jaxpr = jax.make_jaxpr(BF16(lambda x: layer(layer(layer(x @ x))) @ x))(W)
    calls = [e for e in jaxpr.eqns if e.primitive.name == "jit"]
    assert len(calls) == 3
    assert len({id(e.params["jaxpr"]) for e in calls}) == 1


def test_a_primitive_can_be_registered():
    call = Primitive("my_call")
    call.multiple_results = True
    call.def_abstract_eval(lambda *avals, jaxpr: jaxpr.out_avals)
    lowering = lambda *xs, jaxpr: jax.core.eval_jaxpr(getattr(jaxpr, "jaxpr", jaxpr), jaxpr.consts, *xs)
    mlir.register_lowering(call, mlir.lower_fun(lowering, multiple_results=True))
    body = jax.make_jaxpr(lambda x: x @ x)(W)
    fn = lambda x: call.bind(x, jaxpr=body)[0]

    assert matmuls(BF16(fn), W) == [WIDE]
    jaxamp.register_higher_order(call)
    assert matmuls(BF16(fn), W) == [LOW]
    np.testing.assert_allclose(jax.jit(BF16(fn))(W), W @ W, atol=2e-2)


def test_an_unknown_primitive_runs_on_its_own_dtypes():
    mystery = Primitive("mystery")
    mystery.def_abstract_eval(lambda aval: aval)
    jaxpr = jax.make_jaxpr(BF16(lambda x: mystery.bind(x @ x) @ x))(W)
    assert dtypes_of("mystery", jaxpr) == ["float32"]
    assert matmul_dtypes(jaxpr) == [LOW, LOW]


def test_checks_of_jax_pass():
    def loss(w, x):
        def body(c, x):
            return c + jnp.sum(jax.nn.softmax(x @ w)), jax.nn.gelu(x @ w)

        total, ys = lax.scan(jax.checkpoint(body), 0.0, x)
        return total + lax.cond(total > 0, jnp.sum, jnp.max, ys)

    with jax.enable_checks(True):
        for fn in (BF16(loss), jax.grad(BF16(loss)), BF16(jax.grad(loss))):
            jax.jit(fn)(W, jnp.ones((3, 4, 4)))


@pytest.mark.parametrize("policy", jaxamp.presets())
def test_bodies_that_run_as_written_take_low_operands(policy):
    body = lambda h: jnp.exp(h) * 3.0
    for nest in (
        jax.jit,
        jax.checkpoint,
        lambda f: lambda h: lax.cond(True, f, f, h),
        lambda f: lambda h: lax.map(f, h),
    ):
        fn = jaxamp.amp(lambda x: nest(body)(x @ x).sum(), compute_dtype=jnp.bfloat16, amp_policy=policy)  # noqa: B023
        np.testing.assert_allclose(jax.jit(fn)(W), body(W @ W).sum(), rtol=2e-2)


@pytest.mark.parametrize("combine", [jnp.add, jnp.multiply])
def test_gradients_of_what_is_repeated_are_summed_in_float32(combine):
    x = jnp.ones((10001, 4))
    loss = lambda b: jnp.sum(combine(x @ jnp.eye(4), b) @ jnp.eye(4))
    for fn in (jax.grad(BF16(loss)), jax.jit(jax.grad(BF16(loss)))):
        np.testing.assert_array_equal(fn(jnp.ones(4)), 10001.0)


# -- bad input


@pytest.mark.parametrize("dtype", [jnp.int32, "float7", jnp.complex64, jnp.float8_e4m3fn, None])
def test_a_compute_dtype_that_is_no_float_is_refused(dtype):
    with pytest.raises(TypeError, match=r"compute_dtype is .*expected a float.*compute_dtype=jnp.bfloat16"):
        jaxamp.amp(lambda x: x, compute_dtype=dtype)


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"amp got 3, of type int; expected a function.*jaxamp.amp\(loss_fn\)"):
        jaxamp.amp(3)
    with pytest.raises(TypeError, match=r"amp_stop got 3, of type int.*with jaxamp.amp_stop\(\):"):
        jaxamp.amp_stop(3)
    with pytest.raises(TypeError, match=r"unmatched_keys got 3, of type int.*jaxamp.unmatched_keys\(loss_fn\)"):
        jaxamp.unmatched_keys(3)
    with pytest.raises(TypeError, match=r"register_higher_order got 'scan', of type str.*my_call_p"):
        jaxamp.register_higher_order("scan")
    with pytest.raises(
        TypeError, match=r"use_precision got 'bf'; expected a float dtype.*use_precision\(jnp.float32\)"
    ):
        jaxamp.use_precision("bf")


def test_a_registered_parameter_that_is_not_there_is_told():
    call = Primitive("my_other_call")
    call.def_abstract_eval(lambda aval, body: aval)
    jaxamp.register_higher_order(call, "jaxpr")
    with pytest.raises(ValueError, match=r"my_other_call .*parameter 'jaxpr'; expected one of its parameters: body"):
        BF16(lambda x: call.bind(x, body=None))(W)


def test_an_error_of_the_function_comes_through_untouched():
    class Mine(Exception):
        pass

    def fn(x):
        raise Mine("my own words")

    for run in (BF16(fn), jax.jit(BF16(fn))):
        with pytest.raises(Mine) as error:
            run(W)
        assert str(error.value) == "my own words"
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        BF16(lambda x: x @ x[:2])(W)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        BF16(lambda x: x if x.sum() > 0 else -x)(W)


def test_a_failed_call_leaves_nothing_behind():
    fail = [True]

    def fn(x):
        if fail[0]:
            raise ValueError("not yet")
        return x @ x

    amped = BF16(fn)
    with pytest.raises(ValueError, match="not yet"):
        amped(W)
    fail[0] = False
    assert amped(W).shape == (4, 4)


def test_casts_are_made_once():
    jaxpr = jax.make_jaxpr(BF16(lambda x: (lambda e: e @ e @ e)(jnp.exp(x))))(W)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert len(casts) == 1  # the operand; the result comes out of the matmul in float32
