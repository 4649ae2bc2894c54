"""Check what users pass to `init`, `update` and `step`. Errors name the leaf."""

from typing import Any

import jax.numpy as jnp
import numpy as np

from .._tree import check_bool, has_float_dtype, is_inexact_array
from ._groups import Groups, choose_groups, groups_from_scales
from ._param_groups import matches, only_names, path_entries
from ._scale_formats import FORMATS
from ._settings import Settings, SettingsOf
from ._sharding import check_whole_groups, split_sharding
from ._state import LeafState
from ._storage import SUPPORTED_DTYPES
from ._tree_paths import name_of
from ._update_rules import UpdateRule
from ._weight_codec import check_low_dtype


def check_params(
    name: str, paths: list[Any], leaves: list[Any], settings_of: SettingsOf, allow_unmatched: bool
) -> None:
    """Check that all dtypes are supported, and that groups and `master_weight_bits` have parameters to apply to."""
    requested: dict[tuple[str, Any], tuple[bool, str]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_inexact_array(leaf):
            continue
        if leaf.dtype not in SUPPORTED_DTYPES:
            raise TypeError(
                f"{name} got the parameter {name_of(path)!r} in {leaf.dtype}; expected bfloat16, float16 or float32. "
                "Cast it with jaxamp.cast_floating(params, jnp.bfloat16), or exclude it with optax.masked."
            )
        settings = settings_of(path, leaf)
        request = settings.bits_argument, settings.storage.master_weight_bits
        before, _ = requested.get(request, (False, ""))
        applies = before or settings.storage.bits_for(leaf.dtype) is not None
        requested[request] = applies, name_of(path)
    named = [(path, leaf) for path, leaf in zip(paths, leaves, strict=True) if is_inexact_array(leaf)]
    for i, group in enumerate(() if allow_unmatched else settings_of.param_groups):
        if (
            named
            and only_names(group["params"])
            and not any(matches(group["params"], path_entries(path), leaf) for path, leaf in named)
        ):
            raise ValueError(
                f"{name} got param_groups[{i}] with 'params' {group['params']!r}, which selects nothing; expected "
                f"names or paths of parameters, such as {name_of(named[0][0])!r}. Correct the name, or leave the group "
                "out."
            )
    for (argument, bits), (applies, leaf_name) in requested.items():
        if bits in (24, 32) and not applies:
            raise ValueError(
                f"in {name}, {argument}={bits} has no effect: all its parameters are float32, such as {leaf_name!r}; "
                "expected some in bfloat16 or float16, which can have a correction. Write master_weight_bits=None, or "
                "cast them with jaxamp.cast_floating(params, jnp.bfloat16)."
            )


def check_shards(name: str, leaf_name: str, param: Any, groups: Groups) -> None:
    """Check that no group is split between devices, if the sharding is known."""
    sharding = split_sharding(param)
    if sharding is not None:
        check_whole_groups(name, leaf_name, groups, sharding)


def check_leaf(
    rule: UpdateRule, settings: Settings, path: Any, param: Any, grad: Any, state: LeafState, instead: str
) -> Groups:
    """Check that gradient and state belong to a parameter, and return its groups as the state has them."""
    check_gradient(rule.name, path, param, grad)
    storage = settings.storage
    check_low_dtype(rule.name, name_of(path), param, state.correction, is_published=storage.codes == "published")
    size, layout = storage.group_size, storage.layout
    expected = set(rule.moments(settings.hyper))
    arrays = {field: x for field, x in state._asdict().items() if x is not None}
    groups: Groups | None = choose_groups(param.shape, size, layout)
    dtypes = dict.fromkeys(("mu", "nu"), jnp.dtype(jnp.float32))
    if state.scales is not None:
        groups = groups_from_scales(param.shape, state.scales.shape[1:], size)
        dtypes = {name: codec.dtype for name, codec in zip(("mu", "nu"), storage.codecs)}
        dtypes["scales"] = FORMATS[storage.scales].dtype
    fits = all(x.shape == param.shape for field, x in arrays.items() if field != "scales")
    fits &= all(arrays[field].dtype == dtype for field, dtype in dtypes.items() if field in arrays)
    needs_correction = storage.bits_for(param.dtype) is not None
    fits &= state.correction is not None or not needs_correction
    if groups is None or not fits or expected != set(arrays) - {"scales", "correction"}:
        given = ", ".join(f"{field} {x.shape} in {x.dtype}" for field, x in arrays.items()) or "nothing"
        in_dtypes = "".join(f", {field} in {dtype}" for field, dtype in dtypes.items() if "scales" in arrays)
        raise ValueError(
            f"{rule.name} got a state with {given} for {name_of(path)!r}, which is of shape {param.shape} and in "
            f"{param.dtype}; expected {' and '.join(sorted(expected)) or 'no moments'} of that shape in groups of "
            f"{size}, {'with a' if needs_correction else 'without a'} correction{in_dtypes}. {instead}"
        )
    return groups


def check_gradient(name: str, path: Any, param: Any, grad: Any) -> None:
    if not has_float_dtype(grad) or grad.shape != param.shape:
        raise ValueError(
            f"{name} got a gradient of shape {np.shape(grad)} and dtype {getattr(grad, 'dtype', None)} for "
            f"{name_of(path)!r}; expected floats of shape {param.shape}. Pass jax.grad(loss)(params, ...)."
        )


def check_gradient_scale(name: str, scale: Any) -> Any:
    """Return `scale=` as a float32 array, or None."""
    if scale is None:
        return None
    if isinstance(scale, bool) or not (isinstance(scale, int | float) or has_float_dtype(scale)):
        raise TypeError(
            f"{name} got scale={scale!r}, of type {type(scale).__name__}; expected one number, which multiplies the "
            "gradients. Write step(params, state, grads, scale=1 / loss_scale)."
        )
    if np.shape(scale) != ():
        raise ValueError(
            f"{name} got scale of shape {np.shape(scale)}; expected one number, which multiplies the gradients. "
            "Write step(params, state, grads, scale=1 / loss_scale)."
        )
    return jnp.asarray(scale, jnp.float32)


def check_ok(name: str, ok: Any) -> Any:
    """Return `ok=` as an array, or None."""
    if ok is None:
        return None
    check_bool(name, ok, "step(params, state, grads, ok=jaxamp.all_finite(grads))")
    return jnp.asarray(ok)
