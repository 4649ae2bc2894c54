"""Random small programs: whatever is composed, the laws of `amp` hold."""

from typing import Any

import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import HealthCheck, given, settings
from random_programs import OPS, WRAPS, Steps, arguments, compose, text, types

import jaxamp

steps = st.lists(st.tuples(st.sampled_from(sorted(OPS)), st.sampled_from(sorted(WRAPS))), min_size=3, max_size=8)


def random_programs(examples: int) -> settings:
    quiet = list(HealthCheck)
    return settings(max_examples=examples, derandomize=True, deadline=None, database=None, suppress_health_check=quiet)


def assert_near(got: Any, want: Any, rtol: float) -> None:
    for x, y in zip(got, want, strict=True):
        x, y = np.asarray(x, np.float64), np.asarray(y, np.float64)
        np.testing.assert_allclose(x, y, rtol=0, atol=rtol * max(1.0, np.abs(y).max()))


@random_programs(15)
@given(chosen=steps, low=st.sampled_from([jnp.float16, jnp.bfloat16]))
def test_values_and_types_are_those_of_the_program(chosen: Steps, low: Any):
    program, args = compose(chosen), arguments()
    amped = jaxamp.amp(program, compute_dtype=low)
    out = amped(*args)
    assert types(out) == types(jax.eval_shape(program, *args))
    with jax.enable_x64(True):
        want = jax.tree.map(np.asarray, jax.jit(program)(*arguments(jnp.float64)))
    tolerance = 8 * len(chosen) * float(jnp.finfo(low).eps)
    assert_near(out, want, tolerance)
    twice = jaxamp.amp(amped, compute_dtype=low)
    for again in jax.jit(lambda *args: (amped(*args), twice(*args)))(*args):
        assert types(again) == types(out)
        assert_near(again, out, tolerance)


@random_programs(6)
@given(chosen=steps)
def test_gradient_commutes_with_amp(chosen: Steps):
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(compose(chosen)(x, w)[0]))

    args, low = arguments(), jnp.bfloat16
    of_amp = jax.jit(jax.grad(jaxamp.amp(loss, compute_dtype=low), (0, 1)))(*args)
    amp_of = jaxamp.amp(jax.grad(loss, (0, 1)), compute_dtype=low)(*args)
    assert types(of_amp) == types(amp_of)
    assert_near(of_amp, amp_of, 16 * len(chosen) * float(jnp.finfo(low).eps))


@random_programs(30)
@given(chosen=steps)
def test_empty_policy_leaves_the_jaxpr_equal(chosen: Steps):
    program, args = compose(chosen), arguments()
    assert text(jaxamp.amp(program, amp_policy={}), *args) == text(program, *args)
