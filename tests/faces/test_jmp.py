"""`jaxamp.jmp` beside JMP 0.0.4: the same bits where JMP is right, and one test for each fault of it."""

import importlib
import importlib.metadata
import re
import warnings

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import BF16, F16, F32, raises
from side_by_side import FINITE, assert_accepts, assert_same, run

from jaxamp import jmp

METHODS = "cast_to_param cast_to_compute cast_to_output".split()


@pytest.fixture
def peer():
    return pytest.importorskip("jmp", reason="JMP is not installed")


def mixed_tree():
    return {
        "w": jnp.linspace(-2, 2, 5),
        "half": jnp.ones(2, F16),
        "int": jnp.arange(3),
        "key": jax.random.key(0),
        "numpy": np.ones(2),
        "none": None,
        "str": "relu",
        "number": 1.5,
    }


# -- the same as JMP


@pytest.mark.parametrize(
    "name",
    """half full float16 bf16 f32 c=f16 p=f16,c=f16 p=f16,c=bf16 o=f16 p=bf16 p=f32,o=f16
    params=float32,compute=float16,output=float32""".split(),
)
def test_policies_are_read_as_jmp_does(peer, name):
    case = lambda m: [m.get_policy(name).param_dtype, m.get_policy(name).compute_dtype, m.get_policy(name).output_dtype]
    assert run(peer, case) == run(jmp, case)
    assert str(peer.get_policy(name)) == str(jmp.get_policy(name))
    assert jmp.get_policy(str(jmp.get_policy(name))) == jmp.get_policy(name)


@pytest.mark.parametrize("method", METHODS)
def test_policies_cast_as_jmps_do(peer, method):
    case = lambda m: getattr(m.get_policy("p=f32,c=f16,o=bf16"), method)(mixed_tree())
    assert_same(run(peer, case), run(jmp, case))


def test_with_output_dtype_is_jmps(peer):
    case = lambda m: str(m.Policy(F32, compute_dtype=F16, output_dtype=F16).with_output_dtype(BF16))
    assert run(peer, case) == run(jmp, case) == "p=full,c=f16,o=bf16"


def test_casts_are_jmps(peer):
    case = lambda m: [m.cast_to_half(mixed_tree()), m.cast_to_full(mixed_tree())]
    assert_same(run(peer, case), run(jmp, case))
    assert jmp.half_dtype() is peer.half_dtype()


def test_a_cast_array_is_not_weakly_typed(peer):
    case = lambda m: m.cast_to_full(jnp.asarray(2.0)).weak_type
    assert run(peer, case) is run(jmp, case) is False


def test_float64_is_float32_unless_the_user_asked_for_it(peer):
    def case(m):
        with pytest.warns(UserWarning, match="float64"):
            return m.get_policy("f64").cast_to_compute(jnp.ones(2))

    assert_same(run(peer, case), run(jmp, case))
    with jax.enable_x64(True):
        case = lambda m: m.get_policy("f64").cast_to_compute(jnp.ones(2, F32))
        assert_same(run(peer, case), run(jmp, case))


@pytest.mark.parametrize("tree", [{"a": [1.0, 2], "b": None}, [np.inf], [np.nan], [], jax.random.key(0), jnp.arange(2)])
def test_all_finite_is_jmps(peer, tree):
    case = lambda m: m.all_finite(tree)
    assert_same(run(peer, case), run(jmp, case))


@pytest.mark.parametrize("pred", [True, False])
def test_select_tree_is_jmps(peer, pred):
    a = {"w": jnp.ones(2), "n": jnp.arange(2), "key": jax.random.key(0), "none": None, "number": 1.5}
    b = {"w": jnp.full(2, -0.0), "n": jnp.ones(2, int), "key": jax.random.key(1), "none": None, "number": 2.5}
    case = lambda m: m.select_tree(jnp.array(pred), a, b)
    assert_same(run(peer, case), run(jmp, case))


SCALES = {
    "no-op": lambda m: m.NoOpLossScale(),
    "static": lambda m: m.StaticLossScale(jnp.float32(2**10)),
    "dynamic": lambda m: m.DynamicLossScale(jnp.float32(2**10)),
}


