"""Small programs in plain JAX, each with the number of matmuls that must run low and that must not."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from helpers import Program
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.experimental import io_callback
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

PROGRAMS: list[Program] = []

NO_REVERSE = "a loop whose length is not known has no reverse mode"
NO_DERIVATIVE = "a callback has no derivative"
Args = Callable[[], tuple[Any, ...]]


def drawn(*shapes: tuple[int, ...], seed: int = 0) -> Args:
    """Arguments: activations of unit variance first, then weights of variance one over their fan-in."""

    def args() -> tuple[Any, ...]:
        rng = np.random.default_rng(seed)
        arrays = [
            rng.normal(size=shape) / (np.sqrt(shape[-2]) if i and len(shape) > 1 else 1)
            for i, shape in enumerate(shapes)
        ]
        return tuple(jax.device_put(np.asarray(array, np.float32)) for array in arrays)

    return args


def also(args: Args, *more: Callable[[], Any]) -> Args:
    """Arguments with others after them, made at each call as well."""
    return lambda: (*args(), *(make() for make in more))


def ints(*values: Any, dtype: Any = jnp.int32) -> Callable[[], Any]:
    return lambda: jax.device_put(np.asarray(values, dtype))


MLP = drawn((4, 8), (8, 8), (8, 3))
SQUARE = drawn((4, 8), (8, 8))


def program(
    args: Args = MLP, *, low: int = 0, kept: int = 0, without: dict[str, str] | None = None, rtol: float = 2e-2
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the function below into the table under its name."""

    def add(fn: Callable[..., Any]) -> Callable[..., Any]:
        PROGRAMS.append(Program(fn.__name__, fn, args, low, kept, without or {}, rtol))
        return fn

    return add


# -- matmuls


@program(SQUARE, low=1)
def matmul(x, w):
    return x @ w


@program(drawn((8,), (8, 5)), low=1)
def matmul_of_a_vector(x, w):
    return x @ w


@program(drawn((8,), (8,)), low=1)
def inner_product(x, y):
    return x @ y


@program(drawn((2, 3, 4), (2, 4, 5)), low=1)
def batched_matmul(x, w):
    return jnp.matmul(x, w)


@program(drawn((3, 4), (4, 5), (5, 6)), low=2)
def einsum_of_three(x, a, b):
    return jnp.einsum("bi,ij,jk->bk", x, a, b)


@program(drawn((2, 3, 2, 4), (2, 5, 2, 4)), low=1)
def einsum_of_heads(q, k):
    return jnp.einsum("bqhd,bkhd->bhqk", q, k)


@program(drawn((3, 4, 5), (4, 5, 6)), low=1)
def tensordot(x, w):
    return jnp.tensordot(x, w, axes=2)


@program(drawn((4,), (5,), (5, 3)), low=1)
def outer_product(x, y, w):
    return jnp.einsum("i,j->ij", x, y) @ w


@program(low=1, kept=1)
def matmul_that_asks_for_precision(x, a, b):
    return jnp.matmul(jnp.tanh(x @ a), b, precision=lax.Precision.HIGHEST)


@program(low=1, kept=1)
def matmul_in_a_stop_scope(x, a, b):
    h = jnp.tanh(x @ a)
    with jax.named_scope("amp_stop"):
        return h @ b


@program(SQUARE, low=1)
def matmul_returned_beside_its_argument(x, w):
    return {"out": x @ w, "x": x, "none": None, "number": 2.0}


@program(low=2)
def residual_block(x, a, b):
    h = x + jax.nn.relu(x @ a)
    return h @ b + jnp.ones((3,), x.dtype)


@program(
    also(drawn((6, 4), (3, 4, 5)), ints(2, 3, 1)),
    low=1,
    without={"vmap": "JAX has no vmap of ragged_dot but over the first dimension"},
)
def ragged_dot(x, w, sizes):
    return lax.ragged_dot(x, w, sizes)


@program(
    also(
        drawn((4, 8), (8, 3)),
        lambda: jax.device_put(np.arange(8, dtype=np.int8).reshape(2, 4) - 3),
        ints(1, -2, 3, 4, dtype=jnp.int8),
    ),
    low=1,
    kept=1,
)
def integer_matmul(x, w, a, b):
    return x @ w, lax.dot(a, b, preferred_element_type=jnp.int32)


