"""Convolutions in a form that GPUs have kernels for.

The gradient of a filter is a convolution of the input with the cotangent, whose "filter" is as large as an image. XLA
finds cuDNN's kernel for it only where it has strides of 1 and its input has no holes. That of a dilated convolution has
strides, and that of a transposed convolution has holes. XLA takes them for ordinary convolutions with filters of
thousands of entries: 11 of them are 78 of the 87 ms that an autoencoder over audio takes on an H200 (jax 0.11).

A dilated convolution is one of cuDNN's too, but not with uneven padding, as causal ones have. XLA pads their input, and
fills the holes of their filters with zeros: with 2 entries, 128 apart, it multiplies by 129. On an H200 that takes 2.7
in place of .11 ms (16 x 8192 steps, 128 to 256 channels), and a filter of 3 x 3, dilated by 12, 22 in place of .39 ms.
And XLA lets cuDNN add something to the result, for which there is but a slow kernel: the same 8192 steps take 36 ms.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from jax import lax


def is_dilated(x: Any, w: Any, params: dict[str, Any]) -> bool:
    """Whether the filter has holes, the input has none, and it is not the gradient of a filter."""
    is_plain = params["batch_group_count"] == 1 and all(dilation == 1 for dilation in params["lhs_dilation"])
    return is_plain and any(dilation != 1 for dilation in params["rhs_dilation"]) and not _is_gradient(x, w, params)


def for_gpu(x: Any, w: Any, params: dict[str, Any]) -> Any:
    """The convolution, in another form if it is the gradient of a filter, or dilated, and XLA would take a detour."""
    if _is_gradient(x, w, params):
        if any(stride != 1 for stride in params["window_strides"]):
            return _without_strides(x, w, params)
        if any(dilation != 1 for dilation in params["lhs_dilation"]):
            return _without_holes(x, w, params)
    elif is_dilated(x, w, params):
        return alone(x, w, params, lax.conv_general_dilated_p.bind, lax.optimization_barrier)
    return lax.conv_general_dilated_p.bind(x, w, **params)


def _is_gradient(x: Any, w: Any, params: dict[str, Any]) -> bool:
    """Whether one of the two forms is for this convolution, and its filter is larger than its result."""
    strides, holes, dilation = (params[name] for name in ("window_strides", "lhs_dilation", "rhs_dilation"))
    spatial = range(len(strides))
    has_strides, has_holes = any(s != 1 for s in strides), any(h != 1 for h in holes)
    if has_holes and (has_strides or params["feature_group_count"] != 1 or any(d != 1 for d in dilation)):
        return False
    if any(strides[i] != 1 and dilation[i] != 1 for i in spatial):
        return False
    numbers = params["dimension_numbers"]
    sizes = [w.shape[axis] for axis in numbers.rhs_spec[2:]]
    if not all(isinstance(size, int) for size in (*sizes, *(x.shape[axis] for axis in numbers.lhs_spec[2:]))):
        return False
    is_larger = all(size >= out for size, out in zip(sizes, _outs(x, w, params), strict=True))
    return is_larger and 0 not in (*x.shape, *w.shape)


def _outs(x: Any, w: Any, params: dict[str, Any]) -> list[int]:
    """The sizes of the result's spatial axes."""
    numbers, found = params["dimension_numbers"], []
    for i, (left, right) in enumerate(zip(numbers.lhs_spec[2:], numbers.rhs_spec[2:], strict=True)):
        whole = (x.shape[left] - 1) * params["lhs_dilation"][i] + 1 + sum(params["padding"][i])
        found.append((whole - (w.shape[right] - 1) * params["rhs_dilation"][i] - 1) // params["window_strides"][i] + 1)
    return found


def _without_strides(x: Any, w: Any, params: dict[str, Any]) -> Any:
    """With each n-th entry in a channel of its own, where the strides are n.

    out[k] = sum x[n k + j] w[j] over j, and j = n i + phase: a sum over i and the phases.
    """
    numbers, outs = params["dimension_numbers"], _outs(x, w, params)
    strides, padding = list(params["window_strides"]), list(params["padding"])
    for i, stride in enumerate(params["window_strides"]):
        if stride == 1:
            continue
        left, right = numbers.lhs_spec[2 + i], numbers.rhs_spec[2 + i]
        steps = -(-w.shape[right] // stride)
        low = padding[i][0]
        high = (outs[i] - 1 + steps) * stride - x.shape[left] - low
        x, w = _padded(x, left, low, high), _padded(w, right, 0, steps * stride - w.shape[right])
        x = _moved(x, left, numbers.lhs_spec[1], stride, inner=True)
        w = _moved(w, right, numbers.rhs_spec[1], stride, inner=True)
        strides[i], padding[i] = 1, (0, 0)
    params = {**params, "window_strides": tuple(strides), "padding": tuple(padding)}
    return lax.conv_general_dilated_p.bind(x, w, **params)


def alone(x: Any, w: Any, params: dict[str, Any], convolve: Callable[..., Any], barrier: Callable[[Any], Any]) -> Any:
    """A dilated convolution without uneven padding, to which nothing is added.

    The barriers are there because XLA would take both into the convolution again.
    """
    if _is_uneven(params["padding"]):
        for axis, (low, high) in zip(params["dimension_numbers"].lhs_spec[2:], params["padding"], strict=True):
            x = _padded(x, axis, low, high)
        x, params = barrier(x), {**params, "padding": ((0, 0),) * len(params["padding"])}
    return barrier(convolve(x, w, **params))


def _is_uneven(padding: Any) -> bool:
    known = all(isinstance(size, int | np.integer) for pair in padding for size in pair)
    return known and any(low != high or low < 0 for low, high in padding)


def _padded(x: Any, axis: int, low: int, high: int) -> Any:
    return lax.pad(x, x.dtype.type(0), [(low, high, 0) if i == axis else (0, 0, 0) for i in range(x.ndim)])


def _moved(x: Any, axis: int, to: int, parts: int, *, inner: bool) -> Any:
    """A factor of an axis, its inner or outer one, becomes the inner or outer factor of another axis."""
    shape, out = list(x.shape), list(x.shape)
    rest = shape[axis] // parts
    shape[axis : axis + 1] = [rest, parts] if inner else [parts, rest]
    moved = axis + inner
    order = [i for i in range(len(shape)) if i != moved]
    order.insert(order.index(to if to < axis else to + 1) + inner, moved)
    out[axis], out[to] = rest, out[to] * parts
    return lax.reshape(lax.transpose(lax.reshape(x, shape), order), out)


def _without_holes(x: Any, w: Any, params: dict[str, Any]) -> Any:
    """With the operands in each other's place, so that the holes are in the filter, and the result read backwards.

    out[k] = sum w[j] x[i] over all n i = j + k - low, so out[last - k] = sum w[n i + k + low - last] x[i].
    """
    numbers, outs = params["dimension_numbers"], _outs(x, w, params)
    for i in range(len(outs)):
        axis, hole = numbers.rhs_spec[2 + i], params["lhs_dilation"][i]
        low = outs[i] - 1 - params["padding"][i][0]
        reach = (x.shape[numbers.lhs_spec[2 + i]] - 1) * hole
        w = _padded(w, axis, low, outs[i] + reach - low - w.shape[axis])
    batch, channels, *places = numbers.out_spec
    swapped = {
        "dimension_numbers": lax.ConvDimensionNumbers(numbers.rhs_spec, numbers.lhs_spec, (channels, batch, *places)),
        "lhs_dilation": (1,) * len(outs),
        "rhs_dilation": params["lhs_dilation"],
        "padding": ((0, 0),) * len(outs),
    }
    out = lax.rev(lax.conv_general_dilated_p.bind(w, x, **{**params, **swapped}), places)
    return _moved(out, batch, channels, params["batch_group_count"], inner=False)
