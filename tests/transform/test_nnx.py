"""State of Flax NNX objects under `amp`: what it is in float32, in each order of transforms."""

import dataclasses
import functools
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import errors as nnx_errors
from flax import nnx
from helpers import AMP, LOW, assert_same_bits, matmuls, near, normal, raises, with_the_package

import jaxamp
from jaxamp._transform.call import split_call

pytestmark = pytest.mark.promotes
X, Y = normal(1, 16, 4), normal(2, 16, 3)
STEPS = 2


class Seen(nnx.Variable):
    """How many examples a model has seen."""


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(4, 32, use_bias=False, rngs=rngs), nnx.Linear(32, 3, rngs=rngs)
        self.norm, self.drop = nnx.BatchNorm(32, momentum=0.8, rngs=rngs), nnx.Dropout(0.1, rngs=rngs)
        self.seen = Seen(jnp.int32(0))
        self.calls = Seen(0)  # a Python number

    def __call__(self, x):
        self.seen[...] += x.shape[0]
        self.calls.set_value(self.calls.get_value() + 1)
        return self.last(self.drop(nnx.tanh(self.norm(self.first(x)))))

    def loss(self, x, y):
        return jnp.mean((self(x) - y) ** 2)

    @nnx.jit
    def jitted_loss(self, x, y):
        return self.loss(x, y)


def model_and_optimizer(seed=0):
    model = Model(nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optax.sgd(0.05, momentum=0.9), wrt=nnx.Param)


def loss(model, x, y):
    return model.loss(x, y)


def loss_and_aux(model, x, y):
    prediction = model(x)
    return jnp.mean((prediction - y) ** 2), prediction


def train_step(model, optimizer, x, y, wrap=lambda fn: fn):
    value, grads = nnx.value_and_grad(wrap(loss))(model, x, y)
    optimizer.update(model, grads)
    return value


def step_with(differentiate):
    """A step whose gradients are made by `differentiate(wrap, loss)`."""

    def nesting(wrap):
        def step(model, optimizer, x, y):
            value, grads = differentiate(wrap)(model, x, y)
            optimizer.update(model, grads)
            return value[0] if isinstance(value, tuple) else value

        return step

    return nesting


def grad_step(wrap):
    def step(model, optimizer, x, y):
        optimizer.update(model, nnx.grad(wrap(loss))(model, x, y))

    return step


# Each takes `amp`, or the identity, and gives a training step.
NESTINGS = {
    "grad(amp)": grad_step,
    "value_and_grad(amp)": step_with(lambda wrap: nnx.value_and_grad(wrap(loss))),
    "value_and_grad(amp), aux": step_with(lambda wrap: nnx.value_and_grad(wrap(loss_and_aux), has_aux=True)),
    "amp(value_and_grad)": step_with(lambda wrap: wrap(nnx.value_and_grad(loss))),
    "amp(value_and_grad), aux": step_with(lambda wrap: wrap(nnx.value_and_grad(loss_and_aux, has_aux=True))),
    "value_and_grad(amp(jit))": step_with(lambda wrap: nnx.value_and_grad(wrap(nnx.jit(loss)))),
    "value_and_grad(jit(amp))": step_with(lambda wrap: nnx.value_and_grad(nnx.jit(wrap(loss)))),
    "value_and_grad(amp(remat))": step_with(lambda wrap: nnx.value_and_grad(wrap(nnx.remat(loss)))),
    "value_and_grad(remat(amp))": step_with(lambda wrap: nnx.value_and_grad(nnx.remat(wrap(loss)))),
    "jit(value_and_grad(amp))": lambda wrap: nnx.jit(functools.partial(train_step, wrap=wrap)),
    "amp(jit(value_and_grad))": lambda wrap: wrap(nnx.jit(train_step)),
    "amp(value_and_grad), whole step": lambda wrap: wrap(train_step),
    "a keyword": step_with(lambda wrap: lambda m, x, y: wrap(nnx.value_and_grad(loss))(m, y=y, x=x)),
    "a dict": step_with(
        lambda wrap: (
            lambda m, x, y: wrap(lambda tree: nnx.value_and_grad(loss)(tree["m"], *tree["xy"]))({"m": m, "xy": (x, y)})
        )
    ),
    "a method": step_with(lambda wrap: lambda m, x, y: nnx.value_and_grad(lambda m: wrap(m.loss)(x, y))(m)),
    "a jitted method": step_with(
        lambda wrap: lambda m, x, y: nnx.value_and_grad(lambda m: wrap(m.jitted_loss)(x, y))(m)
    ),
    "a partial": step_with(
        lambda wrap: lambda m, x, y: nnx.value_and_grad(lambda m: wrap(functools.partial(loss, m))(x, y=y))(m)
    ),
    "a module": step_with(
        lambda wrap: lambda m, x, y: nnx.value_and_grad(lambda m: jnp.mean((wrap(m)(x) - y) ** 2))(m)
    ),
}