@program(drawn((4, 8), (8, 8), (8, 3)), low=1, kept=1)
def complex_matmul(x, w, v):
    z = lax.complex(x, jnp.cos(x)) @ lax.complex(w, jnp.sin(w))
    return jnp.real(z) @ v, jnp.imag(z)


@program(drawn((0, 4), (4, 3), (3, 2)), low=2)
def empty_batch(x, a, b):
    return jnp.tanh(x @ a) @ b, jnp.sum(x)


@program(drawn((3, 0), (0, 4), (4, 2)), low=2)
def empty_contraction(x, a, b):
    return (x @ a + 1) @ b


@program(
    low=2, without={"float16": "the user's bfloat16 is not float16, and a float16 target leaves it as it is"}, rtol=3e-2
)
def casts_to_bfloat16_by_the_user(x, a, b):
    h = x.astype(jnp.bfloat16) @ a.astype(jnp.bfloat16)
    return jnp.tanh(h.astype(x.dtype)) @ b


# -- convolutions


@program(drawn((2, 9, 3), (3, 3, 4), (3, 4, 2)), low=2)
def conv_1d(x, a, b):
    numbers = ("NWC", "WIO", "NWC")
    h = jax.nn.relu(lax.conv_general_dilated(x, a, (1,), "SAME", dimension_numbers=numbers))
    return lax.conv_general_dilated(h, b, (1,), "SAME", dimension_numbers=numbers)


def conv_2d_layer(x, w, strides=(1, 1), **options):
    return lax.conv_general_dilated(x, w, strides, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options)


IMAGE = drawn((2, 6, 6, 3), (3, 3, 3, 4), (3, 3, 4, 2))


@program(IMAGE, low=2)
def conv_2d(x, a, b):
    return conv_2d_layer(jnp.tanh(conv_2d_layer(x, a)), b)


@program(IMAGE, low=2)
def conv_2d_strided(x, a, b):
    return conv_2d_layer(jnp.tanh(conv_2d_layer(x, a, (2, 2))), b, rhs_dilation=(2, 2))


@program(drawn((2, 6, 6, 4), (3, 3, 2, 4), (3, 3, 1, 4)), low=2)
def conv_2d_grouped_and_depthwise(x, a, b):
    return conv_2d_layer(conv_2d_layer(x, a, feature_group_count=2), b, feature_group_count=4)


