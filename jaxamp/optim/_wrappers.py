"""Any Optax optimizer with compressed moments, and any with weights of more bits than its parameters."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import tree_util as jtu

from .._tree import is_inexact_array
from ._codecs import MOMENTUM, Codec, Variance
from ._layout import groups, groups_of
from ._optimizer import FlashOptimizer, check_gradient
from ._paths import flatten, flatten_like, name_of
from ._scales import FORMATS, format_of
from ._storage import Storage
from ._weights import LOW, change_of, check_correction, correction_dtype, join

# What Optax's states call moments: those of both signs, and those that are never negative. Some mean others by the
# names. The centred second moment is a difference of two, and would be negative now and then.
KINDS: Mapping[str, str | None] = {
    **dict.fromkeys(("mu", "trace", "ema", "m", "m1", "m2"), "momentum"),
    **dict.fromkeys(("nu", "nu_max", "sum_of_squares", "v", "e_g", "e_x"), "variance"),
    **dict.fromkeys(("ScaleBySM3State.nu", "ScaleByAdanState.v", "SophiaState.nu"), "momentum"),
    **dict.fromkeys(("ScaleBySM3State.mu", "ScaleByAdanState.n", "ScaleBySimplifiedAdEMAMixState.n"), "variance"),
    **{f"ScaleByRStdDev{kind}.{field}": None for kind in ("State", "WithCountState") for field in ("mu", "nu")},
}
_STORAGE = Storage()


class Compressed(NamedTuple):
    """A moment in bytes, in the place of an array."""

    values: jax.Array
    scales: jax.Array


class CompressedState(NamedTuple):
    """The state of an optimizer under `compress_state`: `inner` with `Compressed` in the place of its moments."""

    count: Any
    inner: Any


def compress_state(
    tx: optax.GradientTransformation, *, storage: Storage = _STORAGE, kinds: Mapping[str, str | None] = KINDS
) -> optax.GradientTransformationExtraArgs:
    """An optimizer whose moments are stored in bytes. The rest of its state is as it was.

    Moments are found by the names of the fields that hold them, in states that are NamedTuples, and by their shapes,
    which are those of parameters. Each step makes float32 of them and writes them again: XLA may hold all of them for a
    moment, which the optimizers of this package don't.

    Args:
        tx: Any Optax optimizer.
        storage: How moments are stored. Corrections and small arrays are none of its business here.
        kinds: `"momentum"` for a field with numbers of both signs, `"variance"` for one that is never negative. A key
            is the name of a field, or `"State.field"` for the field of one class. What is not named, or named None, is
            left alone.

    >>> import jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> params = {"w": jnp.ones((64, 64))}
    >>> plain, compressed = optax.lamb(1e-3), optim.compress_state(optax.lamb(1e-3))
    >>> [round(optim.optimizer_bytes(tx, params).per_parameter, 2) for tx in (plain, compressed)]
    [12.0, 6.13]
    """
    if not isinstance(storage, Storage):
        raise TypeError(
            f"compress_state got storage={storage!r}, of type {type(storage).__name__}; expected a Storage. Write "
            "compress_state(tx, storage=jaxamp.optim.Storage(group_size=64))."
        )
    _check_plain("compress_state", tx)
    codecs: dict[str, Codec] = {"momentum": MOMENTUM, "variance": Variance(storage.variance_floor)}
    stored_by = {codec.dtype: codec for codec in codecs.values()}
    for field, kind in kinds.items():
        if kind is not None and kind not in codecs:
            raise ValueError(
                f"compress_state got {kind!r} for {field!r}; expected 'momentum' or 'variance'. Write "
                f"kinds={{{field!r}: 'momentum'}}, and leave out fields that are no moments."
            )
    tx = optax.with_extra_args_support(tx)

    def encode(codec: Codec, x: Any, count: Any) -> Compressed:
        found = groups(x.shape, storage.group_size, storage.layout)
        view = found.view(x.astype(jnp.float32))
        top = codec.top(view, found.view_axis)
        values = found.unview(codec.encode(view, found.spread(top)))
        return Compressed(values, FORMATS[storage.scales].encode(codec.scale(top), count))

    def decode(x: Any) -> Any:
        if not is_compressed(x):
            return x
        found = groups_of(x.values.shape, x.scales.shape, storage.group_size)
        if found is None:
            raise ValueError(
                f"compress_state got scales of shape {x.scales.shape} for moments of shape {x.values.shape}; expected "
                f"groups of {storage.group_size}. Pass the storage that the state was made with."
            )
        scale = found.spread(format_of(x.scales).decode(x.scales))
        return found.unview(stored_by[x.values.dtype].decode(found.view(x.values), scale))

    def init(params: Any) -> CompressedState:
        shapes = {x.shape for x in jax.tree.leaves(params) if is_inexact_array(x) and x.size}
        like: Any = jax.tree.structure(params)
        moment = lambda x: is_inexact_array(x) and not jnp.iscomplexobj(x) and x.shape in shapes

        def compressed(node: Any, kind: str | None = None) -> Any:
            if kind is not None:
                return jax.tree.map(lambda x: encode(codecs[kind], x, None) if moment(x) else x, node)
            structure: Any = jax.tree.structure(node, is_leaf=lambda x: x is not node)
            if like == jax.tree.structure(node) or jtu.treedef_is_leaf(structure):
                return node  # parameters, or something like them: their names are no fields of a state
            parts = structure.flatten_up_to(node)
            name, fields = type(node).__name__, getattr(node, "_fields", [""] * len(parts))
            named = [kinds.get(f"{name}.{field}", kinds.get(field)) for field in fields]
            return structure.unflatten(map(compressed, parts, named))

        plain = tx.init(params)
        inner = compressed(plain)
        found = any(map(is_compressed, jax.tree.leaves(inner, is_leaf=is_compressed)))
        if kinds is not KINDS and not found and any(map(moment, jax.tree.leaves(plain))):
            raise ValueError(
                f"compress_state got kinds for {', '.join(kinds) or 'no fields'}, and none is a field of this "
                "optimizer's state with moments; expected names of such fields, as 'mu' is in Optax's Adam. Write "
                "kinds={**jaxamp.optim.KINDS, 'my_field': 'momentum'}."
            )
        return CompressedState(jnp.zeros((), jnp.int32), inner)

    def update(updates: Any, state: CompressedState, params: Any = None, **extra_args: Any) -> tuple[Any, Any]:
        if not isinstance(state, CompressedState):
            raise TypeError(
                f"compress_state got {type(state).__name__} as its state; expected a CompressedState. Write state = "
                "optimizer.init(params) with the optimizer that compress_state returned."
            )
        count = state.count + 1
        inner = jax.tree.map(decode, state.inner, is_leaf=is_compressed)
        updates, inner = tx.update(updates, inner, params, **extra_args)
        again = lambda old, new: encode(stored_by[old.values.dtype], new, count) if is_compressed(old) else new
        return updates, CompressedState(count, jax.tree.map(again, state.inner, inner, is_leaf=is_compressed))

    return optax.GradientTransformationExtraArgs(init, update)


def _check_plain(name: str, tx: Any) -> None:
    """Refuse what is no optimizer, and one that is compressed by itself."""
    if isinstance(tx, FlashOptimizer):
        raise TypeError(
            f"{name} got {tx.name}, which is compressed; expected an optimizer of Optax. Write {tx.name}(1e-3) alone, "
            f"or {name}(optax.adamw(1e-3))."
        )
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{name} got {tx!r}, of type {type(tx).__name__}; expected an optimizer of Optax. Write "
            f"{name}(optax.adamw(1e-3))."
        )


def is_compressed(x: Any) -> bool:
    return isinstance(x, Compressed)


class MasterState(NamedTuple):
    """The state of an optimizer under `with_master_weights`: what parameters lack, and `inner`."""

    correction: Any
    inner: Any


def with_master_weights(
    tx: optax.GradientTransformation, *, master_weight_bits: int = 24
) -> optax.GradientTransformationExtraArgs:
    """An optimizer that sees bfloat16 and float16 parameters as float32 weights of 24 or 32 bits.

    The weight is the parameter and a correction of one byte or of two, in the state. Gradients, moments and updates are
    float32. The parameter is the weight rounded: after `optax.apply_updates`, and after `jaxamp.update_if_finite`.

    Args:
        tx: Any Optax optimizer.
        master_weight_bits: 24, or 32.

    >>> import jax, jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> tx, params = optim.with_master_weights(optax.sgd(1e-4)), jnp.ones(4, jnp.bfloat16)
    >>> state, update = tx.init(params), jax.jit(tx.update)
    >>> for _ in range(30):  # each too small for bfloat16
    ...     updates, state = update(jnp.ones(4), state, params)
    ...     params = optax.apply_updates(params, updates)
    >>> params
    Array([0.996094, 0.996094, 0.996094, 0.996094], dtype=bfloat16)

    **Sharp edges**

    - What changes updates after it in an `optax.chain` makes the parameter another one than the correction is for.
    - `optax.apply_if_finite` around it wants gradients in float32, for updates are:
      `jaxamp.cast_floating(grads, jnp.float32)`.
    """
    if isinstance(master_weight_bits, bool) or master_weight_bits not in (24, 32):
        raise ValueError(
            f"with_master_weights got master_weight_bits={master_weight_bits!r}; expected 24 or 32. Write "
            "with_master_weights(tx, master_weight_bits=24)."
        )
    _check_plain("with_master_weights", tx)
    tx, kind = optax.with_extra_args_support(tx), correction_dtype(master_weight_bits)

    def low(x: Any) -> bool:
        return is_inexact_array(x) and x.dtype in LOW

    def init(params: Any) -> MasterState:
        correction = jax.tree.map(lambda p: jnp.zeros_like(p, dtype=kind) if low(p) else None, params)
        return MasterState(correction, tx.init(jax.tree.map(lambda p: join(p, None) if low(p) else p, params)))

    def update(updates: Any, state: MasterState, params: Any = None, **extra_args: Any) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError(
                "with_master_weights got no parameters in update; expected them, for their correction is in the state. "
                "Write optimizer.update(grads, state, params)."
            )
        name = "with_master_weights"
        instead = "Write state = optimizer.init(params), and pass on what each update returns."
        if not isinstance(state, MasterState):
            raise TypeError(f"{name} got {type(state).__name__} as its state; expected a MasterState. {instead}")
        paths, leaves, structure = flatten(params)
        corrections = flatten_like(name, "a state", state.correction, params, structure, instead)
        given = flatten_like(name, "gradients", updates, params, structure, "Pass jax.grad's.")
        for path, p, c, g in zip(paths, leaves, corrections, given, strict=True):
            check_correction(name, name_of(path), p, c, instead)
            if low(p) and g is not None:
                check_gradient(name, path, p, g)
            if c is None and low(p):
                raise ValueError(
                    f"{name} got no correction for {name_of(path)!r}, which is in {p.dtype}; expected one. {instead}"
                )
        pairs = list(zip(leaves, corrections, strict=True))
        weights = structure.unflatten([join(p, c) if low(p) else p for p, c in pairs])
        grads = structure.unflatten(
            [g.astype(jnp.float32) if low(p) and g is not None else g for p, g in zip(leaves, given, strict=True)]
        )
        changes, inner = tx.update(grads, state.inner, weights, **extra_args)
        changes = structure.flatten_up_to(changes)
        written = [
            change_of(p, join(p, c) + u.astype(jnp.float32), kind) if low(p) and u is not None else (u, c)
            for (p, c), u in zip(pairs, changes, strict=True)
        ]
        out, corrections = ([pair[i] for pair in written] for i in (0, 1))
        return structure.unflatten(out), MasterState(structure.unflatten(corrections), inner)

    return optax.GradientTransformationExtraArgs(init, update)
