"""Values that are read low and in float32."""

import functools

import jax
import jax.extend.core as jex_core
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import AMP, assert_near, both, equations, error, in_float64, kept, normal
from jax import lax
from plans import plan_of

import jaxamp
from jaxamp._passes.streams import hold_streams_low

W, X = normal(0, 8, 8, scale=0.3), normal(1, 16, 8)
FILTERS, IMAGE = normal(2, 3, 3, 4, 4, scale=0.2), normal(3, 4, 12, 12, 4)


def norm(x):
    return x * lax.rsqrt(jnp.mean(x**2, -1, keepdims=True) + 1e-6)


def conv(x, w):
    return lax.conv_general_dilated(x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def batch_norm(x):
    return (x - x.mean((0, 1, 2))) * lax.rsqrt(x.var((0, 1, 2)) + 1e-5)


def residual_network(w, x):
    """As in a ResNet: each sum is read by a convolution and by the next sum."""
    x = jax.nn.relu(batch_norm(conv(x, w)))
    for _ in range(2):
        x = jax.nn.relu(batch_norm(conv(jax.nn.relu(batch_norm(conv(x, w))), w)) + x)
    return jnp.sum(jnp.sin(x) ** 2)


def before_activation(w, x):
    """As in a ResNet of the second kind: sums of results of convolutions, read by norms and by the next sum."""
    x = conv(x, w)
    for _ in range(2):
        x = x + conv(jax.nn.relu(batch_norm(x)), w)
    return jnp.sum(jnp.sin(batch_norm(x)) ** 2)


def scaled_branches(w, x):
    """As in a ConvNeXt: each branch has a scale for each channel, which comes first in the product."""
    x, scale = batch_norm(conv(x, w)), jnp.linspace(0.1, 1, 4)
    for _ in range(2):
        x = x + scale * conv(jnp.tanh(conv(x, w)), w)
    return jnp.sum(jnp.sin(conv(x, w)) ** 2)


def after_pool(w, x):
    """As in a ResNet-18: the first skip connection is the result of a pooling."""
    x = jax.nn.relu(batch_norm(conv(jnp.concatenate([x, x], 1), w)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 1, 1), (1, 2, 1, 1), "VALID")
    for _ in range(2):
        x = jax.nn.relu(batch_norm(conv(x, w)) + x)
    return jnp.sum(conv(x, w) ** 2)


def joined(w, x):
    """As in a DenseNet: what is read again is joined with what is new."""
    x = batch_norm(conv(x, w))
    for _ in range(2):
        x = jnp.concatenate([x, conv(x[..., :4], w)], -1)
        x = jax.nn.relu(batch_norm(x))
    return jnp.sum(conv(x[..., -4:], w) ** 2)


NETS = [residual_network, before_activation, scaled_branches, after_pool, joined]


@pytest.mark.parametrize("net", NETS)
def test_skip_connections_are_kept_low(net):
    amp = jaxamp.amp(net, compute_dtype=jnp.bfloat16)
    large = [dtype for shape, dtype in kept(amp, FILTERS, IMAGE) if np.prod(shape) >= IMAGE.size]
    assert large
    assert set(large) == {"bfloat16"}


def test_without_the_pass_they_are_not():
    before = jaxamp.amp(residual_network, compute_dtype=jnp.bfloat16, disable_passes=["hold_streams_low"])
    assert "float32" in [dtype for shape, dtype in kept(before, FILTERS, IMAGE) if np.prod(shape) >= IMAGE.size]


@pytest.mark.slow
@both
@pytest.mark.parametrize("net", [residual_network, before_activation])
def test_gradients_are_about_as_near_to_float64_as_without_the_pass(low, net):
    def errors(fn):
        grad = jax.jit(jax.grad(fn))
        for seed in range(4):
            filters = normal(seed, *FILTERS.shape, scale=0.2)
            expected = in_float64(jax.grad(net), filters, IMAGE)
            yield np.linalg.norm(grad(filters, IMAGE) - expected) / np.linalg.norm(expected)

    with_it, without = (
        np.mean(list(errors(jaxamp.amp(net, compute_dtype=low, disable_passes=names))))
        for names in ([], ["hold_streams_low"])
    )
    by_hand = np.mean(list(errors(lambda w, x: net(w.astype(low), x.astype(low)).astype(jnp.float32))))
    assert with_it < min(1.6 * without, by_hand)


def recurrence(w, x):
    """As in a state space: values that decay are summed along the sequence, in parallel."""
    values, rates = jnp.split(jax.nn.silu(x @ w), 2, -1)
    later = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    _, held = lax.associative_scan(later, (jnp.exp(-jax.nn.softplus(rates)), values), axis=1)
    return jnp.mean((held @ w[:4, :4]) ** 2)


SEQUENCE = normal(7, 2, 64, 8)


def test_a_recurrence_keeps_its_values_low_and_its_decays_in_float32():
    plan = hold_streams_low(plan_of(recurrence, W, SEQUENCE))
    levels = [(eqn, step) for eqn, step in zip(plan.eqns, plan.steps, strict=True) if eqn.outvars[0].aval.ndim == 3]
    summed = [step.outs[0].is_low for eqn, step in levels if eqn.primitive is lax.add_p and _joins(eqn)]
    assert sum(summed) > 5
    decays = [step.outs[0].is_low for eqn, step in levels if eqn.primitive is lax.exp_p]
    assert decays == [False]
    written = [part for part in plan.parts if not isinstance(part, int)]
    assert {plan.eqns[part.last].primitive for part in written} == {lax.add_p}


def of_outer_products(w, x):
    """As Mamba's: what is added at each step is an outer product, by `einsum`."""
    values = x @ w
    added = jnp.einsum("btd,btn->btdn", values, values[..., :3])
    later = lambda a, b: (a[0] * b[0], a[1] * b[0] + b[1])
    return jnp.mean(lax.associative_scan(later, (jax.nn.sigmoid(added), added), axis=1)[1])


def test_an_outer_product_of_rounded_values_is_rounded():
    plan = hold_streams_low(plan_of(of_outer_products, W, SEQUENCE))
    summed = [s.outs[0].is_low for eqn, s in zip(plan.eqns, plan.steps, strict=True) if eqn.primitive is lax.add_p]
    assert sum(summed) > 5


def _joins(eqn):
    return not any(isinstance(v, jex_core.Literal) for v in eqn.invars)


def low_results(fn, *args) -> list[str]:
    """The operations whose results the pass holds low."""
    plan = plan_of(fn, *args)
    after = hold_streams_low(plan)
    changed = zip(plan.eqns, plan.steps, after.steps, strict=True)
    return [eqn.primitive.name for eqn, old, new in changed if old is not new]


def test_what_is_read_in_both_dtypes():
    assert low_results(lambda w, x: (lambda h: jnp.exp(h @ w) + h)(norm(x @ w)), W, X) == ["mul"]


@pytest.mark.parametrize("activation", [jax.nn.silu, jax.nn.gelu, jax.nn.relu, jax.nn.mish])
def test_an_activation_is_a_product_with_what_was_rounded(activation):
    fn = lambda w, x: (lambda h: jnp.exp(h @ w) + h)(activation(norm(x @ w)))
    assert len(low_results(fn, W, X)) == 1


def gates(h):
    """What reads a sum once, in float32."""
    a, b = jnp.split(h, 2, -1)
    return jnp.exp(jax.nn.sigmoid(a) * jnp.tanh(b))


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: gates(x @ w + jnp.sin(x) @ w),
        lambda w, x: gates((x @ w + w[0]) + (jnp.sin(x) @ w - w[1])),
        lambda w, x: gates(x @ w + jnp.sin(x) @ w + jnp.cos(x) @ w),
        lambda w, x: gates(x @ w + jnp.pad(jnp.sin(x) @ w, ((1, 0), (0, 0)))[:-1]),  # as relative positions are
        lambda w, x: gates(x @ w + jnp.take_along_axis(jnp.sin(x) @ w, jnp.argsort(x), -1)),
    ],
)
def test_the_sum_of_matmuls_is_kept_and_not_each_of_them(fn):
    assert [name for name in low_results(fn, W, X) if name in ("add", "sub")] == ["add"]
    loss = lambda w, x: jnp.mean(fn(w, x))
    large = [dtype for shape, dtype in kept(jaxamp.amp(loss, compute_dtype=jnp.bfloat16), W, X) if shape == X.shape]
    assert large.count("bfloat16") <= 1 + 2  # and what the matmuls read
    assert_near(
        [jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=jnp.bfloat16)))(W, X)],
        [in_float64(jax.grad(loss), W, X)],
        2e-2,
    )


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (lambda a, b: (gates(a + b), jnp.exp(a)))(x @ w, jnp.sin(x) @ w),  # one of them is read again
        lambda w, x: gates(x @ w + jnp.exp(x)),  # something exact is added
        lambda w, x: gates(x @ w + w[0]),  # one matmul
        lambda w, x: gates(x @ w + jnp.repeat(jnp.sin(x[:1]) @ w, len(x), 0)),  # one, and a few numbers
        lambda w, x: gates(x @ w + jnp.concatenate([x[::2], (jnp.sin(x) @ w)[::2]])),  # half of it is not of a matmul
    ],
)
def test_sums_that_are_not_of_matmuls_alone(fn):
    assert not {"add", "sub"} & set(low_results(fn, W, X))


