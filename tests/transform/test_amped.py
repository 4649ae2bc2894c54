"""What `amp` returns, as an object: pickled, copied, printed, bound to an instance, in a pytree."""

import copy
import functools
import pickle
import types

import cloudpickle
import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from helpers import AMP, LOW, W, matmuls, raises
from jax import lax

import jaxamp
from jaxamp._compat import Primitive, primitives
from jaxamp._policy.communication import COMMUNICATION


def round_trip(x):
    return pickle.loads(pickle.dumps(x))


def round_trip_of_cloud(x):
    return cloudpickle.loads(cloudpickle.dumps(x))


COPIES = [round_trip, round_trip_of_cloud, copy.deepcopy, copy.copy]
each_copy = pytest.mark.parametrize("copied", COPIES, ids=["pickle", "cloudpickle", "deepcopy", "copy"])


def product(x, w):
    return jnp.tanh(x @ w)


@AMP
def decorated(x, w):
    return x @ w


class Model(eqx.Module):
    layer: eqx.nn.Linear

    def __call__(self, x):
        return self.layer(x)

    @AMP
    def rows(self, x):
        """Each row."""
        return jax.vmap(self.layer)(x)


MODEL = Model(eqx.nn.Linear(4, 4, key=jax.random.key(0)))
OTHER = Primitive("a primitive of the user")
POLICY = jaxamp.default_amp_policy | {
    lax.tanh_p: jaxamp.use_precision(jnp.bfloat16),
    ("head", lax.exp_p): jaxamp.use_compute_precision,
    "body": jaxamp.use_formats("e4m3", least_size=2**20),
    COMMUNICATION: jaxamp.Communication(reduce="compute"),
    primitives()["dot_general"]: jaxamp.use_replacement(product, name="mine"),
}


# -- copies


@each_copy
def test_a_function_under_amp_can_be_copied(copied):
    policy = jaxamp.default_amp_policy | {lax.tanh_p: jaxamp.use_precision(jnp.bfloat16)}
    amped = AMP(product, amp_policy=policy, keep="matmuls")
    found = copied(amped)
    assert repr(found) == repr(amped)
    assert str(jax.make_jaxpr(found)(W, W)) == str(jax.make_jaxpr(amped)(W, W))
    assert matmuls(found, W, W) == [LOW]


@each_copy
def test_a_module_under_amp_can_be_copied(copied):
    np.testing.assert_array_equal(copied(AMP(MODEL))(W[0]), AMP(MODEL)(W[0]))


@each_copy
def test_a_decorated_function_is_found_by_its_name(copied):
    assert copied(decorated)(W, W).dtype == jnp.float32
    assert round_trip(decorated) is decorated


@each_copy
def test_a_decorator_can_be_copied(copied):
    assert matmuls(copied(jaxamp.amp(compute_dtype=jnp.bfloat16))(product), W, W) == [LOW]


@each_copy
@pytest.mark.parametrize("policy", [*map(jaxamp.load_policy, jaxamp.presets()), POLICY], ids=[*jaxamp.presets(), "own"])
def test_policies_can_be_copied(copied, policy):
    found = copied(policy)
    assert type(found) is type(policy)
    assert dict(found) == dict(policy)


def test_a_function_without_a_name_is_pickled_by_cloudpickle_alone():
    amped = AMP(lambda x: x @ x)
    assert matmuls(round_trip_of_cloud(amped), W) == [LOW]
    with pytest.raises((pickle.PicklingError, AttributeError), match="lambda"):
        pickle.dumps(amped)


def test_a_primitive_that_can_not_be_found_again_is_refused():
    policy = jaxamp.default_amp_policy | {OTHER: jaxamp.use_original_precision}
    with raises(pickle.PicklingError, "the primitive 'a primitive of the user'", "expected one", "without this key"):
        pickle.dumps(policy)


