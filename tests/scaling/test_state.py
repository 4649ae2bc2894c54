"""The rule of the scaler's state, against other scalers' rules and against anything that may happen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import raises
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxamp
from jaxamp import DynamicScalerState

# -- the rules of others, as their sources have them, in Python floats


def torch_rule(scale, tracker, finite, interval):
    """`torch.amp.GradScaler`."""
    if not finite:
        return scale * 0.5, 0
    if tracker + 1 == interval:
        return (scale * 2.0 if scale * 2.0 < 2.0**128 else scale), 0
    return scale, tracker + 1


def run_torch(pattern, scale, interval):
    tracker, skipped = 0, 0
    for finite in pattern:
        scale, tracker = torch_rule(scale, tracker, finite, interval)
        skipped = 0 if finite else skipped + 1
        yield scale, tracker, skipped


def run_deepspeed(pattern, scale, window, hysteresis, min_scale):
    """`deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler`, which counts iterations, not steps since an event."""
    last_overflow, left, skipped = -1, hysteresis, 0
    for iteration, finite in enumerate(pattern):
        if not finite:
            if hysteresis == 1 or left == 1:
                scale = max(scale / 2, min_scale)
            else:
                left -= 1
            last_overflow = iteration
        elif (iteration - last_overflow) % window == 0:
            left = hysteresis
            scale *= 2
        skipped = 0 if finite else skipped + 1
        yield scale, (iteration - last_overflow) % window if finite else 0, skipped


def run_megatron(pattern, scale, interval, hysteresis, min_scale):
    """`megatron.core.optimizer.grad_scaler.DynamicGradScaler`."""
    tracker, left, skipped = 0, hysteresis, 0
    for finite in pattern:
        if not finite:
            tracker, left = 0, left - 1
            if left <= 0:
                scale = max(scale * 0.5, min_scale)
        else:
            tracker += 1
            if tracker == interval:
                tracker, left, scale = 0, hysteresis, scale * 2.0
        skipped = 0 if finite else skipped + 1
        yield scale, tracker, skipped


def run_upstream(pattern, scale, patience, factor):
    """jaxamp 0.0.4. Its scale has no bounds; ours has, and they are out of reach here."""
    count, skipped = 0, 0
    for finite in pattern:
        if not finite:
            scale, count = scale / factor, 0
        elif count >= patience:
            scale, count = scale * factor, 0
        else:
            count += 1
        skipped = 0 if finite else skipped + 1
        yield scale, count, skipped


@jax.jit
def run_ours(state, pattern):
    def step(state, finite):
        state = state.adjust(finite)
        return state, (state.scaler, state.count, state.skipped)

    return jax.lax.scan(step, state, pattern)


def table(state, pattern):
    _, columns = run_ours(state, jnp.asarray(pattern))
    return list(zip(*(np.asarray(column).tolist() for column in columns), strict=True))


def script(seed, interval, steps=300):
    """Finite stretches of up to two intervals and a half, then up to three overflows: the scale rises and falls."""
    random, pattern = np.random.default_rng(seed), []
    while len(pattern) < steps:
        pattern += [True] * random.integers(0, int(2.5 * interval)) + [False] * random.integers(0, 4)
    return pattern[:steps]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("interval", [2, 3, 7])
def test_the_table_is_pytorchs(interval, seed):
    pattern = script(seed, interval)
    state = DynamicScalerState.torch(growth_interval=interval)
    assert table(state, pattern) == list(run_torch(pattern, 2.0**16, interval))


def test_pytorchs_scale_stops_where_float32_ends():
    pattern = [True] * 400
    assert table(DynamicScalerState.torch(growth_interval=2), pattern) == list(run_torch(pattern, 2.0**16, 2))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("window", [2, 3, 7])
@pytest.mark.parametrize("hysteresis", [1, 2, 3])
def test_the_table_is_deepspeeds(hysteresis, window, seed):
    pattern = script(seed, window)
    state = DynamicScalerState.deepspeed(loss_scale_window=window, hysteresis=hysteresis)
    ours = table(state, pattern)
    assert ours == list(run_deepspeed(pattern, 2.0**16, window, hysteresis, 1.0))
    assert len({scale for scale, *_ in ours}) > 3


def test_hysteresis_two_tolerates_the_first_overflow_after_each_raise():
    state = DynamicScalerState.deepspeed(initial_scale_power=3, loss_scale_window=2)
    pattern = [False, False, False, True, True, False, True, False]
    assert [scale for scale, *_ in table(state, pattern)] == [8, 4, 2, 2, 4, 4, 4, 2]


@pytest.mark.parametrize("seed", range(3))
def test_the_table_is_megatrons(seed):
    pattern = script(seed, 5)
    state = DynamicScalerState.megatron(growth_interval=5)
    assert table(state, pattern) == list(run_megatron(pattern, 2.0**32, 5, 2, 1.0))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("patience", "factor"), [(1, 2.0), (4, 2.0), (4, 4.0)])
def test_the_table_is_upstreams(patience, factor, seed):
    pattern = script(seed, patience, steps=100)
    state = DynamicScalerState(patience=patience, adjust_factor=factor, min_scaler=2.0**-100, max_scaler=2.0**100)
    assert table(state, pattern) == list(run_upstream(pattern, 2.0**15, patience, factor))


def test_the_defaults_are_upstreams_and_the_fields_come_in_its_order():
    state = DynamicScalerState()
    assert state._fields[:5] == ("patience", "adjust_factor", "scaler", "count", "total_resets")
    assert tuple(float(x) for x in state[:5]) == (2000, 2.0, 2**15, 0, 0)
    assert state.scaler.dtype == np.float32
    assert jaxamp.DynamicLossScaler is DynamicScalerState
    pattern = [True] * 2001 + [False]
    assert table(state, pattern)[1999:] == [(2**15, 2000, 0), (2**16, 0, 0), (2**15, 0, 1)]


# -- whatever happens


_PATTERNS = {
    "all finite": lambda i: i >= 0,
    "all bad": lambda i: i < 0,
    "alternating": lambda i: i % 2 == 0,
    "half of the time good, then bad": lambda i: i < 50_000,
    "half of the time bad, then good": lambda i: i >= 50_000,
    "bursts": lambda i: i % 1000 < 700,
    "random": lambda i: jax.random.bernoulli(jax.random.key(0), 0.6, i.shape),
}
_STATES = {
    "default": DynamicScalerState(patience=2),
    "bad bounds": DynamicScalerState(patience=1, min_scaler=float("nan")),
    "unbounded": DynamicScalerState(patience=1, min_scaler=0.0, max_scaler=3.4e38),
    "odd factors": DynamicScalerState(patience=1, adjust_factor=3.7, backoff_factor=0.13, min_scaler=0.0),
    "huge factors": DynamicScalerState(patience=1, adjust_factor=1e30, min_scaler=0.0, max_scaler=3.4e38),
    "torch": DynamicScalerState.torch(growth_interval=2),
    "megatron": DynamicScalerState.megatron(growth_interval=2),
}


@pytest.mark.parametrize("pattern", _PATTERNS)
@pytest.mark.parametrize("state", _STATES)
def test_the_scale_is_a_positive_number_for_100_000_steps(state, pattern):
    state, finite = _STATES[state], _PATTERNS[pattern](jnp.arange(100_000))
    last, (scales, counts, _) = run_ours(state.as_arrays(), finite)
    assert bool(jnp.all(jnp.isfinite(scales) & (scales > 0)))
    assert int(counts.max()) <= int(state.patience)
    assert int(last.total_resets) == int((~finite).sum())


@settings(max_examples=50, deadline=None)
@given(
    pattern=st.lists(st.booleans(), min_size=64, max_size=64),
    patience=st.integers(1, 5),
    hysteresis=st.integers(1, 3),
    accumulate=st.integers(1, 3),
    bounds=st.tuples(st.integers(-20, 15), st.integers(15, 40)),
)
def test_the_scale_stays_within_its_bounds_and_moves_only_by_the_rule(
    pattern, patience, hysteresis, accumulate, bounds
):
    low, high = (2.0**power for power in bounds)
    state = DynamicScalerState(
        patience=patience, hysteresis=hysteresis, accumulate=accumulate, min_scaler=low, max_scaler=high
    )
    rows, before = table(state.as_arrays(), pattern), 2.0**15
    for finite, (scale, count, skipped) in zip(pattern, rows, strict=True):
        assert low <= scale <= high
        assert scale in ((before, min(high, before * 2)) if finite else (before, max(low, before / 2)))
        assert (skipped == 0) == finite
        assert count == 0 or finite
        before = scale


def test_a_scale_that_begins_outside_of_the_bounds_is_not_moved_by_them():
    above = DynamicScalerState(scaler=2.0**30, patience=1)
    assert [scale for scale, *_ in table(above, [True, True, False])] == [2.0**30, 2.0**30, 2.0**29]
    below = DynamicScalerState(scaler=2.0**-20, patience=1)
    assert [scale for scale, *_ in table(below, [False, True, True])] == [2.0**-20, 2.0**-20, 2.0**-19]


def test_within_an_accumulation_window_the_scale_is_not_raised():
    state = DynamicScalerState(patience=1, accumulate=3, scaler=8.0)
    assert table(state, [True] * 6) == [(8, 0, 0), (8, 0, 0), (8, 1, 0), (8, 1, 0), (8, 1, 0), (16, 0, 0)]
    rows = table(state, [True, False, True, True, True, True, True])
    assert [scale for scale, *_ in rows] == [8, 4, 4, 4, 4, 4, 8]  # the window took up two more, then three


def test_a_static_scale_never_moves_and_still_counts():
    for state, scale in ((DynamicScalerState.static(128.0), 128), (DynamicScalerState.no_op(), 1)):
        last, (scales, *_) = run_ours(state, jnp.arange(5000) % 7 != 0)
        assert set(np.asarray(scales).tolist()) == {scale}
        assert int(last.total_resets) == 715


@pytest.mark.parametrize("kind", [lambda x: x, float, jnp.asarray, np.asarray, lambda x: np.asarray(x, np.float64)])
def test_any_kind_of_number_is_accepted_and_gives_the_same_next_state(kind):
    state = DynamicScalerState(*(None if x is None else kind(x) for x in DynamicScalerState(patience=1, hysteresis=2)))
    ours, expected = state.adjust(True), DynamicScalerState(patience=1, hysteresis=2).adjust(True)
    assert [x if x is None else (x.dtype, x.item()) for x in ours] == [
        x if x is None else (x.dtype, x.item()) for x in expected
    ]


def test_the_default_state_is_traced_once():
    traces = []

    @jax.jit
    def step(state):
        traces.append(state)
        return state.adjust(True)

    for start in (DynamicScalerState(), DynamicScalerState.torch(), DynamicScalerState.no_op()):
        traces.clear()
        jax.block_until_ready(step(step(start)))
        assert len(traces) <= 1


# -- telling what happened


def test_the_metrics_are_python_numbers():
    state = DynamicScalerState(scaler=4.0).adjust(True).adjust(False).adjust(False)
    state = state._replace(total_redos=jnp.int32(1), total_resets=state.total_resets + 1, underflow=jnp.float32(0.25))
    metrics = jaxamp.scaler_metrics(state)
    assert metrics == {"scale": 1.0, "skipped": 2, "total_skipped": 2, "total_redone": 1, "underflow": 0.25}
    assert [type(x) for x in metrics.values()] == [float, int, int, int, float]
    assert jaxamp.scaler_metrics(jax.tree.map(lambda x: jnp.stack([x] * 8), state)) == metrics  # as pmap returns it


def test_metrics_refuse_a_state_without_values():
    with pytest.raises(
        TypeError, match=r"got a state that is being traced; expected one with values. Return the state"
    ):
        jax.jit(jaxamp.scaler_metrics)(DynamicScalerState())


@pytest.mark.parametrize("finite", [1, 1.0, jnp.array([True, False]), None, DynamicScalerState()])
def test_adjust_refuses_what_is_not_one_bool(finite):
    with pytest.raises(TypeError, match=r"adjust got a condition of .*; expected one bool. Write state.adjust\(jaxamp"):
        DynamicScalerState().adjust(finite)


def test_metrics_refuse_what_is_no_state():
    with pytest.raises(
        TypeError, match=r"scaler_metrics got \{\}, of type dict, .*; expected a DynamicScalerState. Wr"
    ):
        jaxamp.scaler_metrics({})


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda: DynamicScalerState.torch(growth_interval=0),
            r"torch got an interval of 0 .*; expected a whole number of steps, 1 or more. Leave",
        ),
        (lambda: DynamicScalerState.torch(growth_interval=1.5), r"torch got an interval of 1.5 .*; expected a whole"),
        (
            lambda: DynamicScalerState.torch(init_scale=0.0),
            r"torch got a state with scaler=0; expected a positive, finite",
        ),
        (lambda: DynamicScalerState.static(-2.0), r"static got a state with scaler=-2; expected a positive"),
        (
            lambda: DynamicScalerState.megatron(initial_scale=2.0**200),
            r"megatron got .* scaler=inf; expected a positive",
        ),
        (lambda: DynamicScalerState.torch(growth_factor=0.5), r"adjust_factor=0.5; expected 1 or more"),
        (lambda: DynamicScalerState.static(float("inf")), r"scaler=inf; expected a positive, finite"),
        (lambda: DynamicScalerState.deepspeed(hysteresis=0), r"hysteresis=0; expected a positive"),
    ],
)
def test_a_scheme_refuses_numbers_that_cannot_work(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scale", ["a", 1j, None])
def test_a_scale_that_is_no_number_is_refused(scale):
    with pytest.raises(TypeError, match=r"static got a state with scaler=.*; expected a number. Leave it out"):
        DynamicScalerState.static(scale)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"patience": 2.5}, r"patience=2.5; expected a whole number, at most 2147483647. Leave"),
        ({"patience": 10**12}, r"patience=1e\+12; expected a whole number"),
        ({"min_scaler": 4.0, "max_scaler": 2.0}, r"min_scaler=4; expected at most max_scaler, which is 2. Leave"),
        ({"scaler": 1j}, r"scaler=1j; expected a number. Leave"),
    ],
)
def test_a_state_that_cannot_work_is_refused_at_the_call(fields, message):
    grad = jaxamp.dynamic_scale_grad(lambda x: x**2)
    with pytest.raises((TypeError, ValueError), match=f"dynamic_scale_grad got a state with {message}"):
        grad(jnp.float32(1.0), dynamic_scaler_state=DynamicScalerState(**fields))


def test_torch_may_raise_its_scale_in_every_step():
    pattern = [True, True, False, True, True]
    state = DynamicScalerState.torch(growth_interval=1)
    assert table(state, pattern) == list(run_torch(pattern, 2.0**16, 1))


@pytest.mark.parametrize(
    "scheme",
    [
        DynamicScalerState,
        DynamicScalerState.torch,
        DynamicScalerState.deepspeed,
        DynamicScalerState.megatron,
        lambda **options: DynamicScalerState.static(8.0, **options),
        DynamicScalerState.no_op,
    ],
    ids=["", "torch", "deepspeed", "megatron", "static", "no_op"],
)
def test_every_scheme_accumulates(scheme):
    state = scheme(accumulate=4)
    assert int(state.accumulate) == 4
    for _ in range(4):
        state = state.adjust(True)
    assert (int(state.count), int(state.micro)) == (1, 0)


def test_a_scheme_refuses_to_accumulate_nothing():
    with raises(ValueError, "DynamicScalerState.torch got a state with accumulate=0; expected a positive", "Leave it"):
        DynamicScalerState.torch(accumulate=0)
