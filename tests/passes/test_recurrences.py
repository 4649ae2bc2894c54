"""Linear recurrences that a program runs in parallel are one operation, with a derivative of its own."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, equations, error, in_float64, kept, normal
from jax import lax
from jax.experimental import checkify
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P
from plans import plan_of

import jaxamp
from jaxamp._passes.recurrences import Recurrence, derive_recurrences
from jaxamp._passes.streams import hold_streams_low

primitives_of = lambda jaxpr: [eqn.primitive.name for eqn in equations(jaxpr)]
W, X = normal(0, 8, 16, scale=0.4), normal(1, 2, 37, 8)


def later(p, q):
    return p[0] * q[0], p[1] * q[0] + q[1]


def as_mamba(w, x):
    """Rates are repeated for several states, and so is what is added."""
    values, rates = jnp.split(jax.nn.silu(x @ w), 2, -1)
    rates = jax.nn.softplus(rates)[..., None]
    keep = jnp.exp(-rates * jnp.exp(w[0, :8]))
    held = lax.associative_scan(later, (keep, rates * values[..., None, :] * values[..., None]), axis=1)[1]
    return jnp.mean((jnp.sum(held, -1) @ w) ** 2)


def with_outer_products(w, x):
    values, rates = jnp.split(x @ w, 2, -1)
    keep = jnp.exp(jnp.einsum("btd,dn->btdn", jax.nn.softplus(rates), -jnp.exp(w[:8, :3])))
    added = jnp.einsum("btd,btn->btdn", values, values[..., :3])
    held = lax.associative_scan(lambda p, q: (q[0] * p[0], q[1] + q[0] * p[1]), (keep, added), axis=1)[1]
    return jnp.mean((jnp.einsum("btdn,btn->btd", held, rates[..., :3]) @ w) ** 2)


def as_griffin(w, x):
    """The decays are read by something else, too."""
    values, gates = jnp.split(x @ w, 2, -1)
    keep = jnp.exp(-jax.nn.softplus(w[0, :8]) * jax.nn.sigmoid(gates))
    _, held = lax.associative_scan(later, (keep, jnp.sqrt(1 - keep**2 + 1e-6) * values), axis=1)
    return jnp.mean((held @ w) ** 2)


def gated(w, x):
    """The decays are no exponentials."""
    values, gates = jnp.split(x @ w, 2, -1)
    gates = jax.nn.sigmoid(gates)
    return jnp.mean((lax.associative_scan(later, (1 - gates, gates * values), axis=-2)[1] @ w) ** 2)


def by_logarithms(w, x):
    values, rates = jnp.split(x @ w, 2, -1)
    add = lambda p, q: (p[0] + q[0], jnp.exp(q[0]) * p[1] + q[1])
    return jnp.mean((lax.associative_scan(add, (-jax.nn.softplus(rates), values), axis=1)[1] @ w) ** 2)


def as_s5(w, x):
    """Each sequence is mapped, and so is each step; the decays are parameters."""
    keep = jnp.exp(-jnp.exp(w[0]))
    scan = lambda u: lax.associative_scan(jax.vmap(later), (jnp.broadcast_to(keep, u.shape), u))[1]
    return jnp.mean(jnp.tanh(jax.vmap(scan)(x @ w)) ** 2)


def backwards(w, x):
    values, rates = jnp.split(x @ w, 2, -1)
    operands = jnp.exp(-jax.nn.softplus(rates)), values
    both = [lax.associative_scan(later, operands, axis=1, reverse=reverse)[1] for reverse in (True, False)]
    return jnp.mean((sum(both[1:], start=both[0]) @ w) ** 2)


def by_heads(w, x):
    """All channels of a head decay alike. What had been there before the first step decays too."""
    values, rates = jnp.split(x @ w, 2, -1)
    keep, values = jnp.exp(-jax.nn.softplus(rates[..., :2, None])), values.reshape(*x.shape[:2], 2, 4)
    kept_of_first, held = lax.associative_scan(later, (keep, values), axis=1)
    return jnp.mean((held + kept_of_first * w[0, :8].reshape(2, 4)) ** 2)


LOSSES = [as_mamba, with_outer_products, as_griffin, gated, by_logarithms, as_s5, backwards, by_heads]


def regions(fn, *args, **options) -> list[Recurrence]:
    plan = derive_recurrences(hold_streams_low(plan_of(fn, *args, **options)))
    return [part for part in plan.parts if isinstance(part, Recurrence)]


def names(fn, *args) -> list[str]:
    return [eqn.primitive.name for eqn in equations(jax.make_jaxpr(fn)(*args))]


@pytest.mark.parametrize("loss", LOSSES)
def test_recurrences_are_recognised(loss):
    found = regions(loss, W, X)
    assert len(found) == (2 if loss is backwards else 1)
    assert [part.logarithmic for part in found] == [loss is not gated] * len(found)
    assert names(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), W, X).count("linear_recurrence") == len(found)


@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_near_to_float64(loss):
    expected = in_float64(jax.grad(loss), W, X)
    cast = lambda w, x: loss(w.astype(jnp.bfloat16), x.astype(jnp.bfloat16)).astype(jnp.float32)
    found, by_hand = (
        error(jax.jit(jax.grad(fn))(W, X), expected) for fn in (jaxamp.amp(loss, compute_dtype=jnp.bfloat16), cast)
    )
    assert found < min(1.5e-2, 1.2 * by_hand)


def test_slow_decays_are_not_rounded_to_one():
    """A decay of .9995 is 1 in bfloat16, and so its logarithm is rounded: the mean of many steps keeps its length."""

    def mean_of_many(w, x):
        values = (x @ w)[..., :8]
        keep = jnp.exp(-0.0005 * jnp.ones_like(values))
        return jnp.mean(lax.associative_scan(later, (keep, values), axis=1)[1] ** 2)

    assert len(regions(mean_of_many, W, normal(1, 1, 2048, 8))) == 1
    found = jax.grad(jaxamp.amp(mean_of_many, compute_dtype=jnp.bfloat16))(W, normal(1, 1, 2048, 8))
    assert error(found, in_float64(jax.grad(mean_of_many), W, normal(1, 1, 2048, 8))) < 1.5e-2


@pytest.mark.parametrize("loss", [gated, as_griffin, with_outer_products])
def test_levels_are_not_kept(loss):
    """They have 18 and 9 entries along the axis of 37."""

    def levels(**options):
        found = kept(jaxamp.amp(loss, compute_dtype=jnp.bfloat16, **options), W, X)
        return [shape for shape, _ in found if {18, 9} & {*shape}]

    assert levels() == []
    assert levels(keep="all") != []


def test_few_numbers_that_are_repeated_make_half_of_the_result_kept():
    rows = [shape[1] for shape, _ in kept(jaxamp.amp(as_mamba, compute_dtype=jnp.bfloat16), W, X) if len(shape) == 4]
    assert rows == [X.shape[1] // 2]


def of_matrices(w, x):
    """A recurrence too, but not of single numbers."""
    values = x @ w
    matrices = jnp.broadcast_to(jnp.eye(16) * 0.9, (*values.shape[:2], 16, 16))
    step = lambda p, q: (q[0] @ p[0], jnp.einsum("...ij,...j->...i", q[0], p[1]) + q[1])
    return jnp.mean(lax.associative_scan(step, (matrices, values), axis=1)[1] ** 2)


def of_maxima(w, x):
    values, gates = jnp.split(x @ w, 2, -1)
    step = lambda p, q: (p[0] * q[0], jnp.maximum(p[1] * q[0], q[1]))
    return jnp.mean(lax.associative_scan(step, (jax.nn.sigmoid(gates), values), axis=1)[1] ** 2)


def with_more_added(w, x):
    values, gates = jnp.split(x @ w, 2, -1)
    step = lambda p, q: (p[0] * q[0], p[1] * q[0] + q[1] + 0.1)
    return jnp.mean(lax.associative_scan(step, (jax.nn.sigmoid(gates), values), axis=1)[1] ** 2)


@pytest.mark.parametrize("loss", [of_matrices, of_maxima, with_more_added])
def test_others_are_left_alone(loss):
    assert regions(loss, W, X) == []


def test_nothing_is_done_where_the_sums_are_not_ours_to_round():
    exact = lambda a, x: jnp.mean(lax.associative_scan(later, (a, x), axis=1)[1])
    assert regions(exact, jax.nn.sigmoid(X), X) == []
    assert regions(gated, W, X, keep="all") == []
    assert regions(gated, W, X, compute_dtype=jnp.float16) == []
    stopped = jaxamp.amp(jaxamp.amp_stop()(gated), compute_dtype=jnp.bfloat16)
    for fn in (stopped, jaxamp.amp(gated, compute_dtype=jnp.bfloat16, amp_policy={}), gated):
        assert "linear_recurrence" not in names(fn, W, X)


def test_a_derivative_that_the_function_takes_keeps_its_sums():
    """Its backward pass reads the levels, so that they are computed in any case."""
    inner = lambda x, w: jnp.sum(lax.associative_scan(later, (jax.nn.sigmoid(x @ w), x @ w), axis=1)[1] ** 2)
    loss = lambda w, x: jnp.mean(jax.grad(inner)(x, w) ** 2)
    found = jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))(W, X)
    assert error(found, in_float64(jax.grad(loss), W, X)) < 4e-2


@pytest.mark.parametrize("loss", [gated, as_mamba, as_s5])
def test_transforms(loss):
    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    several = jnp.stack([X, 0.5 * X, -X])
    mapped = jax.vmap(jax.grad(amp), (None, 0))(W, several)
    assert_all_near(mapped, [in_float64(jax.grad(loss), W, x) for x in several])
    _, forward = jax.jvp(lambda w: amp(w, X), (W,), (jnp.ones_like(W),))
    expected = in_float64(lambda w, x: jax.jvp(lambda w: loss(w, x), (w,), (jnp.ones_like(w),))[1], W, X)
    assert error(forward, expected) < 3e-2
    product = lambda fn: lambda w, x: jax.jvp(jax.grad(lambda w: fn(w, x)), (w,), (jnp.ones_like(w),))[1]
    assert error(jax.jit(product(amp))(W, X), in_float64(product(loss), W, X)) < 5e-2
    again = jax.grad(jax.checkpoint(jaxamp.amp(amp, compute_dtype=jnp.bfloat16)))(W, X)
    assert error(again, in_float64(jax.grad(loss), W, X)) < 2e-2


def assert_all_near(found, expected):
    for a, b in zip(found, expected, strict=True):
        assert error(a, b) < 2e-2


def test_layers_in_a_loop():
    def loss(w, x):
        layer = lambda x, w: (x + 0.1 * jnp.tanh(gate_of(w, x)), None)
        return jnp.mean(lax.scan(layer, x, jnp.stack([w, -w]))[0] ** 2)

    def gate_of(w, x):
        values, gates = jnp.split(x @ w, 2, -1)
        return lax.associative_scan(later, (jax.nn.sigmoid(gates), values), axis=1)[1]

    amp = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)
    assert "linear_recurrence" in names(amp, W, X)
    assert error(jax.jit(jax.grad(amp))(W, X), in_float64(jax.grad(loss), W, X)) < 2e-2


def test_it_can_be_switched_off():
    amp = AMP(gated, disable_passes=["derive_recurrences"])
    assert "linear_recurrence" not in names(amp, W, X)


# -- what must stay, and what else may be there


def with_effect(effect):
    def fn(w, x):
        values, rates = jnp.split(x @ w, 2, -1)
        keep = jnp.exp(-jax.nn.softplus(rates))
        effect(values)
        return jnp.mean((lax.associative_scan(later, (keep, values), axis=1)[1] @ w) ** 2)

    return fn


@pytest.mark.parametrize("ordered", [False, True])
def test_effects_before_a_recurrence_stay(ordered):
    seen = []
    fn = with_effect(lambda x: jax.debug.callback(lambda x: seen.append(x.shape), x, ordered=ordered))
    jax.jit(AMP(fn))(W, X)
    jax.effects_barrier()
    assert seen == [(2, 37, 8)]
    assert "linear_recurrence" in primitives_of(jax.make_jaxpr(AMP(fn))(W, X))


def test_checks_before_a_recurrence_stay():
    fn = with_effect(lambda x: checkify.check(jnp.all(x > 1e9), "too small"))
    error, _ = checkify.checkify(AMP(fn))(W, X)
    assert "too small" in str(error.get())


def shared_values(w, x):
    """Two recurrences of the same values, one of them twice, and one of the other's result."""
    values, rates = jnp.split(x @ w, 2, -1)
    both = [jnp.exp(-jax.nn.softplus(scale * rates)) for scale in (1.0, 0.3)]
    scan = lambda keep, values: lax.associative_scan(later, (keep, values), axis=1)[1]
    held = [scan(keep, values) for keep in (*both, both[0])]
    return jnp.mean(((sum(held[1:], start=held[0]) + scan(both[0], held[1])) @ w) ** 2)


