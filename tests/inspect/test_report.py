"""What a report says: reasons, totals, source lines; as data, as text, and as a check."""

import json

import jax
import jax.numpy as jnp
import pytest
from helpers import raises, shape
from jax import lax
from reports import HLO

import jaxamp
from jaxamp import amp_report, assert_mixed

F32 = jnp.float32
X, W = jnp.ones((16, 8)), jnp.ones((8, 8))


def reasons(fn, *args, dtype=jnp.bfloat16, **options):
    """Of forward operations that the user wrote: the reason by the primitive."""
    report = amp_report(fn, compute_dtype=dtype, backward=False, **options)(*args)
    return {row.primitive: row.reason for row in report.rows if row.written is not None}


def net(params, x):
    with jax.named_scope("block"):
        x = jax.nn.gelu(x @ params["up"]) @ params["down"]
    with jax.named_scope("head"):
        return jnp.mean(jax.nn.logsumexp(x @ params["head"], axis=-1))


NET = {"up": shape(8, 32), "down": shape(32, 8), "head": shape(8, 10)}, shape(16, 8)


# -- reasons


def test_a_matmul_is_low_by_the_table():
    assert reasons(lambda x, w: x @ w, X, W) == {"dot_general": "policy table"}


def test_a_scope_is_the_reason():
    policy = jaxamp.default_amp_policy | {"attention": jaxamp.use_original_precision}
    with_scope = jax.named_scope("attention")(lambda x, w: x @ w)
    assert reasons(with_scope, X, W, amp_policy=policy) == {"dot_general": "scope 'attention'"}
    policy = jaxamp.default_amp_policy | {("attention", lax.dot_general_p): jaxamp.use_original_precision}
    assert reasons(with_scope, X, W, amp_policy=policy) == {"dot_general": "scope 'attention' and primitive"}


def test_what_follows_says_what_it_follows():
    found = reasons(lambda x, w: jnp.maximum(x @ w, 0) @ w, X, W)
    assert found["max"] == "follows a low operand"
    found = reasons(lambda x, w: jnp.exp(x @ w + 1), X, W)
    assert found["add"] == "consumed only by exp"
    found = reasons(lambda x: jnp.exp(x) + 1, X)
    assert found["add"] == "follows a float32 operand"


def test_constants_and_positions():
    def epsilon(x, w):
        return (x @ w + 1e-12) @ w

    assert reasons(epsilon, X, W, dtype=jnp.float16)["add"] == "literal 1e-12 underflows in float16"
    assert reasons(epsilon, X, W)["add"] == "follows a low operand"
    beyond = lambda x, w: (x @ w * 1e6) @ w
    assert reasons(beyond, X, W, dtype=jnp.float16)["mul"] == "literal 1e+06 is beyond float16"
    positions = lambda w: jnp.arange(8, dtype=F32) @ w
    assert reasons(positions, W)["dot_general"] == "made from positions"


def test_what_is_not_entered():
    def called(x, w):
        return jax.pure_callback(lambda a: a, shape(16, 8), x @ w) @ w

    report = amp_report(called)(X, W)
    (row,) = [row for row in report.rows if row.kind == "not entered"]
    assert row.reason == "not entered: pure_callback"
    assert report.not_entered == {"pure_callback": 1}
    assert report.notes == (
        "no backward pass: ValueError: Pure callbacks do not support JVP. Please use `jax.custom_jvp` to use callbacks "
        "while taking gradients.",
    )
    assert "not entered                 pure_callback (1)" in report.text()


def test_a_derivative_has_the_reason_of_what_it_is_of():
    report = amp_report(lambda w, x: jnp.sum(x @ w), compute_dtype=jnp.bfloat16)(W, X)
    (row,) = [row for row in report.matmuls if row.phase == "backward"]
    assert row.reason == "derivative of dot_general: policy table"
    assert str(row.written) == "f32 f32 -> f32"
    assert str(row.run) == "bf16 bf16 -> f32"


WRAPS = {
    "plain": lambda f: f,
    "jit": jax.jit,
    "checkpoint": jax.checkpoint,
    "scan": lambda f: lambda w, x: lax.scan(lambda c, _: (f(w, c), None), x, None, length=3)[0],
    "cond": lambda f: lambda w, x: lax.cond(x[0, 0] > 0, f, lambda w, x: x, w, x),
    "nested": lambda f: jax.jit(lambda w, x: jax.checkpoint(f)(w, x)),
}