@program(drawn((2, 4, 4, 3), (3, 3, 3, 4)), low=1)
def conv_2d_transposed(x, w):
    return lax.conv_transpose(x, w, (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def pool(x, init, combine):
    return lax.reduce_window(x, init, combine, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")


@program(IMAGE, low=2)
def max_pooling(x, a, b):
    return conv_2d_layer(pool(conv_2d_layer(x, a), -jnp.inf, lax.max), b)


@program(IMAGE, low=2)
def average_pooling(x, a, b):
    return conv_2d_layer(pool(conv_2d_layer(x, a), 0.0, lax.add) / 4, b)


# -- activations, each between two matmuls


def _register_activations() -> None:
    nn = jax.nn
    families: dict[str, list[Callable[[Any], Any]]] = {
        "rectifiers": [nn.relu, nn.relu6, nn.leaky_relu],
        "hard_activations": [nn.hard_tanh, nn.hard_sigmoid, nn.hard_silu],
        "exponential_rectifiers": [nn.elu, nn.celu, nn.selu],
        "gelu": [functools.partial(nn.gelu, approximate=True), functools.partial(nn.gelu, approximate=False)],
        "smooth_rectifiers": [nn.silu, nn.mish, nn.identity],
        "softplus": [nn.softplus, nn.squareplus, nn.sparse_plus],
        "sigmoids": [nn.sigmoid, nn.sparse_sigmoid, nn.log_sigmoid],
        "soft_steps": [jnp.tanh, nn.soft_sign, lambda x: nn.glu(jnp.concatenate([x, -x], axis=-1))],
        "softmax": [nn.softmax],
        "log_softmax": [nn.log_softmax, lambda x: x - nn.logsumexp(x, axis=-1, keepdims=True)],
        "standardize": [nn.standardize],
    }
    for name, family in families.items():

        def fn(x, a, b, family=family):
            return [activation(x @ a) @ b for activation in family]

        PROGRAMS.append(Program(name, fn, MLP, low=1 + len(family)))  # `x @ a` is computed once


_register_activations()


# -- layers and losses


@program(also(MLP, lambda: jnp.ones(8), lambda: jnp.zeros(8)), low=2)
def layer_norm(x, a, b, scale, bias):
    h = x @ a
    mean = jnp.mean(h, axis=-1, keepdims=True)
    variance = jnp.mean((h - mean) ** 2, axis=-1, keepdims=True)
    return ((h - mean) * lax.rsqrt(variance + 1e-6) * scale + bias) @ b


@program(low=2)
def rms_norm(x, a, b):
    h = x @ a
    return (h * lax.rsqrt(jnp.mean(jnp.square(h), axis=-1, keepdims=True) + 1e-6)) @ b


@program(also(MLP, lambda: jnp.zeros(8), lambda: jnp.ones(8)), low=2)
def batch_norm_with_running_statistics(x, a, b, mean, var):
    h = x @ a
    new = jnp.mean(h, axis=0), jnp.var(h, axis=0)
    h = (h - new[0]) / jnp.sqrt(new[1] + 1e-5)
    return h @ b, (0.9 * mean + 0.1 * new[0], 0.9 * var + 0.1 * new[1])


@program(also(MLP, ints(0, 2, 1, 1)), low=2)
def cross_entropy(x, a, b, labels):
    logits = jax.nn.log_softmax(jax.nn.relu(x @ a) @ b)
    return -jnp.mean(jnp.take_along_axis(logits, labels[:, None], axis=-1))


@program(also(MLP, ints(0, 2, 1, 1)), low=2)
def cross_entropy_of_one_hot_labels(x, a, b, labels):
    logits = jnp.tanh(x @ a) @ b
    wanted = jax.nn.one_hot(labels, 3, dtype=x.dtype)
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - jnp.sum(wanted * logits, axis=-1))


@program(also(drawn((5, 4)), ints(0, 2, 1, 4)), low=1)
def embedding_by_one_hot(table, tokens):
    return jax.nn.one_hot(tokens, 5, dtype=table.dtype) @ table


@program(MLP, low=2)
def mean_squared_error(x, a, b):
    return jnp.mean((jax.nn.gelu(x @ a) @ b - 1) ** 2)


ATTENTION = drawn((2, 5, 8), (8, 8), (8, 8), (8, 8), (8, 8))


@program(ATTENTION, low=6)
def attention_with_a_causal_mask(x, wq, wk, wv, wo):
    q, k, v = x @ wq, x @ wk, x @ wv
    scores = jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(8)
    scores = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), scores, -1e9)
    return jnp.einsum("bqk,bkd->bqd", jax.nn.softmax(scores), v) @ wo


@program(ATTENTION, low=6)
def attention_with_an_additive_mask(x, wq, wk, wv, wo):
    q, k, v = x @ wq, x @ wk, x @ wv
    mask = jnp.where(jnp.tril(jnp.ones((5, 5), bool)), 0.0, jnp.finfo(x.dtype).min)
    weights = jax.nn.softmax(jnp.einsum("bqd,bkd->bqk", q, k) / np.sqrt(8) + mask)
    return jnp.einsum("bqk,bkd->bqd", weights, v) @ wo


@program(drawn((2, 5, 2, 4), (2, 5, 2, 4), (2, 5, 2, 4)), low=2)
def dot_product_attention(q, k, v):
    return jax.nn.dot_product_attention(q, k, v, is_causal=True)


@program(drawn((300, 4), (4, 4), (4, 4)), low=3)
def rotary_embedding(x, wq, wk):
    frequencies = 1.0 / 100 ** (jnp.arange(2, dtype=x.dtype) / 2)
    angles = jnp.einsum("i,j->ij", jnp.arange(300, dtype=x.dtype), frequencies)
    sin, cos = jnp.sin(angles), jnp.cos(angles)

    def rotate(h):
        a, b = jnp.split(h, 2, axis=-1)
        return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)

    return rotate(x @ wq)[:9] @ rotate(x @ wk).T