@pytest.mark.parametrize("kind", SCALES)
def test_scale_and_unscale_are_jmps(peer, kind):
    x = {"w": jnp.array([1.1, -2e-3, jnp.inf, jnp.nan]), "half": jnp.float16(3e-7), "number": 1.5, "numpy": np.ones(2)}

    def case(m):
        loss_scale = SCALES[kind](m)
        assert isinstance(loss_scale, m.LossScale)
        return [loss_scale.scale(x), loss_scale.unscale(x), loss_scale.loss_scale, loss_scale.adjust(jnp.array(True))]

    assert_same(run(peer, case), run(jmp, case))


@pytest.mark.parametrize("period", [1, 2, 3])
@pytest.mark.parametrize(("scale", "factor"), [(2.0**10, 2), (2.0**14, 4), (2.0, 2)])
def test_the_scale_moves_as_jmps_does(peer, period, scale, factor):
    def case(m):
        loss_scale = m.DynamicLossScale(jnp.float32(scale), period=period, factor=factor)
        return [(loss_scale := loss_scale.adjust(jnp.array(finite))) for finite in FINITE]

    assert_same(run(peer, case), run(jmp, case))


def moves(loss_scale, *finite):
    return [float((loss_scale := loss_scale.adjust(jnp.array(f))).loss_scale) for f in finite]


def test_the_ceiling_is_reached_and_kept(peer):
    case = lambda m: moves(m.DynamicLossScale(jnp.float32(2.0**125), period=1), *[True] * 4)
    assert run(peer, case) == run(jmp, case) == [2.0**126, 2.0**127, 2.0**127, 2.0**127]


def test_the_floor_is_reached_and_kept(peer):
    case = lambda m: moves(m.DynamicLossScale(jnp.float32(2), min_loss_scale=np.float32(0.5)), *[False] * 4)
    assert run(peer, case) == run(jmp, case) == [1.0, 0.5, 0.5, 0.5]


def test_signatures_are_jmps(peer):
    changed = {"DynamicLossScale": ["counter", "min_loss_scale"]}  # a factory of the same value is shown there
    assert set(jmp.__all__) == set(peer.__all__)
    for name in set(peer.__all__) - {"LossScale"}:
        assert_accepts(getattr(peer, name), getattr(jmp, name), changed.get(name, ()))
    for name in ("NoOpLossScale", "StaticLossScale", "DynamicLossScale"):
        for method in ("scale", "unscale", "adjust"):
            assert_accepts(getattr(getattr(peer, name), method), getattr(getattr(jmp, name), method))
    for method in [*METHODS, "with_output_dtype"]:
        assert_accepts(getattr(peer.Policy, method), getattr(jmp.Policy, method))
    assert_same(peer.DynamicLossScale(jnp.float32(8)), jmp.DynamicLossScale(jnp.float32(8)))


# -- faults of JMP


def test_the_floor_survives_every_tree_operation(peer):
    def case(m):
        loss_scale = m.DynamicLossScale(jnp.float32(128), min_loss_scale=np.float32(64))
        copies = [jax.tree.map(lambda x: x, loss_scale), jax.jit(lambda x: x)(loss_scale)]
        return [moves(x, False, False)[-1] for x in [loss_scale, *copies]]

    assert run(peer, case) == [64.0, 32.0, 32.0]
    assert run(jmp, case) == [64.0, 64.0, 64.0]


def test_leaves_are_jmps(peer):
    case = lambda m: jax.tree.leaves(m.DynamicLossScale(jnp.float32(8), jnp.int32(3), min_loss_scale=np.float32(0.5)))
    assert_same(run(peer, case), run(jmp, case))
    assert str(jax.tree.flatten_with_path(jmp.DynamicLossScale(8.0))[0][0][0]) == "(GetAttrKey(name='loss_scale'),)"


