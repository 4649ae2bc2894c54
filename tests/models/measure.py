"""What is measured of a model: in float32, under `amp`, and in its library's own low precision."""

import functools
import math
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jaxamp

from .registry import Entry, Loss, Model

STEPS = 20
SCALE = 2.0**10  # the dynamic scaler's first


class Plain(NamedTuple):
    """A model in float32, the yardstick of both dtypes."""

    model: Model
    step: Callable[..., Any]
    first: "Step"
    grads: Any  # what gradients are compared with: the first step's, or those in float64
    losses: list[float]
    state: Any  # after the last step


class Figures(NamedTuple):
    """One model in one dtype. Errors are norms of differences, relative to the gradient in float32 or float64."""

    share: float  # of the matmuls' FLOPs that run low, backward pass included
    notes: tuple[str, ...]  # what the report could not see
    kept: float  # bytes for the backward pass, over float32's
    error: float  # of the gradient
    response: float  # the error of float32's own gradient when parameters, state and batch are rounded to the dtype
    own: float | None  # the error of the library's own mode for this dtype
    drift: float  # of the loss after the last step, relative to the fall of float32's
    losses: list[float]
    states: tuple[Any, Any, Any]  # before the first step, after it in float32, after it under amp
    counters: tuple[Any, Any]  # integer state after the last step, in float32 and under amp
    finite: bool


class Step(NamedTuple):
    """What a training step gives."""

    loss: Any
    grads: Any
    params: Any
    state: Any
    rest: Any  # the optimizer's state and the scaler


def make_step(loss: Loss, rate: float, scaled: bool) -> tuple[Callable[..., Step], Callable[[Any], Any]]:
    """A jitted training step, and what makes its first `rest`. float16 runs with the dynamic loss scaler."""
    tx = optax.adam(rate)
    differentiate = jaxamp.dynamic_scale_value_and_grad(loss, has_aux=True)

    def step(params: Any, state: Any, rest: Any, batch: Any) -> Step:
        opt, scaler = rest
        if scaled:
            scaler, ((value, new_state), grads) = differentiate(params, state, batch, dynamic_scaler_state=scaler)
        else:
            (value, new_state), grads = jax.value_and_grad(loss, has_aux=True)(params, state, batch)
        updates, opt = tx.update(grads, opt, params)
        return Step(value, grads, optax.apply_updates(params, updates), new_state, (opt, scaler))

    return jax.jit(step), lambda params: (tx.init(params), jaxamp.DynamicScalerState(scaler=SCALE).as_arrays())


def train(step: Callable[..., Step], begin: Callable[[Any], Any], model: Model) -> tuple[Step, list[float], Any]:
    """The first step, the losses, and the last state."""
    params, state, rest = model.params, model.state, begin(model.params)
    first, losses = None, []
    for _ in range(STEPS):
        done = step(params, state, rest, model.batch)
        first = first or done
        losses.append(float(done.loss))
        params, state, rest = done.params, done.state, done.rest
    return first, losses, state


def plain(entry: Entry) -> Plain:
    """Build and train a model in float32."""
    model = entry.build()
    step, begin = make_step(model.under(lambda fn: fn), model.rate, scaled=False)
    first, losses, state = train(step, begin, model)
    again = lambda params, state, batch: step(params, state, begin(params), batch)
    return Plain(model, again, first, in_float64(model) if model.oracle else first.grads, losses, state)


def in_float64(model: Model) -> Any:
    """The gradient of the same loss on float64 arrays."""

    def wide(x: Any) -> Any:
        return np.asarray(x, np.float64) if eqx.is_inexact_array(x) else x

    with jax.enable_x64(True):
        args = jax.tree.map(wide, (model.params, model.state, model.batch))
        return jax.tree.map(np.asarray, jax.jit(jax.grad(model.loss, has_aux=True))(*args)[0])


def measure(base: Plain, low: Any) -> Figures:
    model = base.model
    scaled = low == jnp.float16
    amp = functools.partial(jaxamp.amp, compute_dtype=low)
    report = jaxamp.amp_report(model.loss, compute_dtype=low)(model.params, model.state, model.batch)
    first, losses, state = train(*make_step(model.under(amp), model.rate, scaled), model)
    rounded = base.step(*round_to((model.params, model.state, model.batch), low))
    own, loss = None, model.own and model.own(low)
    if loss is not None:
        step, begin = make_step(loss, model.rate, scaled)
        own = distance(step(model.params, model.state, begin(model.params), model.batch).grads, base.grads)
    fall = base.losses[0] - base.losses[-1]
    return Figures(
        share=report.low_share,
        notes=report.notes,
        kept=report.kept.after / report.kept.before if report.kept else math.nan,
        error=distance(first.grads, base.grads),
        response=distance(rounded.grads, base.grads),
        own=own,
        drift=abs(losses[-1] - base.losses[-1]) / abs(fall),
        losses=losses,
        states=(model.state, base.first.state, first.state),
        counters=(integers(base.state), integers(state)),
        finite=bool(np.all(np.isfinite(losses))) and bool(jaxamp.all_finite(first.grads)),
    )


def round_to(tree: Any, low: Any) -> Any:
    """The same numbers, rounded to the dtype and back."""

    def rounded(x: Any) -> Any:
        return x.astype(low).astype(x.dtype) if eqx.is_inexact_array(x) else x

    return jax.tree.map(rounded, tree)


def distance(found: Any, expected: Any) -> float:
    """The norm of the difference of two trees, relative to the norm of the second."""
    pairs = list(zip(floats(found), floats(expected), strict=True))
    difference = sum(np.sum((a - b) ** 2) for a, b in pairs)
    return float(np.sqrt(difference / sum(np.sum(b**2) for _, b in pairs)))


def floats(tree: Any) -> list[np.ndarray]:
    return [np.asarray(x, np.float64) for x in jax.tree.leaves(tree) if eqx.is_inexact_array_like(x)]


def integers(tree: Any) -> list[np.ndarray]:
    """Counters and keys."""
    leaves = [x for x in jax.tree.leaves(tree) if eqx.is_array(x) and not eqx.is_inexact_array(x)]
    is_key = lambda x: jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
    return [np.asarray(jax.random.key_data(x) if is_key(x) else x) for x in leaves]


def trace_ratio(model: Model, repeats: int = 3, seconds: float = 10.0) -> float:
    """The time to trace and lower the gradient under amp, over float32's; the best of several turns."""
    end = time.perf_counter() + seconds

    def once(transform: Callable[[Any], Any]) -> float:
        loss = model.under(lambda fn: transform(_fresh(fn)))
        start = time.perf_counter()
        jax.jit(jax.value_and_grad(loss, has_aux=True)).lower(model.params, model.state, model.batch)
        return time.perf_counter() - start

    amp = functools.partial(jaxamp.amp, compute_dtype=jnp.bfloat16)
    times = [(once(lambda fn: fn), once(amp)) for turn in range(repeats) if turn == 0 or time.perf_counter() < end]
    wide, low = (min(column) for column in zip(*times, strict=True))
    return low / wide


def _fresh(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A new function object that is in no cache."""
    return lambda *args, **kwargs: fn(*args, **kwargs)