@pytest.mark.parametrize("wrap", WRAPS)
@pytest.mark.parametrize("inside", [False, True])
def test_the_scope_that_pins_a_part_is_the_reason_of_its_derivatives(wrap, inside):
    pinned = jax.named_scope("pinned")
    layer = WRAPS[wrap](pinned(lambda w, x: jnp.tanh(x @ w)) if inside else lambda w, x: jnp.tanh(x @ w))

    def loss(w, x):
        return jnp.sum((layer if inside else pinned(layer))(w, x) @ w)

    policy = jaxamp.default_amp_policy | {"pinned": jaxamp.use_original_precision}
    report = amp_report(loss, compute_dtype=jnp.bfloat16, amp_policy=policy)(W, X)
    matmuls = [row for row in report.matmuls if row.scope == "pinned"]
    assert {(row.phase, row.reason) for row in matmuls} == {
        ("forward", "scope 'pinned'"),
        ("backward", "derivative of dot_general: scope 'pinned'"),
    }
    assert {str(row.written) for row in matmuls} == {"f32 f32 -> f32"}
    assert not [row for row in report.rows if row.scope == "pinned" and row.written is None and row.kind != "cast"]


def test_the_rule_of_a_custom_derivative_in_a_pinned_scope_has_its_reason():
    @jax.custom_vjp
    def f(w, x):
        return x @ w

    f.defvjp(lambda w, x: (x @ w, (w, x)), lambda kept, g: (kept[1].T @ g, g @ kept[0].T))
    policy = jaxamp.default_amp_policy | {"pinned": jaxamp.use_original_precision}
    report = amp_report(lambda w, x: jnp.sum(jax.named_scope("pinned")(f)(w, x)), amp_policy=policy)(W, X)
    assert {row.reason.partition(": ")[2] for row in report.matmuls if row.phase == "backward"} == {"scope 'pinned'"}


def test_a_loop_that_a_key_keeps_out_runs_as_written():
    def loss(w, x):
        x = lax.scan(lambda c, _: (jax.jit(lambda c: jnp.tanh(c @ w))(c), None), x @ w, None, length=3)[0]
        return jnp.sum(x @ w)

    policy = jaxamp.default_amp_policy | {jaxamp._compat.primitives()["scan"]: jaxamp.use_original_precision}
    report = amp_report(loss, compute_dtype=jnp.bfloat16, amp_policy=policy)(W, X)
    inside = [row for row in report.rows if row.times == 3 and row.phase == "forward"]
    assert {(row.primitive, str(row.written), row.reason) for row in inside} == {
        ("dot_general", "f32 f32 -> f32", "inside of scan: policy table"),
        ("tanh", "f32 -> f32", "inside of scan: policy table"),
    }
    back = {row.reason for row in report.matmuls if row.times == 3 and row.phase == "backward"}
    assert back == {"derivative of dot_general: inside of scan: policy table"}


def test_what_an_amp_inside_has_made_low_says_so():
    inside = jaxamp.amp(lambda w, x: jnp.tanh(x @ w), compute_dtype=jnp.bfloat16)
    report = amp_report(lambda w, x: jnp.sum(inside(w, x)), compute_dtype=jnp.bfloat16)(W, X)
    found = {row.phase: (row.reason, str(row.run)) for row in report.matmuls}
    assert found == {
        "forward": ("low already, by an amp inside", "bf16 bf16 -> bf16"),
        "backward": ("derivative of dot_general: low already, by an amp inside", "bf16 bf16 -> f32"),
    }
    assert all(row.written is not None for row in report.matmuls)
    assert not any("mixed_" in row.reason for row in report.rows)


# -- rows


def test_rows_name_the_lines_of_the_user():
    report = amp_report(net)(*NET)
    assert {row.source.file for row in report.matmuls} == {__file__}
    assert {row.source.function for row in report.matmuls} == {"net"}
    lines = {row.scope: row.source.line for row in report.matmuls}
    assert lines["head"] - lines["block"] == 2
    ours = [row for row in report.rows if row.source is not None and row.source.file != __file__]
    assert not ours


