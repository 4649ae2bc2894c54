import collections
import contextlib
import functools
import gc
import inspect
import math
import os
import re
import weakref

import jax
import jax.extend.core
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, kept, slow
from jax import lax

import jaxamp
from jaxamp._passes.recompute import _remembered
from jaxamp._structure import structure_of

W = jnp.asarray(np.random.default_rng(0).normal(size=(8, 8)) / 3, jnp.float32)


def relu_net(w, x):
    for _ in range(4):
        x = jax.nn.relu(x @ w + 0.1)
    return jnp.sum(x)


def normed(w, x):
    for i in range(3):
        with jax.named_scope(f"layer{i}"):
            x = x + jax.nn.gelu(x @ w)
            x = (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-6)
    return jnp.sum(jax.nn.softmax(x @ w) ** 2)


def in_scan(w, x):
    return lax.scan(lambda c, _: (jnp.tanh(c @ w) + jnp.where(c > 0, c, 0.0), None), x, length=3)[0].sum()


def with_dropout(w, x):
    for i in range(2):
        mask = jax.random.bernoulli(jax.random.key(i), jnp.float32(0.5), x.shape)
        x = jnp.where(mask, jax.nn.softplus(x @ w), 0.0)
    return x.sum()


SCOPES = ["layer0", "layer1", "layer2"]
LAST_LINE = inspect.getsourcelines(with_dropout)[1] + 5
NETS = [relu_net, normed, in_scan, with_dropout]
TRANSFORMS = {
    "grad": jax.grad,
    "grad of both": lambda f: jax.grad(f, argnums=(0, 1)),
    "vmap": lambda f: jax.vmap(f, in_axes=(None, 0)),
    "vmap of grad": lambda f: jax.vmap(jax.grad(f), in_axes=(None, 0)),
    "grad of vmap": lambda f: jax.grad(lambda w, x: jax.vmap(f, in_axes=(None, 0))(w, x[:, None]).sum()),
    "jvp": lambda f: lambda w, x: jax.jvp(f, (w, x), (x, w)),
    "hessian times vector": lambda f: lambda w, x: jax.jvp(lambda w: jax.grad(f)(w, x), (w,), (x,)),
    "gradient of a gradient": lambda f: jax.grad(lambda w, x: jnp.sum(jax.grad(f)(w, x) ** 2)),
    "checkpoint": lambda f: jax.grad(jax.checkpoint(f)),
}


@pytest.fixture(autouse=True)
def nothing_remembered():
    _remembered.cache_clear()


def written(fn, *args):
    """How often each matmul occurs, with the types of its operands and results, its scopes and the user's line."""

    def walk(jaxpr, scopes):
        for eqn in jaxpr.eqns:
            names = scopes + [name for name in re.split(r"[()/]", str(eqn.source_info.name_stack)) if name in SCOPES]
            for inside in jax.extend.core.jaxprs_in_params(eqn.params):
                yield from walk(getattr(inside, "jaxpr", inside), names)
            if "dot_general" in eqn.primitive.name:
                lines = [f.line_num for f in eqn.source_info.traceback.frames if f.file_name == __file__]
                types = (str(v.aval) for v in (*eqn.invars, *eqn.outvars))
                yield (
                    eqn.primitive.name,
                    *types,
                    *sorted(set(names)),
                    *(line for line in lines[:1] if line <= LAST_LINE),
                )

    return collections.Counter(walk(jax.make_jaxpr(fn)(*args).jaxpr, []))


@pytest.mark.parametrize("name", TRANSFORMS)
@pytest.mark.parametrize("net", NETS)
def test_a_trace_of_remembered_sections_has_the_same_matmuls(net, name):
    traces = [written(TRANSFORMS[name](AMP(functools.partial(net))), W, W) for _ in range(3)]
    assert traces[0]
    assert traces[0] == traces[1] == traces[2]


@pytest.mark.parametrize("net", NETS)
def test_a_trace_of_remembered_sections_keeps_no_more_for_the_backward_pass(net):
    def size():
        return sum(
            math.prod(shape) * jnp.dtype(dtype).itemsize for shape, dtype in kept(AMP(functools.partial(net)), W, W)
        )

    sizes = [size() for _ in range(3)]
    assert sizes[0] > 0
    assert max(sizes) == sizes[0]


