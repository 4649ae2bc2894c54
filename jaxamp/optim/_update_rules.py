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

LARGEST = np.finfo(np.float32).max
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
        bound: The moments as they are stored. Infinite ones are stored as the largest number there is.
    """

    name: str
    decoupled: bool
    moments: Callable[[Mapping[str, Any]], tuple[str, ...]]
    scalars: Callable[[Mapping[str, Any], jax.Array], Scalars]
    advance: Callable[[jax.Array, Moments, Scalars], tuple[Moments, jax.Array]]
    bound: Callable[[Moments], Moments] = lambda moments: moments


def as_float32(x: Any) -> Any:
    return np.float32(x) if isinstance(x, int | float) else jnp.asarray(x, jnp.float32)


def bounded(x: jax.Array, largest: Any, *, unless: jax.Array) -> jax.Array:
    """`x` within `[-largest, largest]`, or NaN where the gradient `unless` is not finite."""
    return jnp.clip(x, -largest, largest) + 0.0 * unless


def is_zero(x: Any) -> bool:
    """Whether a hyperparameter is known to be zero, so that the product can be left out of the program."""
    return x is None or (isinstance(x, int | float) and x == 0)


# -- Adam


def _adam_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    t = count.astype(jnp.float32)
    bias1, bias2 = (1.0 - as_float32(h[name]) ** t for name in ("b1", "b2"))
    root = jnp.sqrt(bias2)  # the step is `mu / bias1 / (sqrt(nu / bias2) + eps)`, in fewer operations
    return {
        "b1": as_float32(h["b1"]),
        "b2": as_float32(h["b2"]),
        "new1": as_float32(1.0 - h["b1"]),
        "new2": as_float32(1.0 - h["b2"]),
        "eps": as_float32(h["eps"]) * root,
        "length": as_float32(h["learning_rate"]) * root / bias1,
    }


def _adam(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    mu, nu = moments
    mu = s["b1"] * mu + s["new1"] * g
    nu = s["b2"] * nu + s["new2"] * (g * g)
    return (mu, nu), s["length"] * mu / (jnp.sqrt(nu) + s["eps"])


def _adam_bound(moments: Moments) -> Moments:
    """Where the square of a gradient overflows, the weight stays, as with Optax, and then hardly moves."""
    mu, nu = moments
    return jnp.where(nu <= LARGEST, mu, 0.0), nu


ADAM = UpdateRule("flash_adam", False, lambda h: ("mu", "nu"), _adam_scalars, _adam, _adam_bound)
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
    mu = bounded(s["momentum"] * moments[0] + s["new"] * g, LARGEST, unless=g)
    return (mu,), s["length"] * (bounded(g + s["momentum"] * mu, LARGEST, unless=g) if s["nesterov"] else mu)


def _sgd_moments(h: Mapping[str, Any]) -> tuple[str, ...]:
    return () if is_zero(h["momentum"]) else ("mu",)


SGD = UpdateRule("flash_sgd", False, _sgd_moments, _sgd_scalars, _sgd)
SGDW = SGD._replace(name="flash_sgdw", decoupled=True)


# -- Lion


def _lion_scalars(h: Mapping[str, Any], count: jax.Array) -> Scalars:
    return {
        "b1": as_float32(h["b1"]),
        "b2": as_float32(h["b2"]),
        "new1": as_float32(1.0 - h["b1"]),
        "new2": as_float32(1.0 - h["b2"]),
        "length": as_float32(h["learning_rate"]),
    }


def _lion(g: jax.Array, moments: Moments, s: Scalars) -> tuple[Moments, jax.Array]:
    (mu,) = moments
    return (s["b2"] * mu + s["new2"] * g,), s["length"] * jnp.sign(s["b1"] * mu + s["new1"] * g)


LION = UpdateRule("flash_lion", True, lambda h: ("mu",), _lion_scalars, _lion)


def step_scalars(rule: UpdateRule, hyper: Mapping[str, Any], count: jax.Array) -> tuple[Scalars, Any]:
    """The scalars of a step, and its weight decay or None; a decoupled decay includes the learning rate."""
    decay = hyper["weight_decay"]
    if is_zero(decay):
        return rule.scalars(hyper, count), None
    decay = as_float32(decay)
    return rule.scalars(hyper, count), as_float32(hyper["learning_rate"]) * decay if rule.decoupled else decay