def trained(nesting, wrap):
    model, optimizer = model_and_optimizer()
    step = NESTINGS[nesting](wrap)
    for _ in range(STEPS):
        step(model, optimizer, X, Y)
    return model, optimizer


@functools.cache
def trained_in_float32():
    return trained("value_and_grad(amp)", lambda fn: fn)


def assert_same_state(found, expected, bound=3e-2):
    """The same variables; floats are near and of the same dtype, everything else is equal."""
    found, expected = (nnx.to_pure_dict(nnx.state(x)) for x in (found, expected))
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(expected), strict=True):
        name = jax.tree_util.keystr(path)
        if hasattr(y, "dtype") and jnp.issubdtype(y.dtype, jax.dtypes.prng_key):
            x, y = jax.random.key_data(x), jax.random.key_data(y)
        x, y = jnp.asarray(x), jnp.asarray(y)
        assert x.dtype == y.dtype, name
        if jnp.issubdtype(y.dtype, jnp.floating):
            assert near(x, y, bound), name
        else:
            assert np.array_equal(x, y), name


@pytest.mark.parametrize("nesting", NESTINGS)
def test_state_moves_as_in_float32(nesting):
    model, optimizer = trained(nesting, AMP)
    expected_model, expected_optimizer = trained_in_float32()
    assert int(model.seen[...]) == STEPS * len(X)
    assert int(model.calls.get_value()) == STEPS
    assert int(model.drop.rngs.count[...]) == STEPS
    assert_same_state(model, expected_model)
    assert_same_state(optimizer, expected_optimizer, 0.1)
    assert float(jnp.abs(model.norm.mean[...]).max()) > 0.01


def test_matmuls_are_low_and_evaluation_returns_no_state():
    model = Model(nnx.Rngs(0))

    def fn(graphdef, state):
        return AMP(loss)(nnx.merge(graphdef, state), X, Y)

    assert set(matmuls(functools.partial(fn, nnx.graphdef(model)), nnx.state(model))) == {LOW}
    linear = nnx.Linear(4, 4, rngs=nnx.Rngs(0))
    call, arrays, _ = split_call(lambda m, x: m(x), (linear, X), {})
    outs, result = call(*arrays)
    assert len(outs) == 1
    assert result.change.changed == ()


# -- other state, other structures


sows = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")


@sows
@pytest.mark.parametrize("nesting", ["eager", "amp(jit)", "jit(amp)"])
def test_variables_that_sow_creates_reach_the_model(nesting):
    def called(wrap):
        fn = {
            "eager": wrap(lambda m, x: m(x)),
            "amp(jit)": wrap(nnx.jit(lambda m, x: m(x))),
            "jit(amp)": nnx.jit(wrap(lambda m, x: m(x))),
        }[nesting]
        model = Capturing(nnx.Rngs(0))
        linear = model.linear
        for _ in range(2):
            fn(model, X)
        assert model.linear is linear
        return nnx.pop(model, nnx.Intermediate), model

    (found, model), (expected, _) = called(AMP), called(lambda fn: fn)
    assert len(found["hidden"].get_value()) == 2
    assert_same_state(found, expected)
    assert not hasattr(model, "hidden")


