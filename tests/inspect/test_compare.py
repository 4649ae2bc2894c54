"""How far `amp` is from full precision, by operation, result and gradient."""

import json
import math

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import jaxamp
from jaxamp import assert_amp_close, compare
from jaxamp._inspect.comparison import GRADIENTS, error_of
from jaxamp._inspect.ranges import range_of

RNG = np.random.default_rng(0)
X = jnp.asarray(RNG.standard_normal((4, 8)), jnp.float32)
PARAMS = {name: jnp.asarray(RNG.standard_normal((8, 8)) / 3, jnp.float32) for name in ("up", "down")}


def loss(params, x):
    with jax.named_scope("first"):
        h = jnp.tanh(x @ params["up"])
    with jax.named_scope("second"):
        return jnp.sum(jnp.exp(h @ params["down"]))


def test_an_error_is_measured_in_float64():
    reference = np.array([3.0, 4.0])
    assert error_of(reference, reference) == (0.0, pytest.approx(1.0), 4.0)
    assert error_of(reference, reference).snr_db == float("inf")
    error = error_of(np.array([3.0, 4.5]), reference)
    assert error.relative == pytest.approx(0.1)
    assert error.snr_db == pytest.approx(20)
    assert error.cosine == pytest.approx(27.0 / (5 * np.hypot(3, 4.5)))
    assert error_of(np.ones(2), np.zeros(2)).relative == float("inf")
    assert error_of(np.zeros(2), np.zeros(2)) == (0.0, 1.0, 0.0)
    low = jnp.asarray([1.0], jnp.bfloat16)
    assert error_of(low, np.array([1.0])).relative == 0.0


@pytest.mark.parametrize("low", [jnp.bfloat16, jnp.float16])
def test_each_operation_result_and_gradient_has_an_error(low):
    found = compare(loss, compute_dtype=low)(PARAMS, X)
    assert {(row.scope, row.name) for row in found.operations} == {
        ("first", "dot_general"),
        ("first", "tanh"),
        ("second", "dot_general"),
        ("second", "exp"),
        ("second", "reduce_sum"),
    }
    errors = [row.error.relative for row in found.operations]
    assert errors == sorted(errors, reverse=True)
    eps = float(jnp.finfo(low).eps)
    assert 0.05 * eps < max(errors) < 4 * eps
    assert {row.name for row in found.gradients} == {"['up']", "['down']"}
    assert all(0 < row.error.relative < 8 * eps for row in found.gradients)
    assert all(row.error.cosine > 1 - 8 * eps for row in found.gradients)
    assert [row.name for row in found.results] == ["result 0"]
    assert {row.scope for row in found.scopes} == {"first", "second"}
    assert all(row.source.file == __file__ for row in found.operations)


def test_the_gradients_are_those_of_amp_against_those_of_the_function():
    found = compare(loss, compute_dtype=jnp.bfloat16)(PARAMS, X)
    plain, mixed = (jax.grad(f)(PARAMS, X) for f in (loss, jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))
    for row in found.gradients:
        name = row.name[2:-2]
        assert row.error.relative == pytest.approx(error_of(mixed[name], plain[name]).relative, rel=0.2)


def test_an_operation_that_amp_harms_is_first():
    def fragile(params, x):
        with jax.named_scope("fragile"):
            y = x @ params["up"]
            return jnp.sum(y - lax.stop_gradient(y) + (y + 1000.0 - 999.0))

    policy = jaxamp.default_amp_policy | {"fragile": jaxamp.use_compute_precision}
    found = compare(fragile, compute_dtype=jnp.bfloat16, amp_policy=policy)(PARAMS, X)
    assert found.operations[0].scope == "fragile"
    assert found.operations[0].error.relative > 0.3
    with pytest.raises(AssertionError, match=r"fragile in bfloat16 is not near float32:\n- result result 0: relative"):
        assert_amp_close(fragile, (PARAMS, X), compute_dtype=jnp.bfloat16, amp_policy=policy)
    assert_amp_close(fragile, (PARAMS, X), compute_dtype=jnp.bfloat16)


def test_with_64_bits_the_reference_is_float64():
    with jax.enable_x64(True):
        found = compare(loss, compute_dtype=jnp.float32)(PARAMS, X)
    assert found.reference == "float64"
    assert 0 < found.operations[0].error.relative < 1e-5
    assert compare(loss, compute_dtype=jnp.float32)(PARAMS, X).operations[0].error.relative == 0


