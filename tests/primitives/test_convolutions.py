"""Convolutions in the form that GPUs have kernels for. What is compiled for one: `tests/whole`."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import equations
from jax import lax

from jaxamp._primitives.convolutions import for_gpu

LAYOUTS = (("NWC", "WIO", "NWC"), ("NCW", "OIW", "NCW"), ("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW"))
PADDINGS = {"both sides": (2, 2), "none": (0, 0), "uneven": (2, 1), "at the end": (0, 5), "trimmed": (-1, 2)}
DILATED, TRANSPOSED = {"rhs_dilation": 2}, {"lhs_dilation": 3}


def gradient(layout, padding, *, size=3, groups=1, window_strides=1, **dilations):
    """The convolution that is the gradient of a filter: its operands and parameters."""
    rng, axes = np.random.default_rng(0), len(layout[0]) - 2
    x = rng.normal(size=[{"N": 3, "C": 4}.get(name, 11) for name in layout[0]])
    w = rng.normal(size=[{"I": 4 // groups, "O": 8}.get(name, size) for name in layout[1]])
    options = {name: (value,) * axes for name, value in dilations.items()}

    def convolved(w):
        return lax.conv_general_dilated(
            x,
            w,
            (window_strides,) * axes,
            (padding,) * axes,
            **options,
            dimension_numbers=layout,
            feature_group_count=groups,
        )

    def pulled_back(w):
        out, vjp = jax.vjp(convolved, w)
        return vjp(jnp.ones_like(out))

    *_, eqn = (e for e in equations(jax.make_jaxpr(pulled_back)(w)) if e.primitive is lax.conv_general_dilated_p)
    return [jnp.asarray(rng.normal(size=v.aval.shape)) for v in eqn.invars], eqn.params


def convolutions(operands, params):
    """Those that the form for a GPU makes."""
    jaxpr = jax.make_jaxpr(lambda *operands: for_gpu(*operands, params))(*operands)
    return [eqn for eqn in equations(jaxpr) if eqn.primitive is lax.conv_general_dilated_p]


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize(("layout", "groups"), [*((layout, 1) for layout in LAYOUTS), (LAYOUTS[1], 2), (LAYOUTS[2], 4)])
@pytest.mark.parametrize("padding", PADDINGS.values(), ids=PADDINGS)
@pytest.mark.parametrize("how", [DILATED, TRANSPOSED], ids=["dilated", "transposed"])
def test_it_is_the_same_gradient(layout, padding, how, groups):
    operands, params = gradient(layout, padding, groups=groups, **how)
    both = jax.jit(lambda *pair: (for_gpu(*pair, params), lax.conv_general_dilated_p.bind(*pair, **params)))
    np.testing.assert_allclose(*both(*operands), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("how", [DILATED, TRANSPOSED], ids=["dilated", "transposed"])
@pytest.mark.parametrize(("groups", "size"), [(1, 1), (1, 4), (2, 2), (2, 3)])
def test_its_strides_are_one_and_its_input_has_no_holes(how, groups, size):
    (eqn,) = convolutions(*gradient(LAYOUTS[2], (2, 2), groups=groups, size=size, **how))
    assert set(eqn.params["window_strides"]) == {1}
    assert set(eqn.params["lhs_dilation"]) == {1}


@pytest.mark.parametrize(
    "how",
    [{}, {"window_strides": 2}, {"window_strides": 2, "rhs_dilation": 2}, {"lhs_dilation": 2, "rhs_dilation": 2}],
    ids=["plain", "strides", "strides and dilation", "transposed and dilated"],
)
def test_others_are_left_alone(how):
    operands, params = gradient(LAYOUTS[0], (2, 2), **how)
    (eqn,) = convolutions(operands, params)
    assert {name: eqn.params[name] for name in params} == params


def test_a_convolution_forward_is_left_alone():
    image, filters = jnp.ones((2, 16, 16, 4)), jnp.ones((3, 3, 4, 8))
    jaxpr = jax.make_jaxpr(lambda x, w: lax.conv_transpose(x, w, (2, 2), "SAME"))(image, filters)
    (eqn,) = (eqn for eqn in equations(jaxpr) if eqn.primitive is lax.conv_general_dilated_p)
    (same,) = convolutions((image, filters), eqn.params)
    assert same.params == eqn.params


# -- dilated convolutions


def dilated(layout, padding, dilation, *, groups=1, stride=1):
    """The operands and parameters of a dilated convolution."""
    rng, axes = np.random.default_rng(0), len(layout[0]) - 2
    x = rng.normal(size=[{"N": 2, "C": 4}.get(name, 23) for name in layout[0]])
    w = rng.normal(size=[{"I": 4 // groups, "O": 8}.get(name, 3) for name in layout[1]])
    jaxpr = jax.make_jaxpr(
        lambda x, w: lax.conv_general_dilated(
            x,
            w,
            (stride,) * axes,
            (padding,) * axes,
            rhs_dilation=dilation[:axes],
            dimension_numbers=layout,
            feature_group_count=groups,
        )
    )(x, w)
    (eqn,) = equations(jaxpr)
    return (x, w), eqn.params


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
@pytest.mark.parametrize("padding", [*PADDINGS.values(), (8, 0)], ids=[*PADDINGS, "causal"])
@pytest.mark.parametrize(("dilation", "groups", "stride"), [((2, 3), 1, 1), ((4, 1), 2, 1), ((1, 4), 4, 2)], ids=str)
def test_it_is_the_same_convolution(layout, padding, dilation, groups, stride):
    operands, params = dilated(layout, padding, dilation, groups=groups, stride=stride)
    both = jax.jit(lambda *pair: (for_gpu(*pair, params), lax.conv_general_dilated_p.bind(*pair, **params)))
    np.testing.assert_allclose(*both(*operands), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("padding", [(8, 0), (0, 3), (-1, -1)], ids=str)
def test_uneven_padding_of_a_dilated_one_comes_before_it(padding):
    (eqn,) = convolutions(*dilated(LAYOUTS[2], padding, (2, 3)))
    assert eqn.params["padding"] == ((0, 0), (0, 0))
    assert eqn.params["rhs_dilation"] == (2, 3)


@pytest.mark.parametrize(("padding", "dilation"), [((4, 4), (2, 2)), ((0, 0), (2, 2)), ((8, 0), (1, 1))], ids=str)
def test_even_padding_and_whole_filters_stay(padding, dilation):
    (eqn,) = convolutions(*dilated(LAYOUTS[2], padding, dilation))
    assert eqn.params["padding"] == (padding, padding)
