"""The passes, in the order in which they run. Each is a file of this package; CONTRIBUTING.md shows how to add one.

A pass of a jaxpr rewrites the user's program before it is planned; a pass of a plan changes how it runs; a pass of a
program rewrites what running the plan gave.
"""

from collections.abc import Callable

from .._compat import Jaxpr
from .._plan.plan import Plan, Setting
from .activations import keep_activations
from .alignment import align_matmuls
from .carries import carry_low
from .centered import square_centered
from .channel_sums import sum_channels_once
from .cotangents import share_cotangents
from .early_rounding import round_early
from .exponents import round_exponent_cotangents
from .hoist_quantized import hoist_quantized
from .joins import merge_joins
from .labels import pick_labels
from .layouts import order_results
from .lookups import sum_lookups
from .mapped_sums import merge_sums
from .masks import spread_masks
from .negated_lookups import write_negated_lookups
from .norms import round_norm_cotangents
from .outer_products import multiply_outer_products
from .pools import pool_by_places
from .recompute import recompute
from .recurrences import derive_recurrences
from .repeats import merge_repeats
from .round_in_loops import round_in_loops
from .round_once import round_once
from .send_low import send_low
from .share_quantized import share_quantized
from .softmax import low_softmaxes
from .states import keep_states_low
from .streams import hold_streams_low
from .sum_in_loops import sum_in_loops
from .transposes import fold_transposes

JAXPR_PASSES: tuple[Callable[[Jaxpr], Jaxpr], ...] = (merge_repeats, merge_joins, merge_sums, spread_masks)

PLAN_PASSES: tuple[Callable[[Plan], Plan], ...] = (
    fold_transposes,
    order_results,
    align_matmuls,
    multiply_outer_products,
    low_softmaxes,
    hold_streams_low,
    derive_recurrences,  # whose sums are held low
    round_early,
    keep_activations,
    pool_by_places,
    pick_labels,
    sum_lookups,  # after `pick_labels`: no entry of these is read twice
    write_negated_lookups,
    round_norm_cotangents,
    round_exponent_cotangents,
    square_centered,
    sum_channels_once,
    share_cotangents,  # last: it changes single steps, those inside of regions too
)

PROGRAM_PASSES: tuple[Callable[[Jaxpr, Setting], Jaxpr], ...] = (
    share_quantized,
    send_low,
    hoist_quantized,
    sum_in_loops,
    carry_low,
    keep_states_low,
    recompute,
    round_in_loops,
    round_once,
)