def test_a_floor_that_is_an_array_is_a_leaf():
    """Its place in the tree stays, whatever its value becomes: NumPy on the host, a shape, nothing."""
    floors = jnp.array([0.5, 1.0])
    make = lambda floor: jmp.DynamicLossScale(2.0, min_loss_scale=floor)
    loss_scale = make(floors[0])
    structure = jax.tree.structure(loss_scale)
    assert structure.num_leaves == 3
    assert structure == jax.tree.structure(jax.device_get(loss_scale))
    assert structure == jax.tree.structure(jax.eval_shape(make, floors[0]))
    assert jax.tree.leaves(jax.tree.map(lambda x: None, loss_scale)) == []
    scales = jax.vmap(lambda floor: make(floor).adjust(False).adjust(False).loss_scale)(floors)
    assert scales.tolist() == [0.5, 1.0]


@pytest.mark.parametrize("value", [2, np.int32(2), np.full((), 2, np.int16), "array"])
def test_an_integer_scale_is_warned_of_as_by_jmp(peer, value):
    value = jnp.int32(2) if isinstance(value, str) else value
    for m in (peer, jmp):
        with pytest.warns(UserWarning, match="Expected floating type for loss_scale, got int") as caught:
            m.DynamicLossScale(value)
        with pytest.warns(UserWarning, match="Expected floating type for min_loss_scale, got int"):
            m.DynamicLossScale(2.0, min_loss_scale=value)
    assert caught[0].filename == __file__
    assert_same(jnp.float32(4), jmp.StaticLossScale(value).scale(jnp.float32(2)))  # no warning, as in JMP


def test_a_scale_in_half_precision_can_be_adjusted(peer):
    case = lambda m: moves(m.DynamicLossScale(m.half_dtype()(2**15), period=1), True, False)
    with pytest.raises(TypeError):
        run(peer, case)
    assert run(jmp, case) == [2.0**16, 2.0**15]


@pytest.mark.parametrize(
    "scale", [lambda: jnp.float16(2**15), lambda: jnp.asarray(2.0**15), lambda: 2**15], ids=["half", "weak", "int"]
)
@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_float16_gradients_are_unscaled_in_float32(peer, kind, scale):
    def case(m):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # JMP warns of integers
            return getattr(m, kind)(scale()).unscale(jnp.float16(2.0**-12))

    assert_same(jnp.float16(0), run(peer, case))
    assert_same(jnp.float32(2.0**-27), run(jmp, case))


@pytest.mark.parametrize("kind", ["StaticLossScale", "DynamicLossScale"])
def test_the_largest_scales_can_be_divided_by(peer, kind):
    case = lambda m: getattr(m, kind)(jnp.float32(2.0**127)).unscale(jnp.array([2.0**127, 2.0**100]))
    assert run(peer, case).tolist() == [0.0, 0.0]
    assert run(jmp, case).tolist() == [1.0, 2.0**-27]


@pytest.mark.parametrize("method", ["scale", "unscale"])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_scale_leaves_what_is_no_float_alone(peer, kind, method):
    leaves = [jnp.arange(2), 3, jax.random.key(0), "relu", None]
    case = lambda m: getattr(SCALES[kind](m), method)(leaves[:2])
    assert [x.dtype for x in run(peer, case)] == [F32, F32]
    for leaf in leaves[2:4]:
        with pytest.raises(TypeError):
            run(peer, lambda m, leaf=leaf: getattr(SCALES[kind](m), method)(leaf))
    assert_same(leaves, getattr(SCALES[kind](jmp), method)(leaves))


def test_all_finite_and_select_tree_pass_over_what_is_no_number(peer):
    tree = [jnp.ones(2), "relu", jnp.tanh]
    for case in (lambda m: m.all_finite(tree), lambda m: m.select_tree(jnp.array(True), tree, tree)):
        with pytest.raises(TypeError):
            run(peer, case)
        run(jmp, case)


def test_select_tree_selects_between_two_dtypes(peer):
    case = lambda m: m.select_tree(jnp.array(False), jnp.ones(2), jnp.zeros(2, F16))
    with pytest.raises(TypeError):
        run(peer, case)
    assert_same(jnp.zeros(2), run(jmp, case))


