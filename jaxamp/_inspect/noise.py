"""Tells gradients that are zero in exact arithmetic from gradients that are small.

The gradient of a bias before a normalization, or of the keys' bias in attention, is a sum that cancels. Float32 leaves
its rounding there, amp the rounding of its dtype: large in comparison, and harmless. The size of a number does not tell
rounding from a value. What tells is a second run of float32 on arguments that differ in their last bit:

    a value    moves by about a rounding of float32, relative to itself
    rounding   is drawn again, and moves by about itself

In a low dtype rounding is coarser by the quotient of the epsilons. So much, and a few times more, is allowed where the
reference is rounding; nowhere else, however small or ill-conditioned it is.
"""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._formats import is_float
from .comparison import Compared
from .location import Place
from .pieces import Compiled
from .program import Program
from .pullback import Pullback
from .walk import Walker

_IS_NOISE = 0.1  # of its norm: a value that moves by more has no digit that is right
_TIMES = 4.0  # what rounding in the low dtype may be, in roundings of float32 times the quotient of the epsilons
_ROUNDINGS = 4  # of the compute dtype: a smaller error needs no explanation


def gradient(
    program: Program, pullback: Pullback, arrays: Sequence[Any], scale: float, compiled: Compiled
) -> tuple[list[Any], list[Any]]:
    """The results, and the gradients of the first one times `scale`."""
    walker = Walker(program.ledger, None, compiled=compiled)
    outs = walker.run(pullback.forward, arrays, Place("forward"))
    outs, kept = outs[: pullback.results], outs[pullback.results :]
    return outs, walker.run(pullback.jaxpr, [*kept, *pullback.seeds(outs, scale)], Place("backward"))


def without_noise(
    program: Program,
    results: Sequence[Compared],
    gradients: Sequence[Compared],
    pullback: Pullback | None,
    compiled: Compiled,
) -> tuple[list[Compared], list[Compared], list[str]]:
    """Rows of results and gradients with the errors beyond rounding, and notes. Rows are in the order of the leaves.

    `pullback`: of the program as written, if there are gradients.
    """
    enough = _ROUNDINGS * float(jnp.finfo(program.compute_dtype).eps)
    is_clear = all(row.error.relative <= enough for row in (*results, *gradients))
    if is_clear or not any(0 < row.distance < np.inf for row in (*results, *gradients)):
        return list(results), list(gradients), []
    first, second = (_float32(program, pullback, arrays, compiled) for arrays in (program.arrays, _moved(program)))
    times = _TIMES * float(jnp.finfo(program.compute_dtype).eps) / float(np.finfo(np.float32).eps)
    found, named = [], []
    for rows, xs, ys in zip((results, gradients), first, second, strict=True):
        pairs = zip(rows, xs, ys, strict=True)
        found.append([_beyond_noise(row, _noise(x, y), times) for row, x, y in pairs])
        named += [row.name for row in found[-1] if row.noise]
    more = f" and {len(named) - 5} more" if len(named) > 5 else ""
    note = f"rounding and nothing else, in float32 as under amp: {', '.join(named[:5])}{more}"
    return found[0], found[1], [note] if named else []


def _float32(
    program: Program, pullback: Pullback | None, arrays: Sequence[Any], compiled: Compiled
) -> tuple[list[Any], list[Any]]:
    """The floats among the results of the program as written, and the gradients."""
    gradients: list[Any] = []
    if pullback is not None:
        outs, gradients = gradient(program, pullback, arrays, 1.0, compiled)
    else:
        outs = Walker(program.ledger, None, compiled=compiled).run(program.written, arrays, Place("forward"))
    return [x for x in outs if is_float(x)], gradients


def _moved(program: Program) -> list[Any]:
    """The arguments, their floats a bit larger or smaller."""
    rng = np.random.default_rng(0)

    def move(x: Any) -> Any:
        if not is_float(x):
            return x
        eps = float(jnp.finfo(x.dtype).eps)
        signs = rng.integers(0, 2, np.shape(x)) * 2 - 1
        return jax.device_put(x * jnp.asarray(1 + eps * signs, x.dtype), x.sharding)

    return [move(x) for x in program.arrays]


def _noise(x: Any, y: Any) -> float:
    """The norm of the rounding in a value that is nothing else, from two runs; 0 for another value."""
    x, y = (np.asarray(a).astype(np.float64) for a in (x, y))
    noise = float(np.linalg.norm(x - y))
    return noise if np.isfinite(noise) and noise > _IS_NOISE * float(np.linalg.norm(x)) else 0.0


def _beyond_noise(row: Compared, noise: float, times: float) -> Compared:
    if noise == 0 or not 0 < row.distance < np.inf:
        return row
    allowed = times * noise
    share = max(0.0, row.distance - allowed) / row.distance  # of the error, what rounding does not explain
    relative = row.error.relative * share if share else 0.0
    return row._replace(error=row.error._replace(relative=relative), noise=allowed)
