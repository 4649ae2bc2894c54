"""Matmuls, convolutions and ragged matmuls of mixed operands.

    mixed(x, w) = base(low(x), low(w))        in the compute dtype, accumulated in float32

The law: the derivative by a low operand is low, the derivative by a float32 operand is float32, and both come out of a
matmul of low operands. Rounding a float32 weight before a plain matmul would round its gradient too. (Convolutions on a
GPU have to: cuDNN has none of low operands with a float32 result, so theirs is low, and then converted.)

Each base primitive gets a mixed form, bilinear as the base is, so that forward mode, second order and `vmap` work. Its
rules are those of the base, with the matmul in them replaced. When it is differentiated, the forward pass is the plain
base, which the user's `jax.checkpoint` policies know by name.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.interpreters import ad, batching, mlir, xla

from .._compat import EARLY_INLINE, Primitive, is_whole
from .._jaxpr import bind, bind_primitive, evaluate
from .._traits import declare, traits_of
from .barriers import materialize
from .convolutions import alone, for_gpu, is_dilated
from .ragged import by_blocks, suits

_CACHED_TRANSPOSES = 1024
_RAGGED = "ragged_dot_general"
_HIGHEST = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
_MIXED: dict[Primitive, Primitive] = {}  # base primitive -> ours


def is_mixed(primitive: Primitive) -> bool:
    """Whether a primitive is the mixed form of another."""
    return primitive in _MIXED.values()


def has_mixed(primitive: Primitive) -> bool:
    """Whether there is a mixed form of a primitive."""
    return traits_of(primitive).matmul and not is_mixed(primitive)


class Mixing(NamedTuple):
    """How operands and tangents of a mixed matmul are rounded and kept."""

    # Which operands stay in memory in any case, in float32: kept for the backward pass, and rounded again there. Of the
    # others the rounded copy is kept.
    given: tuple[bool, bool] = (False, False)
    exact_tangents: bool = False  # tangents and cotangents are not rounded: for what a solve reads
    exact: tuple[bool, bool] = (False, False)  # which operands are such tangents
    low_gradients: bool = False  # gradients are summed over devices in the compute dtype, and are float32 then


def mixed(
    base: Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    compute_dtype: np.dtype,
    mixing: Mixing = Mixing(),  # noqa: B008 (a tuple)
) -> Any:
    """Bind the mixed form of `base`; operands are in the compute dtype or in float32.

    Low operands with a float32 result are a mixed matmul too, because the CPU needs another lowering for them; and all
    ragged matmuls, because GPUs do. For dilated convolutions of low operands GPUs need barriers around.
    """
    if params["preferred_element_type"] is None:
        params = {**params, "preferred_element_type": compute_dtype}
    dtypes = [*(x.dtype for x in operands[:2]), params["preferred_element_type"]]
    if all(dtype == compute_dtype for dtype in dtypes) and base.name != _RAGGED:
        plain, (x, w, *_) = functools.partial(bind_primitive, base), operands
        if base is lax.conv_general_dilated_p and is_dilated(x, w, params):
            return alone(x, w, params, plain, lambda x: materialize(x, compute_dtype))
        return plain(*operands, **params)
    if base not in _MIXED:
        _MIXED[base] = _define(base)
    return bind_primitive(_MIXED[base], *operands, compute_dtype=compute_dtype, mixing=mixing, **params)


def order_when_swapped(eqn: Any) -> tuple[int, ...]:
    """Where the axes of a `dot_general` are found in its result once the operands are swapped."""
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    rank, before = eqn.outvars[0].aval.ndim, len(batch)
    after = before + eqn.invars[0].aval.ndim - len(left) - before
    return (*range(before), *range(after, rank), *range(before, after))


def _low(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _define(base: Primitive) -> Primitive:
    """The mixed form of a bilinear primitive. Operands after the first two are not differentiated."""
    own = Primitive(f"mixed_{base.name}")

    def lower(*operands: Any, compute_dtype: np.dtype, mixing: Mixing, **params: Any) -> Any:
        if any(mixing.exact):
            return _exact(base, operands, params, compute_dtype, mixing)
        x, w, *rest = operands
        return base.bind(_low(x, compute_dtype), _low(w, compute_dtype), *rest, **params)

    def lower_on_cpu(*operands: Any, compute_dtype: np.dtype, mixing: Mixing, **params: Any) -> Any:
        """XLA's CPU backend can't run each low x low -> float32 (0.10 to 0.12): rounded, and multiplied in float32."""
        if any(mixing.exact):
            return _exact(base, operands, params, compute_dtype, mixing)
        (x, w, *rest), out = operands, params["preferred_element_type"]
        x, w = (_low(_low(a, compute_dtype), out) for a in (x, w))
        return base.bind(x, w, *rest, **params)

    def convolve_on_gpu(*operands: Any, compute_dtype: np.dtype, mixing: Mixing, **params: Any) -> Any:
        """XLA would run low x low -> float32 in float32: cuDNN has no such convolution."""
        if any(mixing.exact):
            return _exact(base, operands, params, compute_dtype, mixing)
        (x, w), out = operands, params["preferred_element_type"]
        low = {**params, "preferred_element_type": compute_dtype}
        return _low(for_gpu(_low(x, compute_dtype), _low(w, compute_dtype), low), out)

    def blocks(x: Any, w: Any, sizes: Any, *, compute_dtype: np.dtype, mixing: Mixing, **params: Any) -> Any:
        return by_blocks(_low(x, compute_dtype), _low(w, compute_dtype), sizes, **params)

    def ragged_on_gpu(ctx: Any, *operands: Any, mixing: Mixing, **params: Any) -> Any:
        """XLA would multiply all rows by the matrices of all groups."""
        is_ours = not any(mixing.exact) and is_whole(ctx) and suits(*ctx.avals_in, **params)
        fun = mlir.lower_fun(blocks if is_ours else lower, multiple_results=False)
        return fun(ctx, *operands, mixing=mixing, **params)

    def abstract_eval(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, mixing: Mixing, **params: Any) -> Any:
        x, w = (a.update(dtype=compute_dtype, weak_type=False) for a in (x, w))
        return base.abstract_eval(x, w, *rest, **params)[0]

    traits = dataclasses.replace(traits_of(base), shown_as=base.name, jet=functools.partial(_jet, base))
    declare(own, dataclasses.replace(traits, multiplies_in=lambda params: params["compute_dtype"]))
    own.def_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    mlir.register_lowering(own, mlir.lower_fun(lower_on_cpu, multiple_results=False), platform="cpu")
    if base is lax.conv_general_dilated_p:
        _on_gpus(own, mlir.lower_fun(convolve_on_gpu, multiple_results=False))
    if base.name == _RAGGED:
        _on_gpus(own, ragged_on_gpu)
    ad.primitive_jvps[own] = functools.partial(_jvp, base)
    ad.primitive_transposes[own] = functools.partial(_transpose, base)
    batching.fancy_primitive_batchers[own] = functools.partial(_batch, base)
    return own


def _on_gpus(primitive: Primitive, rule: Any) -> None:
    for platform in ("cuda", "rocm"):
        mlir.register_lowering(primitive, rule, platform=platform)


def _exact(
    base: Primitive, operands: Sequence[Any], params: dict[str, Any], compute_dtype: np.dtype, mixing: Mixing
) -> Any:
    """A product with tangents that are not rounded. By default GPUs and TPUs would round them."""
    dtype = params["preferred_element_type"]
    both = [
        _low(x, dtype) if exact else _rounded(x, compute_dtype, dtype)
        for x, exact in zip(operands[:2], mixing.exact, strict=True)
    ]
    return base.bind(*both, *operands[2:], **{**params, "precision": _HIGHEST})


def _rounded(x: Any, low: np.dtype, dtype: np.dtype) -> Any:
    """Rounded to a low dtype, and held in another. XLA drops conversions there and back on GPUs, but not this.

    A gradient with the operand as it was before is wrong if the forward pass rounded it, where a solve cancels.
    """
    info = jnp.finfo(low)
    return lax.reduce_precision(_low(_low(x, low), dtype), info.nexp, info.nmant)


def _jvp(
    base: Primitive, primals: Any, tangents: Any, *, compute_dtype: np.dtype, mixing: Mixing, **params: Any
) -> tuple[Any, Any]:
    *both, rest = primals[0], primals[1], primals[2:]
    low = [x if exact else _low(x, compute_dtype) for x, exact in zip(both, mixing.exact, strict=True)]
    kept = [x if given else y for x, y, given in zip(both, low, mixing.given, strict=True)]

    def with_tangent(i: int) -> Any:
        operands, exact = [*kept, *rest], list(mixing.exact)
        operands[i], exact[i] = tangents[i], mixing.exact_tangents
        return mixed(base, operands, params, compute_dtype, mixing._replace(exact=(exact[0], exact[1])))

    parts = [with_tangent(i) for i in range(2) if type(tangents[i]) is not ad.Zero]
    return mixed(base, [*low, *rest], params, compute_dtype, mixing), functools.reduce(ad.add_tangents, parts)


def _transpose(
    base: Primitive, ct: Any, x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, mixing: Mixing, **params: Any
) -> list[Any]:
    operands = [x, w]
    i = 0 if ad.is_undefined_primal(x) else 1
    outs: list[Any] = [None] * (2 + len(rest))
    fun = _transposed(base, i, operands[i].aval, compute_dtype, mixing, tuple(params.items()))
    outs[i] = fun(ct, operands[1 - i], *rest)
    return outs


@functools.lru_cache(_CACHED_TRANSPOSES)
def _transposed(
    base: Primitive, i: int, aval: Any, compute_dtype: np.dtype, mixing: Mixing, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The transpose of the base by operand `i`, told to come out in that operand's dtype. JAX remembers its trace."""
    is_low = mixing.low_gradients and not mixing.exact_tangents
    settings = {**dict(params), "preferred_element_type": compute_dtype if is_low else aval.dtype}
    if mixing.exact_tangents:
        settings["precision"] = _HIGHEST

    def rule(ct: Any, other: Any, *rest: Any) -> Any:
        both = [other, other]
        both[i] = ad.UndefinedPrimal(aval)
        out = ad.primitive_transposes[base](ct, *both, *rest, **settings)[i]
        return jnp.zeros(aval.shape, settings["preferred_element_type"]) if type(out) is ad.Zero else out

    def transposed(ct: Any, other: Any, *rest: Any) -> Any:
        if mixing.exact_tangents:
            return rule(ct, other if mixing.exact[1 - i] else _rounded(other, compute_dtype, ct.dtype), *rest)
        low = [_low(ct, compute_dtype), _low(other, compute_dtype), *rest]
        return _low(_with_mixed(base, rule, low, low, compute_dtype)[0], aval.dtype)

    return jax.jit(transposed, inline=EARLY_INLINE)


