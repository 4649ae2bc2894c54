"""Types and signatures of functions that take a state along with their arguments."""

import functools
import inspect
from collections.abc import Callable, Collection
from typing import Any, Protocol, TypeVar

from .._errors import nearest
from .state import DynamicScalerState

OF_JAX = "argnums", "holomorphic", "allow_int"  # what `jax.value_and_grad` takes

First = TypeVar("First", contravariant=True)
Out = TypeVar("Out", covariant=True)


class ScaledGrad(Protocol[First, Out]):
    """A differentiated loss: its first argument is differentiated, and gradients have its type."""

    def __call__(
        self, first: First, /, *args: Any, dynamic_scaler_state: DynamicScalerState, **kwargs: Any
    ) -> tuple[DynamicScalerState, Out]:
        """The scaler's next state, and what the loss gives."""


class ScaledFunction(Protocol[Out]):
    """A function that takes a scaler's state and returns the next one with its results."""

    def __call__(
        self, *args: Any, dynamic_scaler_state: DynamicScalerState, **kwargs: Any
    ) -> tuple[DynamicScalerState, Out]:
        """The scaler's next state, and the results."""


def check_names(name: str, given: Collection[str], *own: str) -> None:
    """Refuse options that neither the function `name` has nor `jax.value_and_grad`."""
    known = (*own, *OF_JAX)
    for option in given:
        if option not in known:
            raise TypeError(
                f"{name} got the option {option!r}; expected some of {', '.join(known)}. Options of amp go to amp: "
                f"write {name}(jaxamp.amp(loss_fn, compute_dtype=...)).{nearest(option, known)}"
            )


def wraps_with_state(fun: Callable[..., Any], name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Give a wrapper the name of `fun`, and its signature plus a keyword for a state.

    `equinox.filter_jit` binds arguments to the signature.
    """

    def wrap(wrapper: Callable[..., Any]) -> Callable[..., Any]:
        functools.update_wrapper(wrapper, fun, updated=())
        del wrapper.__wrapped__  # type: ignore[attr-defined]  # it would keep the arrays of an Equinox module alive
        try:
            signature = inspect.signature(fun)
        except (TypeError, ValueError):  # some builtins have none
            return wrapper
        if getattr(fun, "_is_scaled_by_jaxamp", False):
            raise TypeError(
                f"{wrapper.__name__} has a loss scaler already; expected a loss without one, because it would be "
                "scaled twice. Pass the function itself, as in jaxamp.dynamic_scale_grad(jaxamp.amp(loss_fn))."
            )
        wrapper._is_scaled_by_jaxamp = name == "dynamic_scaler_state"  # type: ignore[attr-defined]
        if name in signature.parameters:
            raise TypeError(
                f"{wrapper.__name__} already takes an argument {name!r}; expected a function without it, because "
                "jaxamp adds it. Rename that argument."
            )
        parameters = list(signature.parameters.values())
        extra = inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None)
        at = len(parameters) - any(p.kind is p.VAR_KEYWORD for p in parameters)
        wrapper.__signature__ = signature.replace(  # type: ignore[attr-defined]
            parameters=[*parameters[:at], extra, *parameters[at:]], return_annotation=inspect.Signature.empty
        )
        return wrapper

    return wrap
