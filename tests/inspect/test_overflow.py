"""Planted faults, and where `find_overflow` says they are."""

import importlib.util
import io
import json
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import slow
from jax import lax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxamp
from jaxamp import find_overflow
from jaxamp._inspect import progress

X, W = jax.device_put(np.ones((4, 8), np.float32)), jax.device_put(np.eye(8, dtype=np.float32))
LOW_EXP = jaxamp.default_amp_policy | {lax.exp_p: jaxamp.use_compute_precision}


def line_of(text: str) -> int:
    """The number of the line of this file that ends with a comment."""
    with open(__file__, encoding="utf-8") as file:
        (found,) = [number for number, line in enumerate(file, 1) if line.rstrip().endswith(f"# {text}")]
    return found


def exp_of_100(w, x):
    with jax.named_scope("head"):
        return jnp.sum(jnp.exp(x @ w))  # planted exp


def test_an_exp_of_100_in_float16():
    report = find_overflow(exp_of_100, amp_policy=LOW_EXP)(100 * W, X)
    event = report.first
    assert (event.kind, event.phase, event.scope, event.primitive) == ("overflow", "forward", "head", "exp")
    assert event.source.file == __file__
    assert event.source.line == line_of("planted exp")
    assert (event.largest, event.limit, event.dtype, event.share) == (100.0, 65504.0, "float16", 1.0)
    assert report
    assert not report.finite
    assert "overflow in the forward pass: exp (scope head, test_overflow.py:" in str(report)
    assert "100 % of the entries; largest operand 100, the largest float16 is 6.55e+04" in str(report)
    assert not find_overflow(exp_of_100)(100 * W / 50, X)  # the default runs exp in float32


def test_a_row_that_is_masked_out_whole():
    def loss(w, x):
        masked = jnp.where(jnp.arange(4)[:, None] == 2, -jnp.inf, x @ w)
        return jnp.sum(jax.nn.softmax(masked) @ w)  # planted mask

    event = find_overflow(loss)(W, X).first
    assert (event.kind, event.primitive, event.share) == ("invalid", "sub", 0.25)
    assert event.source.line == line_of("planted mask")


def test_an_overflow_in_the_backward_pass_alone():
    def loss(w, x):
        return 1e6 * jnp.sum(jnp.tanh(x @ w) @ w)

    report = find_overflow(loss)(W, X)
    assert report.first.phase == "backward"
    assert report.first.kind == "overflow"
    assert report.first.at_scale_one is None
    assert not find_overflow(loss, backward=False)(W, X)


@pytest.mark.parametrize("reverse", [False, True])
def test_the_7th_iteration_of_a_scan(reverse):
    def loss(w, x):
        def body(c, i):
            factor = jnp.where(i == (2 if reverse else 6), 2000.0, 0.001)
            return c + jnp.sin((c @ (200 * w)) @ (factor * w)), None  # planted scan

        return jnp.sum(lax.scan(body, x, jnp.arange(9), reverse=reverse)[0])

    event = find_overflow(loss)(W, X).first
    assert (event.kind, event.primitive, event.rounds) == ("overflow", "dot_general", (2 if reverse else 6,))
    assert event.source.line == line_of("planted scan")
    assert "round 6 of the loop" in str(event) or reverse


def test_all_rounds_are_told_and_of_nested_loops_the_outermost_first():
    def loss(w, x):
        def body(c, i):
            y = (c @ (200 * w)) @ (jnp.where(i >= 4, 2000.0, 0.001) * w)
            return jnp.where(i == 5, y, c), None  # rounds 4 and 6 are masked

        return jnp.sum(lax.scan(lambda c, _: lax.scan(body, x, jnp.arange(7)), x, None, length=2)[0])

    report = find_overflow(loss, backward=False)(W, X)
    assert not report.finite
    assert report.first.rounds == (0, 4)
    assert report.first.again == ((0, 5), (1, 4), (1, 5))
    assert "round 0/4 of the loops, the outermost first" in str(report)
    assert "Again in 3 other rounds: 0/5, 1/4, 1/5" in str(report)


