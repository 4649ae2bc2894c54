"""Matmuls and convolutions of quantised operands.

    quantized(x, w) = base(q(x), q(w)) * scales
    derivative by x:  base's transpose of (q(ct), q(w)) * scales,        by w: of (q(x), q(ct)) * scales

Two primitives, for each base. `quantized_<base>` has the operands before and after rounding: it is computed from the
rounded ones and differentiated by the others. So the backward pass keeps the rounded operand in place of the other.
`<base>_with_quantized` is its derivative: linear in the tangent, with the other operand quantised. Forward mode has
tangents in the compute dtype; transposed, it quantises the cotangent.

A float32 parameter stays in memory in any case. It is kept as it is, and rounded again, with the scale from before;
unless its rounded copy stays there too (`keeping_rounded`).

An operand may also be kept in another format than it is multiplied in: `quantized_<base>` is then given both.
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import EARLY_INLINE, Literal, Primitive, Var, with_equations
from .._jaxpr import bind, evaluate
from .._number_formats.number_format import NumberFormat
from .._traits import declare, traits_of
from .matmul import Mixing, batching_rule, mixed, order_when_swapped
from .quantize import (
    ONCE,
    Quantized,
    check_scales,
    dequantized,
    numbers,
    quantize,
    refuse_second_derivative,
    scale_of,
    zeros_for,
)

_CACHED_TRANSPOSES = 1024


class Recipe(NamedTuple):
    """The number formats of a matmul, forward and backward. None: the compute dtype."""

    operands: NumberFormat | None
    gradients: NumberFormat | None  # the cotangent, where the derivative by an activation is made of it
    weight_gradients: NumberFormat | None  # and where that by a parameter is
    is_scaled: bool = True  # whether there are scales, one for each tensor
    powers_of_two: bool = False  # whether they are
    history: int = 0  # how many maxima of earlier steps a scale is made of, if there is a state; 0: none
    kept: NumberFormat | None = None  # activations that the backward pass reads again; None: as they were multiplied

    def has_scale(self, format: NumberFormat | None) -> bool:
        """Whether we find the scale. A format that finds scales of its own, such as `mxfp8`, needs none."""
        return format is not None and self.is_scaled and not format.is_scaled

    def scale_of(self, x: Any, format: NumberFormat | None) -> Any:
        """The scale for an array, or for a largest number."""
        if format is None or not self.has_scale(format):
            return jnp.ones((), np.float32)
        return scale_of(x, format, self.powers_of_two)


class Quantizing(NamedTuple):
    """How a quantised matmul runs."""

    recipe: Recipe
    compute_dtype: np.dtype
    given: tuple[bool, bool] = (False, False)  # which operands are kept as they are, and rounded again
    weights: tuple[bool, bool] = (False, False)  # which are parameters
    is_delayed: bool = False  # whether the largest cotangent of earlier steps is an operand, before the rest

    @property
    def scales_gradients(self) -> bool:
        """Whether cotangents get a scale from us."""
        formats = (_gradient_format(self, i) for i in range(2))
        return any(map(self.recipe.has_scale, formats))

    def keeps(self, i: int) -> bool:
        """Whether operand `i` is kept in a format of its own. Parameters are in memory as they are."""
        return self.recipe.kept is not None and not self.weights[i]

    def again(self, i: int) -> NumberFormat | None:
        """The format in which the backward pass reads operand `i`."""
        return self.recipe.kept if self.keeps(i) else self.recipe.operands

    def split(self, more: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        """The operands after the quantised ones: the largest cotangent, if it is one of them, those that are kept, each
        with its scale, and the rest."""
        begin, end = int(self.is_delayed), self.is_delayed + 2 * (self.keeps(0) + self.keeps(1))
        return more[:begin], more[begin:end], more[end:]


class Derivative(NamedTuple):
    """How the derivative of a quantised matmul by one of its operands runs."""

    quantizing: Quantizing
    side: int  # the number of the operand
    format: NumberFormat | None  # of the cotangent
    is_rounded: bool  # whether the other operand comes rounded; else it is rounded where it is read

    @property
    def other(self) -> NumberFormat | None:
        """The format of the other operand."""
        return self.quantizing.again(1 - self.side)

    def split(self, more: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any]]:
        """The operands after the other one's scale: the largest cotangent, if it is one of them, and the rest."""
        begin = int(self.quantizing.is_delayed)
        return more[:begin], more[begin:]

    def ordered(self, tangent: Any, other: Any) -> tuple[Any, Any]:
        return (tangent, other) if self.side == 0 else (other, tangent)


