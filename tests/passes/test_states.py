"""Loops keep rounded copies of their float32 states for the backward pass."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_near, assert_same_bits, equations, error, in_float64, normal
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

WITHOUT = functools.partial(AMP, disable_passes=["keep_states_low"])
STEPS, BATCH, K, V = 12, 3, 8, 16
W, KS, VS, QS, GATES = (
    normal(0, K, K, scale=0.4),
    normal(1, STEPS, BATCH, K, scale=0.4),
    normal(2, STEPS, BATCH, V),
    normal(3, STEPS, BATCH, K),
    normal(4, STEPS, BATCH, K) + 1,
)
ARGS = W, KS, VS, QS, GATES
ALL = tuple(range(len(ARGS)))


def scanned(step):
    """A loss of what all rounds of a loop over a matrix for each example return."""

    def loss(w, *xs):
        start = jnp.zeros((xs[0].shape[1], K, V), w.dtype)
        return jnp.mean(lax.scan(functools.partial(step, w), start, xs)[1] ** 2)

    return loss


def gated(w, state, x):
    """Gated linear attention."""
    k, v, q, gate = x
    out = jnp.einsum("bk,bkv->bv", q, state)
    return state * jax.nn.sigmoid(gate)[..., None] + jnp.einsum("bk,bv->bkv", k @ w, v), out


def returned(w, state, x):
    """The states are read after the loop, by chunks."""
    k, v, _, gate = x
    return jnp.exp(-jnp.exp(gate - 3))[..., None] * state + (k @ w)[..., None] * v[:, None], state


def by_chunks(w, *xs):
    states = lax.scan(functools.partial(returned, w), jnp.zeros((xs[0].shape[1], K, V), w.dtype), xs)[1]
    return jnp.mean(jnp.einsum("tbk,tbkv->tbv", xs[2], states) ** 2)


def corrected(w, state, x):
    """A delta rule: what the state says of a key is taken off first. It is read by two matmuls and a product."""
    k, v, q, gate = x
    k = k @ w
    new = v - jnp.einsum("bk,bkv->bv", k, state)
    out = jnp.einsum("bk,bkv->bv", q, state)
    return jax.nn.sigmoid(gate[:, :1, None]) * state + k[..., None] * new[:, None], out


def turned(w, state, x):
    """The state is read transposed, and scaled along another axis than it has first."""
    k, v, q, gate = x
    out = jnp.matmul(state.mT, q[..., None])[..., 0]
    return (state.mT * jax.nn.sigmoid(gate)[:, None]).mT + (k @ w)[..., None] * v[:, None], out


def two_states(w, *xs):
    def step(carry, x):
        state, total = carry
        k, _, q, gate = x
        new, out = gated(w, state, x)
        total = total * jax.nn.sigmoid(gate) + k
        return (new, total), out / (1 + jnp.abs(jnp.sum(q * total, -1, keepdims=True)))

    shape = xs[0].shape[1]
    start = jnp.zeros((shape, K, V), w.dtype), jnp.zeros((shape, K), w.dtype)
    return jnp.mean(lax.scan(step, start, xs)[1] ** 2)


def mapped(w, *xs):
    """Each example by itself."""
    of_one = lambda *xs: scanned(gated)(w, *(x[:, None] for x in xs))
    return jnp.mean(jax.vmap(of_one, 1)(*xs))


FUNCTIONS = {
    "gated": scanned(gated),
    "by_chunks": by_chunks,
    "corrected": scanned(corrected),
    "turned": scanned(turned),
    "two_states": two_states,
    "mapped": mapped,
}
functions = pytest.mark.parametrize("fn", FUNCTIONS.values(), ids=FUNCTIONS)


def kept(amp, fn):
    """The dtypes of matrices of all rounds that a backward pass keeps."""
    pullback = jax.vjp(amp(fn), *ARGS)[1]
    return sorted(x.dtype.name for x in jax.tree.leaves(pullback) if x.size == STEPS * BATCH * K * V)


@functions
def test_states_are_kept_rounded(fn):
    assert "float32" not in kept(AMP, fn)
    assert "bfloat16" in kept(AMP, fn)
    assert "float32" in kept(WITHOUT, fn)


@functions
def test_values_are_the_same_and_the_state_is_not_rounded(fn):
    assert_same_bits(jax.jit(AMP(fn))(*ARGS), jax.jit(WITHOUT(fn))(*ARGS))
    loops = [eqn for eqn in equations(jax.make_jaxpr(AMP(fn))(*ARGS)) if eqn.primitive.name == "scan"]
    assert all(loop.outvars[0].aval.dtype == jnp.float32 for loop in loops)


@functions
def test_gradients_are_near_to_float64(fn):
    found = jax.jit(jax.grad(AMP(fn), ALL))(*ARGS)
    assert_near(found, in_float64(jax.grad(fn, ALL), *ARGS), 2e-2)


@functions
def test_derivatives_of_other_kinds(fn):
    """Forward ones, and those of gradients: the copy has a derivative too."""
    tangents = tuple(jnp.sin(x) for x in ARGS)
    along = lambda fn: lambda *args: jax.jvp(fn, args[: len(ARGS)], args[len(ARGS) :])[1]
    assert_near(jax.jit(along(AMP(fn)))(*ARGS, *tangents), in_float64(along(fn), *ARGS, *tangents), 5e-2)
    twice = lambda fn: lambda *args: jax.jvp(jax.grad(fn, 4), args[: len(ARGS)], args[len(ARGS) :])[1]
    assert_near(jax.jit(twice(AMP(fn)))(*ARGS, *tangents), in_float64(twice(fn), *ARGS, *tangents), 5e-2)


def test_over_many_rounds_nothing_adds_up():
    """A state that hardly decays in 600 rounds. Rounded in each, it would stand still."""
    rounds = 600
    xs = [jnp.tile(x, (rounds // STEPS, 1, 1)) for x in (KS, VS, QS, GATES + 6)]
    fn = FUNCTIONS["gated"]
    expected = in_float64(jax.grad(fn, 4), W, *xs)
    found, without = (jax.jit(jax.grad(amp(fn), 4))(W, *xs) for amp in (AMP, WITHOUT))
    assert error(found, expected) < 1.2 * error(without, expected) + 1e-3


def test_a_state_that_is_returned_and_kept_is_one_array():
    """XLA sees that both are the same where the round returns what it keeps."""
    loops = [eqn for eqn in equations(jax.make_jaxpr(AMP(by_chunks))(*ARGS)) if eqn.primitive.name == "scan"]
    (body,) = [getattr(loop.params["jaxpr"], "jaxpr", loop.params["jaxpr"]) for loop in loops]
    assert [v.aval.dtype.name for v in body.outvars] == ["float32", "bfloat16"]
    assert not [eqn for eqn in body.eqns if eqn.primitive.name == "convert_element_type"]


def test_the_stream_of_a_network_is_kept_once_and_low():
    """Matmuls alone read it, and sums, which need nothing: gradients stay the same to the last bit."""
    layers = {"up": normal(8, 5, K, 4 * K, scale=0.3), "down": normal(9, 5, 4 * K, K, scale=0.1)}
    layer = lambda x, p: (x + jax.nn.relu(x @ p["up"]) @ p["down"], None)
    loss = lambda p, x: jnp.mean(lax.scan(layer, x, p)[0] ** 2)
    stacked = [
        sorted(x.dtype.name for x in jax.tree.leaves(jax.vjp(amp(loss), layers, QS)[1]) if x.shape == (5, *QS.shape))
        for amp in (AMP, WITHOUT)
    ]
    assert stacked == [["bfloat16"], ["float32"]]
    assert_same_bits(*(jax.jit(jax.grad(amp(loss)))(layers, QS) for amp in (AMP, WITHOUT)))


def bent(w, state, x):
    """A cell: a tanh reads the new state, which is computed again from the old one."""
    k, v, q, gate = x
    new = state * jax.nn.sigmoid(gate)[..., None] + (k @ w)[..., None] * v[:, None]
    return new, jnp.einsum("bk,bkv->bv", q, jnp.tanh(new))


def squared(w, state, x):
    k, v, q, _ = x
    return state * state * 0.1 + (k @ w)[..., None] * v[:, None], jnp.einsum("bk,bkv->bv", q, state)


def by_its_sum(w, state, x):
    """The factor depends on the state."""
    k, v, q, _ = x
    factor = 0.5 + 0.01 * jnp.sum(state, -1, keepdims=True)
    return state * factor + (k @ w)[..., None] * v[:, None], jnp.einsum("bk,bkv->bv", q, state)


def only_added_to(w, state, x):
    k, v, _, _ = x
    return state + (k @ w)[..., None] * v[:, None], k @ w


def one_by_the_other(w, *xs):
    """Each is what the derivative by the other needs, in float32."""

    def step(carry, x):
        a, b = carry
        k, v, q, gate = x
        new = jnp.einsum("bk,bv->bkv", k @ w, v)
        return (0.2 * (a * b) + new, b * jax.nn.sigmoid(gate)[..., None] + new), jnp.einsum("bk,bkv->bv", q, a)

    start = (jnp.ones((xs[0].shape[1], K, V), w.dtype),) * 2
    return jnp.mean(lax.scan(step, start, xs)[1] ** 2)


def average_of_data(w, state, x):
    """The derivative by the gate is the difference of the state and the data, which is small beside both."""
    _, v, q, gate = x
    z = jax.nn.sigmoid((gate @ w)[..., None])
    return (1 - z) * state + z * (16 + 0.1 * v[:, None]), jnp.einsum("bk,bkv->bv", q, state)


def of_a_user(w, *xs):
    step = jax.checkpoint(functools.partial(gated, w))
    return jnp.mean(lax.scan(step, jnp.zeros((xs[0].shape[1], K, V), w.dtype), xs)[1] ** 2)


def average_of_masked_data(w, state, x):
    """Zeros and ones have no error, nor has what they multiply."""
    _, v, q, gate = x
    z = jax.nn.sigmoid((gate @ w)[..., None])
    mask = (gate[..., None] > -9).astype(v.dtype)
    return (1 - z) * state + z * (0.5 * mask * (16 + 0.1 * v[:, None])), jnp.einsum("bk,bkv->bv", q, state)


OTHERS = {
    "bent": scanned(bent),
    "squared": scanned(squared),
    "by_its_sum": scanned(by_its_sum),
    "only_added_to": scanned(only_added_to),
    "one_by_the_other": one_by_the_other,
    "average_of_data": scanned(average_of_data),
    "average_of_masked_data": scanned(average_of_masked_data),
    "of_a_user": of_a_user,
}


@pytest.mark.parametrize("fn", OTHERS.values(), ids=OTHERS)
def test_what_is_left_alone(fn):
    programs = [str(jax.make_jaxpr(amp(fn))(*ARGS)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]
    assert_near(jax.jit(jax.grad(AMP(fn), ALL))(*ARGS), in_float64(jax.grad(fn, ALL), *ARGS), 3e-2)


def test_a_function_in_a_round_may_return_a_number_or_say_how_it_is_split():
    one = jax.jit(lambda gate: (gate, 1.0, gate))
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("d",))
    placed = NamedSharding(mesh, PartitionSpec())
    scaled = jax.jit(lambda state, gate: state * gate, in_shardings=(placed, placed), out_shardings=placed)

    def with_number(w, state, x):
        gate, number, _ = one(x[3])
        return gated(w, state * number, (*x[:3], gate))

    def placing(w, state, x):
        k, v, q, gate = x
        new = scaled(state, jax.nn.sigmoid(gate)[..., None]) + (k @ w)[..., None] * v[:, None]
        return new, jnp.einsum("bk,bkv->bv", q, state)

    for step in (with_number, placing):
        fn = scanned(step)
        assert_near(jax.jit(jax.grad(AMP(fn), ALL))(*ARGS), in_float64(jax.grad(scanned(gated), ALL), *ARGS), 2e-2)
    jitted = (eqn for eqn in equations(jax.make_jaxpr(AMP(fn))(*ARGS)) if eqn.primitive.name == "jit")
    assert (placed,) in [eqn.params["out_shardings"] for eqn in jitted]


def test_a_loop_that_is_linear_in_a_state_can_be_transposed():
    by_values = lambda fn: lambda v: fn(W, KS, v, QS, GATES)
    by_start = lambda fn: lambda start: fn(W, jnp.zeros_like(KS), VS, QS, GATES, start)
    loop = lambda w, *xs: lax.scan(functools.partial(gated, w), xs[-1], xs[:-1])[1]
    from_zero = lambda *args: loop(*args, jnp.zeros((BATCH, K, V)))
    for fun, shape in ((by_values(AMP(from_zero)), VS.shape), (by_start(AMP(loop)), (BATCH, K, V))):
        x, ct = normal(6, *shape), normal(7, STEPS, BATCH, V)
        (found,) = jax.linear_transpose(fun, x)(ct)
        assert error(jnp.vdot(found, x), jnp.vdot(ct, fun(x))) < 2e-2


@pytest.mark.parametrize("options", [{"keep": "all"}, {"compute_dtype": jnp.float16}, {"amp_policy": {}}])
def test_options_that_leave_all_alone(options):
    programs = [str(jax.make_jaxpr(amp(FUNCTIONS["gated"], **options))(*ARGS)) for amp in (AMP, WITHOUT)]
    assert programs[0] == programs[1]