def test_an_overflow_does_not_raise_the_scale(peer):
    case = lambda m: moves(m.DynamicLossScale(jnp.float32(0.25)), False, False)
    assert run(peer, case) == [1.0, 1.0]
    assert run(jmp, case) == [0.25, 0.25]


def test_the_floor_is_positive(peer):
    case = lambda m: moves(m.DynamicLossScale(jnp.float32(2.0**-125), min_loss_scale=np.float32(0)), *[False] * 30)[-1]
    assert run(peer, case) == 0
    assert run(jmp, case) == np.finfo(np.float32).tiny


def test_an_array_as_static_scale_is_a_leaf(peer):
    def traces(m, scales):
        count = []
        scaled = jax.jit(lambda loss_scale, x: count.append(x) or loss_scale.scale(x))
        values = [float(scaled(m.StaticLossScale(scale), jnp.ones(()))) for scale in scales]
        return len(count), values

    case = lambda m: traces(m, [jnp.float32(8), jnp.float32(16)])
    assert run(peer, case) == (2, [8.0, 16.0])
    assert run(jmp, case) == (1, [8.0, 16.0])
    fixed = lambda m: [jax.tree.leaves(m.StaticLossScale(scale)) for scale in (8.0, 0)]
    assert run(peer, fixed) == run(jmp, fixed) == [[], []]


def test_a_policy_has_a_name_whatever_form_its_dtypes_have(peer):
    case = lambda m: m.Policy(np.dtype("float32"), np.float16, jnp.bfloat16)
    with pytest.raises(KeyError):
        str(case(peer))
    assert str(case(jmp)) == "p=full,c=f16,o=bf16"
    same = lambda m: [case(m), m.Policy(F32, F16, np.dtype(BF16))]
    assert same(peer)[0] == same(peer)[1]
    assert len(set(same(peer))) == 2
    assert same(jmp)[0] == same(jmp)[1]
    assert len(set(same(jmp))) == 1
    assert case(jmp) != "p=full,c=f16,o=bf16"
    assert str(jmp.Policy(jnp.float8_e4m3fn, F16, F32)) == "p=float8_e4m3fn,c=f16,o=full"


def test_numpy_scalars_are_cast(peer):
    case = lambda m: m.cast_to_half(np.float32(1)).dtype
    assert (run(peer, case), run(jmp, case)) == (F32, F16)


def test_the_error_at_a_dtype_names_what_is_accepted(peer):
    with pytest.raises(ValueError, match="'f' for 'full'"):
        peer.get_policy("f")
    with raises(ValueError, "Unknown dtype 'f' in the policy 'f'", "expected one of half, bf16, ", "Write") as info:
        jmp.get_policy("f")
    names = re.search(r"one of (.*?)\.", str(info.value)).group(1).split(", ")
    assert len(names) == 10
    assert [jmp.get_policy(name) for name in names]


def test_the_tables_of_jmps_policy_module_are_there(peer):
    theirs = importlib.import_module("jmp._src.policy")
    assert theirs.dtype_to_names == jmp.dtype_to_names
    assert theirs.name_to_dtype == jmp.name_to_dtype
    assert [theirs.parse_dtype(x) for x in ("half", "bf16")] == [jmp.parse_dtype(x) for x in ("half", "bf16")]


def test_spaces_in_a_policy_are_allowed(peer):
    with pytest.raises(ValueError, match="Unknown key ' c'"):
        peer.get_policy("p=f32, c=f16")
    assert str(jmp.get_policy("p=f32, c = f16")) == "p=full,c=f16,o=f16"


def test_a_key_that_is_given_twice_is_refused(peer):
    assert peer.get_policy("c=f16,compute=bf16").compute_dtype == BF16
    with raises(ValueError, "got 'c=f16,compute=bf16', with 'compute=bf16'", "each at most once", "Write get_policy"):
        jmp.get_policy("c=f16,compute=bf16")


# -- errors


