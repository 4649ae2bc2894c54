"""The options of `amp`, checked at the call that gives them."""

import contextlib
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, get_args

import jax.numpy as jnp
import numpy as np

from .. import _passes
from .._errors import nearest
from .._formats import is_float_dtype
from .._number_formats.names import format as number_format
from .._number_formats.number_format import NumberFormat
from .._plan.residuals import Keep
from .._policy.load import load_policy
from .._policy.lookup import Lookup, Policy
from .._policy.mapping import FrozenPolicy
from .._policy.quantization import in_format, quantizes

PolicyLike = Policy | str | Any  # Any: os.PathLike


class Options(NamedTuple):
    """What `amp` was asked for."""

    compute_dtype: np.dtype
    policy: Policy
    lookup: Lookup
    keep: Keep
    disable_passes: tuple[str, ...] = ()
    is_table: bool = True  # the policy was not written in Python

    @property
    def given(self) -> tuple[Any, ...]:
        """What `check_options` makes these options of, in a form that can be pickled."""
        policy = self.policy if isinstance(self.policy, FrozenPolicy) else FrozenPolicy(self.policy)
        return self.compute_dtype, policy, self.keep, self.disable_passes

    def __repr__(self) -> str:
        parts = [f"compute_dtype={self.compute_dtype.name}"]
        if getattr(self.policy, "name", "") != "default":
            parts.append(f"amp_policy={self.given[1]!r}")
        if self.keep != "auto":
            parts.append(f"keep={self.keep!r}")
        if self.disable_passes:
            parts.append(f"disable_passes={list(self.disable_passes)!r}")
        return ", ".join(parts)

    def check_keys(self) -> None:
        """Warn of keys of a mapping that were probably meant for primitives, after a plan was made.

        In a table, a scope's name stands under `[scopes]`, and means what it says.
        """
        for key in () if self.is_table else self.lookup.mistaken():
            warnings.warn(
                f"amp_policy has the key {key!r}, the name of a scope; no operation is in such a scope, but some are "
                f"the primitive of that name. Write jax.lax.{key}_p without quotes for these, or open "
                f"jax.named_scope({key!r}) around those that you mean.",
                stacklevel=2,
            )

    def enabled(self, passes: Sequence[Any]) -> list[Any]:
        """The passes of a list that are not disabled."""
        return [run for run in passes if run.__name__ not in self.disable_passes]


def check_options(
    compute_dtype: Any, amp_policy: PolicyLike, keep: Keep = "auto", disable_passes: Sequence[str] = ()
) -> Options:
    """The options of `amp`, or an error that says what to write instead."""
    policy = load_policy(amp_policy)
    dtype, format_ = _check_dtype(compute_dtype, policy)
    if format_ is not None:
        policy = in_format(policy, format_)
    if not isinstance(keep, str) or keep not in get_args(Keep):
        raise ValueError(
            f"keep is {keep!r}; expected one of {', '.join(map(repr, get_args(Keep)))}. Write keep='matmuls' to keep "
            "little for the backward pass, or leave it out."
        )
    is_table = not isinstance(amp_policy, Mapping) or isinstance(amp_policy, FrozenPolicy)
    return Options(dtype, policy, Lookup(policy, dtype), keep, _check_passes(disable_passes), is_table)


_SHORT = {"bf16": "bfloat16", "fp16": "float16", "f16": "float16"}


def _check_dtype(compute_dtype: Any, policy: Policy) -> tuple[np.dtype, NumberFormat | None]:
    """The compute dtype, and the format that matmuls are to run in, if one was given in its place."""
    if isinstance(compute_dtype, str) and compute_dtype == "auto":
        return np.dtype(jnp.bfloat16 if quantizes(policy) else jnp.float16), None
    if isinstance(compute_dtype, str):
        compute_dtype = _SHORT.get(compute_dtype, compute_dtype)
    try:
        dtype = None if compute_dtype is None else jnp.dtype(compute_dtype)  # numpy takes None for float64
    except TypeError:
        dtype = None
    if dtype is not None and jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize >= 2:
        return dtype, None
    is_format = isinstance(compute_dtype, str | NumberFormat) or (dtype is not None and is_float_dtype(dtype))
    if is_format:
        with contextlib.suppress(TypeError, ValueError):
            return np.dtype(jnp.bfloat16), number_format(compute_dtype)
    raise TypeError(
        f"compute_dtype is {compute_dtype!r}; expected a float of at least 16 bits, or a number format, as 'e4m3'. "
        "Write compute_dtype=jnp.bfloat16 or compute_dtype=jnp.float16."
    )


def pass_names() -> list[str]:
    """The names of all passes, in the order in which they run."""
    return [run.__name__ for run in (*_passes.JAXPR_PASSES, *_passes.PLAN_PASSES, *_passes.PROGRAM_PASSES)]


def _check_passes(names: Any) -> tuple[str, ...]:
    known = pass_names()
    if isinstance(names, str) or not isinstance(names, Sequence | set | frozenset):
        raise TypeError(
            f"disable_passes is {names!r}, of type {type(names).__name__}; expected a sequence of names of passes. "
            f"Write for example disable_passes=['{known[-1]}']."
        )
    for name in names:
        if name not in known:
            raise ValueError(
                f"disable_passes has {name!r}; expected names of passes: {', '.join(known)}."
                + (nearest(str(name), known) or f" Write for example disable_passes=['{known[-1]}'].")
            )
    return tuple(names)


def check_function(name: str, fn: Any) -> None:
    """Refuse what can't be called, in the words of the function `name`."""
    if not callable(fn) or isinstance(fn, type):
        raise TypeError(
            f"{name} got {fn!r}, of type {type(fn).__name__}; expected a function. Write jaxamp.{name}(loss_fn), "
            f"and give the options by name: jaxamp.{name}(loss_fn, compute_dtype=jnp.bfloat16)."
        )