def test_a_while_loop_and_a_branch():
    def loss(w, x):
        def body(state):
            i, c = state
            return i + 1, lax.cond(i == 3, lambda c: c @ (4e4 * w) @ w, lambda c: c @ w, c)

        return jnp.sum(lax.while_loop(lambda s: s[0] < 5, body, (0, 2 * x))[1])

    report = find_overflow(loss)(W, X)
    assert (report.first.kind, report.first.rounds) == ("overflow", (3,))
    assert report.notes[0].startswith("no backward pass: ValueError: Reverse-mode differentiation does not work")


def test_a_mapped_loop_leaves_examples_that_are_done():
    def loss(w, n):
        return jax.vmap(lambda k: lax.while_loop(lambda c: c > 1.0, jnp.log, k))(n).sum() * w

    report = find_overflow(loss, backward=False)(jnp.float32(1), jnp.array([2.0, 1e9]))
    assert report.finite
    found = jaxamp.compare(loss, backward=False)(jnp.float32(1), jnp.array([2.0, 1e9]))
    assert found.results[0].error.largest == pytest.approx(0.7966, rel=1e-3)


def test_arguments_that_are_not_finite_are_told():
    report = find_overflow(lambda w, x: jnp.sum(x @ w))(W.at[0, 0].set(jnp.nan), X)
    assert report.notes == ("1 of the arguments' arrays are not finite to begin with",)
    assert "nothing found" not in str(report)


@jax.custom_vjp
def custom(x, w):
    return x @ w


def custom_backward(residuals, g):
    x, w = residuals
    with jax.named_scope("faulty"):
        g = (g @ (3e4 * w.T)) @ (3e4 * w)
    return g, x.T @ g


custom.defvjp(lambda x, w: (x @ w, (x, w)), custom_backward)


def test_the_backward_rule_of_a_custom_vjp():
    event = find_overflow(lambda w, x: jnp.sum(custom(x, w)))(W, X).first  # planted rule
    assert (event.kind, event.phase, event.scope) == ("overflow", "backward", "faulty")
    assert event.source.line == line_of("planted rule")  # JAX knows where the function was called, not the rule's line


@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint, lambda f: jax.vmap(f, (None, 0)), jax.custom_jvp])
def test_a_fault_inside_of_transforms(wrap):
    def inner(w, x):
        return jnp.sum((x @ (300 * w)) @ (300 * w))  # planted inside

    inner_ = wrap(inner)
    if wrap is jax.custom_jvp:
        inner_.defjvp(lambda primals, tangents: jax.jvp(inner, primals, tangents))
    event = find_overflow(lambda w, x: jnp.sum(inner_(w, x)))(W, X).first
    assert (event.kind, event.phase, event.primitive) == ("overflow", "forward", "dot_general")
    assert event.source.line == line_of("planted inside")


def test_a_healthy_step_has_nothing():
    def loss(w, x):
        return jnp.mean(jax.nn.softmax(jax.nn.gelu(x @ w) @ w))

    for dtype in (jnp.float16, jnp.bfloat16):
        report = find_overflow(loss, compute_dtype=dtype)(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
        assert not report
        assert (report.finite, report.first) == (True, None)
        assert str(report).endswith("nothing found")


def test_what_is_masked_out_again_does_not_reach_the_results():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.where(y > 0, jnp.log(lax.stop_gradient(y)), 0.0))

    report = find_overflow(loss)(W - 1, X)  # zeros, and the logarithm of negative numbers
    assert report.finite
    assert {event.kind for event in report.events} == {"invalid"}
    assert "All results are finite" in str(report)