def test_a_long_sum_of_matmuls():
    fn = lambda w, x: jnp.sum(gates(sum(x @ (w + i) for i in range(1, 600)) / 600))
    assert [name for name in low_results(fn, W, X) if name == "add"] == ["add"]


def test_squares_are_not_held_in_float16():
    """They are finite in float32, and what reads them in float32 gets them so."""

    def energies(w, x):
        h = 300 * norm(x @ w)
        return jnp.mean(jnp.sqrt(jnp.sum(h * h, -1)) + jnp.sum((h * h * 1e-6) @ w, -1))

    assert np.isfinite(jaxamp.amp(energies, compute_dtype=jnp.float16)(W, X))
    squared = lambda w, x: (lambda h: jnp.exp(h @ w) + h)(norm(x @ w) * norm(x @ w.T))
    plan = plan_of(squared, W, X, compute_dtype=jnp.float16)
    assert hold_streams_low(plan).steps == plan.steps
    assert len(low_results(squared, W, X)) == 1


# -- streams that begin with an embedding

PLACES, MASK = jnp.arange(16) * 3 % 7, normal(8, 16, 8) > -1


def stack(w, x, added=lambda h: h):
    for _ in range(3):
        x = x + added(jax.nn.gelu(norm(x) @ w) @ w)
    return jnp.sum(norm(x) ** 3)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: stack(w, w[PLACES]),
        lambda w, x: stack(w, jnp.take(w, PLACES, 0)),
        lambda w, x: stack(w, w[PLACES] + w[0]),
        lambda w, x: stack(w, norm(w[PLACES] + w[PLACES // 2]) * w[0]),
        lambda w, x: stack(w, w[PLACES], lambda h: h + w[0]),
        lambda w, x: stack(w, w[PLACES], lambda h: jnp.where(MASK, h / 0.9, 0.0)),
        lambda w, x: stack(w, w[PLACES], lambda h: MASK.astype(w.dtype) * h / 0.9),
        lambda w, x: stack(w, w[PLACES], lambda h: (h + w[0]).reshape(4, 4, 8).reshape(16, 8)),
    ],
)
def test_a_stream_that_begins_with_an_embedding_is_held_low(fn):
    assert len(low_results(fn, W, X)) == 3
    written = [eqn for eqn in equations(jax.make_jaxpr(AMP(fn))(W, X)) if eqn.primitive.name == "materialized"]
    sums = [eqn.outvars[0].aval.dtype.name for eqn in written if eqn.params["of_value"]]
    assert len(sums) >= 2  # all that are added to
    assert set(sums) == {"bfloat16"}
    assert_near(jax.grad(AMP(fn))(W, X), in_float64(lambda w, x: jax.grad(fn)(w, x), W, X), 5e-2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: stack(w, x),  # what the function was given may be a state, with small changes
        lambda w, x: stack(w, w[PLACES] + x),
        lambda w, x: stack(w, w[PLACES], lambda h: 0.01 * h),  # a small step
        lambda w, x: stack(w, w[PLACES], lambda h: w[0, 0] * h),
        lambda w, x: stack(w, w[PLACES], lambda h: w[0] * h),
        lambda w, x: stack(w, w[PLACES], lambda h: jnp.exp(x) * h),
        lambda w, x: stack(w, jnp.exp(x @ w)),
    ],
)
def test_a_stream_that_something_small_may_be_added_to_stays_in_float32(fn):
    assert low_results(fn, W, X) == []


