"""Programs written with libraries (Equinox, Flax, Haiku, Optax, sparse, Pallas), models and keys as arguments."""

import functools
from typing import Any

import equinox as eqx
import flax.linen as nn
import haiku as hk
import jax
import jax.numpy as jnp
import jax.random as jr
import optax
from flax import nnx
from helpers import Program, normal
from jax.experimental import pallas as pl
from jax.experimental import sparse

_DRAWS = {"oracle": "jax.random draws other numbers in float64"}
_COUNTER = {"oracle": "a counter in the state is an int64 under x64 and Equinox refuses to replace an int32"}
_BATCHED = {"vmap": "a BCOO carries its shape as static data: its leaves can't be stacked"}
_NO_FORWARD_MODE = {"jvp": "custom_vjp has no forward mode", "hessian": "custom_vjp has no forward mode"}


# -- Equinox


def eqx_layers(layers: list[Any], x: jax.Array) -> jax.Array:
    for layer in layers:
        x = jax.vmap(layer)(x)
    return x


def eqx_linear_args() -> tuple[Any, ...]:
    return [eqx.nn.Linear(4, 3, key=jr.key(0))], normal(1, 5, 4)


def eqx_mlp_args() -> tuple[Any, ...]:
    return [eqx.nn.MLP(4, 2, 8, 2, jax.nn.gelu, key=jr.key(0))], normal(1, 5, 4)


def eqx_norms_args() -> tuple[Any, ...]:
    k = jr.split(jr.key(0), 2)
    layers = [eqx.nn.Linear(4, 8, key=k[0]), eqx.nn.LayerNorm(8), eqx.nn.Lambda(jax.nn.relu), eqx.nn.RMSNorm(8)]
    return [*layers, eqx.nn.Linear(8, 3, key=k[1])], normal(1, 5, 4)


def eqx_conv_args() -> tuple[Any, ...]:
    k = jr.split(jr.key(0), 2)
    layers = [eqx.nn.Conv2d(1, 4, 3, key=k[0]), eqx.nn.GroupNorm(2, 4), eqx.nn.Lambda(jax.nn.silu)]
    return [*layers, eqx.nn.AvgPool2d(2, 2), eqx.nn.Conv2d(4, 2, 2, key=k[1])], normal(1, 2, 1, 8, 8)


class EqxBatchNorm(eqx.Module):
    first: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    last: eqx.nn.Linear

    def __init__(self, key: jax.Array):
        k1, k2 = jr.split(key)
        self.first, self.last = eqx.nn.Linear(4, 6, key=k1), eqx.nn.Linear(6, 2, key=k2)
        self.norm = eqx.nn.BatchNorm(6, "batch", mode="batch")

    def __call__(self, x: jax.Array, state: eqx.nn.State) -> tuple[jax.Array, eqx.nn.State]:
        x, state = self.norm(self.first(x), state)
        return self.last(jax.nn.relu(x)), state


def eqx_batchnorm(model: EqxBatchNorm, state: eqx.nn.State, x: jax.Array) -> tuple[jax.Array, eqx.nn.State]:
    return jax.vmap(model, axis_name="batch", in_axes=(0, None), out_axes=(0, None))(x, state)


def eqx_batchnorm_args() -> tuple[Any, ...]:
    return *eqx.nn.make_with_state(EqxBatchNorm)(jr.key(0)), 3 + normal(1, 8, 4)


def eqx_attention(attention: eqx.nn.MultiheadAttention, x: jax.Array) -> jax.Array:
    mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
    return jax.vmap(lambda x: attention(x, x, x, mask=mask))(x)


def eqx_attention_args() -> tuple[Any, ...]:
    return eqx.nn.MultiheadAttention(2, 8, key=jr.key(0)), normal(1, 2, 5, 8)


def eqx_gru(cell: eqx.nn.GRUCell, head: eqx.nn.Linear, xs: jax.Array) -> jax.Array:
    def step(h: jax.Array, x: jax.Array) -> tuple[jax.Array, None]:
        return cell(x, h), None

    return head(jax.lax.scan(step, jnp.zeros(cell.hidden_size, xs.dtype), xs)[0])


def eqx_gru_args() -> tuple[Any, ...]:
    return eqx.nn.GRUCell(3, 5, key=jr.key(0)), eqx.nn.Linear(5, 2, key=jr.key(1)), normal(2, 6, 3)


