"""`amp` as a user meets it: forms of the call, arguments, caching, tracing, errors."""

import gc
import inspect
import weakref

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, LOW, WIDE, W, dtypes_of, equations, matmul_dtypes, matmuls
from jax import lax

import jaxamp


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
    assert matmuls(AMP(model), W[0]) == [LOW] * 3
    grads = eqx.filter_grad(lambda m, x: AMP(m)(x).sum())(model, W[0])
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
        assert matmuls(AMP(lambda x, fn=fn: fn(x) @ x), W) == [WIDE, LOW]


def test_stopped_results_are_not_rounded_by_their_neighbours():
    def fn(x):
        y = x @ x
        with jaxamp.amp_stop():
            z = y * 3.0
        return (y + z) @ x

    jaxpr = jax.make_jaxpr(AMP(fn))(W)
    assert dtypes_of("mul", jaxpr) == dtypes_of("add", jaxpr) == ["float32"]


# -- arguments and results


def test_arguments_and_results_of_any_pytree():
    def fn(params, name, act, *, scale, shape=None):
        assert isinstance(scale, float)
        assert name == "layer"
        y = act(params["w"] @ params["x"]) * scale
        return {"y": y, "name": name, "n": 3, "shape": y.shape, "none": shape, "act": act}

    params = {"w": W, "x": np.ones((4, 2), np.float32), "step": np.int32(3), "none": None}
    out = AMP(fn)(params, "layer", jnp.tanh, scale=2.0)
    assert out["y"].dtype == jnp.float32
    assert {k: v for k, v in out.items() if k != "y"} == {
        "name": "layer",
        "n": 3,
        "shape": (4, 2),
        "none": None,
        "act": jnp.tanh,
    }


def test_results_that_are_no_arrays_go_with_the_shapes_of_the_call():
    fn = AMP(lambda x: (x.shape[0], [x] * x.shape[0]))
    for n in (2, 3, 2):
        count, parts = fn(jnp.ones((n, 2)))
        assert count == len(parts) == n


def test_equal_python_numbers_of_other_types_are_other_calls():
    fn = AMP(lambda x, k: (x, type(k)))
    assert [fn(W, k)[1] for k in (1, 1.0, True, 1)] == [int, float, bool, int]
    sign = AMP(lambda x, k: jnp.signbit(x * k))
    assert [bool(sign(jnp.ones(()), k)) for k in (0.0, -0.0, 0.0)] == [False, True, False]


def test_integers_keys_and_float64_are_never_touched():
    def fn(i, key, x):
        return i @ i, jax.random.fold_in(key, 1), x @ x

    i, key = jnp.arange(4).reshape(2, 2), jax.random.key(0)
    with jax.enable_x64(True):
        args = i, key, jnp.ones((2, 2), jnp.float64)
        assert str(jax.make_jaxpr(AMP(fn))(*args)) == str(jax.make_jaxpr(fn)(*args))


def test_shapes_among_the_results_are_results():
    shape = jax.ShapeDtypeStruct((2,), jnp.float32)
    assert AMP(lambda x: (x, shape))(W)[1] is shape


def test_weak_types_survive():
    fn = AMP(lambda x, w: (x * 2, (w @ w).sum() * x))
    out = jax.eval_shape(fn, 3.0, W)
    plain = jax.eval_shape(lambda x, w: (x * 2, (w @ w).sum() * x), 3.0, W)
    assert [o.weak_type for o in out] == [o.weak_type for o in plain] == [True, False]


def test_float0_tangents():
    fn = lambda i, x: x[i] @ x
    primals, tangents = (jnp.arange(2), W), (np.zeros(2, jax.dtypes.float0), W)
    out, tangent = jax.jvp(AMP(fn), primals, tangents)
    assert tangent.dtype == out.dtype == jnp.float32
    grads = jax.grad(lambda i, x: AMP(fn)(i, x).sum(), (0, 1), allow_int=True)(*primals)
    assert (grads[0].dtype, grads[1].dtype) == (jax.dtypes.float0, jnp.float32)


def test_a_closed_over_tracer_is_differentiated():
    grad = jax.jit(jax.grad(lambda w: AMP(lambda x: (x @ w).sum())(W)))(W)
    np.testing.assert_allclose(grad, jnp.broadcast_to(W.sum(0)[:, None], (4, 4)), rtol=1e-2, atol=1e-2)


# -- caching


def test_a_second_call_is_not_traced():
    counted = Counted(lambda w, x, name, scale: jnp.tanh(x @ w) * scale)
    fn = AMP(counted.fn)
    for _ in range(3):
        fn(W, W, "a", 2.0)
        fn(W, W, name="a", scale=2.0)
    assert counted.traces == 2
    fn(W, W, "b", 2.0)
    fn(W, W[:2], "a", 2.0)
    assert counted.traces == 4


def test_a_second_grad_or_vmap_is_not_traced():
    counted = Counted(lambda w, x: (x @ w).sum())
    fn = AMP(counted.fn)
    for _ in range(3):
        jax.grad(fn)(W, W)
    assert counted.traces == 1
    for _ in range(3):
        jax.vmap(fn, (None, 0))(W, W[:, None])
    assert counted.traces == 2


