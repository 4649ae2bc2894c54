"""The optimizers, each as what happens to one number: how moments advance, and how far the weight moves.

A rule takes the gradient, the moments and the scalars of the step, all float32, and returns the moments of the next
step and the length `u` of this one. The weight then is `w * shrink - u`, where `shrink` is `1 - learning_rate *
weight_decay` if the decay is decoupled; else `weight_decay * w` is a part of the gradient. All that depends on the
step's number alone is computed once, in `scalars`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Scalars = dict[str, Any]
Moments = tuple[jax.Array, ...]


class Rule(NamedTuple):
    """An optimizer.

    Attributes:
        name: The function that makes it, for error messages.
        decoupled: Whether weight decay is apart from the gradient.
        moments: Which moments there are, given the hyperparameters: none, `("mu",)` or `("mu", "nu")`.
        scalars: What a step needs besides arrays, from hyperparameters and the number of the step, counted from one.
        advance: Gradient, moments and scalars to the next moments and the length of the step.
    """

    name: str
    decoupled: bool
    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scalars: Callable[[Mapping[str, Any], jax.Array], Scalars]
    advance: Callable[[jax.Array, Moments, Scalars], tuple[Moments, jax.Array]]


def scalar(x: Any) -> Any:
    return np.float32(x) if isinstance(x, int | float) else jnp.asarray(x, jnp.float32)


def is_zero(x: Any) -> bool:
    """Whether a hyperparameter is known to be zero, so that what it multiplies can be left out."""
    return x is None or (isinstance(x, int | float) and x == 0)


# -- Adam


def _adam_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    t = count.astype(jnp.float32)
    bias1, bias2 = (1.0 - scalar(h[name]) ** t for name in ("b1", "b2"))
    return {
        "b1": scalar(h["b1"]),
        "b2": scalar(h["b2"]),
        "new1": scalar(1.0 - h["b1"]),
        "new2": scalar(1.0 - h["b2"]),
        "eps": scalar(h["eps"]),
        "length": scalar(h["learning_rate"]) / bias1,
        "root": 1.0 / jnp.sqrt(bias2),
    }


def _adam(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    mu, nu = moments
    mu = s["b1"] * mu + s["new1"] * g
    nu = s["b2"] * nu + s["new2"] * (g * g)
    return (mu, nu), s["length"] * mu / (jnp.sqrt(nu) * s["root"] + s["eps"])


ADAM = Rule("flash_adam", False, lambda h: ("mu", "nu"), _adam_scalars, _adam)
ADAMW = ADAM._replace(name="flash_adamw", decoupled=True)


# -- SGD


def _sgd_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    momentum = 0.0 if h["momentum"] is None else h["momentum"]
    return {
        "length": scalar(h["learning_rate"]),
        "momentum": scalar(momentum),
        "new": scalar(1.0 - h["dampening"]),
        "nesterov": h["nesterov"],
    }


def _sgd(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    if not moments:
        return (), s["length"] * g
    mu = s["momentum"] * moments[0] + s["new"] * g
    return (mu,), s["length"] * (g + s["momentum"] * mu if s["nesterov"] else mu)


def _sgd_moments(h: Mapping[str, Any]) -> tuple[str, ...]:
    return () if is_zero(h["momentum"]) else ("mu",)


SGD = Rule("flash_sgd", False, _sgd_moments, _sgd_scalars, _sgd)
SGDW = SGD._replace(name="flash_sgdw", decoupled=True)


# -- Lion


def _lion_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    return {
        "new1": scalar(1.0 - h["b1"]),
        "new2": scalar(1.0 - h["b2"]),
        "length": scalar(h["learning_rate"]),
    }


def _lion(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    (mu,) = moments
    return (mu + s["new2"] * (g - mu),), s["length"] * jnp.sign(mu + s["new1"] * (g - mu))


LION = Rule("flash_lion", True, lambda h: ("mu",), _lion_scalars, _lion)


def scalars_of(rule: Rule, hyper: Mapping[str, Any], count: jax.Array) -> tuple[Scalars, Any]:
    """The scalars of a step and its decay, if any: of the weight, times the learning rate, or of the gradient."""
    decay = hyper["weight_decay"]
    if is_zero(decay):
        return rule.scalars(hyper, count), None
    decay = scalar(decay)
    return rule.scalars(hyper, count), scalar(hyper["learning_rate"]) * decay if rule.decoupled else decay
