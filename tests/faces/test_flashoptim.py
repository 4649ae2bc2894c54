"""`jaxamp.flashoptim` beside flashoptim-jax 0.1.0, run eagerly on its plain path; one test for each fault of it."""

import importlib
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, assert_same_bits, raises
from optimizers import distance, gradients, tree, wide
from side_by_side import assert_accepts

from jaxamp import flashoptim
from jaxamp.flashoptim import compression, quantization
from jaxamp.optim._published_codecs import round_to_int

CONSTRUCTORS = "flash_adam flash_adamw flash_sgd flash_sgdw flash_lion".split()
STEPS = 50


@pytest.fixture
def peer():
    return pytest.importorskip("flashoptim_jax", reason="flashoptim-jax is not installed")


def run(module, name, params, eagerly=False, **options):
    """50 steps: by the peer on its plain path, by us rounding as it does."""
    if module is flashoptim:
        options |= {"variance_floor": False} if "adam" in name else {}
    else:
        options |= {"fused": False}
    optimizer = getattr(module, name)(learning_rate=3e-3, **options)
    with jax.numpy_dtype_promotion("strict" if module is flashoptim else "standard"):
        init, step = optimizer if eagerly else map(jax.jit, optimizer)
        state = init(params)
        for i in range(STEPS):
            params, state = step(params, state, gradients(params, i))
    return params, state