def quantized_matmul(base: Primitive, operands: Sequence[Any], params: dict[str, Any], quantizing: Quantizing) -> Any:
    """A matmul or convolution of quantised operands. Its result has the dtype that `params` ask for."""
    x, w, *rest = operands
    if params["preferred_element_type"] is None:
        params = {**params, "preferred_element_type": quantizing.compute_dtype}
    axes, recipe = _contracted(base, x, w, params), quantizing.recipe
    both = [_in_format(a, recipe.operands, axis, quantizing) for a, axis in zip((x, w), axes, strict=True)]
    kept = [
        _in_format(a, recipe.kept, axes[i], quantizing, in_bytes=True)
        for i, a in enumerate((x, w))
        if quantizing.keeps(i)
    ]
    more = [part for one in kept for part in one]
    return _quantized(base).bind(x, w, *both[0], *both[1], *more, *rest, quantizing=quantizing, **params)


def is_quantized(primitive: Primitive) -> bool:
    """Whether a primitive is a quantised form of another, or a derivative of one."""
    return primitive in _OURS


def keeping_rounded(eqn: Any, stay: Collection[Var]) -> Any:
    """A quantised matmul whose backward pass reads the rounded parameters that `stay` in memory, and not the others."""
    if "quantizing" not in eqn.params:
        return eqn
    quantizing, rounded = eqn.params["quantizing"], eqn.invars[2:6:2]
    stays = [not isinstance(q, Literal) and q in stay for q in rounded]
    given = (quantizing.given[0] and not stays[0], quantizing.given[1] and not stays[1])
    return eqn.replace(params={**eqn.params, "quantizing": quantizing._replace(given=given)})


_OURS: set[Primitive] = set()


def _in_format(
    x: Any,
    format: NumberFormat | None,
    axis: int,
    quantizing: Quantizing,
    scale: Any = None,
    in_bytes: bool = False,
) -> Quantized:
    """An array in a format, or in the compute dtype. `axis`: along which blocks lie."""
    scale = quantizing.recipe.scale_of(x, format) if scale is None else scale
    if format is None:
        return Quantized(lax.convert_element_type(x, quantizing.compute_dtype), scale)
    return quantize(x, scale, format, quantizing.compute_dtype, axis, in_bytes)


def _contracted(base: Primitive, x: Any, w: Any, params: dict[str, Any]) -> tuple[int, int]:
    """The axis of each operand that a matmul sums over, the last one of several: blocks lie along it."""
    if base is lax.conv_general_dilated_p:
        return params["dimension_numbers"].lhs_spec[1], params["dimension_numbers"].rhs_spec[1]
    ragged = params.get("ragged_dot_dimension_numbers")
    (left, right), _ = params["dimension_numbers"] if ragged is None else ragged.dot_dimension_numbers
    return (left[-1], right[-1]) if left else (x.ndim - 1, w.ndim - 1)


# -- the product of quantised operands