def test_the_scale_of_a_scaler_is_told_from_what_is_there_without():
    def loss(w, x):
        return jnp.sum(jnp.tanh(x @ w) @ w)

    state = jaxamp.DynamicScalerState()._replace(scaler=jnp.float32(2.0**15))
    report = find_overflow(loss)(3 * W, 0.1 * X, dynamic_scaler_state=state)
    assert report.scale == 2.0**15
    assert report.first.at_scale_one is False
    assert "the scaler handles it by lowering the scale" in str(report)

    report = find_overflow(lambda w, x: 1e6 * loss(w, x))(W, X, dynamic_scaler_state=state)
    assert report.first.at_scale_one is True
    assert "a smaller scale won't help" in str(report)


def test_what_overflows_elsewhere_at_scale_one_is_told_too():
    large, half = jnp.full((8, 8), 6e4), jnp.full((8, 8), 0.5)

    def loss(w, x):
        y = x @ w
        with jax.named_scope("middle"):
            z = y @ large
        with jax.named_scope("end"):
            return jnp.sum(z @ half)

    report = find_overflow(loss)(1e-4 * W, 1e-4 * X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert {event.scope: event.at_scale_one for event in report.events}["middle"] is True


def test_the_round_of_a_loop_may_differ_between_scales():
    def loss(w, x, factors):
        return jnp.sum(lax.scan(lambda c, f: ((c @ w) * f, None), x, factors)[0])

    factors = jnp.array([1.0, 1.0, 9000.0, 9000.0, 1.0])
    state = jaxamp.DynamicScalerState()
    report = find_overflow(loss)(W, 1e-6 * X, factors, dynamic_scaler_state=state)
    assert {event.at_scale_one for event in report.events if event.phase == "backward"} == {True}


def test_an_overflow_beside_infinities_of_a_mask():
    mask = jnp.where(jnp.tril(jnp.ones((4, 4))) > 0, 0.0, -jnp.inf)

    def loss(w, q):
        scores = q @ q.T
        with jax.named_scope("bad"):
            scores = (scores + mask) * w
        return jnp.sum(jnp.tanh(scores @ q))

    event = find_overflow(loss)(jnp.full((4, 4), 300.0), jnp.full((4, 4), 10.0)).first
    assert (event.kind, event.scope, event.primitive) == ("overflow", "bad", "mul")


NAN, INF = jnp.nan, jnp.inf


@pytest.mark.parametrize(
    ("fn", "x", "kind", "primitive", "share"),
    [
        (lambda x: jnp.log(x), [NAN, -1.0, 1.0, 2.0], "invalid", "log", 0.25),
        (lambda x: jnp.exp(x), [NAN, -INF, 100.0, 2.0], "overflow", "exp", 0.25),
        (lambda x: jnp.sum(x, 1), [[-INF, 1.0], [3e38, 3e38]], "overflow", "reduce_sum", 0.5),
        (lambda x: jnp.sum(x, 1), [[NAN, 1.0], [INF, -INF]], "invalid", "reduce_sum", 0.5),
        (lambda x: jnp.sum(x, 1), [[-INF, 1e38, 3e38], [1.0, 1.0, 1.0]], None, None, None),
        (lambda x: jnp.prod(x, 1), [[-INF, 1.0], [3e38, 3e38]], "overflow", "reduce_prod", 0.5),
        (lambda x: jnp.cumsum(x), [3e38, 3e38, -INF, 1.0], "overflow", "cumsum", 0.75),
        (lambda x: x @ x.T, [[INF, 1.0], [3e38, 3e38]], "overflow", "dot_general", 0.25),
        (lambda x: jnp.linalg.cholesky(x), [[NAN, 1.0], [1.0, -1.0]], None, None, None),
        (lambda x: jnp.sort(x)[::-1], [NAN, INF, 1.0, 2.0], None, None, None),
        (lambda x: jnp.sum(x, 1), [[NAN, 1.0], [INF, 2.0]], None, None, None),
    ],
)
def test_what_is_made_beside_what_is_there_already(fn, x, kind, primitive, share):
    policy = {lax.exp_p: jaxamp.use_compute_precision}
    events = find_overflow(fn, backward=False, amp_policy=policy)(jnp.array(x, jnp.float32)).events
    found = [(event.kind, event.primitive, event.share) for event in events]
    assert found == ([] if kind is None else [(kind, primitive, share)])


def test_a_peaked_softmax_is_healthy():
    def loss(w, x):
        return jnp.sum(jax.nn.softmax(30 * (x @ w)) @ w)

    assert not find_overflow(loss)(W * jnp.arange(8.0), X)


def test_gradients_that_are_flushed_to_zero():
    def loss(w, x):
        return 1e-9 * jnp.sum(jnp.tanh(x @ w) @ w)

    report = find_overflow(loss)(W, X)
    assert report
    assert report.finite
    assert {event.kind for event in report.underflows} == {"underflow"}
    assert report.underflows[0].share == 1.0
    assert report.underflows[0].phase == "backward"
    assert report.underflows[0].limit == float(jnp.finfo(jnp.float16).smallest_normal)
    small = jaxamp.DynamicScalerState().as_arrays()._replace(scaler=jnp.float32(2))
    assert "A larger scale would keep more of it." in str(find_overflow(loss)(W, X, dynamic_scaler_state=small))
    scaled = find_overflow(loss)(W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    assert not scaled.underflows
    assert not find_overflow(loss, compute_dtype=jnp.bfloat16)(W, X)


def test_what_is_clamped_to_the_range_of_the_dtype():
    scales = jnp.array([1.0, 1e6, 1e6, 1.0])[:, None]

    def loss(w, x):
        with jax.named_scope("head"):
            return jnp.sum((x * scales) @ w)  # planted clamp

    report = find_overflow(loss)(W, X)
    assert report.finite
    assert report
    assert (report.events, report.underflows) == ((), ())
    (event,) = report.clamped
    assert (event.kind, event.phase, event.scope, event.primitive) == ("clamped", "forward", "head", "dot_general")
    assert (event.largest, event.limit, event.dtype, event.share) == (1e6, 65504.0, "float16", 0.5)
    assert event.source.line == line_of("planted clamp")
    assert "clamped in the forward pass: an operand of dot_general (scope head, test_overflow.py:" in str(report)
    assert "50 % of the entries; largest operand 1e+06, the largest float16 is 6.55e+04" in str(report)
    assert "nothing found" not in str(report)
    assert json.loads(json.dumps(report.to_dict()))["clamped"][0]["primitive"] == "dot_general"
    assert not find_overflow(loss)(W, 1e-3 * X)
    assert find_overflow(jax.checkpoint(loss))(W, X).clamped == report.clamped


def test_a_clamp_of_the_users_is_theirs():
    def loss(w, x):
        return jnp.sum(lax.clamp(-65504.0, 1e6 * x, 65504.0)) + jnp.sum(w)

    assert not find_overflow(loss)(W, X)


def test_zeros_that_are_zeros_in_float32_too_are_no_underflow():
    assert not find_overflow(lambda w, x: jnp.sum(jax.nn.relu(x @ w) @ w))(-W, X)


def test_several_results_the_first_is_differentiated():
    def loss(w, x):
        y = x @ w
        return jnp.sum(y), {"count": jnp.arange(3), "norm": jnp.sqrt(jnp.sum((w - w) ** 2))}

    report = find_overflow(loss)(W, X)  # the norm has no finite derivative, and none is asked for
    assert report.finite
    assert not [event for event in report.events if event.phase == "backward"]


def test_an_operation_of_a_derivative_says_of_what():
    report = find_overflow(lambda w, x: jnp.sum(jnp.sqrt(x * w)))(jnp.zeros((4, 8)), X)
    assert (report.first.primitive, report.first.of) == ("div", "sqrt")
    assert "overflow in the forward pass: div, made for sqrt (test_overflow.py:" in str(report)


def test_the_report_as_a_dictionary():
    report = find_overflow(exp_of_100, amp_policy=LOW_EXP)(100 * W, X, dynamic_scaler_state=jaxamp.DynamicScalerState())
    found = json.loads(json.dumps(report.to_dict()))
    assert found["events"][0]["primitive"] == "exp"
    assert found["events"][0]["source"]["function"] == "exp_of_100"
    assert found["finite"] is False


def test_bad_input():
    with pytest.raises(TypeError, match="find_overflow got 3, of type int; expected a function"):
        find_overflow(3)
    with pytest.raises(TypeError, match="find_overflow got a shape or a traced value; expected arrays"):
        find_overflow(exp_of_100)(jax.ShapeDtypeStruct((8, 8), jnp.float32), X)
    with pytest.raises(TypeError, match="DynamicScalerState"):
        find_overflow(exp_of_100)(W, X, dynamic_scaler_state=2.0**15)


def test_results_are_those_of_amp():
    def loss(w, x):
        def body(c, _):
            return jnp.tanh(c @ w), jnp.sum(c)

        c, ys = lax.scan(body, x, None, length=3)
        return jnp.sum(c) + jnp.sum(ys)

    from jaxamp._inspect.location import Place
    from jaxamp._inspect.program import program_of
    from jaxamp._inspect.walk import Walker
    from jaxamp._transform.options import check_options

    program = program_of(check_options(jnp.bfloat16, "default"), loss, (W, X), {})
    seen = []
    walker = Walker(program.ledger, lambda eqn, place, ins, outs: seen.append((eqn.primitive.name, place.rounds)))
    (out,) = walker.run(program.mixed, program.arrays, Place("forward"))
    expected = jaxamp.amp(loss, compute_dtype=jnp.bfloat16)(W, X)
    np.testing.assert_array_equal(np.asarray(out), np.asarray(expected))
    assert [rounds for name, rounds in seen if name == "tanh"] == [(0,), (1,), (2,)]


def test_a_constant_that_is_nan_is_named():
    x = jnp.ones((4, 4))
    bad = np.full((4, 4), np.nan, np.float32)
    (note,) = jaxamp.find_overflow(lambda x: jnp.sum(x * jnp.nan))(x).notes
    assert note.startswith("a constant that is NaN is read by mul (test_overflow.py:")
    for fn in (lambda x: jnp.sum(x @ bad), jax.jit(lambda x: jnp.sum(x @ bad))):
        assert jaxamp.find_overflow(fn)(x).notes == ("1 of the arrays that the function closes over have a NaN",)
    masked = jnp.where(np.tri(4) > 0, 0.0, -np.inf)  # an infinite constant is a mask
    assert not jaxamp.find_overflow(lambda x: jax.nn.softmax(x + masked).sum())(x).notes


# -- causes, consequences, remedies


def norm(x):
    return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5)


def overflows_then_norms(w, x):
    with jax.named_scope("mlp"):
        h = (x @ (300 * w)) @ (300 * w)  # planted cause
    with jax.named_scope("norm"):
        return jnp.sum(norm(norm(h)) @ w)


def test_norms_after_an_overflow_are_consequences():
    report = find_overflow(overflows_then_norms)(W, X)
    assert [(event.kind, event.scope) for event in report.events] == [("overflow", "mlp")]
    assert report.consequences
    assert {event.kind for event in report.consequences} == {"invalid"}
    assert {event.scope for event in report.consequences if event.phase == "forward"} == {"norm"}
    assert report.passed_on > 0
    assert f"It spread: {report.passed_on} later operations passed it on, " in str(report)
    assert " made NaNs of it: sub (test_overflow.py:" in str(report)
    read = json.loads(json.dumps(report.to_dict()))
    assert read["consequences"][0]["is_consequence"] is True
    assert read["events"][0]["remedy"] == report.first.remedy


def test_a_mask_of_infs_beside_an_overflow_is_a_cause_of_its_own():
    def loss(w, x):
        hidden = (x @ (300 * w)) @ (300 * w)
        bounded = jnp.tanh(hidden)  # finite again
        masked = jnp.where(jnp.arange(4)[:, None] == 2, -jnp.inf, bounded)
        return jnp.sum(jax.nn.softmax(masked))

    events = find_overflow(loss, backward=False)(W, X).events
    assert [(event.kind, event.primitive) for event in events] == [("overflow", "dot_general"), ("invalid", "sub")]


def test_consequences_in_later_rounds_of_a_loop():
    def loss(w, x):
        def body(c, factor):
            return norm((c @ (factor * w)) @ (factor * w)), None

        return jnp.sum(lax.scan(body, x, jnp.array([1.0, 300.0, 1.0, 1.0]))[0])

    report = find_overflow(loss, backward=False)(W * jnp.arange(8.0), X)
    assert [(event.kind, event.rounds) for event in report.events] == [("overflow", (1,))]
    assert {event.rounds for event in report.consequences} == {(1,)}
    assert report.passed_on > 10


def test_the_remedy_that_pins_the_scope_helps():
    event = find_overflow(overflows_then_norms)(W, X).first
    assert event.remedy == (
        "Pass compute_dtype=jnp.bfloat16, or pin the scope: amp_policy=jaxamp.default_amp_policy | "
        "{'mlp': jaxamp.use_original_precision}."
    )
    policy = jaxamp.default_amp_policy | {"mlp": jaxamp.use_original_precision}
    assert not find_overflow(overflows_then_norms, amp_policy=policy)(W, X).events
    assert not find_overflow(overflows_then_norms, compute_dtype=jnp.bfloat16)(W, X).events


def test_the_remedies_of_others():
    bare = lambda w, x: jnp.sum((x @ (300 * w)) @ (300 * w))
    assert find_overflow(bare)(W, X).first.remedy.endswith("or put `with jaxamp.amp_stop():` around it.")
    in_float32 = find_overflow(lambda x: jnp.sum(jnp.log(x)))(-X).first
    assert in_float32.remedy.startswith("It runs in float32 already: look at its operands")
    small = find_overflow(lambda w, x: 1e-9 * jnp.sum(jnp.tanh(x @ w) @ w))(W, X).underflows[0]
    assert small.remedy.startswith("Scale the loss with jaxamp.DynamicScalerState, or pass compute_dtype=jnp.bfloat16")


def test_a_cast_to_float16_and_back_overflows():
    """XLA may leave out such a pair of casts, and would hide the overflow."""

    def loss(x):
        y = x.astype(jnp.float16).astype(jnp.float32)
        return jnp.sum(jnp.tanh(y))

    event = find_overflow(loss, backward=False)(1e5 * X).first
    assert (event.kind, event.primitive, event.dtype) == ("overflow", "convert_element_type", "float16")
    sums = lambda x: jnp.sum(jnp.tanh((x.astype(jnp.float16) + x.astype(jnp.float16)).astype(jnp.float32)))
    event = find_overflow(sums, backward=False)(4e4 * X).first
    assert (event.primitive, event.dtype, event.share) == ("add", "float16", 1.0)


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize("has_rich", [True, False])
def test_a_terminal_shows_progress_if_it_takes_long(monkeypatch, has_rich):
    monkeypatch.setattr(progress, "_AFTER", 0.0)
    monkeypatch.setattr(progress, "_EVERY", 0.0)
    found = importlib.util.find_spec
    missing = lambda name: found(name) if has_rich or name != "rich" else None
    monkeypatch.setattr(progress.importlib.util, "find_spec", missing)
    for stream in (io.StringIO(), Terminal()):
        monkeypatch.setattr("sys.stderr", stream)
        find_overflow(exp_of_100, backward=False)(W, X)
        assert ("find_overflow" in stream.getvalue()) == stream.isatty()


def test_a_short_run_shows_nothing(monkeypatch):
    monkeypatch.setattr(progress, "_AFTER", 1e6)
    monkeypatch.setattr("sys.stderr", Terminal())
    find_overflow(exp_of_100, backward=False)(W, X)
    assert sys.stderr.getvalue() == ""


def test_operations_are_counted_with_the_rounds_of_loops():
    loop = lambda x: lax.scan(lambda c, _: (jnp.sin(jnp.cos(c)), None), jax.jit(jnp.tan)(x), length=5)[0]
    assert progress.operations_of(jax.make_jaxpr(loop)(X)) == 11


# -- many devices


MESH = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
# The third quarter has a large row.
ROWS = jax.device_put(np.float32([[600.0 if i == 9 else 1.0] * 8 for i in range(16)]))


def placed(x, *spec):
    return jax.device_put(x, NamedSharding(MESH, P(*spec)))


def two_matmuls(w, x):
    return jnp.sum(jnp.tanh((x @ w) @ (200 * w)))


def test_the_shards_that_overflow_are_named():
    report = find_overflow(two_matmuls)(placed(W, None, "model"), placed(ROWS, "data"))
    first, second = report.first.shards
    assert first == ("[8:12, 0:4]", (4,), {"data": 2, "model": 0})
    assert second == ("[8:12, 4:8]", (5,), {"data": 2, "model": 1})
    assert report.first.shard_count == 8
    assert "In 2 of 8 shards: [8:12, 0:4] on device 4 (data 2, model 0); [8:12, 4:8] on" in str(report)
    assert json.loads(json.dumps(report.to_dict()))["events"][0]["shards"][1]["devices"] == [5]


@pytest.mark.slow
def test_devices_that_have_the_same_shard_are_named_together():
    (shard,) = find_overflow(two_matmuls)(placed(W), placed(ROWS, "data")).first.shards
    assert shard == ("[8:12, :]", (4, 5), {"data": 2})
    assert str(shard) == "[8:12, :] on devices 4, 5 (data 2)"


@pytest.mark.slow
def test_an_overflow_in_all_shards_and_one_in_an_array_that_is_not_split():
    report = find_overflow(two_matmuls)(placed(W), placed(jnp.full((16, 8), 600.0), "data"))
    assert "In all 4 shards" in str(report.first)
    for arrays in ((W, ROWS), (placed(W), placed(ROWS))):
        event = find_overflow(two_matmuls)(*arrays).first
        assert (event.shards, event.shard_count) == ((), 0)
        assert "shard" not in str(event)


def test_clamped_operands_name_their_shards():
    scales = jnp.ones((16, 1)).at[9].set(1e6)
    (event,) = find_overflow(lambda w, x: jnp.sum((x * scales) @ w))(
        placed(W), placed(jnp.ones((16, 8)), "data")
    ).clamped
    assert [shard.coordinates for shard in event.shards] == [{"data": 2}]


@pytest.mark.parametrize("check_vma", [True, slow(False)])
def test_the_device_and_the_line_in_a_shard_map(check_vma):
    def body(w, x):
        def layer(h, factor):
            with jax.named_scope("layer"):
                return jnp.tanh((h @ w) @ (factor * w)), None  # planted in a map

        return lax.pmean(jnp.sum(lax.scan(layer, x, jnp.array([1e-3, 200.0]))[0]), ("data", "model"))

    fn = jax.shard_map(body, mesh=MESH, in_specs=(P(), P(("data", "model"))), out_specs=P(), check_vma=check_vma)
    event = find_overflow(fn, backward=False)(200 * W, ROWS).first
    assert (event.kind, event.primitive, event.scope) == ("overflow", "dot_general", "layer")
    assert event.source.line == line_of("planted in a map")
    assert event.shards == (("", (4,), {"data": 2, "model": 0}),)
    assert "In 1 of 8 shards: device 4 (data 2, model 0)" in str(event)


@pytest.mark.slow
def test_a_fault_of_one_device_in_the_backward_pass_of_a_shard_map():
    def body(w, x):
        scale = jnp.where(lax.axis_index("data") == 3, 1e6, 1.0)
        return lax.pmean(scale * jnp.sum(jnp.tanh(x @ w) @ w), ("data", "model"))

    fn = jax.shard_map(body, mesh=MESH, in_specs=(P(), P(("data", "model"))), out_specs=P())
    report = find_overflow(fn)(W, jnp.ones((16, 8)))
    assert report.first.phase == "backward"
    assert {shard.coordinates["data"] for shard in report.first.shards} == {3}
    assert report.first.shard_count == 8