@program(also(drawn((1, 8), (8, 3)), ints(1, 259, 513, 999)), low=1, kept=1)
def time_steps_through_a_matmul(w, v, steps):
    return jnp.sin(steps.astype(w.dtype)[:, None] @ w) @ v


@program(drawn((4, 8), (8, 8), (8, 8), (8, 3)), low=3)
def gated_feed_forward(x, a, g, b):
    return (jax.nn.silu(x @ g) * (x @ a)) @ b


# -- loops and branches

SEQUENCE = drawn((5, 2, 4), (4, 8), (8, 8), (8, 3))


@program(SEQUENCE, low=3)
def rnn_by_scan(xs, a, w, b):
    def step(h, x):
        h = jnp.tanh(x @ a + h @ w)
        return h, h @ b

    return lax.scan(step, jnp.zeros((2, 8), xs.dtype), xs)


@program(SEQUENCE, low=3)
def rnn_by_reversed_unrolled_scan(xs, a, w, b):
    def step(h, x):
        h = jax.nn.sigmoid(x @ a + h @ w)
        return h, h @ b

    return lax.scan(step, jnp.zeros((2, 8), xs.dtype), xs, reverse=True, unroll=2)


@program(drawn((4, 8), (3, 8, 8), (3, 8, 8)), low=2)
def scan_over_layers(x, a, b):
    def layer(h, weights):
        return h + jax.nn.gelu(h @ weights[0]) @ weights[1], None

    return lax.scan(layer, x, (a, b))[0]


@program(drawn((6, 2, 4), (4, 3)), low=1)
def scan_that_sums_and_counts(xs, w):
    def step(carry, x):
        total, count, key = carry
        return (total + jnp.mean((x @ w) ** 2), count + 1, key), count

    return lax.scan(step, (jnp.zeros((), xs.dtype), 0, jax.random.key(0)), xs)


@program(SQUARE, low=1)
def fori_loop(x, w):
    return lax.fori_loop(0, 3, lambda i, h: jnp.tanh(h @ w), x)


@program(also(SQUARE, lambda: jnp.int32(3)), low=1, without=dict.fromkeys(("grad", "amp_of_grad"), NO_REVERSE))
def fori_loop_of_unknown_length(x, w, steps):
    return lax.fori_loop(0, steps, lambda i, h: jnp.tanh(h @ w), x)


@program(SQUARE, low=1, without=dict.fromkeys(("grad", "amp_of_grad"), NO_REVERSE))
def while_loop(x, w):
    def unfinished(state):
        return (state[0] < 4) & (jnp.max(jnp.abs(state[1])) < 1e3)

    return lax.while_loop(unfinished, lambda state: (state[0] + 1, state[1] @ w), (0, x))


@program(drawn((4, 8), (8, 8), (8, 8)), low=3)
def cond(x, a, b):
    return lax.cond(jnp.sum(x) > 0, lambda h: jnp.tanh(h @ a), lambda h: h @ b, x @ a)


@program(also(drawn((4, 8), (8, 8)), lambda: jnp.int32(1)), low=3)
def switch(x, w, i):
    return lax.switch(i, [lambda h: h, lambda h: jax.nn.relu(h @ w), lambda h: 2 * h], x @ w) @ w


@program(low=2)
def associative_scan(x, a, b):
    h = x @ a

    def combine(left, right):
        return left[0] * right[0], left[1] * right[0] + right[1]

    return lax.associative_scan(combine, (jax.nn.sigmoid(h), h))[1] @ b


@program(low=2)
def map_over_rows(x, a, b):
    return lax.map(lambda row: jnp.tanh(row @ a) @ b, x)


@program(low=2)
def vmap_with_an_axis_name(x, a, b):
    def one(row):
        h = row @ a
        return (h - lax.pmean(h, "batch")) @ b

    return jax.vmap(one, axis_name="batch")(x)


# -- checkpoint


def block(x, a, b):
    return checkpoint_name(jnp.tanh(checkpoint_name(jnp.sin(x) @ a, "wide")), "narrow") @ b


@program(low=2)
def checkpoint(x, a, b):
    return jax.checkpoint(block)(x, a, b)


@program(low=2)
def checkpoint_that_saves_dots(x, a, b):
    return jax.checkpoint(block, policy=jax.checkpoint_policies.dots_saveable)(x, a, b)