def test_what_changes_a_trace_traces_again():
    counted = Counted(lambda w: w @ w)
    fn = AMP(counted.fn)
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
    fn = AMP(counted.fn)
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
    through_argument, through_method = AMP(lambda m, x: m(x)), AMP(model.__call__)
    for fn in (lambda: through_argument(model, W), lambda: through_method(W), lambda: AMP(model)(W)):
        before = fn()
        model.weight = model.weight + 1.0
        assert not np.array_equal(before, fn())


def test_an_argument_that_cannot_be_hashed_is_allowed():
    class Unhashable:
        scale = 2.0
        __hash__ = None

    fn = AMP(lambda x, options: x * options.scale)
    np.testing.assert_array_equal(fn(W, Unhashable()), W * 2.0)


def test_under_jit_nothing_is_kept_alive():
    class Token:
        """A static leaf whose life is watched."""

    fn = AMP(lambda x, token: x @ x)

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
    got, want = jax.grad(loss(AMP(fn)))(x), jax.grad(loss(fn))(x)
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
        jax.jit(jax.grad(AMP(loss)))(W, W)
        jax.jit(lambda w, x: AMP(lambda y: loss(w, y))(x))(W, W)
        AMP(loss)(W, W)
        jax.grad(AMP(loss))(W, W)


def test_checks_of_jax_pass():
    def loss(w, x):
        def body(c, x):
            return c + jnp.sum(jax.nn.softmax(x @ w)), jax.nn.gelu(x @ w)

        total, ys = lax.scan(jax.checkpoint(body), 0.0, x)
        return total + lax.cond(total > 0, jnp.sum, jnp.max, ys)

    with jax.enable_checks(True):
        for fn in (AMP(loss), jax.grad(AMP(loss)), AMP(jax.grad(loss))):
            jax.jit(fn)(W, jnp.ones((3, 4, 4)))


@pytest.mark.parametrize("combine", [jnp.add, jnp.multiply])
def test_gradients_of_what_is_repeated_are_summed_in_float32(combine):
    x = jnp.ones((10001, 4))
    loss = lambda b: jnp.sum(combine(x @ jnp.eye(4), b) @ jnp.eye(4))
    for fn in (jax.grad(AMP(loss)), jax.jit(jax.grad(AMP(loss)))):
        np.testing.assert_array_equal(fn(jnp.ones(4)), 10001.0)


# -- bad input


@pytest.mark.parametrize("dtype", [jnp.int32, "float7", jnp.complex64, 8, None])
def test_a_compute_dtype_that_is_no_float_is_refused(dtype):
    with pytest.raises(TypeError, match=r"compute_dtype is .*expected a float.*compute_dtype=jnp.bfloat16"):
        jaxamp.amp(lambda x: x, compute_dtype=dtype)


@pytest.mark.parametrize(("name", "dtype"), [("bf16", jnp.bfloat16), ("fp16", jnp.float16), ("f16", jnp.float16)])
def test_short_names_of_dtypes(name, dtype):
    assert jaxamp.amp(lambda x: x, compute_dtype=name).options.compute_dtype == dtype


def test_what_is_no_function_is_refused():
    with pytest.raises(TypeError, match=r"amp got 3, of type int; expected a function.*jaxamp.amp\(loss_fn\)"):
        jaxamp.amp(3)
    for a_class in (jnp.bfloat16, np.float16, eqx.nn.Linear, dict):
        with pytest.raises(
            TypeError, match=r"amp got .*, of type .*; expected a function. Write jaxamp.amp\(loss_fn\)"
        ):
            jaxamp.amp(a_class)
    with pytest.raises(TypeError, match=r"amp_stop got 3, of type int.*with jaxamp.amp_stop\(\):"):
        jaxamp.amp_stop(3)
    with pytest.raises(TypeError, match=r"unmatched_keys got 3, of type int.*jaxamp.unmatched_keys\(loss_fn\)"):
        jaxamp.unmatched_keys(3)
    with pytest.raises(TypeError, match=r"register_higher_order got 'scan', of type str.*my_call_p"):
        jaxamp.register_higher_order("scan")
    with pytest.raises(
        TypeError, match=r"use_precision got the dtype 'bf'; expected a float.*use_precision\(jnp.float32\)"
    ):
        jaxamp.use_precision("bf")


def test_an_error_of_the_function_comes_through_untouched():
    class Mine(Exception):
        pass

    def fn(x):
        raise Mine("my own words")

    for run in (AMP(fn), jax.jit(AMP(fn))):
        with pytest.raises(Mine) as error:
            run(W)
        assert str(error.value) == "my own words"
    with pytest.raises(TypeError, match="dot_general requires contracting dimensions"):
        AMP(lambda x: x @ x[:2])(W)
    with pytest.raises(jax.errors.TracerBoolConversionError):
        AMP(lambda x: x if x.sum() > 0 else -x)(W)


def test_a_failed_call_leaves_nothing_behind():
    fail = [True]

    def fn(x):
        if fail[0]:
            raise ValueError("not yet")
        return x @ x

    amped = AMP(fn)
    with pytest.raises(ValueError, match="not yet"):
        amped(W)
    fail[0] = False
    assert amped(W).shape == (4, 4)


def test_casts_are_made_once():
    jaxpr = jax.make_jaxpr(AMP(lambda x: (lambda e: e @ e @ e)(jnp.exp(x))))(W)
    casts = [e for e in equations(jaxpr) if e.primitive.name == "convert_element_type"]
    assert len(casts) == 1  # the operand; the result comes out of the matmul in float32
