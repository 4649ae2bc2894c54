"""`compress_state`: any Optax optimizer with compressed moments."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax
from jax import tree_util as jtu

from .._tree import is_inexact_array
from ._dither import dither
from ._groups import choose_groups, groups_from_scales
from ._moment_codecs import Codec
from ._optimizer import check_is_uncompressed
from ._scale_formats import FORMATS, HALF, format_of
from ._storage import Storage
from ._update_rules import LARGEST, bounded

# The names of moments in Optax's states: momentum has both signs, variance is never negative. Some states use a name
# for the other kind. `ScaleByRStdDev` takes the root of `nu - mu**2`, which rounding would sometimes make negative.
KINDS: Mapping[str, str | None] = {
    **dict.fromkeys(("mu", "trace", "ema", "m", "m1", "m2"), "momentum"),
    **dict.fromkeys(("nu", "nu_max", "sum_of_squares", "v", "e_g", "e_x"), "variance"),
    **dict.fromkeys(("ScaleBySM3State.nu", "ScaleByAdanState.v", "SophiaState.nu"), "momentum"),
    **dict.fromkeys(("ScaleBySM3State.mu", "ScaleByAdanState.n", "ScaleBySimplifiedAdEMAMixState.n"), "variance"),
    **{f"ScaleByRStdDev{kind}.{field}": None for kind in ("State", "WithCountState") for field in ("mu", "nu")},
}
_STORAGE = Storage()


class Compressed(NamedTuple):
    """A moment in bytes, in place of an array.

    Attributes:
        values: Bytes, of the shape of the moment.
        scales: A scale for each group of them.

    >>> import jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> state = optim.compress_state(optax.lamb(1e-3)).init({"w": jnp.ones((64, 64))})
    >>> state.inner[0].mu["w"].values.dtype.name
    'uint8'
    """

    values: jax.Array
    scales: jax.Array


class CompressedState(NamedTuple):
    """The state of an optimizer under `compress_state`: `inner` has `Compressed` in place of its moments.

    Attributes:
        count: The number of steps taken.
        inner: The state of the optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> state = optim.compress_state(optax.lamb(1e-3)).init({"w": jnp.ones((64, 64))})
    >>> type(state).__name__, type(state.inner[0].mu["w"]).__name__
    ('CompressedState', 'Compressed')
    """

    count: Any
    inner: Any


def compress_state(
    tx: optax.GradientTransformation, *, storage: Storage = _STORAGE, kinds: Mapping[str, str | None] = KINDS
) -> optax.GradientTransformationExtraArgs:
    """Store the moments of an optimizer in bytes. The rest of its state is unchanged.

    Moments are found by the names of the fields that hold them, in states that are NamedTuples, and by their shapes,
    which are those of parameters. Each step decodes them to float32 and encodes them again. XLA may hold all of them in
    float32 for a moment, unlike with this package's own optimizers.

    Args:
        tx: Any Optax optimizer.
        storage: How moments are stored. Its settings for corrections and small arrays have no effect here.
        kinds: `"momentum"` for a field whose numbers have both signs, `"variance"` for one that is never negative. A
            key is the name of a field, or `"State.field"` for the field of one class. Fields that are not listed, or
            listed as None, are left alone.

    Returns:
        An Optax optimizer with a `CompressedState`.

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
    check_is_uncompressed("compress_state", tx)
    codecs: dict[str, Codec] = dict(zip(("momentum", "variance"), storage.codecs, strict=True))
    codec_of_dtype = {codec.dtype: codec for codec in codecs.values()}
    fields = {key.rpartition(".")[2] for key, kind in kinds.items() if kind is not None}
    for field, kind in kinds.items():
        if kind is not None and kind not in codecs:
            raise ValueError(
                f"compress_state got {kind!r} for {field!r}; expected 'momentum' or 'variance'. Write "
                f"kinds={{{field!r}: 'momentum'}}, and leave out fields that aren't moments."
            )
    tx = optax.with_extra_args_support(tx)

    def encode(codec: Codec, x: Any, count: Any) -> Compressed:
        groups = choose_groups(x.shape, storage.group_size, storage.layout)
        view = groups.view(x.astype(jnp.float32))
        top = codec.top(view, groups.view_axis)
        up = dither(count, groups) if storage.dither and count is not None else None
        top, up = lax.optimization_barrier((top, up))  # a dither of its own: see `_leaf_step.py`
        values = groups.unview(codec.encode(view, groups.spread(top), up))
        return Compressed(values, FORMATS[storage.scales].encode(codec.scale(top), count))

    def decode(x: Any) -> Any:
        if not is_compressed(x):
            return x
        groups = groups_from_scales(x.values.shape, x.scales.shape, storage.group_size)
        if groups is None:
            raise ValueError(
                f"compress_state got scales of shape {x.scales.shape} for moments of shape {x.values.shape}; expected "
                f"groups of {storage.group_size}. Pass the storage that the state was made with."
            )
        scale = groups.spread(format_of(x.scales).decode(x.scales))
        return groups.unview(codec_of_dtype[x.values.dtype].decode(groups.view(x.values), scale))

    def init(params: Any) -> CompressedState:
        shapes = {x.shape for x in jax.tree.leaves(params) if is_inexact_array(x) and x.size}
        params_structure: Any = jax.tree.structure(params)
        may_be_moment = lambda x: is_inexact_array(x) and not jnp.iscomplexobj(x) and x.shape in shapes

        def compress(node: Any, kind: str | None = None) -> Any:
            if kind is not None:
                return jax.tree.map(lambda x: encode(codecs[kind], x, None) if may_be_moment(x) else x, node)
            structure: Any = jax.tree.structure(node, is_leaf=lambda x: x is not node)
            if params_structure == jax.tree.structure(node) or jtu.treedef_is_leaf(structure):
                return node  # a tree like the parameters: its keys are names of parameters, not fields of a state
            parts = structure.flatten_up_to(node)
            name, fields = type(node).__name__, getattr(node, "_fields", [""] * len(parts))
            kinds_of_parts = [kinds.get(f"{name}.{field}", kinds.get(field)) for field in fields]
            return structure.unflatten(map(compress, parts, kinds_of_parts))

        plain = tx.init(params)
        inner = compress(plain)
        compressed_any = any(map(is_compressed, jax.tree.leaves(inner, is_leaf=is_compressed)))
        if kinds is not KINDS and not compressed_any and any(map(may_be_moment, jax.tree.leaves(plain))):
            raise ValueError(
                f"compress_state got kinds for {', '.join(kinds) or 'no fields'}, and this optimizer's state has no "
                "such field with moments; expected names of its fields, such as 'mu' for Optax's Adam. Write "
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
        if FORMATS[storage.scales] is HALF:
            bound = lambda g: bounded(g, HALF.largest, unless=g) if is_inexact_array(g) else g
            updates = jax.tree.map(bound, updates)
        updates, inner = tx.update(updates, inner, params, **extra_args)
        with_paths, structure = jtu.tree_flatten_with_path(state.inner, is_leaf=is_compressed)  # type: Any, Any
        paths, stored = zip(*with_paths, strict=True) if with_paths else ((), ())
        is_variance = [is_compressed(old) and old.values.dtype == codecs["variance"].dtype for old in stored]
        new = _without_overflow(structure.flatten_up_to(inner), is_variance, [_sibling(path, fields) for path in paths])
        encoded = [
            encode(codec_of_dtype[old.values.dtype], x, count) if is_compressed(old) else x
            for old, x in zip(stored, new, strict=True)
        ]
        return updates, CompressedState(count, structure.unflatten(encoded))

    return optax.GradientTransformationExtraArgs(init, update)


def _sibling(path: Any, fields: set[str]) -> Any:
    """The path of a moment without the name of its field: the same for all moments of a parameter in one state."""
    at = next((i for i, entry in enumerate(path) if getattr(entry, "name", None) in fields), None)
    return None if at is None else (path[:at], path[at + 1 :])


def _without_overflow(moments: list[Any], is_variance: list[bool], siblings: list[Any]) -> list[Any]:
    """Moments without infinite variances, which have no code.

    An infinite variance stops a weight in Optax. So that the largest finite one stops it too, all moments beside it
    become zero.
    """
    overflows = {
        sibling: x > LARGEST for x, is_one, sibling in zip(moments, is_variance, siblings, strict=True) if is_one
    }

    def bound(x: Any, is_one: bool, sibling: Any) -> Any:
        if is_one:
            return jnp.minimum(x, LARGEST)
        over = overflows.get(sibling)
        return x if over is None or jnp.shape(x) != over.shape else jnp.where(over, 0.0, x)

    return [bound(*row) for row in zip(moments, is_variance, siblings, strict=True)]


def is_compressed(x: Any) -> bool:
    return isinstance(x, Compressed)
