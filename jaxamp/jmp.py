"""JMP's interface over jaxamp: change the import to `from jaxamp import jmp`.

The law: a program written for JMP 0.0.4 runs unchanged, and gives the same bits wherever JMP's are right. Casting and
loss scaling are jaxamp's own; this file gives them JMP's names.

>>> import jax, jax.numpy as jnp
>>> from jaxamp import jmp
>>> policy = jmp.get_policy("params=float32,compute=float16,output=float32")
>>> loss_scale = jmp.DynamicLossScale(2.0**15)
>>> def loss(params, x):
...     params, x = policy.cast_to_compute((params, x))
...     return loss_scale.scale(policy.cast_to_output(jnp.mean((x @ params) ** 2)))
>>> grads = loss_scale.unscale(jax.grad(loss)(jnp.ones(2), jnp.ones((4, 2))))
>>> loss_scale = loss_scale.adjust(jmp.all_finite(grads))

Differences from JMP 0.0.4, each because of a fault in it:

1. The `min_loss_scale` of a `DynamicLossScale` survives. JMP loses it in each `jit` and each `tree_map`.
2. The scale is held in float32, whatever numbers it is made from, and floats are scaled and unscaled in float32 or
   wider. The README's `DynamicLossScale(jmp.half_dtype()(2**15))` makes JMP's `adjust` raise an error and its `unscale`
   underflow; so does a Python number or a weakly typed array with float16 gradients.
3. `unscale` is right for every scale. JMP's returns zeros above 2**126, where the reciprocal is flushed to zero.
4. `scale` and `unscale` leave integers, PRNG keys and non-numeric leaves alone. JMP turns integers into floats and
   raises an error for the others. So do its `all_finite` and `select_tree` for non-numeric leaves.
5. `select_tree` selects leaves whose dtypes differ, in the wider one. JMP raises an error.
6. An overflow never raises the scale. JMP's jumps up to `min_loss_scale` if it was below.
7. The floor of a scale is positive, even if `min_loss_scale` is zero. JMP's scale falls to zero and stays there.
8. A JAX array as the scale of a `StaticLossScale` is a leaf. JMP's has no leaves, so `jit` traces again for each array,
   and fails at the second call.
9. `str(policy)` works for dtypes of any form, and policies with the same dtypes are equal and have the same hash.
10. `cast_to_half` and its siblings cast NumPy scalars too.
11. The error for an unknown dtype lists the accepted names. JMP's offers `f` for `full`, and refuses it.
12. `get_policy` allows spaces, and refuses a key that is given twice. JMP takes the last one.
13. Errors say what was given, what was expected and what to write. JMP has assertions, which `python -O` removes. The
    error for a condition that is not one bool is an AssertionError too, for programs that catch JMP's.
"""

import dataclasses
import warnings
from typing import Any, TypeVar

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np

from ._scaling.checked_scalar import check_condition, checked_scalar
from ._scaling.period_counters import counter_from_state, state_from_counter
from ._scaling.scale_tree import scale_tree, unscale_tree
from ._scaling.state import FLOAT32_MAX
from ._transform.loss_scaling import note_own_scale
from ._tree import all_finite as all_finite
from ._tree import cast_floating, tree_where

Tree = TypeVar("Tree")

__all__ = [
    "DynamicLossScale",
    "LossScale",
    "NoOpLossScale",
    "Policy",
    "StaticLossScale",
    "all_finite",
    "cast_to_full",
    "cast_to_half",
    "get_policy",
    "half_dtype",
    "select_tree",
]


# -- policies

dtype_to_names = {
    jnp.bfloat16: ("bf16", "bfloat16"),
    jnp.float16: ("f16", "float16"),
    jnp.float32: ("full", "f32", "float32"),
    jnp.float64: ("f64", "float64"),
}
name_to_dtype = {name: dtype for dtype, names in dtype_to_names.items() for name in names}
_SHORT_NAMES = {np.dtype(dtype): names[0] for dtype, names in dtype_to_names.items()}
_POSITIONS = {"p": 0, "params": 0, "c": 1, "compute": 1, "o": 2, "output": 2}


