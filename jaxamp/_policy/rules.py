"""Rules: how one operation runs.

A rule is a function that casts the operands of an operation:

    rule(compute_dtype, original_dtypes, *invars, **bind_params) -> (invars, bind_params)

`compute_dtype` is what `amp` was given, `original_dtypes` are the dtypes of the operands as the program was written,
`invars` the operands in the dtypes that they have now. A user's rule is any function of this form. Ours have this form
too, and the planner knows them by identity: it sees the operation's surroundings, and can do better than the function
alone.

Or a rule is a `Replacement`, which gives the operation another body.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from .._formats import cast, is_float, may_lower
from .._tree import checked_float_dtype

Rule = Callable[..., tuple[Sequence[Any], dict[str, Any]]]


def use_original_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation as it was written.

    Args:
        compute_dtype: What `amp` was given.
        original_dtypes: The dtypes of the operands as the program was written.
        *invars: The operands, in the dtypes that they have now.
        **bind_params: The parameters of the operation.

    Returns:
        The operands and the parameters that the operation runs with.

    >>> import jax.numpy as jnp, jaxamp
    >>> x, f32 = jnp.ones(2), jnp.dtype("float32")
    >>> operands, params = jaxamp.use_original_precision(jnp.bfloat16, [f32], x.astype("bfloat16"))
    >>> [operand.dtype.name for operand in operands]
    ['float32']
    """
    return [cast(x, dtype) for x, dtype in zip(invars, original_dtypes, strict=True)], bind_params


def use_compute_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation on operands in the compute dtype, and let its result have that dtype.

    Integers, complex numbers and float64 are left alone, and so is an operation that has no float32 operand. In a
    policy the planner refuses more, see `jaxamp.amp`: positions, matmuls that ask for `Precision.HIGHEST`, outer
    products.

    Args:
        compute_dtype: What `amp` was given.
        original_dtypes: The dtypes of the operands as the program was written.
        *invars: The operands, in the dtypes that they have now.
        **bind_params: The parameters of the operation.

    Returns:
        The operands and the parameters that the operation runs with.

    >>> import jax.numpy as jnp, jaxamp
    >>> x, f32 = jnp.ones(2), jnp.dtype("float32")
    >>> operands, params = jaxamp.use_compute_precision(jnp.bfloat16, [f32], x)
    >>> [operand.dtype.name for operand in operands]
    ['bfloat16']
    """
    compute_dtype = np.dtype(compute_dtype)
    if not any(
        may_lower(np.dtype(d), compute_dtype) for d, x in zip(original_dtypes, invars, strict=True) if is_float(x)
    ):
        return list(invars), bind_params
    cast_invars = [
        cast(x, compute_dtype) if is_float(x) and may_lower(np.dtype(d), compute_dtype) else x
        for x, d in zip(invars, original_dtypes, strict=True)
    ]
    return cast_invars, lowered_params(bind_params, compute_dtype)


def lowered_params(params: dict[str, Any], compute_dtype: np.dtype) -> dict[str, Any]:
    """Bind parameters of an operation whose float32 operands are now in the compute dtype."""
    new: dict[str, Any] = {}
    if params.get("preferred_element_type") is not None:
        new["preferred_element_type"] = compute_dtype
    if "precision" in params:  # what remains here asks for less than the compute dtype gives
        new["precision"] = None
    if "mantissa_bits" in params:  # of a `reduce_precision` that keeps all bits
        info = jnp.finfo(compute_dtype)
        new |= {"exponent_bits": info.nexp, "mantissa_bits": info.nmant}
    return {**params, **new}


def use_widest_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Run the operation in the widest dtype that one of its operands has now.

    Args:
        compute_dtype: What `amp` was given.
        original_dtypes: The dtypes of the operands as the program was written.
        *invars: The operands, in the dtypes that they have now.
        **bind_params: The parameters of the operation.

    Returns:
        The operands and the parameters that the operation runs with.

    >>> import jax.numpy as jnp, jaxamp
    >>> x, f32 = jnp.ones(2), jnp.dtype("float32")
    >>> operands, params = jaxamp.use_widest_precision(jnp.bfloat16, [f32] * 2, x, x.astype("bfloat16"))
    >>> [operand.dtype.name for operand in operands]
    ['float32', 'float32']
    """
    dtypes = {x.dtype for x in invars if is_float(x) and isinstance(x, jax.Array)}
    widest = [d for d in dtypes if d.itemsize == max(e.itemsize for e in dtypes)]
    if len(widest) != 1:  # float16 beside bfloat16, or nothing but constants
        return use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params)
    return [cast(x, widest[0]) for x in invars], bind_params


def use_inferred_precision(
    compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
) -> tuple[Sequence[Any], dict[str, Any]]:
    """Follow the neighbours: low beside a low operand, unless an operand is protected from rounding.

    The planner decides from the sensitivity of each operand and from the readers of the result. Called by hand, without
    that knowledge, it runs low when an operand is in the compute dtype.

    Args:
        compute_dtype: What `amp` was given.
        original_dtypes: The dtypes of the operands as the program was written.
        *invars: The operands, in the dtypes that they have now.
        **bind_params: The parameters of the operation.

    Returns:
        The operands and the parameters that the operation runs with.

    >>> import jax.numpy as jnp, jaxamp
    >>> x, f32 = jnp.ones(2), jnp.dtype("float32")
    >>> operands, params = jaxamp.use_inferred_precision(jnp.bfloat16, [f32] * 2, x, x.astype("bfloat16"))
    >>> [operand.dtype.name for operand in operands]
    ['bfloat16', 'bfloat16']
    """
    if any(is_float(x) and x.dtype == compute_dtype for x in invars):
        return use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params)
    return use_original_precision(compute_dtype, original_dtypes, *invars, **bind_params)


