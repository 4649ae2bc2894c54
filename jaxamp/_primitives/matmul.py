"""Matmuls, convolutions and ragged matmuls of mixed operands.

    mixed(x, w) = base(low(x), low(w))        in the compute dtype, accumulated in float32

The law: the derivative by a low operand is low, that by a float32 operand is float32, and both come out of a matmul of
low operands. Rounding a float32 weight before a plain matmul would round its gradient too.

Each is a primitive of its own, bilinear as its base is, so that forward mode, second order and `vmap` work. Rules are
those of the base primitive with the matmul in them replaced. When it is differentiated, the forward pass is the plain
base: policies of `jax.checkpoint` that know matmuls by name know it.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, mlir

from .._compat import Literal, Primitive, apply_primitive, batching_rules, consts_of, open_jaxpr
from .._jaxpr import bind_primitive
from .._traits.table import MATMULS

_MIXED: dict[str, Primitive] = {}  # base primitive's name -> ours


def is_mixed(primitive: Primitive) -> bool:
    """Whether a primitive is one of those defined here."""
    return _MIXED.get(primitive.name.removeprefix("mixed_")) is primitive


def has_mixed(primitive: Primitive) -> bool:
    """Whether there is a mixed form of a primitive."""
    return primitive.name in MATMULS


def mixed(base: Primitive, operands: Sequence[Any], params: dict[str, Any], compute_dtype: np.dtype) -> Any:
    """Bind the mixed form of `base`; operands are in the compute dtype, or in float32.

    Low operands and a float32 result are a mixed matmul too: of those the CPU needs to know.
    """
    if params["preferred_element_type"] is None:
        params = {**params, "preferred_element_type": compute_dtype}
    dtypes = [*(x.dtype for x in operands[:2]), params["preferred_element_type"]]
    if all(dtype == compute_dtype for dtype in dtypes):
        return bind_primitive(base, *operands, **params)
    if base.name not in _MIXED:
        _MIXED[base.name] = _define(base)
    return bind_primitive(_MIXED[base.name], *operands, compute_dtype=compute_dtype, **params)


def with_operands_swapped(params: dict[str, Any]) -> dict[str, Any]:
    """The parameters of a `dot_general` of the same operands, the second one first."""
    (left, right), (left_batch, right_batch) = params["dimension_numbers"]
    return {**params, "dimension_numbers": ((right, left), (right_batch, left_batch))}


def order_when_swapped(eqn: Any) -> tuple[int, ...] | None:
    """Where the axes of a `dot_general` are found in its result once the operands are swapped; None: don't swap them.

    A layer that is mapped over tokens, `vmap(lambda x: weight @ x)`, is a matmul with the weight first and the tokens
    last, and a transpose of its result.
    """
    if eqn.primitive is not lax.dot_general_p or eqn.params.get("out_sharding") is not None:
        return None
    (left, _), (batch, _) = eqn.params["dimension_numbers"]
    rank, before = eqn.outvars[0].aval.ndim, len(batch)
    after = before + eqn.invars[0].aval.ndim - len(left) - before
    return (*range(before), *range(after, rank), *range(before, after))


def _low(x: Any, dtype: np.dtype) -> Any:
    return x if x.dtype == dtype else lax.convert_element_type(x, dtype)


def _define(base: Primitive) -> Primitive:
    """The mixed form of a bilinear primitive. Operands after the first two are not differentiated."""
    own = Primitive(f"mixed_{base.name}")

    def lower(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, **params: Any) -> Any:
        return base.bind(_low(x, compute_dtype), _low(w, compute_dtype), *rest, **params)

    def lower_on_cpu(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, **params: Any) -> Any:
        """XLA's CPU backend can't run each low x low -> float32 (0.10 to 0.12): rounded, and multiplied in float32."""
        out = params["preferred_element_type"]
        x, w = (_low(_low(a, compute_dtype), out) for a in (x, w))
        return base.bind(x, w, *rest, **params)

    def abstract_eval(x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, **params: Any) -> Any:
        x, w = (a.update(dtype=compute_dtype, weak_type=False) for a in (x, w))
        return base.abstract_eval(x, w, *rest, **params)[0]

    own.def_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    mlir.register_lowering(own, mlir.lower_fun(lower_on_cpu, multiple_results=False), platform="cpu")
    ad.primitive_jvps[own] = functools.partial(_jvp, base)
    ad.primitive_transposes[own] = functools.partial(_transpose, base)
    batching_rules()[own] = functools.partial(_batch, base)
    return own


def _jvp(base: Primitive, primals: Any, tangents: Any, *, compute_dtype: np.dtype, **params: Any) -> tuple[Any, Any]:
    x, w, *rest = primals
    low = [_low(x, compute_dtype), _low(w, compute_dtype)]

    def with_tangent(i: int) -> Any:
        operands = [*low, *rest]
        operands[i] = tangents[i]
        return mixed(base, operands, params, compute_dtype)

    parts = [with_tangent(i) for i in range(2) if type(tangents[i]) is not ad.Zero]
    return mixed(base, [*low, *rest], params, compute_dtype), functools.reduce(ad.add_tangents, parts)


def _transpose(
    base: Primitive, ct: Any, x: Any, w: Any, *rest: Any, compute_dtype: np.dtype, **params: Any
) -> list[Any]:
    """The transpose of the base by the linear operand, told to come out in that operand's dtype."""
    operands = [x, w]
    i = 0 if ad.is_undefined_primal(x) else 1
    aval = operands[i].aval

    def rule(ct: Any, other: Any, *rest: Any) -> Any:
        both = [other, other]
        both[i] = ad.UndefinedPrimal(aval)
        out = ad.primitive_transposes[base](ct, *both, *rest, **{**params, "preferred_element_type": aval.dtype})[i]
        return jnp.zeros(aval.shape, aval.dtype) if type(out) is ad.Zero else out

    given = [_low(ct, compute_dtype), _low(operands[1 - i], compute_dtype), *rest]
    outs: list[Any] = [None] * (2 + len(rest))
    outs[i] = _with_mixed(base, rule, given, given, compute_dtype)
    return outs


