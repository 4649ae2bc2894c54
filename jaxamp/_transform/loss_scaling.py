"""Who scales the loss: known while a function is traced, so that a missing scaler and a second one are told.

A scaler is at work inside of `scaling()`. What JMP's and MPX' loss scales multiply there is noted, and so is that a
program has made such a scale: it scales on its own.
"""

import contextlib
import contextvars
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from .._compat import is_differentiated, producer_of
from .._traits import traits_of


class MissingScalerWarning(UserWarning):
    """A function that computes in float16 is differentiated without a loss scaler.

    Small gradients become zero in float16. `jaxamp.dynamic_scale_value_and_grad` scales the loss; `bfloat16` needs no
    scaling. It is raised once for each `amp`, where `jax.grad` and the like are right around it. A program that makes a
    loss scale of `jaxamp.jmp` or `jaxamp.mpx` is left alone. If you scale in your own way, silence it:

    >>> import warnings, jaxamp
    >>> warnings.filterwarnings("ignore", category=jaxamp.MissingScalerWarning)
    """


class _Noted:
    """What loss scales have multiplied while a scaler was at work."""

    def __init__(self) -> None:
        self.results: list[Any] = []
        self.scales: list[Any] = []


_AT_WORK: contextvars.ContextVar[_Noted | None] = contextvars.ContextVar("jaxamp_scaling", default=None)
_HAS_OWN_SCALES: list[bool] = []


@contextlib.contextmanager
def scaling() -> Iterator[None]:
    """A scaler is at work on what is traced inside."""
    token = _AT_WORK.set(_Noted())
    try:
        yield
    finally:
        _AT_WORK.reset(token)


def note_own_scale() -> None:
    """A program has made a loss scale that it applies itself."""
    _HAS_OWN_SCALES[:] = [True]


def note_scaled(results: Any, scale: Any) -> None:
    """A loss scale has multiplied `results` by `scale`."""
    noted = _AT_WORK.get()
    if noted is not None:
        noted.results += jax.tree.leaves(results)
        noted.scales.append(scale)


def is_scaled_already(loss: Any, scale: Any) -> bool:
    """Whether a loss is a product with this scale, or with one of those that were noted.

    A product can be seen inside of `jit`, where it is an equation. Outside, only what a loss scale returned is known.
    """
    noted = _AT_WORK.get() or _Noted()
    if any(loss is x for x in noted.results):
        return True
    return any(_has_factor(loss, x) for x in (scale, *noted.scales) if isinstance(x, jax.core.Tracer))


_LONGEST_PRODUCT = 20


def _has_factor(x: Any, factor: Any) -> bool:
    """Whether a value that is being traced is a product, and this is one of its factors."""
    seen = [x]
    for _ in range(_LONGEST_PRODUCT):
        if not seen:
            return False
        x = seen.pop()
        if x is factor:
            return True
        made = producer_of(x)
        if made is None:
            continue
        primitive, operands = made
        if primitive.name == "mul":
            seen += operands
        elif primitive.name == "div" or traits_of(primitive).passes_on or traits_of(primitive).moves:
            seen += operands[:1]
    return False


def warn_without_scaler(name: str, arrays: list[Any]) -> bool:
    """Warn if a call in float16 is being differentiated and no scaler is at work. Whether it did."""
    if _AT_WORK.get() is not None or _HAS_OWN_SCALES or not any(map(is_differentiated, arrays)):
        return False
    warnings.warn(
        f"{name} is differentiated in float16 without a loss scaler; expected one, because small gradients become zero "
        "in float16. Write jaxamp.dynamic_scale_value_and_grad in the place of jax.value_and_grad, or "
        "compute_dtype=jnp.bfloat16. If you scale the loss yourself, write "
        "warnings.filterwarnings('ignore', category=jaxamp.MissingScalerWarning).",
        MissingScalerWarning,
        stacklevel=3,
    )
    return True