def test_complex_factors():
    fn = lambda w, x: stack(w, w[PLACES], lambda h: jnp.real(jnp.fft.ifft(jnp.fft.fft(h) * 1j)))
    assert_near(jax.grad(AMP(fn))(W, X), in_float64(jax.grad(fn), W, X), 5e-2)


# -- Fourier transforms


def filtered(w, x):
    """As in a Fourier neural operator: some frequencies of the input, times weights."""
    spectrum = jnp.fft.rfft(x, axis=0)
    weights = jnp.broadcast_to(lax.complex(w, w.T), (3, 8, 8))
    out = jnp.zeros_like(spectrum).at[:3].set(jnp.einsum("ki,kio->ko", spectrum[:3], weights))
    return jnp.fft.irfft(out, x.shape[0], axis=0)


def operator(w, x, inner=filtered):
    x = x @ w
    for _ in range(2):
        x = jax.nn.gelu(inner(w, x) + x @ w)
    return jnp.sum(jnp.sin(x @ w) ** 2)


def spread(w, x):
    """As in a long convolution: a product of two spectra."""
    return jnp.fft.irfft(jnp.fft.rfft(x, 32, axis=0) * jnp.fft.rfft(jnp.exp(w[:1]), 32, axis=0), axis=0)[:16]


def mixed_by_transforms(w, x):
    """As in an FNet."""
    x = w[PLACES]
    for _ in range(3):
        x = norm(x + jnp.fft.fft2(x).real)
        x = norm(x + jax.nn.gelu(x @ w) @ w)
    return jnp.sum(x**3)


