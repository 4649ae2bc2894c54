"""Matmuls, convolutions and ragged matmuls of mixed operands.

    mixed(x, w) = base(low(x), low(w))        in the compute dtype, accumulated in float32

The law: the derivative by a low operand is low, the derivative by a float32 operand is float32, and both come out of a
matmul of low operands. Rounding a float32 weight before a plain matmul would round its gradient too.

Each base primitive gets a mixed form, bilinear as the base is, so that forward mode, second order and `vmap` work. Its
rules are those of the base, with the matmul in them replaced. When it is differentiated, the forward pass is the plain
base, which the user's `jax.checkpoint` policies know by name.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax import tree_util as jtu
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive
from .._jaxpr import bind, bind_primitive, evaluate
from .._traits import declare, traits_of

_MIXED: dict[Primitive, Primitive] = {}  # base primitive -> ours


def is_mixed(primitive: Primitive) -> bool:
    """Whether a primitive is the mixed form of another."""
    return primitive in _MIXED.values()


def has_mixed(primitive: Primitive) -> bool:
    """Whether there is a mixed form of a primitive."""
    return traits_of(primitive).matmul and not is_mixed(primitive)


def mixed(
    base: Primitive,
    operands: Sequence[Any],
    params: dict[str, Any],
    compute_dtype: np.dtype,
    wide_cotangent: bool = False,
) -> Any:
    """Bind the mixed form of `base`; operands are in the compute dtype or in float32.

    Low operands with a float32 result are a mixed matmul too, because the CPU needs another lowering for them. The
    cotangent of a float32 result is rounded as well, unless it is to stay a `wide_cotangent`.
    """
    if params["preferred_element_type"] is None:
        params = {**params, "preferred_element_type": compute_dtype}
    dtypes = [*(x.dtype for x in operands[:2]), params["preferred_element_type"]]
    if all(dtype == compute_dtype for dtype in dtypes):
        return bind_primitive(base, *operands, **params)
    if base not in _MIXED:
        _MIXED[base] = _define(base)
    own = {"compute_dtype": compute_dtype, "wide_cotangent": wide_cotangent}
    return bind_primitive(_MIXED[base], *operands, **own, **params)


def _low(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _define(base: Primitive) -> Primitive:
    """The mixed form of a bilinear primitive. Operands after the first two are not differentiated."""
    own = Primitive(f"mixed_{base.name}")

    def lower(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, wide_cotangent: bool, **params: Any) -> Any:
        return base.bind(_low(x, compute_dtype), _low(w, compute_dtype), *rest, **params)

    def lower_on_cpu(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, wide_cotangent: bool, **params: Any) -> Any:
        """XLA's CPU backend can't run each low x low -> float32 (0.10 to 0.12): rounded, and multiplied in float32."""
        out = params["preferred_element_type"]
        x, w = (_low(_low(a, compute_dtype), out) for a in (x, w))
        return base.bind(x, w, *rest, **params)

    def abstract_eval(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, wide_cotangent: bool, **params: Any) -> Any:
        x, w = (a.update(dtype=compute_dtype, weak_type=False) for a in (x, w))
        return base.abstract_eval(x, w, *rest, **params)[0]

    traits = dataclasses.replace(traits_of(base), shown_as=base.name, jet=functools.partial(_jet, base))
    declare(own, dataclasses.replace(traits, multiplies_in=lambda params: params["compute_dtype"]))
    own.def_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    mlir.register_lowering(own, mlir.lower_fun(lower_on_cpu, multiple_results=False), platform="cpu")
    ad.primitive_jvps[own] = functools.partial(_jvp, base)
    ad.primitive_transposes[own] = functools.partial(_transpose, base)
    batching.fancy_primitive_batchers[own] = functools.partial(_batch, base)
    return own


def _jvp(
    base: Primitive, primals: Any, tangents: Any, *, compute_dtype: np.dtype, wide_cotangent: bool, **params: Any
) -> tuple[Any, Any]:
    x, w, *rest = primals
    low = [_low(x, compute_dtype), _low(w, compute_dtype)]

    def with_tangent(i: int) -> Any:
        operands = [*low, *rest]
        operands[i] = tangents[i]
        return mixed(base, operands, params, compute_dtype, wide_cotangent)

    parts = [with_tangent(i) for i in range(2) if type(tangents[i]) is not ad.Zero]
    out = mixed(base, [*low, *rest], params, compute_dtype, wide_cotangent)
    return out, functools.reduce(ad.add_tangents, parts)


def _transpose(
    base: Primitive,
    ct: Any,
    x: Any,
    w: Any,
    *rest: Any,
    compute_dtype: np.dtype,
    wide_cotangent: bool,
    **params: Any,
) -> list[Any]:
    """The transpose of the base by the linear operand, told to come out in that operand's dtype.

    A cotangent that stays wide is multiplied in its own dtype, at the highest precision: by default GPUs and TPUs round
    it.
    """
    operands = [x, w]
    i = 0 if ad.is_undefined_primal(x) else 1
    aval = operands[i].aval

    def rule(ct: Any, other: Any, *rest: Any) -> Any:
        both = [other, other]
        both[i] = ad.UndefinedPrimal(aval)
        out = ad.primitive_transposes[base](ct, *both, *rest, **{**params, "preferred_element_type": aval.dtype})[i]
        return jnp.zeros(aval.shape, aval.dtype) if type(out) is ad.Zero else out

    other = _low(operands[1 - i], compute_dtype)
    if wide_cotangent:
        params["precision"] = (lax.Precision.HIGHEST, lax.Precision.HIGHEST)
    outs: list[Any] = [None] * (2 + len(rest))
    if wide_cotangent:
        outs[i] = rule(ct, other.astype(ct.dtype), *rest)
    else:
        given = [_low(ct, compute_dtype), other, *rest]
        (outs[i],) = _with_mixed(base, rule, given, given, compute_dtype)
    return outs


def _batch(
    base: Primitive,
    axis_data: Any,
    operands: Any,
    dims: Any,
    *,
    compute_dtype: np.dtype,
    wide_cotangent: bool,
    **params: Any,
) -> tuple[Any, Any]:
    found: list[Any] = []

    def rule(*low: Any) -> Any:
        out, dim = batching.fancy_primitive_batchers[base](axis_data, low, dims, **params)
        found.append(dim)
        return out

    x, w, *rest = operands
    like = [jax.typeof(a).update(dtype=compute_dtype, weak_type=False) for a in (x, w)]
    return _with_mixed(base, rule, operands, [*like, *rest], compute_dtype, wide_cotangent)[0], found[-1]


def _jet(
    base: Primitive,
    rules: Any,
    primals: Any,
    series: Any,
    *,
    compute_dtype: np.dtype,
    wide_cotangent: bool,
    **params: Any,
) -> Any:
    """The base's rule of `jax.experimental.jet`: products of the terms of two Taylor series."""
    terms, tree = jtu.tree_flatten(list(zip(primals, map(list, series), strict=True)))
    multiplied = sum(1 + len(some) for some in series[:2])  # the others are sizes of groups

    def rule(*terms: Any) -> list[Any]:
        pairs = jtu.tree_unflatten(tree, terms)
        return jtu.tree_leaves(rules[base]([x for x, _ in pairs], [some for _, some in pairs], **params))

    like = [jax.typeof(a).update(dtype=compute_dtype, weak_type=False) for a in terms[:multiplied]]
    out, *outs = _with_mixed(base, rule, terms, [*like, *terms[multiplied:]], compute_dtype, wide_cotangent)
    return out, outs


def _with_mixed(
    base: Primitive,
    rule: Callable[..., Any],
    operands: Sequence[Any],
    like: Sequence[Any],
    compute_dtype: np.dtype,
    wide_cotangent: bool = False,
) -> list[Any]:
    """Run a rule of the base, traced on operands like `like`, on `operands`, with our primitive in place of the base.

    All other operations of such a rule move entries, in any dtype, or add results.
    """

    def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive is not base:
            return bind(eqn, ins)
        return [mixed(base, ins, eqn.params, compute_dtype, wide_cotangent)]

    return evaluate(jax.make_jaxpr(rule)(*like), operands, apply)