def test_a_preset_is_changed_in_a_copy_alone():
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
    policy["body"] = jaxamp.use_compute_precision
    assert {"head", "body"} <= policy.keys()
    assert not {"head", "body"} & jaxamp.default_amp_policy.keys()
    assert {"head": 1} | policy == {**policy}
    assert ({"exp": 1} | jaxamp.default_amp_policy)["exp"] == 1
    with raises(TypeError, "item assignment"):
        jaxamp.default_amp_policy["head"] = 1
    with raises(TypeError, "unsupported operand"):
        jaxamp.default_amp_policy | 3


# -- how it prints


@pytest.mark.parametrize(
    ("amped", "text"),
    [
        (jaxamp.amp(product), "amp(product, compute_dtype=float16)"),
        (AMP(MODEL, keep="all"), "amp(Model, compute_dtype=bfloat16, keep='all')"),
        (AMP(functools.partial(product, W)), "amp(product, compute_dtype=bfloat16)"),
        (AMP(MODEL.layer.__call__), "amp(__call__, compute_dtype=bfloat16)"),
        (AMP(AMP(product)), "amp(product, compute_dtype=bfloat16)"),
        (AMP(disable_passes=["recompute"]), "amp(compute_dtype=bfloat16, disable_passes=['recompute'])"),
        (round_trip(AMP(product)), "amp(product, compute_dtype=bfloat16)"),
    ],
)
def test_it_says_what_it_runs_and_how(amped, text):
    assert repr(amped) == text


def test_it_names_its_policy():
    fast, own = (repr(AMP(product, amp_policy=policy)) for policy in ("fast", POLICY))
    assert "amp_policy=<policy 'fast', " in fast
    assert f"amp_policy=<policy of {len(POLICY)} keys>" in own
    assert repr(POLICY[lax.tanh_p]) == "use_precision(bfloat16)"


# -- as a function, as a method, as a pytree


def test_it_looks_like_the_function():
    amped = AMP(product)
    assert (amped.__name__, amped.__doc__, amped.__wrapped__) == ("product", None, product)
    assert functools.wraps(amped)(lambda: None).__wrapped__ is amped
    assert Model.rows.__doc__ == "Each row."


def test_methods():
    class Plain:
        @AMP
        def rows(self, x):
            return x @ x

    assert isinstance(Plain().rows, types.MethodType)
    assert matmuls(Plain().rows, W) == [LOW]
    assert matmuls(MODEL.rows, W) == [LOW]
    grads = eqx.filter_grad(lambda model: jnp.sum(model.rows(W)))(MODEL)
    np.testing.assert_array_equal(grads.layer.bias, jnp.full(4, 4.0))
    assert len(jax.tree.leaves(MODEL.rows)) == 2  # it can be passed to filter_jit


def test_the_arrays_of_a_module_are_seen():
    amped = AMP(MODEL)
    assert [x.shape for x in jax.tree.leaves(amped)] == [(4, 4), (4,)]
    paths = [jax.tree_util.keystr(path) for path, _ in jax.tree.leaves_with_path(amped)]
    assert paths == [".__wrapped__.layer.weight", ".__wrapped__.layer.bias"]
    jaxpr = jax.make_jaxpr(eqx.filter_jit(amped))(W[0])
    assert len(jaxpr.jaxpr.invars) + len(jaxpr.consts) == 3
    grads = eqx.filter_grad(lambda fn: jnp.sum(fn(W[0])))(amped)
    np.testing.assert_array_equal(grads.__wrapped__.layer.bias, jnp.ones(4))


def test_the_nestings_with_equinox_are_silent():
    def loss(model, x):
        return jnp.sum(model(x))

    steps = [
        eqx.filter_jit(AMP(eqx.filter_value_and_grad(loss))),
        eqx.filter_jit(eqx.filter_value_and_grad(AMP(loss))),
        AMP(eqx.filter_jit(eqx.filter_value_and_grad(loss))),
    ]
    values = {float(step(MODEL, W[0])[0]) for step in steps}
    assert len(values) == 1
    batches = jax.vmap(AMP(MODEL)), eqx.filter_vmap(AMP(MODEL)), AMP(eqx.filter_vmap(MODEL)), AMP(jax.vmap(MODEL))
    assert len({fn(W).tobytes() for fn in batches}) == 1


