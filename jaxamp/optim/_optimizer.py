"""A rule and a storage made into an optimizer, in two forms.

- `step(params, state, grads)` writes the new parameters. Donate parameters and state, and nothing else is held.
- `update(grads, state, params)` is Optax's form and composes with all of Optax.

The law: both take the same step, and a step that is not to be taken (`ok` is False) leaves every bit as it was.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._compat import varying_axes
from .._tree import check_bool, is_inexact_array
from ._arena import Leaf, pack, unpack
from ._codecs import MOMENTUM, VARIANCE, Codec
from ._layout import Groups, groups, groups_of, whole
from ._leaf import How, LeafState, is_finite, largest, step_leaf
from ._paths import check_groups, flatten, flatten_like, group_of, name_of, segments
from ._rules import Rule, is_zero, scalars_of
from ._scales import FORMATS
from ._storage import FIELDS, SERVED, Storage
from ._weights import check_low, correction_dtype


class FlashState(NamedTuple):
    """The state of a compressed optimizer: arrays in trees like that of the parameters.

    Attributes:
        count: The steps taken.
        mu: First moments, of the parameters' shapes: int8, or float32 if they are not compressed.
        nu: Second moments: uint8, or float32.
        scales: The scales of both, `(moments, *groups)`.
        correction: What parameters in bfloat16 or float16 lack: int8 or int16.

    Where there is nothing, there is None: a second moment of Lion, a correction of a float32 parameter, anything of a
    leaf that is no array of floats.
    """

    count: Any
    mu: Any
    nu: Any
    scales: Any
    correction: Any


class FlashOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An `optax.GradientTransformation` with a `step` besides.

    Attributes:
        init: `init(params)`, the state.
        update: `update(grads, state, params)`, the change of the parameters in float32, and the state.
        step: `step(params, state, grads, *, scale=None, ok=None)`, the parameters and the state.
        step_if_finite: `step_if_finite(params, state, grads, *, scale=None)`, the same and whether the gradients were
            finite; if not, every bit is as it was.
        storage: `storage(path, leaf)`, how the state of a leaf is stored.
        name: The function that made it.
    """

    # Attributes of `update`, so that they are still there when `jax.tree.map` has taken the pair apart and made it
    # anew.
    @property
    def step(self) -> Callable[..., tuple[Any, FlashState]]:
        return self.update.step

    @property
    def step_if_finite(self) -> Callable[..., tuple[Any, FlashState, jax.Array]]:
        return self.update.step_if_finite

    @property
    def storage(self) -> Callable[[Any, Any], Storage]:
        return self.update.storage

    @property
    def name(self) -> str:
        return self.update.name


class Settings(NamedTuple):
    """What holds for one leaf."""

    group: int | None
    hyper: Mapping[str, Any]
    storage: Storage