@program(low=2)
def checkpoint_that_saves_names(x, a, b):
    return jax.checkpoint(block, policy=jax.checkpoint_policies.save_only_these_names("narrow"))(x, a, b)


@program(drawn((4, 8), (3, 8, 8), (3, 8, 8)), low=2)
def checkpoint_in_scan(x, a, b):
    layer = jax.checkpoint(lambda h, w: (h + block(h, *w), None), prevent_cse=False)
    return lax.scan(layer, x, (a, b))[0]


# -- derivatives of the user's own


@jax.custom_jvp
def straight_through(x):
    return jnp.round(x)


straight_through.defjvps(lambda t, _, x: t)


@program(low=2, rtol=6e-2)
def custom_jvp_elementwise(x, a, b):
    return jnp.tanh(straight_through(3 * x) @ a) @ b


@jax.custom_jvp
def dense(x, w):
    return jax.nn.silu(x @ w)


@dense.defjvp
def _(primals, tangents):
    (x, w), (dx, dw) = primals, tangents
    return jax.jvp(lambda x, w: jax.nn.silu(x @ w), (x, w), (dx, dw))


@program(low=2)
def custom_jvp_with_matmuls(x, a, b):
    return dense(dense(x, a), b)


@jax.custom_vjp
def linear(x, w):
    return x @ w


linear.defvjp(lambda x, w: (x @ w, (x, w)), lambda saved, g: (g @ saved[1].T, saved[0].T @ g))
NO_FORWARD = dict.fromkeys(("jvp", "hessian"), "a custom_vjp function has no forward mode")


@program(low=2, without=NO_FORWARD)
def custom_vjp(x, a, b):
    return linear(jnp.tanh(linear(x, a)), b)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def activated(activation, scale, x, w):
    return activation(scale * (x @ w))


def _activated_forward(activation, scale, x, w):
    out, pullback = jax.vjp(lambda x, w: activation(scale * (x @ w)), x, w)
    return out, pullback


activated.defvjp(_activated_forward, lambda activation, scale, pullback, g: pullback(g))


@program(low=2, without=NO_FORWARD)
def custom_vjp_with_static_arguments(x, a, b):
    return activated(jnp.tanh, 2.0, x, a) @ b


@program(low=2, without=NO_FORWARD)
def custom_vjp_that_closes_over_arrays(x, a, b):
    table = np.linspace(0.5, 1.5, 8, dtype=np.float32)
    with jax.ensure_compile_time_eval():  # an array that no trace has made
        mask = jnp.array([True, False, True, True])

    @jax.custom_vjp
    def masked(h):
        return jnp.where(mask[:, None], h * table.astype(h.dtype), 0.0)

    masked.defvjp(
        lambda h: (masked(h), None),
        lambda _, g: (jnp.where(mask[:, None], g * table.astype(g.dtype), 0.0),),
    )
    return masked(x @ a) @ b


@jax.custom_vjp
def bilinear(x, w):
    return x @ w, jnp.sum(x)


def _bilinear_forward(x, w):
    return bilinear(x.value, w.value), (x.value, w.value, x.perturbed, w.perturbed)


def _bilinear_backward(saved, gs):
    x, w, _, _ = saved
    zeros = jax.custom_derivatives.SymbolicZero
    g = jnp.zeros((x.shape[0], w.shape[1]), x.dtype) if isinstance(gs[0], zeros) else gs[0]
    h = jnp.zeros((), x.dtype) if isinstance(gs[1], zeros) else gs[1]
    return g @ w.T + h, x.T @ g


bilinear.defvjp(_bilinear_forward, _bilinear_backward, symbolic_zeros=True)


@program(low=2, without=NO_FORWARD)
def custom_vjp_with_symbolic_zeros(x, a, b):
    return jnp.tanh(bilinear(x, a)[0]) @ b


@program(low=2, without=NO_FORWARD)
def custom_vjp_in_checkpoint(x, a, b):
    return jax.checkpoint(lambda x, a: jnp.tanh(linear(x, a)))(x, a) @ b


@program(drawn((4, 8), (3, 8, 8)), low=1, without=NO_FORWARD)
def custom_vjp_in_scan(x, ws):
    return lax.scan(lambda h, w: (jnp.tanh(linear(h, w)), jnp.sum(h)), x, ws)