@pytest.mark.parametrize("name", ["x=f16", "p=f16,bf16", "=f16", "p=f16,"])
def test_an_unknown_key_is_refused(name):
    with raises(
        ValueError, f"get_policy got '{name}', with", "expected params=, compute= and output=", "Write get_policy"
    ):
        jmp.get_policy(name)


@pytest.mark.parametrize("name", ["", "p=", "p=f16=f32", "float17", "int32"])
def test_an_unknown_dtype_is_refused(name):
    with raises(ValueError, f"Unknown dtype '.*' in the policy '{name}'", "expected one of half", "Write get_policy"):
        jmp.get_policy(name)


def test_a_policy_that_is_no_string_is_refused():
    with raises(TypeError, "get_policy got", "expected a string", r"Write get_policy\('params=float32"):
        jmp.get_policy(jnp.float16)


@pytest.mark.parametrize("dtype", [None, jnp.int32, "halve", 3])
def test_a_policy_of_what_is_no_float_is_refused(dtype):
    with raises(
        TypeError, "Policy got compute_dtype=", "expected a floating-point dtype", "Write compute_dtype=jnp.float32"
    ):
        jmp.Policy(F32, dtype, F32)


@pytest.mark.parametrize("pred", [jnp.ones(2, bool), jnp.float32(1), 1])
def test_a_condition_that_is_no_bool_is_refused(peer, pred):
    with pytest.raises((AssertionError, AttributeError)):
        peer.select_tree(pred, jnp.ones(2), jnp.ones(2))
    for kind in (TypeError, AssertionError):  # JMP asserts
        with raises(kind, "select_tree got a condition of", "expected boolean scalar", r"Write select_tree\(jmp"):
            jmp.select_tree(pred, jnp.ones(2), jnp.ones(2))
        with raises(kind, "adjust got a condition of", "expected boolean scalar", r"Write loss_scale.adjust\(jmp"):
            jmp.DynamicLossScale(8.0).adjust(pred)


def test_bad_numbers_of_a_loss_scale_are_refused():
    for kind in (jmp.StaticLossScale, jmp.DynamicLossScale):
        with raises(TypeError, "loss_scale='8', of type str", "expected a number", r"Write loss_scale=2.0\*\*15"):
            kind("8")
        with raises(TypeError, r"loss_scale of shape \(2,\)", "expected a scalar", r"Write loss_scale=2.0\*\*15"):
            kind(jnp.ones(2))
        with raises(ValueError, "loss_scale=inf", "expected a .*, finite number", r"Write loss_scale=2.0\*\*15"):
            kind(np.inf)
    with raises(ValueError, "loss_scale=0", "expected a positive, finite number", r"Write loss_scale=2.0\*\*15"):
        jmp.DynamicLossScale(0.0)
    with raises(ValueError, "loss_scale=-1", "expected a non-negative, finite number", r"Write loss_scale=2.0\*\*15"):
        jmp.StaticLossScale(-1.0)
    with raises(ValueError, "period=0", "expected a positive, finite number", "Write period=2000"):
        jmp.DynamicLossScale(8.0, period=0)


# -- ours


def test_loss_scales_survive_transforms():
    loss_scale = jmp.DynamicLossScale(8.0, period=3, min_loss_scale=0.5)
    for same in (jax.jit(lambda s: s)(loss_scale), jax.tree.map(lambda x: x, loss_scale)):
        assert [float(x) for x in jax.tree.leaves(same)] == [8.0, 0.0]
        assert (same.period, same.factor, same.min_loss_scale) == (3, 2, 0.5)
        assert same == loss_scale
    for jit in (jax.jit, eqx.filter_jit):
        step = jit(lambda s: s.adjust(jnp.array(True)))
        steps = [loss_scale]
        for _ in range(4):
            steps.append(step(steps[-1]))
        assert [float(s.loss_scale) for s in steps] == [8.0, 8.0, 8.0, 16.0, 16.0]
    finite = jnp.array([True, True, False])
    last, scales = jax.lax.scan(lambda s, f: (s.adjust(f), s.loss_scale), loss_scale, finite)
    assert (scales.tolist(), float(last.loss_scale)) == ([8.0, 8.0, 8.0], 4.0)
    assert jax.tree.leaves(jax.tree.map(lambda x: None, loss_scale)) == []
    assert jax.jit(lambda s: s)(jmp.NoOpLossScale()) == jmp.NoOpLossScale()