def test_a_scope_is_said_once():
    def loss(w, x):
        with jax.named_scope("block"):
            return jnp.mean(jax.nn.gelu(jax.nn.softmax(x @ w) @ w) @ w)

    report = amp_report(loss, compute_dtype=jnp.bfloat16)(shape(8, 8), shape(16, 8))
    assert {row.scope for row in report.rows} == {"block"}


def test_the_body_of_a_scan_counts_by_its_length():
    def loss(w, x):
        return jnp.sum(lax.scan(lambda c, _: (jnp.tanh(c @ w), None), x, None, length=5)[0])

    report = amp_report(loss, compute_dtype=jnp.bfloat16)(shape(8, 8), shape(16, 8))
    forward = [row for row in report.matmuls if row.phase == "forward"]
    assert [(row.times, row.flops) for row in forward] == [(5, 5 * 2 * 16 * 8 * 8)]
    assert sum(row.flops for row in report.matmuls) == 3 * 5 * 2 * 16 * 8 * 8
    assert report.matmul_flops == {"bfloat16": 3 * 5 * 2 * 16 * 8 * 8}


def test_casts_are_those_that_amp_adds():
    def loss(w, x):
        return jnp.sum(jnp.exp(x @ w).astype(jnp.float16))

    report = amp_report(loss, compute_dtype=jnp.bfloat16, backward=False)(shape(8, 8), shape(16, 8))
    assert [str(row.run) for row in report.casts] == ["bf16 -> f32"]  # for the exponential
    assert (report.cast_count, report.cast_bytes) == (1, 16 * 8 * (2 + 4))
    untouched = amp_report(loss, compute_dtype=jnp.float32, backward=False)(shape(8, 8), shape(16, 8))
    assert untouched.cast_count == 0


def test_integers_are_no_business_of_a_report():
    def loss(w, x, i):
        return jnp.sum(x @ w) + jnp.sum(i @ i.T).astype(F32)

    report = amp_report(loss, compute_dtype=jnp.bfloat16)(W, X, jnp.ones((8, 8), jnp.int32))
    assert report.wide_matmuls == ()
    assert report.low_share == 1.0
    assert "int32" in report.matmul_flops
    report.check()


def test_float64_that_was_left_on_fails_a_check():
    with jax.enable_x64(True):
        report = amp_report(lambda w: jnp.sum(w @ w), compute_dtype=jnp.bfloat16)(jnp.ones((8, 8), jnp.float64))
    assert report.low_share == 0.0
    with pytest.raises(AssertionError, match="forward dot_general in float64, not in bfloat16"):
        report.check()


def test_aux_is_not_differentiated():
    def loss(w, x):
        h = x @ w
        return jnp.sum(h), {"logits": (h @ w) @ w}

    report = amp_report(loss)(W, X)
    assert len([row for row in report.matmuls if row.phase == "backward"]) == 1


def test_a_cast_of_the_users_is_theirs_backwards_too():
    def loss(w, x):
        return jnp.sum((x @ w).astype(jnp.bfloat16)).astype(F32)

    assert amp_report(loss, compute_dtype=F32)(W, X).casts == ()


def test_matmuls_of_nothing():
    report = amp_report(lambda w, x: jnp.sum(x @ w))(W, X[:0])
    assert "matmul FLOPs                none" in report.text()
    assert report._repr_html_()


def test_matmuls_that_waste_tensor_cores():
    report = amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    assert {tuple(row.dims) for row in report.wasteful_matmuls} == {
        (16, 10, 8),
        (16, 8, 10),
        (10, 8, 16),
        (8, 10, 16),
    } & {tuple(row.dims) for row in report.matmuls}
    assert all(row.scope == "head" for row in report.wasteful_matmuls)
    assert "Matmuls with a dimension that is not a multiple of 8" in report.text()


# -- totals


def test_totals_of_a_network():
    report = amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    assert report.name == "net"
    assert report.low_share == 1.0
    assert report.wide_matmuls == ()
    assert report.kept == jaxamp.bytes_kept(net, compute_dtype=jnp.bfloat16)(*NET)
    assert report.unmatched == ()
    assert amp_report(jnp.sin)(X).low_share == 1.0  # of no matmuls