@pytest.mark.parametrize("net", NETS)
def test_gradients_of_remembered_sections_are_as_exact(net):
    with jax.enable_x64(True):
        wide = W.astype(jnp.float64)
        want = np.asarray(jax.grad(net)(wide, wide))
    found = (np.asarray(jax.jit(jax.grad(AMP(functools.partial(net))))(W, W), np.float64) for _ in range(3))
    errors = [np.linalg.norm(got - want) / np.linalg.norm(want) for got in found]
    assert max(errors) < min(0.02, 1.3 * errors[0])


@pytest.mark.parametrize("net", NETS)
def test_what_is_run_does_not_depend_on_what_was_traced_before(net):
    """All processes of a cluster must arrive at the same program."""
    texts = [jax.jit(jax.grad(AMP(functools.partial(net)))).lower(W, W).as_text() for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]


@pytest.mark.slow
@pytest.mark.parametrize("fn", [jax.jit(lambda x: jax.nn.relu(x) * 2), jax.nn.softplus])
def test_nor_on_what_was_run_without_a_gradient(fn):
    def net(w, x):
        for _ in range(3):
            x = fn(x @ w)
        return x.sum()

    def lowered():
        return jax.jit(jax.grad(AMP(functools.partial(net)))).lower(W, W).as_text()

    jax.clear_caches()
    first = lowered()
    jax.clear_caches()
    AMP(functools.partial(net))(W, W)
    assert lowered() == first


def test_a_rule_that_cannot_be_hashed():
    class Rule:
        __hash__ = None

        def __call__(self, *args, **params):
            return jaxamp.use_compute_precision(*args, **params)

    policy = {lax.dot_general_p: Rule()}
    for _ in range(2):
        assert jax.grad(jaxamp.amp(functools.partial(relu_net), amp_policy=policy))(W, W).dtype == jnp.float32


def test_equal_layers_are_differentiated_once():
    def net(w, x):
        for _ in range(6):
            x = jnp.tanh(jnp.sin(x @ jnp.concatenate([w, w], 1)) @ jnp.concatenate([w, w]))
        return x.sum()

    jax.make_jaxpr(jax.grad(AMP(net)))(W, W)
    info = _remembered.cache_info()
    assert info.misses <= 3  # the first layer reads float32, and the last one is summed
    assert info.hits >= 3


def test_layers_that_differ_only_in_the_names_of_their_scopes_are_equal_and_keep_them():
    def net(w, x):
        for i in range(6):
            with jax.named_scope(f"layer{i}"):
                x = x + jnp.sin(x @ jnp.concatenate([w, w], 1)) @ jnp.concatenate([w, w])
        return x.sum()

    jax.make_jaxpr(jax.grad(AMP(net)))(W, W)
    assert _remembered.cache_info().hits >= 2
    text = jax.jit(jax.grad(AMP(net))).lower(W, W).compile().as_text()
    assert all(re.search(rf"layer{i}\b[^\"]*/sin", text) for i in range(6))


@pytest.mark.parametrize(
    "act", [jax.nn.softmax, jax.nn.relu, *map(slow, [jax.nn.softplus, jax.nn.hard_silu, jax.nn.gelu])]
)
def test_layers_with_functions_of_jax_are_equal(act):
    def net(w, x):
        for _ in range(7):
            x = x + jnp.exp(act(x @ jnp.concatenate([w, w], 1)) @ jnp.concatenate([w, w]))
        return x.sum()

    for _ in range(2):
        _remembered.cache_clear()
        jax.make_jaxpr(jax.grad(AMP(functools.partial(net))))(W, W)
        assert _remembered.cache_info().hits >= 2
        jax.clear_caches()


def test_the_body_of_a_jitted_layer_is_the_same_object_in_the_next_trace():
    layer = jax.jit(lambda w, x: x + jnp.tanh(jax.nn.gelu(x @ w) @ w))

    def bodies():
        jaxpr = jax.make_jaxpr(jax.grad(AMP(lambda w, x: layer(w, layer(w, x)).sum())))(W, W)
        return jaxpr, {id(eqn.params["jaxpr"]) for eqn in equations(jaxpr) if eqn.primitive.name == "jit"}

    (held, first), (_, second) = bodies(), bodies()
    assert held
    assert first == second


