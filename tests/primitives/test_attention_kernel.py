"""The fused attention: an even number of tokens, and a vjp cut in two."""

import functools
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import pytest
from attention_cases import (
    BATCH,
    BIAS,
    HEADS,
    KEYS,
    LENGTHS,
    QKV,
    TOKENS,
    WIDTH,
    K,
    Q,
    V,
    attend,
    booleans,
    bounds,
    largest_error,
    lowered,
    written_out,
)
from helpers import assert_same_bits, both, error, normal

import jaxamp
from jaxamp._primitives import attention as module
from jaxamp._primitives import attention_cudnn as kernel
from jaxamp._primitives import attention_plain as plain


def params_of(given=(), **options):
    defaults = {"scale": None, "is_causal": False, "local_window_size": None, "precision": None}
    return {**defaults, **options, "given": tuple(given), "implementation": None}


@pytest.mark.parametrize(
    ("kind", "tokens", "keys"),
    [("causal", 5, 10), ("bias", 1, 1), ("repeated bias, mask", 5, 9), ("lengths", 5, 9)],
)
def test_an_even_number_of_tokens_gives_what_an_odd_one_does(kind, tokens, keys):
    """The result and the gradients, in the plain attention."""
    rest = {
        "bias": {"bias": BIAS[:, :, :tokens, :keys]},
        "repeated bias, mask": {"bias": normal(18, HEADS, 1, keys)[None], "mask": booleans(18, BATCH, 1, 1, keys)},
        "lengths": {
            "query_seq_lengths": jnp.array([tokens, tokens - 2], jnp.int32),
            "key_value_seq_lengths": jnp.array([keys - 3, keys], jnp.int32),
        },
    }.get(kind, {})
    primals = [Q[:, :tokens], K[:, :keys], V[:, :keys], *rest.values()]
    padded, params = kernel.padded_to_even(primals, params_of(rest, is_causal=kind == "causal"))
    assert {x.shape[1] % 2 for x in padded[:3]} == {0}
    assert set(params["given"]) == {*rest, *LENGTHS}

    @jax.jit
    def both_passes(padded, ct):
        out, lse = plain.plain_forward(*padded, **params)
        return out, plain.plain_backward(*padded, out, lse, ct, bias_differentiated="bias" in rest, **params)

    ct = normal(19, *primals[0].shape)
    out, gradients = both_passes(padded, kernel._pad(ct, {1}))
    of_odd, gradients_of_odd = written_out(ct, *primals[:3], is_causal=kind == "causal", **rest)
    for found, expected in zip((out, *gradients), (of_odd, *gradients_of_odd), strict=True):
        assert np.allclose(kernel._cut(found, expected.shape), expected, atol=1e-5)


def test_an_even_number_of_tokens_is_left_alone():
    primals, params = [*QKV, BIAS], params_of(["bias"])
    padded, same = kernel.padded_to_even(primals, params)
    assert all(x is y for x, y in zip(padded, primals, strict=True))
    assert same is params


class LookAlike:
    """JAX's cuDNN attention as seen from outside: a `custom_vjp` that keeps operands, sums and result.

    The forward pass has a sine in it and the backward pass a cosine, of zero and added or multiplied: marks in a
    compiled program. It notes what it was given.
    """

    def __init__(self, extra=False, nothing=False):
        self.extra, self.nothing, self.seen = extra, nothing, []
        self.real = jax.nn.dot_product_attention

    def __call__(self, q, k, v, bias=None, mask=None, *, implementation=None, **options):
        if implementation != "cudnn":
            return self.real(q, k, v, bias, mask, implementation=implementation, **options)
        self.seen.append((q, k, v, bias, mask, dict(options)))
        given = {"bias": bias, "mask": mask, **{name: options.pop(name, None) for name in LENGTHS}}
        return self._fused(options)(q, k, v, {name: x for name, x in given.items() if x is not None})

    def _fused(self, options):
        def scores_and_sums(q, k, v, given):
            wide = [x.astype(jnp.float32) for x in (q, k, v)]
            given = {n: x.astype(jnp.float32) if n == "bias" else x for n, x in given.items()}
            out, sums = self.real(*wide, **given, **options, return_residual=True)
            return (out + jnp.sin(0.0 * out)).astype(q.dtype), jnp.transpose(sums, (0, 2, 1))

        @jax.custom_vjp
        def fused(q, k, v, given):
            return scores_and_sums(q, k, v, given)[0]

        def forward(q, k, v, given):
            out, sums = scores_and_sums(q, k, v, given)
            kept = (q, k, v, given) if self.nothing else (q, k, v, given, sums, out)
            return out, (*kept, 2.0 * sums) if self.extra else kept

        def backward(kept, ct):
            q, k, v, given, sums, out = kept
            q, k, v, out, ct = (x.astype(jnp.float32) for x in (q, k, v, out, ct))
            groups = q.shape[2] // k.shape[2]
            k, v = (jnp.repeat(x, groups, 2) for x in (k, v))
            scale = q.shape[-1] ** -0.5
            bias = given["bias"].astype(jnp.float32) if "bias" in given else 0.0
            weights = jnp.exp(jnp.einsum("btnh,bsnh->bnts", q, k) * scale + bias - sums[..., None])
            of_sums = jnp.transpose((out * ct).sum(-1), (0, 2, 1))[..., None]  # the kernel's use of the result
            of_scores = weights * (jnp.einsum("btnh,bsnh->bnts", ct, v) - of_sums) * jnp.cos(0.0 * of_sums)
            grouped = lambda x: x.reshape(*x.shape[:2], -1, groups, x.shape[-1]).sum(3)
            low = kept[0].dtype
            found = (
                (jnp.einsum("bnts,bsnh->btnh", of_scores, k) * scale).astype(low),
                grouped(jnp.einsum("bnts,btnh->bsnh", of_scores, q) * scale).astype(low),
                grouped(jnp.einsum("bnts,btnh->bsnh", weights, ct)).astype(low),
            )
            zeros = {n: np.zeros(x.shape, jax.dtypes.float0) for n, x in given.items()}
            if "bias" in given:
                shape = given["bias"].shape
                summed = tuple(i for i in range(4) if shape[i] < of_scores.shape[i])
                zeros["bias"] = of_scores.sum(summed, keepdims=True).astype(given["bias"].dtype)
            return (*found, zeros)

        fused.defvjp(forward, backward)
        return fused