def eqx_dropout(model: list[Any], x: jax.Array, key: jax.Array) -> jax.Array:
    first, dropout, last = model
    x = jax.vmap(first)(x)
    x = jax.vmap(dropout)(x, key=jr.split(key, x.shape[0]))
    return jax.vmap(last)(x)


def eqx_dropout_args() -> tuple[Any, ...]:
    k = jr.split(jr.key(0), 3)
    return [eqx.nn.Linear(4, 8, key=k[0]), eqx.nn.Dropout(0.25), eqx.nn.Linear(8, 3, key=k[1])], normal(1, 5, 4), k[2]


def eqx_embedding(embedding: eqx.nn.Embedding, head: eqx.nn.Linear, tokens: jax.Array) -> jax.Array:
    return jax.vmap(head)(jax.vmap(embedding)(tokens))


def eqx_embedding_args() -> tuple[Any, ...]:
    tokens = jnp.array([3, 1, 4, 1, 5])
    return eqx.nn.Embedding(7, 4, key=jr.key(0)), eqx.nn.Linear(4, 7, key=jr.key(1)), tokens


def eqx_checkpoint(mlp: eqx.nn.MLP, x: jax.Array) -> jax.Array:
    return jax.vmap(eqx.filter_checkpoint(mlp))(x)


def eqx_checkpoint_args() -> tuple[Any, ...]:
    return eqx.nn.MLP(4, 2, 8, 1, jnp.tanh, key=jr.key(0)), normal(1, 5, 4)


@eqx.filter_custom_vjp
def _clipped_linear(vjp_arg: tuple[eqx.nn.Linear, jax.Array]) -> jax.Array:
    linear, x = vjp_arg
    return jnp.tanh(linear(x))


@_clipped_linear.def_fwd
def _clipped_linear_fwd(perturbed: Any, vjp_arg: Any) -> tuple[jax.Array, Any]:
    linear, x = vjp_arg
    y = jnp.tanh(linear(x))
    return y, (linear, x, y)


@_clipped_linear.def_bwd
def _clipped_linear_bwd(residuals: Any, g: jax.Array, perturbed: Any, vjp_arg: Any) -> Any:
    linear, x, y = residuals
    g = jnp.clip(g * (1 - y * y), -1, 1)
    grads = eqx.tree_at(lambda m: (m.weight, m.bias), linear, (jnp.outer(g, x), g))
    return eqx.filter(grads, eqx.is_inexact_array), linear.weight.T @ g


