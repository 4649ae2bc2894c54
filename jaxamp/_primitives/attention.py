"""Attention that becomes XLA's cuDNN kernel where it runs low on a GPU that has one, and is the plain one elsewhere.

A float32 program can't ask for the kernel, which takes 16-bit operands alone; `amp` decides on dtypes after the program
was traced. So attention is a primitive. The platform that it is lowered for says what it is made of:

    forward (q, k, v, *rest)                              -> out, lse
    tangent (q, k, v, *rest, out, lse, q', k', v'[, b'])  -> out'              linear in the last three or four
    backward(q, k, v, *rest, out, lse, ct)                -> q', k', v'[, b']  the transpose of `tangent`

`rest` are those of `OPTIONAL` that were given, `lse` is the logarithm of the softmax's sum. Forward mode and second
order are the plain attention's. No score is kept for the backward pass on any platform: the plain attention computes
them again, as the kernel does.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, has_devices, jet_of, wants_devices
from .._jaxpr import along
from .._traits import Traits, declare
from .attention_cudnn import fused_backward, fused_forward
from .attention_plain import BROADCAST, differentiable, plain_backward, plain_forward, plain_tangent, promoting

OPTIONAL = ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")

FORWARD, TANGENT, BACKWARD = ATTENTION = tuple(
    Primitive(f"dot_product_attention{suffix}") for suffix in ("", "_tangent", "_backward")
)


def dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    bias: Any = None,
    mask: Any = None,
    *,
    scale: float | None = None,
    is_causal: bool = False,
    query_seq_lengths: Any = None,
    key_value_seq_lengths: Any = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: str | None = None,
    return_residual: bool = False,
) -> Any:
    """Scaled dot product attention, with the arguments and results of `jax.nn.dot_product_attention`.

    Under `amp` it runs low. On an NVIDIA GPU it then is cuDNN's fused attention, if that takes these shapes; elsewhere,
    and in float32, it is the plain one with its softmax in float32. The scores are never kept for the backward pass.

    Args:
        query: Queries, of shape (batch, tokens, heads, width) or (tokens, heads, width).
        key: Keys, of shape (batch, tokens, heads, width); of fewer heads in grouped attention.
        value: Values, of the shape of `key`.
        bias: Is added to the scores; of a shape that can be repeated to (batch, heads, tokens, tokens).
        mask: Booleans of such a shape: which scores take part.
        scale: What scores are multiplied by; `width ** -0.5` if None.
        is_causal: Whether a token sees only itself and what came before.
        query_seq_lengths: How many tokens each example has, as int32 of shape (batch,).
        key_value_seq_lengths: The same, of keys and values.
        local_window_size: How far a token sees to the left and to the right.
        implementation: `"xla"` for the plain attention always; `"cudnn"` to get an error where a GPU runs it low and
            cuDNN can't; None for the faster of the two.
        return_residual: Whether to return the logarithm of the softmax's sum as well.

    Returns:
        The attended values, of the shape and dtype of `query`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> q = k = v = jnp.ones((2, 8, 4, 16))
    >>> attend = jaxamp.amp(jaxamp.dot_product_attention, compute_dtype=jnp.bfloat16)
    >>> "dot_product_attention" in str(jax.make_jaxpr(attend)(q, k, v)), attend(q, k, v).shape
    (True, (2, 8, 4, 16))
    """
    if implementation not in (None, "xla", "cudnn"):
        raise ValueError(f"implementation is {implementation!r}; expected None, 'xla' or 'cudnn'. Leave it out.")
    options: dict[str, Any] = dict(zip(OPTIONAL, (bias, mask, query_seq_lengths, key_value_seq_lengths), strict=True))
    given = {name: jnp.asarray(x) for name, x in options.items() if x is not None}
    query, key, value = (jnp.asarray(x) for x in (query, key, value))
    if isinstance(scale, jax.Array):
        query, scale = query * scale.astype(query.dtype), 1.0
    static = {
        "scale": None if scale is None else float(scale),
        "is_causal": is_causal,
        "local_window_size": local_window_size,
    }
    # Let `jax.nn.dot_product_attention` check the arguments.
    checked = promoting(functools.partial(jax.nn.dot_product_attention, **static))
    jax.eval_shape(checked, query, key, value, **given)
    shape, operands = query.shape, [_with_batch(x, name) for name, x in zip("qkv", (query, key, value), strict=True)]
    out, lse = FORWARD.bind(
        *operands,
        *(_with_batch(x, name) for name, x in given.items()),
        given=tuple(given),
        implementation=implementation,
        precision=_precision(),
        **static,
    )
    out = out.reshape(shape)
    return (out, lax.stop_gradient(lse.astype(key.dtype).reshape(shape[:-1]))) if return_residual else out


def _with_batch(x: Any, name: str) -> Any:
    missing = 0 if name.endswith("lengths") else 4 - x.ndim
    return lax.expand_dims(x, range(missing)) if missing else x


def _precision() -> lax.Precision | None:
    """What `jax.default_matmul_precision` asks matmuls for here; named algorithms count as the highest."""
    asked = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]
    if asked in (None, "default", "fastest", "bfloat16"):
        return None
    return lax.Precision.HIGH if asked in ("high", "tensorfloat32", "bfloat16_3x") else lax.Precision.HIGHEST


def _takes_part(primitive: Primitive, params: dict[str, Any]) -> tuple[list[bool], list[bool]]:
    """Which operands and which results are those of matmuls. A bias, lengths and sums are not, and are not rounded."""
    qkv, rest = [True] * 3, [False] * len(params["given"])
    bias = [False] * params.get("bias_differentiated", False)
    if primitive is FORWARD:
        return [*qkv, *rest], [True, False]
    if primitive is TANGENT:
        return [*qkv, *rest, True, False, *qkv, *bias], [True]
    return [*qkv, *rest, True, False, True], [*qkv, *bias]


def _flops(eqn: Any) -> int:
    """Queries by keys and weights by values; the backward pass does the first again, and two for each."""
    query, key = eqn.invars[0].aval.shape, eqn.invars[1].aval.shape
    once = 2 * math.prod(query) * key[-3]
    return once * (5 if eqn.primitive is BACKWARD else 2)


for _p in ATTENTION:
    declare(
        _p,
        Traits(
            matrix_unit=True,
            flops=_flops,
            takes_part=functools.partial(_takes_part, _p),
            in_tables=_p is FORWARD,
            policy_key=None if _p is FORWARD else FORWARD,  # the derivatives follow it
            jet=jet_of(lambda *operands, _p=_p, **params: _wide(_p, *operands, **params)),
        ),
    )


# -- the rules of the three primitives


@functools.lru_cache(256)
def _jitted(primitive: Primitive, **params: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(_PLAIN[primitive], **params))


def _abstract_eval(primitive: Primitive, *avals: Any, **params: Any) -> list[Any]:
    return jax.make_jaxpr(_jitted(primitive, **params))(*avals).out_avals


def _wide(primitive: Primitive, *operands: Any, **params: Any) -> list[Any]:
    """Low operands, multiplied in float32: XLA's CPU backend can't run each low x low -> float32 (0.10 to 0.12)."""
    low = operands[0].dtype
    if low not in (jnp.float16, jnp.bfloat16):
        return _PLAIN[primitive](*operands, **params)
    part, results = _takes_part(primitive, params)
    wide = [x.astype(np.float32) if own else x for x, own in zip(operands, part, strict=True)]
    outs = _PLAIN[primitive](*wide, **params)
    return [x.astype(low) if own else x for x, own in zip(outs, results, strict=True)]


@promoting
def _lower_on_cuda(primitive: Primitive, ctx: Any, *operands: Any, **params: Any) -> Any:
    """JAX can't lower its fused attention for devices that are not known, nor may `jax.export` hold it."""
    rules = _FUSED if has_devices(ctx) else _PLAIN
    return mlir.lower_fun(rules[primitive], multiple_results=True)(ctx, *operands, **params)