def test_recurrences_may_share_their_operands():
    assert primitives_of(jax.make_jaxpr(AMP(shared_values))(W, X)).count("linear_recurrence") == 4
    gradient = jax.grad(shared_values)
    assert error(jax.grad(AMP(shared_values))(W, X), in_float64(gradient, W, X)) < 0.02


@pytest.mark.parametrize("mapped", [False, True])
def test_recurrences_on_devices_of_their_own(mapped):
    """`shard_map` then says of which values it knows that they differ: of each that something is padded with, too."""
    fn = as_s5 if mapped else gated
    mesh = Mesh(np.asarray(jax.devices()[:1]), ("d",))
    on_each = jax.shard_map(
        lambda w, x: AMP(fn)(w, x)[None], mesh=mesh, in_specs=(P(), P("d")), out_specs=P("d"), check_vma=True
    )
    found = primitives_of(jax.make_jaxpr(lambda w, x: on_each(w, x).sum())(W, X))
    assert found.count("linear_recurrence") == 1
    gradient = jax.jit(jax.grad(lambda w, x: on_each(w, x).sum()))
    assert error(gradient(W, X), in_float64(jax.grad(fn), W, X)) < 0.02


def undone(w, x):
    """Decays far above one, which later ones undo."""
    values, rates = jnp.split(x @ w, 2, -1)
    signs = jnp.where(jnp.arange(x.shape[1])[:, None] % 2 == 0, 1.0, -1.0)
    keep = jnp.exp(signs * (7 + jnp.tanh(rates)))
    held = lax.associative_scan(later, (keep, values), axis=1)[1]
    return jnp.mean((held / jnp.where(signs > 0, 1e3, 1.0) @ w[:, :8]) ** 2)


