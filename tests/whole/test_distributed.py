"""Two processes, each with half of the batch: they skip the same steps and hold the same model."""

import functools

import distributed_worker as worker
import jax
import pytest
from helpers import assert_same_bits, with_the_package

pytestmark = pytest.mark.slow  # two processes

KINDS = ("jit", "shard_map", "shard_map_unchecked")
TIMEOUT = 120


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    folder = tmp_path_factory.mktemp("distributed")
    return worker.run_two(worker.__file__, folder, with_the_package(), TIMEOUT)


@functools.cache
def alone(name):
    """The whole batch in one process, on one device."""
    return worker.train(jax.jit(worker.step_fn(worker.REDOS[name])))


def test_the_run_alone_skips_where_it_should():
    _, told = alone("skip")
    assert [now["skipped"] for now in told] == [0, 0, 1, 0, 1, 0]
    _, told = alone("redo")
    assert [now["skipped"] for now in told] == [0, 0, 1, 0, 0, 0]
    assert [now["total_redone"] for now in told] == [0, 0, 0, 0, 1, 1]


@pytest.mark.parametrize("name", worker.REDOS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_agree_on_bits(results, kind, name):
    first, second = (result[kind, name] for result in results)
    assert_same_bits(first, second)


@pytest.mark.parametrize("name", worker.REDOS)
@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_do_what_one_does(results, kind, name):
    """The same steps skipped and recomputed, at the same scales, and the same model in the end."""
    (params, opt_state, _), told = results[0][kind, name]
    (alone_params, alone_opt_state, _), alone_told = alone(name)
    assert told == alone_told
    assert_same_bits((params, opt_state), (alone_params, alone_opt_state))
    assert abs(params).max() > 0