@dataclasses.dataclass(frozen=True, eq=False)
class Policy:
    """The dtypes of parameters, of computations and of results.

    Attributes:
        param_dtype: The dtype of parameters.
        compute_dtype: The dtype of computations.
        output_dtype: The dtype of results.

    >>> from jaxamp import jmp
    >>> policy = jmp.Policy(param_dtype=jnp.float32, compute_dtype=jnp.float16, output_dtype=jnp.float32)
    >>> policy.cast_to_compute({"w": jnp.ones(2), "step": 3})
    {'step': 3, 'w': Array([1., 1.], dtype=float16)}
    >>> str(policy.with_output_dtype(jnp.bfloat16))
    'p=full,c=f16,o=bf16'
    """

    param_dtype: Any
    compute_dtype: Any
    output_dtype: Any

    def __post_init__(self) -> None:
        for field, dtype in vars(self).items():
            _check_float(field, dtype)

    def cast_to_param(self, x: Tree) -> Tree:
        """Cast a pytree's floats to `param_dtype`.

        Args:
            x: Any pytree.

        Returns:
            The pytree, in that dtype.
        """
        return cast_floating(x, self.param_dtype)

    def cast_to_compute(self, x: Tree) -> Tree:
        """Cast a pytree's floats to `compute_dtype`.

        Args:
            x: Any pytree.

        Returns:
            The pytree, in that dtype.
        """
        return cast_floating(x, self.compute_dtype)

    def cast_to_output(self, x: Tree) -> Tree:
        """Cast a pytree's floats to `output_dtype`.

        Args:
            x: Any pytree.

        Returns:
            The pytree, in that dtype.
        """
        return cast_floating(x, self.output_dtype)

    def with_output_dtype(self, output_dtype: Any) -> "Policy":
        """Return the same policy with another output dtype.

        Args:
            output_dtype: The dtype.

        Returns:
            A policy.
        """
        return dataclasses.replace(self, output_dtype=output_dtype)

    def _dtypes(self) -> tuple[np.dtype, ...]:
        return tuple(np.dtype(x) for x in (self.param_dtype, self.compute_dtype, self.output_dtype))

    def __eq__(self, other: object) -> bool:
        return self._dtypes() == other._dtypes() if isinstance(other, Policy) else NotImplemented

    def __hash__(self) -> int:
        return hash(self._dtypes())

    def __str__(self) -> str:
        """The policy in the form that `get_policy` reads."""
        return "p={},c={},o={}".format(*(_SHORT_NAMES.get(x, x.name) for x in self._dtypes()))


def get_policy(policy_name: str) -> Policy:
    """Read a policy from a string.

    The string is the name of one dtype, or `params=...,compute=...,output=...` (`p`, `c` and `o` for short). The
    defaults: params is float32, compute is the same as params, output is the same as compute.

    Args:
        policy_name: `"params=float32,compute=float16,output=float32"`, or one dtype for all.

    Returns:
        A policy.

    >>> from jaxamp import jmp
    >>> str(jmp.get_policy("c=f16")), str(jmp.get_policy("bfloat16"))
    ('p=full,c=f16,o=f16', 'p=bf16,c=bf16,o=bf16')
    """
    if not isinstance(policy_name, str):
        raise TypeError(
            f"get_policy got {policy_name!r}, of type {type(policy_name).__name__}; expected a string. "
            "Write get_policy('params=float32,compute=bfloat16,output=float32'), or Policy(...) for dtypes."
        )
    if "=" not in policy_name:
        dtype = parse_dtype(policy_name, policy_name=policy_name)
        return Policy(dtype, dtype, dtype)
    dtypes: list[Any] = [None, None, None]
    for part in policy_name.split(","):
        key, _, value = (word.strip() for word in part.partition("="))
        index = _POSITIONS.get(key)
        if index is None or dtypes[index] is not None:
            raise ValueError(
                f"get_policy got {policy_name!r}, with {part.strip()!r} in it; expected params=, compute= and output= "
                "(or p=, c= and o=), each at most once. Write get_policy('p=f32,c=bf16,o=f32')."
            )
        dtypes[index] = parse_dtype(value, policy_name=policy_name)
    param, compute, output = dtypes
    param = param or jnp.float32
    compute = compute or param
    return Policy(param, compute, output or compute)


def parse_dtype(value: str, *, policy_name: str | None = None) -> Any:
    """The dtype of a name. An error names the policy that it is part of."""
    name = value.strip()
    if name == "half":
        return half_dtype()
    if name not in name_to_dtype:
        raise ValueError(
            f"Unknown dtype {name!r} in the policy {(policy_name or value)!r}; expected one of "
            f"half, {', '.join(name_to_dtype)}. Write get_policy('bf16'), or get_policy('p=f32,c=bf16,o=f32')."
        )
    return name_to_dtype[name]