@pytest.fixture
def look_alike(monkeypatch):
    made = LookAlike()
    monkeypatch.setattr(jax.nn, "dot_product_attention", made)
    return made


def lows(*arrays: Any, low: Any = jnp.bfloat16) -> list[jax.Array]:
    return [x.astype(low) if x.dtype == jnp.float32 else x for x in arrays]


def fused_forward(primals, params):
    return jax.jit(functools.partial(kernel.fused_forward, **params))(*primals)


def fused_backward(primals, params, *rest):
    moves = "bias" in params["given"]
    return tuple(
        jax.jit(functools.partial(kernel.fused_backward, bias_differentiated=moves, **params))(*primals, *rest)
    )


@pytest.mark.parametrize(
    ("low", "heads", "rest"),
    [(jnp.float16, HEADS, []), (jnp.bfloat16, 2, [BIAS]), (jnp.bfloat16, HEADS, [normal(20, BATCH, 1, 1, KEYS)])],
    ids=["plain", "grouped, bias", "repeated bias"],
)
def test_the_halves_are_the_forward_and_the_backward_pass(low, heads, rest, look_alike):
    params = params_of(["bias"] * len(rest))
    primals = [*lows(Q, K[:, :, :heads], V[:, :, :heads], low=low), *rest]
    out, lse = fused_forward(primals, params)
    assert look_alike.seen
    assert (out.dtype, lse.dtype, lse.shape) == (low, jnp.float32, Q.shape[:3])
    _, wide_lse = jax.jit(functools.partial(module._wide, module.FORWARD, **params))(*primals)
    assert error(lse, wide_lse) < (1e-6 if not rest else bounds(low))  # cuDNN wants the bias low
    ct = normal(9, *Q.shape).astype(low)
    gradients = fused_backward(primals, params, out, lse, ct)
    assert [x.dtype for x in gradients] == [x.dtype for x in primals]
    assert largest_error((out, gradients), written_out(ct, *primals)) < bounds(low)


def test_the_backward_half_uses_the_result_and_the_sums_that_it_is_given(look_alike):
    primals, params, ct = lows(*QKV), params_of(), lows(normal(9, *Q.shape))[0]
    out, lse = fused_forward(primals, params)
    back = jax.jit(functools.partial(kernel.fused_backward, bias_differentiated=False, **params))
    right = back(*primals, out, lse, ct)
    halved = back(*primals, out, lse + np.float32(np.log(2.0)), ct)  # each weight is
    assert largest_error(halved, [np.asarray(x, np.float64) / 2 for x in right]) < 1e-2
    of_q, of_k, of_v = back(*primals, -out, lse, ct)
    assert min(error(of_q, right[0]), error(of_k, right[1])) > 0.1
    assert_same_bits(of_v, right[2])  # it has no use for the result


def test_each_half_runs_its_own_kernel_alone(look_alike):
    primals, params = lows(*QKV), params_of()
    q = primals[0]
    halves = [
        (functools.partial(kernel.fused_forward, **params), primals),
        (functools.partial(kernel.fused_backward, bias_differentiated=False, **params), [*primals, q, Q[..., 0], q]),
    ]
    texts = [jax.jit(fn).lower(*args).compile().as_text() for fn, args in halves]
    assert [(" sine(" in text, " cosine(" in text) for text in texts] == [(True, False), (False, True)]


def squares(*args, **options):
    return jnp.sum(attend(*args, **options) ** 2)


