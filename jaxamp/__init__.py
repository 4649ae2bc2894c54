"""Automatic mixed precision for JAX."""

import importlib as _importlib
import typing as _typing
from importlib import metadata as _metadata

try:
    __version__ = _metadata.version("jaxamp")
except _metadata.PackageNotFoundError:  # a bare checkout
    __version__ = "0+unknown"

__all__ = [
    "COMMUNICATION",
    "AmpReport",
    "Body",
    "BytesKept",
    "Communication",
    "Comparison",
    "DelayedScales",
    "DynamicLossScaler",
    "DynamicScalerState",
    "Entry",
    "MissingScalerWarning",
    "NumberFormat",
    "OverflowReport",
    "Policy",
    "all_finite",
    "amp",
    "amp_report",
    "amp_stop",
    "assert_amp_close",
    "assert_collectives",
    "assert_mixed",
    "bytes_kept",
    "cast_floating",
    "cast_floating_like",
    "compare",
    "compiled_collectives",
    "compiled_matmuls",
    "default_amp_policy",
    "delayed_scale_value_and_grad",
    "dot_product_attention",
    "dynamic_scale_grad",
    "dynamic_scale_tx",
    "dynamic_scale_value_and_grad",
    "find_overflow",
    "flashoptim",
    "format",
    "init_scales",
    "jmp",
    "load_policy",
    "mpx",
    "optim",
    "presets",
    "quantize_once",
    "register_higher_order",
    "scaler_metrics",
    "tree_where",
    "unmatched_keys",
    "update_if_finite",
    "use_compute_precision",
    "use_formats",
    "use_inferred_precision",
    "use_original_precision",
    "use_precision",
    "use_replacement",
    "use_widest_precision",
    "with_scales",
]

if _typing.TYPE_CHECKING:
    from . import flashoptim as flashoptim
    from . import jmp as jmp
    from . import mpx as mpx
    from . import optim as optim
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
    from ._policy.mapping import FrozenPolicy as _FrozenPolicy
    from ._policy.quantization import use_formats as use_formats
    from ._policy.rules import use_compute_precision as use_compute_precision
    from ._policy.rules import use_inferred_precision as use_inferred_precision
    from ._policy.rules import use_original_precision as use_original_precision
    from ._policy.rules import use_precision as use_precision
    from ._policy.rules import use_replacement as use_replacement
    from ._policy.rules import use_widest_precision as use_widest_precision
    from ._policy.toml import presets as presets
    from ._primitives.attention import dot_product_attention as dot_product_attention
    from ._scaling.delayed import delayed_scale_value_and_grad as delayed_scale_value_and_grad
    from ._scaling.grad import dynamic_scale_grad as dynamic_scale_grad
    from ._scaling.grad import dynamic_scale_tx as dynamic_scale_tx
    from ._scaling.grad import dynamic_scale_value_and_grad as dynamic_scale_value_and_grad
    from ._scaling.state import DynamicLossScaler as DynamicLossScaler
    from ._scaling.state import DynamicScalerState as DynamicScalerState
    from ._scaling.state import scaler_metrics as scaler_metrics
    from ._scaling.update import update_if_finite as update_if_finite
    from ._transform.amp import amp as amp
    from ._transform.amp import amp_stop as amp_stop
    from ._transform.delayed import init_scales as init_scales
    from ._transform.delayed import with_scales as with_scales
    from ._transform.delayed_scales import DelayedScales as DelayedScales
    from ._transform.loss_scaling import MissingScalerWarning as MissingScalerWarning
    from ._transform.quantize_once import quantize_once as quantize_once
    from ._tree import all_finite as all_finite
    from ._tree import cast_floating as cast_floating
    from ._tree import cast_floating_like as cast_floating_like
    from ._tree import tree_where as tree_where

    default_amp_policy: _FrozenPolicy

else:  # a type checker that sees this would take any name
    # `import jaxamp` reads none of this: a module is imported when a name in it is first asked for.
    _FACES = ("flashoptim", "jmp", "mpx", "optim")
    _NAMES = {
        "_inspect.collectives": ("assert_collectives", "compiled_collectives"),
        "_inspect.compare": ("assert_amp_close", "compare"),
        "_inspect.comparison": ("Comparison",),
        "_inspect.compiled": ("compiled_matmuls",),
        "_inspect.kept": ("BytesKept", "bytes_kept"),
        "_inspect.overflow": ("find_overflow",),
        "_inspect.overflow_report": ("OverflowReport",),
        "_inspect.report": ("AmpReport", "amp_report", "assert_mixed"),
        "_inspect.unmatched": ("unmatched_keys",),
        "_number_formats.names": ("format",),
        "_number_formats.number_format": ("NumberFormat",),
        "_plan.bodies": ("Body", "Entry"),
        "_plan.higher_order": ("register_higher_order",),
        "_policy.communication": ("COMMUNICATION", "Communication"),
        "_policy.load": ("load_policy",),
        "_policy.lookup": ("Policy",),
        "_policy.quantization": ("use_formats",),
        "_policy.rules": (
            "use_compute_precision",
            "use_inferred_precision",
            "use_original_precision",
            "use_precision",
            "use_replacement",
            "use_widest_precision",
        ),
        "_policy.toml": ("presets",),
        "_primitives.attention": ("dot_product_attention",),
        "_scaling.delayed": ("delayed_scale_value_and_grad",),
        "_scaling.grad": ("dynamic_scale_grad", "dynamic_scale_tx", "dynamic_scale_value_and_grad"),
        "_scaling.state": ("DynamicLossScaler", "DynamicScalerState", "scaler_metrics"),
        "_scaling.update": ("update_if_finite",),
        "_transform.amp": ("amp", "amp_stop"),
        "_transform.delayed": ("init_scales", "with_scales"),
        "_transform.delayed_scales": ("DelayedScales",),
        "_transform.loss_scaling": ("MissingScalerWarning",),
        "_transform.quantize_once": ("quantize_once",),
        "_tree": ("all_finite", "cast_floating", "cast_floating_like", "tree_where"),
    }
    _MODULES = {name: module for module, names in _NAMES.items() for name in names}

    def __getattr__(name: str) -> _typing.Any:
        """Import what is first asked for now, and read the default policy from its table."""
        if name == "default_amp_policy":
            return __getattr__("load_policy")("default")
        if name in _FACES:
            return _importlib.import_module(f".{name}", __name__)
        if name not in _MODULES:
            raise AttributeError(f"module 'jaxamp' has no attribute {name!r}")
        found = globals()[name] = getattr(_importlib.import_module(f".{_MODULES[name]}", __name__), name)
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *(name for name in globals() if name.startswith("__"))})
