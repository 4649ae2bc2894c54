"""What operations cost: FLOPs, and the dimensions of matmuls."""

import jax
import jax.numpy as jnp
import pytest
from helpers import shape
from jax import lax

import jaxamp
from jaxamp import amp_report
from jaxamp._inspect.cost import dims_of, flops_of


@pytest.mark.parametrize(
    ("fn", "shapes", "flops", "dims"),
    [
        (lambda x, w: x @ w, [(4, 8), (8, 16)], 2 * 4 * 8 * 16, (4, 16, 8)),
        (lambda x, w: jnp.einsum("bij,bjk->bik", x, w), [(3, 4, 8), (3, 8, 5)], 2 * 3 * 4 * 8 * 5, (4, 5, 8)),
        (
            lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME"),
            [(2, 3, 8, 8), (6, 3, 3, 3)],
            2 * (2 * 6 * 8 * 8) * 3 * 9,
            (2 * 8 * 8, 6, 27),
        ),
        (
            lambda x, w: lax.conv_general_dilated(x, w, (1, 1), "SAME", feature_group_count=3),
            [(2, 3, 8, 8), (6, 1, 3, 3)],
            2 * (2 * 6 * 8 * 8) * 9,
            (2 * 8 * 8, 2, 9),
        ),
        (lambda x, w: lax.ragged_dot(x, w, jnp.array([2, 2])), [(4, 8), (2, 8, 16)], 2 * 4 * 8 * 16, (4, 16, 8)),
    ],
)
def test_flops_and_dimensions_of_matmuls(fn, shapes, flops, dims):
    jaxpr = jax.make_jaxpr(fn)(*(shape(*s) for s in shapes))
    (eqn,) = [eqn for eqn in jaxpr.jaxpr.eqns if dims_of(eqn) is not None]
    assert flops_of(eqn) == flops
    assert tuple(dims_of(eqn)) == dims


def test_a_strided_convolution_costs_the_same_both_ways():
    def loss(x, w):
        return jnp.sum(lax.conv_general_dilated(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")))

    report = amp_report(loss)(shape(2, 16, 16, 8), shape(3, 3, 8, 16))
    assert {row.phase: row.flops for row in report.matmuls} == {"forward": 294912, "backward": 294912}


def test_a_shard_map_counts_by_its_devices():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    spec = jax.sharding.PartitionSpec("data")
    fn = jax.shard_map(lambda x, w: x @ w, mesh=mesh, in_specs=(spec, jax.sharding.PartitionSpec()), out_specs=spec)
    (row,) = amp_report(fn, backward=False)(shape(16, 8), shape(8, 8)).matmuls
    assert row.flops == 2 * 16 * 8 * 8


def test_flops_of_attention_forwards_and_backwards():
    def loss(q, k):
        return jnp.sum(jaxamp.dot_product_attention(q, k, k))

    report = amp_report(loss, compute_dtype=jnp.bfloat16)(shape(2, 16, 4, 8), shape(2, 32, 4, 8))
    once = 2 * (2 * 16 * 4 * 8) * 32
    assert {row.phase: row.flops for row in report.matmuls} == {"forward": 2 * once, "backward": 5 * once}