TRANSFORMS = {
    "frequencies": filtered,
    "a long convolution": spread,
    "the real part": lambda w, x: jnp.fft.fft(x).real,
    "scaled": lambda w, x: jnp.fft.irfft(jnp.fft.rfft(x), norm="ortho"),
}


@pytest.mark.parametrize("inner", TRANSFORMS.values(), ids=TRANSFORMS)
def test_a_transform_of_rounded_values_is_no_more_exact_than_these(inner):
    fn = functools.partial(operator, inner=inner)
    assert low_results(fn, W, X) == ["add", "mul", "add"]  # both sums, and what the second transform reads
    assert_near(jax.grad(AMP(fn))(W, X), in_float64(jax.grad(fn), W, X), 5e-2)


def test_transforms_in_a_stream_that_begins_with_an_embedding():
    assert low_results(mixed_by_transforms, W, X).count("add") >= 5  # the first transform is of the embedding
    assert_near(jax.grad(AMP(mixed_by_transforms))(W, X), in_float64(jax.grad(mixed_by_transforms), W, X), 5e-2)


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.fft.irfft(jnp.fft.rfft(x))),  # of an argument
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.fft.fft(jnp.exp(x @ w)).real),  # of something exact
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.fft.fft(x @ w).real + jnp.fft.fft(x).real),
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.fft.irfft(jnp.exp(jnp.fft.rfft(x @ w)))),
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.abs(jnp.fft.fft(x @ w))),  # of another kind
        lambda w, x: jnp.sin(jnp.fft.irfft(jnp.fft.rfft(x @ w))),  # read in float32 alone
    ],
)
def test_other_transforms_stay_in_float32(fn):
    assert low_results(fn, W, X) == []


@pytest.mark.parametrize(
    "fn",
    [
        lambda w, x: norm(x @ w) @ w,  # read low alone
        lambda w, x: jnp.exp(norm(x @ w)),  # read in float32 alone
        lambda w, x: (lambda h: (h @ w, h))(norm(x @ w)),  # a result
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(norm(x)),  # nothing was rounded before
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.exp(x) + jnp.exp(x @ w)),  # something exact is added
        lambda w, x: (lambda p: jnp.log(1 - p) + p @ w)(jax.nn.softmax(x @ w)),  # more exact than what it was made of
        lambda w, x: (lambda p: jnp.log(1 - p) + p @ w)(1 / (1 + jnp.exp(-(x @ w)))),
        lambda w, x: (lambda p: jnp.sqrt(2 - 2 * p) + p @ w)(jnp.exp(-((x @ w) ** 2))),
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jax.nn.sigmoid(norm(x @ w))),  # an activation that is no product
        lambda w, x: (lambda h: jnp.exp(h @ w) + h)(jnp.exp(x) / norm(x @ w)),  # a quotient by what was rounded
        lambda w, x: (lambda h: jnp.linalg.cholesky(h + 9 * jnp.eye(8)) + h @ w)(norm(w @ w.T)),  # a decomposition
    ],
)
def test_what_stays_in_float32(fn):
    assert low_results(fn, W, X) == []


