"""The policy that `amp_policy=` stands for.

A policy is a mapping. A key is a primitive, the name of a `jax.named_scope` (or a glob over the scope path), or a pair
`(scope, primitive)`; a value is a rule. `lookup.py` says which key wins.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from .._compat import Primitive
from .._errors import nearest
from .communication import COMMUNICATION, Communication
from .lookup import Policy
from .toml import load_preset, load_table, presets


def load_policy(policy: Policy | str | os.PathLike[str]) -> Policy:
    """The mapping that `amp_policy=` stands for: a mapping itself, a preset's name, or the path of a TOML table.

    >>> from jax import lax
    >>> load_policy("default")[lax.exp_p].__name__
    'use_original_precision'
    """
    if isinstance(policy, Mapping):
        _check_mapping(policy)
        return policy
    if isinstance(policy, str) and policy in presets():
        return load_preset(policy)
    if not isinstance(policy, str | os.PathLike):
        raise TypeError(
            f"amp_policy is {policy!r}, of type {type(policy).__name__}; expected a mapping, a preset's name or a "
            "path. Write for example amp_policy='default'."
        )
    if Path(policy).suffix == ".toml":
        return load_table(Path(policy))
    raise ValueError(
        f"amp_policy is {str(policy)!r}; expected a preset or the path of a .toml file. "
        f"The presets are {', '.join(presets())}.{nearest(str(policy), presets())}"
    )


def _check_mapping(policy: Policy) -> None:
    for key, rule in policy.items():
        pair = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], Primitive)
        if not (isinstance(key, str | Primitive) or pair):
            raise TypeError(
                f"amp_policy has the key {key!r}, of type {type(key).__name__}; expected a primitive, a scope's name "
                "or a pair of both. Write for example jax.lax.add_p, 'attention' or ('attention', jax.lax.add_p)."
            )
        if (key[1] if pair else key) is COMMUNICATION:
            if not isinstance(rule, Communication):
                raise TypeError(
                    f"amp_policy[{key!r}] is {rule!r}; expected a Communication. Write for example "
                    "jaxamp.Communication(reduce='compute')."
                )
        elif not callable(rule):
            raise TypeError(
                f"amp_policy[{key!r}] is {rule!r}; expected a rule, a function of (compute_dtype, original_dtypes, "
                "*invars, **bind_params). Write for example jaxamp.use_original_precision."
            )