@program(low=2)
def stop_gradient(x, a, b):
    h = x @ a
    return (h - lax.stop_gradient(jnp.max(h, axis=-1, keepdims=True))) @ b


def _definite(x, w):
    """A well conditioned matrix that a matmul made."""
    h = x @ w
    return h @ h.T / 8 + 2 * jnp.eye(x.shape[0], dtype=x.dtype)


@program(drawn((4, 8), (8, 8), (4,)), low=2, kept=2)
def custom_linear_solve(x, w, b):
    a = _definite(x, w)
    factor = jnp.linalg.cholesky(a)

    def solve(_, rhs):
        half = lax.linalg.triangular_solve(factor, rhs[:, None], left_side=True, lower=True)
        return lax.linalg.triangular_solve(factor, half, left_side=True, lower=True, transpose_a=True)[:, 0]

    return lax.custom_linear_solve(lambda v: a @ v, b, solve, symmetric=True)


@program(low=2)
def custom_root(x, a, b):
    h = x @ a

    def cubic(y):
        return y**3 + y - h

    def newton(f, y):
        for _ in range(12):
            y = y - f(y) / (3 * y**2 + 1)
        return y

    root = lax.custom_root(cubic, jnp.zeros_like(h), newton, lambda g, y: y / g(jnp.ones_like(y)))
    return root @ b


# -- calls


@program(low=2)
def nested_jit(x, a, b):
    outer = jax.jit(lambda x: jax.jit(lambda h: jnp.tanh(h @ a))(x) @ b)
    return outer(x)


@jax.jit
def shared_layer(x, w):
    return jax.nn.relu(x @ w)


@program(SQUARE, low=2)
def jit_called_twice(x, w):
    return shared_layer(shared_layer(x, w), w)


@program(SQUARE, low=2)
def jit_called_on_exact_and_on_low_values(x, w):
    return shared_layer(jnp.exp(x), w), shared_layer(-x, w)


@program(SQUARE, low=1)
def jit_with_static_arguments(x, w):
    return jax.jit(lambda x, w, power: (x @ w) ** power, static_argnums=2)(x, w, 3)


# -- several devices


@functools.cache
def mesh() -> Mesh:
    return Mesh(np.array(jax.devices()[:8]), ("d",))


SHARDED = drawn((8, 8), (8, 8), (8, 3))


@program(SHARDED, low=1)
def shard_map_with_psum(x, a, b):
    def local(x, a):
        return lax.psum(x @ a, "d")

    return jnp.tanh(jax.shard_map(local, mesh=mesh(), in_specs=(P(None, "d"), P("d")), out_specs=P())(x, a))


@program(SHARDED, low=2)
def shard_map_with_all_gather(x, a, b):
    def local(x, a, b):
        whole = lax.all_gather(a, "d", axis=0, tiled=True)
        return jax.nn.relu(x @ whole) @ b

    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), P("d"), P()), out_specs=P("d"))(x, a, b)


@program(SHARDED, low=2)
def shard_map_with_ppermute(x, a, b):
    def local(x, a, b):
        h = lax.ppermute(x @ a, "d", [(i, (i + 1) % 8) for i in range(8)])
        return h @ b

    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), P(), P()), out_specs=P("d"))(x, a, b)


@program(SHARDED, low=2)
def shard_map_of_a_loss(x, a, b):
    def local(x, a, b):
        return lax.pmean(jnp.mean((jnp.tanh(x @ a) @ b) ** 2), "d")

    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), P(), P()), out_specs=P())(x, a, b)


@program(drawn((8, 2, 4), (4, 4)), low=1)
def shard_map_with_psum_scatter(x, w):
    def local(x, w):
        return lax.psum_scatter(jnp.broadcast_to(x @ w, (8, 2, 4)), "d", tiled=False)

    return jax.shard_map(local, mesh=mesh(), in_specs=(P("d"), P()), out_specs=P("d"))(x, w)


@program(SHARDED, low=2)
def pmap(x, a, b):
    return jax.pmap(lambda row: jnp.tanh(row @ a) @ b + lax.pmean(jnp.sum(row), "i"), axis_name="i")(x)


