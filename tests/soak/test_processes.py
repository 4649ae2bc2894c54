"""Two processes, of which one overflows: both skip, at the same scales, and hold the same model to the last bit."""

import functools
from collections import Counter

import distributed_worker as worker
import jax
import pytest
from helpers import ROOT, assert_same_bits, with_the_package
from soak import processes_worker as soak

pytestmark = pytest.mark.soak
TIMEOUT = 180
KINDS = ("jit", "shard_map", "shard_map_unchecked")


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    environment = with_the_package(PYTHONPATH=f"{ROOT}:{ROOT / 'tests'}")
    return worker.run_two(soak.__file__, tmp_path_factory.mktemp("processes"), environment, TIMEOUT)


@functools.cache
def alone(name):
    """The whole batch in one process, on one device."""
    return worker.train(jax.jit(worker.step_fn(worker.REDOS[name])), **soak.HOW)


@pytest.mark.parametrize("name", worker.REDOS)
@pytest.mark.parametrize("kind", KINDS)
def test_both_processes_skip_where_one_overflows(results, kind, name, figures):
    first, second = (result[kind, name] for result in results)
    assert_same_bits(first, second)
    (params, opt_state, _), told = first
    (alone_params, alone_opt_state, _), alone_told = alone(name)
    assert told == alone_told
    assert_same_bits((params, opt_state), (alone_params, alone_opt_state))
    assert abs(params).max() > 0
    planned = [soak.plan(step) for step in range(soak.STEPS)]
    hopeless = [i for i, (kind, _) in enumerate(planned) if kind in ("infinite", "nan")]
    assert all(told[i]["skipped"] for i in hopeless)
    by_process = Counter(planned[i][1] for i in hopeless)
    assert min(by_process[0], by_process[1]) > 10
    figures(
        f"{kind}, {name}",
        steps=soak.STEPS,
        skipped=told[-1]["total_skipped"],
        redone=told[-1]["total_redone"],
        overflows_of_the_first_alone=by_process[0],
        overflows_of_the_second_alone=by_process[1],
    )