def test_a_module_of_nnx_may_hold_one():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.layer = nnx.Linear(4, 4, rngs=rngs)
            self.activation = AMP(jnp.tanh)

        def __call__(self, x):
            return self.activation(self.layer(x))

    assert nnx.jit(lambda net, x: net(x))(Net(nnx.Rngs(0)), W).shape == (4, 4)


# -- errors of JAX, in the names of the user


def branches(params, x, *rest, scale=1.0):
    if jnp.sum(params["w"]) > 0:
        return x
    return x


class Branching(eqx.Module):
    weight: jax.Array

    def __call__(self, x):
        return x if self.weight[0, 0] > 0 else -x


class OfFlax(nnx.Module):
    def __init__(self):
        self.inner = nnx.Linear(4, 4, rngs=nnx.Rngs(0))

    def __call__(self, x):
        return x if self.inner.bias[0] > 0 else -x


@pytest.mark.parametrize("around", [lambda fn: fn, jax.jit], ids=["", "jit"])
@pytest.mark.parametrize(
    ("fn", "args", "function", "argument"),
    [
        (branches, ({"w": W}, W), "branches", r"params\['w'\]"),
        (lambda x: x if x > 0 else -x, (jnp.ones(()),), "<lambda>", "x"),
        (lambda x, *more: x if more[1] > 0 else -x, (W, W, jnp.ones(())), "<lambda>", r"more\[1\]"),
        (functools.partial(branches, scale=2.0), ({"w": W}, W), "branches", r"params\['w'\]"),
        (Branching(W), (W,), "Branching", r"Branching\.weight"),
        (eqx.filter_value_and_grad(branches), ({"w": W}, W), "branches", r"params\['w'\]"),
    ],
    ids=["a function", "a lambda", "more", "partial", "a module", "a gradient"],
)
def test_a_branch_on_a_value_names_the_function_and_the_argument(around, fn, args, function, argument):
    source = rf"tracing the function {function} at .*test_amped\.py:\d+ for amp"
    with raises(jax.errors.TracerBoolConversionError, source, f"the value of the argument {argument}\\."):
        around(AMP(fn))(*args)


def test_a_branch_on_the_state_of_an_nnx_module_names_it():
    with raises(jax.errors.TracerBoolConversionError, r"function OfFlax at .*test_amped\.py", r"OfFlax\.inner\.bias"):
        AMP(OfFlax())(W)
    with raises(jax.errors.TracerBoolConversionError, "<lambda>", r"model\.inner\.bias"):
        AMP(lambda model, x: model(x))(OfFlax(), W)


def test_keywords_have_their_names():
    with raises(jax.errors.TracerBoolConversionError, "the value of the argument flag"):
        AMP(lambda x, *, flag: x if flag else -x)(W, flag=jnp.ones((), bool))


def test_a_class_that_takes_arrays_alone_hides_the_names_and_nothing_else():
    @jax.tree_util.register_pytree_node_class
    class Strict:
        def __init__(self, x):
            self.x = x + 0

        def tree_flatten(self):
            return (self.x,), None

        @classmethod
        def tree_unflatten(cls, aux, children):
            return cls(*children)

    assert matmuls(AMP(lambda s: s.x @ s.x), Strict(W)) == [LOW]


# -- `with jaxamp.amp():`


def test_a_with_block_says_what_to_write():
    wanted = raises(TypeError, "got a block of code", "expected a function", r"Write `loss = jaxamp\.amp\(loss_fn\)`")
    with wanted, jaxamp.amp():
        pass