@program(SHARDED, low=2)
def sharding_constraint(x, a, b):
    h = lax.with_sharding_constraint(x @ a, NamedSharding(mesh(), P("d")))
    return jnp.tanh(h) @ b


# -- random numbers


def _dropout(key, x):
    keep = jax.random.bernoulli(key, jnp.float32(0.7), x.shape)
    return jnp.where(keep, x / 0.7, 0)


@program(also(MLP, lambda: jax.random.PRNGKey(1)), low=2)
def dropout_with_an_old_key(x, a, b, key):
    first, second = jax.random.split(key)
    return _dropout(second, _dropout(first, x) @ a) @ b


@program(also(MLP, lambda: jax.random.key(1)), low=2)
def dropout_with_a_new_key(x, a, b, key):
    key, used = jax.random.split(key)
    return _dropout(used, x @ a) @ b, key


@program(also(MLP, lambda: jax.random.key(2)), low=2)
def gaussian_noise(x, a, b, key):
    h = x @ a
    return (h + 0.1 * jax.random.normal(key, h.shape, jnp.float32).astype(h.dtype)) @ b


# -- indexing, sorting, summing


@program(also(drawn((5, 8), (8, 3)), ints(4, 0, 0, 2)), low=1)
def gather(table, w, tokens):
    return table[tokens] @ w


@program(also(drawn((4, 8), (8, 8), (8, 3)), ints(3, 1)), low=2)
def gather_of_a_low_value(x, a, b, rows):
    return (x @ a)[rows] @ b


@program(also(MLP, ints(3, 1)), low=2)
def scatter(x, a, b, rows):
    return x.at[rows].set(x[:2] @ a) @ b


@program(also(MLP, ints(1, 1, 0, 3)), low=2)
def scatter_add(x, a, b, rows):
    return jnp.zeros_like(x).at[rows].add(x @ a) @ b


@program(also(MLP, ints(1, 1, 0, 2)), low=2)
def segment_sum(x, a, b, segments):
    return jax.ops.segment_sum(x @ a, segments, 3) @ b


@program(low=2)
def sort(x, a, b):
    return jnp.sort(x @ a, axis=-1) @ b


@program(drawn((4, 8), (8, 8), (3, 3)), low=2)
def top_k(x, a, b):
    values, indices = lax.top_k(x @ a, 3)
    return values @ b, indices


@program(SQUARE, low=1)
def argmax(x, w):
    h = x @ w
    return jnp.argmax(h, axis=-1), jnp.max(h, axis=-1)


@program(low=2)
def cumulative_sum(x, a, b):
    return jnp.cumsum(x @ a, axis=0) @ b


@program(low=2)
def cumulative_product_and_max(x, a, b):
    h = x @ a
    return (jnp.cumprod(jax.nn.sigmoid(h), axis=0) + lax.cummax(h)) @ b


@program(also(MLP, lambda: jnp.int32(1)), low=2)
def dynamic_slice(x, a, b, start):
    return lax.dynamic_slice_in_dim(x @ a, start, 2) @ b


@program(also(drawn((1, 8), (8, 8), (6, 8)), lambda: jnp.int32(2)), low=3)
def key_value_cache(x, w, cache, position):
    cache = lax.dynamic_update_slice(cache, x @ w, (position, jnp.zeros_like(position)))
    return jax.nn.softmax(x @ cache.T) @ cache, cache


@program(low=2)
def shape_changes(x, a, b):
    h = jnp.pad(x @ a, ((1, 1), (0, 0)))[::-1]
    h = jnp.stack([h, jnp.roll(h, 1, axis=0)], axis=1).reshape(2, 6, 8).transpose(1, 0, 2)
    return jnp.concatenate(jnp.split(h, 2), axis=1).squeeze() @ b


@program(low=2, rtol=4e-2)
def reductions(x, a, b):
    h = x @ a
    return jnp.prod(jax.nn.sigmoid(h) @ b), jnp.sum(h), jnp.mean(h, 0), jnp.std(h), jnp.min(h), jnp.any(h > 0)


@program(low=2)
def clipping_and_choosing(x, a, b):
    h = x @ a
    return jnp.where(h > 0, jnp.clip(h, -1, 1), jnp.minimum(h, 0.1 * h)) @ b


# -- linear algebra, fed by matmuls

