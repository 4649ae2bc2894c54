"""Automatic mixed precision for JAX."""

from importlib import metadata as _metadata
from typing import TYPE_CHECKING

from ._inspect.collectives import assert_collectives as assert_collectives
from ._inspect.collectives import compiled_collectives as compiled_collectives
from ._inspect.compare import assert_amp_close as assert_amp_close
from ._inspect.compare import compare as compare
from ._inspect.comparison import Comparison as Comparison
from ._inspect.compiled import compiled_matmuls as compiled_matmuls
from ._inspect.kept import BytesKept as BytesKept
from ._inspect.kept import bytes_kept as bytes_kept
from ._inspect.overflow import find_overflow as find_overflow
from ._inspect.overflow_report import OverflowReport as OverflowReport
from ._inspect.report import AmpReport as AmpReport
from ._inspect.report import amp_report as amp_report
from ._inspect.report import assert_mixed as assert_mixed
from ._inspect.unmatched import unmatched_keys as unmatched_keys
from ._number_formats.names import format as format
from ._number_formats.number_format import NumberFormat as NumberFormat
from ._plan.bodies import Body as Body
from ._plan.bodies import Entry as Entry
from ._plan.higher_order import register_higher_order as register_higher_order
from ._policy.communication import COMMUNICATION as COMMUNICATION
from ._policy.communication import Communication as Communication
from ._policy.load import load_policy as load_policy
from ._policy.lookup import Policy as Policy
from ._policy.quantization import use_formats as use_formats
from ._policy.rules import use_compute_precision as use_compute_precision
from ._policy.rules import use_inferred_precision as use_inferred_precision
from ._policy.rules import use_original_precision as use_original_precision
from ._policy.rules import use_precision as use_precision
from ._policy.rules import use_replacement as use_replacement
from ._policy.rules import use_widest_precision as use_widest_precision
from ._policy.toml import presets as presets
from ._primitives.attention import dot_product_attention as dot_product_attention
from ._scaling.grad import dynamic_scale_grad as dynamic_scale_grad
from ._scaling.grad import dynamic_scale_tx as dynamic_scale_tx
from ._scaling.grad import dynamic_scale_value_and_grad as dynamic_scale_value_and_grad
from ._scaling.state import DynamicLossScaler as DynamicLossScaler
from ._scaling.state import DynamicScalerState as DynamicScalerState
from ._scaling.state import scaler_metrics as scaler_metrics
from ._scaling.update import update_if_finite as update_if_finite
from ._transform.amp import amp as amp
from ._transform.amp import amp_stop as amp_stop
from ._tree import all_finite as all_finite
from ._tree import cast_floating as cast_floating
from ._tree import cast_floating_like as cast_floating_like
from ._tree import tree_where as tree_where

try:
    __version__ = _metadata.version("jaxamp")
except _metadata.PackageNotFoundError:  # a bare checkout
    __version__ = "0+unknown"

if TYPE_CHECKING:
    default_amp_policy: Policy


def __getattr__(name: str) -> Policy:
    """`default_amp_policy` is read from its table when it is first asked for."""
    if name == "default_amp_policy":
        return load_policy("default")
    raise AttributeError(f"module 'jaxamp' has no attribute {name!r}")