def test_a_matmul_that_stays_wide_is_listed_with_its_reason():
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision, "haed": jaxamp.use_compute_precision}
    report = amp_report(net, compute_dtype=jnp.bfloat16, amp_policy=policy)(*NET)
    assert {(row.scope, row.phase) for row in report.wide_matmuls} == {("head", "forward"), ("head", "backward")}
    assert report.unmatched == ("haed",)
    head, block = 3 * 2 * 16 * 8 * 10, 3 * 2 * 2 * 16 * 8 * 32
    block -= 2 * 16 * 8 * 32  # the input has no gradient
    assert report.matmul_flops == {"bfloat16": block, "float32": head}
    assert report.low_share == block / (head + block)
    text = report.text()
    assert "Matmuls not in bfloat16, and why" in text
    assert "keys that matched nothing   'haed'" in text


def test_a_key_that_acts_in_a_derivative_rule_alone_has_matched():
    @jax.custom_vjp
    def f(x):
        return jnp.sin(x)

    def backward(x, g):
        with jax.named_scope("rule"):
            return (g @ x.T @ x,)

    f.defvjp(lambda x: (jnp.sin(x), x), backward)
    policy = jaxamp.default_amp_policy | {"rule": jaxamp.use_original_precision}
    report = amp_report(lambda x: jnp.sum(f(x)), amp_policy=policy)(X)
    assert report.unmatched == ()
    assert {row.reason for row in report.matmuls} == {"derivative of dot_general: scope 'rule'"}
    assert amp_report(lambda x: jnp.sum(f(x)), amp_policy=policy, backward=False)(X).unmatched == ("rule",)


def test_nothing_is_computed():
    def loss(w, x):
        assert isinstance(x, jax.core.Tracer)
        return jnp.sum(x @ w)

    amp_report(loss)(shape(8, 8), shape(16, 8))
    assert amp_report(lambda w: jnp.sum(w))(shape(2**40)).matmuls == ()


def test_a_result_that_is_no_scalar_is_summed_and_told():
    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jnp.sum(x @ w))(w), jnp.sum(x)

    note = "the first floating-point result is float32[8,8], not a scalar: the backward pass is that of its sum. "
    note += "If it is not a loss, pass backward=False."
    assert amp_report(step)(W, X).notes == (note,)
    assert jaxamp.find_overflow(step)(W, X).notes == (note,)
    assert jaxamp.compare(step)(W, X).notes == (note,)
    assert amp_report(step, backward=False)(W, X).notes == ()
    assert amp_report(lambda w, x: (jnp.argmax(w), *step(w, x)[1:]))(W, X).notes == ()


def test_no_float_in_the_results():
    report = amp_report(lambda x: jnp.argmax(x))(X)
    assert report.notes == ("no backward pass: the results have no floating-point array",)
    assert report.kept is None


def test_no_float_in_the_first_argument():
    report = amp_report(lambda i, x: jnp.sum(x) * i)(3, X)
    assert report.notes == ("no backward pass: the first argument has no floating-point array",)


# -- text and data


def test_the_text_fits_100_columns_and_has_no_colour_in_a_file(monkeypatch):
    deep = jax.named_scope("a_scope_with_a_rather_long_name/" * 5)(net)
    report = amp_report(deep, compute_dtype=jnp.bfloat16)(*NET)
    text = str(report)
    assert max(map(len, text.splitlines())) <= 100
    assert "\033" not in text
    assert "matmul FLOPs" in text
    assert "dot_general'" in text
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr("sys.stdout.isatty", lambda: True, raising=False)
    assert "\033[1m" in str(report)
    monkeypatch.setenv("NO_COLOR", "1")
    assert "\033" not in str(report)


def test_the_worst_scope_comes_first():
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision}
    text = amp_report(net, compute_dtype=jnp.bfloat16, amp_policy=policy)(*NET).text()
    table = text[text.index("operation") :].splitlines()
    scopes = [line for line in table if line in ("head", "block")]
    assert scopes == ["head", "block"]


def test_a_long_table_is_cut_and_says_so():
    report = amp_report(net)(*NET)
    short = report.text(limit=3)
    assert "more lines: print(report.text(limit=None))" in short
    assert "more lines" not in report.text(limit=None)


