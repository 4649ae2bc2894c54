"""Hundreds of random programs: numbers and gradients beside float64, dtypes, jaxprs, traces.

How far a program may be from float64 is asked of the program: it runs in float64 with noise of half a unit of the low
dtype on all that goes from one step to the next, and back.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from helpers import LOWS, both, error, in_float64, matmul_dtypes
from oracles import amped, with_gradients
from random_programs import OPS, SIZE, WRAPS, arguments, compose, text, types

import jaxamp

pytestmark = pytest.mark.soak
SEED, PROGRAMS, EACH = 70_000, 120, 8  # programs in all, and in a test
DRAWS = 6  # of the noise
RESPONSES = 2.0  # an error is at most that many times the largest that noise makes

# Without kinks, at which a gradient in float64 jumps too.
SMOOTH = {**OPS, "relu": lambda x, w: jax.nn.silu(x), "exp": lambda x, w: jnp.exp(jnp.tanh(x))}


def steps(seed):
    rng = np.random.default_rng((SEED, seed))
    return [(str(rng.choice(sorted(OPS))), str(rng.choice(sorted(WRAPS)))) for _ in range(rng.integers(3, 9))]


def program(chosen):
    whole = compose(chosen, SMOOTH)
    return lambda x, w: whole(x, w)[0]


@jax.custom_vjp
def jitter(x, forwards, backwards):
    return x * (1 + forwards)


jitter.defvjp(lambda x, f, b: (x * (1 + f), b), lambda b, ct: (ct * (1 + b), None, None))


def noisy(chosen):
    """The program with noise before each step."""

    def run(x, w, noise):
        for step, (for_x, for_w) in zip(chosen, noise, strict=True):
            x = program([step])(jitter(x, *for_x), jitter(w, *for_w))
        return jitter(x, *noise[0][0])

    return run


def responses(chosen, args, want, dtypes):
    """For each dtype and each result, the largest relative error that noise of half a unit makes, in float64."""
    rng = np.random.default_rng(len(chosen))
    noise = rng.choice([-0.5, 0.5], (DRAWS, len(chosen), 2, 2, SIZE, SIZE))

    def drawn(x, w, noise):
        return jax.vmap(lambda n: with_gradients(noisy(chosen), (0, 1))(x, w, n))(noise)

    found = [in_float64(drawn, *args, noise * float(jnp.finfo(low).eps)) for low in dtypes]
    return [
        [
            max(error(draw, exact) for draw in draws) if exact.any() else 0.0
            for draws, exact in zip(jax.tree.leaves(f), want, strict=True)
        ]
        for f in found
    ]


def oracle(seed):
    """What a program and its gradients are in float64, and how they respond to noise in each dtype."""
    chosen, args = steps(seed), arguments()
    want = jax.tree.leaves(in_float64(with_gradients(program(chosen), (0, 1)), *args))
    return want, dict(zip(LOWS, responses(chosen, args, want, LOWS), strict=True))


@pytest.mark.parametrize("first", range(0, PROGRAMS, EACH))
def test_random_programs_and_their_gradients_are_near_float64(first, figures):
    ratios = {low: [] for low in LOWS}
    for seed in range(first, first + EACH):
        want, allowed = oracle(seed)
        for low in LOWS:
            ratios[low] += ratios_of(seed, low, want, allowed[low])
    for low, found in ratios.items():
        figures(low.__name__, programs=EACH, comparisons=len(found), of_the_error_that_noise_makes=max(found))


def ratios_of(seed, low, want, allowed):
    """The errors of a program's value and gradients, over those that noise makes."""
    chosen, args = steps(seed), arguments()
    fn = program(chosen)
    ways = {
        "gradients of amp": jax.jit(with_gradients(amped(fn, low), (0, 1))),
        "amp of gradients": amped(with_gradients(fn, (0, 1)), low),
    }
    shapes, ratios = jax.eval_shape(with_gradients(fn, (0, 1)), *args), []
    for way, run in ways.items():
        got = run(*args)
        assert types(jax.tree.leaves(got)) == types(jax.tree.leaves(shapes))
        for name, g, x, response in zip(("value", "dx", "dw"), jax.tree.leaves(got), want, allowed, strict=True):
            assert np.isfinite(g).all()
            if not x.any():
                assert not np.any(g)
                continue
            off = error(g, x)
            ratios.append(off / (response + 1e-6))
            assert ratios[-1] < RESPONSES, (
                f"program {seed} of base seed {SEED}, {chosen}: {name} of {way} in {low.__name__} is {off:.2g} from "
                f"float64, and noise makes {response:.2g}"
            )
    return ratios


@both
@pytest.mark.parametrize("first", range(0, PROGRAMS, EACH))
def test_random_programs_keep_the_laws_of_jaxprs(first, low, figures):
    for seed in range(first, first + EACH):
        chosen, args = steps(seed), arguments()
        fn, traces = compose(chosen), []

        def counted(x, w, fn=fn, traces=traces):
            traces.append(x)
            return fn(x, w)

        ran = amped(counted, low)
        name = f"program {seed} of base seed {SEED}, {chosen}"
        assert text(jaxamp.amp(fn, compute_dtype=low, amp_policy={}), *args) == text(fn, *args), name
        once, jaxpr = amped(fn, low), jax.make_jaxpr(amped(fn, low))(*args)
        assert text(amped(once, low), *args) == text(once, *args), name
        backward = jax.make_jaxpr(with_gradients(lambda x, w, once=once: once(x, w)[0], (0, 1)))(*args)
        for pair in (*matmul_dtypes(jaxpr), *matmul_dtypes(backward)):
            assert pair == (low.__name__,) * 2, name
        first_call, traced = ran(*args), len(traces)
        second_call = ran(*args)
        assert len(traces) == traced, name
        assert [np.asarray(x).tobytes() for x in first_call] == [np.asarray(x).tobytes() for x in second_call], name
    figures(low.__name__, programs=EACH)
