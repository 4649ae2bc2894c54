"""The sum of many arrays' entries: the same number wherever it is made, and on one GPU in one reduction per shape."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import dtypes_of
from jax import export

import jaxamp
from jaxamp._primitives.fused_sum import fused_sum

SHAPES = [(2, 3), (), (3,), (2, 3), (0, 4), (3,), (2, 3)]  # four shapes


def arrays() -> list[jax.Array]:
    return [
        i + jnp.arange(np.prod(shape, dtype=int), dtype=jnp.float32).reshape(shape) for i, shape in enumerate(SHAPES)
    ]


def reductions(arrays: list[jax.Array], platform: str) -> int:
    return jax.jit(fused_sum).trace(arrays).lower(lowering_platforms=(platform,)).as_text().count("stablehlo.reduce(")


def expected(arrays) -> float:
    return sum(float(np.sum(np.asarray(x, np.float64))) for x in arrays)


@pytest.mark.parametrize("run", [lambda fn: fn, jax.jit, lambda fn: jax.jit(jax.checkpoint(fn))])
def test_a_total_is_the_sum_of_all_entries(run):
    assert float(run(fused_sum)(arrays())) == expected(arrays())
    assert float(run(fused_sum)([])) == 0


def test_under_vmap_arrays_are_mapped_along_axes_of_their_own():
    a, b, c = jnp.arange(6.0).reshape(2, 3), jnp.arange(12.0).reshape(3, 2, 2), jnp.ones(5)
    found = jax.vmap(lambda a, b, c: fused_sum([a, b, c]), (0, 1, None))(a, b, c)
    assert found.tolist() == [expected([a[i], b[:, i], c]) for i in range(2)]


def test_under_vmap_arrays_may_all_be_the_same_for_each():
    w, x = jnp.ones(3), jnp.arange(4.0)
    assert jax.vmap(lambda a: jnp.where(jaxamp.all_finite(w), a, 0.0))(x).tolist() == x.tolist()
    loss = lambda a: jnp.where(jaxamp.all_finite([a, w]), jnp.sum(a**3), 0.0)
    assert jax.hessian(loss)(x).tolist() == jnp.diag(6 * x).tolist()
    state = jaxamp.DynamicScalerState()
    step = lambda w: jaxamp.dynamic_scale_grad(lambda w: jnp.sum(w**3))(w, dynamic_scaler_state=state)[1]
    assert jax.jacfwd(step)(x).tolist() == jnp.diag(6 * x).tolist()


@pytest.mark.parametrize("platforms", [["cuda"], ["cpu", "cuda"]])
def test_sizes_that_are_not_known_yet_are_no_obstacle(platforms):
    (rows,) = export.symbolic_shape("rows")
    shapes = [jax.ShapeDtypeStruct((size, 3), jnp.float32) for size in (rows, 4, rows)]
    exported = export.export(jax.jit(jaxamp.all_finite), platforms=platforms)(shapes)
    assert "stablehlo.reduce" in exported.mlir_module()


def test_on_one_gpu_there_is_a_reduction_per_shape_and_elsewhere_one_per_array():
    entries = [x for x in arrays() if x.ndim]  # a scalar needs none
    assert reductions(entries, "cuda") == 3
    assert reductions(entries, "cpu") == 6


def test_arrays_in_parts_on_several_devices_are_summed_one_by_one():
    mesh = jax.make_mesh((2,), ("x",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2])
    rows, columns = (
        jax.device_put(jnp.arange(16.0).reshape(4, 4), jax.NamedSharding(mesh, spec))
        for spec in (jax.P("x"), jax.P(None, "x"))
    )
    assert reductions([rows, columns], "cuda") == 2
    assert float(fused_sum([rows, columns])) == 240
    collectives = jax.jit(fused_sum).lower([rows, columns]).compile().as_text()
    assert not any(name in collectives for name in ("all-gather", "all-to-all", "collective-permute"))


def test_finiteness_may_be_asked_for_in_what_is_differentiated():
    def fn(x):
        return jnp.where(jaxamp.all_finite({"x": x, "y": 1.0 / x}), jnp.sum(x**2), 0.0)

    x = jnp.arange(1.0, 4.0)
    assert jax.grad(fn)(x).tolist() == [2.0, 4.0, 6.0]
    assert jax.jvp(fn, (x,), (x,))[1] == 28.0
    assert jax.grad(fn)(x - 1).tolist() == [0.0, 0.0, 0.0]


@pytest.mark.parametrize(
    "policy", ["default", "fast", jaxamp.default_amp_policy | {"low": jaxamp.use_compute_precision}]
)
def test_inside_of_amp_a_total_stays_in_float32_and_is_known(policy):
    def fn(w, x):
        with jax.named_scope("low"):
            y = x @ w
            finite = jaxamp.all_finite([y, w])
        return jnp.where(finite, jnp.sum(y), 0.0)

    w, x = jnp.ones((8, 8)), jnp.ones((300, 8))
    report = jaxamp.amp_report(fn, compute_dtype=jnp.bfloat16, amp_policy=policy)(w, x)
    assert report.not_entered == {}
    amp = jaxamp.amp(fn, compute_dtype=jnp.bfloat16, amp_policy=policy)
    assert dtypes_of("fused_sum", jax.make_jaxpr(amp)(w, x)) == ["float32"]
    assert float(amp(w, x)) > 0
    assert float(amp(w.at[0, 0].set(jnp.inf), x)) == 0


def test_finiteness_is_one_total_of_all_leaves_and_no_function_of_its_own():
    tree = {str(i): jnp.ones((4, i + 1)) for i in range(5)}
    names = [eqn.primitive.name for eqn in jax.make_jaxpr(jaxamp.all_finite)(tree).eqns]
    assert names.count("fused_sum") == 1
    assert not {"jit", "pjit", "reduce_sum", "reduce_and"} & set(names)