def batching_rule(
    base: Primitive, axis_data: Any, dims: Any, params: dict[str, Any]
) -> tuple[Callable[..., Any], list[Any]]:
    """The base's rule for a batch, as a function of its operands, and a list to find the axis of the result in."""
    found: list[Any] = []

    def rule(*operands: Any) -> Any:
        out, dim = batching.fancy_primitive_batchers[base](axis_data, operands, dims, **params)
        found.append(dim)
        return out

    return rule, found


def _batch(
    base: Primitive,
    axis_data: Any,
    operands: Any,
    dims: Any,
    *,
    compute_dtype: np.dtype,
    mixing: Mixing,
    **params: Any,
) -> tuple[Any, Any]:
    rule, found = batching_rule(base, axis_data, dims, params)
    x, w, *rest = operands
    like = [jax.typeof(a).update(dtype=compute_dtype, weak_type=False) for a in (x, w)]
    return _with_mixed(base, rule, operands, [*like, *rest], compute_dtype, mixing)[0], found[-1]


def _jet(
    base: Primitive, rules: Any, primals: Any, series: Any, *, compute_dtype: np.dtype, mixing: Mixing, **params: Any
) -> Any:
    """The base's rule of `jax.experimental.jet`: products of the terms of two Taylor series."""
    terms, tree = jtu.tree_flatten(list(zip(primals, map(list, series), strict=True)))
    multiplied = sum(1 + len(some) for some in series[:2])  # the others are sizes of groups

    def rule(*terms: Any) -> list[Any]:
        pairs = jtu.tree_unflatten(tree, terms)
        return jtu.tree_leaves(rules[base]([x for x, _ in pairs], [some for _, some in pairs], **params))

    like = [jax.typeof(a).update(dtype=compute_dtype, weak_type=False) for a in terms[:multiplied]]
    out, *outs = _with_mixed(
        base, rule, terms, [*like, *terms[multiplied:]], compute_dtype, mixing._replace(given=(False, False))
    )
    return out, outs


def _with_mixed(
    base: Primitive,
    rule: Callable[..., Any],
    operands: Sequence[Any],
    like: Sequence[Any],
    compute_dtype: np.dtype,
    mixing: Mixing = Mixing(),  # noqa: B008 (a tuple)
) -> list[Any]:
    """Run a rule of the base, traced on operands like `like`, on `operands`, with our primitive in place of the base.

    All other operations of such a rule move entries, in any dtype, or add results.
    """

    def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive is not base:
            return bind(eqn, ins)
        return [mixed(base, ins, eqn.params, compute_dtype, mixing)]

    return evaluate(jax.make_jaxpr(rule)(*like), operands, apply)
