"""What a user asks for is done, and casts cost little: precisions, buffers, loops, `amp_stop`, collectives."""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.extend.core as jec
import jax.numpy as jnp
import jax.random as jr
import numpy as np
import pytest
from helpers import both, dtypes_of, equations, in_float64, jaxpr_of, matmul_dtypes, normal
from jax import lax
from jax.sharding import PartitionSpec as P
from oracles import amped, assert_near, assert_right
from programs_libraries import PROGRAMS

import jaxamp
from jaxamp._compat import primitives


def casts(jaxpr: Any) -> list[Any]:
    return [eqn for eqn in equations(jaxpr) if eqn.primitive.name == "convert_element_type"]


# -- requests for precision


@both
@pytest.mark.parametrize("precision", ["highest", lax.Precision.HIGHEST, (lax.Precision.HIGHEST,) * 2])
def test_highest_precision_stays_float32(precision: Any, low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.dot(x, w, precision=precision)

    args = normal(0, 3, 4), normal(1, 4, 5)
    assert matmul_dtypes(jaxpr_of(amped(fn, low), *args)) == [("float32", "float32")]
    np.testing.assert_array_equal(amped(fn, low)(*args), fn(*args))


@both
def test_explicit_cast_from_bfloat16_to_float32_is_respected(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        y = (x @ w).astype(jnp.float32)
        return jnp.tanh(y * y + y)

    args = normal(0, 3, 4).astype(jnp.bfloat16), normal(1, 4, 5).astype(jnp.bfloat16)
    jaxpr = jaxpr_of(amped(fn, low), *args)
    for primitive in ("mul", "add", "tanh"):
        assert dtypes_of(primitive, jaxpr) == ["float32"]
    assert matmul_dtypes(jaxpr) == [("bfloat16", "bfloat16")]


@both
def test_float64_is_untouched(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.tanh(x @ w) @ w.T + 1e-12

    with jax.enable_x64(True):
        args = jr.normal(jr.key(0), (3, 4), jnp.float64), jr.normal(jr.key(1), (4, 5), jnp.float64)
        assert matmul_dtypes(jaxpr_of(amped(fn, low), *args)) == [("float64", "float64")] * 2
        np.testing.assert_array_equal(amped(fn, low)(*args), jax.jit(fn)(*args))
        assert jax.grad(lambda *xs: amped(fn, low)(*xs).sum())(*args).dtype == jnp.float64


# -- buffers

ROWS = 64


@both
def test_float32_update_into_a_low_buffer_casts_no_buffer(low: Any):
    def fn(x: jax.Array, w: jax.Array, row: jax.Array) -> jax.Array:
        buffer = lax.dynamic_update_slice(x @ w, jnp.exp(row)[None], (3, 0))
        return buffer @ w[:, :3]

    args = normal(0, ROWS, 6), normal(1, 6, 6), normal(2, 6)
    jaxpr = jaxpr_of(amped(fn, low), *args)
    assert dtypes_of("dynamic_update_slice", jaxpr) == [jnp.dtype(low).name]
    assert [eqn for eqn in casts(jaxpr) if eqn.outvars[0].aval.shape == (ROWS, 6)] == []
    assert_right(fn, low, *args, wrt=(0, 1, 2), rtol=2e-2)


@both
@pytest.mark.parametrize("write", ["dynamic_update_slice", "scatter"])
def test_low_update_into_a_float32_buffer_casts_no_buffer(write: str, low: Any):
    def fn(cache: jax.Array, x: jax.Array, w: jax.Array) -> jax.Array:
        update = x @ w
        return lax.dynamic_update_slice(cache, update, (3, 0)) if write != "scatter" else cache.at[3].set(update[0])

    args = normal(0, ROWS, 4), normal(1, 1, 6), normal(2, 6, 4)
    jaxpr = jaxpr_of(amped(fn, low), *args)
    assert not [eqn for eqn in casts(jaxpr) if eqn.outvars[0].aval.shape == (ROWS, 4)]
    assert dtypes_of(write, jaxpr) == ["float32"]
    out = amped(fn, low)(*args)
    np.testing.assert_array_equal(np.delete(out, 3, 0), np.delete(args[0], 3, 0))


@both
def test_cache_carried_by_a_scan_is_not_cast_whole(low: Any):
    def fn(cache: jax.Array, xs: jax.Array, w: jax.Array) -> jax.Array:
        def step(cache: jax.Array, x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
            i, row = x
            return lax.dynamic_update_slice(cache, row[None] @ w, (i, 0)), None

        return lax.scan(step, cache, (jnp.arange(len(xs)), xs))[0]

    args = normal(0, ROWS, 4), normal(1, 5, 6), normal(2, 6, 4)
    jaxpr = jaxpr_of(amped(fn, low), *args)
    assert matmul_dtypes(jaxpr) == [(jnp.dtype(low).name,) * 2]
    assert not [eqn for eqn in casts(jaxpr) if eqn.outvars[0].aval.shape == (ROWS, 4)]


# -- casts


@both
def test_operand_of_three_matmuls_is_cast_once(low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        exact = jnp.exp(w)
        return jnp.tanh(jnp.tanh(x @ exact) @ exact) @ exact

    jaxpr = jaxpr_of(amped(fn, low), normal(0, 3, 4), normal(1, 4, 4))
    assert len(matmul_dtypes(jaxpr)) == 3
    assert len([eqn for eqn in casts(jaxpr) if eqn.outvars[0].aval.shape == (4, 4)]) == 1


CARRIED = ("reshape", "transpose", "broadcast_in_dim", "squeeze", "copy")


def chains(jaxpr: Any) -> Iterator[Any]:
    """Casts from low to float32 and back again, with nothing but changes of shape between."""
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)
    made_by = {id(var): eqn for eqn in jaxpr.eqns for var in eqn.outvars}  # a literal has no hash
    for eqn in jaxpr.eqns:
        for inner in jec.jaxprs_in_params(eqn.params):
            yield from chains(inner)
        if eqn.primitive.name != "convert_element_type" or eqn.outvars[0].aval.dtype.itemsize != 2:
            continue
        source = made_by.get(id(eqn.invars[0]))
        while source is not None and source.primitive.name in CARRIED:
            source = made_by.get(id(source.invars[0]))
        widens = source is not None and source.primitive.name == "convert_element_type"
        if widens and source.invars[0].aval.dtype == eqn.outvars[0].aval.dtype:
            yield source


@both
@pytest.mark.promotes
@pytest.mark.parametrize("name", ["transformer", "eqx_norms", "eqx_attention", "linen_norms", "optax_softmax"])
def test_nothing_is_cast_up_and_down_again(name: str, low: Any):
    program = next(p for p in PROGRAMS if p.name == name)
    arrays, rest = _split(program.args())
    jaxpr = jaxpr_of(lambda arrays: amped(program.fn, low)(*_join(arrays, rest)), arrays)
    assert not list(chains(jaxpr))


def _split(args: Any) -> tuple[list[Any], Any]:
    leaves, tree = jax.tree.flatten(args)
    arrays = [x for x in leaves if isinstance(x, jax.Array)]
    return arrays, (tree, [None if isinstance(x, jax.Array) else x for x in leaves])


def _join(arrays: list[Any], rest: Any) -> Any:
    it = iter(arrays)
    return jax.tree.unflatten(rest[0], [next(it) if x is None else x for x in rest[1]])


@jax.custom_jvp
def _softsign(x: jax.Array) -> jax.Array:
    return x / (1 + jnp.abs(x))


_softsign.defjvps(lambda t, y, x: t / (1 + jnp.abs(x)) ** 2)

BETWEEN: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "tanh": jnp.tanh,
    "jit": jax.jit(lambda x: jnp.tanh(x) + x),
    "custom_jvp": _softsign,
    "checkpoint": jax.checkpoint(lambda x: jnp.tanh(x) + x),
    "cond": lambda x: lax.cond(x.shape[0] > jnp.array(2), lambda x: -x, lambda x: x + x, x),
    "reshape": lambda x: x.reshape(2, -1).T.reshape(x.shape),
}


@both
@pytest.mark.parametrize("between", BETWEEN)
def test_what_lies_between_two_matmuls_costs_no_cast(between: str, low: Any):
    def fn(x: jax.Array, w1: jax.Array, w2: jax.Array) -> jax.Array:
        return BETWEEN[between](x @ w1) @ w2

    args = normal(0, 4, 3), normal(1, 3, 6), normal(2, 6, 2)
    jaxpr = jaxpr_of(amped(fn, low), *args)
    of_floats = [eqn for eqn in casts(jaxpr) if jnp.issubdtype(eqn.invars[0].aval.dtype, jnp.floating)]
    assert of_floats == [], jaxpr  # parameters are rounded inside of the matmuls; the last one comes out in float32
    assert_right(fn, low, *args, wrt=(0, 1, 2), rtol=2e-2)


# -- loops


def _recurrence(h: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda h, _: (jnp.tanh(h @ w), None), h, length=4)[0]


@both
def test_scan_carry_keeps_float32_by_default(low: Any):
    args = normal(0, 2, 4), normal(1, 4, 4)
    jaxpr = jaxpr_of(amped(_recurrence, low), *args)
    assert dtypes_of("scan", jaxpr) == ["float32"]
    assert matmul_dtypes(jaxpr) == [(jnp.dtype(low).name,) * 2]
    assert_right(_recurrence, low, *args, wrt=(0, 1), rtol=2e-2)


@both
def test_scan_carry_is_low_under_fast(low: Any):
    args = normal(0, 2, 4), normal(1, 4, 4)
    fast = amped(_recurrence, low, amp_policy="fast")
    assert dtypes_of("scan", jaxpr_of(fast, *args)) == [jnp.dtype(low).name]
    assert fast(*args).dtype == jnp.float32
    assert_near(fast(*args), in_float64(_recurrence, *args), 5e-2)


# -- amp_stop


def _stop_inside(x: jax.Array, w: jax.Array) -> jax.Array:
    with jaxamp.amp_stop():
        return x @ w


@jaxamp.amp_stop
def _stop_decorator(x: jax.Array, w: jax.Array) -> jax.Array:
    return x @ w


@jax.jit
def _stop_inside_jit(x: jax.Array, w: jax.Array) -> jax.Array:
    with jaxamp.amp_stop():
        return x @ w


def _stop_around_jit(x: jax.Array, w: jax.Array) -> jax.Array:
    with jaxamp.amp_stop():
        return jax.jit(jnp.matmul)(x, w)


def _stop_inside_scan(x: jax.Array, w: jax.Array) -> jax.Array:
    return lax.scan(lambda _, row: (None, _stop_inside(row, w)), None, x)[1]


def _stop_around_scan(x: jax.Array, w: jax.Array) -> jax.Array:
    with jaxamp.amp_stop():
        return lax.scan(lambda _, row: (None, row @ w), None, x)[1]


def _stop_around_checkpoint(x: jax.Array, w: jax.Array) -> jax.Array:
    with jaxamp.amp_stop():
        return jax.checkpoint(jnp.matmul)(x, w)


STOPS = [
    _stop_inside,
    _stop_decorator,
    _stop_inside_jit,
    _stop_around_jit,
    _stop_inside_scan,
    _stop_around_scan,
    _stop_around_checkpoint,
]


@both
@pytest.mark.parametrize("stopped", STOPS, ids=lambda fn: fn.__name__.removeprefix("_stop_"))
def test_amp_stop_pins_float32_forwards_and_backwards(stopped: Callable[..., jax.Array], low: Any):
    def fn(x: jax.Array, w: jax.Array) -> jax.Array:
        return stopped(jnp.tanh(x @ w), w)

    args = normal(0, 3, 4), normal(1, 4, 4)
    name = jnp.dtype(low).name
    assert sorted(matmul_dtypes(jaxpr_of(amped(fn, low), *args))) == sorted([(name, name), ("float32", "float32")])
    of_gradient = matmul_dtypes(jaxpr_of(amped(jax.grad(lambda *xs: fn(*xs).sum(), (0, 1)), low), *args))
    kept = {("float32", "float32")}
    assert len([pair for pair in of_gradient if pair in kept]) >= 3
    assert_right(fn, low, *args, wrt=(0, 1), rtol=2e-2)


@both
def test_amp_stop_around_the_call_pins_it_and_only_it(low: Any):
    fn = amped(jnp.matmul, low)
    x, w = 1 + normal(0, 3, 4) / 8, normal(1, 4, 4)
    with jaxamp.amp_stop():
        pinned = fn(x, w)
    np.testing.assert_array_equal(pinned, jnp.matmul(x, w))
    assert (fn(x, w) != pinned).any()
    with jaxamp.amp_stop():
        np.testing.assert_array_equal(fn(x, w), pinned)


# -- devices


def _sharded_loss(w: jax.Array, x: jax.Array) -> jax.Array:
    def local(w: jax.Array, x: jax.Array) -> jax.Array:
        return lax.psum(jnp.sum(jnp.tanh(x @ w)), "devices")

    mesh = jax.make_mesh((8,), ("devices",), axis_types=(jax.sharding.AxisType.Auto,))
    return jax.shard_map(local, mesh=mesh, in_specs=(P(), P("devices")), out_specs=P())(w, x)


def _all_reduces(jaxpr: Any, shape: tuple[int, ...]) -> list[str]:
    return [
        eqn.outvars[0].aval.dtype.name
        for eqn in equations(jaxpr)
        if eqn.primitive.name.startswith("psum") and eqn.outvars[0].aval.shape == shape
    ]


@both
def test_gradient_all_reduce_is_float32_by_default(low: Any):
    w, x = normal(0, 4, 3), normal(1, 16, 4)
    gradient = jax.grad(amped(_sharded_loss, low))
    assert _all_reduces(jaxpr_of(gradient, w, x), w.shape) == ["float32"]
    assert_near(gradient(w, x), in_float64(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), w, x), 2e-2)


def test_gradient_all_reduce_is_low_where_the_policy_lowers_pvary():
    policy = {**jaxamp.default_amp_policy, primitives()["pvary"]: jaxamp.use_compute_precision}
    w, x = normal(0, 4, 3), normal(1, 16, 4)
    gradient = jax.grad(amped(_sharded_loss, jnp.bfloat16, amp_policy=policy))
    assert _all_reduces(jaxpr_of(gradient, w, x), w.shape) == ["bfloat16"]
    assert_near(gradient(w, x), in_float64(jax.grad(lambda w, x: jnp.sum(jnp.tanh(x @ w))), w, x), 3e-2)


@both
def test_a_wide_result_that_the_user_asks_of_low_operands_stays_wide(low: Any):
    def fn(x: jax.Array, w: jax.Array, b: jax.Array) -> jax.Array:
        y = lax.dot(x.astype(low), w.astype(low), preferred_element_type=jnp.float32)
        return (y + b - 1.0) @ jnp.ones((1, 1))

    one = jnp.ones((1, 1))
    np.testing.assert_allclose(amped(fn, low)(one, one, one * 1e-3), 1e-3, rtol=1e-2)