def test_the_dictionary_is_json():
    report = amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    found = json.loads(json.dumps(report.to_dict()))
    assert found["totals"]["low_share"] == 1.0
    assert found["totals"]["bytes_kept"] == {"before": report.kept.before, "after": report.kept.after}
    assert len(found["rows"]) == len(report.rows)
    first = next(row for row in found["rows"] if row["kind"] == "matmul")
    assert first["run"] == {"operands": ["bfloat16", "bfloat16"], "results": ["bfloat16"]}
    assert first["source"]["function"] == "net"
    assert first["dims"] == {"m": 16, "n": 32, "k": 8}


# -- checks


def test_a_check_passes_and_fails():
    amp_report(net, compute_dtype=jnp.bfloat16)(*NET).check()
    policy = jaxamp.default_amp_policy | {"head": jaxamp.use_original_precision, "haed": jaxamp.use_compute_precision}
    report = amp_report(net, compute_dtype=jnp.bfloat16, amp_policy=policy)(*NET)
    with pytest.raises(AssertionError) as error:
        report.check()
    lines = str(error.value).splitlines()
    assert lines[0] == "net is not mixed as asked:"
    assert lines[1].startswith(
        "- forward dot_general in float32, not in bfloat16: scope 'head' (scope head, test_report"
    )
    assert lines[-1] == "- the policy's key 'haed' matched nothing"
    report.check(low="block", allow_unmatched=True)
    with pytest.raises(AssertionError, match="no matmul is in a scope that matches 'blok'"):
        report.check(low=["block", "blok"], allow_unmatched=True)


def test_a_budget_for_casts():
    report = amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    report.check(max_casts=report.cast_count, max_cast_bytes=report.cast_bytes)
    with pytest.raises(AssertionError, match=f"{report.cast_count} casts; at most 1 are allowed"):
        report.check(max_casts=1)
    with pytest.raises(AssertionError, match=f"casts move {report.cast_bytes} bytes; at most 2 are allowed"):
        report.check(max_cast_bytes=2)


def test_assert_mixed_takes_the_options_of_both():
    assert_mixed(net, NET, compute_dtype=jnp.bfloat16)
    with pytest.raises(AssertionError, match="scope 'amp_stop'"):
        assert_mixed(jaxamp.amp_stop(net), NET, low="head", compute_dtype=jnp.bfloat16)


def test_a_compiled_program_is_checked_too():
    report = amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    report.check(low="block", compiled=HLO)
    with pytest.raises(
        AssertionError, match=r"compiled dot multiplies float32 by float32, not bfloat16 \(scope head/mlp\)"
    ):
        report.check(low="head", compiled=HLO)
    with pytest.raises(AssertionError, match="the compiled program has no matmul in a scope that matches 'head/none'"):
        report.check(low=["block", "head/none"], compiled=HLO)
    plain = jax.jit(net).lower(*NET).compile()
    with pytest.raises(AssertionError, match="compiled dot multiplies float32 by float32"):
        report.check(compiled=plain)


# -- bad input


def test_bad_input():
    with pytest.raises(TypeError, match="amp_report got 3, of type int; expected a function"):
        amp_report(3)
    with pytest.raises(ValueError, match="keep is 'few'"):
        amp_report(net, keep="few")


def test_a_report_leaves_amp_as_it_is():
    mixed = jaxamp.amp(net, compute_dtype=jnp.bfloat16)
    before = str(jax.make_jaxpr(jax.grad(mixed))(*NET))
    amp_report(net, compute_dtype=jnp.bfloat16)(*NET)
    assert str(jax.make_jaxpr(jax.grad(mixed))(*NET)) == before
    hlo = jax.jit(mixed).lower(*NET).as_text(debug_info=True)
    assert "jaxamp:" not in hlo


def test_a_gradient_that_cannot_be_traced_fails_the_check():
    def loop(w, x):
        return jnp.sum(lax.while_loop(lambda c: jnp.sum(c) < 9.0, lambda c: c @ w, x))

    report = amp_report(loop, compute_dtype=jnp.bfloat16)(W, X)
    assert report.backward_error.startswith("ValueError: Reverse-mode differentiation does not work")
    assert report.notes == (f"no backward pass: {report.backward_error}",)
    assert report.to_dict()["backward_error"] == report.backward_error
    with pytest.raises(AssertionError, match=r"can't be traced.*: ValueError: Reverse-mode .* pass backward=False"):
        jaxamp.assert_mixed(loop, (W, X), compute_dtype=jnp.bfloat16)
    jaxamp.assert_mixed(loop, (W, X), compute_dtype=jnp.bfloat16, backward=False)


