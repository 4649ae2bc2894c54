"""`with_master_weights`: any Optax optimizer on weights with more bits than the parameters."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from .._tree import is_inexact_array
from ._input_checks import check_gradient
from ._optimizer import check_is_uncompressed
from ._tree_paths import flatten, flatten_like, name_of
from ._weight_codec import LOW_DTYPES, change_and_correction, check_correction, correction_dtype, join


class MasterState(NamedTuple):
    """The state of an optimizer under `with_master_weights`: the corrections, and its own state `inner`.

    Attributes:
        correction: The part of each weight that its parameter can't hold; None for float32 parameters.
        inner: The state of the optimizer.

    >>> import jax.numpy as jnp, optax
    >>> from jaxamp import optim
    >>> state = optim.with_master_weights(optax.sgd(1e-3)).init({"w": jnp.ones(4, jnp.bfloat16)})
    >>> state.correction["w"].dtype.name
    'int8'
    """

    correction: Any
    inner: Any


def with_master_weights(
    tx: optax.GradientTransformation, *, master_weight_bits: int = 24
) -> optax.GradientTransformationExtraArgs:
    """Let an optimizer see bfloat16 and float16 parameters as float32 weights with 24 or 32 bits.

    A weight is the parameter plus a correction of one or two bytes, which is in the state. Gradients, moments and
    updates are float32. After `optax.apply_updates` or `jaxamp.update_if_finite`, the parameter is the weight rounded.

    Args:
        tx: Any Optax optimizer.
        master_weight_bits: 24 or 32.

    Returns:
        An Optax optimizer with a `MasterState`.

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

    - Put it last in an `optax.chain`. If a later transformation changes the updates, the corrections no longer fit the
      parameters.
    - `optax.apply_if_finite` around it needs gradients in float32, like the updates:
      `jaxamp.cast_floating(grads, jnp.float32)`.
    """
    if isinstance(master_weight_bits, bool) or master_weight_bits not in (24, 32):
        raise ValueError(
            f"with_master_weights got master_weight_bits={master_weight_bits!r}; expected 24 or 32. Write "
            "with_master_weights(tx, master_weight_bits=24)."
        )
    check_is_uncompressed("with_master_weights", tx)
    tx, bits = optax.with_extra_args_support(tx), master_weight_bits

    def is_low(x: Any) -> bool:
        return is_inexact_array(x) and x.dtype in LOW_DTYPES

    def init(params: Any) -> MasterState:
        correction = jax.tree.map(
            lambda p: jnp.zeros_like(p, dtype=correction_dtype(bits, p.dtype)) if is_low(p) else None, params
        )
        return MasterState(correction, tx.init(jax.tree.map(lambda p: join(p, None) if is_low(p) else p, params)))

    def update(updates: Any, state: MasterState, params: Any = None, **extra_args: Any) -> tuple[Any, MasterState]:
        if params is None:
            raise ValueError(
                "with_master_weights got no parameters in update; expected them, because the state holds only their "
                "corrections. Write optimizer.update(grads, state, params)."
            )
        name = "with_master_weights"
        instead = "Write state = optimizer.init(params), then pass the state that each update returns."
        if not isinstance(state, MasterState):
            raise TypeError(f"{name} got {type(state).__name__} as its state; expected a MasterState. {instead}")
        paths, leaves, structure = flatten(params)
        corrections = flatten_like(name, "a state", state.correction, params, structure, instead)
        given = flatten_like(name, "gradients", updates, params, structure, "Pass jax.grad(loss)(params, ...).")
        for path, p, c, g in zip(paths, leaves, corrections, given, strict=True):
            check_correction(name, name_of(path), p, c, instead, is_published=False)
            if is_low(p) and g is not None:
                check_gradient(name, path, p, g)
            if c is None and is_low(p):
                raise ValueError(
                    f"{name} got no correction for {name_of(path)!r}, which is in {p.dtype}; expected one. {instead}"
                )
        pairs = list(zip(leaves, corrections, strict=True))
        weights = structure.unflatten([join(p, c) if is_low(p) else p for p, c in pairs])
        grads = structure.unflatten(
            [g.astype(jnp.float32) if is_low(p) and g is not None else g for p, g in zip(leaves, given, strict=True)]
        )
        changes, inner = tx.update(grads, state.inner, weights, **extra_args)
        changes = structure.flatten_up_to(changes)
        changes_and_corrections = [
            change_and_correction(p, join(p, c) + u.astype(jnp.float32), correction_dtype(bits, p.dtype))
            if is_low(p) and u is not None
            else (u, c)
            for (p, c), u in zip(pairs, changes, strict=True)
        ]
        out, corrections = ([pair[i] for pair in changes_and_corrections] for i in (0, 1))
        return structure.unflatten(out), MasterState(structure.unflatten(corrections), inner)

    return optax.GradientTransformationExtraArgs(init, update)