def _product(
    base: Primitive, x: Any, w: Any, scale: Any, rest: Sequence[Any], params: dict[str, Any], low: np.dtype
) -> Any:
    """`base` of arrays that hold quantised numbers, times a scale, in the dtype that `params` ask for.

    XLA makes one fp8 matmul of a product in the dtype of the result and the scale; the product of two scales is exact
    there. float16 can't hold a product that is not scaled yet.
    """
    out = np.dtype(params["preferred_element_type"])
    is_native = x.dtype.itemsize == w.dtype.itemsize == 1 and (x.dtype == w.dtype or base is lax.dot_general_p)
    if is_native and jnp.finfo(out).nexp == 8:
        return base.bind(x, w, *rest, **params) * lax.convert_element_type(scale, out)
    wide = {**params, "preferred_element_type": np.dtype(np.float32)}
    if is_native:
        product = base.bind(x, w, *rest, **wide)
    elif np.float32 in (x.dtype, w.dtype):
        x, w = (lax.convert_element_type(a, np.float32) for a in (x, w))
        product = base.bind(x, w, *rest, **{**wide, "precision": (lax.Precision.HIGHEST, lax.Precision.HIGHEST)})
    else:
        product = mixed(base, [*(lax.convert_element_type(a, low) for a in (x, w)), *rest], wide, low)
    return lax.convert_element_type(product * scale, out)


@functools.cache
def _quantized(base: Primitive) -> Primitive:
    """The form of a base primitive with operands x, w, q(x), scale, q(w), scale, and those after the first two."""
    own = Primitive(f"quantized_{base.name}")

    def lower(x: Any, w: Any, *more: Any, quantizing: Quantizing, **params: Any) -> Any:
        qx, scale_x, qw, scale_w, *after = more
        _, _, rest = quantizing.split(after)
        if quantizing.recipe.operands is None:
            return mixed(base, [qx, qw, *rest], params, quantizing.compute_dtype)
        x, w = (numbers(q, quantizing.recipe.operands) for q in (qx, qw))
        return _product(base, x, w, scale_x * scale_w, rest, params, quantizing.compute_dtype)

    def abstract_eval(x: Any, w: Any, *more: Any, quantizing: Quantizing, **params: Any) -> Any:
        _, _, rest = quantizing.split(more[4:])
        return base.abstract_eval(*_low_avals([x, w], quantizing.compute_dtype), *rest, **params)[0]

    def low_value(i: int, x: Any, quantizing: Quantizing) -> Any:  # as without quantisation
        return x if quantizing.given[i] else lax.convert_element_type(x, quantizing.compute_dtype)

    def along(i: int, tangent: Any, operands: Sequence[Any], quantizing: Quantizing, params: dict[str, Any]) -> Any:
        """The tangent of the product for a tangent of operand `i`, of which nothing else is read."""
        format_, other, low = _gradient_format(quantizing, i), 1 - i, quantizing.compute_dtype
        largest, kept, rest = quantizing.split(operands[6:])
        again = quantizing.again(other)
        if format_ is None and not quantizing.keeps(other):
            value = low_value(other, operands[other], quantizing)
            both = (tangent, value) if i == 0 else (value, tangent)
            return mixed(base, [*both, *rest], params, low, Mixing(quantizing.given))
        # Blocks lie along the axis that is summed over, another one in the backward pass.
        is_rounded = quantizing.keeps(other) or (
            not quantizing.given[other] and again is not None and again.block == "tensor"
        )
        rounded = Quantized(*operands[2 + 2 * other : 4 + 2 * other])
        if quantizing.keeps(other):
            rounded = Quantized(*(kept[:2] if other == 0 else kept[-2:]))
        derivative = Derivative(quantizing, i, format_, is_rounded)
        is_copy = is_rounded or (again is None and not quantizing.given[other])
        operand = rounded.q if is_copy else operands[other]
        return _bind_derivative(base, tangent, operand, [rounded.scale, *largest], rest, derivative, params)

    def jvp(primals: Any, tangents: Any, *, quantizing: Quantizing, **params: Any) -> tuple[Any, Any]:
        values, rounded = primals[:2], [Quantized(*primals[2:4]), Quantized(*primals[4:6])]
        _, _, rest = quantizing.split(primals[6:])
        is_plain = rounded[0].q.dtype.itemsize == 1 or quantizing.recipe.operands is None
        if quantizing.recipe.operands is None and not any(map(quantizing.keeps, range(2))):
            both = [low_value(i, values[i], quantizing) for i in range(2)]
            out = mixed(base, [*both, *rest], params, quantizing.compute_dtype, Mixing(quantizing.given))
        elif is_plain:  # the plain base, which the user's checkpoint policies know by name
            once = [part for one in rounded for part in (ONCE.bind(*one), one.scale)]
            out = lower(*values, *once, *primals[6:], quantizing=quantizing, **params)
        else:
            out = own.bind(*primals, quantizing=quantizing, **params)
        given = [i for i in range(2) if type(tangents[i]) is not ad.Zero]
        parts = [along(i, tangents[i], primals, quantizing, params) for i in given]
        return out, functools.reduce(ad.add_tangents, parts) if parts else ad.Zero(jax.typeof(out).to_tangent_aval())

    def transpose(ct: Any, *operands: Any, quantizing: Quantizing, **params: Any) -> Any:
        """As a linear function of one operand, whose rounding it does not see."""
        found = zeros_for(operands)
        for i in range(2):
            if ad.is_undefined_primal(operands[i]) and type(ct) is not ad.Zero:
                linear = functools.partial(along, i, operands=operands, quantizing=quantizing, params=params)
                (found[i],) = jax.linear_transpose(linear, operands[i].aval)(ct)
        return found

    def batch(axis_data: Any, operands: Any, dims: Any, *, quantizing: Quantizing, **params: Any) -> Any:
        largest, kept, rest = quantizing.split(operands[6:])
        after = len(operands) - len(rest)
        check_scales(dims[3], *dims[5 : after - len(kept)], *dims[after - len(kept) + 1 : after : 2])
        *first, qx, scale_x, qw, scale_w = operands[:6]
        arrays, scales = iter(kept[::2]), kept[1::2]
        own_kept = [(next(arrays),) if quantizing.keeps(i) else () for i in range(2)]
        pairs = [(first[0], qx, *own_kept[0]), (first[1], qw, *own_kept[1]), *((x,) for x in rest)]

        def multiply(ins: Sequence[Any], params: dict[str, Any]) -> Any:
            (x, qx, *kx), (w, qw, *kw), *rest = ins
            more = [part for pair in zip([*kx, *kw], scales, strict=True) for part in pair]
            both = x, w, qx, scale_x, qw, scale_w
            return (own.bind(*both, *largest, *more, *(x for (x,) in rest), quantizing=quantizing, **params),)

        places = [*dims[:2], *dims[after:]]
        return _batched(base, axis_data, pairs, places, params, quantizing.compute_dtype, multiply)

    _declare(own, base, _multiplies_in)
    _register(own, lower, abstract_eval, batch)
    ad.primitive_jvps[own] = jvp
    ad.primitive_transposes[own] = transpose
    return own