def test_a_gradient_that_fails_under_amp_alone_says_so(monkeypatch):
    monkeypatch.setattr("jaxamp._plan.rewrites.pull_back", lambda *_: 1 / 0)
    square = jax.custom_vjp(lambda w: w @ w)
    square.defvjp(lambda w: (w @ w, w), lambda w, g: (g @ w,))
    report = amp_report(lambda w: jnp.sum(square(w)), compute_dtype=jnp.bfloat16)(W)
    assert report.backward_error == "ZeroDivisionError: division by zero (under amp alone: please report it)"


def test_what_has_nothing_to_differentiate_passes_the_check():
    jaxamp.assert_mixed(lambda n, w: jnp.argmax(w @ w) + n, (1, W), compute_dtype=jnp.bfloat16)


def test_a_wide_outer_product_is_no_wide_matmul():
    def total(w, x):
        return lax.scan(lambda c, y: (c + jnp.outer(y, y), None), w, x)[0]

    report = amp_report(total, compute_dtype=jnp.bfloat16)(W, X)
    pairs = lambda x: lax.dot_general(x, x, (((), ()), ((0,), (0,))))
    assert reasons(pairs, X)["dot_general"] == "an outer product: no low operand"
    assert report.matmuls == ()
    assert_mixed(total, (W, X), compute_dtype=jnp.bfloat16)


def test_weight_gradients_of_single_examples_say_why_they_are_wide():
    @jax.custom_vjp
    def layer(x, w):
        return x @ w

    layer.defvjp(lambda x, w: (x @ w, (x, w)), lambda r, g: (g @ r[1].T, jnp.einsum("i,j->ij", jnp.exp(r[0]), g)))
    loss = lambda w, x: jnp.sum(jax.vmap(layer, (0, None))(x, w) ** 2)
    report = amp_report(loss, compute_dtype=jnp.bfloat16)(W, X)
    (row,) = [r for r in report.rows if r.primitive == "mul" and "outer" in r.reason]
    assert row.reason == "derivative of dot_general: an outer product: follows a float32 operand"
    assert (row.kind, str(row.run)) == ("other", "f32 f32 -> f32")
    assert report.low_share == 1.0


def test_who_asks_for_precision():
    asked = lambda x, w: jnp.matmul(x, w, precision="highest")
    by_operation = "asks for precision=HIGHEST; without that argument it would be lowered"
    assert reasons(asked, X, W)["dot_general"] == by_operation
    with jax.default_matmul_precision("float32"):
        assert reasons(lambda x, w: x @ w, X, W)["dot_general"] == (
            "jax_default_matmul_precision = 'float32' asks for precision; unset it with jax.config.update. "
            "A library that you import may have set it"
        )
    with jax.default_matmul_precision("tensorfloat32"):
        assert reasons(lambda x, w: x @ w, X, W)["dot_general"] == "policy table"
        assert reasons(asked, X, W)["dot_general"] == by_operation


def test_arguments_that_are_one_array_are_refused():
    fn, x = lambda x: jnp.sum(x @ x), jnp.ones((4, 4))
    for check in (jaxamp.assert_mixed, jaxamp.assert_amp_close):
        with raises(
            TypeError, f"{check.__name__} got arguments of type .*; expected a tuple", r"Write .*\(fn, \(x,\)\)"
        ):
            check(fn, x)
    with raises(TypeError, "assert_amp_close got rtol='a'; expected a number, 0 or more", "Write rtol="):
        jaxamp.assert_amp_close(fn, (x,), rtol="a")
    with raises(TypeError, "check got low=3; expected a glob over scopes", "Write low="):
        jaxamp.assert_mixed(fn, (x,), low=3)
    with raises(TypeError, "check got max_casts='3'; expected a number", "Write max_casts="):
        jaxamp.assert_mixed(fn, (x,), max_casts="3")