def _forward_jvp(primals: Any, tangents: Any, **params: Any) -> Any:
    given = params["given"]
    out, lse = FORWARD.bind(*primals, **params)
    bias_differentiated = "bias" in given and type(tangents[3 + given.index("bias")]) is not ad.Zero
    instantiated = [ad.instantiate_zeros(tangents[i]) for i in differentiable(given, bias_differentiated)]
    (tangent,) = TANGENT.bind(*primals, out, lse, *instantiated, bias_differentiated=bias_differentiated, **params)
    return (out, lse), (tangent, ad.Zero(jax.typeof(lse).to_tangent_aval()))


def _plain_jvp(primitive: Primitive, primals: Any, tangents: Any, **params: Any) -> Any:
    differentiated = [i for i, t in enumerate(tangents) if type(t) is not ad.Zero]
    plain = along(
        functools.partial(_wide, primitive, **params), primals, differentiated
    )  # it may be run on any platform
    outs = primitive.bind(*primals, **params)
    return outs, list(jax.jvp(plain, [primals[i] for i in differentiated], [tangents[i] for i in differentiated])[1])


def _tangent_transpose(cts: Any, *operands: Any, **params: Any) -> list[Any]:
    count = 3 + len(params["given"]) + 2
    if type(cts[0]) is ad.Zero:
        return [None] * len(operands)
    found = BACKWARD.bind(*operands[:count], cts[0], **params)
    return [None] * count + [
        x if ad.is_undefined_primal(operand) else None for x, operand in zip(found, operands[count:], strict=True)
    ]


