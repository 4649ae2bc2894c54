"""The update rules of the optimizers: how moments advance, and how far a weight moves.

A rule takes the gradient, the moments and the scalars of the step, all float32, and returns the next moments and the
length `u` of the step. The weight then becomes `w * shrink - u`, with `shrink = 1 - learning_rate * weight_decay` if
the decay is decoupled; otherwise `weight_decay * w` is added to the gradient. Everything that depends only on the
step's number is computed once, in `scalars`.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

Scalars = dict[str, Any]
Moments = tuple[jax.Array, ...]


class UpdateRule(NamedTuple):
    """The arithmetic of one optimizer.

    Attributes:
        name: The public function that uses it, for error messages.
        decoupled: Whether weight decay is separate from the gradient.
        moments: The names of the moments, given the hyperparameters: none, `("mu",)` or `("mu", "nu")`.
        scalars: The scalars of a step, given the hyperparameters and the step's number, counted from one.
        advance: The next moments and the length of the step, given gradient, moments and scalars.
    """

    name: str
    decoupled: bool
    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scalars: Callable[[Mapping[str, Any], jax.Array], Scalars]
    advance: Callable[[jax.Array, Moments, Scalars], tuple[Moments, jax.Array]]


def as_float32(x: Any) -> Any:
    return np.float32(x) if isinstance(x, int | float) else jnp.asarray(x, jnp.float32)


def is_zero(x: Any) -> bool:
    """Whether a hyperparameter is known to be zero, so that the product can be left out of the program."""
    return x is None or (isinstance(x, int | float) and x == 0)


# -- Adam


def _adam_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    t = count.astype(jnp.float32)
    bias1, bias2 = (1.0 - as_float32(h[name]) ** t for name in ("b1", "b2"))
    return {
        "b1": as_float32(h["b1"]),
        "b2": as_float32(h["b2"]),
        "new1": as_float32(1.0 - h["b1"]),
        "new2": as_float32(1.0 - h["b2"]),
        "eps": as_float32(h["eps"]),
        "length": as_float32(h["learning_rate"]) / bias1,
        "root": 1.0 / jnp.sqrt(bias2),
    }


def _adam(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    mu, nu = moments
    mu = s["b1"] * mu + s["new1"] * g
    nu = s["b2"] * nu + s["new2"] * (g * g)
    return (mu, nu), s["length"] * mu / (jnp.sqrt(nu) * s["root"] + s["eps"])


ADAM = UpdateRule("flash_adam", False, lambda h: ("mu", "nu"), _adam_scalars, _adam)
ADAMW = ADAM._replace(name="flash_adamw", decoupled=True)


# -- SGD


def _sgd_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    momentum = 0.0 if h["momentum"] is None else h["momentum"]
    return {
        "length": as_float32(h["learning_rate"]),
        "momentum": as_float32(momentum),
        "new": as_float32(1.0 - h["dampening"]),
        "nesterov": h["nesterov"],
    }


def _sgd(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    if not moments:
        return (), s["length"] * g
    mu = s["momentum"] * moments[0] + s["new"] * g
    return (mu,), s["length"] * (g + s["momentum"] * mu if s["nesterov"] else mu)


def _sgd_moments(h: Mapping[str, Any]) -> tuple[str, ...]:
    return () if is_zero(h["momentum"]) else ("mu",)


SGD = UpdateRule("flash_sgd", False, _sgd_moments, _sgd_scalars, _sgd)
SGDW = SGD._replace(name="flash_sgdw", decoupled=True)


# -- Lion


def _lion_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    return {
        "new1": as_float32(1.0 - h["b1"]),
        "new2": as_float32(1.0 - h["b2"]),
        "length": as_float32(h["learning_rate"]),
    }


def _lion(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    (mu,) = moments
    return (mu + s["new2"] * (g - mu),), s["length"] * jnp.sign(mu + s["new1"] * (g - mu))


LION = UpdateRule("flash_lion", True, lambda h: ("mu",), _lion_scalars, _lion)


def step_scalars(rule: UpdateRule, hyper: Mapping[str, Any], count: jax.Array) -> tuple[Scalars, Any]:
    """The scalars of a step, and its weight decay or None; a decoupled decay includes the learning rate."""
    decay = hyper["weight_decay"]
    if is_zero(decay):
        return rule.scalars(hyper, count), None
    decay = as_float32(decay)
    return rule.scalars(hyper, count), as_float32(hyper["learning_rate"]) * decay if rule.decoupled else decay