def test_layers_on_different_lines_keep_their_lines():
    def net(x):
        x = jnp.tanh(jnp.sin(x @ W))
        x = jnp.tanh(jnp.sin(x @ W))
        return x.sum()

    first = inspect.getsourcelines(net)[1] + 1
    for _ in range(3):
        eqns = [e for e in equations(jax.make_jaxpr(jax.grad(AMP(net)))(W)) if e.primitive is lax.sin_p]
        lines = [{f.line_num for f in e.source_info.traceback.frames if f.file_name == __file__} for e in eqns[:2]]
        assert [first in found for found in lines] == [True, False]


def made_by(scale):
    @jax.custom_jvp
    def activation(x):
        return jnp.tanh(x)

    @activation.defjvp
    def rule(primals, tangents):
        return activation(*primals), scale * tangents[0]

    return activation


def test_functions_with_the_same_body_and_other_rules_are_told_apart():
    for _ in range(3):
        one, two = (jax.grad(AMP(lambda x, s=s: jnp.sum(made_by(s)(x @ W))))(W) for s in (1.0, 2.0))
        np.testing.assert_array_equal(2 * one, two)


FACTORY = """
def made_by(scale, in_body):
    @jax.custom_jvp
    def activation(x):
        return jnp.tanh(x * scale) if in_body else jnp.tanh(x)

    @activation.defjvp
    def rule(primals, tangents):
        return activation(*primals), scale * tangents[0]

    return activation
"""


@pytest.mark.parametrize("of", [jnp.sign, jax.nn.relu, jnp.floor])
@pytest.mark.parametrize("by", ["defjvp", "defjvps"])
def test_a_function_of_jax_with_another_rule_is_not_that_of_jax(of, by):
    def made_by(scale):
        fn = jax.custom_jvp(of)
        rule = (lambda p, t: (fn(*p), scale * t[0])) if by == "defjvp" else (lambda t, ans, x: scale * t)
        getattr(fn, by)(rule)
        return fn

    def grads(transform):
        fns = made_by(1.0), made_by(3.0)
        return [transform(jax.grad(AMP(lambda w, fn=fn: jnp.sum(fn(jnp.sin(w @ W)) @ W))))(W) for fn in fns]

    for transform in (lambda f: f, jax.jit):
        one, three = grads(transform)
        np.testing.assert_allclose(3 * one, three, rtol=0.02, atol=0.02)
        assert np.any(one)


def loss_of(activation):
    return lambda x: jnp.sum(activation(x @ W))


@pytest.mark.parametrize(("path", "in_body"), [("opt/made_up.py", False), ("/made_up.py", True)])
def test_functions_of_jax_are_told_apart_by_their_bodies_and_from_libraries_with_a_name_like_it(path, in_body):
    names = {"jax": jax, "jnp": jnp}
    exec(compile(FACTORY, os.path.dirname(jax.__file__) + path, "exec"), names)
    for _ in range(2):
        one, two = (jax.grad(AMP(loss_of(names["made_by"](scale, in_body))))(W) for scale in (1.0, 2.0))
        np.testing.assert_array_equal(2 * one, two)


def test_a_rule_that_refuses_is_not_asked_without_a_gradient():
    @jax.custom_jvp
    def fn(x):
        return jnp.tanh(x)

    @fn.defjvp
    def rule(primals, tangents):
        raise NotImplementedError("not to be differentiated")

    for _ in range(3):
        assert jax.vmap(AMP(lambda x: fn(x @ W)))(W).shape == (8, 8)
        with pytest.raises(NotImplementedError, match="not to be differentiated"):
            jax.grad(AMP(lambda x: fn(x @ W).sum()))(W)


@pytest.mark.parametrize("fn", [jax.nn.relu, jax.nn.softplus, jax.nn.silu, jax.nn.elu, jax.nn.logsumexp])
def test_second_derivatives_of_functions_of_jax_are_right(fn):
    def loss(w, x):
        return jnp.sum(fn(jnp.sin(x @ w)) ** 2)

    x = W + 0.05
    with jax.enable_x64(True):
        wide = [a.astype(jnp.float64) for a in (W, x)]
        want = np.asarray(jax.jvp(lambda w: jax.grad(loss)(w, wide[1]), wide[:1], wide[1:])[1])
    for _ in range(3):
        got = np.asarray(jax.jvp(lambda w: jax.grad(AMP(loss))(w, x), (W,), (x,))[1], np.float64)
        assert np.linalg.norm(got - want) <= 0.02 * np.linalg.norm(want)