def test_what_the_user_pins_stays_in_float32():
    def fn(w, x):
        h = norm(x @ w)
        with jaxamp.amp_stop():
            return jnp.sin(h) + jnp.exp(h @ w)

    assert low_results(fn, W, X) == []


@both
def test_what_cancels_is_not_rounded_before(low):
    def loss(w, x):
        p = jax.nn.softmax(4 * (x @ w))
        return jnp.mean((p @ w) ** 2) - jnp.mean(jnp.log(1 - p + 1e-7))

    w, x = normal(5, 32, 32, scale=0.5), normal(6, 64, 32)
    assert_near(jax.grad(jaxamp.amp(loss, compute_dtype=low))(w, x), in_float64(jax.grad(loss), w, x), 5e-2)


# -- activations that are summed as well


def gelu(x):
    return 0.5 * x * (1 + jnp.tanh(0.8 * (x + 0.045 * x**3)))


def squeezed(w, x, activation=jax.nn.silu):
    """As in an EfficientNet: what is summed over the pixels scales the channels."""
    for _ in range(2):
        x = activation(batch_norm(conv(x, w)))
        x = x * jax.nn.sigmoid(x.mean((1, 2)) @ w[0, 0])[:, None, None]
    return jnp.sum(jnp.sin(conv(x, w)) ** 2)


POOLED = {
    "silu": squeezed,
    "gelu": lambda w, x: squeezed(w, x, jax.nn.gelu),
    "by hand": lambda w, x: squeezed(w, x, gelu),
    "by flax": lambda w, x: squeezed(w, x, lambda x: x * jax.nn.sigmoid(x)),
}


@pytest.mark.parametrize("fn", POOLED.values(), ids=POOLED)
def test_an_activation_that_is_pooled_is_written_low(fn):
    plan = plan_of(fn, FILTERS, IMAGE, passes=(hold_streams_low,))
    written = [part for part in plan.parts if not isinstance(part, int)]
    assert [part.cotangent for part in written] == [False] * 2
    assert all(plan.steps[part.last].outs[0].is_low for part in written)


@pytest.mark.parametrize("fn", POOLED.values(), ids=POOLED)
def test_gradients_through_what_is_pooled(fn):
    expected = in_float64(jax.grad(fn, (0, 1)), FILTERS, IMAGE)
    gradient = lambda **options: jax.jit(jax.grad(AMP(fn, **options), (0, 1)))(FILTERS, IMAGE)
    found, without = gradient(), gradient(disable_passes=["hold_streams_low"])
    for ours, theirs, exact in zip(found, without, expected, strict=True):
        assert error(ours, exact) <= max(1.3 * error(theirs, exact), 2e-2)


NOT_POOLED = {
    "cheap": lambda w, x: squeezed(w, x, jax.nn.relu),
    "a layer norm": lambda w, x: conv((y := jax.nn.silu(conv(x, w))) - y.mean(-1, keepdims=True), w),
    "centred": lambda w, x: conv((y := jax.nn.silu(conv(x, w) + 30)) - y.mean((0, 1, 2)), w),
    "normed": lambda w, x: conv(batch_norm(jax.nn.silu(conv(x, w))), w),
    "scaled before a norm": lambda w, x: conv(
        batch_norm((y := jax.nn.silu(conv(x, w))) * y.mean((1, 2))[:, None, None]), w
    ),
    "returned": lambda w, x: (y := jax.nn.silu(conv(x, w))) * y.mean((1, 2))[:, None, None],
    "summed alone": lambda w, x: jax.nn.silu(batch_norm(conv(x, w))).mean((1, 2)) @ w[0, 0],
    "an exponential": lambda w, x: (y := jnp.exp(conv(x, w))) / y.sum(-1, keepdims=True),
    "exact": lambda w, x: conv((y := jax.nn.silu(batch_norm(x))) * y.mean((1, 2), keepdims=True), w),
}


@pytest.mark.parametrize("fn", NOT_POOLED.values(), ids=NOT_POOLED)
def test_others_that_are_summed_are_left_alone(fn):
    plan = plan_of(lambda w, x: jnp.sum(jnp.sin(fn(w, x))), FILTERS, IMAGE, passes=(hold_streams_low,))
    assert not any(getattr(part, "value", False) for part in plan.parts)


def test_nor_in_float16():
    plan = plan_of(squeezed, FILTERS, IMAGE, passes=(hold_streams_low,), compute_dtype=jnp.float16)
    assert all(isinstance(part, int) for part in plan.parts)


