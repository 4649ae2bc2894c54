"""Barriers and layouts: what they are on each platform, and under each transform."""

import jax
import jax.numpy as jnp
import pytest
from helpers import AMP, in_float64, near, normal
from jax import export

import jaxamp

X, W, B = normal(0, 3, 5, 8), normal(1, 16, 8), normal(2, 16)


def lowered(x, platform: str) -> str:
    """The gradient of a bias after a matmul: the result of that and the cotangent of the bias have layouts."""
    amp = jaxamp.amp(lambda w, b, x: jnp.sum(jnp.tanh(x @ w.T + b) @ w), compute_dtype=jnp.bfloat16, keep="all")
    fn = jax.jit(jax.grad(amp, (0, 1)))
    return fn.trace(W, B, x).lower(lowering_platforms=(platform,)).as_text()


def test_on_a_gpu_held_is_a_barrier_and_a_layout_and_elsewhere_nothing():
    assert [lowered(X, p).count("optimization_barrier") for p in ("cpu", "cuda")] == [0, 1]
    assert [lowered(X, p).count("LayoutConstraint") for p in ("cpu", "cuda")] == [0, 2]


def test_no_layout_is_asked_for_where_the_partitioner_would_gather():
    mesh = jax.make_mesh((3,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:3])
    shared = jax.device_put(X, jax.NamedSharding(mesh, jax.P("x")))
    assert lowered(shared, "cuda").count("LayoutConstraint") == (2 if jax.__version_info__ >= (0, 11, 2) else 0)
    assert lowered(shared, "cuda").count("optimization_barrier") == 1


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_export_for_a_gpu_asks_for_no_layout(platforms):
    """JAX exports no program with the custom call that asks."""
    fn = lambda w, b, x: jnp.sum(jax.nn.relu(x @ w.T + b) @ w)
    for exported in (AMP(fn), jax.grad(AMP(fn), (0, 1))):
        text = export.export(jax.jit(exported), platforms=platforms)(W, B, X).mlir_module()
        assert "dot_general" in text
        assert "LayoutConstraint" not in text


def test_order_passes_through_transforms():
    fn = lambda w, x: jnp.sum(jnp.tanh(x @ w.T))
    assert near(jax.hessian(AMP(fn))(W, X), in_float64(jax.hessian(fn), W, X), 5e-2)
    per_example = jax.vmap(jax.grad(AMP(fn)), (None, 1))(W, X)
    assert near(per_example, in_float64(jax.vmap(jax.grad(fn), (None, 1)), W, X))
    each = lambda w, x: jnp.tanh(x @ w.T)
    tangent = jax.jvp(lambda w: AMP(each)(w, X), (W,), (W,))[1]
    assert near(tangent, in_float64(lambda w, x: jax.jvp(lambda w: each(w, x), (w,), (w,))[1], W, X))


def test_held_passes_through_transforms():
    fn = lambda table, w, x: jnp.sum(jnp.tanh((x + table) @ w.T))
    table, amp = normal(9, 5, 8), AMP(fn)
    per_example = jax.vmap(jax.grad(amp), (None, None, 0))(table, W, X[:, None])
    assert near(per_example, in_float64(jax.vmap(jax.grad(fn), (None, None, 0)), table, W, X[:, None]))
    each = lambda table, w, x: jnp.tanh((x + table) @ w.T)
    tangent = jax.jvp(lambda t: AMP(each)(t, W, X), (table,), (table,))[1]
    assert near(tangent, in_float64(lambda t, w, x: jax.jvp(lambda t: each(t, w, x), (t,), (t,))[1], table, W, X))
    assert near(jax.hessian(amp)(table, W, X), in_float64(jax.hessian(fn), table, W, X), 5e-2)
