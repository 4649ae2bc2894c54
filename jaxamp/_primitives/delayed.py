"""Maxima that come out of a program as derivatives, for delayed scaling.

A slot is a float32 that a program is given: the largest number of an array in earlier steps. Its cotangent is the
largest number in this step. That is the one way out of a backward pass on all supported versions of JAX, and it leads
through `jit`, `scan`, `cond`, `checkpoint` and `vmap` by itself.

    watch(out, slots, maxima) = out     derivatives by the slots: the largest |ct| for the first, maxima for the others
    share(slot) = the slot, for each round of a scan     derivative: the largest of the rounds' cotangents

JAX adds the cotangents of a value that is read several times. So each slot is read by one `watch`, and `share` stands
where the rounds of a scan, or the devices of a `shard_map`, read the same one.
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.interpreters import ad, batching, mlir, xla

from .._compat import Primitive, as_varying
from .._traits import Traits, declare
from .quantize import check_scales, largest_of

WATCH = Primitive("watch")  # out, slots, and the maxima of the last of these
SHARE = Primitive("share")


def _watch_jvp(primals: Sequence[Any], tangents: Sequence[Any], *, slots: int) -> tuple[Any, Any]:
    out, (tangent, *of_slots) = WATCH.bind(*primals, slots=slots), tangents[: 1 + slots]
    if all(type(t) is ad.Zero for t in of_slots):
        return out, tangent
    linear = [ad.instantiate_zeros(t) for t in (tangent, *of_slots)]
    return out, WATCH.bind(*linear, *primals[1 + slots :], slots=slots)


def _watch_transpose(ct: Any, *operands: Any, slots: int) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None] * len(operands)
    maxima = operands[1 + slots :]
    seen = [largest_of(ct)] * (slots - len(maxima)) + list(maxima)
    found = [ct, *seen, *[None] * len(maxima)]
    return [x if ad.is_undefined_primal(operand) else None for x, operand in zip(found, operands, strict=True)]


def _watch_batch(operands: Sequence[Any], dims: Sequence[Any], *, slots: int) -> tuple[Any, Any]:
    check_scales(*dims[1:])
    return WATCH.bind(*operands, slots=slots), dims[0]


WATCH.def_impl(lambda out, *others, slots: out)
WATCH.def_abstract_eval(lambda out, *others, slots: out)
mlir.register_lowering(WATCH, lambda ctx, out, *others, slots: [out])
ad.primitive_jvps[WATCH] = _watch_jvp
ad.primitive_transposes[WATCH] = _watch_transpose
batching.primitive_batchers[WATCH] = _watch_batch
declare(WATCH, Traits(cheap=True, passes_on=True, plain_params=True, fixed_dtype=True))


def _share(slot: Any, *, rounds: int, axes: tuple[Any, ...], added: int) -> Any:
    """`rounds`: of the scan, or 0 where there is none. `axes`: of a mesh, whose devices share the slot.

    `added`: how many equal cotangents JAX is going to add by itself: a `shard_map` that doesn't track which values are
    the same on all devices adds those of all devices.
    """
    slot = as_varying(slot, frozenset(axes)) if added == 1 else slot
    return jnp.broadcast_to(slot, (rounds, *slot.shape)) if rounds else slot


def _share_abstract(aval: Any, **params: Any) -> Any:
    return jax.make_jaxpr(functools.partial(_share, **params))(aval).out_avals[0]


def _share_transpose(ct: Any, slot: Any, *, rounds: int, axes: tuple[Any, ...], added: int) -> list[Any]:
    if type(ct) is ad.Zero:
        return [None]
    ct = jnp.max(ct, axis=0) if rounds else ct
    return [(lax.pmax(ct, axes) if axes else ct) / added]


def _share_batch(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> tuple[Any, Any]:
    check_scales(*dims)
    return SHARE.bind(*operands, **params), None


SHARE.def_impl(functools.partial(xla.apply_primitive, SHARE))
SHARE.def_abstract_eval(_share_abstract)
mlir.register_lowering(SHARE, mlir.lower_fun(_share, multiple_results=False))
ad.deflinear2(SHARE, _share_transpose)
batching.primitive_batchers[SHARE] = _share_batch
declare(SHARE, Traits(cheap=True, plain_params=True, fixed_dtype=True))