def make(rule: Rule, hyper: Mapping[str, Any], storage: Storage, param_groups: Any = None) -> FlashOptimizer:
    """The optimizer of a rule."""
    if not isinstance(storage, Storage):
        raise TypeError(
            f"{rule.name} got storage={storage!r}, of type {type(storage).__name__}; expected a Storage. Write "
            f"{rule.name}(1e-3, storage=jaxamp.optim.Storage(master_weight_bits=32))."
        )
    listed = check_groups(rule.name, param_groups, lambda key: key in hyper or key in FIELDS)
    for given in (hyper, *listed):
        for key, value in given.items():
            if key in hyper:
                _check_hyper(rule.name, key, value)
    everywhere = Settings(None, hyper, storage)
    of_group = [
        Settings(
            i,
            {**hyper, **{k: v for k, v in group.items() if k in hyper}},
            storage.replace(**{k: v for k, v in group.items() if k in FIELDS}),
        )
        for i, group in enumerate(listed)
    ]
    for settings in (everywhere, *of_group):
        _check_nesterov(rule.name, **settings.hyper)

    def settings_of(path: Any, leaf: Any) -> Settings:
        i = group_of(listed, segments(path), leaf)
        return everywhere if i is None else of_group[i]

    def init(params: Any) -> FlashState:
        paths, leaves, structure = flatten(params)
        _check_bits(rule.name, paths, leaves, settings_of)
        states = [
            _init_leaf(rule, settings_of(path, leaf), path, leaf) if is_inexact_array(leaf) else LeafState()
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        # On the devices of the parameters, so that the second step is the program of the first.
        replicated = next((NamedSharding(s.mesh, PartitionSpec()) for s in map(_placed, leaves) if s), None)
        return as_trees(jnp.zeros((), jnp.int32, device=replicated), states, structure)

    def walk(
        params: Any, state: FlashState, grads: Any, scale: Any, ok: Any, *, delta: bool = False, check: bool = False
    ) -> tuple[Any, FlashState, Any]:
        paths, leaves, structure = flatten(params)
        instead = f"Write state = optimizer.init(params) with {rule.name}, and pass on what each step returns."
        states = leaf_states(rule.name, state, params, structure, instead)
        given = flatten_like(rule.name, "gradients", grads, params, structure, "Pass jax.grad(loss)(params, ...).")
        scale, ok = _check_factor(rule.name, scale), _check_ok(rule.name, ok)
        how = _hows(rule, state.count, scale, delta)
        tasks: list[tuple[int, Settings, Leaf]] = []
        out: list[Any] = [_no_change(x) for x in leaves] if delta else list(leaves)
        for i, (path, leaf, grad, old) in enumerate(zip(paths, leaves, given, states, strict=True)):
            if not is_inexact_array(leaf) or leaf.size == 0 or grad is None:
                continue
            settings = settings_of(path, leaf)
            found = _check_leaf(rule, settings, path, leaf, grad, old, instead)
            tasks.append((i, settings, (jnp.asarray(leaf), jnp.asarray(grad), old, found)))
        parts = [Part(how(part[0][1]), part) for part in _together(tasks)]
        if check:  # a pass over all leaves before any is written
            tops = [largest(part.how, *part.leaf) for part in parts]
            ok = jnp.array([is_finite(part.leaf[1], top) for part, top in zip(parts, tops, strict=True)]).all()
        for i, part in enumerate(parts):
            for at, result, new in part.step(ok, tops[i] if check else None):
                out[at], states[at] = result, new
        count = state.count + 1
        count = count if ok is None else jnp.where(ok, count, state.count)
        return structure.unflatten(out), as_trees(count, states, structure), ok

    def update(
        grads: Any, state: FlashState, params: Any = None, *, scale: Any = None, ok: Any = None, **extra_args: Any
    ) -> tuple[Any, FlashState]:
        if params is None:
            raise ValueError(
                f"{rule.name} got no parameters in update; expected them, for their correction is in the state. Write "
                "optimizer.update(grads, state, params)."
            )
        return walk(params, state, grads, scale, ok, delta=True)[:2]

    def step(
        params: Any, state: FlashState, grads: Any, *, scale: Any = None, ok: Any = None
    ) -> tuple[Any, FlashState]:
        return walk(params, state, grads, scale, ok)[:2]

    def step_if_finite(
        params: Any, state: FlashState, grads: Any, *, scale: Any = None
    ) -> tuple[Any, FlashState, jax.Array]:
        return walk(params, state, grads, scale, None, check=True)

    vars(update).update(step=step, step_if_finite=step_if_finite)
    vars(update).update(storage=lambda path, leaf: settings_of(path, leaf).storage, name=rule.name)
    return FlashOptimizer(init, update)


# -- the state


def _init_leaf(rule: Rule, settings: Settings, path: Any, param: Any) -> LeafState:
    storage, param = settings.storage, jnp.asarray(param)
    if param.size == 0:
        return LeafState()
    moments = rule.moments(settings.hyper)
    bits = storage.bits_for(param.dtype)
    correction = None if bits is None else jnp.zeros_like(param, dtype=correction_dtype(bits))
    if not storage.quantize or not moments:
        return LeafState(correction=correction, **{name: jnp.zeros_like(param, dtype=jnp.float32) for name in moments})
    found = groups(param.shape, storage.group_size, storage.layout)
    _check_shards(rule.name, name_of(path), param, found)
    codecs: dict[str, Codec] = {"mu": MOMENTUM, "nu": VARIANCE}
    codes = {name: jnp.zeros_like(param, dtype=codecs[name].dtype) for name in moments}
    scales = jnp.zeros(
        (len(moments), *found.scales_shape),
        FORMATS[storage.scales].dtype,
        device=scales_sharding(_placed(param) or _sharding(param), found),
    )
    return LeafState(scales=scales, correction=correction, **codes)


def scales_sharding(sharding: Any, found: Groups) -> NamedSharding | None:
    """How scales are sharded, given how their array is."""
    if not isinstance(sharding, NamedSharding):
        return None
    axes = [] if found.axis is None else [None, *sharding.spec]
    while axes and axes[-1] is None:  # as XLA has them
        axes.pop()
    return NamedSharding(sharding.mesh, PartitionSpec(*axes), memory_kind=sharding.memory_kind)


def as_trees(count: jax.Array, states: list[LeafState], structure: Any) -> FlashState:
    columns = ([getattr(state, field) for state in states] for field in LeafState._fields)
    return FlashState(count, *map(structure.unflatten, columns))


def leaf_states(name: str, state: Any, params: Any, structure: Any, instead: str) -> list[LeafState]:
    if not isinstance(state, FlashState):
        raise TypeError(f"{name} got {type(state).__name__} as its state; expected a FlashState. {instead}")
    columns = [
        flatten_like(name, f"a state whose {field} is", getattr(state, field), params, structure, instead)
        for field in LeafState._fields
    ]
    return [LeafState(*row) for row in zip(*columns, strict=True)]


# -- one step


def _hows(rule: Rule, count: jax.Array, scale: Any, delta: bool) -> Callable[[Settings], How]:
    """What the leaves of one group of parameters have in common, computed once."""
    made: dict[int | None, How] = {}

    def how(settings: Settings) -> How:
        if settings.group not in made:
            hyper = dict(settings.hyper)
            if callable(hyper["learning_rate"]):
                hyper["learning_rate"] = hyper["learning_rate"](count)
                instead = "Return a scalar, as optax.cosine_decay_schedule(1e-3, 1000) does"
                _check_scalar(rule.name, "learning_rate", hyper["learning_rate"], "from its schedule", instead)
            scalars, decay = scalars_of(rule, hyper, count + 1)
            floor = settings.storage.variance_floor
            made[settings.group] = How(rule, scalars, decay, count + 1, floor, scale, delta=delta)
        return made[settings.group]

    return how


def _together(tasks: list[tuple[int, Settings, Leaf]]) -> list[list[tuple[int, Settings, Leaf]]]:
    """Small leaves that are alike in lists of several, the others each in its own."""
    lists: dict[Any, list[tuple[int, Settings, Leaf]]] = {}
    for task in tasks:
        i, settings, (param, grad, state, found) = task
        small = param.size < settings.storage.together and found.axis != -2 and _sharding(param) is None
        dtypes = tuple(None if x is None else x.dtype for x in (param, grad, *state))
        axes = frozenset().union(*(varying_axes(x) for x in (param, grad, *state) if x is not None))
        lists.setdefault((settings.group, dtypes, axes) if small else i, []).append(task)
    return list(lists.values())


class Part:
    """Leaves that are stepped as one array."""

    def __init__(self, how: How, tasks: list[tuple[int, Settings, Leaf]]):
        self.how, self.places, self.leaves = how, [i for i, _, _ in tasks], [leaf for _, _, leaf in tasks]
        self.leaf = self.leaves[0] if len(self.leaves) == 1 else pack(self.leaves)

    def step(self, ok: Any, tops: Any) -> list[tuple[int, jax.Array, LeafState]]:
        """Place, parameter or change, and state of each."""
        stepped = step_leaf(self.how._replace(ok=ok), *self.leaf, tops)
        each = [stepped] if len(self.leaves) == 1 else unpack(self.leaves, *stepped)
        return [(i, *one) for i, one in zip(self.places, each, strict=True)]


def _no_change(x: Any) -> Any:
    """The change of a leaf that no step is taken for; None, as Equinox has it, where nothing can be added."""
    is_number = hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jnp.zeros_like(x) if is_number else None


def _sharding(x: Any) -> NamedSharding | None:
    """How an array is cut into parts, where that is known: under `jit`, it is known of explicit axes alone."""
    sharding = jax.typeof(x).sharding if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    cut = isinstance(sharding, NamedSharding) and any(axis is not None for axis in sharding.spec)
    return sharding if cut else None


def _placed(x: Any) -> NamedSharding | None:
    """Where an array is, if it is on a mesh."""
    sharding = None if isinstance(x, jax.core.Tracer) else getattr(x, "sharding", None)
    return sharding if isinstance(sharding, NamedSharding) else None


# -- bad input


def _check_hyper(name: str, key: str, value: Any) -> None:
    if callable(value) and key == "learning_rate":
        return
    if (value is None and key in ("momentum", "weight_decay")) or key == "nesterov":
        return
    if not (isinstance(value, int | float) or hasattr(value, "dtype")):
        raise TypeError(
            f"{name} got {key}={value!r}, of type {type(value).__name__}; expected a number. Write {name}(1e-3), or a "
            "schedule for the learning rate, as in optax.cosine_decay_schedule(1e-3, 1000)."
        )
    _check_scalar(name, key, value, "as it was given", f"Write {name}(1e-3)")


def _check_nesterov(
    name: str, *, nesterov: bool = False, momentum: Any = None, dampening: Any = 0.0, **other: Any
) -> None:
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError(
            f"{name} got nesterov=True with momentum={momentum!r} and dampening={dampening!r}; expected a momentum, "
            f"and no dampening. Write {name}(0.1, momentum=0.9, nesterov=True)."
        )


def _check_scalar(name: str, key: str, value: Any, where: str, instead: str) -> None:
    if value is None or np.shape(value) != ():
        given = f"{key}=None" if value is None else f"{key} of shape {np.shape(value)}"
        raise ValueError(f"{name} got {given} {where}; expected one number. {instead}.")
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} got {key} in {dtype}; expected float32, for b2=0.999 is 1 in bfloat16. Write "
            f"optax.inject_hyperparams({name}, hyperparam_dtype=jnp.float32)."
        )


