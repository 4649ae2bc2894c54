"""Primitives bound under a transform: nothing but the time that it takes may tell them from `primitive.bind`."""

import gc
import inspect
import weakref

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, W, equations
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.interpreters import ad
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxamp import _jaxpr
from jaxamp._compat import Stage
from jaxamp._jaxpr import Kinds
from jaxamp._traits import Traits, traits_of


def mlp(w, x):
    for _ in range(3):
        x = jnp.tanh(x @ w + w[0])
    return jnp.sum(x / (1.0 + jnp.exp(-x)))


def written(fn, *args):
    """All that an equation is, in the order of the jaxpr."""
    return [
        (
            eqn.primitive.name,
            [str(v.aval) for v in (*eqn.invars, *eqn.outvars)],
            str(eqn.source_info.name_stack),
            str(eqn.ctx.xla_metadata),
            eqn.ctx.threefry_partitionable,
        )
        for eqn in equations(jax.make_jaxpr(fn)(*args))
    ]


@pytest.fixture
def by_itself(monkeypatch):
    """Runs a function with each primitive bound by itself."""

    def run(fn, *args):
        with monkeypatch.context() as patch:
            patch.setattr(_jaxpr, "traits_of", lambda primitive: Traits())
            return fn(*args)

    return run


TRANSFORMS = {
    "grad": jax.grad,
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (w, x)),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
    "linearize": lambda f: lambda w, x: jax.linearize(f, w, x)[1](w, x),
    "hessian times vector": lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (w,)),
}


@pytest.mark.parametrize("name", TRANSFORMS)
def test_equations_are_those_of_the_primitive(name, by_itself):
    fn = TRANSFORMS[name](AMP(mlp))
    assert sorted(written(fn, W, W)) == sorted(by_itself(written, fn, W, W))


def test_rules_are_applied_once_to_equal_equations(monkeypatch):
    applied, rule = [], ad.primitive_jvps[lax.tanh_p]
    monkeypatch.setitem(ad.primitive_jvps, lax.tanh_p, lambda *args, **kw: (applied.append(1), rule(*args, **kw))[1])
    x = jnp.ones((3, 7))  # a shape that no other test has
    jax.make_jaxpr(jax.grad(AMP(lambda x: sum(jnp.tanh(x * k).sum() for k in range(1, 9)))))(x)
    assert len(applied) == 1


def test_a_jaxpr_that_is_traced_is_bound_as_it_was(monkeypatch):
    monkeypatch.setattr(_jaxpr, "_jitted", None)  # not asked for
    jax.make_jaxpr(AMP(mlp))(W, W)
    AMP(mlp)(W, W)


# -- equations that are written as they are


def layers(w, x):
    for i in range(3):
        with jax.named_scope(f"layer{i % 2}"), set_xla_metadata(number=i):
            x = jnp.tanh(x @ w + w[0]) * 1.5
        x = jnp.where(x > 0, x, 0.1 * x) - jnp.mean(x)
    return jax.nn.relu(x) + x @ w


def in_full(fn, *args):
    return jax.make_jaxpr(fn)(*args).pretty_print(source_info=True, name_stack=True)


@pytest.mark.parametrize("keep", ["auto", "all"])
@pytest.mark.parametrize("fn", [layers, mlp, lambda w, x: jnp.sin(x) * 2.0 + w])
def test_equations_that_are_written_are_those_that_are_bound(fn, keep, monkeypatch):
    def jaxprs():
        forward, grad = AMP(fn, keep=keep), jax.grad(lambda w, x: AMP(fn, keep=keep)(w, x).sum())
        mapped = TRANSFORMS["vmap"](lambda w, x: forward(w, x[None] * w))
        return [in_full(run, W, W) for run in (forward, jax.jit(forward), grad, mapped)]

    found = jaxprs()
    written = []
    emit = Stage.write
    monkeypatch.setattr(Stage, "write", lambda *args: written.append(1) or emit(*args))
    assert jaxprs() == found
    assert written
    monkeypatch.setattr(Stage, "current", lambda: None)
    assert jaxprs() == found