def _multiplies_in(params: dict[str, Any]) -> Any:
    quantizing = params["quantizing"]
    return quantizing.recipe.operands or quantizing.compute_dtype


def _low_avals(avals: Sequence[Any], low: np.dtype) -> list[Any]:
    return [aval.update(dtype=low, weak_type=False) for aval in avals]


def _gradient_format(quantizing: Quantizing, i: int) -> NumberFormat | None:
    """The format of the cotangent for the derivative by operand `i`."""
    return quantizing.recipe.weight_gradients if quantizing.weights[i] else quantizing.recipe.gradients


# -- its derivative


def _bind_derivative(
    base: Primitive,
    tangent: Any,
    other: Any,
    scales: Sequence[Any],
    rest: Sequence[Any],
    derivative: Derivative,
    params: dict[str, Any],
) -> Any:
    return _with_quantized(base).bind(tangent, other, *scales, *rest, derivative=derivative, **params)


@functools.cache
def _with_quantized(base: Primitive) -> Primitive:
    """The form of a base primitive with operands: a tangent, the other operand, its scale, the largest cotangent if
    that is known, and the rest."""
    own = Primitive(f"{base.name}_with_quantized")

    def lower(t: Any, other: Any, scale: Any, *more: Any, derivative: Derivative, **params: Any) -> Any:
        _, rest = derivative.split(more)
        low, axes = derivative.quantizing.compute_dtype, _contracted(base, *derivative.ordered(t, other), params)
        rounded = _rounded_again(other, scale, axes[1 - derivative.side], derivative)
        value = dequantized(rounded, derivative.other, low)
        both = derivative.ordered(lax.convert_element_type(t, low), value)
        return mixed(base, [*both, *rest], params, low)

    def abstract_eval(t: Any, other: Any, scale: Any, *more: Any, derivative: Derivative, **params: Any) -> Any:
        _, rest = derivative.split(more)
        both = _low_avals(derivative.ordered(t, other), derivative.quantizing.compute_dtype)
        return base.abstract_eval(*both, *rest, **params)[0]

    def jvp(primals: Any, tangents: Any, **params: Any) -> tuple[Any, Any]:
        if any(type(t) is not ad.Zero for t in tangents[1:]):
            refuse_second_derivative()
        return own.bind(*primals, **params), own.bind(tangents[0], *primals[1:], **params)

    def transpose(ct: Any, t: Any, other: Any, scale: Any, *more: Any, derivative: Derivative, **params: Any) -> Any:
        made = _transposed(base, t.aval, derivative, tuple(params.items()))(ct, other, scale, *more)
        return [made, *[None] * (2 + len(more))]

    def batch(axis_data: Any, operands: Any, dims: Any, *, derivative: Derivative, **params: Any) -> Any:
        largest, rest = derivative.split(operands[3:])
        after = len(operands) - len(rest)
        check_scales(*dims[2:after])
        scales, both = [operands[2], *largest], [(x,) for x in derivative.ordered(*operands[:2])]

        def multiply(ins: Sequence[Any], params: dict[str, Any]) -> Any:
            first, second, *rest = (x for (x,) in ins)
            t, other = derivative.ordered(first, second)
            return (_bind_derivative(base, t, other, scales, rest, derivative, params),)

        pairs, places = [*both, *((x,) for x in rest)], [*derivative.ordered(*dims[:2]), *dims[after:]]
        return _batched(base, axis_data, pairs, places, params, derivative.quantizing.compute_dtype, multiply)

    _declare(own, base, lambda params: params["derivative"].quantizing.compute_dtype)
    _register(own, lower, abstract_eval, batch)
    ad.primitive_jvps[own] = jvp
    ad.primitive_transposes[own] = transpose
    return own


