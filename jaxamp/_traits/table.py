"""What is true of a primitive under every policy: the only place that lists primitives outside `policies/`.

A policy says how precise an operation should be. A fact says what an operation does to its operands, so that the
planner need not know any primitive by name.
"""

# The dtype is part of the meaning (bits, random draws, decompositions that exist in float32 only), or a jaxpr traced in
# the old dtype hangs on the equation (combining scatters, general reductions). No rule of ours recasts these.
FIXED = frozenset(
    """
    bitcast_convert_type reduce_precision nextafter iota empty empty2 to_edtype from_edtype
    rng_uniform rng_bit_generator random_bits random_gamma random_seed random_split random_fold_in random_wrap
    random_unwrap random_clone
    cholesky cholesky_update eig eigh hessenberg householder_product lu qr geqrf geqp3 ormqr schur svd tridiagonal
    tridiagonal_solve triangular_solve symmetric_product fft complex
    scatter-add scatter-sub scatter-mul scatter-min scatter-max reduce reduce_window select_and_scatter
    select_and_scatter_add select_and_gather_add
    scaled_dot scaled_matmul scaled_matmul_wrapper total
    """.split()
)

# Nothing is rounded: the result holds values of the operands, or their signs or places. Running it wide spares nothing.
MOVES = frozenset(
    """
    abs all_gather all_gather_invariant all_gather_reduced all_to_all approx_top_k argmax argmin broadcast_in_dim
    broadcast_to clamp concatenate copy cummax cummin device_put dynamic_slice dynamic_update_slice gather
    layout_constraint max min name neg optimization_barrier pad pbroadcast pbroadcast_dynamic pmax pmin ppermute
    preduced pvary ragged_all_to_all reduce_max reduce_min reduce_precision reduce_window_max reduce_window_min
    reduced_vary_cast reduced_vary_cast_p relayout reshape reshard rev scatter select_n sharding_constraint sign slice
    sort split squeeze stack stage stop_gradient tie tile top_k transpose unreduced_pmax unreduced_pmin unstack
    vary_unreduced_cast vary_unreduced_cast_p with_memory_space_constraint
    """.split()
)

# All entries of the operand are in the result, each once.
REARRANGES = frozenset("copy reshape squeeze transpose".split())

# What goes in as a position, or as a number beyond the compute dtype's range, comes out as one. Everything else
# (sin, cos, exp, a matmul with weights, ...) ends it.
PRESERVES = MOVES | frozenset(
    """
    add add_any ceil convert_element_type cumsum div floor integer_pow mul psum psum_invariant reduce_sum
    reduce_window_sum rem round scatter-add scatter-sub square sub
    """.split()
)

# Integers among the results are places, not values of the operands.
PLACES = frozenset("argmax argmin top_k approx_top_k".split())

# Floats that count places: not to be rounded, not even by a matmul. And what is made of places alone.
POSITIONS = frozenset({"iota", "mask_of_positions"})

# Result i comes from operand i alone; the dtypes of the others don't matter to it.
ONE_TO_ONE = frozenset(
    "optimization_barrier sort psum psum_invariant pmax pmin device_put all_gather reduce_scatter".split()
)

# The first operand is a buffer that the others write into: it keeps its dtype and they follow.
INTO_BUFFER = frozenset({"dynamic_update_slice", "scatter"})

# Operands of size one along an axis are repeated along it.
SPREADS = frozenset("add sub mul div rem pow max min atan2 nextafter complex".split())

# Bilinear in their first two operands: what a matrix unit does.
MATMULS = frozenset({"dot_general", "conv_general_dilated", "ragged_dot_general"})

# Nonlinear functions of one entry: their derivative needs a value that they read or made.
BENDS = frozenset(
    """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh erf erf_inv erfc exp exp2 expm1 integer_pow log log1p
    logistic one_minus_square pow rsqrt sin sinh sqrt square tan tanh
    """.split()
)

# Each entry of the result is made of one entry of each operand.
ELEMENTWISE = BENDS | frozenset(
    """
    abs add add_any broadcast_in_dim ceil clamp convert_element_type copy div floor held max min mul neg
    ordered rem reshape round select_n sign squeeze stop_gradient sub
    """.split()
)

PRODUCTS = frozenset({"mul", "div"})
SUMS = frozenset({"add", "sub"})
COMPARES = frozenset("and eq ge gt is_finite le lt ne not or xor".split())

# What masks are made of from positions: each entry of the result from one entry of each operand.
OF_POSITIONS = COMPARES | frozenset(
    """
    abs add broadcast_in_dim clamp convert_element_type copy div iota max min mul neg rem reshape select_n sign squeeze
    stop_gradient sub
    """.split()
)

REDUCES = frozenset({"reduce_max", "reduce_min", "reduce_prod", "reduce_sum"})

# One pass over operands that are read anyway: sooner computed again than kept for the backward pass. Reductions of many
# entries are not: `_residuals`.
CHEAP = ELEMENTWISE | REDUCES | frozenset("concatenate iota mask_of_positions pad rev slice split transpose".split())

# Parameters are shapes, axes, dtypes and shardings: no jaxpr and nothing of the user's, so that a cache may hold them.
PLAIN = CHEAP | COMPARES | MATMULS | frozenset(f"mixed_{name}" for name in MATMULS)