@pytest.mark.slow
def test_a_scaler_saves_gradients_from_underflow():
    def small(params, x):
        return 1e-7 * loss(params, x)

    without = compare(small)(PARAMS, X)
    scaled = compare(small)(PARAMS, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert without.gradients[0].error.relative > 10 * scaled.gradients[0].error.relative
    assert scaled.gradients[0].error.relative < 1e-2


def test_a_square_matmul_of_a_mapped_layer_is_not_taken_for_its_transpose():
    def mapped(w, x):
        hidden = jax.vmap(lambda row: w @ row)(x)
        return jax.vmap(lambda row: w @ row)(jnp.maximum(hidden, 0))

    found = compare(mapped, backward=False)(PARAMS["up"], jnp.concatenate([X, -X]))
    assert max(row.error.relative for row in found.operations) < 1e-2


def test_equal_infinities_are_no_error():
    mask = jnp.where(jnp.tril(jnp.ones((8, 8))) > 0, 0.0, -jnp.inf)
    assert_amp_close(lambda w: jax.nn.log_softmax(w @ w + mask), (PARAMS["up"],), backward=False)
    assert error_of(np.array([np.inf, 1.0]), np.array([np.inf, 1.0])).relative == 0
    assert error_of(np.array([np.nan, 1.0]), np.array([1.0, 1.0])).relative == float("inf")


def test_equal_nans_are_told():
    found = compare(lambda w: jnp.sum(w @ w) * jnp.nan)(PARAMS["up"])
    assert [row.error.relative for row in (*found.results, *found.gradients)] == [0, 0]
    assert found.notes == ("NaN in the reference, which equals NaN under amp: result 0, the gradient of the argument",)


def test_results_beside_the_first_are_not_differentiated():
    def with_norm(params, x):
        return loss(params, x), jnp.sqrt(jnp.sum((x - x) ** 2) * jnp.sum(params["up"]) * 0)

    assert_amp_close(with_norm, (PARAMS, X), rtol=0.05)


def test_operations_without_results():
    def told(params, x):
        jax.debug.callback(lambda: None)
        return loss(params, x)

    assert compare(told)(PARAMS, X).operations


def test_a_function_that_names_float32_has_a_float32_reference():
    def named(w, x):
        return jnp.sum(lax.scan(lambda c, _: ((c @ w).astype(jnp.float32), None), x, None, length=2)[0])

    with jax.enable_x64(True):
        found = compare(named)(PARAMS["up"], X)
    assert found.reference == "float32"
    assert found.notes[0].startswith("no float64 reference: TypeError")


def test_loops_and_modules():
    class Net(eqx.Module):
        weight: jax.Array
        steps: int = eqx.field(static=True)

        def __call__(self, x):
            return lax.scan(lambda c, _: (jnp.tanh(c @ self.weight), None), x, None, length=self.steps)[0]

    found = compare(lambda net, x: jnp.mean(net(x)), compute_dtype=jnp.bfloat16)(Net(PARAMS["up"], 3), X)
    assert [row.name for row in found.operations].count("tanh") == 3
    assert [row.name for row in found.gradients] == [".weight"]


def test_rounds_and_branches_are_compared_with_their_like():
    def drifting(w, x):
        def body(state):
            rounds, total = state
            return rounds + 1, total + jnp.sum(jnp.tanh(x @ w))

        limit = 3 * math.tanh(1) + 1e-4  # reached in three rounds, and in four if x is rounded to 1
        rounds, _ = lax.while_loop(lambda state: state[1] < limit, body, (0, jnp.float32(0)))
        y = lax.fori_loop(0, 2, lambda i, c: jnp.tanh(c + i), x)
        y += lax.cond(rounds > 3, lambda y: jnp.tanh(100 * y), lambda y: jnp.tanh(y - 1), y)
        return jnp.sum(jnp.tanh(lax.stop_gradient(0 * y) + x))

    found = compare(drifting, compute_dtype=jnp.bfloat16, backward=False)(
        jnp.ones((1, 1)), jnp.full((1, 1), 1 + 2**-12)
    )
    tanhs = [row.error.relative for row in found.operations if row.name == "tanh"]
    assert len(tanhs) == 3 + 2 + 1
    assert max(tanhs) < 0.01
    (note,) = found.notes
    assert note.startswith(
        "left out, because the other run has no partner for them: 6 operations of amp, 2 of the reference"
    )


def test_what_has_no_backward_pass_says_so():
    found = compare(lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c @ c + 1, x))(jnp.ones((2, 2)))
    assert found.gradients == ()
    assert found.notes[0].startswith("no backward pass")
    assert compare(loss, backward=False)(PARAMS, X).notes == ()


def test_ranges():
    assert range_of(np.array([0.0, 1.0, 1.5, -0.25, np.inf])) == ({0: 2, -2: 1}, 1)
    found = compare(loss)(PARAMS, X)
    assert set(found.ranges) == {"first", "second", GRADIENTS}
    values = found.ranges["first"]
    assert sum(values.powers.values()) + values.zeros == 2 * X.size  # a matmul and a tanh
    assert max(values.powers) <= 3