CASES = {
    "adamw-bfloat16": ("flash_adamw", BF16, {}),
    "adamw-float16": ("flash_adamw", F16, {}),
    "adamw-float32": ("flash_adamw", F32, {"master_weight_bits": None}),
    "adamw-32-bits": ("flash_adamw", BF16, {"master_weight_bits": 32}),
    "adamw-float16-32-bits": ("flash_adamw", F16, {"master_weight_bits": 32}),
    "adamw-groups-of-64": ("flash_adamw", BF16, {"group_size": 64}),
    "adamw-float32-moments": ("flash_adamw", BF16, {"quantize": False}),
    "adamw-param-groups": ("flash_adamw", BF16, {"param_groups": [{"params": "odd", "weight_decay": 0.5}]}),
    "adam": ("flash_adam", BF16, {"weight_decay": 0.1}),
    "sgd": ("flash_sgd", BF16, {}),
    "sgd-momentum": ("flash_sgd", BF16, {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "sgd-nesterov": ("flash_sgd", F16, {"momentum": 0.9, "nesterov": True}),
    "sgdw-momentum": ("flash_sgdw", BF16, {"momentum": 0.9, "weight_decay": 0.1}),
    "lion": ("flash_lion", BF16, {"weight_decay": 0.1}),
    "lion-float32-moments": ("flash_lion", F32, {"quantize": False, "master_weight_bits": None}),
}
# The way from its weights to ours, over the way that they have gone. Its plain path rounds differences of parameters
# (fault 2), and a sign of Lion's that falls the other way is two steps.
TOLERANCE, OF_LION = 2e-3, 2e-2


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_fifty_steps_are_the_peers(peer, case):
    name, dtype, options = CASES[case]
    params = tree(dtype)
    check(case, params, run(flashoptim, name, params, **options), run(peer, name, params, eagerly=True, **options))


@pytest.fixture(scope="module")
def adamw():
    """The same of the one case that all tests run: on a CPU, XLA leaves its plain path as it is."""
    peer, params = pytest.importorskip("flashoptim_jax", reason="flashoptim-jax is not installed"), tree(BF16)
    return params, *(run(module, "flash_adamw", params) for module in (flashoptim, peer))


def test_fifty_compiled_steps_are_the_peers(adamw):
    check("adamw-bfloat16", *adamw)


def check(case, params, ours, theirs):
    weights_of = jax.jit(flashoptim.reconstruct_weights)
    weights = [weights_of(params, state.ecc) for params, state in (ours, theirs)]
    assert distance(*weights) <= (OF_LION if "lion" in case else TOLERANCE) * distance(weights[1], params)
    assert int(ours[1].count) == int(theirs[1].count) == STEPS
    types = lambda state: jax.tree.map(lambda x: (x.shape, str(x.dtype)), tuple(map(jax.tree.leaves, state)))
    assert types(ours[1]) == types(theirs[1])


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_constructors_have_the_peers_signatures(peer, name):
    assert_accepts(getattr(peer, name), getattr(flashoptim, name))


def test_all_names_of_the_peer_are_there(peer):
    assert sorted(flashoptim.__all__) == sorted(peer.__all__)
    for name in peer.__all__:
        theirs, ours = getattr(peer, name), getattr(flashoptim, name)
        if inspect.isfunction(theirs):
            assert_accepts(theirs, ours)
        else:
            assert ours._fields == theirs._fields
    for ours, module in ((quantization, "quantization"), (compression, "compression")):
        theirs = importlib.import_module(f"flashoptim_jax.{module}")
        public = [n for n, f in vars(theirs).items() if inspect.isfunction(f) and not n.startswith("_")]
        assert all(hasattr(ours, name) for name in public)


def test_arrays_are_quantised_as_the_peer_does(peer):
    x = np.random.default_rng(0).normal(size=(5, 37)).astype(np.float32)
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.jit(lambda x: (peer.quantize_momentum(x), peer.quantize_variance(x * x, 16)))(x)
        back = jax.jit(lambda m, v: (peer.dequantize_momentum(m), peer.dequantize_variance(v, 16)))(*theirs)
    quantise = lambda x: (flashoptim.quantize_momentum(x), flashoptim.quantize_variance(x * x, 16, floor=False))
    ours = jax.jit(quantise)(x)
    for mine, its in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        assert (mine.dtype, mine.shape) == (its.dtype, its.shape)
        apart = np.abs(np.asarray(mine, np.float32) - np.asarray(its, np.float32))
        assert (apart > 0).mean() < 0.02  # ties
        assert apart.max() <= 1
    read = lambda m, v: (flashoptim.dequantize_momentum(m), flashoptim.dequantize_variance(v, 16))
    again = jax.jit(read)(*(flashoptim.QuantizedArray(*x) for x in theirs))
    for mine, its in zip(again, back, strict=True):
        np.testing.assert_allclose(mine, its, rtol=1e-6)


@pytest.mark.parametrize(("dtype", "bits"), [(BF16, 24), (BF16, 32), (F16, 24), (F16, 32), (BF16, None), (F32, 24)])
def test_weights_are_split_as_the_peer_does(peer, dtype, bits):
    x = np.float32([*np.random.default_rng(0).normal(size=4096), 0.0, -0.0, 1.0, 3e-6, 0.9999])
    with jax.numpy_dtype_promotion("standard"):
        theirs = jax.jit(lambda x: peer.split_leaf(x, dtype, bits))(x)
        back = jax.jit(peer.reconstruct_leaf)(*theirs)
    ours = jax.jit(lambda x: flashoptim.split_leaf(x, dtype, bits))(x)
    assert_same_bits(ours[0], theirs[0])
    assert ours[1].dtype == theirs[1].dtype
    apart = np.abs(np.asarray(ours[1]).astype(np.int32) - np.asarray(theirs[1]).astype(np.int32))
    assert apart.max() <= (bits == 32)  # ties of the product in float32
    assert apart.mean() < 0.01
    np.testing.assert_allclose(jax.jit(flashoptim.reconstruct_leaf)(*theirs), back, rtol=2e-7)
    params, ecc = jax.jit(lambda x, like: flashoptim.set_fp32_params(x, like, bits))({"w": x}, {"w": theirs[0]})
    assert params["w"].dtype == ours[0].dtype
    np.testing.assert_array_equal(ecc["w"], ours[1])


def test_its_state_dicts_are_read_and_ours_are_its(peer, adamw):
    params, _, (_, theirs) = adamw
    with jax.numpy_dtype_promotion("standard"):
        saved = peer.flash_adamw_state_dict(theirs)
    loaded = flashoptim.load_flash_adamw_state_dict(saved)
    assert type(loaded) is flashoptim.FlashAdamState
    assert_same_bits([*map(jax.tree.leaves, loaded)], [*map(jax.tree.leaves, theirs)])
    with jax.numpy_dtype_promotion("standard"):
        again = peer.load_flash_adamw_state_dict(flashoptim.flash_adamw_state_dict(loaded))
    assert_same_bits([*map(jax.tree.leaves, again)], [*map(jax.tree.leaves, theirs)])
    for name in ("sgd", "lion"):
        state = getattr(flashoptim, f"flash_{name}")(1e-3).init(params)
        saved = getattr(flashoptim, f"flash_{name}_state_dict")(state)
        assert_same_bits(getattr(flashoptim, f"load_flash_{name}_state_dict")(saved), state)
    with raises(ValueError, "got a state dict without 'nu'; expected count, mu, nu, ecc", "Pass what"):
        flashoptim.load_flash_adamw_state_dict(saved)


# -- faults


def test_fault_2_the_parameter_is_the_weight_rounded():
    params = {"w": tree(BF16)["w"]}
    optimizer = flashoptim.flash_adamw(0.3)
    new, state = jax.jit(optimizer.step)(params, optimizer.init(params), gradients(params, 0))
    weight = np.asarray(jax.jit(flashoptim.reconstruct_weights)(new, state.ecc)["w"])
    ties = np.abs(state.ecc["w"]) == 127
    assert ((weight.astype(BF16) == np.asarray(new["w"])) | ties).all()


def test_fault_3_low_gradients_are_read_as_they_are():
    params = {"w": jnp.ones((4, 64), BF16)}
    optimizer = flashoptim.flash_adamw()
    grads = jax.tree.map(lambda g: np.asarray(g).astype(BF16), gradients(params, 0))
    state, step = optimizer.init(params), jax.jit(optimizer.step)
    assert_same_bits(step(params, state, grads), step(params, state, wide(grads)))


def test_fault_6_a_step_can_be_skipped():
    params = {"w": jnp.ones((4, 64), BF16)}
    optimizer = flashoptim.flash_lion()
    state = optimizer.init(params)
    step = jax.jit(lambda p, s, g: optimizer.step(p, s, g, scale=0.5, ok=False))
    assert_same_bits(step(params, state, gradients(params, 0)), (params, state))


def test_fault_7_a_variance_is_not_stored_as_zero(peer):
    x = jnp.array([1e-8, 1.0])
    assert jax.jit(flashoptim.quantize_variance)(x).values.tolist() == [1, 255]
    with jax.numpy_dtype_promotion("standard"):
        assert jax.jit(peer.quantize_variance)(x).values.tolist() == [0, 255]


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_a_group_size_that_its_kernels_cant_read_is_refused_where_fused(peer, name):
    for module in (peer, flashoptim):
        with pytest.raises(ValueError, match="group_size must divide BLOCK_SIZE"):
            getattr(module, name)(group_size=40)
    groups = [{"params": "w", "group_size": 40}]
    with raises(ValueError, f"{name} got group_size=40 with fused=True", "must divide", "1024", "Write fused=False"):
        getattr(flashoptim, name)(param_groups=groups)
    make = getattr(flashoptim, name)
    for optimizer in (
        make(group_size=40, fused=False),
        make(group_size=40, quantize=False),
        make(fused=False, param_groups=groups),
        make(param_groups=[{**groups[0], "fused": False}]),
    ):
        assert optimizer.init({"w": jnp.ones(80, BF16)}).ecc["w"].shape == (80,)


@pytest.mark.parametrize("name", CONSTRUCTORS)
def test_parameters_without_a_float_are_refused(peer, name):
    params = {"x": jnp.arange(3)}
    for module in (peer, flashoptim):
        with pytest.raises(ValueError, match="fused=True only supports parameter dtypes"):
            getattr(module, name)().init(params)
    make = getattr(flashoptim, name)
    for fused in (True, False):
        with raises(ValueError, f"{name} got no parameter that it can step", "'x' is in int32", "bfloat16", "Pass"):
            make(fused=fused, master_weight_bits=None).init(params)
    assert jax.tree.leaves(make(master_weight_bits=None).init({"x": None})) == [0]


def test_bits_that_mean_nothing_are_refused_with_their_group(peer):
    params = {"low": jnp.ones(32, BF16), "wide": jnp.ones(32)}
    for module in (peer, flashoptim):
        optimizer = module.flash_adamw(param_groups=[{"params": "wide", "master_weight_bits": 24}], fused=False)
        with pytest.raises(ValueError, match=r"param_groups\[0\]\['master_weight_bits'\]=24 has no effect"):
            optimizer.init(params)


def test_fault_10_ties_go_to_even():
    """The function is private, but flashoptim-jax's own tests import it. It rounds as the codes are rounded."""
    halves = jnp.arange(-254, 511) / 2
    rounded = quantization._round_to_nearest(halves)
    np.testing.assert_array_equal(rounded, np.rint(halves))
    np.testing.assert_array_equal(rounded, round_to_int(halves, jnp.int16))


def test_fault_11_leaves_that_are_no_floats_stay():
    assert flashoptim.cast_tree_bf16({"w": jnp.ones(2), "n": jnp.arange(2)})["n"].dtype == jnp.int32
    params = {"w": jnp.ones(32, BF16), "n": jnp.arange(2), "e": jnp.zeros((0, 3), BF16)}
    optimizer = flashoptim.flash_adamw()
    new, _ = jax.jit(optimizer.step)(params, optimizer.init(params), {"w": jnp.ones(32), "n": None, "e": params["e"]})
    assert_same_bits((new["n"], new["e"]), (params["n"], params["e"]))


def test_none_stays_none():
    params = {"w": jnp.ones(32, BF16), "none": None}
    optimizer = flashoptim.flash_adamw()
    state = optimizer.init(params)
    assert all(tree["none"] is None for tree in (state.mu, state.nu, state.ecc))
    weights = jax.jit(flashoptim.reconstruct_weights)(params, state.ecc)
    assert_same_bits(flashoptim.set_fp32_params(weights, params), (params, state.ecc))
    saved = flashoptim.flash_adamw_state_dict(state)
    assert_same_bits(flashoptim.load_flash_adamw_state_dict(saved), state)


def test_its_states_are_stepped(adamw):
    """A state of its classes, as it is: the next step is that of a state of ours."""
    _, _, (params, theirs) = adamw
    optimizer = flashoptim.flash_adamw()
    ours = flashoptim.load_flash_adamw_state_dict(flashoptim.flash_adamw_state_dict(theirs))
    step, grads = jax.jit(optimizer.step), gradients(params, STEPS)
    assert_same_bits(step(params, theirs, grads), step(params, ours, grads))


def test_fault_12_errors_name_the_leaf():
    optimizer, params = flashoptim.flash_adamw(), {"w": jnp.ones(32, BF16)}
    state = optimizer.init({"v": jnp.ones(32, BF16)})
    with raises(ValueError, "flash_adamw got a state that is without a leaf for 'w'; expected", "Write state"):
        optimizer.step(params, state, params)
    state = optimizer.init({"w": jnp.ones(64, BF16)})
    with raises(ValueError, "flash_adamw got a state with", "for 'w'", "expected mu and nu", "Write state"):
        optimizer.step(params, state, params)
    with raises(TypeError, "flash_adamw got tuple as its state; expected", "Write state"):
        optimizer.step(params, (), params)
    with raises(ValueError, "in flash_adamw, master_weight_bits=24 has no effect", "such as 'w'; expected", "Write"):
        optimizer.init({"w": jnp.ones(32)})
    with raises(ValueError, "flashoptim got master_weight_bits=16; expected None, 24 or 32", "Write"):
        flashoptim.flash_adamw(master_weight_bits=16)
    with raises(ValueError, "flashoptim got master_weight_bits=16; expected None, 24 or 32", "Write"):
        flashoptim.split_leaf(jnp.ones(3), BF16, 16)
    with raises(ValueError, "flash_sgdw got nesterov=True with momentum=0.0", "expected a momentum", "Write"):
        flashoptim.flash_sgdw(nesterov=True)
    with raises(ValueError, r"\(3,\) scales for values of shape \(64,\); expected \(2,\)", "Pass the group size"):
        flashoptim.dequantize_momentum(flashoptim.QuantizedArray(jnp.ones(64, jnp.int8), jnp.ones(3, F16)))
    with raises(ValueError, "set_fp32_params got fp32_params without a leaf for 'w'", "expected", "Pass two"):
        flashoptim.set_fp32_params({}, params)
