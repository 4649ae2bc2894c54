"""The facts about primitives are about primitives that there are."""

from jaxamp._compat import NOT_EVERYWHERE, primitives
from jaxamp._passes.masks import MASK
from jaxamp._primitives.fused_sum import TOTAL
from jaxamp._traits.table import FIXED, INTO_BUFFER, MOVES, ONE_TO_ONE, PLACES, POSITIONS, PRESERVES, SPREADS


def test_facts_and_tables_name_primitives_that_exist():
    known = set(primitives()) | NOT_EVERYWHERE | {MASK.name, TOTAL.name}
    for fact in (FIXED, INTO_BUFFER, MOVES, ONE_TO_ONE, PLACES, POSITIONS, PRESERVES, SPREADS):
        assert fact <= known
