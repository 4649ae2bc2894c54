"""One entry of each row, with a gradient that is no scatter."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from helpers import AMP, assert_near, both, equations, in_float64, normal
from jax import lax

import jaxamp
from jaxamp._primitives.entries import entries_of_rows

X, PLACES = normal(0, 3, 5, 7), jnp.asarray([[0, 6, 2, 2, 1], [3, -1, 7, 5, 0], [4, 4, 100, -100, 6]])
MODES = "clip", "fill", "promise_in_bounds"


def of_jax(x, places, mode):
    places = jnp.clip(places, 0, 6) if mode == "promise_in_bounds" else places
    batch = tuple(range(x.ndim - 1))
    numbers = lax.GatherDimensionNumbers((), (x.ndim - 1,), (x.ndim - 1,), batch, batch)
    return lax.gather(x, places[..., None], numbers, (1,) * x.ndim, mode=mode)


def ours(x, places, mode):
    places = jnp.clip(places, 0, 6) if mode == "promise_in_bounds" else places
    return entries_of_rows(x, places, lax.GatherScatterMode.from_any(mode), None)


@pytest.mark.parametrize("mode", MODES)
def test_derivatives_are_those_of_a_gather(mode):
    t, ct = normal(1, 3, 5, 7), normal(2, 3, 5)

    def all_of_them(fun):
        fun = functools.partial(fun, places=PLACES, mode=mode)
        grad = jax.grad(lambda x: jnp.nansum(jnp.sin(fun(x)) * ct))
        return (
            fun(X),
            jax.jvp(fun, (X,), (t,)),
            jax.vjp(fun, X)[1](ct),
            jax.jvp(grad, (X,), (t,)),
            jax.grad(lambda x: jnp.sum(grad(x) * t))(X),
        )

    jax.tree.map(np.testing.assert_array_equal, all_of_them(ours), all_of_them(of_jax))


@pytest.mark.parametrize("axes", [(0, 0), (0, None), (None, 0), (1, 1)])
def test_vmap(axes):
    x, places = X if axes[0] is not None else X[0], PLACES if axes[1] is not None else PLACES[0]
    if axes == (1, 1):
        x, places = jnp.moveaxis(x, 0, 1), places.T
    grads = [
        jax.vmap(jax.grad(lambda x, p, fun=fun: jnp.sum(fun(x, p, "clip"))), axes)(x, places) for fun in (ours, of_jax)
    ]
    np.testing.assert_array_equal(*grads)


def test_places_in_few_bits():
    """As many entries as a byte can't count."""
    x, places = normal(0, 2, 300), jnp.asarray([3, 200], jnp.uint8)
    grad = jax.grad(lambda x: jnp.sum(entries_of_rows(x, places, lax.GatherScatterMode.CLIP, None)))(x)
    assert np.argwhere(grad).tolist() == [[0, 3], [1, 200]]


W, TOKENS, LABELS = normal(0, 8, 11, scale=0.4), normal(1, 6, 8), jnp.arange(6) % 11


def of_optax(w, x):
    return optax.softmax_cross_entropy_with_integer_labels(jnp.tanh(x) @ w, LABELS).mean()


def by_hand(w, x):
    logp = jax.nn.log_softmax(jnp.tanh(x) @ w + 1)
    return -jnp.take_along_axis(logp, LABELS[:, None], axis=-1).mean()


def of_sequences(w, x):
    logits = jnp.stack([x, -x]) @ w
    return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.stack([LABELS, LABELS[::-1]])).mean()


def mapped(w, x):
    """As in a loss of one example."""
    return jax.vmap(lambda x, y: -jax.nn.log_softmax(x @ w)[y])(x, LABELS).mean()


def by_rows(w, x):
    logp = jax.nn.log_softmax(x @ w)
    return -logp[jnp.arange(len(x)), LABELS - 3].mean()  # some from the end


def by_rows_and_columns(w, x):
    logits = jnp.stack([x, -x, 2 * x]) @ w
    rows, columns = jnp.arange(3)[:, None], jnp.arange(6)
    labels = jnp.stack([LABELS, LABELS[::-1], LABELS])
    return -jax.nn.log_softmax(logits)[rows, columns, labels].mean()