def test_loss_scales_of_numbers_are_not_traced_anew():
    count = []
    step = jax.jit(lambda s: count.append(s) or s.adjust(jnp.array(True)))
    loss_scale = jmp.DynamicLossScale(2.0**15)
    for _ in range(3):
        loss_scale = step(loss_scale)
    assert len(count) == 1


@pytest.mark.promotes
def test_haiku_takes_our_policies():
    hk = pytest.importorskip("haiku", reason="Haiku is not installed")
    net = hk.transform(lambda x: hk.Linear(2, name="mlp")(x))
    with hk.mixed_precision.push_policy(hk.Linear, jmp.get_policy("p=f32,c=f16,o=bf16")):
        params = net.init(jax.random.key(0), jnp.ones((1, 3)))
        jaxpr = jax.make_jaxpr(lambda p, x: net.apply(p, None, x))(params, jnp.ones((1, 3)))
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(F32)}
    assert re.search(r":f16\[1,2\] = dot_general", str(jaxpr))
    assert jaxpr.out_avals[0].dtype == BF16


# -- JMP's documents


def readme_blocks():
    text = importlib.metadata.metadata("jmp").get_payload()
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(blocks) == 8
    return blocks


def filled(block):
    """The README's code with its `...` written out, and nothing else changed."""
    return (
        block.replace("jax.grad(my_loss_fn)(...)", "jax.grad(my_loss_fn)(params, loss_scale, x)")
        .replace("loss = ...", "loss = jnp.mean(layer(params, x).astype(jnp.float32) ** 2)")
        .replace("loss_scale, ...)", "loss_scale, x)")
        .replace("jmp.LossScale, ...)", "jmp.LossScale, x)")
    )


def readme(import_line, last=8):
    """Runs the README's code in order, with another import, and returns its names."""
    setup, policy, layer, *others = readme_blocks()
    assert "import jmp\n" in setup
    layer = layer.replace('{"w": jnp.ones([], dtype=my_policy.param_dtype)}', "jnp.ones((2, 4)), jnp.zeros(4)")
    names = {"num_steps": 3, "x": jnp.ones((8, 2)) / 4}
    names["apply_optimizer"] = lambda params, grads: jax.tree.map(lambda p, g: p - p.dtype.type(0.5) * g, params, grads)
    for block in [setup.replace("import jmp\n", import_line), policy, layer, *map(filled, others)][:last]:
        names |= {"loss": 1.0, "grads": [1.0], "grads_finite": jnp.array(True)}
        exec(compile(block, "README.md", "exec"), names)
    return names


@pytest.mark.slow
def test_the_readmes_policies_and_static_scale_run_as_with_jmp(peer):
    theirs = run(peer, lambda m: readme("import jmp\n", last=6))
    ours = run(jmp, lambda m: readme("from jaxamp import jmp\n", last=6))
    assert str(theirs["my_policy"]) == str(ours["my_policy"]) == "p=full,c=f16,o=full"
    assert_same([theirs["y"], theirs["params"]], [ours["y"], ours["params"]])
    assert isinstance(ours["loss_scale"], jmp.StaticLossScale)


@pytest.mark.slow
def test_the_readmes_dynamic_and_no_op_scales_run(peer):
    with pytest.raises(TypeError):
        run(peer, lambda m: readme("import jmp\n"))
    names = run(jmp, lambda m: readme("from jaxamp import jmp\n"))
    assert names["loss_scale"] == jmp.NoOpLossScale()
    names = run(jmp, lambda m: readme("from jaxamp import jmp\n", last=7))
    assert_same(jnp.float32(2**15), names["loss_scale"].loss_scale)
    assert int(names["loss_scale"].counter) == 3
    assert all(x.dtype == F32 and x.max() < 1 for x in names["params"])