def _batch(primitive: Primitive, axis_data: Any, operands: Any, dims: Any, **params: Any) -> tuple[Any, Any]:
    """The mapped axis joins the batch."""
    if all(dim is None for dim in dims):
        outs = primitive.bind(*operands, **params)
        return outs, [None] * len(outs)
    given = params["given"]
    names = ["q", "k", "v", *given, *["like q"] * (len(operands) - 3 - len(given))]
    with_bias = params.get("bias_differentiated", False)  # then it has a derivative for each place on the mapped axis
    if primitive is TANGENT and with_bias:
        names[-1] = "bias"
    size = axis_data.size

    def batch_of(i: int) -> int:
        return operands[i].shape[1 if dims[i] == 0 else 0]

    batch = batch_of(0)

    def joined(x: Any, dim: Any, name: str) -> Any:
        spread = name in BROADCAST and not (name == "bias" and with_bias)
        if dim is None and spread and x.shape[0] == 1:
            return x
        x = lax.broadcast(x, (size,)) if dim is None else jnp.moveaxis(x, dim, 0)
        if x.shape[1] != batch:
            x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return _merge(x)

    outs = primitive.bind(*map(joined, operands, dims, names), **params)
    outs = [x.reshape(size, batch, *x.shape[1:]) for x in outs]
    if primitive is BACKWARD and with_bias and batch_of(3 + given.index("bias")) != batch:
        outs[-1] = outs[-1].sum(1, keepdims=True)
    return outs, [0] * len(outs)


def _merge(x: Any) -> Any:
    """Two leading axes in one; a second one of size one is dropped, which no sharding minds."""
    return lax.squeeze(x, [1]) if x.shape[1] == 1 else x.reshape(-1, *x.shape[2:])


_Table = dict[Primitive, Callable[..., Any]]
_PLAIN: _Table = {FORWARD: plain_forward, TANGENT: plain_tangent, BACKWARD: plain_backward}
_FUSED: _Table = {FORWARD: fused_forward, BACKWARD: fused_backward}

for _p in ATTENTION:
    _p.multiple_results = True
    _p.def_impl(functools.partial(xla.apply_primitive, _p))
    _p.def_abstract_eval(functools.partial(_abstract_eval, _p))
    mlir.register_lowering(_p, promoting(mlir.lower_fun(_PLAIN[_p], multiple_results=True)))
    mlir.register_lowering(_p, mlir.lower_fun(functools.partial(_wide, _p), multiple_results=True), platform="cpu")
    ad.primitive_jvps[_p] = functools.partial(_plain_jvp, _p)
    batching.fancy_primitive_batchers[_p] = functools.partial(_batch, _p)
for _p in _FUSED:
    mlir.register_lowering(_p, functools.partial(_lower_on_cuda, _p), platform="cuda")
    wants_devices(_p)
ad.primitive_jvps[FORWARD] = _forward_jvp
ad.primitive_transposes[TANGENT] = _tangent_transpose
