"""The logic of the benchmarks: searches, ratios, verdicts and tables. That they run is seen in test_documents.py."""

import pytest

from benchmarks import memory


def counted(needed):
    asked = []

    def ask(batch):
        asked.append(batch)
        return needed(batch)

    return ask, asked


@pytest.mark.parametrize("limit", [1_000, 9_999, 10_000, 12_345, 123_456])
@pytest.mark.parametrize("fixed", [0, 500])
def test_the_largest_batch_is_found_in_few_compiles(limit, fixed):
    needed, asked = counted(lambda batch: fixed + 17 * batch + batch // 7)
    found = memory.largest(needed, limit, first=64, unit=4, probes=8)
    assert found % 4 == 0
    assert fixed + 17 * found + found // 7 <= limit
    if len(asked) < 8:
        assert fixed + 17 * (found + 4) + (found + 4) // 7 > limit
    assert found >= 0.9 * (limit - fixed) / 17.2 - 4


def test_the_largest_batch_is_one_that_was_seen_to_fit_when_memory_jumps():
    needed, asked = counted(lambda batch: 100 * batch + (5_000 if batch > 40 else 0))
    found = memory.largest(needed, 9_000, first=16, unit=1, probes=20)
    assert found in asked
    assert found == 40


def test_a_batch_that_fails_to_compile_does_not_fit():
    needed, _ = counted(lambda batch: None if batch >= 48 else 10 * batch)
    assert memory.largest(needed, 10_000, first=64, unit=4, probes=20) == 44


def test_no_batch_fits_where_the_parameters_alone_are_too_large():
    assert memory.largest(lambda batch: 5_000 + batch, 1_000, first=64, unit=4, probes=20) == 0