def test_an_equation_on_operands_of_other_types_is_bound():
    jaxpr = jax.make_jaxpr(lambda x: jnp.tanh(x) * x)(1.0)
    assert jaxpr.out_avals[0].weak_type
    of_arrays = jax.make_jaxpr(lambda x: _jaxpr.evaluate(jaxpr, [x]))
    assert of_arrays(1.0).out_avals[0].weak_type
    assert not of_arrays(jnp.float32(1.0)).out_avals[0].weak_type
    assert str(of_arrays(jnp.bfloat16(1.0)).out_avals[0]) == "bfloat16[]"


def test_an_equation_on_constants_is_folded_as_ever():
    jaxpr = jax.make_jaxpr(lambda x: lax.convert_element_type(x, jnp.float32) * 2)(jnp.int32(3))
    traced = jax.make_jaxpr(lambda y: [y + z for z in _jaxpr.evaluate(jaxpr, [np.int32(3)])])(jnp.float32(1.0))
    assert "convert_element_type" not in str(traced)


def test_kinds_of_equations():
    def fn(x, y):
        return x * 2.0, x * 2.0, x * 3.0, x * 0.0, x * -0.0, y * 2.0, jnp.sum(x, 0), jnp.sum(x, 1), jnp.sum(x, 0)

    jaxpr = jax.make_jaxpr(fn)(W, W.astype(jnp.bfloat16))
    kinds = Kinds().of(jaxpr)
    pairs = {(i, k) for k in range(len(kinds)) for i in range(k) if kinds[i] == kinds[k]}
    assert pairs == {(0, 1), (6, 8)}


def test_contexts_of_equal_equations_are_told_apart(by_itself):
    def fn(x):
        with set_xla_metadata(key="one"):
            x = jnp.tanh(x)
        with set_xla_metadata(key="two"):
            x = jnp.tanh(x)
        with jax.threefry_partitionable(False):
            x = jnp.tanh(x)
        return jnp.tanh(x).sum()

    got = written(jax.grad(AMP(fn)), W)
    assert got == by_itself(written, jax.grad(AMP(fn)), W)
    of_tanh = [context for name, _, _, *context in got if name == "tanh"]
    assert len({*map(tuple, of_tanh)}) == len(of_tanh) == 4


def test_scopes_of_equal_equations_are_told_apart(by_itself):
    def fn(x):
        for name in ("first", "second"):
            with jax.named_scope(name):
                x = jnp.tanh(x)
        return x.sum()

    def stacks():
        return [stack for name, _, stack, *_ in written(jax.grad(AMP(fn)), W) if name == "tanh"]

    assert stacks() == by_itself(stacks) == ["jvp(first)", "jvp(second)"]


def test_source_lines_of_equal_equations_are_told_apart():
    def fn(x):
        x = jnp.tanh(x)
        x = jnp.tanh(x)
        return x.sum()

    first = inspect.getsourcelines(fn)[1] + 1
    eqns = [e for e in equations(jax.make_jaxpr(jax.grad(AMP(fn)))(W)) if e.primitive is lax.tanh_p]
    lines = [{f.line_num for f in e.source_info.traceback.frames if f.file_name == __file__} for e in eqns]
    assert [first in found for found in lines] == [True, False]
    assert [first + 1 in found for found in lines] == [False, True]


def test_changes_of_the_configuration_are_seen(by_itself):
    fn = jax.grad(AMP(mlp))
    before = written(fn, W, W)
    settings = [
        lambda: jax.enable_x64(True),
        lambda: jax.default_matmul_precision("float32"),
        lambda: jax.numpy_dtype_promotion("standard"),
        lambda: jax.set_mesh(jax.make_mesh((8,), ("d",), axis_types=(AxisType.Explicit,))),
    ]
    for setting in settings:
        with setting():
            assert written(fn, W, W) == by_itself(written, fn, W, W)
        assert written(fn, W, W) == before
    with jax.enable_x64(True):
        wide = W.astype(jnp.float64)
        assert written(fn, wide, wide) == by_itself(written, fn, wide, wide)


