"""Attention by cuDNN's fused kernel, where a GPU has it and it takes the operands; else the plain one."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu

from .._compat import open_jaxpr
from .._jaxpr import along
from .attention_plain import BROADCAST, attend_by, differentiable, plain_backward, plain_forward, promoting


class _CannotFuse(Exception):
    """cuDNN's attention does not take this call."""


def _split(given: Sequence[str], static: dict[str, Any], bias_differentiated: bool, primals: Sequence[Any]) -> Any:
    """The vjp of JAX's fused attention, cut in two: (forward, backward).

    JAX has no name for the two halves. Next to operands, the pullback holds the result and the softmax's sums:
    the forward half returns these, the backward half puts them in their places.
    """
    differentiated = differentiable(given, bias_differentiated)
    attend = attend_by("cudnn", given, static)

    def whole(*operands: Any) -> Any:
        return jax.vjp(along(attend, operands, differentiated), *(operands[i] for i in differentiated))

    closed, (_, pullback) = jax.make_jaxpr(whole, return_shape=True)(*primals)
    result, *held = open_jaxpr(closed).outvars
    batch, tokens, heads, _ = primals[0].shape
    results = [i for i, var in enumerate(held) if var is result]
    sums = [i for i, var in enumerate(held) if (var.aval.shape, var.aval.dtype) == ((batch, heads, tokens), np.float32)]
    if len(results) != 1 or len(sums) != 1:
        raise _CannotFuse("this JAX keeps something else of it for the backward pass")

    def forward(*operands: Any) -> tuple[Any, Any]:
        out, pullback = whole(*operands)
        return out, lax.transpose(jtu.tree_leaves(pullback)[sums[0]], (0, 2, 1))

    def backward(*operands: Any) -> Any:
        *primals, out, lse, ct = operands
        leaves = jtu.tree_leaves(whole(*primals)[1])  # the replaced leaves are dead code
        leaves[results[0]], leaves[sums[0]] = out, lax.transpose(lse, (0, 2, 1))
        return jtu.tree_unflatten(jtu.tree_structure(pullback), leaves)(ct)

    return forward, backward


def _halves(
    primals: Sequence[Any],
    *,
    given: Sequence[str],
    implementation: str | None,
    bias_differentiated: bool = False,
    **static: Any,
) -> Any:
    """`_split` if the fused attention is wanted and takes these operands, else None."""
    low = all(x.dtype in (jnp.float16, jnp.bfloat16) for x in primals[:3])
    if not low or implementation == "xla":
        return None
    try:
        return _fuse(primals, given, static, bias_differentiated)
    except _REFUSALS as error:
        if implementation == "cudnn":
            raise NotImplementedError(
                f"implementation='cudnn' of jaxamp.dot_product_attention: {error}. Expected operands that cuDNN's "
                "fused attention takes; leave `implementation` out to get the plain one where it doesn't."
            ) from error
        return None


_REFUSALS = (_CannotFuse, NotImplementedError, RuntimeError, ValueError)


def _fuse(primals: Sequence[Any], given: Sequence[str], static: dict[str, Any], bias_differentiated: bool) -> Any:
    """`_split`, or one of `_REFUSALS`."""
    if static["local_window_size"] is not None and not static["is_causal"]:
        raise _CannotFuse("it has no window without a causal mask")
    if not _has_tensor_cores():
        raise _CannotFuse("it needs a GPU of compute capability 8.0")
    return _split(given, static, bias_differentiated, primals)


def fused_here() -> tuple[bool, str]:
    """Whether an ordinary call of `dot_product_attention` that runs low is the fused one here, and why."""
    if not _gpus():
        return False, "there is no NVIDIA GPU: attention is the plain one"
    operand = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)
    static = {"scale": None, "is_causal": True, "local_window_size": None, "precision": None}
    try:
        promoting(_fuse)([operand] * 3, (), static, bias_differentiated=False)
    except _REFUSALS as error:
        return False, str(error)
    return True, "attention is cuDNN's where it runs low"


def _gpus() -> list[Any]:
    try:
        return jax.local_devices(backend="cuda")
    except RuntimeError:
        return []


def _has_tensor_cores() -> bool:
    """Whether the GPUs here have what the kernel needs; without one the program is for another machine."""
    return all(tuple(map(int, d.compute_capability.split("."))) >= (8, 0) for d in _gpus())


@promoting
def fused_forward(*operands: Any, **params: Any) -> Any:
    padded, params_of_padded = padded_to_even(operands, params)
    halves = _halves(padded, **params_of_padded)
    if halves is None:
        return plain_forward(*operands, **params)
    out, lse = halves[0](*padded)
    return _cut(out, operands[0].shape), _cut(lse, operands[0].shape[:3])


@promoting
def fused_backward(*operands: Any, **params: Any) -> Any:
    *primals, out, lse, ct = operands
    padded, params_of_padded = padded_to_even(primals, params)
    halves = _halves(padded, **params_of_padded)
    if halves is None:
        return plain_backward(*operands, **params)
    found = halves[1](*padded, *(_pad(x, {1}) for x in (out, lse, ct)))
    differentiated = differentiable(params["given"], params["bias_differentiated"])
    return [_cut(x, primals[i].shape) for x, i in zip(found, differentiated, strict=True)]


def padded_to_even(primals: Sequence[Any], params: dict[str, Any]) -> tuple[list[Any], dict[str, Any]]:
    """cuDNN takes no odd number of tokens: one more, and lengths that leave it out."""
    q, k, v, *rest = primals
    batch, tokens, keys = q.shape[0], q.shape[1], k.shape[1]
    if tokens % 2 == keys % 2 == 0:
        return list(primals), params
    options = dict(zip(params["given"], rest, strict=True))
    for name in BROADCAST:
        if name in options:
            options[name] = _pad(options[name], {axis for axis in (2, 3) if options[name].shape[axis] > 1})
    for name, count in (("query_seq_lengths", tokens), ("key_value_seq_lengths", keys)):
        options.setdefault(name, jnp.full(batch, count, np.int32))
    return [_pad(q, {1}), _pad(k, {1}), _pad(v, {1}), *options.values()], {**params, "given": tuple(options)}


def _pad(x: Any, axes: set[int]) -> Any:
    """`x` with zeros behind, such that it has an even number of entries along some axes."""
    return jnp.pad(x, [(0, x.shape[axis] % 2 if axis in axes else 0) for axis in range(x.ndim)])


def _cut(x: Any, shape: Sequence[int]) -> Any:
    """`x` without what padding has added."""
    return x if x.shape == tuple(shape) else lax.slice(x, [0] * x.ndim, shape)