def _batch(
    base: Primitive, axis_data: Any, operands: Any, dims: Any, *, compute_dtype: np.dtype, **params: Any
) -> tuple[Any, Any]:
    found: list[Any] = []

    def rule(*low: Any) -> Any:
        out, dim = batching_rules()[base](axis_data, low, dims, **params)
        found.append(dim)
        return out

    x, w, *rest = operands
    like = [jax.typeof(a).update(dtype=compute_dtype, weak_type=False) for a in (x, w)]
    return _with_mixed(base, rule, operands, [*like, *rest], compute_dtype), found[-1]


def _with_mixed(
    base: Primitive, rule: Callable[..., Any], operands: Sequence[Any], like: Sequence[Any], compute_dtype: np.dtype
) -> Any:
    """Run a rule of the base, traced on operands as `like`, on `operands`, with our primitive in place of the base.

    What else is in such a rule moves entries, in any dtype.
    """
    closed = jax.make_jaxpr(rule)(*like)
    jaxpr = open_jaxpr(closed)
    env: dict[Any, Any] = dict(zip(jaxpr.constvars, consts_of(closed), strict=True))
    env.update(zip(jaxpr.invars, operands, strict=True))

    def read(atom: Any) -> Any:
        return atom.val if isinstance(atom, Literal) else env[atom]

    for eqn in jaxpr.eqns:
        ins = [read(v) for v in eqn.invars]
        if eqn.primitive is base:
            outs = [mixed(base, ins, eqn.params, compute_dtype)]
        else:
            out = eqn.primitive.bind(*ins, **eqn.primitive.get_bind_params(eqn.params))
            outs = out if eqn.primitive.multiple_results else [out]
        env.update(zip(eqn.outvars, outs, strict=True))
    return read(jaxpr.outvars[0])