def eqx_custom_vjp(linear: eqx.nn.Linear, head: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    return jax.vmap(lambda x: head(_clipped_linear((linear, x))))(x)


def eqx_custom_vjp_args() -> tuple[Any, ...]:
    return eqx.nn.Linear(4, 6, key=jr.key(0)), eqx.nn.Linear(6, 2, key=jr.key(1)), normal(2, 3, 4)


def eqx_while(linear: eqx.nn.Linear, x: jax.Array) -> jax.Array:
    def body(carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        step, y = carry
        return step + 1, y + jnp.tanh(linear(y)) / 8

    loop = functools.partial(eqx.internal.while_loop, kind="checkpointed", checkpoints=3)
    return loop(lambda carry: carry[0] < 6, body, (0, x), max_steps=None)[1]


def eqx_while_args() -> tuple[Any, ...]:
    return eqx.nn.Linear(4, 4, key=jr.key(0)), normal(1, 4)


# -- Flax Linen


class LinenNorms(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.LayerNorm()(nn.Dense(8)(x)))
        return nn.Dense(3)(nn.RMSNorm()(x))


class LinenConv(nn.Module):
    """As a ResNet's first block: the running statistics are an output too."""

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        x = nn.relu(nn.BatchNorm(use_running_average=False)(nn.Conv(4, (3, 3), use_bias=False)(x)))
        x = nn.max_pool(x, (2, 2), (2, 2))
        return nn.Dense(3)(x.mean((1, 2)))


class LinenAttention(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        mask = nn.make_causal_mask(x[..., 0])
        # Without biases: softmax cancels that of the keys, whose gradient is noise around zero.
        return nn.MultiHeadDotProductAttention(2, deterministic=True, use_bias=False)(x, mask=mask)


class LinenBlock(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, _: None = None) -> tuple[jax.Array, None]:
        return x + nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(12)(nn.LayerNorm()(x)))), None


class LinenScan(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        layers = nn.scan(LinenBlock, variable_axes={"params": 0}, split_rngs={"params": True}, length=3)
        return nn.Dense(2)(layers()(x)[0])


class LinenRemat(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.remat(LinenBlock)()(x)[0]


class LinenDropout(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        return nn.Dense(3)(nn.Dropout(0.25, deterministic=False)(nn.Dense(8)(x)))


def _linen(module: nn.Module) -> Any:
    def linen(variables: Any, x: jax.Array) -> jax.Array:
        return module.apply(variables, x)

    return linen


def _linen_args(module: nn.Module, *shape: int) -> Any:
    def args() -> tuple[Any, ...]:
        x = normal(1, *shape)
        return module.init({"params": jr.key(0), "dropout": jr.key(2)}, x), x

    return args


def linen_conv(variables: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return LinenConv().apply(variables, x, mutable=["batch_stats"])


def linen_dropout(variables: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    return LinenDropout().apply(variables, x, rngs={"dropout": key})


def linen_dropout_args() -> tuple[Any, ...]:
    return *_linen_args(LinenDropout(), 5, 4)(), jr.key(3)


# -- Flax NNX


class NnxBlock(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first, self.last = nnx.Linear(4, 8, rngs=rngs), nnx.Linear(8, 4, rngs=rngs)
        self.norm = nnx.LayerNorm(4, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.last(nnx.gelu(self.first(self.norm(x))))


def nnx_merged(graphdef: Any, state: Any, x: jax.Array) -> jax.Array:
    return nnx.merge(graphdef, state)(x)


def nnx_merged_args() -> tuple[Any, ...]:
    return *nnx.split(NnxBlock(nnx.Rngs(0))), normal(1, 5, 4)


def nnx_module(model: NnxBlock, x: jax.Array) -> jax.Array:
    return model(x)


def nnx_module_args() -> tuple[Any, ...]:
    return NnxBlock(nnx.Rngs(0)), normal(1, 5, 4)


# -- Haiku


def _haiku_norms(x: jax.Array) -> jax.Array:
    x = hk.LayerNorm(-1, True, True)(hk.Linear(8)(x))
    return hk.nets.MLP([6, 3], activation=jax.nn.silu)(x)


def _haiku_batchnorm(x: jax.Array) -> jax.Array:
    x = hk.BatchNorm(True, True, 0.9)(hk.Conv2D(4, 3)(x), is_training=True)
    return hk.Linear(3)(jnp.mean(jax.nn.relu(x), (1, 2)))


def _haiku_lstm(x: jax.Array, state: hk.LSTMState) -> jax.Array:
    outs, _ = hk.dynamic_unroll(hk.LSTM(5), x, state)
    return hk.Linear(2)(outs[-1])


HAIKU_NORMS = hk.without_apply_rng(hk.transform(_haiku_norms))
HAIKU_BATCHNORM = hk.without_apply_rng(hk.transform_with_state(_haiku_batchnorm))
HAIKU_LSTM = hk.without_apply_rng(hk.transform(_haiku_lstm))


def haiku_norms(params: Any, x: jax.Array) -> jax.Array:
    return HAIKU_NORMS.apply(params, x)


def haiku_norms_args() -> tuple[Any, ...]:
    x = normal(1, 5, 4)
    return HAIKU_NORMS.init(jr.key(0), x), x


def haiku_batchnorm(params: Any, state: Any, x: jax.Array) -> tuple[jax.Array, Any]:
    return HAIKU_BATCHNORM.apply(params, state, x)


def haiku_batchnorm_args() -> tuple[Any, ...]:
    x = normal(1, 2, 6, 6, 1)
    return *HAIKU_BATCHNORM.init(jr.key(0), x), x


def haiku_lstm(params: Any, x: jax.Array, state: hk.LSTMState) -> jax.Array:
    return HAIKU_LSTM.apply(params, x, state)


def haiku_lstm_args() -> tuple[Any, ...]:
    x, state = normal(1, 6, 2, 3), hk.LSTMState(jnp.zeros((2, 5)), jnp.zeros((2, 5)))
    return HAIKU_LSTM.init(jr.key(0), x, state), x, state


# -- Optax


def optax_softmax(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(x @ w, labels).mean()


def optax_softmax_args() -> tuple[Any, ...]:
    return normal(0, 4, 7), normal(1, 5, 4), jnp.array([0, 3, 6, 1, 1])


def optax_huber(w: jax.Array, x: jax.Array, y: jax.Array) -> jax.Array:
    return optax.huber_loss((x @ w)[:, 0], y, delta=0.5).mean()


def optax_huber_args() -> tuple[Any, ...]:
    return normal(0, 4, 1), normal(1, 5, 4), normal(2, 5)


def optax_ctc(w: jax.Array, x: jax.Array, labels: jax.Array) -> jax.Array:
    """Two matmuls inside pick log-probabilities by one-hot labels: a bool is harmless, so they run low."""
    logits = x @ w
    padding = jnp.zeros(logits.shape[:2], logits.dtype)
    return optax.ctc_loss(logits, padding, labels, jnp.zeros(labels.shape, logits.dtype)).mean()


def optax_ctc_args() -> tuple[Any, ...]:
    return normal(0, 3, 5), normal(1, 2, 6, 3), jnp.array([[1, 2, 2], [4, 1, 3]])


ADAMW = optax.adamw(1e-3, weight_decay=1e-2)


def optax_adamw(params: Any, state: Any, x: jax.Array, y: jax.Array) -> Any:
    def loss(params: Any) -> jax.Array:
        first, last = params
        return jnp.mean((jnp.tanh(x @ first) @ last - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    updates, state = ADAMW.update(grads, state, params)
    return optax.apply_updates(params, updates), state, value


def optax_adamw_args() -> tuple[Any, ...]:
    params = [normal(0, 4, 8), normal(1, 8, 2)]
    return params, ADAMW.init(params), normal(2, 6, 4), normal(3, 6, 2)


# -- JAX's own libraries


def bcoo_matmul(a: sparse.BCOO, w: jax.Array, x: jax.Array) -> jax.Array:
    return (a @ jnp.tanh(x @ w)) @ w


def bcoo_matmul_args() -> tuple[Any, ...]:
    a = sparse.BCOO.fromdense(jnp.eye(5) + jnp.eye(5, k=2), nse=8)
    return a, normal(0, 4, 4), normal(1, 5, 4)


def _double_kernel(x_ref: Any, o_ref: Any) -> None:
    o_ref[...] = 2 * jnp.tanh(x_ref[...])


@jax.custom_jvp
def _double_tanh(x: jax.Array) -> jax.Array:
    return pl.pallas_call(_double_kernel, jax.ShapeDtypeStruct(x.shape, x.dtype), interpret=True)(x)


@_double_tanh.defjvp
def _double_tanh_jvp(primals: Any, tangents: Any) -> Any:
    y = _double_tanh(*primals)
    return y, (2 - y * y / 2) * tangents[0]


def pallas_between_matmuls(w: jax.Array, x: jax.Array) -> jax.Array:
    return _double_tanh(x @ w) @ w


def pallas_between_matmuls_args() -> tuple[Any, ...]:
    return normal(0, 4, 4) / 2, normal(1, 8, 4)


# -- a whole model


def _rms_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + 1e-6) * scale


def _rotate(x: jax.Array) -> jax.Array:
    """Rotary embedding of (time, head, feature)."""
    half = x.shape[-1] // 2
    frequency = 10_000.0 ** (-jnp.arange(half, dtype=x.dtype) / half)
    angle = jnp.einsum("t,f->tf", jnp.arange(x.shape[0], dtype=x.dtype), frequency)[:, None]
    sin, cos = jnp.sin(angle), jnp.cos(angle)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, left * sin + right * cos], -1)


def _transformer_layer(x: jax.Array, p: dict[str, jax.Array]) -> tuple[jax.Array, None]:
    y = _rms_norm(x, p["norm1"])
    q, k, v = (jnp.einsum("td,dhf->thf", y, p[name]) for name in "qkv")
    scores = jnp.einsum("thf,shf->hts", _rotate(q), _rotate(k)) * q.shape[-1] ** -0.5
    mask = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, jnp.finfo(jnp.float32).min))
    x = x + jnp.einsum("hts,shf,hfd->td", weights, v, p["o"])
    return x + jax.nn.gelu(_rms_norm(x, p["norm2"]) @ p["up"]) @ p["down"], None


def transformer(params: Any, tokens: jax.Array) -> jax.Array:
    """The loss of a language model, scanned over its layers."""
    x, _ = jax.lax.scan(_transformer_layer, params["embedding"][tokens[:-1]], params["layers"])
    logits = x @ params["embedding"].T
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), tokens[1:, None], -1).mean()


def transformer_args() -> tuple[Any, ...]:
    d, h, f, n = 8, 2, 4, 2
    layers = {
        "norm1": jnp.ones((n, d)),
        "norm2": jnp.ones((n, d)),
        **{name: normal(i, n, d, h, f) / d**0.5 for i, name in enumerate("qkv")},
        "o": normal(3, n, h, f, d) / d**0.5,
        "up": normal(4, n, d, 2 * d) / d**0.5,
        "down": normal(5, n, 2 * d, d) / d**0.5,
    }
    return {"embedding": normal(6, 11, d) / 2, "layers": layers}, jnp.array([3, 1, 4, 1, 5, 9, 2, 6])


# The first step of Adam is the sign of the gradient.
_SIGN = dict.fromkeys(("grad", "amp_of_grad", "jvp"), "the derivative of a sign: all that is left is the epsilon")

PROGRAMS: list[Program] = [
    Program("eqx_linear", eqx_layers, eqx_linear_args, low=1),
    Program("eqx_mlp", eqx_layers, eqx_mlp_args, low=3),
    Program("eqx_norms", eqx_layers, eqx_norms_args, low=2),
    Program("eqx_conv", eqx_layers, eqx_conv_args, low=2),
    Program("eqx_batchnorm", eqx_batchnorm, eqx_batchnorm_args, low=2, without=_COUNTER),
    Program("eqx_attention", eqx_attention, eqx_attention_args, low=6),
    Program("eqx_gru", eqx_gru, eqx_gru_args, low=3),
    Program("eqx_dropout", eqx_dropout, eqx_dropout_args, low=2, without=_DRAWS),
    Program("eqx_embedding", eqx_embedding, eqx_embedding_args, low=1),
    Program("eqx_checkpoint", eqx_checkpoint, eqx_checkpoint_args, low=2),
    Program("eqx_custom_vjp", eqx_custom_vjp, eqx_custom_vjp_args, low=2, without=_NO_FORWARD_MODE),
    Program("eqx_while", eqx_while, eqx_while_args, low=1, without=_NO_FORWARD_MODE),
    Program("linen_norms", _linen(LinenNorms()), _linen_args(LinenNorms(), 5, 4), low=2),
    Program("linen_conv", linen_conv, _linen_args(LinenConv(), 2, 8, 8, 1), low=2),
    Program("linen_attention", _linen(LinenAttention()), _linen_args(LinenAttention(), 2, 5, 8), low=6),
    Program("linen_scan", _linen(LinenScan()), _linen_args(LinenScan(), 5, 4), low=3, rtol=3e-2),
    Program("linen_remat", _linen(LinenRemat()), _linen_args(LinenRemat(), 5, 4), low=2),
    Program("linen_dropout", linen_dropout, linen_dropout_args, low=2, without=_DRAWS),
    Program("nnx_merged", nnx_merged, nnx_merged_args, low=2),
    Program("nnx_module", nnx_module, nnx_module_args, low=2),
    Program("haiku_norms", haiku_norms, haiku_norms_args, low=3),
    Program("haiku_batchnorm", haiku_batchnorm, haiku_batchnorm_args, low=2),
    Program("haiku_lstm", haiku_lstm, haiku_lstm_args, low=2),
    Program("optax_softmax", optax_softmax, optax_softmax_args, low=1),
    Program("optax_huber", optax_huber, optax_huber_args, low=1),
    Program("optax_ctc", optax_ctc, optax_ctc_args, low=3),
    Program("optax_adamw", optax_adamw, optax_adamw_args, low=5, rtol=5e-2, without=_SIGN),
    Program("bcoo_matmul", bcoo_matmul, bcoo_matmul_args, low=2, without=_BATCHED),
    Program("pallas_between_matmuls", pallas_between_matmuls, pallas_between_matmuls_args, low=2),
    # Its angles, for queries and for keys, are computed once.
    Program("transformer", transformer, transformer_args, low=9, rtol=4e-2),
]