def _check_bits(name: str, paths: list[Any], leaves: list[Any], settings_of: Any) -> None:
    """A parameter that no storage serves, and a correction that no parameter can have."""
    asked: dict[Any, tuple[bool, str]] = {}
    for path, leaf in zip(paths, leaves, strict=True):
        if not is_inexact_array(leaf):
            continue
        if leaf.dtype not in SERVED:
            raise TypeError(
                f"{name} got the parameter {name_of(path)!r} in {leaf.dtype}; expected bfloat16, float16 or float32. "
                "Cast it with jaxamp.cast_floating(params, jnp.bfloat16), or keep it apart with optax.masked."
            )
        storage = settings_of(path, leaf).storage
        before, _ = asked.get(storage.master_weight_bits, (False, ""))
        served = before or storage.bits_for(leaf.dtype) is not None
        asked[storage.master_weight_bits] = served, f"{name_of(path)!r} in {leaf.dtype}"
    for bits, (served, leaf_name) in asked.items():
        if bits in (24, 32) and not served:
            raise ValueError(
                f"{name} got master_weight_bits={bits} for float32 parameters alone, such as {leaf_name}; expected "
                "parameters in bfloat16 or float16, which a correction can serve. Write master_weight_bits=None, or "
                "cast them with jaxamp.cast_floating(params, jnp.bfloat16)."
            )