def _check_float(field: str, dtype: Any) -> None:
    try:
        is_float = dtype is not None and jnp.issubdtype(jnp.dtype(dtype), jnp.floating)  # None is float64 to NumPy
    except TypeError:
        is_float = False
    if not is_float:
        raise TypeError(
            f"Policy got {field}={dtype!r}; expected a floating-point dtype. Write {field}=jnp.float32, or "
            "get_policy('p=f32,c=bf16,o=f32') to use names."
        )


def half_dtype() -> Any:
    """`jnp.bfloat16` on a TPU, `jnp.float16` elsewhere.

    Returns:
        A dtype.

    >>> from jaxamp import jmp
    >>> jmp.half_dtype().__name__ in ("float16", "bfloat16")
    True
    """
    return jnp.bfloat16 if jax.default_backend() == "tpu" else jnp.float16


def cast_to_full(tree: Tree) -> Tree:
    """Cast a pytree's floats to float32.

    Args:
        tree: Any pytree.

    Returns:
        The pytree, in float32.

    >>> import jax.numpy as jnp
    >>> from jaxamp import jmp
    >>> jmp.cast_to_full(jnp.ones(2, jnp.float16)).dtype.name
    'float32'
    """
    return cast_floating(tree, jnp.float32)


def cast_to_half(tree: Tree) -> Tree:
    """Cast a pytree's floats to `half_dtype()`.

    Args:
        tree: Any pytree.

    Returns:
        The pytree, in that dtype.

    >>> import jax.numpy as jnp
    >>> from jaxamp import jmp
    >>> jmp.cast_to_half(jnp.ones(2)).dtype == jmp.half_dtype()
    True
    """
    return cast_floating(tree, half_dtype())


# -- loss scales: pytrees, to be carried from step to step


class NoOpLossScale(eqx.Module):
    """A loss scale of one: it does nothing, and can stand in for the others.

    >>> import jax.numpy as jnp
    >>> from jaxamp import jmp
    >>> float(jmp.NoOpLossScale().scale(jnp.ones(())))
    1.0
    """

    @property
    def loss_scale(self) -> int:
        """One."""
        return 1

    def scale(self, tree: Tree) -> Tree:
        """Return the tree unchanged.

        Args:
            tree: Any pytree.

        Returns:
            The same pytree.
        """
        return tree

    def unscale(self, tree: Tree) -> Tree:
        """Return the tree unchanged.

        Args:
            tree: Any pytree.

        Returns:
            The same pytree.
        """
        return tree

    def adjust(self, grads_finite: Any) -> "NoOpLossScale":
        """Return the same loss scale.

        Args:
            grads_finite: Whether the gradients were finite, a scalar bool.

        Returns:
            The loss scale of the next step.
        """
        return self


