"""The mixed matmul: what is multiplied, in which dtype derivatives come out, and under which transforms."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import MATMULS, both, equations, error, in_float64, matmul_dtypes, normal
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp

X, W = normal(0, 24, 16), normal(1, 16, 8)
GROUPS = jnp.array([10, 14], jnp.int32)
# operation, activation, weight: written for any dtype
OPERATIONS = {
    "matmul": (lambda x, w: x @ w, X, W),
    "weight first": (lambda x, w: w @ x, X.T[:8], normal(2, 4, 8)),
    "einsum": (lambda x, w: jnp.einsum("abc,dcae->bde", x, w), normal(3, 3, 4, 5), normal(4, 2, 5, 3, 6)),
    "batched": (
        lambda x, w: lax.dot_general(x, w, (((2,), (0,)), ((0, 1), (1, 3)))),
        normal(5, 3, 2, 4, 5),
        normal(6, 4, 3, 8, 2),
    ),
    "convolution": (
        lambda x, w: lax.conv_general_dilated(x, w, (2, 1), "SAME", rhs_dilation=(1, 2), feature_group_count=2),
        normal(7, 2, 4, 9, 8),
        normal(8, 6, 2, 3, 3),
    ),
    "ragged": (lambda x, w: lax.ragged_dot(x, w, GROUPS), X, normal(9, 2, 16, 8)),
}
operations = pytest.mark.parametrize("name", OPERATIONS)


def rounded(x: Any, low: Any) -> np.ndarray:
    return np.asarray(jnp.asarray(x).astype(low)).astype(np.float64)


def float64_gradients(op: Any, x: np.ndarray, w: np.ndarray, ct: np.ndarray) -> list[np.ndarray]:
    with jax.enable_x64(True):
        return [np.asarray(g) for g in jax.vjp(op, jnp.asarray(x), jnp.asarray(w))[1](jnp.asarray(ct))]


@both
@operations
def test_a_weights_gradient_comes_out_of_the_matmul_in_float32(name, low):
    op, x, w = OPERATIONS[name]
    out, pull = jax.vjp(jaxamp.amp(op, compute_dtype=low), x, w)
    ct = normal(10, *out.shape)
    _, expected = float64_gradients(op, rounded(x, low), rounded(w, low), rounded(ct, low))
    _, found = jax.jit(pull)(ct)
    assert found.dtype == jnp.float32
    assert error(found, expected) < 1e-6


@both
@operations
def test_each_matmul_of_both_passes_multiplies_low_numbers(name, low):
    op, x, w = OPERATIONS[name]

    def loss(w, x):
        return jnp.sum(jnp.sin(op(x, w)))

    jaxpr = jax.make_jaxpr(jax.grad(jaxamp.amp(loss, compute_dtype=low), argnums=(0, 1)))(w, x)
    assert matmul_dtypes(jaxpr) == [(jnp.dtype(low).name,) * 2] * 3
    text = (
        jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=low))).trace(w, x).lower(lowering_platforms=("cuda",)).as_text()
    )
    for line in text.splitlines():  # what a GPU is given: low operands, whatever the result is
        if "stablehlo.dot_general" in line or "stablehlo.convolution" in line:
            assert "f32>, tensor<" not in line.rpartition(" : ")[2].partition("->")[0], line
        if "stablehlo.convolution" in line:  # cuDNN has none with a float32 result: XLA would widen its operands
            assert "f32>" not in line.rpartition("->")[2], line


@both
def test_the_gradient_of_an_activation_is_low(low):
    def loss(w1, w2, x):
        return jnp.sum(jnp.tanh(x @ w1) @ w2)

    jaxpr = jax.make_jaxpr(jax.grad(jaxamp.amp(loss, compute_dtype=low), argnums=(0, 1)))(W, normal(2, 8, 4), X)
    results = [eqn.outvars[0].aval for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    gradients = {aval.shape: aval.dtype for aval in results[2:]}
    assert gradients[24, 8] == low  # of tanh's result
    assert all(dtype == jnp.float32 for shape, dtype in gradients.items() if shape != (24, 8))


@both
def test_an_exact_operand_has_a_low_gradient(low):
    """A softmax that a matmul rounds is no parameter: its gradient need not be wider than it."""
    jaxpr = jax.make_jaxpr(jax.grad(jaxamp.amp(lambda x, v: jnp.sum(jax.nn.softmax(x) @ v), compute_dtype=low)))(X, W)
    (forward, backward) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name in MATMULS]
    assert (forward.outvars[0].aval.dtype, backward.outvars[0].aval.dtype) == (low, low)


def assert_mapped(loss, axes, *args):
    """`vmap` of a gradient gives the gradients, one by one, in float32."""
    grad = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), argnums=(0, 1))
    mapped = jax.jit(jax.vmap(grad, axes))(*args)
    for i in range(2):
        alone = jax.jit(grad)(*(a[i] if axis == 0 else a for a, axis in zip(args, axes, strict=True)))
        for found, expected in zip(mapped, alone, strict=True):
            assert found.dtype == jnp.float32
            assert error(found[i], np.asarray(expected, np.float64)) < 2e-2


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0)], ids=["both", "weights", "activations"])
@pytest.mark.parametrize("name", [name for name in OPERATIONS if name != "ragged"])
def test_vmap_of_a_gradient_is_the_gradients(name, axes):
    op, x, w = OPERATIONS[name]
    args = jnp.stack([w, -w]) if axes[0] == 0 else w, jnp.stack([x, 2 * x]) if axes[1] == 0 else x
    assert_mapped(lambda w, x: jnp.sum(jnp.sin(op(x, w))), axes, *args)


def test_vmap_of_a_ragged_gradient_is_the_gradients():
    """JAX maps a ragged matmul along the first axis of all operands at once."""
    _, x, w = OPERATIONS["ragged"]
    groups = jnp.stack([GROUPS, GROUPS[::-1]])

    def loss(w, x, groups):
        return jnp.sum(jnp.sin(lax.ragged_dot(x, w, groups)))

    assert_mapped(loss, (0, 0, 0), jnp.stack([w, -w]), jnp.stack([x, 2 * x]), groups)


def scaled_loss(name):
    op, x, w = OPERATIONS[name]
    return lambda w, x: jnp.sum(jnp.sin(0.3 * op(x, w))), w, x


@operations
def test_forward_mode_is_near_float64(name):
    loss, w, x = scaled_loss(name)
    tangent = lambda fn: lambda w, x: jax.jvp(fn, (w, x), (w, x))[1]
    found = jax.jit(tangent(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))(w, x)
    assert error(found, in_float64(tangent(loss), w, x)) < 5e-2


@operations
def test_second_order_is_near_float64(name):
    loss, w, x = scaled_loss(name)
    second = lambda fn: lambda w, x: jax.jvp(jax.grad(fn), (w, x), (w, x))[1]
    found = jax.jit(second(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))(w, x)
    assert found.dtype == jnp.float32
    assert error(found, in_float64(second(loss), w, x)) < 5e-2


def test_a_policy_of_checkpoint_that_saves_matmuls_saves_these():
    def loss(w1, w2, x):
        return jnp.sum(jnp.sin(jnp.sin(x @ w1) @ w2))

    args = W, normal(2, 8, 4), X
    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    for fn in (
        jax.checkpoint(amp, policy=jax.checkpoint_policies.dots_saveable),
        jaxamp.amp(jax.checkpoint(loss, policy=jax.checkpoint_policies.dots_saveable), compute_dtype=jnp.bfloat16),
    ):
        plain, saved = (len(matmul_dtypes(jax.make_jaxpr(jax.grad(f))(*args))) for f in (amp, fn))
        assert saved == plain


def test_such_a_policy_saves_dilated_convolutions_too():
    numbers = "NWC", "WIO", "NWC"

    def loss(w, x):
        for _ in range(2):
            x = jnp.sin(lax.conv_general_dilated(x, w, (1,), ((4, 0),), rhs_dilation=(2,), dimension_numbers=numbers))
        return jnp.sum(x)

    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16, keep="all")
    saving = jax.checkpoint(amp, policy=jax.checkpoint_policies.dots_saveable)
    args = normal(2, 3, 4, 4), normal(3, 2, 16, 4)
    plain, saved = (len(matmul_dtypes(jax.make_jaxpr(jax.grad(f))(*args))) for f in (amp, saving))
    assert saved == plain


@pytest.mark.parametrize("axis_type", [AxisType.Auto, AxisType.Explicit])
def test_sharded_gradients_are_those_of_one_device(axis_type):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(axis_type,) * 2)

    def loss(w, x):
        return jnp.sum((x @ w) ** 2)

    grad = jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))
    x = jax.device_put(X, NamedSharding(mesh, P("data", None)))
    w = jax.device_put(W, NamedSharding(mesh, P(None, "model")))
    assert error(jax.device_get(grad(w, x)), np.asarray(grad(W, X), np.float64)) < 2e-2
    assert grad(w, x).dtype == jnp.float32


def test_in_shard_map_the_gradients_are_summed_in_float32():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))

    def loss(w, x):
        return lax.psum(jnp.sum((x @ w) ** 2), "data")

    mapped = jax.shard_map(loss, mesh=mesh, in_specs=(P(), P("data")), out_specs=P())
    grad = jax.grad(jaxamp.amp(mapped, compute_dtype=jnp.bfloat16))
    sums = [eqn for eqn in equations(jax.make_jaxpr(grad)(W, X)) if eqn.primitive.name.startswith("psum")]
    assert {eqn.invars[0].aval.dtype for eqn in sums} == {jnp.dtype(jnp.float32)}
    alone = jax.grad(jaxamp.amp(lambda w, x: jnp.sum((x @ w) ** 2), compute_dtype=jnp.bfloat16))(W, X)
    assert error(jax.jit(grad)(W, X), np.asarray(alone, np.float64)) < 2e-2


def test_scan_over_layers_has_float32_gradients():
    ws = 0.3 * normal(11, 3, 16, 16)

    def loss(ws, x):
        return jnp.sum(lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0])

    grad = jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16))
    assert set(matmul_dtypes(jax.make_jaxpr(grad)(ws, X))) == {("bfloat16", "bfloat16")}
    with jax.enable_x64(True):
        expected = np.asarray(jax.grad(loss)(*(jnp.asarray(np.asarray(a, np.float64)) for a in (ws, X))))
    assert error(jax.jit(grad)(ws, X), expected) < 2e-2