def by_exact_logarithms(w, x):
    values, rates = jnp.split(x @ w, 2, -1)
    with jaxamp.amp_stop():
        logarithms = -4 * jnp.sin(rates) ** 2 - 0.05
    return jnp.mean((lax.associative_scan(later, (jnp.exp(logarithms), values), axis=1)[1] @ w) ** 2)


def test_decays_that_are_no_exponentials_are_made_in_float32():
    """A sigmoid between low values is low. One of .999 would be 1, and the sums would never forget."""

    def fn(w, x):
        values, rates = jnp.split(x @ w, 2, -1)
        return jnp.mean((lax.associative_scan(later, (jax.nn.sigmoid(rates + 7), values), axis=1)[1] @ w) ** 2)

    xs = jnp.tile(X, (1, 40, 1))
    (eqn,) = [e for e in equations(jax.make_jaxpr(AMP(fn))(W, xs)) if e.primitive.name == "linear_recurrence"]
    assert eqn.invars[0].aval.dtype == jnp.float32
    exact = in_float64(jax.grad(fn), W, xs)
    assert error(jax.grad(AMP(fn))(W, xs), exact) < 0.03
    assert error(jax.grad(AMP(fn, disable_passes=["derive_recurrences"]))(W, xs), exact) > 0.1


@pytest.mark.parametrize("fn", [undone, by_exact_logarithms])
def test_logarithms_are_rounded_where_it_does_no_harm(fn):
    """Not those above zero, for errors of large ones that others undo would stay; nor those asked for in float32."""
    (eqn,) = [e for e in equations(jax.make_jaxpr(AMP(fn))(W, X)) if e.primitive.name == "linear_recurrence"]
    assert eqn.invars[0].aval.dtype == jnp.float32
    gradient = jax.grad(fn)
    without = jax.grad(AMP(fn, disable_passes=["derive_recurrences"]))(W, X)
    exact = in_float64(gradient, W, X)
    assert error(jax.grad(AMP(fn))(W, X), exact) < 1.3 * error(without, exact) + 1e-3


def test_many_recurrences_are_looked_for_once(monkeypatch):
    """Each traces `associative_scan`: not once more for each pair of operands that might be those of one."""
    traced = []
    scan = lax.associative_scan
    monkeypatch.setattr(lax, "associative_scan", lambda *args, **kwargs: traced.append(1) or scan(*args, **kwargs))

    def fn(w, x):
        for _ in range(6):
            values, rates = jnp.split(x @ w, 2, -1)
            x = x + lax.associative_scan(later, (jax.nn.sigmoid(rates), values), axis=1)[1]
        return jnp.sum(x)

    assert primitives_of(jax.make_jaxpr(AMP(fn))(W, X)).count("linear_recurrence") == 6
    assert len(traced) == 6 + 2  # for decays, and for logarithms of decays