FLOAT32_RULES = {"backward_matmuls": "JAX differentiates a decomposition in float32, where it ran"}


@program(drawn((4, 8), (8, 8)), low=2, without=FLOAT32_RULES)
def cholesky(x, w):
    return jnp.linalg.cholesky(_definite(x, w))


@program(drawn((4, 8), (8, 8)), low=2, without=FLOAT32_RULES)
def determinant(x, w):
    a = _definite(x, w)
    return jnp.linalg.det(a), jnp.linalg.slogdet(a)[1]


@program(drawn((4, 8), (8, 8)), low=2, without=FLOAT32_RULES)
def singular_values(x, w):
    return jnp.linalg.svd(_definite(x, w), compute_uv=False)


@program(drawn((4, 8), (8, 8)), low=2, without=FLOAT32_RULES)
def eigenvalues(x, w):
    return jnp.linalg.eigvalsh(_definite(x, w))


@program(drawn((4, 8), (8, 8)), low=2, without=FLOAT32_RULES)
def qr(x, w):
    return jnp.linalg.qr(_definite(x, w))


@program(low=2)
def norms(x, a, b):
    h = x @ a
    return (h / jnp.linalg.norm(h, axis=-1, keepdims=True)) @ b, jnp.linalg.norm(h)


@program(low=2)
def fourier_transform(x, a, b):
    h = jnp.fft.rfft(x @ a, axis=-1)
    return jnp.fft.irfft(h * jnp.conj(h), 8, axis=-1) @ b


# -- special functions


@program(low=2)
def error_functions(x, a, b):
    h = x @ a
    return (jax.scipy.special.erf(h) + jax.scipy.special.erfc(h / 2) + lax.erf_inv(jnp.tanh(h) / 2)) @ b


@program(low=2)
def gamma_functions(x, a, b):
    h = jax.nn.softplus(x @ a) + 1
    return (lax.lgamma(h) + lax.digamma(h)) @ b


@program(low=2)
def bessel_and_beta_functions(x, a, b):
    h = x @ a
    beta = jax.scipy.special.betainc(jnp.full_like(h, 2), jnp.full_like(h, 3), jax.nn.sigmoid(h))
    return (lax.bessel_i0e(h) + lax.bessel_i1e(h) + beta) @ b


@program(low=2)
def powers_and_exponentials(x, a, b):
    h = jnp.abs(x @ a) + 0.5
    return (h**1.5 + h**3 + jnp.exp(-h) + jnp.expm1(-h) + jnp.log(h) + jnp.log1p(h) + jnp.sqrt(h) + 1 / h) @ b / 8


@program(low=2)
def trigonometry(x, a, b):
    h = x @ a
    return (jnp.sin(h) + jnp.cos(h) + jnp.arctan2(h, 1 + h**2) + jnp.sinh(h / 4) + jnp.arcsinh(h)) @ b / 4


# -- the world outside

NO_CALLBACK_DERIVATIVE = dict.fromkeys(("grad", "amp_of_grad", "jvp", "hessian"), NO_DERIVATIVE)


@program(low=2, without=NO_CALLBACK_DERIVATIVE)
def pure_callback(x, a, b):
    h = x @ a
    return jax.pure_callback(np.sinh, jax.ShapeDtypeStruct(h.shape, h.dtype), h, vmap_method="expand_dims") @ b


@program(low=2, without=NO_CALLBACK_DERIVATIVE)
def io_callback_(x, a, b):
    h = x @ a
    io_callback(lambda _: None, None, h)
    return jnp.tanh(h) @ b


@program(low=2)
def debug_print(x, a, b):
    h = x @ a
    jax.debug.print("{}", h[0, 0])
    return jnp.tanh(h) @ b


# -- references


@program(low=2)
def reference(x, a, b):
    ref = jax.new_ref(x @ a)
    ref[...] = jnp.tanh(ref[...])
    ref[0] += 1
    return jax.freeze(ref) @ b


@program(drawn((5, 2, 4), (4, 3)), low=1)
def reference_in_scan(xs, w):
    total = jax.new_ref(jnp.zeros((2, 3), xs.dtype))

    def step(_, x):
        total[...] += x @ w
        return None, None

    lax.scan(step, None, xs)
    return jax.freeze(total)