def _check_shards(name: str, leaf_name: str, param: Any, found: Groups) -> None:
    """Refuse groups that lie on two devices: where the sharding is known."""
    sharding = _sharding(param)
    if sharding is not None:
        check_whole(name, leaf_name, found, sharding)


def check_whole(name: str, leaf_name: str, found: Groups, sharding: Any) -> None:
    """Refuse a sharding whose parts don't hold whole groups."""
    shard = sharding.shard_shape(found.shape)
    if not whole(found, shard):
        raise ValueError(
            f"{name} got the parameter {leaf_name!r} of shape {found.shape} in parts of {shard}; expected parts with "
            f"whole groups of {found.size}. Shard another axis, write Storage(layout='rows') for groups along the "
            f"axis before the last, or param_groups=[{{'params': {leaf_name!r}, 'quantize': False}}] for float32 "
            "moments."
        )


def _check_leaf(
    rule: Rule, settings: Settings, path: Any, param: Any, grad: Any, state: LeafState, instead: str
) -> Groups:
    """The groups of a leaf, as its state has them; an error that names it if the state is another's."""
    check_gradient(rule.name, path, param, grad)
    check_low(rule.name, name_of(path), param, state.correction)
    size, layout = settings.storage.group_size, settings.storage.layout
    expected = set(rule.moments(settings.hyper))
    arrays = {field: x for field, x in state._asdict().items() if x is not None}
    found: Groups | None = groups(param.shape, size, layout)
    dtypes = dict.fromkeys(("mu", "nu"), jnp.dtype(jnp.float32))
    if state.scales is not None:
        found = groups_of(param.shape, state.scales.shape[1:], size)
        dtypes = {"mu": MOMENTUM.dtype, "nu": VARIANCE.dtype}
    fits = all(x.shape == param.shape for field, x in arrays.items() if field != "scales")
    fits &= all(arrays[field].dtype == dtype for field, dtype in dtypes.items() if field in arrays)
    corrected = settings.storage.bits_for(param.dtype) is not None
    fits &= state.correction is not None or not corrected
    if found is None or not fits or expected != set(arrays) - {"scales", "correction"}:
        given = ", ".join(f"{field} {x.shape} in {x.dtype}" for field, x in arrays.items()) or "nothing"
        raise ValueError(
            f"{rule.name} got a state with {given} for {name_of(path)!r}, which is of shape {param.shape} and in "
            f"{param.dtype}; expected {' and '.join(sorted(expected)) or 'no moments'} of that shape in groups of "
            f"{size}, {'with a' if corrected else 'without a'} correction. {instead}"
        )
    return found


def check_gradient(name: str, path: Any, param: Any, grad: Any) -> None:
    dtype = getattr(grad, "dtype", None)
    if dtype is None or grad.shape != param.shape or not jnp.issubdtype(dtype, jnp.floating):
        raise ValueError(
            f"{name} got a gradient of shape {np.shape(grad)} and dtype {dtype} for {name_of(path)!r}; expected floats "
            f"of shape {param.shape}. Pass jax.grad(loss)(params, ...)."
        )


def _check_factor(name: str, scale: Any) -> Any:
    if scale is None:
        return None
    if np.shape(scale) != ():
        raise ValueError(
            f"{name} got scale of shape {np.shape(scale)}; expected one number, by which gradients are multiplied. "
            "Write step(params, state, grads, scale=1 / loss_scale)."
        )
    return jnp.asarray(scale, jnp.float32)


def _check_ok(name: str, ok: Any) -> Any:
    if ok is None:
        return None
    check_bool(name, ok, "step(params, state, grads, ok=jaxamp.all_finite(grads))")
    return jnp.asarray(ok)
