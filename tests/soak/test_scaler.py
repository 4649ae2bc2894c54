"""The scaler beside an independent model of its rule, in plain Python: every field, after every adversarial step."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxamp
from jaxamp import DynamicScalerState

pytestmark = pytest.mark.soak
STEPS, SEED = 100_000, 20_000
ENTRIES = 4  # of the gradient
F32 = np.float32
TINY, LARGEST = (float(x) for x in (np.finfo(F32).tiny, np.finfo(F32).max))

# Each scheme as it is, and one that moves hundreds of times as often.
SCHEMES = {
    "default": DynamicScalerState(),
    "default, brisk": DynamicScalerState(patience=np.int32(5)),
    "torch": DynamicScalerState.torch(),
    "torch, brisk": DynamicScalerState.torch(growth_interval=3),
    "megatron": DynamicScalerState.megatron(),
    "megatron, brisk": DynamicScalerState.megatron(growth_interval=4, hysteresis=3),
    "deepspeed": DynamicScalerState.deepspeed(),
    "deepspeed, brisk": DynamicScalerState.deepspeed(loss_scale_window=6),
    "micro-batches": DynamicScalerState(
        patience=2, accumulate=3, adjust_factor=3.0, backoff_factor=0.3, scaler=7.0, min_scaler=0.01, max_scaler=1e4
    ),
    "no patience": DynamicScalerState(patience=0, adjust_factor=1.5, hysteresis=2, max_scaler=1e6),
    "outside of its bounds": DynamicScalerState(patience=3, scaler=2.0**30, min_scaler=2.0**3, max_scaler=2.0**20),
    "static": DynamicScalerState.static(64.0),
}
REDOS = (0, 3, 1000)


# -- the adversary


class Attack(NamedTuple):
    """What the adversary does in each step. Gradients overflow above `limit`, or above `ratio` times the scale."""

    limit: np.ndarray
    ratio: np.ndarray
    relative: np.ndarray  # which of the two
    bad: np.ndarray  # what an overflow looks like
    place: np.ndarray  # the entry that overflows
    slope: np.ndarray  # the true gradient: powers of two, so that scaling and unscaling are exact
    loss: np.ndarray  # may be infinite or NaN itself, and then no smaller scale is tried


def attack(rng: np.random.Generator, steps: int, patience: int) -> Attack:
    """Stretches of steps of one kind each. Those that are fine may be long enough for the scale to rise many times."""
    limit, ratio, relative = np.zeros(steps), np.zeros(steps), np.zeros(steps, bool)
    start = 0
    while start < steps:
        kind = rng.choice(["fine", "never", "random", "fixed", "near", "floor", "ceiling"], p=[0.4, *[0.1] * 6])
        longest = rng.choice([12, 40, 3 * (patience + 1) // 2] if kind == "fine" else [4, 12])
        part = slice(start, start + rng.integers(1, longest + 1))
        start, n = part.stop, len(limit[part])
        match kind:
            case "fine":
                limit[part] = np.inf
            case "never":  # NaN at every scale
                limit[part] = -1.0
            case "random":
                limit[part] = 2.0 ** rng.uniform(-20, 40, n)
            case "fixed":
                limit[part] = 2.0 ** rng.integers(-14, 25)
            case "near":  # the scale itself, its neighbours, and those of the scales that are tried next
                ratio[part] = 2.0 ** rng.integers(-4, 2, n) * rng.choice([1 - 2.0**-24, 1.0, 1 + 2.0**-23], n)
                relative[part] = True
            case "floor":  # the smallest scales there are
                limit[part] = 2.0 ** rng.uniform(-126, -100)
            case "ceiling":
                limit[part] = 2.0 ** rng.uniform(100, 127.9)
    return Attack(
        limit.astype(F32),
        ratio.astype(F32),
        relative,
        rng.choice([np.nan, np.inf, -np.inf], steps).astype(F32),
        rng.integers(0, ENTRIES, steps).astype(np.int32),
        np.ldexp(F32(1), rng.integers(-40, 1, (steps, ENTRIES))).astype(F32),
        np.where(rng.random(steps) < 0.02, rng.choice([np.nan, np.inf], steps), rng.normal(size=steps)).astype(F32),
    )


# -- ours


@jax.custom_vjp
def loss(w, limit, bad, place, slope, value):
    return value + 0.0 * w.sum()


def forward(w, limit, bad, place, slope, value):
    return value.astype(w.dtype), (limit, bad, place, slope)


def backward(kept, cotangent):
    limit, bad, place, slope = kept
    scale = cotangent.astype(jnp.float32)
    spoilt = (jnp.arange(ENTRIES) == place) & ~(scale <= limit)
    return (jnp.where(spoilt, bad, scale * slope), *[None] * 5)


loss.defvjp(forward, backward)


def make_run(redo_on_nan):
    differentiate = jaxamp.dynamic_scale_value_and_grad(loss, redo_on_nan=redo_on_nan)

    def step(state, now):
        limit = jnp.where(now.relative, jnp.maximum(state.scaler * now.ratio, TINY), now.limit)
        args = jnp.ones(ENTRIES), limit, now.bad, now.place, now.slope, now.loss
        state, (value, grads) = differentiate(*args, dynamic_scaler_state=state)
        return state, (state, value, grads)

    return jax.jit(lambda state, attack: jax.lax.scan(step, state, attack)[1])


# -- the model


class Model:
    """The rule as it is documented. Scales are float32, and so is each product."""

    def __init__(self, state: DynamicScalerState):
        self.fields = {name: None if x is None else np.asarray(x).item() for name, x in state._asdict().items()}
        self.__dict__.update(self.fields)
        self.hits = dict.fromkeys(("skipped", "redone", "raised", "lowered", "at_the_floor", "at_the_ceiling"), 0)

    def __getitem__(self, name):
        return self.__dict__[name]

    def lowered(self, scale):
        down = (
            F32(scale) / F32(self.adjust_factor)
            if self.backoff_factor is None
            else F32(scale) * F32(self.backoff_factor)
        )
        return min(scale, max(float(down), self.min_scaler, TINY))

    def raised(self, scale):
        with np.errstate(over="ignore"):
            up = float(F32(scale) * F32(self.adjust_factor))
        return scale if up == np.inf else max(scale, min(up, self.max_scaler))

    def step(self, limit, slope, loss_is_finite, redo_on_nan):
        """The scale that the last gradients were made with, and whether they were finite."""
        scale, retries = self.scaler, 0
        while not scale <= limit and loss_is_finite and retries < redo_on_nan and self.lowered(scale) < scale:
            scale, retries = self.lowered(scale), retries + 1
        self.total_redos += retries
        self.total_resets += retries
        self.hits["redone"] += retries
        if retries:
            self.count = 0
        finite = scale <= limit
        self._accept(scale, slope) if finite else self._skip()
        return scale, finite

    def _accept(self, scale, slope):
        self.scaler, self.skipped = scale, 0
        self.underflow = sum(scale * x < 2.0**-14 for x in slope) / ENTRIES
        self.micro += 1
        if self.micro < self.accumulate:
            return
        self.micro = 0
        if self.count < self.patience:
            self.count += 1
            return
        self.scaler = self.raised(scale)
        self.count = self.overflows = 0
        self.hits["raised" if self.scaler > scale else "at_the_ceiling"] += 1

    def _skip(self):
        self.skipped += 1
        self.total_resets += 1
        self.count = 0
        self.hits["skipped"] += 1
        self.overflows = min(self.overflows + 1, self.hysteresis)
        if self.overflows == self.hysteresis:
            scale, self.scaler = self.scaler, self.lowered(self.scaler)
            self.hits["lowered" if self.scaler < scale else "at_the_floor"] += 1


def first_difference(state, attack, redo_on_nan, states, values, grads):
    """A sentence on the first step where ours is not the model's, or None; and the model after it."""
    model = Model(state)
    limits = np.where(attack.relative, 0, attack.limit).tolist()
    ratios, slopes, losses = (x.tolist() for x in (attack.ratio, attack.slope, np.isfinite(attack.loss)))
    found = {name: np.asarray(x).tolist() for name, x in states._asdict().items() if x is not None}
    for i in range(len(limits)):
        limit = max(float(F32(model.scaler) * F32(ratios[i])), TINY) if attack.relative[i] else limits[i]
        before = model.scaler
        scale, finite = model.step(limit, slopes[i], losses[i], redo_on_nan)
        for name, column in found.items():
            if column[i] != model[name]:
                return (
                    f"step {i}: {name} is {column[i]!r}; the model has {model[name]!r}. Gradients overflowed above "
                    f"{limit!r}, and the scale before the step was {before!r}."
                ), model
        # Rounded once to scale and twice to unscale; what would be subnormal in between is flushed to zero.
        if finite and any(abs(g - x) > 2**-22 * x for g, x in zip(grads[i].tolist(), slopes[i]) if scale * x >= TINY):
            return f"step {i}: the gradient is {grads[i]}; the true one is {slopes[i]}", model
        if not finite and np.isfinite(grads[i]).all():
            return f"step {i}: the gradient is {grads[i]}; it should be returned as it is, not finite", model
    if values.tobytes() != attack.loss.tobytes():
        return "the loss is not returned as it is", model
    return None, model


@pytest.fixture(scope="module")
def runs():
    return {redo: make_run(redo) for redo in REDOS}


@pytest.mark.parametrize("redo_on_nan", REDOS)
@pytest.mark.parametrize("name", SCHEMES)
def test_the_scaler_follows_its_rule(name, redo_on_nan, runs, figures):
    state = SCHEMES[name]
    seed = (SEED, list(SCHEMES).index(name), redo_on_nan)
    planned = attack(np.random.default_rng(seed), STEPS, int(state.patience))
    states, values, grads = jax.tree.map(np.asarray, runs[redo_on_nan](state.as_arrays(), planned))
    difference, model = first_difference(state.as_arrays(), planned, redo_on_nan, states, values, grads)
    assert difference is None, f"{name}, redo_on_nan={redo_on_nan}, seed {seed}: {difference}"
    moves = 1000 if "brisk" in name else 10  # so that the attack is known to be one
    for hit in ("skipped", *["raised", "lowered", *["redone"] * bool(redo_on_nan)] * (name != "static")):
        assert model.hits[hit] >= moves, model.hits
    figures(f"{name}, redo_on_nan={redo_on_nan}", steps=STEPS, **model.hits)