def test_shardings_in_types_and_parameters_are_kept(by_itself):
    mesh = jax.make_mesh((4, 2), ("a", "b"), axis_types=(AxisType.Explicit,) * 2)
    with jax.set_mesh(mesh):
        for spec in (P("a", None), P(None, "b"), P()):
            x = jax.device_put(W, NamedSharding(mesh, spec))
            fn = jax.grad(AMP(lambda w, x: jnp.tanh(jnp.einsum("ij,jk->ik", x, w, out_sharding=P("a", None))).sum()))
            assert written(fn, W, x) == by_itself(written, fn, W, x)


def test_weak_types_integers_and_float0_are_kept(by_itself):
    def fn(s, n, x):
        return (jnp.tanh(x @ x) * s).sum() + jnp.sum(n * 2).astype(jnp.float32)

    def grad(s, n, x):
        return jax.grad(AMP(fn), argnums=(0, 1, 2), allow_int=True)(s, n, x)

    args = 2.0, jnp.arange(3), W
    with jax.numpy_dtype_promotion("standard"):
        assert written(jax.grad(AMP(fn)), *args) == by_itself(written, jax.grad(AMP(fn)), *args)
        got, want = jax.jit(grad)(*args), by_itself(jax.jit(lambda *args: grad(*args)), *args)
    assert got[1].dtype == want[1].dtype == jax.dtypes.float0
    np.testing.assert_array_equal(got[2], want[2])


def test_nothing_of_the_user_is_kept_alive():
    class Token:
        """What a function closes over."""

    def watched():
        token, array = Token(), jnp.ones((4, 4))

        def fn(x):
            assert token is not None
            return jnp.tanh(x @ array).sum()

        jaxpr = jax.make_jaxpr(jax.grad(AMP(fn)))(W)
        return [weakref.ref(x) for x in (token, array, fn, jaxpr)]

    found = watched()
    gc.collect()
    assert [ref() for ref in found] == [None] * 4


def test_parameters_that_are_remembered_hold_no_jaxpr_and_no_function():
    def plain(value):
        if isinstance(value, tuple):
            return all(map(plain, value))
        return not callable(value) and not hasattr(value, "eqns")

    _jaxpr._jitted.cache_clear()
    seen, kept = [], _jaxpr._jitted

    def spy(*operations):
        seen.extend(operations)
        return kept(*operations)

    def fn(w, x):
        x = x.at[0].add(1.0)[jnp.array([1, 0])]
        return lax.scan(lambda c, _: (jax.nn.gelu(c @ w), None), x, length=2)[0].sum() + lax.reduce_max(x, (0, 1))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(_jaxpr, "_jitted", spy)
        jax.make_jaxpr(jax.grad(AMP(fn)))(W, W)
    assert seen
    assert all(traits_of(primitive).plain_params and all(plain(v) for _, v in params) for primitive, params in seen)


def test_no_tracer_leaks_and_no_jit():
    with jax.checking_leaks():
        jax.make_jaxpr(jax.grad(AMP(mlp)))(W, W)
        jax.make_jaxpr(jax.vmap(jax.grad(AMP(mlp))))(W[None], W[None])
    want = jax.grad(AMP(mlp))(W, W)
    with jax.disable_jit():
        got = jax.grad(AMP(mlp))(W, W)
    np.testing.assert_allclose(got, want, rtol=2e-2, atol=2e-2)


def test_a_batch_of_unknown_size_is_differentiated():
    (batch,) = jax.export.symbolic_shape("batch")
    x = jax.ShapeDtypeStruct((batch, 4), jnp.float32)
    exported = jax.export.export(jax.jit(jax.grad(AMP(mlp))))(W, x)
    want = jax.jit(jax.grad(AMP(mlp)))(W, W)
    np.testing.assert_allclose(exported.call(W, W), want, rtol=2e-2, atol=2e-2)