def by_rows_mapped(w, x):
    def of_one(x, labels):
        return -jax.nn.log_softmax(x @ w)[jnp.arange(len(x)), labels].mean()

    return jax.vmap(of_one)(jnp.stack([x, -x]), jnp.stack([LABELS, LABELS[::-1]])).mean()


def scattered(fn):
    """The scatters into all scores, in a gradient."""
    found = (eqn for eqn in equations(jax.make_jaxpr(jax.grad(fn))(W, TOKENS)) if eqn.primitive.name == "scatter-add")
    return [eqn for eqn in found if eqn.outvars[0].aval.shape[-1] == W.shape[1]]


LOSSES = [of_optax, by_hand, of_sequences, mapped, by_rows, by_rows_and_columns, by_rows_mapped]


@both
@pytest.mark.parametrize("loss", LOSSES)
def test_losses(loss, low):
    amp = jaxamp.amp(loss, compute_dtype=low)
    assert not scattered(amp)
    assert_near(jax.jit(amp)(W, TOKENS), in_float64(loss, W, TOKENS), 1e-2)
    assert_near(jax.jit(jax.grad(amp))(W, TOKENS), in_float64(jax.grad(loss), W, TOKENS), 2e-2)


def test_without_the_pass():
    assert scattered(AMP(of_optax, disable_passes=["pick_labels"]))


def embedded(w, x):
    return jnp.sum(jnp.sin(w[LABELS % 8] @ w.T))


def some_of_each_row(w, x):
    return jnp.sum(jnp.sin(jnp.take_along_axis(x @ w, jnp.stack([LABELS, LABELS + 1], -1), axis=-1)))


def of_other_rows(w, x):
    return jnp.sum(jnp.sin(x @ w)[jnp.arange(6)[::-1], LABELS])


def of_rows_in_another_order(w, x):
    """Entry (i, j) of the result is from row j."""
    labels = jnp.stack([LABELS] * 6)
    return jnp.sum(jnp.sin(jnp.stack([x @ w] * 6))[jnp.arange(6), jnp.arange(6)[:, None], labels])


def of_columns(w, x):
    return jnp.sum(jnp.sin(x @ w)[LABELS % 6, jnp.arange(6)])


def of_one_row(w, x):
    """One index, repeated."""
    return jnp.sum(jnp.sin(x @ w)[jnp.arange(1), LABELS])


def of_one_row_repeated(w, x):
    rows = lax.broadcast_in_dim(lax.iota(jnp.int32, 1), (6,), (0,))
    return jnp.sum(jnp.sin(x @ w)[rows, LABELS])


def of_negative_rows(w, x):
    return jnp.sum(jnp.sin(x @ w)[jnp.arange(6) - 6, LABELS])


def of_rows_modulo(w, x):
    return jnp.sum(jnp.sin(x @ w)[jnp.arange(6) % 3, LABELS])


OTHERS = [
    embedded,
    some_of_each_row,
    of_other_rows,
    of_rows_in_another_order,
    of_columns,
    of_one_row,
    of_one_row_repeated,
    of_negative_rows,
    of_rows_modulo,
]


@pytest.mark.parametrize("dtype", ["bool", "int4", "uint4", "uint8"])
def test_counts_of_few_bits(dtype):
    def loss(w, x):
        numbers = jnp.arange(6).astype(dtype).astype(x.dtype)
        return -(jax.nn.log_softmax(x @ w)[jnp.arange(6), LABELS] * numbers).mean()

    assert_near(jax.jit(jax.grad(AMP(loss)))(W, TOKENS), in_float64(jax.grad(loss), W, TOKENS), 2e-2)


@pytest.mark.parametrize("loss", OTHERS)
def test_other_gathers_are_left_alone(loss):
    programs = [
        str(jax.make_jaxpr(jax.grad(AMP(loss, disable_passes=off)))(W, TOKENS)) for off in ([], ["pick_labels"])
    ]
    assert programs[0] == programs[1]