class Capturing(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        x = self.linear(x)
        self.sow(nnx.Intermediate, "hidden", x)
        return x.sum()


def test_captured_intermediates():
    capture, model = nnx.capture(nnx.Intermediate), Capturing(nnx.Rngs(0))

    def fn(model, x):
        return model(x)

    expected = capture(fn)(model, X)[1]["hidden"].get_value()[0]
    for run in (capture(AMP(fn)), AMP(capture(fn)), nnx.jit(capture(AMP(fn)))):
        assert near(run(model, X)[1]["hidden"].get_value()[0], expected)


def test_parts_that_are_shared_stay_shared():
    shared = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))

    class Holder(nnx.Module):
        def __init__(self):
            self.inner = shared

    holder, other = Holder(), Holder()

    def fn(holder, models, x):
        assert holder.inner is models["a"][0] is models["a"][1].inner
        return models["a"][1].inner(holder.inner(x)).sum()

    mean = jnp.mean(X, 0)
    AMP(fn)(holder, {"a": (shared, other)}, X)
    assert holder.inner is other.inner is shared
    assert near(shared.mean[...], 0.25 * mean + 0.5 * 0, 1e-2)  # of normalized numbers, the second time


def test_rngs_streams_and_single_variables_as_arguments():
    def fn(rngs, count, x):
        count[...] += 1
        return x @ jax.random.normal(rngs.params(), (4, 4))

    rngs, expected_rngs, count = nnx.Rngs(params=3), nnx.Rngs(params=3), nnx.Variable(jnp.int32(5))
    found = [AMP(fn)(rngs, count, X) for _ in range(3)]
    expected = [fn(expected_rngs, nnx.Variable(jnp.int32(0)), X) for _ in range(3)]
    assert near(jnp.stack(found), jnp.stack(expected))
    assert int(rngs.params.count[...]) == 3
    assert int(count[...]) == 8


@jax.tree_util.register_dataclass
@dataclasses.dataclass
class Batch:
    model: nnx.Module
    x: jax.Array


def test_a_model_in_a_dataclass_and_one_that_is_returned():
    def fn(batch, *, also):
        also["other"].a = nnx.Param(jnp.ones(2))  # a new variable
        also["other"].note = "seen"  # not an array
        return batch.model(batch.x).sum(), batch.model, nnx.Linear(4, 2, rngs=nnx.Rngs(1)), also["other"]

    model, other = Model(nnx.Rngs(0)), nnx.Linear(2, 2, rngs=nnx.Rngs(0))
    total, returned, new, again = AMP(fn)(Batch(model, X), also={"other": other})
    assert returned is model
    assert again is other
    assert int(model.seen[...]) == len(X)
    assert total.dtype == jnp.float32
    assert (other.note, other.a.shape, new.kernel.shape) == ("seen", (2,), (4, 2))
    new.kernel[...] = new.kernel[...] + 1  # belongs to the caller


def test_parts_that_change_places_and_variables_that_are_replaced():
    class Pair(nnx.Module):
        def __init__(self):
            self.a, self.b = (nnx.Linear(4, 4, rngs=nnx.Rngs(i)) for i in range(2))

    def fn(pair, x):
        pair.a, pair.b = pair.b, pair.a
        pair.a.bias = nnx.Param(x[0])
        return pair.a(x) @ x.T

    pair = Pair()
    a, b, bias, kernel = pair.a, pair.b, pair.b.bias, pair.a.kernel[...]
    AMP(fn)(pair, X)
    assert (pair.a is b, pair.b is a) == (True, True)
    assert np.array_equal(a.kernel[...], kernel)
    assert b.bias is not bias
    assert np.array_equal(b.bias[...], X[0])
    assert np.array_equal(bias[...], np.zeros(4))


def test_arrays_and_numbers_without_a_variable():
    class Plain(nnx.Pytree):
        def __init__(self):
            self.total, self.steps = jnp.zeros(()), 0

    def fn(plain, x):
        plain.total = plain.total + x.sum()
        plain.steps += 1
        return (x @ x.T).sum()

    plain = Plain()
    for _ in range(2):
        AMP(fn)(plain, X)
    assert near(plain.total, 2 * np.asarray(X).sum(), 1e-4)
    assert plain.steps == 2


