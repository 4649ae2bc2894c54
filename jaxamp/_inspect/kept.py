"""How many bytes a function keeps for its backward pass, with and without `amp`."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from .._plan.residuals import Keep
from .._transform.options import PolicyLike, check_function, check_options
from .program import program_of
from .pullback import pullback_of


class BytesKept(NamedTuple):
    """Bytes computed in the forward pass and read in the backward pass, without the arguments.

    Attributes:
        before: Of the function as written.
        after: Of it under `amp`.

    >>> kept = BytesKept(before=4096, after=1024)
    >>> kept.after / kept.before
    0.25
    """

    before: int
    after: int


def bytes_kept(
    fn: Callable[..., Any],
    *,
    compute_dtype: Any = "auto",
    amp_policy: PolicyLike = "default",
    keep: Keep = "auto",
    disable_passes: Sequence[str] = (),
) -> Callable[..., BytesKept]:
    """Count the bytes that `fn` and `amp(fn)` keep for the backward pass.

    Args:
        fn: The loss that you would pass to `amp`.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.

    Returns:
        A function of `fn`'s arguments that returns `BytesKept`. It only traces, so `jax.ShapeDtypeStruct`s can stand in
        for arrays.

    The backward pass is that of the first floating-point result, with respect to the floating-point arrays of the first
    argument. The numbers are JAX's: outside of loops, XLA recomputes some values instead of keeping them, and it holds
    buffers of its own. Arguments are not counted: they stay in memory in any case, and the backward pass rounds them
    again. (XLA may round them once, if it has room for the copy.)

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> loss = lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w)
    >>> kept = bytes_kept(loss, compute_dtype=jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((64, 8)))
    >>> kept.after  # the result of a matmul, in bfloat16
    1024
    >>> kept.before > 3 * kept.after
    True
    """
    check_function("bytes_kept", fn)
    options = check_options(compute_dtype, amp_policy, keep, disable_passes)

    def kept(*args: Any, **kwargs: Any) -> BytesKept:
        if not args:
            raise TypeError(
                "bytes_kept(fn) was called without arguments; expected those of fn, parameters first. Write "
                "jaxamp.bytes_kept(loss_fn)(params, batch)."
            )
        program = program_of(options, fn, args, kwargs)
        return BytesKept(
            *(pullback_of(jaxpr, list(program.differentiated)).kept for jaxpr in (program.written, program.mixed))
        )

    return kept
