"""How many bytes a function keeps for its backward pass, with and without `amp`."""

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax

from .._compat import open_jaxpr
from .._jaxpr import evaluate
from .._plan.residuals import Keep
from .._transform.amp import without_amp
from .._transform.options import PolicyLike
from .program import program_of
from .pullback import Pullback, pullback_of


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
    per_device: bool = False,
) -> Callable[..., BytesKept]:
    """Count the bytes that `fn` and `amp(fn)` keep for the backward pass.

    Args:
        fn: The loss that you would pass to `amp`.
        compute_dtype, amp_policy, keep, disable_passes: As for `amp`.
        per_device: Whether to count what one device keeps, for arrays or shapes with shardings. XLA decides how values
            are split, so the forward pass is compiled, as written and under `amp`, for the devices of the shardings;
            nothing runs. By default whole arrays count, however they are split: inside of a `shard_map`, that is what
            all devices have.

    Returns:
        A function of `fn`'s arguments that returns `BytesKept`. It runs nothing, so `jax.ShapeDtypeStruct`s can stand
        in for arrays.

    The backward pass is that of the first floating-point result, with respect to the floating-point arrays of the first
    argument. The numbers are JAX's: outside of loops, XLA recomputes some values instead of keeping them, and it holds
    buffers of its own. Arguments are not counted: they stay in memory in any case. The rounded copies of parameters are
    counted, unless the backward pass rounds again, as it does in a loop and, on one device, with `keep="matmuls"`.

    >>> import jax, jax.numpy as jnp, jaxamp
    >>> loss = lambda w, x: jnp.sum(jax.nn.gelu(x @ w) @ w)
    >>> kept = bytes_kept(loss, compute_dtype=jnp.bfloat16)(jnp.ones((8, 8)), jnp.ones((64, 8)))
    >>> kept.after  # the result of a matmul, and `w`, in bfloat16
    1152
    >>> kept.before > 3 * kept.after
    True
    """
    fn, options = without_amp("bytes_kept", fn, compute_dtype, amp_policy, keep, disable_passes)

    def kept(*args: Any, **kwargs: Any) -> BytesKept:
        if not args:
            raise TypeError(
                "bytes_kept(fn) was called without arguments; expected those of fn, parameters first. Write "
                "jaxamp.bytes_kept(loss_fn)(params, batch)."
            )
        program = program_of(options, fn, args, kwargs)
        pullbacks = [pullback_of(jaxpr, list(program.differentiated)) for jaxpr in (program.written, program.mixed)]
        if not per_device:
            return BytesKept(*(pullback.kept for pullback in pullbacks))
        return BytesKept(*(_kept_on_a_device(pullback, program.arrays) for pullback in pullbacks))

    return kept


def _kept_on_a_device(pullback: Pullback, arrays: Sequence[Any]) -> int:
    """The bytes of one device's parts of what is kept, split as XLA would split it."""
    avals = [v.aval for v in open_jaxpr(pullback.forward).invars]
    specs = [
        jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=_sharding(x))
        for aval, x in zip(avals, arrays, strict=True)
    ]
    compiled = jax.jit(lambda *operands: evaluate(pullback.forward, operands)).lower(*specs).compile()
    shardings = compiled.output_shardings
    return sum(
        math.prod(shardings[place].shard_shape(aval.shape)) * aval.dtype.itemsize
        for place, aval in pullback.made.items()
    )


def _sharding(x: Any) -> Any:
    """Where an argument must be; None if that is left to JAX."""
    if isinstance(x, jax.core.Tracer):
        raise TypeError(
            "bytes_kept(fn, per_device=True) got a traced value; expected arrays or shapes with shardings. Call it "
            "outside of jit."
        )
    found = x.sharding if isinstance(x, jax.ShapeDtypeStruct) or getattr(x, "committed", False) else None
    if isinstance(getattr(found, "mesh", None), jax.sharding.AbstractMesh):
        raise TypeError(
            "bytes_kept(fn, per_device=True) got a sharding over an AbstractMesh; expected a mesh of devices to "
            "compile for. Write jax.make_mesh(...), or take devices from jax.experimental.topologies."
        )
    return found
