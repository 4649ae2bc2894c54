"""The hyperparameters and the storage of each leaf."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from ._param_groups import check_param_groups, first_match, path_entries
from ._storage import STORAGE_FIELDS, Storage
from ._update_rules import UpdateRule, is_zero


class Settings(NamedTuple):
    """The settings of a leaf; `group` is the index of its parameter group, or None.

    `bits_argument` is where its `master_weight_bits` were given, as an error names it.
    """

    group: int | None
    hyper: Mapping[str, Any]
    storage: Storage
    bits_argument: str = "master_weight_bits"


class SettingsOf(NamedTuple):
    """A function from a leaf's path and the leaf to its settings."""

    default: Settings
    of_group: Sequence[Settings]
    param_groups: Sequence[Mapping[str, Any]]

    def __call__(self, path: Any, leaf: Any) -> Settings:
        i = first_match(self.param_groups, path_entries(path), leaf)
        return self.default if i is None else self.of_group[i]


def settings_by_leaf(rule: UpdateRule, hyper: Mapping[str, Any], storage: Storage, param_groups: Any) -> SettingsOf:
    """Check all settings, and return a function from a leaf's path and the leaf to its settings."""
    if not isinstance(storage, Storage):
        raise TypeError(
            f"{rule.name} got storage={storage!r}, of type {type(storage).__name__}; expected a Storage. Write "
            f"{rule.name}(1e-3, storage=jaxamp.optim.Storage(master_weight_bits=32))."
        )
    param_groups = check_param_groups(rule.name, param_groups, lambda key: key in hyper or key in STORAGE_FIELDS)
    for given in (hyper, *param_groups):
        for key, value in given.items():
            if key in hyper:
                _check_hyperparameter(rule.name, key, value)
    default = Settings(None, hyper, storage)
    of_group = [
        Settings(
            i,
            {**hyper, **{k: v for k, v in group.items() if k in hyper}},
            storage.replace(**{k: v for k, v in group.items() if k in STORAGE_FIELDS}),
            f"param_groups[{i}]['master_weight_bits']" if "master_weight_bits" in group else default.bits_argument,
        )
        for i, group in enumerate(param_groups)
    ]
    for settings in (default, *of_group):
        _check_nesterov(rule.name, **settings.hyper)

    return SettingsOf(default, of_group, param_groups)


def _check_hyperparameter(name: str, key: str, value: Any) -> None:
    if callable(value) and key == "learning_rate":
        return
    if (value is None and key in ("momentum", "weight_decay")) or key == "nesterov":
        return
    if not (isinstance(value, int | float) or hasattr(value, "dtype")):
        raise TypeError(
            f"{name} got {key}={value!r}, of type {type(value).__name__}; expected a number. Write {name}(1e-3), or "
            "pass a schedule as the learning rate, such as optax.cosine_decay_schedule(1e-3, 1000)."
        )
    check_hyperparameter_scalar(name, key, value, "as an argument", f"Write {name}(1e-3)")
    if isinstance(value, bool) or (isinstance(value, int | float) and not _is_sensible(key, float(value))):
        expected = "at least 0 and less than 1" if key in _DECAYS else "finite" if key in _ANY else "0 or more"
        raise ValueError(f"{name} got {key}={value!r}; expected a number that is {expected}. Write {name}(1e-3).")


_ANY = ("learning_rate", "dampening")
_DECAYS = ("b1", "b2", "momentum")


def _is_sensible(key: str, value: float) -> bool:
    """Whether a number can be this hyperparameter."""
    if key in _ANY:
        return math.isfinite(value)
    return 0 <= value < 1 if key in _DECAYS else 0 <= value < math.inf


def _check_nesterov(
    name: str, *, nesterov: bool = False, momentum: Any = None, dampening: Any = 0.0, **other: Any
) -> None:
    if nesterov and (is_zero(momentum) or not is_zero(dampening)):
        raise ValueError(
            f"{name} got nesterov=True with momentum={momentum!r} and dampening={dampening!r}; expected a momentum, "
            f"and no dampening. Write {name}(0.1, momentum=0.9, nesterov=True)."
        )


def check_hyperparameter_scalar(name: str, key: str, value: Any, where: str, instead: str) -> None:
    """Check that a hyperparameter is one number of at least 32 bits; `where` says where it came from."""
    if value is None or np.shape(value) != ():
        given = f"{key}=None" if value is None else f"{key} of shape {np.shape(value)}"
        raise ValueError(f"{name} got {given} {where}; expected one number. {instead}.")
    dtype = getattr(value, "dtype", None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32:
        raise TypeError(
            f"{name} got {key} in {dtype}; expected float32, because b2=0.999 is 1 in bfloat16. Write "
            f"optax.inject_hyperparams({name}, hyperparam_dtype=jnp.float32)."
        )
