"""The policy that `amp_policy=` stands for.

A policy is a mapping. A key is a primitive, the name of a `jax.named_scope` (or a glob over the scope path), or a pair
`(scope, primitive)`; a value is a rule, or its name as in a table. `lookup.py` says which key wins.
"""

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, overload

import jax.numpy as jnp

from .._compat import Primitive, primitives
from .._errors import nearest
from .communication import COMMUNICATION, Communication
from .lookup import Policy
from .mapping import EditablePolicy, FrozenPolicy
from .quantization import Quantization, use_formats
from .rules import WORDS, use_precision
from .toml import load_preset, load_table, presets


@overload
def load_policy(policy: str | os.PathLike[str]) -> FrozenPolicy: ...
@overload
def load_policy(policy: Mapping[Any, Any]) -> Policy: ...
def load_policy(policy: Mapping[Any, Any] | str | os.PathLike[str]) -> Policy:
    """Load a policy.

    Args:
        policy: A preset's name, the path of a TOML table, or a mapping. The rules of a mapping may be given by their
            names: "compute", "float32", "infer", "original", "quantized", "widest".

    Returns:
        A mapping from keys to rules. `policy | {key: rule}` is a policy too.

    >>> from jax import lax
    >>> load_policy("default")[lax.exp_p].__name__
    'use_original_precision'
    >>> load_policy({"head": "float32"})["head"].__name__
    'use_original_precision'
    """
    if isinstance(policy, Mapping):
        _check_keys(policy)
        return _with_rules(policy)
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


def _check_keys(policy: Mapping[Any, Any]) -> None:
    for key in policy:
        pair = isinstance(key, tuple) and len(key) == 2 and isinstance(key[0], str) and isinstance(key[1], Primitive)
        if not (isinstance(key, str | Primitive) or pair):
            raise TypeError(
                f"amp_policy has the key {key!r}, of type {type(key).__name__}; expected a primitive, a scope's name "
                "or a pair of both. Write for example jax.lax.add_p, 'attention' or ('attention', jax.lax.add_p)."
            )
        if isinstance(key, str) and (name := _named_primitive(key)):
            raise TypeError(
                f"amp_policy has the key {key!r}, a string; expected the primitive itself, because strings are names "
                f"of scopes. Write {name} without quotes."
            )


def _named_primitive(key: str) -> str:
    """The primitive that a string like "jax.lax.exp_p" is the name of; a scope has no such name."""
    found = re.fullmatch(r"(?:jax\.)?(?:lax\.)?((\w+)_p)", key)
    return f"jax.lax.{found[1]}" if found and found[2] in primitives() else ""


def _with_rules(policy: Mapping[Any, Any]) -> Policy:
    """The policy with rules in the place of their names; the policy itself if it has none."""
    words = {key: rule for key, rule in policy.items() if isinstance(rule, str)}
    for key, rule in policy.items():
        is_pair = isinstance(key, tuple)
        if (key[1] if is_pair else key) is COMMUNICATION:
            if not isinstance(rule, Communication):
                raise TypeError(
                    f"amp_policy[{key!r}] is {rule!r}; expected a Communication. Write for example "
                    "jaxamp.Communication(reduce='compute')."
                )
        elif key in words:
            _check_word(key, rule)
        elif not callable(rule) or isinstance(rule, type) or rule is use_precision:
            raise TypeError(
                f"amp_policy[{key!r}] is {rule!r}; expected a rule: a function of (compute_dtype, original_dtypes, "
                f"*invars, **bind_params), or one of the names {_NAMES}. Write for example "
                "jaxamp.use_original_precision or 'float32'."
            )
    if not words:
        return policy
    quantized = next((rule for rule in policy.values() if isinstance(rule, Quantization)), None)
    rules = {**WORDS, "quantized": quantized or use_formats()}
    return EditablePolicy({**policy, **{key: rules[word] for key, word in words.items()}})


_NAMES = ", ".join(map(repr, sorted([*WORDS, "quantized"])))


def _check_word(key: Any, word: str) -> None:
    if word in WORDS or word == "quantized":
        return
    try:
        instead = f" Write jaxamp.use_precision({jnp.dtype(word).name!r})."
    except TypeError:
        instead = nearest(word, [*WORDS, "quantized"]) or " Write for example 'float32'."
    raise ValueError(f"amp_policy[{key!r}] is {word!r}; expected a rule, or one of the names {_NAMES}.{instead}")
