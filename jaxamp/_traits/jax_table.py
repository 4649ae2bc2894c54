"""The traits of JAX's primitives, by name: the only place that lists them outside of `policies/`."""

import dataclasses
import math
from typing import Any

from .matmul_cost import dims_of_convolution, dims_of_dot, dims_of_ragged_dot, flops_of_convolution, flops_of_dot
from .traits import NONE, OF_JAX, Traits

_MOVES = """
    abs all_gather all_gather_invariant all_gather_reduced all_to_all approx_top_k argmax argmin broadcast_in_dim
    broadcast_to clamp concatenate copy cummax cummin device_put dynamic_slice dynamic_update_slice gather
    layout_constraint max min name neg optimization_barrier pad pbroadcast pbroadcast_dynamic pmax pmin ppermute
    preduced pvary ragged_all_to_all reduce_max reduce_min reduce_precision reduce_window_max reduce_window_min
    reduced_vary_cast reduced_vary_cast_p relayout reshape reshard rev scatter select_n sharding_constraint sign slice
    sort split squeeze stack stage stop_gradient tie tile top_k transpose unreduced_pmax unreduced_pmin unstack
    vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
"""
_COMMUNICATES = """
    all_gather all_gather_invariant all_gather_reduced all_to_all pbroadcast ppermute reshard sharding_constraint
"""
_REARRANGES = """
    concatenate copy dynamic_slice gather name reshape rev select_n slice split squeeze stack transpose unstack
"""
_COMPARES = "and eq ge gt is_finite le lt ne not or xor"

_TABLE: dict[str, str] = {
    # Bits, random draws, decompositions that exist in float32 only; combining scatters and general reductions, which
    # carry a jaxpr traced in the old dtype.
    "fixed_dtype": """
        bitcast_convert_type reduce_precision nextafter iota empty empty2 to_edtype from_edtype
        rng_uniform rng_bit_generator random_bits random_gamma random_seed random_split random_fold_in random_wrap
        random_unwrap random_clone
        cholesky cholesky_update eig eigh hessenberg householder_product lu qr geqrf geqp3 ormqr schur svd tridiagonal
        tridiagonal_solve triangular_solve symmetric_product fft complex
        scatter-add scatter-sub scatter-mul scatter-min scatter-max reduce reduce_window select_and_scatter
        select_and_scatter_add select_and_gather_add
        scaled_dot scaled_matmul scaled_matmul_wrapper
    """,
    "moves": _MOVES,
    "relays": f"""
        {_COMMUNICATES} {_REARRANGES} broadcast_in_dim layout_constraint optimization_barrier pvary tile
    """,
    "rearranges": _REARRANGES,
    "communicates": _COMMUNICATES,
    "sums_devices": "psum psum_invariant reduce_scatter",
    "keeps_all_entries": "copy reshape squeeze transpose",
    "delivers": f"{_COMMUNICATES} add_any copy psum psum_invariant reduce_scatter reshape squeeze transpose",
    # sin, cos, exp, a matmul with weights and the like end it
    "keeps_range": """
        add add_any ceil convert_element_type cumsum div floor integer_pow mul psum psum_invariant reduce_sum
        reduce_window_sum rem round scatter-add scatter-sub square sub
    """,
    "returns_indices": "argmax argmin top_k approx_top_k",
    "makes_positions": "iota",
    "draws": "random_bits random_gamma rng_bit_generator rng_uniform threefry2x32",
    "pairwise": "optimization_barrier sort psum psum_invariant pmax pmin device_put all_gather reduce_scatter",
    "writes_buffer": "dynamic_update_slice scatter",
    "matmul": "dot_general conv_general_dilated ragged_dot_general",
    "convolves": "conv_general_dilated",
    "nonlinear": """
        acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 integer_pow log log1p
        logistic one_minus_square pow rsqrt sin sinh sqrt square tan tanh
    """,
    "derivative_of_result": "cbrt erf_inv exp exp2 expm1 logistic rsqrt sqrt tan tanh",
    "transcendental": """
        acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 log log1p logistic pow
        rsqrt sin sinh sqrt tan tanh
    """,
    "elementwise": """
        abs add add_any broadcast_in_dim ceil clamp convert_element_type copy div floor max min mul neg rem reshape
        round select_n sign squeeze stop_gradient sub
    """,
    "broadcasts": "add sub mul div rem pow max min atan2 nextafter complex",
    "product": "mul div",
    "sum": "add sub",
    "compares": _COMPARES,
    "reduces": "reduce_max reduce_min reduce_prod reduce_sum",
    "magnifies": """
        cholesky cholesky_update custom_linear_solve eig eigh geqp3 geqrf hessenberg householder_product lu ormqr qr
        schur svd triangular_solve tridiagonal tridiagonal_solve
    """,
    "passes_on": "convert_element_type",
    "mask_arithmetic": f"""
        {_COMPARES} abs add broadcast_in_dim clamp convert_element_type copy div iota max min mul neg rem reshape
        select_n sign squeeze stop_gradient sub
    """,
    "plain_call": "jit",
    "hands_out": "cond jit shard_map",
    "own_jvp": "custom_jvp_call",
    "own_vjp": "custom_vjp_call",
    "checkpoints": "remat2",
    "transparent": "cond jit scan shard_map",
    "cheap": "broadcast_to concatenate iota pad rev slice split stack tile transpose unstack",
}

FEW = 16  # entries: a reduction of at least so many is kept. Its result is small, and making it again reads them all.


def _reduces_many(operand: Any, *rest: Any, axes: Any, **params: Any) -> bool:
    sizes = [operand.shape[axis] for axis in axes]
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) >= FEW


_COSTS: dict[str, dict[str, Any]] = {
    "dot_general": {"flops": flops_of_dot(dims_of_dot), "dims": dims_of_dot},
    "ragged_dot_general": {"flops": flops_of_dot(dims_of_ragged_dot), "dims": dims_of_ragged_dot},
    "conv_general_dilated": {"flops": flops_of_convolution, "dims": dims_of_convolution},
}


def _fill() -> None:
    found: dict[str, dict[str, Any]] = {}
    for trait, names in _TABLE.items():
        for name in names.split():
            found.setdefault(name, {})[trait] = True
    for name in _TABLE["reduces"].split():
        found[name]["kept"] = _reduces_many
    for name, costs in _COSTS.items():
        found[name] |= costs
    found["linear_solve"] = {"magnifies": True}  # Lineax'
    OF_JAX.update({name: dataclasses.replace(NONE, **traits).with_implied() for name, traits in found.items()})


_fill()


def named(trait: str) -> frozenset[str]:
    """The names of JAX's primitives that have a trait.

    >>> sorted(named("reduces"))
    ['reduce_max', 'reduce_min', 'reduce_prod', 'reduce_sum']
    """
    if trait not in Traits.__dataclass_fields__:
        names = ", ".join(Traits.__dataclass_fields__)
        raise ValueError(f"got the trait {trait!r}; expected one of {names}. Write for example named('moves').")
    return frozenset(name for name, traits in OF_JAX.items() if getattr(traits, trait))
