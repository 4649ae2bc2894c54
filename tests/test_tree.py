"""Casting, finiteness and selection over pytrees with everything in them."""

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp


def everything():
    return {
        "float": jnp.ones(2),
        "half": jnp.ones(2, jnp.float16),
        "complex": jnp.ones(2, jnp.complex64),
        "int": jnp.arange(2),
        "bool": jnp.array([True, False]),
        "key": jax.random.key(0),
        "float0": np.zeros(2, jax.dtypes.float0),
        "numpy": np.ones(2, np.float32),
        "numpy64": np.ones(2, np.float64),
        "numpy scalar": np.float32(1.0),
        "numpy int": np.arange(2),
        "none": None,
        "text": "relu",
        "function": jnp.sin,
        "python": (1, 2.5, True),
        "module": eqx.nn.Linear(2, 2, key=jax.random.key(1)),
    }


FLOATS = {"float", "half", "numpy", "numpy64", "numpy scalar"}


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float32, "bfloat16"])
def test_cast_floating_casts_floats_and_nothing_else(dtype):
    before, after = everything(), jaxamp.cast_floating(everything(), dtype)
    assert {name for name in FLOATS if after[name].dtype == jnp.dtype(dtype)} == FLOATS
    assert isinstance(after["numpy"], np.ndarray)
    assert after["module"].weight.dtype == jnp.dtype(dtype)
    for name in ("complex", "int", "bool", "key", "float0", "numpy int"):
        assert after[name].dtype == before[name].dtype
    assert [after[name] for name in ("none", "text", "function", "python")] == [None, "relu", jnp.sin, (1, 2.5, True)]


def test_cast_floating_rounds_once_and_under_jit():
    x = jnp.float32(1 + 2**-9)
    assert jax.jit(lambda x: jaxamp.cast_floating({"x": x}, jnp.bfloat16))(x)["x"] == 1


def test_cast_floating_refuses_an_integer_dtype():
    with pytest.raises(TypeError, match=r"got the dtype int32; expected a float. Write cast_floating"):
        jaxamp.cast_floating(jnp.ones(2), jnp.int32)


def test_cast_floating_like_takes_each_leafs_dtype():
    like = {"a": jnp.ones(2, jnp.bfloat16), "b": np.ones(2, np.float16), "i": jnp.arange(2), "n": None, "s": 1.0}
    tree = {"a": jnp.ones(2), "b": np.ones(2), "i": jnp.ones(2), "n": None, "s": jnp.ones(2)}
    cast = jaxamp.cast_floating_like(tree, like)
    assert [str(cast[name].dtype) for name in "abis"] == ["bfloat16", "float16", "float32", "float32"]
    shapes = jax.eval_shape(lambda: like["a"])
    assert jaxamp.cast_floating_like(tree["a"], shapes).dtype == jnp.bfloat16


def test_all_finite_is_true_of_what_cannot_be_infinite():
    assert jaxamp.all_finite(everything())
    assert jaxamp.all_finite(None)
    assert jaxamp.all_finite({"empty": jnp.zeros(0), "largest": jnp.finfo(jnp.float32).max})


@pytest.mark.parametrize("bad", [np.inf, -np.inf, np.nan])
@pytest.mark.parametrize(
    "leaf",
    [jnp.float32, jnp.float16, jnp.bfloat16, jnp.float8_e5m2, jnp.complex64, np.float32, np.float64, float],
    ids=str,
)
def test_all_finite_sees_each_kind_of_leaf(leaf, bad):
    value = leaf(bad) if leaf in (np.float64, np.float32, float) else jnp.array([0, bad], leaf)
    assert not jaxamp.all_finite(everything() | {"bad": value})
    assert jaxamp.all_finite(everything() | {"bad": leaf(0)})


