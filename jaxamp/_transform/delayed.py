"""Delayed scaling: scales that are made of the largest numbers of earlier steps.

The state is an argument, and its derivative is what the step saw. So each transform that differentiates passes it on.
"""

import functools
from collections.abc import Callable
from typing import Any, TypeVar

from .amp import amp_of, plan_call, program_of
from .call import split_call
from .delayed_scales import DelayedScales, empty_scales
from .slots import with_slots

F = TypeVar("F", bound=Callable[..., Any])


def init_scales(fn: Callable[..., Any]) -> Callable[..., DelayedScales]:
    """The state of delayed scaling before the first step.

    Call it like `jax.make_jaxpr`: it computes nothing, and `jax.ShapeDtypeStruct`s can stand in for arrays. There is
    an entry for each operand and each cotangent of a matmul that the policy quantises with `scaling="delayed"`. Before
    a place has seen numbers, operands are rounded as they are, and cotangents as if the largest were about 0.004: the
    first step is rough.

    Args:
        fn: A function from `jaxamp.amp`.

    Returns:
        A function like `fn` that returns a `DelayedScales`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> policy = jaxamp.default_amp_policy | {jax.lax.dot_general_p: jaxamp.use_formats(scaling="delayed")}
    >>> loss = jaxamp.amp(lambda w, x: jnp.sum(x @ w), amp_policy=policy)
    >>> scales = jaxamp.init_scales(loss)(jnp.ones((4, 2)), jnp.ones((3, 4)))
    >>> {name: history.shape for name, history in scales.histories.items()}
    {'dot_general/cotangent': (16,), 'dot_general/lhs': (16,), 'dot_general/rhs': (16,)}
    """
    amped = amp_of("init_scales", fn)

    def init(*args: Any, **kwargs: Any) -> DelayedScales:
        call, arrays, _ = split_call(amped.function, args, kwargs)
        return empty_scales(with_slots(program_of(plan_call(amped.options, call, arrays), arrays)).slots)

    return init


def with_scales(fn: F, scales: DelayedScales) -> F:
    """A function from `jaxamp.amp` with the scales of earlier steps.

    Its derivative by `scales` is what this step saw, for `DelayedScales.update`.
    `jaxamp.delayed_scale_value_and_grad` does both; this is for other transforms.

    Args:
        fn: A function from `jaxamp.amp`, whose policy has `scaling="delayed"`.
        scales: From `jaxamp.init_scales`, and after the first step from `update`.

    Returns:
        A function like `fn`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> policy = jaxamp.default_amp_policy | {jax.lax.dot_general_p: jaxamp.use_formats(scaling="delayed", history=2)}
    >>> loss = jaxamp.amp(lambda w, x: jnp.sum(x @ w), amp_policy=policy)
    >>> w, x = jnp.full((4, 2), 3.0), jnp.ones((3, 4))
    >>> scales = jaxamp.init_scales(loss)(w, x)
    >>> seen = jax.grad(lambda scales: jaxamp.with_scales(loss, scales)(w, x))(scales)
    >>> scales = scales.update(seen)
    >>> scales.histories["dot_general/rhs"]
    Array([3., 0.], dtype=float32)
    """
    run = amp_of("with_scales", fn).run
    if not isinstance(scales, DelayedScales):
        raise TypeError(
            f"with_scales got {scales!r}, of type {type(scales).__name__}; expected a DelayedScales. Write "
            "with_scales(fn, jaxamp.init_scales(fn)(*args))."
        )

    @functools.wraps(fn)
    def scaled(*args: Any, **kwargs: Any) -> Any:
        return run(scales, args, kwargs)

    return scaled  # type: ignore[return-value]