@dataclasses.dataclass(frozen=True, repr=False)
class GivenPrecision:
    """A rule that runs an operation in one dtype. See `use_precision`."""

    dtype: np.dtype

    @property
    def __name__(self) -> str:
        return f"use_precision({self.dtype.name})"

    def __repr__(self) -> str:
        return self.__name__

    def __call__(
        self, compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        invars = tuple(cast(x, self.dtype) if is_float(x) else x for x in invars)
        if bind_params.get("preferred_element_type") is not None and any(map(is_float, invars)):
            bind_params = {**bind_params, "preferred_element_type": self.dtype}
        return invars, bind_params


def use_precision(dtype: Any) -> Rule:
    """A rule that runs the operation in one dtype, whatever the compute dtype is.

    Args:
        dtype: A float dtype, or its name.

    Returns:
        A rule, for a policy.

    >>> import jax, jaxamp
    >>> jaxamp.default_amp_policy | {jax.lax.tanh_p: use_precision("float32")} == jaxamp.default_amp_policy
    False
    >>> use_precision("float32")
    use_precision(float32)
    """
    return GivenPrecision(checked_float_dtype("use_precision", dtype, "Write for example use_precision(jnp.float32)."))


class Site(NamedTuple):
    """A place in a program where a rule may give a matmul another body."""

    eqn: Any
    parameters: tuple[bool, bool]  # which operands are float32 parameters
    given: tuple[bool, bool]  # which of them stay in memory in any case
    is_first: bool  # it reads arguments alone, and no results of other matmuls
    is_last: bool  # no other matmul depends on it
    is_scoped: bool  # the rule is that of a scope

    @property
    def has_batch(self) -> bool:
        """Whether it is a batch of matmuls."""
        numbers = self.eqn.params.get("dimension_numbers")
        return isinstance(numbers, tuple) and len(numbers) == 2 and bool(numbers[1][0])


class ReplacingRule:
    """A rule that may give an operation another body. Without, the operation runs in the compute dtype."""

    def __call__(
        self, compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        """What the operation would read if it had its own body."""
        return use_compute_precision(compute_dtype, original_dtypes, *invars, **bind_params)

    def at(self, site: Site) -> "Replacement | str":
        """The body at one place of a program, or why there is none, for reports."""
        raise NotImplementedError

    def applies_to(self, primitive: Any) -> bool:
        """Whether it is about a primitive where a scope's key has it; else the key is passed over."""
        return True


@dataclasses.dataclass(frozen=True)
class Replacement(ReplacingRule):
    """A rule that runs an operation low, with another body than its own. See `use_replacement`."""

    body: Callable[..., Any]
    name: str
    format: str
    remark: str = ""  # what else a report should say

    def at(self, site: Site) -> "Replacement | str":
        return self


def use_replacement(body: Callable[..., Any], *, name: str | None = None, format: str | None = None) -> Rule:
    """A rule that gives an operation another body.

    Args:
        body: `body(primitive, compute_dtype, *operands, **bind_params)`, which returns what the primitive would: one
            array, or a sequence of them for a primitive of several results, of the same shapes. Operands come in the
            compute dtype; the float32 parameters of a matmul come as they are, so that the body decides how they are
            rounded and what their gradient is. JAX differentiates the body: use `jax.custom_vjp` to say how.
        name: What reports call the rule; the body's name if None.
        format: The number format that the body multiplies in, for the totals of a report, such as "int8". Without it,
            and in the backward pass, reports read the dtypes off the equations.

    Returns:
        A rule, for a policy.

    Where `use_compute_precision` would leave an operation alone (positions, integers, `Precision.HIGHEST`), the
    operation keeps its own body.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> def rounded_matmul(primitive, compute_dtype, x, w, **params):
    ...     low = lambda a: jax.lax.reduce_precision(a.astype(compute_dtype), 8, 3)
    ...     return primitive.bind(low(x), low(w), **params)
    >>> rule = use_replacement(rounded_matmul, format="e8m3")
    >>> policy = jaxamp.default_amp_policy | {jax.lax.dot_general_p: rule}
    >>> report = jaxamp.amp_report(lambda x: x @ x, amp_policy=policy, backward=False)(jnp.ones((4, 4)))
    >>> report.matmul_flops
    {'e8m3': 128}
    """
    if not callable(body):
        raise TypeError(
            f"use_replacement got {body!r}, of type {type(body).__name__}; expected a function. Write "
            "use_replacement(body), where body(primitive, compute_dtype, *operands, **bind_params) returns the results."
        )
    return Replacement(body, name or str(getattr(body, "__name__", type(body).__name__)), format or "")


def name_of_rule(rule: Any) -> str:
    """What reports call a rule."""
    name = "name" if isinstance(rule, ReplacingRule) else "__name__"
    return str(getattr(rule, name, type(rule).__name__))


class ByTarget(NamedTuple):
    """A rule that depends on the compute dtype: `special` by dtype name, else `default`."""

    default: Rule
    special: Mapping[str, Rule]

    def __call__(
        self, compute_dtype: Any, original_dtypes: Sequence[Any], *invars: Any, **bind_params: Any
    ) -> tuple[Sequence[Any], dict[str, Any]]:
        return self.resolve(compute_dtype)(compute_dtype, original_dtypes, *invars, **bind_params)

    def resolve(self, compute_dtype: Any) -> Rule:
        return self.special.get(np.dtype(compute_dtype).name, self.default)


# The words of a policy table.
WORDS: dict[str, Rule] = {
    "compute": use_compute_precision,
    "float32": use_original_precision,
    "original": use_original_precision,
    "infer": use_inferred_precision,
    "widest": use_widest_precision,
}