def stacked(wrap, inside):
    """Layers with batch statistics, made by vmap and run by scan; `wrap` goes inside of the scan or around it."""

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = nnx.Linear(4, 4, rngs=rngs), nnx.BatchNorm(4, momentum=0.5, rngs=rngs)

        def __call__(self, x):
            return x + nnx.tanh(self.norm(self.linear(x)))

    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return Layer(rngs)

    def run(layer, x):
        return layer(x)

    def forward(layers, x):
        body = wrap(run) if inside else run
        return nnx.scan(body, in_axes=(0, nnx.Carry), out_axes=nnx.Carry)(layers, x).sum()

    layers = make(nnx.Rngs(0))
    value = (forward if inside else wrap(forward))(layers, X)
    return value, layers


@pytest.mark.parametrize("inside", [True, False], ids=["inside", "around"])
def test_scan_over_layers_made_by_vmap(inside):
    value, layers = stacked(AMP, inside)
    expected, expected_layers = stacked(lambda fn: fn, inside)
    assert near(value, expected)
    assert_same_state(layers, expected_layers)
    assert float(jnp.abs(layers.norm.mean[...]).min()) > 0


def test_vmap_of_amp_over_an_ensemble():
    @nnx.split_rngs(splits=3)
    @nnx.vmap(in_axes=(0,), out_axes=0)
    def make(rngs):
        return nnx.BatchNorm(4, momentum=0.5, rngs=rngs)

    def called(wrap):
        models = make(nnx.Rngs(0))
        nnx.vmap(wrap(lambda m, x: m(x) @ x.T), in_axes=(0, None))(models, X)
        return models

    assert_same_state(called(AMP), called(lambda fn: fn))


@pytest.mark.parametrize("mode", [(False, True), (True, False)], ids=["trees", "graphs without updates"])
@pytest.mark.parametrize("nesting", ["eager", "amp(jit)", "jit(amp)", "grad(amp)", "amp(grad)"])
def test_other_modes_of_nnx(mode, nesting):
    def fn(x, model):
        return (model(x) @ x.T).sum()

    def called(wrap):
        run = {
            "eager": lambda: wrap(fn),
            "amp(jit)": lambda: wrap(nnx.jit(fn)),
            "jit(amp)": lambda: nnx.jit(wrap(fn)),
            "grad(amp)": lambda: nnx.grad(wrap(fn)),
            "amp(grad)": lambda: wrap(nnx.grad(fn)),
        }[nesting]()
        model = nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
        for _ in range(2):
            run(X, model)
        return model

    with nnx.set_graph_mode(mode[0]), nnx.set_graph_updates(mode[1]):
        found, expected = called(AMP), called(lambda fn: fn)
    assert_same_state(found, expected)
    assert float(jnp.abs(found.mean[...]).max()) > 0


def test_a_method_of_an_object_that_nnx_cant_take_apart():
    """A compiled Keras model is one, if Keras makes its layers NNX modules: a dict in it has layers as keys."""

    class Keyed(nnx.Module, pytree=False):
        def __init__(self):
            self.table = {object(): 1, object(): 2}

        def __call__(self, x):
            return x @ x.T

    model = Keyed()
    with raises(TypeError, "'<' not supported"):
        nnx.split(model)
    assert AMP(model.__call__)(X).dtype == jnp.float32
    with raises(TypeError, "'<' not supported"):
        AMP(lambda model, x: model(x))(model, X)


def test_a_ref_beside_a_model():
    def fn(model, ref, x):
        ref[...] += 1.0
        return model(x) @ x.T

    ref, model = jax.new_ref(jnp.zeros(())), nnx.BatchNorm(4, momentum=0.5, rngs=nnx.Rngs(0))
    amp_fn = AMP(fn)
    for _ in range(2):
        amp_fn(model, ref, X)
    assert float(ref[...]) == 2.0
    assert float(jnp.abs(model.mean[...]).max()) > 0


# -- nothing is lost in silence


def test_a_captured_model_that_changes_is_refused():
    model = Model(nnx.Rngs(0))
    with raises(nnx_errors.TraceContextError, "different trace level"):
        AMP(lambda x: model(x))(X)
    with raises(nnx_errors.TraceContextError, "different trace level"):
        jax.jit(lambda x: AMP(loss)(model, x, Y))(X)
    with raises(nnx_errors.TraceContextError, "different trace level"):
        nnx.jit(AMP(model.loss))(X, Y)
    assert int(model.seen[...]) == 0


