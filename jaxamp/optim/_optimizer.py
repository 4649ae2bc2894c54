"""`make_optimizer`: an update rule and a storage as an optimizer, in two forms.

- `step(params, state, grads)` writes the new parameters. If parameters and state are donated, it needs no other
  parameter-sized memory.
- `update(grads, state, params)` is Optax's form and composes with all of Optax.

The law: both take the same step, and if `ok` is False, every bit stays as it was.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from .._tree import is_inexact_array
from ._batches import Batch, Task, batch_tasks
from ._groups import choose_groups
from ._input_checks import check_gradient_scale, check_leaf, check_ok, check_params, check_shards
from ._leaf_step import Leaf, StepContext, group_tops, is_gradient_finite
from ._scale_formats import FORMATS
from ._settings import Settings, check_hyperparameter_scalar, settings_by_leaf
from ._sharding import mesh_sharding, scales_sharding, split_sharding
from ._state import FlashState, LeafState, leaves_of_state, state_from_leaves
from ._storage import Storage
from ._tree_paths import flatten, flatten_like, name_of
from ._update_rules import UpdateRule, step_scalars


class FlashOptimizer(optax.GradientTransformationExtraArgs):  # type: ignore[misc]
    """An `optax.GradientTransformation` that also has a `step`.

    Attributes:
        init: `init(params)` returns the state.
        update: `update(grads, state, params)` returns the change of the parameters in float32, and the state.
        step: `step(params, state, grads, *, scale=None, ok=None)` returns the parameters and the state.
        step_if_finite: `step_if_finite(params, state, grads, *, scale=None)` also returns whether the gradients were
            finite; if not, every bit stays as it was.
        storage: `storage(path, leaf)` returns how the state of a leaf is stored.
        name: The function that made it.

    >>> import jax.numpy as jnp
    >>> from jaxamp import optim
    >>> optimizer, params = optim.flash_adamw(1e-3), {"w": jnp.ones((2, 32), jnp.bfloat16)}
    >>> params, state, finite = optimizer.step_if_finite(params, optimizer.init(params), {"w": jnp.ones((2, 32))})
    >>> optimizer.name, bool(finite)
    ('flash_adamw', True)
    """

    # These are attributes of `update`, so that they survive when `jax.tree.map` takes the pair apart and rebuilds it.
    @property
    def step(self) -> Callable[..., tuple[Any, FlashState]]:
        """Write the parameters directly: `step(params, state, grads, *, scale=None, ok=None)`."""
        return self.update.step

    @property
    def step_if_finite(self) -> Callable[..., tuple[Any, FlashState, jax.Array]]:
        """Take a step if the gradients are finite: `step_if_finite(params, state, grads, *, scale=None)`."""
        return self.update.step_if_finite

    @property
    def storage(self) -> Callable[[Any, Any], Storage]:
        """How the state of a leaf is stored: `storage(path, leaf)`."""
        return self.update.storage

    @property
    def name(self) -> str:
        """The function that made it."""
        return self.update.name


def make_optimizer(
    rule: UpdateRule,
    hyper: Mapping[str, Any],
    storage: Storage,
    param_groups: Any = None,
    *,
    allow_unmatched: bool = False,
) -> FlashOptimizer:
    """Make the optimizer of an update rule.

    Args:
        rule: The update rule.
        hyper: Its hyperparameters by name.
        storage: How weights and moments are stored.
        param_groups: Other settings for some leaves, as `flash_adamw` documents them.
        allow_unmatched: Whether to accept names in them that no leaf has.
    """
    settings_of = settings_by_leaf(rule, hyper, storage, param_groups)

    def init(params: Any) -> FlashState:
        paths, leaves, structure = flatten(params)
        check_params(rule.name, paths, leaves, settings_of, allow_unmatched)
        states = [
            _init_leaf(rule, settings_of(path, leaf), path, leaf) if is_inexact_array(leaf) else LeafState()
            for path, leaf in zip(paths, leaves, strict=True)
        ]
        # On the devices of the parameters, so that the second step runs the program of the first.
        replicated = next((NamedSharding(s.mesh, PartitionSpec()) for s in map(mesh_sharding, leaves) if s), None)
        return state_from_leaves(jnp.zeros((), jnp.int32, device=replicated), states, structure)

    def step_leaves(
        params: Any,
        state: FlashState,
        grads: Any,
        scale: Any,
        ok: Any,
        *,
        return_change: bool = False,
        find_ok: bool = False,
    ) -> tuple[Any, FlashState, Any]:
        paths, leaves, structure = flatten(params)
        instead = f"Write state = optimizer.init(params) with {rule.name}, then pass the state that each step returns."
        states = leaves_of_state(rule.name, state, params, structure, instead)
        given = flatten_like(rule.name, "gradients", grads, params, structure, "Pass jax.grad(loss)(params, ...).")
        scale, ok = check_gradient_scale(rule.name, scale), check_ok(rule.name, ok)
        context_of = _step_contexts(rule, state.count, scale, return_change)
        tasks: list[Task] = []
        out: list[Any] = [_no_change(x) for x in leaves] if return_change else list(leaves)
        for i, (path, leaf, grad, old) in enumerate(zip(paths, leaves, given, states, strict=True)):
            if not is_inexact_array(leaf) or leaf.size == 0 or grad is None:
                continue
            settings = settings_of(path, leaf)
            groups = check_leaf(rule, settings, path, leaf, grad, old, instead)
            tasks.append(Task(i, settings, Leaf(jnp.asarray(leaf), jnp.asarray(grad), old, groups)))
        batches = [Batch(context_of(alike[0].settings), alike) for alike in batch_tasks(tasks)]
        tops: list[Any] = [None] * len(batches)
        if find_ok:  # pass 1 of all leaves before any is written
            tops = [group_tops(batch.context, batch.leaf) for batch in batches]
            ok = jnp.array(
                [
                    is_gradient_finite(batch.context, batch.leaf.grad, top)
                    for batch, top in zip(batches, tops, strict=True)
                ]
            ).all()
        for batch, top in zip(batches, tops, strict=True):
            for i, result, new in batch.step(ok, top):
                out[i], states[i] = result, new
        count = state.count + 1
        count = count if ok is None else jnp.where(ok, count, state.count)
        return structure.unflatten(out), state_from_leaves(count, states, structure), ok

    def update(
        grads: Any, state: FlashState, params: Any = None, *, scale: Any = None, ok: Any = None, **extra_args: Any
    ) -> tuple[Any, FlashState]:
        if params is None:
            raise ValueError(
                f"{rule.name} got no parameters in update; expected them, because the state holds only their "
                "corrections. Write optimizer.update(grads, state, params)."
            )
        return step_leaves(params, state, grads, scale, ok, return_change=True)[:2]

    def step(
        params: Any, state: FlashState, grads: Any, *, scale: Any = None, ok: Any = None
    ) -> tuple[Any, FlashState]:
        return step_leaves(params, state, grads, scale, ok)[:2]

    def step_if_finite(
        params: Any, state: FlashState, grads: Any, *, scale: Any = None
    ) -> tuple[Any, FlashState, jax.Array]:
        return step_leaves(params, state, grads, scale, None, find_ok=True)

    vars(update).update(step=step, step_if_finite=step_if_finite)
    vars(update).update(storage=lambda path, leaf: settings_of(path, leaf).storage, name=rule.name)
    return FlashOptimizer(init, update)


def _init_leaf(rule: UpdateRule, settings: Settings, path: Any, param: Any) -> LeafState:
    """The state of one array before the first step: zeros, sharded like the array."""
    storage, param = settings.storage, jnp.asarray(param)
    if param.size == 0:
        return LeafState()
    moments = rule.moments(settings.hyper)
    dtype = storage.correction_dtype(param.dtype)
    correction = None if dtype is None else jnp.zeros_like(param, dtype=dtype)
    if not storage.quantize or not moments:
        return LeafState(correction=correction, **{name: jnp.zeros_like(param, dtype=jnp.float32) for name in moments})
    groups = choose_groups(param.shape, storage.group_size, storage.layout)
    check_shards(rule.name, name_of(path), param, groups)
    codes = {name: jnp.zeros_like(param, dtype=codec.dtype) for name, codec in zip(moments, storage.codecs)}
    scales = jnp.zeros(
        (len(moments), *groups.scales_shape),
        FORMATS[storage.scales].dtype,
        device=scales_sharding(mesh_sharding(param) or split_sharding(param), groups),
    )
    return LeafState(scales=scales, correction=correction, **codes)


def _step_contexts(
    rule: UpdateRule, count: jax.Array, scale: Any, return_change: bool
) -> Callable[[Settings], StepContext]:
    """The context of a step for given settings, computed once for each group of parameters."""
    contexts: dict[int | None, StepContext] = {}

    def context_of(settings: Settings) -> StepContext:
        if settings.group not in contexts:
            hyper = dict(settings.hyper)
            if callable(hyper["learning_rate"]):
                hyper["learning_rate"] = hyper["learning_rate"](count)
                instead = "Return a scalar, as optax.cosine_decay_schedule(1e-3, 1000) does"
                check_hyperparameter_scalar(
                    rule.name, "learning_rate", hyper["learning_rate"], "from its schedule", instead
                )
            scalars, decay = step_scalars(rule, hyper, count + 1)
            contexts[settings.group] = StepContext(
                rule, scalars, decay, count + 1, settings.storage, scale, return_change=return_change
            )
        return contexts[settings.group]

    return context_of


def _no_change(x: Any) -> Any:
    """The change of a leaf that is not stepped; None, as in Equinox, if nothing can be added to it."""
    is_numeric = hasattr(x, "dtype") and not jnp.issubdtype(x.dtype, jax.dtypes.extended)
    return jnp.zeros_like(x) if is_numeric else None


def check_is_uncompressed(name: str, tx: Any) -> None:
    """Check that `tx` is an Optax optimizer, and not one of this package, which is already compressed."""
    if isinstance(tx, FlashOptimizer):
        raise TypeError(
            f"{name} got {tx.name}, which is already compressed; expected an Optax optimizer. Write {tx.name}(1e-3) "
            f"alone, or {name}(optax.adamw(1e-3))."
        )
    if not isinstance(tx, optax.GradientTransformation):
        raise TypeError(
            f"{name} got {tx!r}, of type {type(tx).__name__}; expected an Optax optimizer. Write "
            f"{name}(optax.adamw(1e-3))."
        )
