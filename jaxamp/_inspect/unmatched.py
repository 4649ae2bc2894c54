"""The keys of a policy that matched nothing."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from .._plan.plan import Step
from .._policy.communication import COMMUNICATION
from .._policy.load import load_policy
from .._policy.lookup import Key
from .._policy.toml import presets
from .._transform.amp import plan_call, without_amp
from .._transform.call import split_call
from .._transform.options import Options, PolicyLike


def unmatched_keys(
    fn: Callable[..., Any], *, compute_dtype: Any = "auto", amp_policy: PolicyLike = "default"
) -> Callable[..., list[Key]]:
    """Find the keys of a policy that match no operation of `fn`.

    Such as a scope's name that is misspelt, or that a library has changed. Keys that come with a preset are left out.

    Args:
        fn: The function that you would pass to `amp`, or an `amp` of it, whose options count where none are given.
        compute_dtype, amp_policy: As for `amp`.

    Returns:
        A function of `fn`'s arguments that returns the list of keys. It only traces, so `jax.ShapeDtypeStruct`s can
        stand in for arrays.

    >>> import jax.numpy as jnp, jaxamp
    >>> policy = jaxamp.default_amp_policy | {"atention": jaxamp.use_original_precision}
    >>> unmatched_keys(lambda x: x @ x, amp_policy=policy)(jnp.ones((2, 2)))
    ['atention']
    """
    fn, options = without_amp("unmatched_keys", fn, compute_dtype, amp_policy)

    def keys(*args: Any, **kwargs: Any) -> list[Key]:
        call, arrays, _ = split_call(fn, args, kwargs)
        return unmatched(options, steps_of([plan_call(options, call, arrays).plan.steps]))

    return keys


def steps_of(plans: Iterable[Sequence[Step]]) -> Iterator[Step]:
    """The steps of plans and of the plans inside of them, each once: a function that is called often has one plan."""
    seen: set[int] = set()
    waiting = list(plans)
    while waiting:
        steps = waiting.pop()
        if id(steps) not in seen:
            seen.add(id(steps))
            yield from steps
            waiting += (body.steps for step in steps for body in step.bodies)


def unmatched(options: Options, steps: Iterable[Step]) -> list[Key]:
    """The keys of a policy that are not a preset's, and that no step was found under."""
    found: set[Key] = {step.found.key for step in steps} | options.lookup.communication_keys() | {COMMUNICATION}
    ours = [load_policy(name) for name in presets()]
    return [
        key
        for key, rule in options.policy.items()
        if key not in found and not any(preset.get(key) == rule for preset in ours)
    ]