def test_text_and_dictionary():
    found = compare(loss, compute_dtype=jnp.bfloat16)(PARAMS, X)
    text = str(found)
    assert text.startswith("loss in bfloat16 against float32\n")
    assert "second: exp" in text or "second: dot_general" in text
    assert all(len(line) <= 100 for line in text.splitlines())
    read = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert len(read["operations"]) == len(found.operations)
    assert read["gradients"][0]["error"]["snr_db"] == pytest.approx(found.gradients[0].error.snr_db)


@pytest.mark.slow
def test_pictures(tmp_path):
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("agg")
    compare(loss)(PARAMS, X).plot(tmp_path / "ranges.png")
    report = jaxamp.amp_report(loss)(PARAMS, X)
    report.plot(tmp_path / "flops.png")
    for name in ("ranges.png", "flops.png"):
        image = matplotlib.image.imread(tmp_path / name)
        assert image.std() > 0.05  # not blank
    matplotlib.pyplot.close("all")


def test_without_matplotlib_a_picture_says_what_to_install(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "matplotlib.pyplot", None)
    with pytest.raises(ImportError, match=r"matplotlib is not installed; expected it to be available.*jaxamp\[plots\]"):
        jaxamp.amp_report(loss)(PARAMS, X).plot()


def test_bad_input():
    with pytest.raises(TypeError, match="compare got 3, of type int; expected a function"):
        compare(3)
    with pytest.raises(TypeError, match="compare got a shape or a traced value; expected arrays"):
        jax.jit(compare(loss))(PARAMS, X)
    with pytest.raises(TypeError, match="DynamicScalerState"):
        compare(loss)(PARAMS, X, dynamic_scaler_state=3.0)


def test_a_gradient_that_cannot_be_traced_is_not_close():
    loop = lambda x: lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c @ c + 1, x)
    with pytest.raises(AssertionError, match=r"can't be traced.*: ValueError: Reverse-mode .* pass backward=False"):
        assert_amp_close(loop, (jnp.ones((2, 2)),))
    assert_amp_close(loop, (jnp.ones((2, 2)),), backward=False)


def test_split_arguments_give_the_errors_of_whole_ones():
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    put = lambda x, *spec: jax.device_put(x, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))
    params = {"up": put(PARAMS["up"], None, "model"), "down": put(PARAMS["down"], "model")}
    whole, split = (
        compare(loss, compute_dtype=jnp.bfloat16)(*args) for args in ((PARAMS, X), (params, put(X, "data")))
    )
    for kind in ("results", "gradients", "operations"):
        expected = {(row.name, row.scope): row.error.relative for row in getattr(whole, kind)}
        found = {(row.name, row.scope): row.error.relative for row in getattr(split, kind)}
        assert found == pytest.approx(expected, rel=0.5, abs=1e-4)  # each device rounds its part of a sum


# -- tools that are given an amp


def tanh_loss(w, x):
    return jnp.mean(jnp.tanh(x @ w) ** 2)


TANH_ARGS = jnp.linspace(-1, 1, 64).reshape(8, 8), jnp.linspace(0, 1, 32).reshape(4, 8)


def test_an_amp_is_compared_with_what_it_wraps():
    amp = jaxamp.amp(tanh_loss, compute_dtype=jnp.bfloat16)
    plain, wrapped = compare(tanh_loss, compute_dtype=jnp.bfloat16)(*TANH_ARGS), compare(amp)(*TANH_ARGS)
    assert str(wrapped) == str(plain)
    assert wrapped.gradients[0].error.relative > 0
    assert compare(amp, compute_dtype=jnp.float16)(*TANH_ARGS).compute_dtype == "float16"
    with pytest.raises(AssertionError, match="w"):
        assert_amp_close(amp, TANH_ARGS, rtol=1e-9)


def test_other_tools_look_at_what_an_amp_wraps_with_its_options():
    policy = jaxamp.default_amp_policy | {lax.tanh_p: jaxamp.use_original_precision, "nowhere": "float32"}
    options = {"compute_dtype": jnp.bfloat16, "amp_policy": policy, "keep": "matmuls"}
    amp = jaxamp.amp(tanh_loss, disable_passes=["recompute"], **options)
    report = jaxamp.amp_report(amp)(*TANH_ARGS)
    assert str(report) == str(jaxamp.amp_report(tanh_loss, disable_passes=["recompute"], **options)(*TANH_ARGS))
    assert jaxamp.bytes_kept(amp)(*TANH_ARGS) == jaxamp.bytes_kept(tanh_loss, disable_passes=["recompute"], **options)(
        *TANH_ARGS
    )
    assert jaxamp.unmatched_keys(amp)(*TANH_ARGS) == ["nowhere"]
    overflow = jaxamp.amp(lambda x: jnp.sum(x @ x @ x @ x), compute_dtype=jnp.float16)
    assert jaxamp.find_overflow(overflow)(jnp.full((8, 8), 30.0)).events