def test_a_captured_model_that_only_reads_its_state_is_fine():
    model = nnx.BatchNorm(4, use_running_average=True, rngs=nnx.Rngs(0))
    assert jax.jit(lambda x: AMP(lambda m, x: m(x) @ x.T)(model, x))(X).dtype == jnp.float32


@sows
def test_a_captured_model_that_sows_keeps_its_variables():
    model = Capturing(nnx.Rngs(0))
    with raises(nnx_errors.TraceContextError, "different trace level"):
        jax.jit(lambda x: AMP(lambda m, x: m(x))(model, x))(X)
    assert model(X).shape == ()


# -- caching


CACHED = {
    "amp": lambda fn, model: functools.partial(AMP(fn), model),
    "amp(jit)": lambda fn, model: functools.partial(AMP(nnx.jit(fn)), model),
    "amp(value_and_grad)": lambda fn, model: functools.partial(AMP(nnx.value_and_grad(fn)), model),
    "value_and_grad(amp)": lambda fn, model: functools.partial(nnx.value_and_grad(AMP(fn)), model),
    "jit(amp)": lambda fn, model: functools.partial(nnx.jit(AMP(fn)), model),
    "a partial": lambda fn, model: AMP(functools.partial(fn, model)),
    "a module": lambda fn, model: AMP(model),
    "a method": lambda fn, model: AMP(model.loss),
}


@pytest.mark.parametrize("name", CACHED)
def test_eager_calls_are_traced_once(name):
    traces = []

    class Counting(nnx.BatchNorm):
        def __call__(self, x):
            traces.append(None)
            return super().__call__(x)

        def loss(self, x):
            return (self(x) ** 2).sum()

    model = Counting(4, rngs=nnx.Rngs(0))
    call = CACHED[name](lambda model, x: model.loss(x), model)
    call(X)
    first, before = len(traces), model.mean[...]
    call(X)
    call(X)
    assert first == len(traces) > 0
    assert not np.array_equal(model.mean[...], before)


def test_a_whole_step_is_traced_once():
    traces = []

    @AMP
    @nnx.jit
    def step(model, optimizer, x, y):
        traces.append(None)
        return train_step(model, optimizer, x, y)

    model, optimizer = model_and_optimizer()
    for _ in range(4):
        step(model, optimizer, X, Y)
    assert len(traces) == 1
    assert int(optimizer.step[...]) == 4


def test_flax_is_not_imported():
    code = "import sys, jaxamp; jaxamp.amp(lambda d: d['x'] * 2)({'x': 1.0}); print('flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], env=with_the_package(), capture_output=True, text=True)
    assert out.stdout == "False\n", out.stderr


# -- tools


def without_keys(model):
    return nnx.to_pure_dict(nnx.state(model, nnx.Not(nnx.RngKey)))


@pytest.mark.slow
def test_tools_look_at_a_model_and_leave_it_as_it_is():
    class Small(nnx.Module):
        def __init__(self, rngs):
            self.norm, self.linear = nnx.BatchNorm(4, rngs=rngs), nnx.Linear(4, 3, use_bias=False, rngs=rngs)
            self.drop = nnx.Dropout(0.1, rngs=rngs)

    def fn(model, x):
        return jnp.sum(model.linear(model.drop(model.norm(x))) ** 2)

    model = Small(nnx.Rngs(0))
    before = without_keys(nnx.clone(model))
    shapes = nnx.eval_shape(lambda: Small(nnx.Rngs(0)))
    for given in (model, shapes):
        assert jaxamp.amp_report(fn, compute_dtype=jnp.bfloat16)(given, X).low_share == 1.0
    jaxamp.assert_mixed(fn, (model, X), compute_dtype=jnp.bfloat16)
    jaxamp.find_overflow(fn)(model, X)
    comparison = jaxamp.compare(fn, compute_dtype=jnp.bfloat16)(model, X)
    assert {row.name for row in comparison.gradients} == {".linear.kernel", ".norm.scale", ".norm.bias"}
    with jax.enable_x64(True):
        wide = jaxamp.compare(fn, compute_dtype=jnp.bfloat16)(model, X)
    assert wide.reference == "float64"
    assert jaxamp.bytes_kept(fn, compute_dtype=jnp.bfloat16)(model, X).after > 0
    assert jaxamp.unmatched_keys(fn)(model, X) == []
    assert_same_bits(without_keys(model), before)