def test_both_passes_for_a_gpu_are_the_kernels(look_alike):
    text = lowered(jax.grad(jaxamp.amp(squares), argnums=(0, 1, 2)), *QKV)
    assert "stablehlo.sine" in text
    assert "stablehlo.cosine" in text
    assert not any(set(LENGTHS) & set(seen[-1]) for seen in look_alike.seen)  # an even number of tokens


@pytest.mark.parametrize(
    ("options", "dtype"),
    [({}, jnp.float32), ({"implementation": "xla"}, jnp.bfloat16), ({"local_window_size": 3}, jnp.bfloat16)],
)
def test_on_a_gpu_the_plain_one_is_taken_where_the_kernel_does_not_fit(options, dtype, look_alike):
    lowered(jax.grad(jaxamp.amp(functools.partial(squares, **options), compute_dtype=dtype)), *QKV)
    assert not look_alike.seen


def test_an_export_has_no_kernel(look_alike):
    """It has no version that JAX would promise to run later."""
    exported = jax.export.export(jax.jit(jax.grad(jaxamp.amp(squares))), platforms=["cuda"])(*QKV)
    assert "stablehlo.sine" not in exported.mlir_module()
    assert not look_alike.seen


def test_the_kernel_is_given_spread_arrays_in_full_and_lengths_for_odd_numbers(look_alike):
    primals = [*lows(Q[:, :5], K[:, :9], V[:, :9]), normal(21, 1, HEADS, 1, 9), booleans(22, BATCH, 1, 1, 9)]
    out, lse = fused_forward(primals, params_of(["bias", "mask"]))
    q, k, v, bias, mask, options = look_alike.seen[-1]
    assert (q.shape[1], k.shape[1], v.shape[1]) == (6, 10, 10)
    assert (bias.shape, mask.shape) == ((1, HEADS, 6, 10), (BATCH, 1, 6, 10))
    assert bias.dtype == jnp.bfloat16
    assert set(LENGTHS) <= set(options)
    assert (out.shape, lse.shape) == ((BATCH, 5, HEADS, WIDTH), (BATCH, 5, HEADS))
    assert error(out, written_out(Q[:, :5], *primals)[0]) < bounds(jnp.bfloat16)


def test_odd_numbers_of_tokens_come_back_from_the_kernel_as_they_were(look_alike):
    primals, ct = [*lows(Q[:, :5], K[:, :9], V[:, :9]), BIAS[:, :, :5, :9]], lows(normal(9, BATCH, 5, HEADS, WIDTH))[0]
    params = params_of(["bias"])
    out, lse = fused_forward(primals, params)
    found = fused_backward(primals, params, out, lse, ct)
    assert [(x.shape, x.dtype) for x in found] == [(x.shape, x.dtype) for x in primals]
    assert error(out, written_out(ct, *primals)[0]) < bounds(jnp.bfloat16)
    scores = np.einsum("btnh,bsnh->bnts", *(np.asarray(x, np.float64) for x in primals[:2])) * WIDTH**-0.5 + primals[3]
    assert error(lse, np.log(np.exp(scores).sum(-1)).transpose(0, 2, 1)) < bounds(jnp.bfloat16)


@both
def test_the_kernel_is_given_a_finite_bias(low, look_alike):
    """A row of the least float32 has a softmax; a row of -inf has none."""
    bias = jnp.zeros((1, 1, TOKENS, KEYS)).at[0, 0, 2].set(jnp.finfo(jnp.float32).min).at[0, 0, 3, 1].set(-jnp.inf)
    primals = [*lows(*QKV, low=low), bias]
    out, _ = fused_forward(primals, params_of(["bias"]))
    out = np.asarray(out, np.float64)
    assert np.isfinite(out).all()
    others = np.arange(TOKENS) != 2
    assert error(out[:, others], written_out(Q, *primals)[0][:, others]) < bounds(low)


@pytest.mark.parametrize("kind", ["extra", "nothing"])
def test_a_jax_that_keeps_something_else_gets_the_plain_one(kind, monkeypatch):
    monkeypatch.setattr(jax.nn, "dot_product_attention", LookAlike(**{kind: True}))
    primals, params = lows(*QKV), params_of()
    out, _ = jax.eval_shape(functools.partial(kernel.fused_forward, **params), *primals)
    assert (out.shape, out.dtype) == (Q.shape, jnp.bfloat16)
    with pytest.raises(NotImplementedError, match="this JAX keeps something else of it for the backward pass"):
        kernel.fused_forward(*primals, **{**params, "implementation": "cudnn"})


def test_a_gpu_without_the_units_gets_the_plain_one(monkeypatch, look_alike):
    class Old:
        compute_capability = "7.5"

    monkeypatch.setattr(jax, "local_devices", lambda backend=None: [Old()])
    lowered(jaxamp.amp(attend), *QKV)
    assert not look_alike.seen
    with pytest.raises(NotImplementedError, match=r"it needs a GPU of compute capability 8\.0"):
        lowered(jaxamp.amp(functools.partial(attend, implementation="cudnn")), *QKV)