# -- scaled sums of matmuls, and what windows make


def by_chunks(w, x):
    """As in a state space by chunks: a sum of matmuls, one of them scaled, and of a low value, scaled; then a norm."""
    h = x @ w
    decay = jnp.exp(-jnp.mean(x**2, -1, keepdims=True))
    inside, across = jnp.einsum("bi,ij->jb", h, w).T, jnp.einsum("bi,ij->bj", h, w)
    return jnp.sum((norm(jax.nn.silu(h) * (inside + across * decay + h * 0.5 * w[0])) @ w) ** 2)


def test_a_sum_of_scaled_matmuls_is_written_once_in_the_order_of_its_axes():
    jaxpr = jax.make_jaxpr(AMP(by_chunks))(W, X)
    (written,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert (written.params["dtype"].name, written.params["row_major"]) == ("bfloat16", True)
    assert_near(jax.grad(AMP(by_chunks))(W, X), in_float64(jax.grad(by_chunks), W, X), 2e-2)


def test_a_sum_with_something_exact_is_not():
    """Scaled or not: the other part is a state, which the matmuls change a little."""

    def fn(w, x):
        h = x @ w
        return jnp.sum((norm(x * 3.0 + (h @ w) * jnp.exp(-x[0]) + h @ w.T) @ w) ** 2)

    jaxpr = jax.make_jaxpr(AMP(fn))(W, X)
    written = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    sums = [eqn for eqn in equations(jaxpr) if eqn.primitive is lax.add_p and eqn.outvars[0].aval.shape == X.shape]
    assert not written
    assert {eqn.outvars[0].aval.dtype.name for eqn in sums} == {"float32"}


def test_sums_of_convolutions_keep_the_layout_that_these_have():
    def fn(w, x):
        turned = lambda x: jnp.swapaxes(conv(x, w), 1, 2)
        return jnp.sum(conv(batch_norm(turned(x) * 0.5 + turned(jnp.tanh(x))), w) ** 2)

    jaxpr = jax.make_jaxpr(AMP(fn))(FILTERS, IMAGE)
    (written,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert not written.params["row_major"]


def pooled_twice(w, x):
    """As in a DenseNet: norms of several layers read what was pooled."""
    x = jax.nn.relu(batch_norm(conv(x, w)))
    x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    y = conv(jax.nn.relu(batch_norm(x)), w)
    return jnp.sum(conv(jax.nn.relu(batch_norm(jnp.concatenate([x, y], -1)))[..., 2:6], w) ** 2)


def test_what_was_pooled_is_held_low_for_several_norms():
    jaxpr = jax.make_jaxpr(AMP(pooled_twice))(FILTERS, IMAGE)
    (written,) = [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "materialized" and eqn.params["of_value"]]
    assert written.outvars[0].aval.shape == (4, 6, 6, 4)
    assert ((4, 6, 6, 4), "float32") not in kept(AMP(pooled_twice), FILTERS, IMAGE)
    found, expected = jax.grad(AMP(pooled_twice))(FILTERS, IMAGE), in_float64(jax.grad(pooled_twice), FILTERS, IMAGE)
    assert_near(found, expected, 8e-2)


def test_local_means_are_not_rounded_because_local_variances_are_differences_of_them():
    """With a large offset, the variance of rounded means is negative, and its root NaN."""

    def fn(w, b, x):
        h = conv(x, w) + b
        average = lambda h: lax.reduce_window(h, 0.0, lax.add, (1, 4, 4, 1), (1, 4, 4, 1), "VALID") / 16
        mean = average(h)
        return jnp.sum(conv(mean * lax.rsqrt(average(h * h) - mean * mean + 1e-2), w) ** 2)

    args = FILTERS * 0.3, jnp.full(4, 6.0), IMAGE
    assert_near(AMP(fn)(*args), in_float64(fn, *args), 2e-2)
    assert_near(jax.grad(AMP(fn), (0, 1))(*args), in_float64(jax.grad(fn, (0, 1)), *args), 5e-2)


def test_what_windows_make_of_an_argument_is_not_rounded():
    def fn(w, x):
        x = lax.reduce_window(x, 0.0, lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
        return jnp.sum(conv(batch_norm(x), w) ** 2) + jnp.sum(jnp.sin(x))

    assert "materialized" not in [eqn.primitive.name for eqn in equations(jax.make_jaxpr(AMP(fn))(FILTERS, IMAGE))]