def test_all_finite_of_a_sharded_array_is_about_the_whole_of_it():
    mesh = jax.make_mesh((8,), ("data",))
    sharding = jax.NamedSharding(mesh, jax.P("data"))
    good = jax.device_put(jnp.ones(8), sharding)
    bad = jax.device_put(jnp.ones(8).at[5].set(jnp.inf), sharding)
    flag = jax.jit(jaxamp.all_finite)
    assert flag(good)
    assert not flag(bad)
    assert flag(bad).is_fully_replicated


def test_all_finite_agrees_along_an_axis():
    x = jnp.ones(8).at[5].set(jnp.inf)
    flags = jax.vmap(lambda x: jaxamp.all_finite(x, axis_name="data"), axis_name="data")(x)
    assert flags.shape == (8,)
    assert not flags.any()
    assert jax.vmap(lambda x: jaxamp.all_finite(x, axis_name="data"), axis_name="data")(jnp.ones(8)).all()


@pytest.mark.parametrize("pred", [True, np.bool_(False), jnp.array(True), jnp.array(False)])
def test_tree_where_selects_every_kind_of_leaf(pred):
    a, b = everything(), everything()
    b |= {"float": jnp.zeros(2), "key": jax.random.key(9), "numpy": np.zeros(2, np.float32), "int": jnp.ones(2, int)}
    chosen, expected = jaxamp.tree_where(pred, a, b), a if pred else b
    assert jax.tree.structure(chosen) == jax.tree.structure(expected)
    for name in ("float", "numpy", "int", "complex", "bool"):
        np.testing.assert_array_equal(chosen[name], expected[name])
        assert chosen[name].dtype == expected[name].dtype
    assert jnp.array_equal(jax.random.key_data(chosen["key"]), jax.random.key_data(expected["key"]))
    assert (chosen["text"], chosen["function"], chosen["none"]) == ("relu", jnp.sin, None)
    assert chosen["float0"].dtype == jax.dtypes.float0


def test_tree_where_keeps_the_bits_of_nan_and_negative_zero():
    bits = np.array([0x7FC00001, 0x80000000, 0xFFC12345, 1], np.uint32)
    kept = jax.jit(jaxamp.tree_where)(jnp.array(False), jnp.ones(4), jnp.asarray(bits.view(np.float32)))
    np.testing.assert_array_equal(np.asarray(kept).view(np.uint32), bits)


def test_tree_where_selects_python_numbers_that_differ():
    assert jaxamp.tree_where(jnp.array(False), {"n": 1}, {"n": 2})["n"] == 2
    assert jaxamp.tree_where(jnp.array(False), {"n": 1}, {"n": 1})["n"] == 1


def test_tree_where_widens_where_dtypes_differ():
    chosen = jaxamp.tree_where(jnp.array(True), jnp.ones(2, jnp.bfloat16), jnp.zeros(2))
    assert chosen.dtype == jnp.float32


def test_tree_where_refuses_leaves_it_cannot_select():
    with pytest.raises(TypeError, match=r"got 'relu' and 'gelu' in the same place; expected two arrays, or .* Keep"):
        jaxamp.tree_where(jnp.array(True), {"act": "relu"}, {"act": "gelu"})
    with pytest.raises(TypeError, match="in the same place; expected two arrays"):
        jaxamp.tree_where(jnp.array(True), {"act": jnp.ones(2)}, {"act": "gelu"})


@pytest.mark.parametrize("pred", [jnp.array([True]), jnp.float32(1)])
def test_tree_where_refuses_a_condition_that_is_not_one_bool(pred):
    with pytest.raises(TypeError, match=r"got a condition of shape .*; expected one bool. Write tree_where"):
        jaxamp.tree_where(pred, jnp.ones(1), jnp.zeros(1))


@pytest.mark.parametrize("dtype", [None, "float33", jnp.int8])
def test_a_cast_to_no_float_is_refused(dtype):
    with pytest.raises(TypeError, match=r"cast_floating got the dtype .*; expected a float. Write cast_floating"):
        jaxamp.cast_floating({"w": jnp.ones(2)}, dtype)