def _rounded_again(other: Any, scale: Any, axis: int, derivative: Derivative) -> Quantized:
    """The operand beside the tangent, rounded as in the forward pass."""
    if derivative.is_rounded:
        return Quantized(other, scale)
    return _in_format(other, derivative.other, axis, derivative.quantizing, scale)


@functools.lru_cache(_CACHED_TRANSPOSES)
def _transposed(
    base: Primitive, aval: Any, derivative: Derivative, params: tuple[tuple[str, Any], ...]
) -> Callable[..., Any]:
    """The transpose by the tangent: the cotangent is quantised, and the result has the tangent's dtype."""
    side, low, recipe = derivative.side, derivative.quantizing.compute_dtype, derivative.quantizing.recipe
    settings = {**dict(params), "preferred_element_type": np.dtype(aval.dtype)}

    def rule(ct: Any, other: Any, *rest: Any) -> Any:
        both = derivative.ordered(ad.UndefinedPrimal(aval), other)
        out = ad.primitive_transposes[base](ct, *both, *rest, **settings)[side]
        return jnp.zeros(aval.shape, aval.dtype) if type(out) is ad.Zero else out

    def transposed(ct: Any, other: Any, scale: Any, *more: Any) -> Any:
        largest, rest = derivative.split(more)
        traced = jax.make_jaxpr(rule)(*_low_avals([jax.typeof(ct), jax.typeof(other)], low), *rest)
        traced = _without_transpose(traced) if base is lax.dot_general_p else traced
        axes = _contracted_backward(base, traced)
        scale_of_ct = recipe.scale_of(largest[0] if largest else ct, derivative.format)
        q = _in_format(ct, derivative.format, axes[0], derivative.quantizing, scale_of_ct)
        beside = _rounded_again(other, scale, axes[1], derivative)

        def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
            if eqn.primitive is not base:
                return bind(eqn, ins)
            x, w, *more = ins
            return [_product(base, x, w, q.scale * beside.scale, more, eqn.params, low)]

        both = [numbers(ONCE.bind(*q), derivative.format), numbers(ONCE.bind(*beside), derivative.other)]
        return lax.convert_element_type(evaluate(traced, [*both, *rest], apply)[0], aval.dtype)

    return jax.jit(transposed, inline=EARLY_INLINE)


