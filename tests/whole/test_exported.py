"""Operations that have another form on GPUs, exported for one with axes of a size that is not known yet."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, normal
from jax import export, lax

NUMBERS = ("NHWC", "HWIO", "NHWC")
SIZES = jnp.array([256] * 8, jnp.int32)


def dilated(w, x):
    return jnp.mean(lax.conv_general_dilated(x, w, (1, 1), "SAME", rhs_dilation=(2, 2), dimension_numbers=NUMBERS) ** 2)


def transposed(w, x):
    return jnp.mean(lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=NUMBERS) ** 2)


def pooled(w, x):
    return jnp.mean(lax.reduce_window(jnp.tanh(x @ w), -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME") @ w)


def ragged(w, x):
    return jnp.mean(lax.ragged_dot(x, w, SIZES) ** 2)


def recurrent(w, x):
    return jnp.mean(lax.scan(lambda h, x: (jnp.tanh(h @ w + x), None), x[0], x)[0] ** 2)


def in_rounds(w, x):
    """All rounds read one low value; how many they are may be unknown."""
    shared = x[0] @ w
    return jnp.mean(lax.map(lambda x: jnp.sin((shared * x) @ w), x))


def in_parallel(w, x):
    later = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return jnp.mean(lax.associative_scan(later, (jax.nn.sigmoid(x), jax.nn.silu(x @ w)), axis=1)[1] ** 2)


FILTER, MATRIX = normal(0, 3, 3, 4, 4), normal(0, 4, 4)
PROGRAMS = {  # the loss, its weight, and shapes of its input
    "dilated": (dilated, FILTER, ["9, 9, 9, 4", "n, 9, 9, 4", "n, m, m, 4"]),
    "transposed": (transposed, FILTER, ["9, 9, 9, 4", "n, 9, 9, 4", "n, m, m, 4"]),
    "pooled": (pooled, MATRIX, ["9, 9, 9, 4", "n, 9, 9, 4", "n, m, m, 4"]),
    "ragged": (ragged, normal(0, 8, 4, 4), ["2048, 4", "n, 4"]),
    "recurrent": (recurrent, MATRIX, ["5, 3, 4", "5, n, 4"]),
    "in rounds": (in_rounds, MATRIX, ["5, 4, 4", "n, 4, 4"]),
    "in parallel": (in_parallel, MATRIX, ["3, 8, 4", "n, 8, 4"]),
}


@pytest.mark.parametrize(
    ("name", "shape"), [(name, shape) for name, (_, _, shapes) in PROGRAMS.items() for shape in shapes]
)
@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]], ids=["GPU", "both"])
def test_gradients_can_be_exported(name, shape, platforms):
    loss, w, _ = PROGRAMS[name]
    sizes = export.symbolic_shape(shape, constraints=["m >= 8"] if "m" in shape else [])
    gradient = jax.jit(jax.grad(AMP(loss), (0, 1)))
    exported = export.export(gradient, platforms=platforms)(w, jax.ShapeDtypeStruct(sizes, jnp.float32))
    assert exported.platforms == tuple(platforms)
    assert [aval.dtype for aval in exported.out_avals] == [jnp.float32] * 2