def test_effects_happen_once(capfd):
    def net(w):
        for _ in range(3):
            w = jnp.tanh(w @ w)
        jax.debug.print("here")
        return w.sum()

    for _ in range(3):
        jax.block_until_ready(jax.jit(jax.grad(AMP(lambda w: net(w))))(W))
        jax.effects_barrier()
        assert capfd.readouterr().out.count("here") == 1


@pytest.mark.parametrize("rule", [False, True])
def test_nothing_of_the_user_is_kept_alive(rule):
    class Token:
        """What a function closes over."""

    def watched():
        token, array = Token(), jnp.ones((8, 8))

        def activation(x):
            assert token is not None
            return jnp.tanh(x)

        if rule:
            activation = jax.custom_jvp(activation)

            @activation.defjvp
            def _(primals, tangents):
                assert token is not None
                return activation(*primals), tangents[0]

        def fn(x):
            for _ in range(3):
                x = activation(x @ array)
            return x.sum()

        for _ in range(3):
            jax.make_jaxpr(jax.grad(AMP(fn)))(W)
        return [weakref.ref(x) for x in (token, array, fn)]

    found = watched()
    gc.collect()
    assert [ref() for ref in found] == [None] * 3


@pytest.mark.slow
def test_no_tracers_leak():
    with jax.checking_leaks():
        for net in (relu_net, normed):
            for _ in range(3):
                jax.make_jaxpr(jax.grad(AMP(functools.partial(net))))(W, W)


@pytest.mark.parametrize(
    "setting",
    [
        contextlib.nullcontext,
        lambda: jax.default_matmul_precision("highest"),
        lambda: jax.enable_x64(True),
    ],
)
def test_changes_of_the_configuration_are_seen(setting):
    before = written(jax.grad(AMP(functools.partial(relu_net))), W, W)
    for _ in range(3):
        with setting():
            inside = written(jax.grad(AMP(functools.partial(relu_net))), W, W)
        assert written(jax.grad(AMP(functools.partial(relu_net))), W, W) == before
    _remembered.cache_clear()
    jax.clear_caches()
    with setting():
        assert written(jax.grad(AMP(functools.partial(relu_net))), W, W) == inside


def test_other_options_are_other_sections():
    def matmuls(**options):
        fn = jax.grad(jaxamp.amp(functools.partial(relu_net), **options))
        return {str(e.outvars[0].aval.dtype) for e in equations(jax.make_jaxpr(fn)(W, W)) if "dot" in e.primitive.name}

    for _ in range(3):
        assert matmuls(compute_dtype=jnp.bfloat16) == {"bfloat16", "float32"}
        assert matmuls(compute_dtype=jnp.float16) == {"float16", "float32"}
        assert matmuls(compute_dtype=jnp.bfloat16, amp_policy={}) == {"float32"}


class TestStructure:
    def test_of_equal_jaxprs_is_equal(self):
        one, two = (structure_of(jax.make_jaxpr(functools.partial(normed))(W, W)) for _ in range(2))
        assert one == two
        assert hash(one) == hash(two)

    @pytest.mark.parametrize("other", [lambda x: x * -0.0, lambda x: x * 1.0, lambda x: 0.0 * x, lambda x: x + 0.0])
    def test_tells_constants_operands_and_operations_apart(self, other):
        def structure(fn):
            return structure_of(jax.make_jaxpr(lambda x: fn(x))(W))

        assert structure(lambda x: x * 0.0) != structure(other)

    def test_is_none_for_what_a_cache_must_not_hold(self):
        assert structure_of(jax.make_jaxpr(lambda x: x @ W)(W)) is None
        assert structure_of(jax.make_jaxpr(made_by(1.0))(W)) is None
        assert structure_of(jax.make_jaxpr(lambda x: jax.debug.print("{}", x))(W)) is None
        assert structure_of(jax.make_jaxpr(lambda x: x * 2)(W)) is not None
