"""A scaler's state through pytrees, pickles and checkpoints, and a training run that is interrupted and resumed."""

import copy
import functools
import io
import pickle

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from helpers import assert_same_bits

import jaxamp

State = jaxamp.DynamicScalerState


def moved():
    """A state that differs from a fresh one in all that moves."""
    state = State(patience=1, scaler=1024.0, backoff_factor=0.25, hysteresis=2, accumulate=2)
    for finite in (True, False, True, False, True):
        state = state.adjust(finite)
    return state._replace(total_redos=jnp.int32(3), underflow=jnp.float32(0.125))


STATES = {"fresh": State, "moved": moved, "torch": State.torch, "no_op": State.no_op}
states = pytest.mark.parametrize("state", list(STATES.values()), ids=list(STATES), indirect=True)


@pytest.fixture
def state(request):
    return request.param()


# -- one state


@states
def test_a_state_is_a_pytree(state):
    leaves, structure = jax.tree.flatten(state)
    assert_same_bits(jax.tree.unflatten(structure, leaves), state)
    mapped = jax.tree.map(lambda x: x, state)
    assert type(mapped) is State
    assert_same_bits(mapped, state)
    assert len(leaves) == len(State._fields) - (state.backoff_factor is None)


@states
@pytest.mark.parametrize(
    "through",
    [copy.copy, copy.deepcopy, lambda state: pickle.loads(pickle.dumps(state))],
    ids=["copy", "deep", "pickle"],
)
def test_a_state_can_be_copied_and_pickled(state, through):
    again = through(state)
    assert type(again) is State
    assert_same_bits(again, state)
    assert_same_bits(again.adjust(False), state.adjust(False))


@states
def test_a_state_goes_through_equinox(state):
    """Into a fresh state, as when a run is resumed, and into one of arrays."""
    file = io.BytesIO()
    eqx.tree_serialise_leaves(file, state)
    fresh = State(backoff_factor=None if state.backoff_factor is None else np.float32(0.0))
    for like in (state, fresh):
        file.seek(0)
        again = eqx.tree_deserialise_leaves(file, like)
        assert_same_bits(again, state)
        assert_same_bits(again.adjust(True), state.adjust(True))


@states
def test_a_state_goes_through_orbax(state, tmp_path):
    """Fresh or not, into what `as_arrays` or `jax.eval_shape` give, or into a dict if Orbax is told nothing."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "state", state)
        checkpointer.wait_until_finished()
        targets = jax.tree.map(jnp.zeros_like, state.as_arrays()), jax.eval_shape(state.as_arrays)
        restored = [checkpointer.restore(tmp_path / "state", target) for target in targets]
        untold = checkpointer.restore(tmp_path / "state")
    for again in (*restored, State(**untold)):
        assert type(again) is State
        assert_same_bits(again.as_arrays(), state.as_arrays())
        assert_same_bits(again.adjust(True), state.adjust(True))


# -- what a state may be made of


FIELDS = {"patience": 3, "scaler": 96.0, "adjust_factor": 3.0, "backoff_factor": 0.3, "hysteresis": 2, "accumulate": 2}
NUMBERS = {
    "python": lambda x: x,
    "ints": lambda x: int(x) if x == int(x) else x,
    "numpy": lambda x: np.int32(x) if isinstance(x, int) else np.float32(x),
    "numpy64": lambda x: np.int64(x) if isinstance(x, int) else np.float64(x),
    "numpy_arrays": np.asarray,
    "jax": jnp.asarray,
}


@pytest.mark.parametrize("compiled", [False, True])
def test_the_next_state_does_not_depend_on_what_numbers_are_made_of(compiled):
    finites = (True, False, True, False, True, True)

    def run(state):
        for finite in finites:
            state = state.adjust(jnp.array(finite))
        return state

    fn = jax.jit(run) if compiled else run
    expected = fn(State(**FIELDS))
    assert float(expected.scaler) != FIELDS["scaler"]
    for make in NUMBERS.values():
        assert_same_bits(fn(State(**{name: make(value) for name, value in FIELDS.items()})), expected)


@pytest.mark.parametrize("jit", [jax.jit, eqx.filter_jit])
@pytest.mark.parametrize(
    "make",
    [
        State,
        State.torch,
        State.deepspeed,
        State.megatron,
        State.no_op,
        lambda: State(patience=3, scaler=8.0).as_arrays(),
    ],
)
def test_the_second_step_from_a_fresh_state_is_not_traced_anew(jit, make):
    traces = []

    @jit
    def step(w, state):
        traces.append(1)
        state, grads = jaxamp.dynamic_scale_grad(jnp.sum)(w, dynamic_scaler_state=state)
        return w - grads, state

    w, state = jnp.ones(2), make()
    for _ in range(3):
        w, state = step(w, state)
    assert len(traces) == 1


# -- a run


def data(step):
    """Batches of float16-sized values; one in five overflows at any scale, one in seven at large ones."""
    rng = np.random.default_rng(step)
    x = rng.normal(size=(8, 4)).astype(np.float32)
    if step % 5 == 3:
        x[0, 0] = np.inf
    return (x * 256 if step % 7 == 2 else x), rng.normal(size=(8, 2)).astype(np.float32)


OPTIMIZER = optax.chain(
    optax.clip_by_global_norm(1.0),
    optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 0.05, 3, 20)),
)


def beginning():
    model = eqx.nn.MLP(4, 2, 8, 1, key=jax.random.key(0))
    opt_state = OPTIMIZER.init(eqx.filter(model, eqx.is_inexact_array))
    return model, opt_state, State(patience=2, scaler=2.0**13, hysteresis=2).as_arrays()


@eqx.filter_jit
def training_step(model, opt_state, state, x, y):
    def loss(model, x, y):
        return jnp.mean((jax.vmap(model)(x) - y) ** 2)

    grad_fn = jaxamp.dynamic_scale_grad(jaxamp.amp(loss), redo_on_nan=1)
    state, grads = grad_fn(model, x, y, dynamic_scaler_state=state)
    return *jaxamp.update_if_finite(model, OPTIMIZER, opt_state, grads, state.finite), state


def train(run, first, last):
    for step in range(first, last):
        run = training_step(*run, *data(step))
    return run


@functools.cache
def whole_run():
    with jax.numpy_dtype_promotion("standard"):
        return train(beginning(), 0, 20)


def through_equinox(run, folder):
    eqx.tree_serialise_leaves(folder / "run.eqx", run)
    return eqx.tree_deserialise_leaves(folder / "run.eqx", beginning())


def through_orbax(run, folder):
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(folder / "run", eqx.filter(run, eqx.is_array))
        checkpointer.wait_until_finished()
        fresh, static = eqx.partition(beginning(), eqx.is_array)
        return eqx.combine(checkpointer.restore(folder / "run", fresh), static)


@pytest.mark.promotes
def test_the_run_has_overflows_of_both_kinds():
    state = whole_run()[2]
    metrics = jaxamp.scaler_metrics(state)
    assert metrics["total_skipped"] >= 4
    assert metrics["total_redone"] >= 3
    assert metrics["scale"] != float(beginning()[2].scaler)


@pytest.mark.promotes
@pytest.mark.parametrize("through", [through_equinox, through_orbax])
@pytest.mark.parametrize("at", [4, 11])
def test_a_resumed_run_goes_on_bit_for_bit(through, at, tmp_path):
    """Interrupted right after a skipped step, and in the middle."""
    run = train(through(train(beginning(), 0, at), tmp_path), at, 20)
    assert_same_bits(eqx.filter(run, eqx.is_array), eqx.filter(whole_run(), eqx.is_array))