def _without_transpose(traced: Any) -> Any:
    """A `dot_general` and a transpose of its result as one with swapped operands, if that gives the same.

    XLA would do so by itself, except in fp8.
    """
    eqns = traced.jaxpr.eqns
    if [eqn.primitive for eqn in eqns] != [lax.dot_general_p, lax.transpose_p]:
        return traced
    dot, transpose = eqns
    if tuple(transpose.params["permutation"]) != order_when_swapped(dot) or dot.params.get("out_sharding") is not None:
        return traced
    (left, right), (left_batch, right_batch) = dot.params["dimension_numbers"]
    params = {**dot.params, "dimension_numbers": ((right, left), (right_batch, left_batch))}
    swapped = dot.replace(invars=[*dot.invars[:2][::-1], *dot.invars[2:]], outvars=transpose.outvars, params=params)
    return with_equations(traced, [swapped])


def _contracted_backward(base: Primitive, traced: Any) -> tuple[int, int]:
    """The axes of the two operands of a transpose that its matmul sums over; the last ones, if it moves them first."""
    axes = [v.aval.ndim - 1 for v in traced.jaxpr.invars[:2]]
    for eqn in traced.jaxpr.eqns:
        if eqn.primitive is base:
            found = _contracted(base, eqn.invars[0].aval, eqn.invars[1].aval, eqn.params)
            for var, axis in zip(eqn.invars, found, strict=False):
                if var in traced.jaxpr.invars[:2]:
                    axes[traced.jaxpr.invars.index(var)] = axis
    return axes[0], axes[1]


# -- vmap


def _batched(
    base: Primitive,
    axis_data: Any,
    operands: Sequence[tuple[Any, ...]],
    dims: Sequence[Any],
    params: dict[str, Any],
    low: np.dtype,
    multiply: Callable[[Sequence[Any], dict[str, Any]], tuple[Any]],
) -> tuple[Any, Any]:
    """The base's rule for a batch. Each of its operands stands for several arrays, which are moved in the same way."""
    rule, found = batching_rule(base, axis_data, dims, params)

    def apply(eqn: Any, ins: list[Any]) -> Sequence[Any]:
        if eqn.primitive is base:
            return [multiply(ins, eqn.params)]
        arrays = [x if isinstance(x, tuple) else (x,) * max(map(len, operands)) for x in ins]
        outs = [bind(eqn, some) for some in zip(*arrays, strict=False)]
        return [tuple(some) for some in zip(*outs, strict=True)]

    like = _low_avals([jax.typeof(x[0]) for x in operands[:2]], low)
    traced = jax.make_jaxpr(rule)(*like, *(x for (x,) in operands[2:]))
    return evaluate(traced, operands, apply)[0][0], found[-1]


def _declare(own: Primitive, base: Primitive, multiplies_in: Callable[[dict[str, Any]], Any]) -> None:
    traits = dataclasses.replace(traits_of(base), shown_as=base.name, matmul=False, matrix_unit=True, plain_params=True)
    declare(own, dataclasses.replace(traits, multiplies_in=multiplies_in))


def _register(
    own: Primitive, lower: Callable[..., Any], abstract_eval: Callable[..., Any], batch: Callable[..., Any]
) -> None:
    own.def_abstract_eval(abstract_eval)
    own.def_impl(functools.partial(xla.apply_primitive, own))
    mlir.register_lowering(own, mlir.lower_fun(lower, multiple_results=False))
    batching.fancy_primitive_batchers[own] = batch
    _OURS.add(own)