@dataclasses.dataclass(frozen=True)
class StaticLossScale:
    """A loss scale that never moves.

    Attributes:
        loss_scale: The scale, float32. A JAX array is a leaf, any other number part of the tree's structure.

    >>> import jax.numpy as jnp
    >>> from jaxamp import jmp
    >>> float(jmp.StaticLossScale(8.0).scale(jnp.ones(())))
    8.0
    """

    loss_scale: Any

    def __post_init__(self) -> None:
        note_own_scale()
        _set(self, "loss_scale", np.float32, "2.0**15", positive=False)

    def scale(self, tree: Tree) -> Tree:
        """Multiply a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, scaled.
        """
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, unscaled.
        """
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> "StaticLossScale":
        """Return the same loss scale.

        Args:
            grads_finite: Whether the gradients were finite, a scalar bool.

        Returns:
            The loss scale of the next step.
        """
        return self


@dataclasses.dataclass(frozen=True)
class DynamicLossScale:
    """A loss scale that is raised after `period` finite steps, and lowered at an overflow.

    It moves by the rule of `jaxamp.DynamicScalerState`.

    Attributes:
        loss_scale: The scale, float32.
        counter: Finite steps in this period.
        period: How many finite steps it takes to raise the scale.
        factor: The scale is raised and lowered by this factor.
        min_loss_scale: The scale is not lowered below this. A JAX array is a leaf, any other number part of the tree's
            structure, as `period` and `factor` are.

    >>> from jaxamp import jmp
    >>> loss_scale = jmp.DynamicLossScale(8.0, period=2)
    >>> [float((loss_scale := loss_scale.adjust(finite)).loss_scale) for finite in (True, True, False)]
    [8.0, 16.0, 8.0]
    """

    loss_scale: Any
    counter: Any = 0
    period: Any = 2000
    factor: Any = 2
    min_loss_scale: Any = 1.0

    def __post_init__(self) -> None:
        note_own_scale()
        for field, example in (("loss_scale", "2.0**15"), ("min_loss_scale", "1.0")):
            _warn_of_integer(field, getattr(self, field), example)
        for field, example in (("period", "2000"), ("factor", "2")):
            checked_scalar("DynamicLossScale", field, getattr(self, field), np.float32, example)
        _set(self, "loss_scale", np.float32, "2.0**15")
        _set(self, "counter", np.int32, "0", positive=False)
        _set(self, "min_loss_scale", np.float32, "1.0", positive=False)

    def scale(self, tree: Tree) -> Tree:
        """Multiply a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, scaled.
        """
        return scale_tree(tree, self.loss_scale)

    def unscale(self, tree: Tree) -> Tree:
        """Divide a pytree's floats by the scale, in float32 or wider.

        Args:
            tree: Any pytree.

        Returns:
            The pytree, unscaled.
        """
        return unscale_tree(tree, self.loss_scale)

    def adjust(self, grads_finite: Any) -> "DynamicLossScale":
        """The next loss scale, given whether this step's gradients were finite.

        Args:
            grads_finite: Whether the gradients were finite, a scalar bool.

        Returns:
            The loss scale of the next step.
        """
        check_condition("adjust", grads_finite, "loss_scale.adjust(jmp.all_finite(grads))")
        state = state_from_counter(
            self.loss_scale, self.counter, self.factor, self.period, self.min_loss_scale, maximum=FLOAT32_MAX
        ).adjust(grads_finite)
        return eqx.tree_at(lambda x: (x.loss_scale, x.counter), self, (state.scaler, counter_from_state(state)))


def _set(scale: Any, field: str, dtype: Any, example: str, positive: bool = True) -> None:
    """Check a field of a loss scale, and set it to a scalar of its dtype."""
    value = checked_scalar(type(scale).__name__, field, getattr(scale, field), dtype, example, positive=positive)
    object.__setattr__(scale, field, value if isinstance(value, jax.Array) else value[()])


def _warn_of_integer(field: str, value: Any, example: str) -> None:
    """Warn of an integer, as JMP does."""
    dtype = getattr(value, "dtype", np.dtype(np.int32) if type(value) is int else None)
    if dtype is not None and jnp.issubdtype(dtype, jnp.integer):
        warnings.warn(
            f"Expected floating type for {field}, got {dtype}. DynamicLossScale holds it in float32; write "
            f"{field}={example}.",
            stacklevel=4,
        )


def _register(cls: type, leaves: tuple[str, ...], static: tuple[str, ...], either: str) -> None:
    """Register a loss scale as a pytree whose field `either` is structure if it is a number, and a leaf otherwise."""

    def flatten(scale: Any) -> Any:
        is_number = type(getattr(scale, either)) is np.float32
        names = leaves if is_number else (*leaves, either)
        structure = {name: getattr(scale, name) for name in (*static, either) if name not in names}
        return [(jax.tree_util.GetAttrKey(name), getattr(scale, name)) for name in names], tuple(structure.items())

    def unflatten(structure: Any, values: Any) -> Any:
        scale: Any = object.__new__(cls)  # values may be anything here: nothing is checked
        names = leaves if either in dict(structure) else (*leaves, either)
        for name, value in (*structure, *zip(names, values, strict=True)):
            object.__setattr__(scale, name, value)
        return scale

    jax.tree_util.register_pytree_with_keys(cls, flatten, unflatten)


_register(StaticLossScale, leaves=(), static=(), either="loss_scale")
_register(DynamicLossScale, leaves=("loss_scale", "counter"), static=("period", "factor"), either="min_loss_scale")

LossScale = NoOpLossScale | StaticLossScale | DynamicLossScale


def select_tree(pred: Any, a: Tree, b: Tree) -> Tree:
    """Return `a` if the scalar bool `pred` holds, else `b`. Non-numeric leaves must be equal in both.

    Args:
        pred: A scalar bool.
        a: A pytree.
        b: A pytree of the same structure.

    Returns:
        A pytree like both.

    >>> import jax.numpy as jnp
    >>> from jaxamp import jmp
    >>> float(jmp.select_tree(jnp.array(False), jnp.ones(()), jnp.zeros(())))
    0.0
    """
    check_condition("select_tree", pred, "select_tree(jmp.all_finite(grads), new, old)")
    return tree_where(pred, a, b)
